"""add_lora of the native backend on every instruction set: a float64 loop, and bits of a row's own adapters alone."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.kernels.native.backend import NativeBackend
from loraplex.kernels.plan import LoraPlan, LoraSegment
from loraplex.kernels.reference import ReferenceBackend
from loraplex.kernels.slices import SliceWeights
from tests.kernels.cases import (
    BF16,
    FP16,
    FP32,
    Problem,
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
from tests.kernels.native.machine import assert_same_on_every_isa, assert_same_on_threads, library_or_skip

DTYPES = (FP32, FP16, BF16)
Adapter = tuple[SliceWeights | None, ...]


def adapters_of(
    target: Any, ranks: Sequence[Sequence[int | None]], has_bias: bool = False, seed: int = 0, gains: str = "none"
) -> list[Adapter]:
    """One adapter per list of ranks; their dtypes take turns. gains: which have them: none, other (every), all."""
    generator = torch.Generator().manual_seed(seed)
    return [
        make_weights(target, r, DTYPES[i % 3], has_bias, generator, gains == "all" or (gains == "other" and i % 2 == 0))
        for i, r in enumerate(ranks)
    ]


def add(native: NativeBackend, problem: Problem) -> torch.Tensor:
    return run(problem, native, make_table(problem.target, problem.adapters, FP32, native))


def check(native: NativeBackend, problem: Problem) -> torch.Tensor:
    """The result, which equals the float64 loop."""
    expected = expected_lora(problem.y, problem.x, problem.plan.segments, problem.adapters, problem.target.slices)
    got = add(native, problem)
    assert_close(got[~problem.is_base], expected[~problem.is_base])
    return got


def part_of(problem: Problem, segments: Sequence[LoraSegment], rows: slice = slice(None)) -> Problem:
    """The problem with other segments, or of some rows."""
    x, y, is_base = problem.x[rows], problem.y[rows], problem.is_base[rows]
    plan = LoraPlan.build(segments, len(x), max(len(segments), 1))
    return replace(problem, plan=plan, x=x, y=y, is_base=is_base)


# ------------------------------------------------------------------------------------------------------- correct values

DIMENSIONS: dict[str, list[Any]] = {
    "rank": [1, 5, 8, 12, 16, 48, 64, 200],
    "rows": [1, 2, 3, 5, 12, 13, 50, 110],  # of each adapter
    "num_adapters": [1, 2, 5, 9],
    "shape": [(64, (64,)), (37, (51, 1)), (200, (216, 40, 24)), (700, (392, 9))],
    "parts": ["equal", "uneven", "missing", "bias", "gain", "only_gain"],
}
CASES = pairwise(DIMENSIONS)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_equals_float64_loop(native: NativeBackend, case: dict[str, Any]) -> None:
    """Adapters of all dtypes in one batch, weights of segments that are not 1."""
    rank, rows, num_adapters, parts = case["rank"], case["rows"], case["num_adapters"], case["parts"]
    target = make_target(*case["shape"])
    ranks: list[list[int | None]] = [[rank] * len(target.slices) for _ in range(num_adapters)]
    if parts == "uneven":
        ranks = [
            [1 + (rank + 5 * i + 3 * j) % (rank + 9) for j in range(len(target.slices))] for i in range(num_adapters)
        ]
    elif parts == "missing":
        ranks = [[[None, rank, 0][(i + j) % 3] for j in range(len(target.slices))] for i in range(num_adapters)]
    elif parts == "only_gain":
        ranks = [[[0, rank][(i + j) % 2] for j in range(len(target.slices))] for i in range(num_adapters)]
    segments = [LoraSegment(1 + i * rows, 1 + (i + 1) * rows, i, (1.0, -0.5, 2.0)[i % 3]) for i in range(num_adapters)]
    gains = {"gain": "other", "only_gain": "all"}.get(parts, "none")
    adapters = adapters_of(target, ranks, parts in ("bias", "gain"), gains=gains)
    check(
        native,
        make_problem(target, adapters, segments, num_adapters * rows + 2, FP32, torch.Generator().manual_seed(rank)),
    )


@pytest.mark.parametrize("rank", [511, 512, 600])
@pytest.mark.parametrize("rows", [1, 30])
@pytest.mark.parametrize("gains", ["none", "all"])
def test_large_ranks(native: NativeBackend, rank: int, rows: int, gains: str) -> None:
    target = make_target(130, (200, 24))
    adapters = adapters_of(target, [(rank, 3)], gains=gains)
    check(native, make_problem(target, adapters, [LoraSegment(0, rows, 0)], rows, FP32, torch.Generator()))


def test_one_input_and_one_output(native: NativeBackend) -> None:
    target = make_target(1, (1,))
    adapters = adapters_of(target, [(1,), (9,), (2,)], True, gains="other")
    check(native, make_problem(target, adapters, segments_of([0, 0, 1, 2]), 4, FP32, torch.Generator()))


def test_rows_that_do_not_lie_together(native: NativeBackend) -> None:
    """x is a slice of a wider tensor; y always is one in these tests."""
    target = make_target(40, (48, 16))
    problem = make_problem(target, adapters_of(target, [(8, 4)]), [LoraSegment(0, 7, 0)], 7, FP32, torch.Generator())
    around = torch.full((9, 60), float("nan"))
    around[1:8, 5:45] = problem.x
    assert same_bits(check(native, replace(problem, x=around[1:8, 5:45])), check(native, problem))


def test_empty_plans_and_empty_slots_change_nothing(native: NativeBackend) -> None:
    target = make_target(40, (48, 16))
    nothing: Adapter = (None, None)
    problem = make_problem(target, [nothing], [LoraSegment(0, 3, 0)], 3, FP32, torch.Generator())
    table = make_table(target, [nothing], FP32, native, capacity=3)
    for segments in ([], [LoraSegment(0, 3, 0)], [LoraSegment(0, 1, 1), LoraSegment(1, 2, 2)]):
        assert same_bits(run(part_of(problem, segments), native, table), problem.y)


def test_nan_and_inf_stay_in_their_rows(native: NativeBackend) -> None:
    target = make_target(40, (48, 16))
    adapters = adapters_of(target, [(8, 4), (3, 3)])
    segments = [LoraSegment(0, 5, 0), LoraSegment(5, 7, 1)]
    problem = make_problem(target, adapters, segments, 7, FP32, torch.Generator())
    clean = check(native, problem)
    x = problem.x.clone()
    x[2, 7], x[3, 9], x[5, 0] = float("nan"), float("inf"), float("-inf")
    got = add(native, replace(problem, x=x))
    reference = ReferenceBackend()
    expected = run(replace(problem, x=x), reference, make_table(target, adapters, FP32, reference))
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.isinf(), expected.isinf())
    untouched = torch.tensor([0, 1, 4, 6])
    assert same_bits(got[untouched], clean[untouched])


ranges = st.tuples(st.integers(0, 19), st.integers(1, 20)).filter(lambda r: r[0] < r[1])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_segments_of_any_adapters(native: NativeBackend, data: st.DataObject) -> None:
    """Overlapping ones too: a row goes through its adapters in the plan's order."""
    outs = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    target = make_target(data.draw(st.integers(1, 40)), outs)
    rank = st.one_of(st.none(), st.integers(0, 20))
    ranks = data.draw(st.lists(st.tuples(*(rank for _ in outs)), min_size=1, max_size=4))
    gains = data.draw(st.sampled_from(["none", "other", "all"]))
    adapters = adapters_of(target, ranks, data.draw(st.booleans()), data.draw(st.integers(0, 1000)), gains)
    drawn = data.draw(st.lists(ranges, max_size=8))
    slots = st.integers(0, len(adapters) - 1)
    segments = [LoraSegment(*r, data.draw(slots), data.draw(st.sampled_from([1.0, 0.5, -2.0]))) for r in drawn]
    check(native, make_problem(target, adapters, segments, 20, FP32, torch.Generator().manual_seed(1)))


