"""add_lora of every backend against a float64 loop: ranks, batches, popularity, dtypes, uneven slices, poison."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.kernels.plan import LoraPlan, LoraSegment
from loraplex.kernels.slices import SliceWeights
from tests.kernels.cases import (
    BACKENDS,
    BF16,
    FP16,
    FP32,
    assert_close,
    case_id,
    draw_gain,
    draw_slots,
    expected_input,
    expected_lora,
    make_problem,
    make_table,
    make_target,
    make_weights,
    pairwise,
    run,
    run_input,
    same_bits,
    segments_of,
)

DIMENSIONS: dict[str, list[Any]] = {
    "rank": [1, 2, 4, 5, 8, 12, 16, 32, 48, 64, 128, 256],
    "batch": [1, 2, 3, 8, 16, 33, 64],
    "num_adapters": [1, 2, 4, 8, 32],
    "popularity": ["distinct", "uniform", "skewed", "identical", "none"],
    "dtypes": [(FP32, FP32), (FP16, FP16), (BF16, BF16), (FP32, BF16), (FP32, FP16), (BF16, FP32), (FP16, BF16)],
    "shape": [(64, (64,)), (37, (51,)), (100, (96, 24, 24)), (57, (130, 131))],
    "parts": ["equal", "uneven", "missing", "bias", "only_bias", "gain", "only_gain"],
}
"""gain: every other adapter has gains, and all have biases; only_gain: every other slice has nothing but a gain."""
CASES = pairwise(DIMENSIONS)


def _ranks(parts: str, rank: int, num_slices: int, adapter: int) -> list[int | None]:
    """The rank of each slice; adapters differ where the case says so."""
    if parts == "uneven":
        return [max(1, (rank + 7 * i + 3 * adapter) % (rank + 9)) for i in range(num_slices)]
    if parts == "missing":
        return [None if (i + adapter) % 2 == 0 else rank for i in range(num_slices)]
    if parts in ("only_bias", "only_gain"):
        return [0 if (i + adapter) % 2 == 0 else rank for i in range(num_slices)]
    return [rank] * num_slices


def _check(
    rank: int,
    batch: int,
    num_adapters: int,
    popularity: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    shape: tuple[int, tuple[int, ...]],
    parts: str,
) -> None:
    compute_dtype, adapter_dtype = dtypes
    generator, rng = torch.Generator().manual_seed(rank * 1000 + batch), np.random.default_rng(rank * 1000 + batch)
    target = make_target(*shape)
    adapters = [
        make_weights(
            *(target, _ranks(parts, rank, len(shape[1]), i), adapter_dtype, parts in ("bias", "gain"), generator),
            has_gain=parts == "only_gain" or (parts == "gain" and i % 2 == 0),
        )
        for i in range(num_adapters)
    ]
    segments = segments_of(draw_slots(popularity, batch, num_adapters, rng))
    problems = {}
    for dtype in {backend.activation_dtype(compute_dtype) for backend in BACKENDS}:
        problem = make_problem(target, adapters, segments, batch, dtype, torch.Generator().manual_seed(batch))
        problems[dtype] = problem, expected_lora(problem.y, problem.x, segments, adapters, target.slices)
    for backend in BACKENDS:
        problem, expected = problems[backend.activation_dtype(compute_dtype)]
        got = run(problem, backend, make_table(target, adapters, compute_dtype, backend, capacity=num_adapters + 2))
        assert_close(got[~problem.is_base], expected[~problem.is_base])


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_equals_float64_loop(case: dict[str, Any]) -> None:
    _check(**case)


def test_pairwise_covers_and_is_small() -> None:
    assert len(CASES) <= 400
    for a, b in itertools.combinations(DIMENSIONS, 2):
        wanted = set(itertools.product(map(str, DIMENSIONS[a]), map(str, DIMENSIONS[b])))
        assert {(str(c[a]), str(c[b])) for c in CASES} == wanted


@pytest.mark.grid
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("rank", "dtypes"),
    list(itertools.product(DIMENSIONS["rank"], DIMENSIONS["dtypes"])),
    ids=lambda v: case_id({"value": v}),
)
def test_full_product(rank: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    others = [DIMENSIONS[name] for name in ("batch", "num_adapters", "popularity", "shape", "parts")]
    for batch, num_adapters, popularity, shape, parts in itertools.product(*others):
        _check(rank, batch, num_adapters, popularity, dtypes, shape, parts)


def test_rank_512() -> None:
    _check(512, 5, 2, "uniform", (FP32, FP32), (600, (72, 24)), "equal")


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_rows_in_several_segments_are_a_weighted_mix(backend: Any, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    target = make_target(40, (24, 9))
    adapters = [
        make_weights(target, ranks, dtype, True, generator, has_gain)
        for ranks, has_gain in (((4, 6), True), ((5, None), False), ((16, 3), True))
    ]
    segments = [LoraSegment(1, 7, 0, 0.25), LoraSegment(3, 5, 1, -1.5), LoraSegment(0, 4, 2, 2.0)]
    problem = make_problem(target, adapters, segments, 9, backend.activation_dtype(dtype), generator)
    expected = expected_lora(problem.y, problem.x, segments, adapters, target.slices)
    got = run(problem, backend, make_table(target, adapters, dtype, backend))
    assert_close(got[~problem.is_base], expected[~problem.is_base])


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_base_rows_keep_their_bits_between_adapters(backend: Any) -> None:
    """Gaps before, between and after segments."""
    generator = torch.Generator().manual_seed(2)
    target = make_target(32, (48,))
    adapters = [make_weights(target, (8,), FP32, False, generator) for _ in range(2)]
    problem = make_problem(target, adapters, [LoraSegment(2, 3, 0), LoraSegment(5, 7, 1)], 10, FP32, generator)
    run(problem, backend, make_table(target, adapters, FP32, backend))
    assert problem.is_base.sum() == 7


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_a_slot_that_changes_hands_shows_nothing_of_its_victim(backend: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    target = make_target(32, (48, 16))
    big = make_weights(target, (16, 16), FP32, True, generator)
    small = make_weights(target, (None, 2), FP32, False, generator)
    table = make_table(target, [big], FP32, backend)
    problem = make_problem(target, [small], [LoraSegment(0, 4, 0)], 4, FP32, generator)
    run(problem, backend, table)  # the backend now knows the big adapter's blocks
    table.clear_slot(0)
    assert same_bits(run(problem, backend, table), problem.y)  # an empty slot adds nothing
    table.set_block(target.name, 0, 64, backend.pack(small, FP32, table.buffer[64:]))
    expected = expected_lora(problem.y, problem.x, problem.plan.segments, [small], target.slices)
    assert_close(run(problem, backend, table), expected)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_a_moved_block_serves_the_old_plan(backend: Any) -> None:
    generator = torch.Generator().manual_seed(4)
    target = make_target(20, (12,))
    weights = make_weights(target, (4,), FP32, False, generator)
    problem = make_problem(target, [weights], [LoraSegment(0, 3, 0)], 3, FP32, generator)
    table = make_table(target, [weights, weights], FP32, backend)
    before = run(problem, backend, table).clone()
    nbytes = backend.packed_nbytes(weights, FP32)
    new_offset = table.buffer.numel() - nbytes - table.buffer.numel() % 64
    layouts = backend.pack(weights, FP32, table.buffer[new_offset : new_offset + nbytes])
    table.set_block(target.name, 0, new_offset, layouts)
    table.buffer[64 : 64 + nbytes] = 0xFF
    assert same_bits(run(problem, backend, table), before)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_equal_calls_give_equal_bits(backend: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    target = make_target(64, (64, 32))
    adapters = [make_weights(target, (8, 12), FP32, True, generator) for _ in range(3)]
    problem = make_problem(target, adapters, segments_of([0, 0, 1, 2, 2, 2]), 6, FP32, generator)
    table = make_table(target, adapters, FP32, backend)
    assert same_bits(run(problem, backend, table), run(problem, backend, table))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_a_plan_of_another_batch_is_refused(backend: Any) -> None:
    target = make_target(8, (8,))
    weights: tuple[SliceWeights | None, ...] = make_weights(target, (2,), FP32, False, torch.Generator())
    table = make_table(target, [weights], FP32, backend)
    plan = LoraPlan.build([LoraSegment(0, 2, 0)], num_tokens=2, capacity=2)
    with pytest.raises(ValueError, match="2 token rows, x has 3"):
        backend.add_lora(torch.zeros(3, 8), torch.zeros(3, 8), plan, table, 0, target.slices)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_segments_equal_the_float64_loop(data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(1, 12))
    ranges = st.tuples(st.integers(0, num_tokens - 1), st.integers(1, num_tokens))
    drawn = data.draw(st.lists(ranges.filter(lambda r: r[0] < r[1]), max_size=6))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    target = make_target(10, (7, 5))
    adapters = [make_weights(target, ranks, FP32, True, generator) for ranks in ((3, 1), (2, None), (None, 0))]
    adapters += [make_weights(target, ranks, FP32, False, generator, True) for ranks in ((2, 0), (None, 3))]
    segments = [
        LoraSegment(start, end, data.draw(st.integers(0, 4)), data.draw(st.sampled_from([1.0, 0.5, -2.0])))
        for start, end in drawn
    ]
    problem = make_problem(target, adapters, segments, num_tokens, FP32, generator)
    expected = expected_lora(problem.y, problem.x, segments, adapters, target.slices)
    for backend in BACKENDS:
        got = run(problem, backend, make_table(target, adapters, FP32, backend))
        assert_close(got[~problem.is_base], expected[~problem.is_base])


# ---------------------------------------------------------------------------------------------------------- input gains

INPUT_TARGET = make_target(37, (11,))


def with_input_gain(generator: torch.Generator, rank: int | None = None) -> tuple[SliceWeights]:
    """An adapter of one slice: nothing but an input gain, or A and B too."""
    gain = draw_gain(37, generator)
    if rank is None:
        return (SliceWeights(None, None, None, 1.0, input_gain=gain),)
    (weights,) = make_weights(INPUT_TARGET, (rank,), FP32, True, generator, True)
    assert weights is not None
    return (replace(weights, input_gain=gain),)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_input_gains_multiply_the_rows_of_their_segments(backend: Any, dtype: torch.dtype) -> None:
    """Of an adapter with nothing else, of one with everything, of one without; rows of two of them; base rows."""
    generator = torch.Generator().manual_seed(6)
    plain = make_weights(INPUT_TARGET, (4,), FP32, False, generator)
    adapters = [with_input_gain(generator), with_input_gain(generator, 5), plain]
    segments = [
        *(LoraSegment(1, 4, 0), LoraSegment(4, 5, 1, 0.5), LoraSegment(5, 6, 2), LoraSegment(7, 60, 1, -2.0)),
        LoraSegment(8, 50, 0, 0.25),
    ]
    own = backend.activation_dtype(dtype)
    problem = make_problem(INPUT_TARGET, adapters, segments, 61, own, generator)
    table = make_table(INPUT_TARGET, adapters, dtype, backend)
    got = run_input(problem, backend, table)
    expected = expected_input(problem.x, segments, adapters)
    assert_close(got[~problem.is_base], expected[~problem.is_base])
    assert same_bits(got[5], problem.x[5])
    assert same_bits(run_input(problem, backend, table), got)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_gains_of_one_change_no_bits_and_a_weight_of_one_gives_the_gain_itself(backend: Any) -> None:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(1, 37, generator=generator)
    ones, small = torch.ones(37), torch.full((37,), 1e-9)
    adapters = [(SliceWeights(None, None, None, 1.0, input_gain=gain),) for gain in (ones, small)]
    table = make_table(INPUT_TARGET, adapters, FP32, backend)
    for slot, factor in ((0, 1.0), (1, 1e-9)):
        got = x.clone()
        backend.scale_input(got, LoraPlan.build([LoraSegment(0, 1, slot)], 1, 1), table, 0)
        assert same_bits(got, x * factor)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_input_gains_of_another_batch_are_refused(backend: Any) -> None:
    adapters = [with_input_gain(torch.Generator())]
    table = make_table(INPUT_TARGET, adapters, FP32, backend)
    with pytest.raises(ValueError, match="2 token rows, x has 3"):
        backend.scale_input(torch.zeros(3, 37), LoraPlan.build([LoraSegment(0, 2, 0)], 2, 2), table, 0)
