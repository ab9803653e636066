"""add_lora in Triton's interpreter against a float64 loop: small and large tiles, uneven ranks, int8, poison
around."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from loraplex.kernels.plan import LoraPlan, LoraSegment, SlotTable
from loraplex.kernels.slices import SliceWeights
from loraplex.kernels.triton.backend import TritonBackend
from loraplex.kernels.triton.launch import H100, TritonLauncher
from loraplex.kernels.triton.workspace import Workspace
from tests.kernels.cases import (
    FP16,
    FP32,
    POISON,
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

CPU = torch.device("cpu")
INT8 = torch.int8

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not TritonLauncher(CPU).is_interpreted, reason="runs in Triton's interpreter"),
]

DIMENSIONS: dict[str, list[Any]] = {
    "rank": [1, 2, 5, 8, 12, 16, 48, 64],
    "batch": [1, 2, 3, 8, 20, 33],
    "num_adapters": [1, 2, 4],
    "popularity": ["distinct", "uniform", "skewed", "identical", "none"],
    "dtypes": [(FP32, FP32), (FP16, FP16), (FP32, FP16), (FP16, FP32), (FP32, INT8), (FP16, INT8)],
    "shape": [(64, (64,)), (37, (51,)), (100, (96, 24, 24)), (57, (100, 67)), (600, (40,))],
    "parts": ["equal", "uneven", "missing", "bias", "only_bias", "gain", "only_gain"],
    "path": ["decode", "prefill"],
}
"""dtypes: of the model, of the blocks. path: of a decode step, or of one in which long segments are large tiles.
gain: every other adapter has gains, and all have biases; only_gain: every other slice has nothing but a gain."""

CASES = pairwise(DIMENSIONS)
FULL = {
    **DIMENSIONS,
    "rank": [1, 2, 4, 5, 8, 12, 16, 32, 48, 64, 128, 256],
    "batch": [1, 8, 33, 64],
    "num_adapters": [1, 32],
}


def backend_of(dtype: torch.dtype | None = None) -> TritonBackend:
    return TritonBackend(CPU, block_dtype=dtype)


def ranks_of(parts: str, rank: int, num_slices: int, adapter: int) -> list[int | None]:
    """The rank of each slice; adapters differ where the case says so."""
    if parts == "uneven":
        return [max(1, (rank + 7 * i + 3 * adapter) % (rank + 9)) for i in range(num_slices)]
    if parts == "missing":
        return [None if (i + adapter) % 2 == 0 else rank for i in range(num_slices)]
    if parts in ("only_bias", "only_gain"):
        return [0 if (i + adapter) % 2 == 0 else rank for i in range(num_slices)]
    return [rank] * num_slices


def as_packed(
    backend: TritonBackend, adapters: Sequence[tuple[SliceWeights | None, ...]], compute_dtype: torch.dtype
) -> list[tuple[SliceWeights | None, ...]]:
    """The adapters as the blocks have them: what the kernels must get right to the last digit."""
    found = []
    for weights in adapters:
        block = torch.full((backend.packed_nbytes(weights, compute_dtype),), POISON, dtype=torch.uint8)
        layouts = backend.pack(weights, compute_dtype, block)
        present = [s for s in weights if s is not None and s.lora_a is not None]
        in_features = 0 if not present or present[0].lora_a is None else present[0].lora_a.shape[1]
        widths = [_width(s) for s in weights]
        found.append(backend.unpack(layouts, in_features, widths, block))
    return found


def _width(s: SliceWeights | None) -> int:
    parts = () if s is None else (s.lora_b, s.bias, s.gain)
    return next((part.shape[0] for part in parts if part is not None), 0)


class PoisonedWorkspace(Workspace):
    """New memory is full of NaN."""

    def take(self, name: str, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        is_known = (name, dtype) in self.buffers
        found = super().take(name, count, dtype, device)
        return found if is_known else found.fill_(float("nan"))


def run_poisoned(problem: Problem, backend: TritonBackend, table: SlotTable) -> torch.Tensor:
    """`run` in a workspace full of NaN."""
    backend.lora_workspace.__class__ = PoisonedWorkspace
    return run(problem, backend, table)


def check(
    rank: int,
    batch: int,
    num_adapters: int,
    popularity: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    shape: tuple[int, tuple[int, ...]],
    parts: str,
    path: str,
) -> None:
    compute_dtype, block_dtype = dtypes
    generator, rng = torch.Generator().manual_seed(rank * 1000 + batch), np.random.default_rng(rank * 1000 + batch)
    target = make_target(*shape)
    adapters = [
        make_weights(
            *(target, ranks_of(parts, rank, len(shape[1]), i), FP32, parts in ("bias", "gain"), generator),
            has_gain=parts == "only_gain" or (parts == "gain" and i % 2 == 0),
        )
        for i in range(num_adapters)
    ]
    segments = segments_of(draw_slots(popularity, batch, num_adapters, rng))
    backend = backend_of(block_dtype)
    problem = make_problem(target, adapters, segments, batch, compute_dtype, generator)
    problem.plan.rewrite(segments, batch, is_decode=path != "prefill")
    packed = as_packed(backend, adapters, compute_dtype)
    expected = expected_lora(problem.y, problem.x, segments, packed, target.slices)
    got = run_poisoned(problem, backend, make_table(target, adapters, compute_dtype, backend, num_adapters + 2))
    assert_close(got[~problem.is_base], expected[~problem.is_base])
    assert not backend.fallbacks()


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_equals_float64_loop(case: dict[str, Any]) -> None:
    check(**case)


def test_pairwise_covers_and_is_small() -> None:
    assert len(CASES) <= 150
    for a, b in itertools.combinations(DIMENSIONS, 2):
        wanted = set(itertools.product(map(str, DIMENSIONS[a]), map(str, DIMENSIONS[b])))
        assert {(str(c[a]), str(c[b])) for c in CASES} == wanted


@pytest.mark.grid
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("rank", "dtypes", "path"),
    list(itertools.product(FULL["rank"], FULL["dtypes"], FULL["path"])),
    ids=lambda v: case_id({"value": v}),
)
def test_full_product(rank: int, dtypes: tuple[torch.dtype, torch.dtype], path: str) -> None:
    others = [FULL[name] for name in ("batch", "num_adapters", "popularity", "shape", "parts")]
    for batch, num_adapters, popularity, shape, parts in itertools.product(*others):
        check(rank, batch, num_adapters, popularity, dtypes, shape, parts, path)


@pytest.mark.parametrize("path", DIMENSIONS["path"])
def test_rank_512_and_many_splits(path: str) -> None:
    check(512, 2 if path != "prefill" else 17, 2, "identical", (FP32, FP32), (300, (40,)), "equal", path)
    check(16, 2 if path != "prefill" else 17, 1, "identical", (FP32, FP32), (1700, (24,)), "equal", path)


# ------------------------------------------------------------------------------------------------- overlaps and order

OVERLAPS = [LoraSegment(1, 7, 0, 0.25), LoraSegment(3, 5, 1, -1.5), LoraSegment(0, 4, 2, 2.0)]
LONG_OVERLAPS = [LoraSegment(0, 70, 1), LoraSegment(20, 150, 0, 0.25), LoraSegment(152, 154, 1), LoraSegment(60, 90, 2)]


@pytest.mark.parametrize("dtypes", [(FP32, None), (FP16, None), (FP32, INT8)], ids=str)
@pytest.mark.parametrize(
    ("path", "segments"),
    [("decode", OVERLAPS), ("prefill", LONG_OVERLAPS)],
    ids=["decode", "prefill"],
)
@pytest.mark.parametrize("gained", [(), (0, 2), (1,)], ids=str)
def test_rows_in_several_segments_are_a_weighted_mix(
    dtypes: Any, path: str, segments: list[LoraSegment], gained: tuple[int, ...]
) -> None:
    """gained: the adapters with gains."""
    compute_dtype, block_dtype = dtypes
    generator = torch.Generator().manual_seed(1)
    target = make_target(40, (24, 9))
    adapters = [
        make_weights(target, ranks, FP32, True, generator, i in gained)
        for i, ranks in enumerate(((4, 6), (5, None), (16, 3)))
    ]
    backend = backend_of(block_dtype)
    problem = make_problem(target, adapters, segments, 160, compute_dtype, generator)
    problem.plan.rewrite(segments, 160, is_decode=path != "prefill")
    packed = as_packed(backend, adapters, compute_dtype)
    expected = expected_lora(problem.y, problem.x, segments, packed, target.slices)
    got = run_poisoned(problem, backend, make_table(target, adapters, compute_dtype, backend))
    assert_close(got[~problem.is_base], expected[~problem.is_base])


@pytest.mark.parametrize(
    ("path", "segments"),
    [("decode", OVERLAPS), ("prefill", LONG_OVERLAPS)],
    ids=["decode", "prefill"],
)
def test_gains_of_others_change_no_bits(path: str, segments: list[LoraSegment]) -> None:
    """The kernels that know of gains give the bits of those that do not, in chains of several blocks of ranks too."""
    generator = torch.Generator().manual_seed(10)
    target = make_target(40, (24, 9))
    adapters = [make_weights(target, ranks, FP32, True, generator) for ranks in ((40, 6), (35, None), (20, 3))]
    problem = make_problem(target, adapters, segments, 160, FP32, generator)
    problem.plan.rewrite(segments, 160, is_decode=path != "prefill")
    backend = backend_of()
    table = make_table(target, adapters, FP32, backend)
    before = run(problem, backend, table)
    table.expect(0, (), has_gains=True)
    assert same_bits(run(problem, backend, table), before)


def test_a_row_of_a_decode_step_does_not_depend_on_the_others() -> None:
    generator = torch.Generator().manual_seed(2)
    target = make_target(600, (40, 24))
    adapters = [make_weights(target, (12, 5), FP32, True, generator, has_gain) for has_gain in (True, False, True)]
    slots = [-1, 0, 0, 0, 0, 0, 1, 2, 2]
    problem = make_problem(target, adapters, segments_of(slots), len(slots), FP32, generator)
    problem.plan.rewrite(problem.plan.segments, len(slots), is_decode=True)
    backend = backend_of()
    table = make_table(target, adapters, FP32, backend)
    together = run(problem, backend, table)
    for t in range(1, len(slots)):
        plan = LoraPlan.build([LoraSegment(0, 1, slots[t])], 1, 1, is_decode=True)
        is_base = torch.zeros(1, dtype=torch.bool)
        alone = replace(problem, plan=plan, x=problem.x[t : t + 1], y=problem.y[t : t + 1], is_base=is_base)
        assert same_bits(run(alone, backend, table), together[t : t + 1])


def test_an_adapter_of_a_larger_rank_changes_no_bits_of_the_others() -> None:
    generator = torch.Generator().manual_seed(4)
    target = make_target(600, (300, 24))
    adapters = [make_weights(target, ranks, FP32, False, generator) for ranks in ((12, 5), (16, 8))]
    problem = make_problem(target, adapters, segments_of([0, 0, 1]), 3, FP32, generator)
    problem.plan.rewrite(problem.plan.segments, 3, is_decode=True)
    backend = backend_of()
    table = make_table(target, adapters, FP32, backend)
    before = run(problem, backend, table)
    table.expect(100, ())
    assert backend.rank_capacity(table) == 128
    assert same_bits(run(problem, backend, table), before)


def test_a_slot_that_changes_hands_shows_nothing_of_its_victim() -> None:
    generator = torch.Generator().manual_seed(4)
    target = make_target(32, (48, 16))
    big = make_weights(target, (16, 16), FP32, True, generator)
    small = make_weights(target, (None, 2), FP32, False, generator)
    backend = backend_of()
    table = make_table(target, [big], FP32, backend)
    problem = make_problem(target, [small], [LoraSegment(0, 4, 0)], 4, FP32, generator)
    run(problem, backend, table)
    table.clear_slot(0)
    assert same_bits(run(problem, backend, table), problem.y)
    table.set_block(target.name, 0, 64, backend.pack(small, FP32, table.buffer[64:]))
    assert_close(
        run(problem, backend, table), expected_lora(problem.y, problem.x, problem.plan.segments, [small], target.slices)
    )


# -------------------------------------------------------------------------------------------------------------- replay


class Recorder:
    """Launches nothing and writes everything down, as a capture does."""

    is_interpreted = True

    def __init__(self) -> None:
        self.target = H100
        self.calls: list[tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        self.calls.append((kernel, grid, args, constants))

    def replay(self) -> None:
        launcher = TritonLauncher(CPU)
        for kernel, grid, args, constants in self.calls:
            launcher.launch(kernel, grid, *args, **constants)


STEPS = [[0, 0, 1, 2, 2, 2], [-1, -1, -1, 3, -1, -1], [0, 1, 2, 3, -1, -1], [3, 3, 3, 3, 3, 3], [-1] * 6]


@pytest.mark.parametrize("has_gains", [False, True])
def test_a_capture_serves_other_steps_of_its_padded_size(has_gains: bool) -> None:
    """Captured with two segments; replayed over rewritten plans with fewer and more, other ranks, and none."""
    generator = torch.Generator().manual_seed(5)
    target = make_target(600, (40, 24))
    all_ranks: list[tuple[int | None, ...]] = [(4, 6), (5, None), (16, 3), (12, 0)]
    adapters = [
        make_weights(target, ranks, FP32, True, generator, has_gains and i % 2 == 1)
        for i, ranks in enumerate(all_ranks)
    ]
    eager, recorder = backend_of(), Recorder()
    captured = TritonBackend(CPU, recorder)
    table = make_table(target, adapters, FP32, eager)
    x, y = torch.empty(6, 600), torch.empty(6, 64)
    plan = LoraPlan.build(segments_of([0, 0, 0, 0, 1, 1]), 6, 6, is_decode=True)
    captured.add_lora(y, x, plan, table, 0, target.slices)
    for slots in STEPS:
        problem = make_problem(target, adapters, segments_of(slots), 6, FP32, generator)
        x.copy_(problem.x)
        y.copy_(problem.y)
        plan.rewrite(problem.plan.segments, 6, is_decode=True)
        plan.cut_tiles()
        recorder.replay()
        problem.plan.rewrite(problem.plan.segments, 6, is_decode=True)
        assert same_bits(y, run(problem, eager, table) if problem.plan.segments else problem.y)
    launches = {kernel.__name__: grid for kernel, grid, _, _ in recorder.calls}
    assert len(launches) == 2


def test_a_capture_of_input_gains_serves_other_steps_of_its_padded_size() -> None:
    generator = torch.Generator().manual_seed(5)
    target, adapters = make_target(40, (8,)), adapters_with_input_gains(40, generator)
    eager, recorder = backend_of(), Recorder()
    captured = TritonBackend(CPU, recorder)
    table = make_table(target, adapters, FP32, eager)
    x = torch.empty(6, 40)
    plan = LoraPlan.build(segments_of([0, 0, 0, 0, 1, 1]), 6, 6, is_decode=True)
    captured.scale_input(x, plan, table, 0)
    for slots in STEPS:
        problem = make_problem(target, adapters, segments_of(slots), 6, FP32, generator)
        x.copy_(problem.x)
        plan.rewrite(problem.plan.segments, 6, is_decode=True)
        plan.cut_tiles()
        recorder.replay()
        assert same_bits(x, run_input(problem, eager, table))


def test_rank_capacity_says_for_which_steps_a_capture_is_good() -> None:
    generator = torch.Generator().manual_seed(6)
    target = make_target(32, (24, 16))
    backend = backend_of()
    small, big = (
        make_weights(target, (4, 16), FP32, False, generator),
        make_weights(target, (20, 4), FP32, False, generator),
    )
    table = make_table(target, [small, small], FP32, backend, capacity=3)
    assert (backend.rank_capacity(table), table.largest_rank([0, 1]), table.largest_rank([])) == (16, 16, 0)
    block = torch.empty(backend.packed_nbytes(big, FP32), dtype=torch.uint8)
    table.set_block(target.name, 2, 0, backend.pack(big, FP32, block))
    assert (backend.rank_capacity(table), table.largest_rank([0, 1]), table.largest_rank([0, 2])) == (32, 16, 20)
    table.clear_slot(2)
    assert backend.rank_capacity(table) == 32


# ---------------------------------------------------------------------------------------- the shrink beside the base


class Stream:
    """Of a GPU that is not there: whom it waited for."""

    def __init__(self, waited: list[str], name: str) -> None:
        self._waited, self.name = waited, name

    def wait_stream(self, other: Stream) -> None:
        self._waited.append(f"{self.name} for {other.name}")


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> tuple[TritonBackend, list[str]]:
    """A backend whose captures have a stream beside, and what waited and was launched."""
    done: list[str] = []
    backend, stream = backend_of(), Stream(done, "step")

    class Noted(TritonLauncher):
        def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
            done.append(kernel.__name__)
            super().launch(kernel, grid, *args, **options)

    backend.launcher.__class__ = Noted
    backend._side = Stream(done, "side")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    return backend, done


def test_in_a_capture_the_shrink_of_a_decode_step_is_beside_what_comes_before_the_expand(
    beside: tuple[TritonBackend, list[str]],
) -> None:
    (backend, done), target = beside, make_target(600, (40, 24))
    generator = torch.Generator().manual_seed(7)
    adapters = [make_weights(target, (12, 5), FP32, False, generator)]
    problem = make_problem(target, adapters, segments_of([0, 0, -1]), 3, FP32, generator)
    problem.plan.rewrite(problem.plan.segments, 3, is_decode=True)
    table = make_table(target, adapters, FP32, backend)
    expected = run(problem, backend, table)
    assert done == ["shrink_small_kernel", "expand_small_kernel"]
    done.clear()
    begun = problem.x, problem.plan, table, 0, target.slices
    with backend.capturing():
        backend.begin_lora(*begun)
        done.append("base")
        assert same_bits(run(problem, backend, table), expected)
    order = ["side for step", "shrink_small_kernel", "base", "step for side", "expand_small_kernel"]
    assert done == order
    done.clear()
    backend.begin_lora(*begun)  # a step that is no capture
    with backend.capturing():  # one that is broken off
        backend.begin_lora(*begun)
    assert done == order[:2]
    assert same_bits(run(problem, backend, table), expected)
    assert done == [*order[:2], "shrink_small_kernel", "expand_small_kernel"]


# ---------------------------------------------------------------------------------------------------------- input gains


def adapters_with_input_gains(width: int, generator: torch.Generator) -> list[tuple[SliceWeights | None, ...]]:
    """Four, the last but one without."""
    gains = [draw_gain(width, generator) for _ in range(4)]
    biases = [torch.ones(8) if i == 2 else None for i in range(4)]
    return [
        (SliceWeights(None, None, bias, 1.0, input_gain=gain if bias is None else None),)
        for gain, bias in zip(gains, biases, strict=True)
    ]


MIXED = [*LONG_OVERLAPS, LoraSegment(156, 158, 3, -2.0), LoraSegment(158, 159, 2)]


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
@pytest.mark.parametrize("block_dtype", [None, INT8], ids=str)
@pytest.mark.parametrize("is_decode", [False, True])
@pytest.mark.parametrize("width", [40, 1100])
def test_input_gains_equal_the_float64_loop(
    dtype: torch.dtype, block_dtype: torch.dtype | None, is_decode: bool, width: int
) -> None:
    """Small tiles and large ones, rows of several adapters, rows of one without."""
    generator = torch.Generator().manual_seed(11)
    target, adapters = make_target(width, (8,)), adapters_with_input_gains(width, generator)
    backend = backend_of(block_dtype)
    problem = make_problem(target, adapters, MIXED, 160, dtype, generator)
    problem.plan.rewrite(MIXED, 160, is_decode)
    table = make_table(target, adapters, dtype, backend)
    got = run_input(problem, backend, table)
    expected = expected_input(problem.x, MIXED, adapters)
    assert_close(got[~problem.is_base], expected[~problem.is_base])
    assert same_bits(got[158], problem.x[158])
    assert not backend.fallbacks()


def test_inputs_that_the_kernel_does_not_cover_are_scaled_by_stock_torch() -> None:
    generator = torch.Generator().manual_seed(12)
    target, adapters = make_target(40, (8,)), adapters_with_input_gains(40, generator)
    segments = [LoraSegment(0, 2, 0)]
    problem = make_problem(target, adapters, segments, 3, torch.float64, generator)
    backend = backend_of()
    got = run_input(problem, backend, make_table(target, adapters, FP32, backend))
    assert_close(got[:2], expected_input(problem.x, segments, adapters)[:2], FP32)
    assert [(each.op, each.calls) for each in backend.fallbacks()] == [("scale_input", 1)]


# ------------------------------------------------------------------------------------------------- what is not covered


def test_blocks_of_several_dtypes_go_to_stock_torch() -> None:
    generator = torch.Generator().manual_seed(7)
    target = make_target(32, (24,))
    adapters = [make_weights(target, (4,), FP32, False, generator) for _ in range(2)]
    problem = make_problem(target, adapters, [LoraSegment(0, 2, 0), LoraSegment(2, 4, 1)], 4, FP32, generator)
    table = make_table(target, adapters, FP32, backend_of())
    place = table.buffer.numel() // 64 * 64 - 1024
    layouts = backend_of(FP16).pack(adapters[1], FP32, table.buffer[place:])
    table.set_block(target.name, 1, place, layouts)
    backend = backend_of()
    expected = expected_lora(problem.y, problem.x, problem.plan.segments, adapters, target.slices)
    assert_close(run(problem, backend, table), expected, FP16)
    assert [each.calls for each in backend.fallbacks()] == [1]


@pytest.mark.parametrize("popularity", ["identical", "distinct"])
def test_x_and_y_may_have_strides(popularity: str) -> None:
    generator, rng = torch.Generator().manual_seed(8), np.random.default_rng(8)
    target = make_target(40, (24, 9))
    adapters = [make_weights(target, (5, 16), FP32, False, generator) for _ in range(4)]
    segments = segments_of(draw_slots(popularity, 24, 4, rng))
    problem = make_problem(target, adapters, segments, 24, FP32, generator)
    wide = torch.full((24, 90), float("nan"))
    wide[:, 2:82:2] = problem.x
    problem = replace(problem, x=wide[:, 2:82:2])
    backend = backend_of()
    expected = expected_lora(problem.y, problem.x, segments, adapters, target.slices)
    assert_close(run(problem, backend, make_table(target, adapters, FP32, backend)), expected)