# ------------------------------------------------------------------------------------------------------------ same bits


def big_problem(popularity: str, num_rows: int = 64, seed: int = 3) -> Problem:
    """Enough work for three threads; q, k, v of one adapter have different ranks, two adapters gains, one only them."""
    target = make_target(300, (420, 100, 36))
    ranks = [(16, 8, 4), (64, 64, 64), (5, None, 12), (33, 1, 0)]
    adapters = adapters_of(target, ranks, True, gains="other")
    adapters += adapters_of(target, [(0, 0, None)], gains="all")
    slots = draw_slots(popularity, num_rows, len(adapters), np.random.default_rng(seed))
    return make_problem(target, adapters, segments_of(slots), num_rows, FP32, torch.Generator().manual_seed(seed))


POPULARITIES = ("distinct", "uniform", "identical")


@pytest.mark.parametrize("popularity", POPULARITIES)
def test_a_row_alone_has_the_bits_it_has_in_a_batch(native: NativeBackend, popularity: str) -> None:
    problem = big_problem(popularity)
    whole = check(native, problem)
    for segment in problem.plan.segments:
        for t in range(segment.start, segment.end):
            alone = part_of(problem, [LoraSegment(0, 1, segment.lora_slot)], slice(t, t + 1))
            assert same_bits(add(native, alone)[0], whole[t])


