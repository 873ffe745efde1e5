"""What emulations by hopper_values.cpp share: a kernel's text for g++, its arguments, tensor maps as it reads them."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Sequence
from pathlib import Path

import gxx
from cpu_kernel import Params, ScoreRef, TensorRef, full_params
from torch import Tensor

from attnforge.codegen.plan import TensorMap
from attnforge.codegen.render import Source
from attnforge.codegen.spec import Direction, Spec

FLAGS = (
    "-std=c++17",
    "-O2",
    "-march=native",
    "-fno-semantic-interposition",  # functions of a shared library may be inlined
    "-w",
    "-fPIC",
    "-shared",
    f"-I{gxx.HERE}",
)
WORDS = 16  # of a tensor map, 64 bits each
# Functions of hopper_values.h without PTX of their own, or templates of which only the asm statement goes.
REPLACED = "accumulator_fence|load_float|load_int|load_pair|load_quad|load_span|pack|shared_address|unpack"
KEPT = ("apply_mask", "set_ones", "start_dq", "start_scores")
FUNCTION = r"^__device__ __forceinline__ [^\n;{]*?\b(\w+)\([^;{]*\) \{\n(?:.*\n)*?\}\n"
WGMMA = re.compile(  # columns of the result, whether its operands are summed over rows, the first number of a thread
    r'm64n(\d+)k16.*?, add, 1, 1, ([01](?:, [01])?);.*?"\+f"\(d\[(\d+)\]\)', re.DOTALL
)
LOAD_BOUNDS = r'asm volatile\("ld\.shared\.v4\.s32[^;]*;"[^;]*"r"\(([^;]*)\)\);'
RUN = """
extern const bool by_warpgroup = BY_WARPGROUP;
struct Arguments { const Params* p; const TensorMaps* maps; };
extern "C" const char* run_main(const Params* p, const TensorMaps* maps, int clusters, int blocks, int threads,
                                int shared) {
    const Arguments x = {p, maps};
    const auto call = [](const void* x) {
        const auto* all = static_cast<const Arguments*>(x);
        SYMBOL(*all->p, *all->maps);
    };
    run_grid(call, &x, clusters, blocks, TOGETHER, threads, shared);
    return what_went_wrong();
}
"""
# A kernel that combines the results of splits, or of pieces of lists.
COMBINE = """
extern "C" void run_combine(const Params* p, int blocks, int threads) {
    run_grid([](const void* x) { SYMBOL_combine(*static_cast<const Params*>(x)); }, p, blocks, 1, 1, threads, 0);
}
"""


def translate(source: Source, breaks: dict[str, str], together: int = 1, by_warpgroup: bool = False) -> str:
    """C++ that g++ compiles, with a function `run_main` that runs `together` clusters at a time.

    `breaks`: statements that are skipped if `broken` is their number, from 1. `by_warpgroup`: see hopper_values.h.
    """
    text = full_params(source.text)
    for number, statement in enumerate(breaks.values(), 1):
        assert statement in text, statement
        text = text.replace(statement, f"if (broken != {number}) {statement}")

    def keep(match: re.Match[str]) -> str:
        if product := WGMMA.search(match[0]):
            columns, rows, first = product.groups()
            call = f"issue(d + {first}, {int(columns) // 2}, a, b, add, {rows});"
            return f"{match[0].partition('{')[0]}{{ {call} }}\n"
        gone = "asm" in match[0] and match[1] not in KEPT
        return "" if gone or re.fullmatch(REPLACED, match[1]) else match[0]

    text = re.sub(FUNCTION, keep, text, flags=re.MULTILINE)
    text = re.sub(r"^template <(?:int|class) \w+>\n(?=\n|//|template)", "", text, flags=re.MULTILINE)
    text = re.sub(r'asm volatile\("((setmaxnreg|griddepcontrol)[^;]*;)?"[^;]*;', "", text)
    text = re.sub(LOAD_BOUNDS, r"load_bounds(\1, start, end);", text)
    text = re.sub(r"extern __shared__[^;]*;", "unsigned char* shared = shared_memory;", text)
    text = text.replace("#pragma unroll", "//")
    sections = re.split(r"(?=^// ---- )", text, flags=re.MULTILINE)
    text = "".join(x for x in sections if not x.startswith("// ---- Tile schedule"))
    assert "asm" not in text
    forward = source.spec.problem.direction is Direction.FORWARD
    combines = forward and (source.plan.split_blocks or source.plan.cut_lists)
    run = RUN + (COMBINE if combines else "")
    run = run.replace("TOGETHER", str(together)).replace("SYMBOL", source.spec.symbol)
    run = run.replace("BY_WARPGROUP", str(by_warpgroup).lower())
    return '#include "hopper_values.h"\n' + text + run


def compiled(text: str, directory: Path) -> ctypes.CDLL:
    """The library of a kernel's text and the emulator."""
    path = directory / "hopper_values.cpp"
    path.write_text(text)
    library = gxx.library(path, *FLAGS, parts=("hopper_values.cpp",), header="hopper_values.h")
    library.run_main.restype = ctypes.c_char_p
    return library


def call_params(spec: Spec, tensors: dict[str, Tensor], captured: Sequence[Tensor]) -> Params:
    """What a call gives its kernels: tensors B H S D, sizes, the scale, one plane of a mask, what functions read."""
    p = Params()
    for name, x in tensors.items():
        setattr(p, name, TensorRef(x.data_ptr(), *x.stride()[:3]))
    p.batch, p.heads_q, p.seq_q, head_dim = tensors["q"].shape
    p.heads_kv, p.seq_k = tensors["k"].shape[1:3]
    tile_m, tile_n = spec.tuning.tile_m, spec.tuning.tile_n
    p.set_tiles(tile_m, tile_n)
    p.padded_q, p.padded_k = p.tiles_m * tile_m, p.tiles_n * tile_n
    p.scale, p.scale_log2 = head_dim**-0.5, head_dim**-0.5 / math.log(2)
    p.mask_batches = p.mask_heads = p.mask_planes = 1
    for i, x in enumerate(captured):
        setattr(p, f"score{i}", ScoreRef.of(x))
    return p


def tensor_maps(
    boxes: Sequence[TensorMap], tensors: dict[str, Tensor]
) -> tuple[ctypes.Array[ctypes.c_longlong], int]:
    """Tensor maps as hopper_values.cpp reads them, and where they begin."""
    words = (ctypes.c_longlong * (WORDS * len(boxes) + 8))()
    first = -ctypes.addressof(words) % 64 // 8
    for i, box in enumerate(boxes):
        x = tensors[box.tensor]
        width = box.columns if box.panels > 1 else x.shape[3]
        values = [x.data_ptr(), *x.stride()[:3], x.shape[2], box.columns, box.rows, box.panels, width]
        for place, value in enumerate(values, first + WORDS * i):
            words[place] = value
    return words, ctypes.addressof(words) + first * 8
