"""What `register_veomni` and `register_nemo` have in common: symbols of packages whose interfaces change."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

NAME = "attnforge"


def symbols(caller: str, package: str, needed: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """The modules that have the needed names, by module.

    Raises ImportError if the package is not installed, and RuntimeError naming its version and each name that is
    missing, or the module that cannot be imported.
    """
    root = next(iter(needed)).partition(".")[0]
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        version = "of an unknown version"
    modules: dict[str, Any] = {}
    missing = []
    for name, attributes in needed.items():
        try:
            modules[name] = importlib.import_module(name)
        except ImportError as error:
            if isinstance(error, ModuleNotFoundError) and error.name == root:
                raise ImportError(f"{caller}: {package} is not installed") from None
            missing.append(f"{name} cannot be imported: {error}")
            continue
        missing += [f"{name}.{x} is missing" for x in attributes if not hasattr(modules[name], x)]
    if missing:
        raise RuntimeError(
            f"{caller}: attnforge does not know {package} {version}; nothing is registered:\n  "
            + "\n  ".join(missing)
        )
    return modules


def replace_everywhere(package: str, name: str, original: Any, ours: Any) -> None:
    """Bind `ours` to `name` in each imported module of the package that has `original` under this name."""
    for module_name, module in list(sys.modules.items()):
        inside = module_name == package or module_name.startswith(f"{package}.")
        if inside and module is not None and vars(module).get(name) is original:
            setattr(module, name, ours)


def marked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which `is_ours` then recognizes: a second registration changes nothing."""
    function._attnforge = True  # type: ignore[attr-defined]
    return function


def is_ours(function: object) -> bool:
    return getattr(function, "_attnforge", False) is True
