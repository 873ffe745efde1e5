"""The one argument of every kernel, `struct Params`: a kernel prints the members that it uses, the launcher has all."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from attnforge.codegen.formula import MAX_TENSORS

# Bumped whenever the table below or the launch protocol changes meaning: part of the cache key.
ABI = 6
SCORE_WORDS = 10  # of a row of score_bins: kBinWords of templates/common/score_bins.h.jinja


@dataclass(frozen=True)
class Struct:
    """A type of members, for tensors whose strides go with their address."""

    name: str
    members: tuple[tuple[str, str], ...]  # C type and names
    text: str

    def declaration(self) -> str:
        rows = (f"    {ctype} {names};" for ctype, names in self.members)
        return "\n".join((f"// {self.text}", f"struct {self.name} {{", *rows, "};"))


TENSOR = Struct(
    "TensorRef",
    (("void*", "data"), ("long long", "batch, head, row")),
    "A tensor (batch, heads, seq, head_dim): its address, and strides in elements. Rows are contiguous.",
)
MASK = Struct(
    "MaskRef",
    (("const unsigned char*", "data"), ("long long", "batch, head, row, col")),
    "A bool mask (batch, heads_q, seq_q, seq_k): its address, and strides, 0 where an axis is expanded.",
)
SCORE = Struct(
    "ScoreRef",
    (("const void*", "data"), ("long long", "stride[4]"), ("int", "size[4]")),
    "A captured tensor of a score or a mask function: its address, strides in elements, and sizes.",
)
STRUCTS = (TENSOR, MASK, SCORE)


@dataclass(frozen=True)
class Field:
    """One member: C type, name and meaning. Sizes are multiples of 8 bytes, then of 4: any subset has no padding."""

    ctype: str
    name: str
    text: str


_BINS = "(elements of t{0}, {1}) exact sums for dscore{0}; null: one addition an element"
FIELDS: tuple[Field, ...] = (
    Field(TENSOR.name, "q", "(batch, heads_q, seq_q, head_dim)"),
    Field(TENSOR.name, "k", "(batch, heads_kv, seq_k, head_dim)"),
    Field(TENSOR.name, "v", "(batch, heads_kv, seq_k, head_dim_v)"),
    Field(TENSOR.name, "out", "(batch, heads_q, seq_q, head_dim_v)"),
    Field(TENSOR.name, "dout", "gradient of out"),
    Field(TENSOR.name, "dq", "gradients, shaped as q, k, v"),
    Field(TENSOR.name, "dk", ""),
    Field(TENSOR.name, "dv", ""),
    Field(MASK.name, "dense", "dense mask as bytes, 1 where query i sees key j; or mask_bits"),
    *(Field(SCORE.name, f"score{i}", f"t{i} of the formula") for i in range(MAX_TENSORS)),
    *(Field(SCORE.name, f"dscore{i}", f"gradient of t{i}, float32, its shape") for i in range(MAX_TENSORS)),
    *(
        Field("unsigned long long*", f"score_bins{i}", _BINS.format(i, SCORE_WORDS))
        for i in range(MAX_TENSORS)
    ),
    Field("const unsigned*", "mask_bits", "(mask_planes, seq_q, mask_words) dense mask as bits; or dense"),
    Field("const int*", "starts", "(seq_k) spans: key j is visible to queries starts[j] <= i < ends[j]"),
    Field("const int*", "ends", "(seq_k)"),
    Field("const int*", "spans", "(mask_planes, intervals, 2, seq_k) starts and ends of unions of intervals"),
    Field(
        "float*",
        "lse",
        "(batch, heads_q, seq_q) natural log of the softmax denominator; -inf: empty row",
    ),
    Field("const float*", "dlse", "(batch, heads_q, seq_q) gradient of lse, null if there is none"),
    Field(
        "float*",
        "delta",
        "per row: sum(dout * out) - dlse; on GPUs with lse beside it, 2 or 8 floats a row",
    ),
    Field("float*", "dq_accum", "(batch, heads_q, padded_q, columns) fp32 sums of dq, in the kernel's order"),
    Field("float*", "dkv_accum", "(batch, heads_kv, padded_k, columns) fp32 sums of dk, then those of dv"),
    Field(
        "float*",
        "out_accum",
        "fp32 out and lse of splits of keys, (kv_splits, batch, heads_q, seq_q, columns), or of pieces",
    ),
    Field("int*", "bounds", "(padded_k, 2) starts and ends side by side, 0 0 past seq_k"),
    Field("unsigned*", "bits", "(mask_planes, padded_q or padded_k, bits_row) dense mask, 32 pairs a word"),
    Field(
        "unsigned*",
        "visit_bits",
        "(bit_slots, 64-row groups, 128, words) bits of partial visits as threads hold their pairs",
    ),
    Field("int*", "visit_slots", "(mask_planes, tiles, list_stride) slot of each visit's bits, -1: none"),
    Field(
        "int*", "slot_visits", "(bit_slots, 2) of each slot: the owned tile of all planes, the visited one"
    ),
    Field("int*", "slots_taken", "(1) number of visits that requested a slot, while lists are built"),
    Field("int*", "tile_count", "(mask_planes, tiles) visited tiles of each owned tile"),
    Field(
        "int*",
        "tile_order",
        "(mask_planes, tiles) owned tiles in launch order, or with lists that are cut, pieces of them",
    ),
    Field(
        "int*",
        "tile_slots",
        "(mask_planes, tiles_m, 2) slots [x, y) of a cut query tile's pieces; 0 0: whole",
    ),
    Field(
        "int*", "tile_pieces", "(mask_planes, tiles_n) of a backward: pieces of each list, 0 if it is empty"
    ),
    Field(
        "int*",
        "tile_list",
        "(mask_planes, tiles, list_stride) visited tile << row groups | a bit for each with hidden pairs",
    ),
    Field(
        "int*", "kv_range", "(mask_planes, tiles_m, 4, 2) visits [x, y) that a 64-row group of queries needs"
    ),
    Field(
        "int*", "dq_order", "(mask_planes, tiles, list_stride) deterministic dq: each visit's rank in its sum"
    ),
    Field(
        "int*",
        "dq_semaphore",
        "(batch, heads_q, tiles_m) of dq, (batch, heads_kv, tiles_n) of dk, dv: sums done so far",
    ),
    Field(
        "int*",
        "tile_counter",
        "work tiles handed out; of a forward also blocks that found none left, both 0 between launches",
    ),
    Field("int", "batch", ""),
    Field("int", "heads_q", ""),
    Field("int", "heads_kv", "divides heads_q"),
    Field("int", "seq_q", ""),
    Field("int", "seq_k", ""),
    Field("int", "tiles_m", "ceil(seq_q / tile_m)"),
    Field("int", "tiles_n", "ceil(seq_k / tile_n)"),
    Field("int", "blocks_n", "tiles_n + ceil(tiles_n / 8) - 1: blocks of a head where long lists are cut"),
    Field(
        "int",
        "blocks_m",
        "work tiles of a head where long lists are cut: 1/16 to 1/4 more than tiles_m, most for few heads",
    ),
    Field(
        "int", "piece_slots", "2 * (blocks_m - tiles_m): places of a head for results of pieces in out_accum"
    ),
    Field("int", "tiles_packed", "ceil(seq_q * heads_q / heads_kv / tile_m)"),
    Field(
        "int", "kv_splits", "parts that the keys of each query tile are split into, of a block or a cluster"
    ),
    Field("int", "cluster_size", "blocks of a cluster, which share a part of the keys, 1 to 8"),
    Field("int", "combine_warps", "warps that combine the results of a row's splits: 1, 2, 4 or 8"),
    Field("int", "combine_blocks", "their blocks, of 8 warps; 0 if kv_splits is 1"),
    Field("int", "list_stride", "entries per row of tile_list"),
    Field("int", "mask_batches", "batch if each entry has a plane of its own, else 1"),
    Field(
        "int", "mask_heads", "heads if each q head (of spans also: kv head) has a plane of its own, else 1"
    ),
    Field("int", "mask_planes", "mask_batches * mask_heads; 1 without planes"),
    Field("int", "mask_words", "words per row of mask_bits, ceil(seq_k / 32)"),
    Field("int", "bits_row", "words per row of bits"),
    Field("int", "bit_slots", "visits whose bits there is memory for"),
    Field("int", "padded_q", "tiles_m * tile_m"),
    Field("int", "padded_k", "tiles_n * tile_n"),
    Field("int", "threads", "CPU threads to use"),
    Field("float", "scale", "softmax scale, multiplies q k^T; 1e-30 to 2e38"),
    Field("float", "scale_log2", "scale * log2(e)"),
)
# Stands for the struct in a text whose uses are still to be counted.
PLACEHOLDER = "struct Params; // of codegen/params.py"
_USE = re.compile(r"\b(?:p|params|w|walk)(?:\.|->)(\w+)")
_COMMENT = re.compile(r"//.*")


def used(text: str) -> tuple[str, ...]:
    """Members of Params that C++ text names, in the table's order. Templates call them `p`, `params`, `w` or `walk`."""
    found = set(_USE.findall(_COMMENT.sub("", text)))
    return tuple(field.name for field in FIELDS if field.name in found)


