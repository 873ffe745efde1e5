"""Rules that hold for every file of the package, read from its syntax."""

from __future__ import annotations

import ast
import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent
FILES = [
    path for folder in ("codegen", "runtime", "bagel") for path in sorted((ROOT / folder).rglob("*.py"))
] + sorted(ROOT.glob("*.py"))
ids = [str(path.relative_to(ROOT)) for path in FILES]

# What is read back from disk must never become code, and no string may reach a shell.
BANNED_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load"}

# Rooms of tests/ besides those that are named after folders of the package.
TESTS = ROOT / "tests"
ROOMS = {"kernels", "fuzzing"}

LONGEST = 50  # lines of a function, signature and docstring included

# Each package may import those to its right: cli.py -> bagel -> runtime -> codegen.
ARROW = ("cli", "bagel", "runtime", "codegen")


# What a room (folder) may import besides its own modules: rooms, meaning the modules right in them, or single modules.
# bagel/commands, above all of them, may import any. A line is exact: what nobody uses any more must go.
ALLOWED = {
    "codegen": {"codegen.families"},
    "codegen.families": {"codegen.cpu_features", "codegen.plan", "codegen.spec"},
    "runtime": {
        "codegen",
        "codegen.families",
        "runtime.build",
        "runtime.distributed.dtensor",
        "runtime.native",
    },
    "runtime.build": {"codegen"},
    "runtime.native": {
        "codegen",
        "runtime.build",
        "runtime.canary",
        "runtime.dispatch",
        "runtime.inputs",
        "runtime.integrations.flop_counter",
        "runtime.integrations.transforms",
        "runtime.kernels",
    },
    "runtime.search": {"codegen", "codegen.families", "runtime", "runtime.build"},
    "runtime.integrations": {"codegen", "runtime", "runtime.build", "runtime.native"},
    "runtime.distributed": {"codegen", "runtime"},
    "runtime.doctor": {"codegen", "runtime", "runtime.build", "runtime.native"},
    "bagel": {"bagel.trainer", "runtime"},
    "bagel.trainer": {"bagel", "codegen", "runtime", "runtime.build", "runtime.integrations"},
    "bagel.mot": {"bagel", "runtime", "runtime.distributed"},
    "bagel.challenge": {"runtime", "runtime.search"},
    "bagel.measure": {
        "bagel",
        "bagel.challenge",
        "codegen",
        "codegen.families",
        "runtime",
        "runtime.build",
        "runtime.search",
    },
    "bagel.pictures": {"bagel", "bagel.measure", "runtime"},
    "bagel.report": {
        "bagel",
        "bagel.measure",
        "bagel.pictures",
        "codegen",
        "codegen.families",
        "runtime",
        "runtime.search",
    },
}


@cache
def parsed(path: Path) -> ast.Module:
    """Several rules read each file; nobody changes the tree."""
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Modules that are imported anywhere in the file, `from a import b` as `a.b`; by name, too."""
    return (*_imports(parsed(path)),)


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            yield from (
                x.value for x in node.args if isinstance(x, ast.Constant) and isinstance(x.value, str)
            )


def module_name(path: Path) -> str:
    """`runtime.build.cache`; of a folder's __init__.py the folder's name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def dependencies() -> dict[str, set[str]]:
    """The modules of the package that each module imports anywhere, lazily and for type checkers, too."""
    files = {module_name(path): path for path in FILES}
    found: dict[str, set[str]] = {}
    for module, path in files.items():
        names = (name.removeprefix("attnforge.") for name in imports(path))
        # `a.b.c` is module a.b.c, or c out of a.b.
        targets = {name if name in files else name.rpartition(".")[0] for name in names}
        found[module] = (targets & files.keys()) - {module}
    return found


def room_of(module: str) -> str:
    return module if (ROOT / module.replace(".", "/")).is_dir() else module.rpartition(".")[0]


def test_imports_run_in_no_circle() -> None:
    graph = dependencies()
    assert len(graph) > 100
    assert "codegen.families.sm90" in graph["codegen.families"]

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        return seen

    after = {module: reached(module) for module in graph}
    circles = {
        frozenset(other for other in after[module] if module in after[other])
        for module in graph
        if module in after[module]
    }
    assert not circles, sorted(map(sorted, circles))


