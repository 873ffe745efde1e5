# make search   find the fastest kernel for a BAGEL pack, on the GPU if there is one, else on the CPU
# make test     run every test that this machine can run
# make lint     ruff and mypy
# make clean    remove the environment and all caches of tools (not the kernel cache: python cli.py cache clear)
#
# Each creates the virtual environment .venv first, and does nothing about it while it is current.
#   PYTHON=python3.12   the interpreter to create it with (3.10 or newer)
#   ARGS="..."          more arguments for the search or for pytest
#   SYSTEM=1            use the packages that PYTHON already has (torch included) and download nothing

PYTHON ?= python3
SYSTEM ?= 0
ARGS ?=

ifeq ($(SYSTEM),1)
VENV := .venv-system
else
VENV := .venv
endif
PY := $(VENV)/bin/python
READY := $(VENV)/ready

.PHONY: search test lint clean venv

search: $(READY)
	$(PY) cli.py search $(ARGS)

test: $(READY)
	$(PY) -m pytest $(ARGS)

# The package is the repository root under the name attnforge, a mapping that mypy only understands as a path.
lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@mkdir -p $(VENV)/mypy && ln -sfn ../.. $(VENV)/mypy/attnforge
	cd $(VENV)/mypy && MYPYPATH=.:attnforge/tests ../bin/python -m mypy --config-file ../../pyproject.toml \
		-p attnforge.codegen -p attnforge.runtime -p attnforge.bagel -m attnforge.cli
	MYPYPATH=$(VENV)/mypy $(PY) -m mypy tests

venv: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "attnforge needs Python >= 3.10, and \
	$(PYTHON) is " + sys.version.split()[0] + "; name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)")'
ifeq ($(SYSTEM),1)
	$(PYTHON) -m venv --clear --system-site-packages $(VENV)
	$(PY) -m pip install --quiet --no-index --no-deps --no-build-isolation --editable .
else
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check "setuptools>=77"
	$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt --editable ".[dev]"
endif
	@touch $@

clean:
	rm -rf .venv .venv-system .pytest_cache .mypy_cache .ruff_cache .hypothesis build attnforge.egg-info
