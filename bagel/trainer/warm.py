"""`attnforge warm`: compile the kernels that training a model needs, also for a GPU of another machine."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import product

from attnforge.bagel.models import MODELS, Model
from attnforge.codegen.cost_model import multiprocessors
from attnforge.codegen.modules import mask_kernels
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.prologue import PrologueProblem
from attnforge.codegen.prologue import render as render_prologue
from attnforge.codegen.render import render
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime import choosing, kernels, tables
from attnforge.runtime.build import cache
from attnforge.runtime.build.errors import CompileError
from attnforge.runtime.call import Call
from attnforge.runtime.dispatch import Target, choose_for
from attnforge.runtime.prologue_kernels import choose
from attnforge.runtime.rounds import MANY, rounds_of

SIZES = tuple(1 << octave for octave in range(8, 18))  # rows of packs; dispatch distinguishes powers of two
# Visible keys per query, likewise; 0: unknown, negative: a few keys are seen by far more queries than the others.
VISIBLE = (0, *(sign << octave for octave in range(4, 18) for sign in (1, -1)))


@dataclass(frozen=True)
class Request:
    """What will be trained: every combination of the fields."""

    models: tuple[Model, ...]
    dtypes: tuple[DType, ...]
    masks: tuple[Mask, ...]
    directions: tuple[Direction, ...]
    deterministic: bool = False


@dataclass(frozen=True)
class Warmed:
    """One kernel: its cache entry, or its error."""

    spec: Spec
    entry: cache.Entry | None
    error: CompileError | None = None


def request(
    model: str,
    dtypes: Sequence[str] = (),
    masks: Sequence[str] = (),
    directions: Sequence[Direction] = tuple(Direction),
    deterministic: bool = False,
) -> Request:
    """The request for a model by name and BAGEL's vision encoder. Defaults: bf16, all masks.

    Raises ValueError for an unknown model.
    """
    if model not in MODELS:
        raise ValueError(f"--model: there is no {model!r}; models are {', '.join(MODELS)}")
    return Request(
        tuple(MODELS[name] for name in dict.fromkeys((model, "vit"))),
        tuple(map(DType, dtypes)) or (DType.BFLOAT16,),
        tuple(map(Mask, masks)) or tuple(Mask),
        tuple(directions),
        deterministic,
    )


def gpu_targets(gpu: str | None, arch: str | None) -> tuple[Target, ...]:
    """Targets of `--gpu` or `--arch`. An architecture alone stands for every GPU of it that has a tuned table.

    Raises ValueError naming the option.
    """
    if (gpu is None) == (arch is None):
        raise ValueError("--gpu: give either the GPU's name, as nvidia-smi -L shows it, or --arch")
    if gpu is not None:
        return (Target(gpu, kernels.targets_of(gpu)),)
    wanted = Arch(arch)
    archs = [archs for archs in kernels.ARCHS.values() if wanted in archs]
    if not archs:
        raise ValueError(
            f"--arch: {wanted.value} is not a GPU; CPU kernels depend on the machine they run on"
        )
    files = [path for place in tables.folders() for path in place.glob("*.json")]
    named = {path.stem for path in files if _is_of(path.stem, archs[0])}
    return tuple(Target(name, archs[0]) for name in sorted({*named, ""}))


def _is_of(table: str, archs: tuple[Arch, ...]) -> bool:
    try:
        return kernels.targets_of(table.replace("-", " ")) == archs
    except ValueError:
        return False


def specs(wanted: Request, targets: Sequence[Target]) -> list[Spec]:
    """The specs that dispatch chooses for the request, each once, sorted. Rows are aligned as in packs."""
    with tables.unchanged():
        found = {spec.slug: spec for spec in _answers(wanted, targets)}
    return [found[slug] for slug in sorted(found)]


def _answers(wanted: Request, targets: Sequence[Target]) -> Iterator[Spec]:
    orders = (False, True) if wanted.deterministic else (False,)
    for target, model, dtype, mask in product(targets, wanted.models, wanted.dtypes, wanted.masks):
        align = _align(model, dtype)
        ratio = model.heads_q // model.heads_kv
        # Context parallelism computes parts of a group of heads.
        groups = sorted({ratio, max(1, ratio // 2), -(-ratio // 2)})
        numbers = VISIBLE if mask.listed else (0,)
        for direction, group, size, visible_keys, deterministic in product(
            wanted.directions, groups, SIZES, numbers, orders
        ):
            problem = Problem(direction, target.archs[0], dtype, model.head_dim, mask, align)
            strict = deterministic and direction is Direction.BACKWARD
            call = Call(problem, group, size, visible_keys=visible_keys, deterministic=strict)
            for rounds in _rounds(problem, group, model, size, target):
                try:
                    yield choose_for(replace(call, rounds=rounds), target).spec
                except Infeasible:
                    continue  # a call would raise, too


def _rounds(problem: Problem, group: int, model: Model, size: int, target: Target) -> tuple[int, ...]:
    """`rounds_of` calls of `size` to 2 * size - 1 rows and any part of the heads.

    Of masks that list intervals or pairs, those of one pack, and MANY; of others, of any batch. Of these, values for
    which `choosing.choose` may make different choices.
    """
    matter = choosing.rounds_that_matter(problem, group, target.name)
    count = multiprocessors(target.name)
    if not count:
        return matter
    heads = model.heads_q if problem.direction is Direction.FORWARD else model.heads_kv
    fewest = rounds_of(1, 1, size, count)
    one = rounds_of(1, heads, 2 * size - 1, count)
    most = one if problem.mask.listed else MANY
    between = (rounds for rounds in matter if fewest <= rounds <= most)
    return tuple(sorted({fewest, most, *between, MANY}))


def compile_mask_kernels(targets: Sequence[Target]) -> int:
    """Compile the kernels that make masks on these targets; returns the number of modules. Errors as `cache.obtain`."""
    archs = {target.archs[0] for target in targets}
    for arch in archs:
        cache.obtain(mask_kernels(arch))
    return len(archs)


def compile_prologues(wanted: Request, targets: Sequence[Target]) -> int:
    """Compile the kernels of `qk_norm_rope` for the models on these targets; returns their number. Errors likewise.

    Weights of the heads' dtype, as FSDP's mixed precision has them; tables of that or float32.
    """
    found = {
        choose(
            PrologueProblem(
                direction, target.archs[0], dtype, model.head_dim, dtype, table, align=_align(model, dtype)
            ),
            target.name,
        )
        for target, model, dtype, direction in product(
            targets, wanted.models, wanted.dtypes, wanted.directions
        )
        for table in {dtype, DType.FLOAT32}
        if model.name != "vit"  # neither norm nor rotary embedding
    }
    for spec in found:
        cache.obtain(render_prologue(spec))
    return len(found)


def _align(model: Model, dtype: DType) -> int:
    """Bytes that rows in packs are aligned to."""
    return math.gcd(16, model.head_dim * dtype.bytes)


def compile_all(wanted: Sequence[Spec], workers: int | None = None) -> Iterator[Warmed]:
    """Compile the specs; yields each when it is done. Raises NoCompilerError and CacheError at once."""

    def one(spec: Spec) -> Warmed:
        try:
            return Warmed(spec, cache.obtain(render(spec)))
        except CompileError as error:
            return Warmed(spec, None, error)

    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        futures = [pool.submit(one, spec) for spec in wanted]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()
