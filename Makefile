# make search   find the fastest kernel for a BAGEL pack, on the GPU if there is one, else on the CPU
# make test     run every test that this machine can run, with two processes more than cores (ARGS="-m slow": slow ones)
# make fuzz     run random problems for SECONDS (60), on the GPU if there is one: docs/reliability.md
# make docs     build the documentation's site into build/site, links checked; the first time installs what it takes
# make lint     ruff and mypy
# make wheels   build and check sdist and wheel, and try the wheel with every Python found and two versions of torch
# make clean    remove the environment and what tools left (not the kernel cache: python cli.py cache clear)
#
# All but clean create the virtual environment .venv first, and do nothing about it while it is current.
#   PYTHON=python3.12   the interpreter to create it with (3.10 or newer)
#   ARGS="..."          more arguments for the search, pytest or the random problems
#   SYSTEM=1            create nothing, download nothing: run with the packages that PYTHON already has

PYTHON ?= python3
SYSTEM ?= 0
ARGS ?=
SECONDS ?= 60

# .path/attnforge is the repository root under the name of its package, for tools that follow paths only.
LINK := .path/attnforge

ifeq ($(SYSTEM),1)
READY := system
PY := PYTHONPATH="$(CURDIR)/.path$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON)
else
READY := .venv/ready
PY := .venv/bin/python
endif

# Folders of tests/ that modules are imported from by their bare names, for mypy; pytest has `pythonpath`.
ROOMS := $(patsubst %/,%,$(sort $(dir $(wildcard tests/*/*.py tests/*/*/*.py))))

# What SYSTEM=1 takes for granted, by the names that are imported.
NEEDS := torch numpy scipy jinja2 click rich platformdirs filelock ninja PIL setuptools

# The first target: bare `make` prints the comment at the top of this file.
help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

.PHONY: help search test fuzz docs lint wheels clean venv python system

search: $(READY)
	$(PY) cli.py search $(ARGS)

test: NEEDS += pytest hypothesis
test: $(READY)
	$(PY) -m pytest $$($(PY) -c "import xdist; print('--numprocesses auto --maxprocesses 16 --dist worksteal')" 2>&-) $(ARGS)

fuzz: $(READY)
	$(PY) tests/fuzzing/fuzz.py --seconds $(SECONDS) $(ARGS)

docs: NEEDS += mkdocs material mkdocstrings mkdocs_click nbconvert latex2mathml
docs: $(if $(filter 1,$(SYSTEM)),$(READY),.venv/docs) $(LINK)
	PYTHONPATH=.path $(PY) -m mkdocs build --strict
	@echo "open build/site/index.html"

.venv/docs: .venv/ready
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		-c constraints.txt --editable ".[docs]"
	@touch $@

lint: $(READY) $(LINK)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	MYPYPATH=.path $(PY) -m mypy -p attnforge.codegen -p attnforge.runtime -p attnforge.bagel -m attnforge.cli
	MYPYPATH=$(subst $() ,:,.path $(ROOMS) examples benchmarks) $(PY) -m mypy tests examples

wheels:
	$(PYTHON) .ci/wheels.py $(ARGS)

venv: $(READY)

.venv/ready: pyproject.toml constraints.txt | python
	@echo "installing torch and the tools into .venv: minutes, and over 5 GB on disk if pip takes torch's CUDA build"
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check "setuptools>=77"
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		-c constraints.txt --editable ".[dev]"
	@touch $@

system: $(LINK) | python
	@$(PYTHON) -c "import importlib.util as u, sys; \
	names = '$(NEEDS)'.split(); \
	lacks = [n for n in names if u.find_spec(n) is None]; \
	sys.exit('SYSTEM=1, but $(PYTHON) lacks ' + ', '.join(lacks) if lacks else 0)"

python:
	@$(PYTHON) -c "import sys; sys.exit(0 if sys.version_info >= (3, 10) else \
	'attnforge needs Python 3.10 or newer and $(PYTHON) is ' + sys.version.split()[0] + \
	'; name another one: make $(MAKECMDGOALS) PYTHON=python3.12')"

$(LINK):
	@mkdir -p $(@D) && ln -sfn .. $@

clean:
	rm -rf .venv .path .pytest_cache .mypy_cache .ruff_cache .hypothesis build attnforge.egg-info
