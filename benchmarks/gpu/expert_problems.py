"""A mixture of experts against its formula in float64: adapters on every linear of every expert, forms of weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.exact import Tensors, expected_experts
from benchmarks.gpu.expert_inputs import draw_expert_weights, experts_of
from benchmarks.gpu.inputs import POPULARITIES, draw_slots, draw_weights, make_plan, make_table, pack, segments_of
from benchmarks.gpu.place import Place, dtype_name
from benchmarks.gpu.problems import Planned, Problem
from benchmarks.gpu.shapes import TINY_EXPERTS, ExpertShape
from loraplex.kernels.experts import ExpertLora
from loraplex.kernels.quantized_linear import QuantizedWeight

FEW_EXPERTS, MANY_EXPERTS = ExpertShape("few", 1024, 1792, 8, 2), ExpertShape("many", 1000, 328, 48, 6)
"""Small enough to be drawn and multiplied in float64; the second has odd sizes."""


def expert_problems(place: Place, is_small: bool) -> Iterator[Planned]:
    """Decode by popularity, a prompt, int8 blocks, and weights of 8 and 4 bits. float8 is left to the tests: it rounds
    rows."""
    shapes = (TINY_EXPERTS,) if is_small else (FEW_EXPERTS, MANY_EXPERTS)
    seeds, ranks = itertools.count(70), (3, 8) if is_small else (8, 16, 5, 64)
    for dtype, shape in itertools.product(place.dtypes, shapes):
        for popularity in ("uniform",) if is_small else POPULARITIES:
            slots = draw_slots(popularity, 4 if is_small else 33, np.random.default_rng(3))
            yield experts_problem(place, shape, dtype, ranks, slots, next(seeds))
        slots = [-1] * 2 + [0] * 3 if is_small else [-1] * 100 + [0] * 700 + [1] * 1 + [2] * 400
        yield experts_problem(place, shape, dtype, ranks, slots, next(seeds), is_decode=False)
    for dtype, quantization in itertools.product(place.dtypes, (None, "int8", "int4")):
        slots = draw_slots("uniform", 3 if is_small else 16, np.random.default_rng(4))
        yield experts_problem(place, shapes[0], dtype, ranks, slots, next(seeds), quantization, block_dtype=torch.int8)


def experts_problem(
    place: Place,
    shape: ExpertShape,
    dtype: torch.dtype,
    ranks: Sequence[int],
    slots: Sequence[int],
    seed: int,
    quantization: str | None = None,
    is_decode: bool = True,
    **options: Any,
) -> Planned:
    """`ranks` in turn for as many adapters as `slots` has; options: of the backend."""
    what = f"{'decode' if is_decode else 'prefill'} {shape.name} T={len(slots)} x{max(slots) + 1}"
    chosen = f" {quantization or ''}{' int8 blocks' if options else ''}"
    name = f"{what} {dtype_name(dtype)}{chosen}".rstrip()
    return Planned(
        name, partial(_problem, name, place, shape, dtype, ranks, slots, seed, quantization, is_decode, options)
    )


def _problem(
    name: str,
    place: Place,
    shape: ExpertShape,
    dtype: torch.dtype,
    ranks: Sequence[int],
    slots: Sequence[int],
    seed: int,
    quantization: str | None,
    is_decode: bool,
    options: dict[str, Any],
) -> Problem:
    generator, rng, targets = torch.Generator().manual_seed(seed), np.random.default_rng(seed), shape.targets()
    backend = place.lora_backend(**options) if options else place.backend
    packed = [
        [pack(backend, t, draw_weights(t, ranks[slot % len(ranks)], dtype, generator), dtype) for t in targets]
        for slot in range(max(slots) + 1)
    ]
    table, plan = make_table(targets, packed, place.device), make_plan(slots, place.device, is_decode)
    weights = [each.to(place.device) for each in draw_expert_weights(shape, dtype, generator)]
    prepared = [backend.prepare_linear(each, quantization) for each in weights]
    exact = [each.rows(0, each.out_features) if isinstance(each, QuantizedWeight) else each for each in prepared]
    layer = experts_of(shape, prepared, targets, table)
    x, logits = (
        torch.randn(len(slots), n, generator=generator).to(dtype).to(place.device)
        for n in (shape.hidden, shape.num_experts)
    )

    def run() -> Tensors:
        return (backend.experts(x, logits, layer, ExpertLora(plan, table)),)

    def redraw() -> None:
        for inputs in (x, logits):
            inputs[1:].copy_(torch.randn(inputs[1:].shape, generator=generator))
        count = len(slots) - len(slots) // 4
        fresh = [slots[0], *rng.integers(-1, len(packed), count - 1).tolist()]
        plan.rewrite(segments_of(fresh), len(slots), is_decode)

    def expected() -> Tensors:
        adapters = [[one.weights for one in of_slot] for of_slot in packed]
        return (expected_experts(x, logits, shape.top_k, exact, plan.segments, adapters, targets),)

    return Problem("experts", name, dtype, run, expected, redraw if is_decode else None, backend)
