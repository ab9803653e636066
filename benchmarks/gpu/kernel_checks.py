"""Every kernel against its formula in float64: fresh random inputs, poisoned memory, twice the same bits, graph replays, neighbours.

A problem is one operator at one shape. `run` is what a captured graph may hold: it reads tensors that stay where they are and returns new
ones. `redraw` gives all rows but the first other inputs and fewer rows, as the next step of a decode batch of the same padded size has.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.exact import LIMITS, Tensors, expected_lora, poisoned_allocations, replayed, row_error, same_bits
from benchmarks.gpu.flash_attention import flash_absence, flash_backend
from benchmarks.gpu.inputs import (
    BLOCK_SIZE,
    POISON,
    POPULARITIES,
    draw_slots,
    draw_weights,
    make_attention,
    make_plan,
    make_table,
    pack,
    segments_of,
)
from benchmarks.gpu.place import FP32, Place, dtype_name
from benchmarks.gpu.problems import Planned, Problem
from benchmarks.gpu.shapes import LLAMA_1B, LLAMA_8B, QWEN, TINY, make_target
from loraplex.core import LoraTarget
from loraplex.kernels.plan import AttentionPlan
from loraplex.kernels.reference import ReferenceBackend

EXACT = ReferenceBackend()
"""In float64 where its inputs are."""

SPLIT_CONTEXT = 600
"""Tokens: so many that the kernel divides them among programs (test_gpu.py)."""


@dataclass(frozen=True)
class Finding:
    """What a check found. is_ok None: not checked here. error: largest relative error of a row."""

    group: str
    name: str
    is_ok: bool | None
    note: str = ""
    error: float | None = None
    limit: float | None = None


def check(problem: Problem, place: Place) -> Finding:
    """All of it for one problem."""
    limit = LIMITS[problem.dtype]
    backend = problem.backend or place.backend
    before = dict(backend.fallbacks)
    with poisoned_allocations():
        first = problem.run()
        again = problem.run()
    error = _error(first, problem.expected())
    wrong = [] if error <= limit else ["wrong numbers"]
    if not _same(first, again):
        wrong.append("two runs differ")
    if problem.redraw is not None:
        wrong += _check_decode(problem, problem.redraw, place, first, limit)
    wrong += fallen_back(before, backend.fallbacks)
    return Finding(problem.group, problem.name, not wrong, ", ".join(wrong), error, limit)


def fallen_back(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """What stock torch ran since `before` though a kernel covers it."""
    return [f"stock torch ran {reason}" for reason, count in after.items() if count > before.get(reason, 0)]


def _check_decode(
    problem: Problem, redraw: Callable[[], None], place: Place, first: Tensors, limit: float
) -> list[str]:
    wrong = []
    after = replayed(problem.run, redraw, place)
    eager = problem.run()
    if not _same(after, eager):
        wrong.append("a graph's replay differs from eager")
    if not _error(eager, problem.expected()) <= limit:
        wrong.append("wrong numbers after the rewrite")
    if not _same(tuple(t[:1] for t in first), tuple(t[:1] for t in eager)):
        wrong.append("a row depends on its neighbours")
    return wrong


def _error(out: Tensors, expected: Tensors) -> float:
    return max(row_error(a, b) for a, b in zip(out, expected, strict=True))


def _same(a: Tensors, b: Tensors) -> bool:
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))


# ------------------------------------------------------------------------------------------------------------------ LoRA


OPTION_NAMES = {
    ("block_dtype", torch.int8): "int8 blocks", ("is_lora_fused", True): "one launch", ("is_lora_fused", False): "two launches",
}  # fmt: skip


def lora_problem(
    place: Place,
    target: LoraTarget,
    dtype: torch.dtype,
    ranks: Sequence[int],
    slots: Sequence[int],
    is_decode: bool,
    has_bias: bool = False,
    seed: int = 0,
    **options: Any,
) -> Planned:
    """One adapter per rank; one row per entry of `slots`. options: of the backend, as Place.lora_backend takes them."""
    outs = "+".join(str(s.out_features) for s in target.slices)
    spread = f"{min(ranks)}" if min(ranks) == max(ranks) else f"{min(ranks)}-{max(ranks)}"
    what = f"{'decode' if is_decode else 'prefill'} {target.in_features}x{outs} T={len(slots)} r{spread} x{len(ranks)}"
    chosen = "".join(f", {OPTION_NAMES[option]}" for option in options.items())
    name = f"{what}{' bias' if has_bias else ''} {dtype_name(dtype)}{chosen}"
    build = partial(_lora_problem, name, place, target, dtype, ranks, slots, is_decode, has_bias, seed, options)
    return Planned(name, build)


def _lora_problem(
    name: str,
    place: Place,
    target: LoraTarget,
    dtype: torch.dtype,
    ranks: Sequence[int],
    slots: Sequence[int],
    is_decode: bool,
    has_bias: bool,
    seed: int,
    options: Mapping[str, Any],
) -> Problem:
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    backend = place.lora_backend(**options) if options else place.backend
    packed = [pack(backend, target, draw_weights(target, rank, dtype, generator, has_bias), dtype) for rank in ranks]
    table = make_table([target], [[one] for one in packed], place.device)
    plan = make_plan(slots, place.device, is_decode)
    out = sum(s.out_features for s in target.slices)
    x, given = (
        torch.randn(len(slots), n, generator=generator).to(dtype).to(place.device) for n in (target.in_features, out)
    )

    def run() -> Tensors:
        y = given.clone()
        backend.add_lora(y, x, plan, table, 0, target.slices)
        return (y,)

    def redraw() -> None:
        x[1:].copy_(torch.randn(x[1:].shape, generator=generator))
        given[1:].copy_(torch.randn(given[1:].shape, generator=generator))
        count = len(slots) - len(slots) // 4
        fresh = [slots[0], *rng.integers(-1, len(ranks), count - 1).tolist()]
        plan.rewrite(segments_of(fresh), len(slots), is_decode)

    def expected() -> Tensors:
        return (expected_lora(given, x, plan.segments, [one.weights for one in packed], target.slices),)

    return Problem("lora", name, dtype, run, expected, redraw if is_decode else None, backend)


def lora_problems(place: Place, is_small: bool) -> Iterator[Planned]:
    """Punica's popularities in decode, few adapters and many rows in prefill, in every dtype."""
    shapes = (TINY,) if is_small else (LLAMA_8B, LLAMA_1B, QWEN)
    batches = (5,) if is_small else (1, 7, 32, 64)
    every_rank = (4, 9) if is_small else (8, 16, 32, 64)
    seeds = itertools.count()
    for dtype, shape in itertools.product(place.dtypes, shapes):
        linears = ("qkv", "down") if is_small else ("qkv", "o", "gate_up", "down")
        for number, linear in enumerate(linears):
            seed = next(seeds)
            rng, target = np.random.default_rng(seed), shape.target(linear)
            slots = draw_slots(POPULARITIES[number % 4], batches[number % len(batches)], rng)
            ranks = [every_rank[i % len(every_rank)] for i in range(max(slots) + 1)]
            yield lora_problem(place, target, dtype, ranks, slots, True, has_bias=number == 1, seed=seed)
    for dtype, options in itertools.product(
        place.dtypes,
        ({"block_dtype": torch.int8, "is_lora_fused": True}, {"block_dtype": torch.int8, "is_lora_fused": False},
         {"is_lora_fused": True}, {"is_lora_fused": False}),
    ):  # fmt: skip
        target = (TINY if is_small else LLAMA_8B).target("qkv")
        slots = draw_slots("uniform", max(batches) // 2 + 1, np.random.default_rng(7))
        yield lora_problem(place, target, dtype, every_rank * 8, slots, True, True, next(seeds), **options)
    for dtype in place.dtypes:
        target = (TINY if is_small else LLAMA_8B).target("qkv")
        sizes = (3, 17) if is_small else (700, 1, 1900)
        slots = [-1, *(slot for slot, size in enumerate(sizes) for _ in range(size))]
        ranks = (4, 24) if is_small else (64, 256, 5)
        yield lora_problem(place, target, dtype, ranks, slots, False, seed=next(seeds))
        yield lora_problem(place, target, dtype, ranks, slots, False, True, next(seeds), block_dtype=torch.int8)
        odd = make_target("odd", 72, (40, 24)) if is_small else make_target("odd", 1000, (520, 72))
        yield lora_problem(place, odd, dtype, [5, 1], [0, 0, 1], True, has_bias=True, seed=next(seeds))


# ------------------------------------------------------------------------------------------------------------- attention


@dataclass
class _Step:
    """The plan of the moment, over buffers that stay where they are."""

    plan: AttentionPlan


def attention_problem(
    place: Place,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    window: int | None = None,
    seed: int = 0,
    is_flash: bool = False,
) -> Planned:
    """Rotary positions and the KV write, then attention over blocks that lie anywhere; heads: H, KH, D. What no token wrote is NaN.

    is_flash: FlashAttention 3 runs prompts.
    """
    num_heads, kv_heads, dim = heads
    kind = "decode" if set(query_lens) == {1} else "prefill"
    suffix = "" if window is None else f" window {window}"
    name = f"{kind} B={len(query_lens)} context {max(context_lens)} heads {num_heads}/{kv_heads}x{dim}{suffix} {dtype_name(dtype)}"
    name += ", flash_attn" if is_flash else ""
    build = partial(_attention_problem, name, place, heads, dtype, query_lens, context_lens, window, seed, is_flash)
    return Planned(name, build)


def _attention_problem(
    name: str,
    place: Place,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    window: int | None,
    seed: int,
    is_flash: bool,
) -> Problem:
    num_heads, kv_heads, dim = heads
    backend = flash_backend(place, heads, dtype, window) if is_flash else place.backend
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    plan, num_blocks = make_attention(query_lens, context_lens, place.device, rng=rng)
    step = _Step(plan)
    kv = torch.full((num_blocks, 2, 2, kv_heads, BLOCK_SIZE, dim * dtype.itemsize), POISON, dtype=torch.uint8)
    layer = kv.to(place.device).view(dtype)[:, 1]
    _fill_contexts(layer, plan, generator)
    rows = sum(query_lens)
    counts = [num_heads, kv_heads, kv_heads]
    given = torch.randn(rows, sum(counts) * dim, generator=generator).to(dtype).to(place.device)
    angle = (torch.arange(rows)[:, None] * 10000.0 ** -(torch.arange(dim) % (dim // 2) / (dim / 2))).to(place.device)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)

    def parts(qkv: torch.Tensor) -> list[torch.Tensor]:
        return [part.view(rows, -1, dim) for part in qkv.split([n * dim for n in counts], -1)]

    def run() -> Tensors:
        q, k, v = parts(given.clone())
        plan = step.plan
        q = backend.rotary_write_kv(q, k, v, cos, sin, layer, plan.kv_slot_mapping)
        out = backend.paged_attention(q, layer, plan, dim**-0.5, window)
        is_real = (plan.kv_slot_mapping >= 0)[:, None, None]
        slots = plan.kv_slot_mapping.clamp_min(0)
        written = layer[slots // BLOCK_SIZE, :, :, slots % BLOCK_SIZE].flatten(1, 2)
        return torch.where(is_real, q, 0), torch.where(is_real, written, 0), out

    def expected() -> Tensors:
        return expected_attention(layer, parts(given), (cos, sin), step.plan, dim**-0.5, window)

    def redraw() -> None:
        given[1:].copy_(torch.randn(given[1:].shape, generator=generator))
        step.plan = shortened(
            step.plan, [context_lens[0], *(int(rng.integers(1, n + 1)) for n in context_lens[1:-1]), 0]
        )

    is_decode = set(query_lens) == {1} and len(query_lens) > 1
    return Problem("attention", name, dtype, run, expected, redraw if is_decode else None, backend)


def _fill_contexts(layer: torch.Tensor, plan: AttentionPlan, generator: torch.Generator) -> None:
    """Keys and values of every position of every context, this step's too: they are rewritten."""
    _, _, kv_heads, block_size, dim = layer.shape
    for blocks, context in zip(plan.block_tables.tolist(), plan.context_lens_host, strict=True):
        for start in range(0, context, block_size):
            count = min(block_size, context - start)
            drawn = torch.randn(2, kv_heads, count, dim, generator=generator)
            layer[blocks[start // block_size], :, :, :count] = drawn.to(layer.dtype).to(layer.device)


def expected_attention(
    layer: torch.Tensor,
    qkv: Sequence[torch.Tensor],
    angles: tuple[torch.Tensor, torch.Tensor],
    plan: AttentionPlan,
    scale: float,
    window: int | None,
) -> Tensors:
    """(q with positions, what is written to the cache, attention over the cache as it was rounded), 0 in padded rows."""
    real = (plan.kv_slot_mapping >= 0).nonzero()[:, 0]
    slots = plan.kv_slot_mapping[real]
    wide = layer.double()
    given = [t.double()[real] for t in (*qkv, *angles)]
    rotated = EXACT.rotary_write_kv(*given, wide, slots)
    written = wide[slots // BLOCK_SIZE, :, :, slots % BLOCK_SIZE].flatten(1, 2)
    kept = [i for i, context in enumerate(plan.context_lens_host) if context]
    only_real = replace(
        plan,
        query_lens=tuple(plan.query_lens[i] for i in kept),
        context_lens_host=tuple(plan.context_lens_host[i] for i in kept),
        block_tables=plan.block_tables[kept],
    )
    out = EXACT.paged_attention(rotated.to(layer.dtype).double(), layer.double(), only_real, scale, window)
    results = []
    for values in (rotated, written, out):
        padded = torch.zeros(len(plan.kv_slot_mapping), *values.shape[1:], dtype=values.dtype, device=values.device)
        padded[real] = values
        results.append(padded)
    return tuple(results)


def shortened(plan: AttentionPlan, context_lens: Sequence[int]) -> AttentionPlan:
    """The decode step of other lengths, none longer than before, in the same buffers; 0 is a padded row."""
    tables = plan.block_tables.cpu().numpy()
    slots = [
        -1 if n == 0 else int(tables[i, (n - 1) // BLOCK_SIZE]) * BLOCK_SIZE + (n - 1) % BLOCK_SIZE
        for i, n in enumerate(context_lens)
    ]
    plan.context_lens.copy_(torch.tensor(context_lens, dtype=torch.int32))
    plan.kv_slot_mapping.copy_(torch.tensor(slots))
    return replace(plan, context_lens_host=tuple(context_lens), scratch={})


def attention_problems(place: Place, is_small: bool) -> Iterator[Planned]:
    if is_small:
        for number, dtype in enumerate(place.dtypes):
            yield attention_problem(place, (4, 2, 64), dtype, [1] * 3, [20, 5, 33], seed=number)
            yield attention_problem(place, (4, 2, 64), dtype, [18, 1], [18, 20], seed=number)
        yield attention_problem(place, (2, 1, 64), FP32, [1, 1, 1], [40, 3, 17], window=8)
        yield attention_problem(place, (2, 1, 64), FP32, [1, 1], [SPLIT_CONTEXT, 5])
        if place.is_interpreted:  # not under compute-sanitizer: those kernels are not ours
            yield from flash_problems(place, ((4, 2, 64),))
        return
    for number, (dtype, heads) in enumerate(
        itertools.product(place.dtypes, ((32, 8, 128), (32, 8, 64), (14, 2, 64), (12, 12, 96), (16, 8, 256)))
    ):
        yield attention_problem(place, heads, dtype, [1] * 9, [1, 17, 300, 16, 1999, 64, 2, 1200, 777], seed=number)
        yield attention_problem(place, heads, dtype, [300, 1, 40], [300, 900, 800], seed=number)
    for dtype in place.dtypes:
        yield attention_problem(place, (32, 8, 128), dtype, [1, 1, 1], [9000, 5, 4100], seed=91)
        yield attention_problem(place, (8, 2, 128), dtype, [1] * 3, [900, 3, 100], window=256, seed=92)
        yield attention_problem(place, (8, 2, 128), dtype, [700, 3], [700, 900], window=256, seed=93)
    yield from flash_problems(place, ((32, 8, 128), (32, 8, 64), (14, 2, 64), (12, 12, 96), (16, 8, 256)))


def flash_problems(place: Place, shapes: Sequence[tuple[int, int, int]]) -> Iterator[Planned]:
    """FlashAttention 3, where it is installed: prompts, chunks behind a prefix, decodes and what it leaves to the kernels, in one step."""
    if flash_absence(place) is not None:
        return
    for number, (dtype, heads) in enumerate(itertools.product(place.dtypes, shapes)):
        if dtype == FP32:
            continue
        yield attention_problem(
            place, heads, dtype, [300, 1, 40, 5], [300, 900, 200, 1200], None, number, is_flash=True
        )
        if heads[2] <= 192:
            yield attention_problem(place, heads, dtype, [300, 1, 40], [300, 90, 200], 64, number, is_flash=True)


# ------------------------------------------------------------------------------------------------- norms and activations


def glue_problems(place: Place, is_small: bool) -> Iterator[Planned]:
    sizes = ((3, 64, 96),) if is_small else ((1, 4096, 14336), (33, 896, 4864), (2048, 2048, 8192), (7, 5000, 1001))
    generator = torch.Generator().manual_seed(5)

    def draw(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(place.device)

    for dtype, (rows, hidden, inner) in itertools.product(place.dtypes, sizes):
        x, residual, weight, gate_up = (
            draw(dtype, *shape) for shape in ((rows, hidden), (rows, hidden), (hidden,), (rows, 2 * inner))
        )
        yield from _glue_problems(place, dtype, x, residual, weight, gate_up)
    heads, weight = draw(place.dtypes[0], 6, 8, 128), draw(place.dtypes[0], 128)
    of_heads = Problem(
        "glue", "rms_norm of 6x8 heads of 128", heads.dtype,
        lambda: (place.backend.rms_norm(heads, weight, 1e-6),),
        lambda: (EXACT.rms_norm(heads.double(), weight.double(), 1e-6),),
    )  # fmt: skip
    yield Planned(of_heads.name, lambda: of_heads)


def _glue_problems(
    place: Place,
    dtype: torch.dtype,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    gate_up: torch.Tensor,
) -> Iterator[Planned]:
    ops, wide = place.backend, [t.double() for t in (x, residual, weight, gate_up)]

    def added() -> Tensors:
        total = (x + residual).double()  # rounded, as the model's own residual is
        return EXACT.rms_norm(total, wide[2], 1e-5), total

    size = f"{x.shape[0]}x{x.shape[1]} {dtype_name(dtype)}"
    for name, run, expected in (
        ("rms_norm", lambda: (ops.rms_norm(x, weight, 1e-5),), lambda: (EXACT.rms_norm(wide[0], wide[2], 1e-5),)),
        ("add_rms_norm", lambda: ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5), added),
        ("silu_mul", lambda: (ops.silu_mul(gate_up),), lambda: (EXACT.silu_mul(wide[3]),)),
    ):
        problem = Problem("glue", f"{name} {size}", dtype, run, expected)
        yield Planned(problem.name, lambda problem=problem: problem)


# ------------------------------------------------------------------------------------------------------ quantised linears


def linear_problems(place: Place, is_small: bool) -> Iterator[Planned]:
    """Linears in every form that the backend has, as the reference says what these numbers are."""
    sizes = ((3, 128, 48),) if is_small else ((1, 4096, 6144), (33, 896, 1152), (600, 2048, 2048))
    for dtype, quantization, (rows, num_in, out) in itertools.product(place.dtypes, place.backend.quantizations, sizes):
        if quantization == "fp8" and (place.is_interpreted or dtype == FP32):
            continue  # a CPU has no such product
        name = f"{quantization} {num_in}x{out} T={rows} {dtype_name(dtype)}"
        yield Planned(name, partial(_linear_problem, name, place, dtype, quantization, rows, num_in, out))


def _linear_problem(
    name: str, place: Place, dtype: torch.dtype, quantization: str, rows: int, num_in: int, out: int
) -> Problem:
    generator = torch.Generator().manual_seed(rows)
    weight = (torch.randn(out, num_in, generator=generator) / num_in**0.5).to(dtype).to(place.device)
    x = torch.randn(rows, num_in, generator=generator).to(dtype).to(place.device)
    prepared = place.backend.prepare_linear(weight, quantization)
    specified = EXACT.prepare_linear(weight, quantization)

    def redraw() -> None:
        x[1:].copy_(torch.randn(x[1:].shape, generator=generator))

    return Problem(
        "linear", name, dtype,
        lambda: (place.backend.linear(x, prepared),),
        lambda: (_expected_linear(x, specified, quantization),),
        redraw if rows <= 64 else None,
    )  # fmt: skip


def _expected_linear(x: torch.Tensor, weight: Any, quantization: str) -> torch.Tensor:
    """The reference rounds activations too: for fp8 as the kernels do, for int8 as the CPU's kernels alone do."""
    if quantization == "int8":
        return x.double() @ (weight.q.double() * weight.scale.double()[:, None]).T
    return EXACT.linear(x.float() if quantization == "fp8" else x.double(), weight)


PROBLEMS: Mapping[str, Callable[[Place, bool], Iterator[Planned]]] = {
    "lora": lora_problems, "attention": attention_problems, "glue": glue_problems, "linear": linear_problems,
}  # fmt: skip
