"""The description of a kernel for host code, as text: a line for each field of the struct that native/variant.h reads.

name fwd_sm90a_bf16_d128_causal_...
backward 0
...
launches:                   starts the fields of one launch; likewise schedule: and tensor_maps:
  symbol attnforge_fwd_...
  grid tiles_m heads_q batch
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from attnforge.codegen.plan import Launch, TensorMap
from attnforge.codegen.render import Source
from attnforge.codegen.spec import Direction, Mask


@dataclass(frozen=True)
class Field:
    """One field of a C++ struct: its type, name and meaning, and how it follows from what the struct describes."""

    ctype: str
    name: str
    text: str
    value: Callable[[Any], object]


def _same(ctype: str, name: str, text: str, path: str = "") -> Field:
    """A field with the value of the attribute of that name, or of the one at `path`."""
    return Field(ctype, name, text, attrgetter(path or name))


def _reads(source: Source, index: str) -> bool:
    mask_mod = source.plan.spec.problem.mask_mod
    return bool(mask_mod) and mask_mod.reads(index)


_PROBLEM, _TUNING = "plan.spec.problem", "plan.spec.tuning"
# Of a codegen.render.Source.
VARIANT: tuple[Field, ...] = (
    _same("std::string", "name", "the spec's slug", "plan.spec.slug"),
    Field("bool", "backward", "", lambda s: s.plan.spec.problem.direction is Direction.BACKWARD),
    _same("at::ScalarType", "dtype", "", f"{_PROBLEM}.dtype.value"),
    _same("int64_t", "head_dim", "of q and k", f"{_PROBLEM}.head_dim"),
    _same("int64_t", "head_dim_v", "of v and out", f"{_PROBLEM}.head_dim_v"),
    _same("MaskKind", "mask", "", f"{_PROBLEM}.mask.value"),
    _same("int64_t", "intervals", "of queries that see a key of spans", f"{_PROBLEM}.intervals"),
    Field("bool", "planes", "spans of batch entries or heads", lambda s: bool(s.plan.spec.problem.planes)),
    _same("std::string", "mask_mod", "function of a dense mask as text, empty: bits", f"{_PROBLEM}.mask_mod"),
    Field("bool", "mod_of_batch", "does it read b?", lambda s: _reads(s, "b")),
    Field("bool", "mod_of_head", "does it read h?", lambda s: _reads(s, "h")),
    _same("std::string", "score", "its function as text, empty: none", f"{_PROBLEM}.score"),
    Field(
        "std::vector<std::string>",
        "score_tensors",
        "dtype and dimensions of what the score reads, then mask_mod",
        lambda s: tuple(f"{dtype}[{dims}]" for dtype, dims in s.plan.spec.problem.captured),
    ),
    Field(
        "std::vector<std::string>",
        "score_axes",
        "indices of tensors whose gradients are summed in bins (ScoreMod.axes)",
        lambda s: s.plan.spec.problem.score.axes if s.plan.score_bins else (),
    ),
    _same("int64_t", "align", "bytes that every row start must be a multiple of", f"{_PROBLEM}.align"),
    _same("int64_t", "tile_m", "queries of a tile", f"{_TUNING}.tile_m"),
    _same("int64_t", "tile_n", "keys of a tile", f"{_TUNING}.tile_n"),
    Field(
        "bool",
        "owner_n",
        "schedules list the query tiles of each key tile, not the reverse",
        lambda s: s.plan.owner == "n",
    ),
    _same("int64_t", "row_groups", "64-row groups of a query tile, each with a kv_range", "plan.row_groups"),
    _same("int64_t", "row_stats", "floats of delta for each query row and head", "plan.row_stats"),
    _same("bool", "dq_accum", "needs this workspace", "plan.dq_accum"),
    _same("bool", "dkv_accum", "needs this workspace", "plan.dkv_accum"),
    Field(
        "int64_t",
        "columns",
        "of a row of dq_accum, and of dk in dkv_accum",
        lambda s: s.plan.columns or s.plan.spec.problem.head_dim,
    ),
    Field(
        "int64_t",
        "columns_v",
        "of a row of dv in dkv_accum",
        lambda s: s.plan.columns_v or s.plan.spec.problem.head_dim_v,
    ),
    _same("bool", "dq_semaphore", "needs this workspace, and dq_order in its schedule", "plan.dq_semaphore"),
    _same("bool", "tile_counter", "needs one behind dq_accum", "plan.tile_counter"),
    _same(
        "int64_t",
        "split_blocks",
        "of a multiprocessor, that ranges of keys should fill; 0: keys are not split",
        "plan.split_blocks",
    ),
    _same("bool", "deterministic", "the same bits on every run", "plan.deterministic"),
    _same("bool", "bounds", "its schedule has bounds", "plan.bounds"),
    _same("bool", "schedule_counter", "its schedule has tile_counter", "plan.schedule_counter"),
    _same("bool", "cut_lists", "tile_order has pieces of lists, not tiles", "plan.cut_lists"),
    Field(
        "MaskBits",
        "bits",
        "its schedule has the dense mask as bits",
        lambda s: {"": "none", "k": "keys", "q": "queries"}[s.plan.bits],
    ),
    _same(
        "int64_t", "slot_words", "of the bits of a partial visit; 0: its schedule has none", "plan.slot_words"
    ),
    _same("bool", "grouped", "the q heads of a kv head share an order of tiles", "plan.grouped"),
    _same(
        "std::string", "schedule_kind", "the same for variants with the same schedule", "plan.schedule_kind"
    ),
    _same("std::vector<std::string>", "params", "members of the Params that its kernels have"),
)
# Of a codegen.plan.Launch.
LAUNCH: tuple[Field, ...] = (
    _same("std::string", "symbol", ""),
    _same("std::vector<std::string>", "grid", "sizes whose product it is"),
    _same("unsigned", "threads", ""),
    _same("unsigned", "shared_bytes", ""),
    _same("bool", "persistent", "at most one block per multiprocessor"),
    _same("bool", "overlaps", "may start before the launch before it has ended, if the driver can do so"),
    _same("bool", "clustered", "`cluster_size` consecutive blocks are a cluster"),
    _same("int64_t", "per_tile", "blocks that share a tile: the grid is so many times the product"),
    _same("bool", "paired", "two consecutive blocks are a cluster, as the kernel says: their number is even"),
)
# Of a codegen.plan.TensorMap.
TENSOR_MAP: tuple[Field, ...] = (
    _same("std::string", "tensor", ""),
    _same("unsigned", "columns", "of a panel"),
    _same("unsigned", "rows", ""),
    _same("unsigned", "panels", ""),
)
STRUCTS = {"VariantFields": VARIANT, "LaunchFields": LAUNCH, "TensorMapFields": TENSOR_MAP}


def describe(source: Source) -> str:
    """The text that native/variant.h reads."""
    plan = source.plan
    lists: tuple[tuple[str, tuple[Field, ...], Iterable[Launch | TensorMap]], ...] = (
        ("launches", LAUNCH, plan.launches),
        ("schedule", LAUNCH, plan.schedule),
        ("tensor_maps", TENSOR_MAP, plan.tensor_maps),
    )
    lines = list(_lines(VARIANT, source))
    for title, fields, items in lists:
        for item in items:
            lines += (f"{title}:", *(f"  {line}" for line in _lines(fields, item)))
    return "\n".join(lines) + "\n"


def _lines(fields: Iterable[Field], of: object) -> Iterator[str]:
    for field in fields:
        value = field.value(of)
        if isinstance(value, tuple):
            value = " ".join(value)
        yield f"{field.name} {int(value) if isinstance(value, bool) else value}".rstrip()


def header() -> str:
    """Text of native/variant_fields.h: the structs, and for each a function that visits its fields by name."""
    kinds = ", ".join(f"k{mask.value.capitalize()}" for mask in Mask)
    names = ", ".join(f'"{mask.value}"' for mask in Mask)
    parts = [
        "// Written by codegen/variant.py: the fields of a kernel's description.",
        "#pragma once",
        "",
        "#include <cstdint>",
        "#include <string>",
        "#include <vector>",
        "",
        "#include <c10/core/ScalarType.h>",
        "",
        "namespace attnforge {",
        "",
        f"enum MaskKind : int64_t {{ {kinds} }};",
        f"constexpr const char* kMaskNames[] = {{{names}}};",
        "",
        "// Words of 32 pairs that a dense mask is packed to: 32 keys of a query, or 32 queries of a key.",
        "enum class MaskBits { kNone, kOfKeys, kOfQueries };",
        "",
    ]
    for name, fields in STRUCTS.items():
        parts += [f"struct {name} {{"]
        parts += [f"    {f.ctype} {f.name}{{}};" + (f"  // {f.text}" if f.text else "") for f in fields]
        parts += ["};", "", "template <typename Visit>", f"void visit_fields({name}& x, Visit&& visit) {{"]
        parts += [f'    visit("{f.name}", x.{f.name});' for f in fields]
        parts += ["}", ""]
    return "\n".join((*parts, "}  // namespace attnforge", ""))