@pytest.mark.parametrize("piece", [1, 3, 12, 13, 31])
def test_segments_cut_in_pieces_and_in_any_order(native: NativeBackend, piece: int) -> None:
    problem = big_problem("uniform", 100)
    whole = add(native, problem)
    pieces = [
        LoraSegment(start, min(start + piece, s.end), s.lora_slot)
        for s in problem.plan.segments
        for start in range(s.start, s.end, piece)
    ]
    assert same_bits(add(native, part_of(problem, pieces)), whole)
    np.random.default_rng(piece).shuffle(pieces)  # type: ignore[arg-type]
    assert same_bits(add(native, part_of(problem, pieces)), whole)


def test_an_adapter_that_is_elsewhere_in_the_table_and_memory(native: NativeBackend) -> None:
    problem = big_problem("uniform")
    whole = add(native, problem)
    last = len(problem.adapters) - 1
    turned = [replace(s, lora_slot=last - s.lora_slot) for s in problem.plan.segments]
    other = part_of(problem, turned)
    assert same_bits(add(native, replace(other, adapters=problem.adapters[::-1])), whole)


def mixed_problem(num_rows: int = 64) -> Problem:
    """Rows in up to four segments."""
    segments = [
        LoraSegment(0, num_rows, 1, 0.5),
        LoraSegment(3, 40, 0, -1.0),
        LoraSegment(20, 50, 3, 2.0),
        LoraSegment(50, 60, 2),
        LoraSegment(10, 55, 4, 1.5),
    ]
    problem = big_problem("none", num_rows)
    return make_problem(problem.target, problem.adapters, segments, num_rows, FP32, torch.Generator())


MAKERS: dict[str, Callable[[], Problem]] = {
    **{p: lambda p=p: big_problem(p) for p in POPULARITIES},  # type: ignore[misc]
    "mixed": mixed_problem,
    "prefill": lambda: big_problem("uniform", 400),
}


@pytest.mark.parametrize("name", MAKERS)
def test_any_number_of_threads(native: NativeBackend, name: str) -> None:
    problem = MAKERS[name]()
    assert_same_on_threads(native, lambda backend: (add(backend, problem),))


@pytest.mark.parametrize("name", MAKERS)
def test_every_instruction_set(name: str) -> None:
    problem = MAKERS[name]()
    assert_same_on_every_isa(lambda backend: (add(backend, problem),))


def test_the_portable_library_is_close() -> None:
    check(NativeBackend(library_or_skip("portable"), 1), mixed_problem())


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_mix_is_its_adapters_one_after_the_other(native: NativeBackend, num_threads: int) -> None:
    problem, backend = mixed_problem(), NativeBackend(native.library, num_threads)
    together = check(backend, problem)
    y = problem.y
    for segment in problem.plan.segments:
        y = add(
            backend,
            replace(
                problem, plan=LoraPlan.build([segment], len(y), 1), y=y, is_base=torch.zeros(len(y), dtype=torch.bool)
            ),
        )
    assert same_bits(together, y)


def test_calls_from_several_threads_at_once(native: NativeBackend) -> None:
    problems = [big_problem(p, n, n) for n in (17, 64) for p in POPULARITIES]
    expected = [add(native, problem) for problem in problems]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(20):
            if not same_bits(add(NativeBackend(native.library, 1 + i % 2), problems[i]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(problems))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---------------------------------------------------------------------------------------------- the bits of the formula


def rounded(exact: Fraction) -> float:
    """To the nearest float32, ties to even."""
    near = np.float32(float(exact))  # off by one at most: rounded twice
    candidates = [near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))]
    return float(min(candidates, key=lambda c: (abs(Fraction(float(c)) - exact), int(c.view(np.int32)) & 1)))


