"""An exported package as text: chosen kernels, the host code that launches them, setup.py and checks.

The package needs a compiler and torch where it is built and nothing of attnforge. Its files, by relative path:

    setup.py verify.py README.md [run.sh]
    <name>/__init__.py  binding.cpp (torch operators)  <name>.cu | .cpp, kernels.h (table of kernels)
    <name>/native/*.h (the launcher's headers: memory, arguments, launches)
    <name>/kernels/<slug>.cu | .cpp

For Hugging Face's `kernels` also build_variant.py, which builds all this into build/<variant>/.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from keyword import iskeyword
from sys import stdlib_module_names
from typing import Any

from attnforge import __version__
from attnforge.codegen import host_sources
from attnforge.codegen.plan import Launch, Plan
from attnforge.codegen.render import Source, environment, render
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Spec
from attnforge.codegen.variant import describe

DTYPES = {DType.FLOAT32: "float32", DType.FLOAT16: "float16", DType.BFLOAT16: "bfloat16"}
MASKS = tuple(mask.value for mask in Mask)  # numbered as `enum MaskKind` of codegen/variant.py
_NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")
_HUB_NAME = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")  # what `kernels` takes
_RESERVED = {
    "attnforge",
    "torch",
    "numpy",
    "setuptools",
    "setup",
    "verify",
    "build_variant",
    "std",
    "at",
    "c10",
    "kernels",
    "binding",
    "native",
}
# setup.py runs in the folder that holds the package, and would import it in the place of another module.
_TAKEN = _RESERVED | stdlib_module_names


@dataclass(frozen=True)
class Item:
    """One exported kernel: `size` query rows it was chosen for, and why it was taken."""

    spec: Spec
    size: int
    reason: str

    @cached_property
    def source(self) -> Source:
        return render(self.spec)

    @property
    def plan(self) -> Plan:
        return self.source.plan

    @property
    def description(self) -> str:
        return describe(self.source)


class Contract(Enum):
    """An interface of others that an exported package keeps to."""

    OPENKERNEL = "openkernel"  # forward(q, k, v, mask) of the OpenKernel challenge
    # A repository of Hugging Face's package `kernels`: attention(), build/<variant>/.
    HF_KERNELS = "hf-kernels"


@dataclass(frozen=True)
class Revision:
    """State of the git checkout of attnforge that writes a package."""

    commit: str
    dirty: bool


@dataclass(frozen=True)
class Tree:
    """What to write: a package called `name` with these kernels, for a `contract` or with attnforge's interface.

    Raises ValueError for a name that is no module's, for no kernels, or for kernels of several targets.
    """

    name: str
    arch: Arch  # compiled for; its kernels may be those of a target that it runs as well (sm90a runs sm90)
    items: tuple[Item, ...]
    contract: Contract | None = None
    revision: Revision | None = None  # recorded by the contract hf-kernels; None: not a git checkout

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name in _TAKEN or iskeyword(self.name):
            raise ValueError(
                f"name: got {self.name!r}, expected a lower-case module name that is not taken, such as my_attention"
            )
        if self.hub and not _HUB_NAME.fullmatch(self.name.replace("_", "-")):
            raise ValueError(
                f"name: got {self.name!r}, expected two characters or more, the last one no underscore"
            )
        if not self.items:
            raise ValueError("export: got no kernel, expected at least one")
        unions = [i.spec.slug for i in self.items if i.spec.problem.unions]
        if unions:
            raise ValueError(
                f"export: {unions[0]} is for several intervals or planes, which exported packages do not support"
            )
        alien = [i.spec.slug for i in self.items if i.spec.problem.arch.is_gpu is not self.arch.is_gpu]
        if alien:
            raise ValueError(f"export: {alien[0]} does not run on {self.arch.value}")

    @property
    def openkernel(self) -> bool:
        return self.contract is Contract.OPENKERNEL

    @property
    def hub(self) -> bool:
        return self.contract is Contract.HF_KERNELS

    @property
    def metadata(self) -> dict[str, Any]:
        """metadata.json of a build variant of `kernels`, without what is known where it is built: id and digest."""
        builder: dict[str, Any] = {"version": f"attnforge {__version__}"}
        if self.revision is not None:
            builder |= {"sha": self.revision.commit, "dirty": self.revision.dirty}
        backend = {"type": "cuda", "archs": [self.capability]} if self.gpu else {"type": "cpu"}
        return {
            "name": self.name.replace("_", "-"),
            "license": "apache-2.0",
            "python-depends": [],
            "backend": backend,
            "provenance": {"kernel-builder": builder},
        }

    @property
    def gpu(self) -> bool:
        return self.arch.is_gpu

    @property
    def suffix(self) -> str:
        return ".cu" if self.gpu else ".cpp"

    @property
    def capability(self) -> str:
        """The format of TORCH_CUDA_ARCH_LIST: 8.9, 9.0a."""
        digits = self.arch.value[2:]
        number = digits.rstrip("a")
        return f"{number[:-1]}.{number[-1]}{digits[len(number) :]}"

    @property
    def launches(self) -> list[Launch]:
        return [x for item in self.items for x in (*item.plan.schedule, *item.plan.launches)]

    @property
    def masks(self) -> list[str]:
        present = {item.spec.problem.mask.value for item in self.items}
        return [name for name in MASKS if name in present]

    @property
    def backward(self) -> bool:
        return any(item.spec.problem.direction is Direction.BACKWARD for item in self.items)

    @property
    def head_dims(self) -> list[str]:
        pairs = {(i.spec.problem.head_dim, i.spec.problem.head_dim_v) for i in self.items}
        return [str(d) if d == dv else f"{d} (v: {dv})" for d, dv in sorted(pairs)]

    @property
    def dtype_names(self) -> str:
        present = {item.spec.problem.dtype for item in self.items}
        names = [name for dtype, name in DTYPES.items() if dtype in present]
        return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"

    @property
    def cases(self) -> list[tuple[str, int, int, str, bool]]:
        """What verify.py checks: (dtype, head_dim, head_dim_v, mask, has gradients) of every forward kernel."""
        found: dict[tuple[str, int, int, str], set[Direction]] = {}
        for item in self.items:
            p = item.spec.problem
            found.setdefault((DTYPES[p.dtype], p.head_dim, p.head_dim_v, p.mask.value), set()).add(
                p.direction
            )
        both = ((key, present) for key, present in sorted(found.items()) if Direction.FORWARD in present)
        return [(*key, Direction.BACKWARD in present) for key, present in both]

    def files(self, command: str) -> dict[str, str]:
        """Text of every file by relative path; `command` is named as what wrote them."""
        if not self.hub:
            return self._files(command, self.name)
        # Two versions of a kernel may be loaded in one process: their operators are in namespaces of their own.
        texts = self._files(command, self.name)
        digest = hashlib.sha256("\0".join(x for item in sorted(texts.items()) for x in item).encode())
        target = "cuda" if self.gpu else "cpu"
        return self._files(command, f"_{self.name}_{target}_{digest.hexdigest()[:10]}")

    def _files(self, command: str, namespace: str) -> dict[str, str]:
        """The same with operators torch.ops.<namespace>."""
        inner = {
            "__init__.py": "init.py.jinja",
            "binding.cpp": "binding.cpp.jinja",
            "kernels.h": "kernels.h.jinja",
            f"{self.name}{self.suffix}": "table.jinja",
        }
        outer = {"setup.py": "setup.py.jinja", "verify.py": "verify.py.jinja", "README.md": "README.md.jinja"}
        if self.openkernel and self.gpu:
            outer["run.sh"] = "run.sh.jinja"
        if self.hub:
            outer["build_variant.py"] = "build_variant.py.jinja"
        paths = {f"{self.name}/{path}": template for path, template in inner.items()} | outer
        texts = {path: self._render(template, command, namespace) for path, template in paths.items()}
        kernels = {f"{self.name}/kernels/{item.source.file_name}": item.source.text for item in self.items}
        host = {
            f"{self.name}/native/{name}": text for name, text in host_sources.sources("attention.h").items()
        }
        return texts | host | kernels

    def _render(self, template: str, command: str, namespace: str) -> str:
        numbers = {name: i for i, name in enumerate(MASKS)}
        return (
            environment()
            .get_template(f"export/{template}")
            .render(tree=self, numbers=numbers, command=command, namespace=namespace)
        )


def unique(items: Iterable[Item]) -> tuple[Item, ...]:
    """Each spec once, by slug; of several sizes that it was chosen for, the largest."""
    kept: dict[str, Item] = {}
    for item in sorted(items, key=lambda item: item.size):
        kept[item.spec.slug] = item
    return tuple(kept[slug] for slug in sorted(kept))