def test_rooms_import_what_they_may() -> None:
    used: dict[str, set[str]] = {room: set() for room in ALLOWED}
    for module, targets in dependencies().items():
        room = room_of(module)
        if room not in ALLOWED:
            assert room in ("", "bagel.commands"), f"{room} is not in ALLOWED"
            continue
        for target in targets:
            if room_of(target) == room:
                continue
            allowed = ALLOWED[room] & {target, room_of(target)}
            assert allowed, f"{module} imports {target}"
            used[room] |= allowed
    unused = {room: ALLOWED[room] - used[room] for room in ALLOWED if ALLOWED[room] - used[room]}
    assert not unused, "take these out of ALLOWED"


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_nothing_turns_data_into_code(path: Path) -> None:
    tree = parsed(path)
    for name in imports(path):
        assert name.partition(".")[0] not in BANNED_MODULES, f"imports {name}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        where = f"{path.name}:{node.lineno}"
        assert ast.unparse(node.func) not in BANNED_CALLS, f"{where} calls {ast.unparse(node.func)}"
        for keyword in node.keywords:
            assert keyword.arg not in ("shell", "allow_pickle") or (
                isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            ), f"{where} passes {keyword.arg}"


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_imports_follow_the_arrow(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if room not in ARROW:
        return  # __init__.py: only names, loaded at first use
    # Names for type checkers and lazy imports count too: they are dependencies of thought.
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "attnforge" and parts[1] in ARROW:
            assert ARROW.index(parts[1]) >= ARROW.index(room), f"{room} imports {name}"
        assert not (room == "codegen" and parts[0] == "torch"), "codegen imports torch"


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_every_file_has_a_docstring_and_postponed_annotations(path: Path) -> None:
    tree = parsed(path)
    if not tree.body:
        return
    assert ast.get_docstring(tree), "no docstring"
    if any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in ast.walk(tree)):
        assert "__future__.annotations" in imports(path)


def test_no_function_is_long() -> None:
    """What takes more than about 40 lines holds two things, but for one with many arguments to explain."""
    paths = [*FILES, *(path for room in ("benchmarks", "examples") for path in (ROOT / room).glob("*.py"))]
    sizes = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in paths
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert len(sizes) > 500
    assert {name: size for name, size in sizes.items() if size > LONGEST} == {}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "runtime" / "native").glob("*.[ch]*")), ids=lambda path: path.name
)
def test_no_line_of_c_is_too_long(path: Path) -> None:
    long = [n for n, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 120]
    assert not long


def test_every_test_lies_in_the_room_of_what_it_tests() -> None:
    """tests/runtime/search/ tests runtime/search/. Base names are unique: files import each other by them."""
    paths = [path for path in TESTS.rglob("*.py") if "bagel_standin" not in path.parts]
    of_all = (Path(__file__), *(TESTS / f"test_{name}.py" for name in ("docs", "kept", "site")))
    tests = [path for path in paths if path.name.startswith("test_") and path not in of_all]
    assert len(tests) > 50
    rooms = {path.relative_to(TESTS).parent.as_posix() for path in tests} - ROOMS
    assert "." not in rooms
    assert {room for room in rooms if not (ROOT / room).is_dir()} == set()
    names = [path.name for path in paths]
    assert {name for name in names if names.count(name) > 1} == set()


def test_pytest_enters_every_folder_with_tests(pytestconfig: pytest.Config) -> None:
    """Its own list of folders to leave out has `build`, the name of one of ours."""
    folders = {part for path in TESTS.rglob("test_*.py") for part in path.relative_to(TESTS).parts[:-1]}
    patterns = pytestconfig.getini("norecursedirs")
    assert not {name for name in folders for pattern in patterns if fnmatch(name, pattern)}


def test_rendering_and_the_cache_need_no_torch() -> None:
    """Compiling ahead of time, listing the cache and the workers of a search start fast."""
    code = "import sys, attnforge.codegen.render, attnforge.runtime.build.cache; sys.exit('torch' in sys.modules)"
    assert subprocess.run((sys.executable, "-c", code)).returncode == 0


def test_pinned_packages_take_the_oldest_python() -> None:
    """Otherwise `make test` cannot install there; the documentation's packages, pinned last, are another matter."""
    oldest = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    pins, _, of_docs = (ROOT / "constraints.txt").read_text().partition("# What the documentation's site")
    assert oldest
    assert of_docs
    refusing = {}
    for name in re.findall(r"^([\w.-]+)==", pins, re.MULTILINE):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found = metadata.metadata(name)
            if "Requires-Python" in found and not SpecifierSet(found["Requires-Python"]).contains(oldest[1]):
                refusing[name] = found["Requires-Python"]
    assert refusing == {}


def test_no_flag_relaxes_arithmetic() -> None:
    from attnforge.runtime.build import nvrtc, toolchain

    flags = " ".join((*toolchain.NVCC_FLAGS, *toolchain.CPU_FLAGS, *nvrtc.FLAGS))
    for word in ("fast", "unsafe", "finite-math", "ftz", "prec-div", "reciprocal"):
        assert word not in flags


def test_every_package_is_in_the_wheel() -> None:
    """pyproject.toml lists them: a checkout works without, a wheel does not."""
    listed = re.findall(r'^    "(attnforge[\w.]*)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    folders = {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for path in FILES
        if path.name == "__init__.py"
    }
    assert sorted(listed) == sorted("attnforge" if name == "." else f"attnforge.{name}" for name in folders)


def test_the_folder_above_the_clone_is_not_on_sys_path() -> None:
    """Tests start processes with this path: a module in there could take the place of one of Python's."""
    assert str(ROOT.parent) not in sys.path