def fma(a: float, b: float, c: float) -> float:
    return rounded(Fraction(a) * Fraction(b) + Fraction(c))


def formula(y: torch.Tensor, x: torch.Tensor, s: SliceWeights, weight: float) -> torch.Tensor:
    """csrc/lora.cpp's, one rounding at a time."""
    a, b, gain = (None if t is None else t.float().tolist() for t in (s.lora_a, s.lora_b, s.gain))
    bias = None if s.bias is None else s.bias.float().tolist()
    scale, rows = rounded(Fraction(weight) * Fraction(s.scaling)), y.tolist()
    for t, row in enumerate(rows):
        h = [functools.reduce(lambda h, k: fma(x[t, k].item(), a_r[k], h), range(len(a_r)), 0.0) for a_r in a or ()]
        for n in range(len(row)):
            factor = scale
            if gain is not None:
                factor = rounded(Fraction(scale) * Fraction(gain[n]))
                row[n] = rounded(Fraction(fma(weight, gain[n], rounded(Fraction(1 - weight)))) * Fraction(row[n]))
            if b is not None:
                d = functools.reduce(lambda d, r: fma(h[r], b[n][r], d), range(len(h)), 0.0)
                row[n] = fma(factor, d, row[n])
            if bias is not None:
                row[n] = fma(weight, bias[n], row[n])
    return torch.tensor(rows)


@pytest.mark.parametrize("gains", ["none", "all"])
@pytest.mark.parametrize(("rank", "has_bias"), [(5, True), (9, False), (0, True), (0, False)])
@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_each_number_is_rounded_as_the_formula_says(
    native: NativeBackend, gains: str, rank: int, has_bias: bool, weight: float
) -> None:
    """Without a gain as it always was, and with a gain of one to the bit the same where the weight is one."""
    if native.library.isa == "portable":
        pytest.skip("its compiler may have no fused multiply-adds")
    weight = float(np.float32(weight))
    target = make_target(11, (21,))
    for seed in range(3):
        adapters = adapters_of(target, [(rank,)], has_bias, seed, gains)
        (s,) = adapters[0]
        assert s is not None
        segments = [LoraSegment(0, 3, 0, weight)]
        problem = make_problem(target, adapters, segments, 3, FP32, torch.Generator().manual_seed(seed))
        assert same_bits(add(native, problem), formula(problem.y, problem.x, s, weight))
        if gains == "none" and weight == 1:
            ones = [(replace(s, gain=torch.ones(21)),)]
            assert same_bits(add(native, replace(problem, adapters=ones)), add(native, problem))


# ---------------------------------------------------------------------------------------------------------- input gains


def input_problem(num_rows: int = 700) -> Problem:
    """Enough work for three threads, rows in up to two segments, a width that is no multiple of 16."""
    generator = torch.Generator().manual_seed(9)
    target = make_target(301, (8,))
    gains = [draw_gain(301, generator) for _ in range(3)]
    adapters = [(SliceWeights(None, None, None, 1.0, input_gain=gain),) for gain in gains]
    third = num_rows // 3
    segments = [LoraSegment(1, 2 * third, 0), LoraSegment(third, num_rows - 1, 1, 0.5), LoraSegment(3, 5, 2, -1.0)]
    return make_problem(target, adapters, segments, num_rows, FP32, generator)


def scale(native: NativeBackend, problem: Problem) -> torch.Tensor:
    return run_input(problem, native, make_table(problem.target, problem.adapters, FP32, native))


def test_inputs_are_scaled_alike_on_any_number_of_threads_and_alone(native: NativeBackend) -> None:
    problem = input_problem()
    whole = scale(native, problem)
    expected = expected_input(problem.x, problem.plan.segments, problem.adapters)
    assert_close(whole[~problem.is_base], expected[~problem.is_base])
    assert_same_on_threads(native, lambda backend: (scale(backend, problem),))
    for t in (1, 4, 300, 698):
        own = [replace(s, start=0, end=1) for s in problem.plan.segments if s.start <= t < s.end]
        assert same_bits(scale(native, part_of(problem, own, slice(t, t + 1)))[0], whole[t])


def test_inputs_are_scaled_alike_on_every_instruction_set() -> None:
    problem = input_problem()
    assert_same_on_every_isa(lambda backend: (scale(backend, problem),))


# -------------------------------------------------------------------------------------------------------------- packing

TARGET = make_target(40, (24, 5, 9))