def struct(names: Iterable[str] | None = None) -> str:
    """C text of `struct Params` with the members named, by default all, and of the types that they have."""
    wanted = {field.name for field in FIELDS} if names is None else set(names)
    fields = [field for field in FIELDS if field.name in wanted]
    types = {field.ctype for field in fields}
    rows = (f"    {f.ctype} {f.name};" + (f"  // {f.text}" if f.text else "") for f in fields)
    params = "\n".join(("struct Params {", *rows, "};"))
    return "\n\n".join((*(s.declaration() for s in STRUCTS if s.name in types), params))


def header() -> str:
    """Text of native/params.h: all members, and a table of where each is, from which kernels' arguments are packed."""
    members = (f"    ATTNFORGE_MEMBER({field.name})," for field in FIELDS)
    return "\n".join(
        (
            "// Written by codegen/params.py: the arguments of all kernels.",
            "#pragma once",
            "",
            "#include <cstddef>",
            "#include <cstdint>",
            "",
            struct(),
            "",
            "namespace attnforge {",
            "",
            f"constexpr int64_t kScoreWords = {SCORE_WORDS};  // of a row of score_bins",
            "",
            "struct ParamsMember {",
            "    const char* name;",
            "    size_t offset, size;",
            "};",
            "",
            "#define ATTNFORGE_MEMBER(name) {#name, offsetof(Params, name), sizeof(Params{}.name)}",
            "constexpr ParamsMember kParamsMembers[] = {",
            *members,
            "};",
            "#undef ATTNFORGE_MEMBER",
            "",
            "}  // namespace attnforge",
            "",
        )
    )
