"""Every kernel against its formula in float64: random inputs, poisoned memory, equal bits, graph replays, neighbours.

A problem is one operator at one shape. `run` is what a captured graph may hold: it reads tensors that stay where they
are and returns new ones. `redraw` gives all rows but the first other inputs and fewer rows, as the next step of a
decode batch of the same padded size has.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.attention_problems import EXACT, attention_problems
from benchmarks.gpu.exact import (
    LIMITS,
    Tensors,
    expected_input,
    expected_lora,
    poisoned_allocations,
    replayed,
    row_error,
    same_bits,
    without_ties,
)
from benchmarks.gpu.expert_problems import expert_problems
from benchmarks.gpu.inputs import (
    POPULARITIES,
    draw_slots,
    draw_weights,
    make_plan,
    make_table,
    pack,
    segments_of,
)
from benchmarks.gpu.place import FP32, Place, dtype_name
from benchmarks.gpu.problems import Planned, Problem
from benchmarks.gpu.shapes import LLAMA_1B, LLAMA_8B, QWEN, TINY, make_target
from loraplex.core import LoraTarget
from loraplex.kernels.protocols import KernelBackend


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
    before = fallback_calls(backend)
    with poisoned_allocations():
        first = problem.run()
        again = problem.run()
    error = _error(first, problem.expected())
    wrong = [] if error <= limit else ["wrong numbers"]
    if not _same(first, again):
        wrong.append("two runs differ")
    if problem.redraw is not None:
        wrong += _check_decode(problem, problem.redraw, place, first, limit)
    wrong += fallen_back(before, fallback_calls(backend))
    return Finding(problem.group, problem.name, not wrong, ", ".join(wrong), error, limit)


def fallback_calls(backend: KernelBackend) -> dict[str, int]:
    return {each.label: each.calls for each in backend.fallbacks()}


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


# ----------------------------------------------------------------------------------------------------------------- LoRA


OPTION_NAMES = {("block_dtype", torch.int8): "int8 blocks"}


def lora_problem(
    place: Place,
    target: LoraTarget,
    dtype: torch.dtype,
    ranks: Sequence[int],
    slots: Sequence[int],
    is_decode: bool,
    has_bias: bool = False,
    seed: int = 0,
    has_gains: bool = False,
    **options: Any,
) -> Planned:
    """One adapter per rank; one row per entry of `slots`. options: of the backend, as Place.lora_backend takes them.

    has_gains: of every other adapter, of outputs and, where there is one slice, of inputs.
    """
    outs = "+".join(str(s.out_features) for s in target.slices)
    spread = f"{min(ranks)}" if min(ranks) == max(ranks) else f"{min(ranks)}-{max(ranks)}"
    what = f"{'decode' if is_decode else 'prefill'} {target.in_features}x{outs} T={len(slots)} r{spread} x{len(ranks)}"
    chosen = "".join(f", {OPTION_NAMES[option]}" for option in options.items())
    name = f"{what}{' bias' if has_bias else ''}{' gains' if has_gains else ''} {dtype_name(dtype)}{chosen}"
    build = partial(
        _lora_problem, name, place, target, dtype, ranks, slots, is_decode, has_bias, seed, has_gains, options
    )
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
    has_gains: bool,
    options: Mapping[str, Any],
) -> Problem:
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    backend = place.lora_backend(**options) if options else place.backend
    packed = [
        pack(backend, target, draw_weights(target, rank, dtype, generator, has_bias, has_gains and i % 2 == 0), dtype)
        for i, rank in enumerate(ranks)
    ]
    scales_input = has_gains and len(target.slices) == 1
    table = make_table([target], [[one] for one in packed], place.device)
    plan = make_plan(slots, place.device, is_decode)
    out = sum(s.out_features for s in target.slices)
    x, given = (
        torch.randn(len(slots), n, generator=generator).to(dtype).to(place.device) for n in (target.in_features, out)
    )

    def run() -> Tensors:
        y = given.clone()
        if not scales_input:
            backend.add_lora(y, x, plan, table, 0, target.slices)
            return (y,)
        scaled = x.clone()
        backend.scale_input(scaled, plan, table, 0)
        backend.add_lora(y, scaled, plan, table, 0, target.slices)
        return y, scaled

    def redraw() -> None:
        x[1:].copy_(torch.randn(x[1:].shape, generator=generator))
        given[1:].copy_(torch.randn(given[1:].shape, generator=generator))
        count = len(slots) - len(slots) // 4
        fresh = [slots[0], *rng.integers(-1, len(ranks), count - 1).tolist()]
        plan.rewrite(segments_of(fresh), len(slots), is_decode)

    def expected() -> Tensors:
        adapters = [one.weights for one in packed]
        if not scales_input:
            return (expected_lora(given, x, plan.segments, adapters, target.slices),)
        scaled = expected_input(x, plan.segments, adapters)
        return expected_lora(given, scaled.to(dtype), plan.segments, adapters, target.slices), scaled

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
    for dtype, options in itertools.product(place.dtypes, ({"block_dtype": torch.int8}, {})):
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
        for linear, is_decode in itertools.product(("qkv", "down"), (True, False)):
            of = (TINY if is_small else LLAMA_8B).target(linear)
            rows = draw_slots("uniform", max(batches), np.random.default_rng(8)) if is_decode else slots
            of_rows = [every_rank[i % len(every_rank)] for i in range(max(rows) + 1)]
            yield lora_problem(place, of, dtype, of_rows, rows, is_decode, True, next(seeds), has_gains=True)
        odd = make_target("odd", 72, (40, 24)) if is_small else make_target("odd", 1000, (520, 72))
        yield lora_problem(place, odd, dtype, [5, 1], [0, 0, 1], True, has_bias=True, seed=next(seeds))


# ------------------------------------------------------------------------------------------------ norms and activations


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


# ---------------------------------------------------------------------------------------------------- quantised linears


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
    x = torch.empty(rows, num_in, dtype=dtype, device=place.device)
    prepared = place.backend.prepare_linear(weight, quantization)
    specified = EXACT.prepare_linear(weight, quantization)

    def draw(rows_of_x: torch.Tensor) -> None:
        rows_of_x.copy_(torch.randn(rows_of_x.shape, generator=generator))
        if quantization == "fp8":
            rows_of_x.copy_(without_ties(rows_of_x))

    draw(x)
    return Problem(
        "linear", name, dtype,
        lambda: (place.backend.linear(x, prepared),),
        lambda: (_expected_linear(x, specified, quantization),),
        (lambda: draw(x[1:])) if rows <= 64 else None,
    )  # fmt: skip


def _expected_linear(x: torch.Tensor, weight: Any, quantization: str) -> torch.Tensor:
    """The reference rounds activations too: for fp8 as the kernels do, for int8 as the CPU's kernels alone do."""
    if quantization == "int8":
        return x.double() @ (weight.q.double() * weight.scale.double()[:, None]).T
    return EXACT.linear(x.float() if quantization == "fp8" else x.double(), weight)


PROBLEMS: Mapping[str, Callable[[Place, bool], Iterator[Planned]]] = {
    "lora": lora_problems, "attention": attention_problems, "glue": glue_problems, "linear": linear_problems,
    "experts": expert_problems,
}  # fmt: skip
