"""Problems of paged attention (kernel_checks.py): decode, prompts, chunks, both in one step; Triton and FlashAttention
3."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from benchmarks.gpu.exact import Tensors
from benchmarks.gpu.flash_attention import flash_absence, flash_backend
from benchmarks.gpu.inputs import BLOCK_SIZE, POISON, make_attention
from benchmarks.gpu.place import FP32, Place, dtype_name
from benchmarks.gpu.problems import Planned, Problem
from loraplex.kernels.reference import ReferenceBackend
from loraplex.kernels.step_batch import AttentionPlan

EXACT = ReferenceBackend()
"""In float64 where its inputs are."""

SPLIT_CONTEXT = 600
"""Tokens: so many that the kernel divides them among programs (test_gpu.py)."""


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
    """Rotary positions and the KV write, then attention over blocks that lie anywhere; heads: H, KH, D. What no token
    wrote is NaN.

    is_flash: FlashAttention 3 runs prompts.
    """
    num_heads, kv_heads, dim = heads
    kind = "decode" if set(query_lens) == {1} else "prefill"
    suffix = "" if window is None else f" window {window}"
    name = f"{kind} B={len(query_lens)} context {max(context_lens)} heads {num_heads}/{kv_heads}x{dim}{suffix} "
    name += dtype_name(dtype) + (", flash_attn" if is_flash else "")
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
    """(q with positions, what is written to the cache, attention over the rounded cache), 0 in padded rows."""
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
    """FlashAttention 3, where it is installed: prompts, chunks behind a prefix, decodes and what it leaves to the
    kernels, in one step."""
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