def packed(native: NativeBackend, weights: Sequence[SliceWeights | None]) -> torch.Tensor:
    """The block, which has no byte left of what was there."""
    nbytes = native.packed_nbytes(weights, FP32)
    blocks = [torch.full((nbytes,), poison, dtype=torch.uint8) for poison in (0xFF, 0x3C)]
    layouts = [native.pack(weights, FP32, block) for block in blocks]
    assert layouts[0] == layouts[1]
    assert torch.equal(*blocks)
    return blocks[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [(8, 8, 8), (5, None, 12), (0, 3, None), (200, 17, 1)], ids=str)
def test_a_block_has_the_adapters_own_dtype(
    native: NativeBackend, dtype: torch.dtype, ranks: tuple[int | None, ...]
) -> None:
    """Whatever the model's is; the bias is float32 beside it. Little more than the tensors themselves."""
    weights = make_weights(TARGET, ranks, dtype, True, torch.Generator())
    block = packed(native, weights)
    layouts = native.pack(weights, FP32, block)
    assert {layout.dtype for layout in layouts if layout is not None} == {dtype}
    tensors = [
        s.lora_a.numel() + s.lora_b.numel() for s in weights if s and s.lora_a is not None and s.lora_b is not None
    ]
    padding = 7 * TARGET.in_features + sum(7 * (r or 0) for r in ranks)
    bias_bytes = sum(4 * s.bias.numel() for s in weights if s and s.bias is not None)
    assert block.numel() <= (sum(tensors) + padding) * dtype.itemsize + bias_bytes + 7 * 96
    assert block.view(FP16 if dtype == BF16 else dtype).isfinite().all()  # of bf16: no byte of the poison


@pytest.mark.parametrize(
    ("a_dtype", "b_dtype", "block_dtype"),
    [(FP16, BF16, FP32), (BF16, FP32, FP32), (FP32, FP16, FP32), (torch.float64, BF16, FP32), (BF16, BF16, BF16)],
    ids=str,
)
def test_dtypes_of_one_adapter_are_promoted(
    native: NativeBackend, a_dtype: torch.dtype, b_dtype: torch.dtype, block_dtype: torch.dtype
) -> None:
    (first, *rest) = make_weights(TARGET, (11, 3, 8), BF16, False, torch.Generator())
    assert first is not None
    assert first.lora_a is not None
    assert first.lora_b is not None
    mixed = (replace(first, lora_a=first.lora_a.to(a_dtype), lora_b=first.lora_b.to(b_dtype)), *rest)
    layouts = native.pack(mixed, FP32, packed(native, mixed))
    assert all(layout is not None and layout.dtype == block_dtype for layout in layouts)
    check(native, make_problem(TARGET, [mixed], [LoraSegment(0, 4, 0)], 4, FP32, torch.Generator()))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_tensors_that_do_not_lie_together_give_the_same_bytes(native: NativeBackend, dtype: torch.dtype) -> None:
    """Parts of wider tensors (shards) and transposed ones."""
    dense = make_weights(TARGET, (8, 5, 16), dtype, True, torch.Generator(), True)

    def inside(matrix: torch.Tensor) -> torch.Tensor:
        around = torch.full((matrix.shape[0] + 2, matrix.shape[1] + 3), float("nan"), dtype=matrix.dtype)
        around[1:-1, 2:-1] = matrix
        return around[1:-1, 2:-1]

    for move in (inside, lambda m: m.t().contiguous().t()):
        moved = [
            s
            and replace(
                s,
                lora_a=move(s.lora_a),
                lora_b=move(s.lora_b),
                bias=s.bias.repeat_interleave(2)[::2],
                gain=s.gain.repeat_interleave(3)[::3],
            )
            for s in dense
        ]  # type: ignore[arg-type, union-attr]
        assert torch.equal(packed(native, moved), packed(native, dense))


def test_a_bias_in_another_dtype_than_the_adapter(native: NativeBackend) -> None:
    (first, *rest) = make_weights(TARGET, (4, 4, 4), BF16, True, torch.Generator())
    assert first is not None
    exact = replace(first, bias=torch.linspace(-1, 1, 24), gain=torch.linspace(-2, 2, 24))
    problem = make_problem(TARGET, [(exact, *rest)], [LoraSegment(0, 4, 0, 0.5)], 4, FP32, torch.Generator())
    check(native, problem)
