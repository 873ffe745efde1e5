"""Until the templates are renamed: `struct Params` as they read it, every member of its own, under the old names.

tools/params_rename.py rewrites the templates and deletes this file; kernels then print codegen.params.struct(used).
"""

from __future__ import annotations

from attnforge.codegen.params import Field

TENSORS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
_POINTERS = (
    *(Field("void*", name, "(batch, heads, seq, head_dim), strides below") for name in TENSORS),
    Field("float*", "lse", "(batch, heads_q, seq_q) natural-log sum of exp, -inf for an empty row"),
    Field("const float*", "dlse", "(batch, heads_q, seq_q) gradient of lse, null if there is none"),
    Field(
        "float*",
        "delta",
        "workspace of the backward, 2 or 8 floats a row: row sums of dout * out less dlse, on GPUs with lse",
    ),
    Field("float*", "dq_accum", "(batch, heads_q, padded_q, columns) fp32 sums of dq, kernel's own order"),
    Field("const int*", "starts", "(seq_k) spans: key j is visible to queries starts[j] <= i < ends[j]"),
    Field("const int*", "ends", "(seq_k)"),
    Field("int*", "bounds", "(padded_k, 2) starts and ends side by side, 0 0 past seq_k"),
    Field("const unsigned char*", "dense", "dense mask as bytes, 1 where query i sees key j; strides below"),
    Field(
        "const unsigned*", "mask_bits", "the same as bits, (mask_planes, seq_q, mask_words); one of the two"
    ),
    Field(
        "unsigned*",
        "bits",
        "(mask_planes, padded_q or padded_k, bits_row) the dense mask, 32 pairs a word",
    ),
    Field("int*", "tile_count", "(mask_planes, tiles) visited tiles of each owned tile"),
    Field("int*", "tile_order", "(mask_planes, tiles) owned tiles, the one with most work first"),
    Field(
        "int*",
        "tile_list",
        "(mask_planes, tiles, list_stride) visited tile << parts | a bit for each part with hidden pairs",
    ),
    Field(
        "int*",
        "reach",
        "(mask_planes, tiles_m, 4, 2) lists of key tiles: visits [x, y) that show a 64-row part anything",
    ),
    Field(
        "float*",
        "dkv_accum",
        "(batch, heads_kv, padded_k, columns) fp32 sums of dk, then those of dv",
    ),
    Field("int*", "turn", "(mask_planes, tiles, list_stride) ordered dq sums: each visit's turn"),
    Field(
        "int*",
        "pieces",
        "(2) pieces of work taken from the counter, and blocks that found none left; 0 between launches",
    ),
    Field(
        "int*",
        "turns_taken",
        "(batch, heads_q, tiles_m) of dq, (batch, heads_kv, tiles_n) of dk, dv: ordered sums so far",
    ),
)
_STRIDES = (
    *(
        Field("long long", f"{name}_{axis}", f"stride of {name} along {word}, in elements")
        for name in TENSORS
        for axis, word in (("batch", "batch"), ("head", "heads"), ("row", "the sequence"))
    ),
    *(
        Field("long long", f"dense_{axis}", f"stride of dense along {word}, 0 where it is the same for all")
        for axis, word in (("batch", "batch"), ("head", "heads_q"), ("row", "queries"), ("col", "keys"))
    ),
)
_SCALARS = (
    Field("int", "batch", ""),
    Field("int", "heads_q", ""),
    Field("int", "heads_kv", "divides heads_q"),
    Field("int", "seq_q", ""),
    Field("int", "seq_k", ""),
    Field("int", "tiles_m", "ceil(seq_q / tile_m)"),
    Field("int", "tiles_n", "ceil(seq_k / tile_n)"),
    Field("int", "list_stride", "entries per row of tile_list"),
    Field("int", "mask_batches", "batch if each entry has its own dense mask, else 1"),
    Field("int", "mask_heads", "heads_q if each q head has its own dense mask, else 1"),
    Field("int", "mask_planes", "mask_batches * mask_heads; 1 for other masks"),
    Field("int", "mask_words", "words per row of mask_bits, ceil(seq_k / 32)"),
    Field("int", "bits_row", "words per row of bits"),
    Field("int", "padded_q", "tiles_m * tile_m"),
    Field("int", "padded_k", "tiles_n * tile_n"),
    Field("int", "threads", "CPU threads to use"),
    Field("float", "scale", "softmax scale, multiplies q k^T; 1e-30 to 2e38"),
    Field("float", "scale_log2", "scale * log2(e)"),
)
FIELDS: tuple[Field, ...] = (*_POINTERS, *_STRIDES, *_SCALARS)


def struct() -> str:
    """C text of `struct Params`, identical in every kernel and in the launcher."""
    rows = [f"    {f.ctype} {f.name};" + (f"  // {f.text}" if f.text else "") for f in FIELDS]
    return "\n".join(("struct Params {", *rows, "};"))


_RENAMED = {"reach": "kv_range", "turn": "dq_order", "pieces": "tile_counter", "turns_taken": "dq_semaphore"}


def path(name: str) -> str:
    """The member of the launcher's Params that holds one of FIELDS."""
    if name in (*TENSORS, "dense"):
        return f"{name}.data"
    tensor, _, axis = name.rpartition("_")
    if tensor in (*TENSORS, "dense") and axis in ("batch", "head", "row", "col"):
        return f"{tensor}.{axis}"
    return _RENAMED.get(name, name)


PATHS = tuple(path(field.name) for field in FIELDS)
