"""A mixture of experts in Triton's interpreter against the reference: adapters by popularity, forms of weights, mixes,
ties, poison, and what a captured step has of a plan."""

from __future__ import annotations

import copy
import gc
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from benchmarks.gpu.exact import poisoned_allocations
from benchmarks.gpu.expert_inputs import draw_expert_weights, experts_of
from benchmarks.gpu.inputs import draw_weights, make_table, pack
from benchmarks.gpu.shapes import MIXTRAL, OLMOE, QWEN_MOE, TINY_EXPERTS, ExpertShape
from loraplex.errors import EngineError
from loraplex.kernels.experts import ClampedGate, ExpertLora, Experts, plan_of_rows, route
from loraplex.kernels.plan import LoraPlan, LoraSegment, SlotTable
from loraplex.kernels.quantized_linear import QuantizedWeight
from loraplex.kernels.reference import ReferenceBackend
from loraplex.kernels.triton import experts as moe
from loraplex.kernels.triton.backend import TritonBackend
from loraplex.kernels.triton.experts import ProductBlocks, _Linears, _Sizes
from loraplex.kernels.triton.launch import A100, H100, L4, GpuTarget, TritonLauncher
from tests.kernels.cases import FP16, FP32, case_id, draw_slots, pairwise, same_bits, segments_of

CPU = torch.device("cpu")
INT8 = torch.int8
TOLERANCE = {FP32: 2e-4, FP16: 3e-3}
ROUNDED_TWICE = 3e-2
"""float8 rounds what is between the linears, which in 16 bits was rounded before: a number may fall to another one."""

pytestmark = pytest.mark.skipif(not TritonLauncher(CPU).is_interpreted, reason="runs in Triton's interpreter")
interpreter = pytest.mark.interpreter

DIMENSIONS: dict[str, list[Any]] = {
    "popularity": ["distinct", "uniform", "skewed", "identical", "none"],
    "dtypes": [(FP32, FP32), (FP16, FP16), (FP16, FP32), (FP32, INT8), (FP16, INT8)],
    "quantization": [None, "int8", "int4", "fp8"],
    "rank": [1, 5, 16, 40],
    "batch": [1, 5, 11],
    "is_decode": [True, False],
    "has_bias": [True, False],
}
"""dtypes: of the model, of adapters' blocks."""


@dataclass(frozen=True)
class Layer:
    """A layer's experts with adapters, prepared by two backends: `run` is a step of the first, `expected` of the other,
    in float32."""

    shape: ExpertShape
    dtype: torch.dtype
    backend: TritonBackend
    layer: Experts
    lora: ExpertLora
    reference: Experts
    reference_lora: ExpertLora

    @classmethod
    def make(
        cls,
        dtypes: tuple[torch.dtype, torch.dtype] = (FP32, FP32),
        quantization: str | None = None,
        ranks: Sequence[int] = (4, 4, 4),
        shape: ExpertShape = TINY_EXPERTS,
        has_bias: bool = False,
    ) -> Layer:
        """The adapters: one of each rank."""
        dtype, block_dtype = dtypes
        backend, oracle = TritonBackend(CPU, block_dtype=block_dtype), ReferenceBackend()
        generator, targets = torch.Generator().manual_seed(5), shape.targets()
        packed = [
            [pack(backend, t, draw_weights(t, rank, dtype, generator, has_bias), dtype) for t in targets]
            for rank in ranks
        ]
        exact = [
            [pack(oracle, t, one.weights, FP32) for t, one in zip(targets, of_slot, strict=True)] for of_slot in packed
        ]
        weights = draw_expert_weights(shape, dtype, generator)
        tables = make_table(targets, packed, CPU), make_table(targets, exact, CPU)
        wide = weights if quantization == "int4" else [each.float() for each in weights]  # its scales are rounded
        layer, reference = (
            experts_of(shape, [ops.prepare_linear(each, quantization) for each in of], targets, table)
            for ops, of, table in zip((backend, oracle), (weights, wide), tables, strict=True)
        )
        plan = LoraPlan(1)
        return cls(shape, dtype, backend, layer, ExpertLora(plan, tables[0]), reference, ExpertLora(plan, tables[1]))

    def draw(self, rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """x and logits, their rows not side by side."""
        generator = torch.Generator().manual_seed(seed)
        widths = self.shape.hidden, self.shape.num_experts
        x, logits = (torch.randn(rows, n + 3, generator=generator).to(self.dtype)[:, :n] for n in widths)
        return x, logits

    @torch.inference_mode()
    def run(self, x: Tensor, logits: Tensor, plan: LoraPlan | None = None) -> Tensor:
        lora = None if plan is None else replace(self.lora, plan=plan)
        with poisoned_allocations():
            got = self.backend.experts(x, logits, self.layer, lora)
        assert not self.backend.fallbacks()
        return got

    def expected(self, x: Tensor, logits: Tensor, plan: LoraPlan | None = None) -> Tensor:
        lora = None if plan is None else replace(self.reference_lora, plan=plan)
        return ReferenceBackend().experts(x.float(), logits, self.reference, lora)


def assert_close(got: Tensor, want: Tensor, limit: float | None = None) -> None:
    error = (got.double() - want.double()).abs().max() / want.double().abs().max()
    assert error <= (limit or TOLERANCE[got.dtype]), float(error)


def plan_of(slots: Sequence[int], is_decode: bool = False) -> LoraPlan | None:
    segments = segments_of(slots)
    return LoraPlan.build(segments, len(slots), len(segments) + 3, is_decode=is_decode) if segments else None


# --------------------------------------------------------------------------------------------------------- the operator


@interpreter
@pytest.mark.parametrize("case", pairwise(DIMENSIONS), ids=case_id)
def test_against_the_reference(case: dict[str, Any]) -> None:
    dtypes, quantization, batch = case["dtypes"], case["quantization"], case["batch"]
    ranks = [max(1, case["rank"] - 3 * slot) for slot in range(4)]
    layer = Layer.make(dtypes, quantization, ranks, has_bias=case["has_bias"])
    slots = draw_slots(case["popularity"], batch, len(ranks), np.random.default_rng(batch))
    plan, (x, logits) = plan_of(slots, case["is_decode"]), layer.draw(batch)
    is_rounded_twice = quantization == "fp8" and dtypes[0] == FP16
    got, want = layer.run(x, logits, plan), layer.expected(x, logits, plan)
    assert_close(got, want, ROUNDED_TWICE if is_rounded_twice else None)


@interpreter
@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("shape", [ExpertShape("odd", 37, 21, 2, 1), ExpertShape("all", 200, 70, 3, 3)])
def test_blocks_of_many_rows(shape: ExpertShape, dtype: torch.dtype) -> None:
    """Several blocks of an expert, of 32 or 64 rows, with parts of columns and of depth; all experts of a row."""
    layer = Layer.make((dtype, dtype), ranks=(3, 9), shape=shape)
    x, logits = layer.draw(75)
    plan = plan_of([-1] * 5 + [0] * 30 + [1] * 40)
    assert_close(layer.run(x, logits, plan), layer.expected(x, logits, plan))


MIX = [LoraSegment(1, 6, 0, 0.5), LoraSegment(1, 6, 2, -1.5), LoraSegment(3, 8, 1, 2.0)]


@interpreter
@pytest.mark.parametrize("is_decode", [False, True])
def test_rows_in_several_segments(is_decode: bool) -> None:
    layer = Layer.make(ranks=(2, 17, 5), has_bias=True)
    x, logits = layer.draw(9)
    plan = LoraPlan.build(MIX, 9, 4, is_decode=is_decode)
    assert_close(layer.run(x, logits, plan), layer.expected(x, logits, plan))


@interpreter
def test_what_a_captured_step_has_of_a_plan() -> None:
    """Its buffers and its padded size; the rows of padding are in no segment and hold anything."""
    layer = Layer.make()
    plan = LoraPlan(8)
    plan.write((), 8, is_decode=True)
    captured = copy.copy(plan)
    captured.num_segments, captured.segments, captured.scratch = plan.capacity, (), {}
    x, logits = layer.draw(8)
    x[6:], logits[6:] = math.nan, math.nan
    for slots in ([0, 0, 0, 1, 2, 2], [-1, 1, 1, 1, 1, 1]):
        plan.rewrite(segments_of(slots), 8, is_decode=True)
        got = layer.run(x, logits, captured)
        assert_close(got[:6], layer.expected(x[:6], logits[:6], plan_of(slots)))
    plan.rewrite(MIX[:2], 8, is_decode=True)
    assert_close(layer.run(x, logits, captured)[:6], layer.expected(x[:6], logits[:6], LoraPlan.build(MIX[:2], 6, 2)))


@interpreter
def test_a_row_depends_on_no_other() -> None:
    """Its bits in a batch of the same size, with other rows, experts and adapters beside it, and after another run."""
    layer = Layer.make((FP16, FP16))
    x, logits = layer.draw(12)
    first = layer.run(x, logits, plan_of([0] * 6 + [1] * 6))
    other_x, other_logits = layer.draw(12, seed=1)
    other_x[0], other_logits[0] = x[0], logits[0]
    other_x[5:8], other_logits[8] = math.inf, math.nan
    assert same_bits(layer.run(other_x, other_logits, plan_of([0] + [2] * 11))[0], first[0])
    assert same_bits(layer.run(x, logits, plan_of([0] * 6 + [1] * 6)), first)


@interpreter
def test_an_adapter_of_nan_reaches_its_own_rows_alone() -> None:
    layer = Layer.make(ranks=(4, 4))
    x, logits = layer.draw(8)
    plan = plan_of([0] * 4 + [1] * 4)
    before = layer.run(x, logits, plan)
    table = layer.lora.table
    for target in layer.shape.targets():
        view = table.views(table.first_row(target.name), 1)
        assert view is not None and view.lora_b is not None  # noqa: PT018
        view.lora_b.fill_(math.nan)
    got = layer.run(x, logits, plan)
    assert same_bits(got[:4], before[:4])
    assert got[4:].isnan().all()


@interpreter
def test_equal_logits_choose_the_first_experts_and_nan_is_no_way_out_of_memory() -> None:
    layer = Layer.make(shape=ExpertShape("five", 24, 16, 5, 2))
    x, logits = layer.draw(6)
    logits[4], logits[2] = 1.0, math.nan
    logits[3] = torch.tensor([0.0, 2.0, 1.0, 1.0, -math.inf])
    got = layer.run(x, logits)
    rows = [0, 1, 3, 4, 5]
    assert_close(got[rows], layer.expected(x[rows], logits[rows]))
    assert got[2].isnan().all()
    logits[5] = -math.inf
    assert layer.run(x, logits)[5].isnan().all()


@interpreter
def test_factors_are_divided_by_their_sum_or_are_not() -> None:
    layer = Layer.make(shape=ExpertShape("five", 24, 16, 5, 3))
    x, logits = layer.draw(3)
    as_they_are = replace(layer, layer=replace(layer.layer, normalizes=False))
    as_they_are = replace(as_they_are, reference=replace(layer.reference, normalizes=False))
    got = as_they_are.run(x, logits)
    assert_close(got, as_they_are.expected(x, logits))
    assert not same_bits(got, layer.run(x, logits))


@interpreter
def test_biases_of_experts() -> None:
    layer = Layer.make()

    def biased(experts: Experts) -> Experts:
        generator = torch.Generator().manual_seed(9)
        parts = [
            tuple(replace(e, bias=torch.randn(width, generator=generator)) for e in of)
            for of, width in ((experts.gate_up, 2 * layer.shape.inner), (experts.down, layer.shape.hidden))
        ]
        return replace(experts, gate_up=parts[0], down=parts[1])

    with_biases = replace(layer, layer=biased(layer.layer), reference=biased(layer.reference))
    x, logits = layer.draw(5)
    assert_close(with_biases.run(x, logits), with_biases.expected(x, logits))


@interpreter
@pytest.mark.parametrize("limit", [0.5, 7.0])
def test_a_gate_within_limits(limit: float) -> None:
    """That of gpt-oss. NaN of an adapter passes it, on its own row alone."""
    layer, clamp = Layer.make(), ClampedGate(limit, 1.702)
    clamped = replace(layer, layer=replace(layer.layer, clamp=clamp), reference=replace(layer.reference, clamp=clamp))
    x, logits = layer.draw(5)
    got = clamped.run(4 * x, logits)
    assert_close(got, clamped.expected(4 * x, logits))
    assert not same_bits(got, layer.run(4 * x, logits))
    x[1, 3] = float("nan")
    assert clamped.run(x, logits).isnan().any(1).tolist() == [False, True, False, False, False]


def test_no_rows() -> None:
    layer = Layer.make()
    x, logits = layer.draw(0)
    assert layer.run(x, logits).shape == (0, TINY_EXPERTS.hidden)


@interpreter
def test_a_table_that_never_had_an_adapter() -> None:
    layer = Layer.make()
    x, logits = layer.draw(3)
    layer = replace(layer, lora=replace(layer.lora, table=SlotTable(layer.shape.targets(), 1, torch.zeros(64).byte())))
    assert same_bits(layer.run(x, logits, LoraPlan.build([LoraSegment(0, 3, 0)], 3, 1)), layer.run(x, logits))


# -------------------------------------------------------------------------------------------------------------- routing


@interpreter
@pytest.mark.parametrize(("rows", "num_experts", "top_k"), [(1, 1, 1), (3, 6, 2), (40, 3, 3), (50, 9, 2)])
def test_pairs_are_sorted_and_cut(rows: int, num_experts: int, top_k: int) -> None:
    """By (expert, row), in blocks of one expert; groups are the segments as `plan_of_rows` cuts them."""
    shape = ExpertShape("s", 8, 8, num_experts, top_k)
    logits = torch.randn(rows, num_experts, generator=torch.Generator().manual_seed(rows)).round()  # with ties
    layer = Experts((), (None,) * num_experts, top_k, True)  # type: ignore[arg-type]
    sizes = _Sizes.of(rows, layer, FP32)
    plan = LoraPlan.build([s for s in MIX if s.end <= rows] or [LoraSegment(0, rows, 1)], rows, 5)
    lora = ExpertLora(plan, Layer.make(shape=shape).lora.table)
    with poisoned_allocations():
        found, groups = moe._routed(TritonLauncher(CPU), logits, layer, sizes, lora)
    assert groups is not None
    chosen, factors = route(logits, top_k, True)
    wanted = sorted((int(e), t, float(f)) for t in range(rows) for e, f in zip(chosen[t], factors[t], strict=True))
    order, places = found.order.tolist(), found.places.tolist()
    assert [pair // top_k for pair in order] == [t for _, t, _ in wanted]
    assert [places[pair] for pair in order] == list(range(len(order)))
    assert torch.allclose(found.factors[found.order.long()], torch.tensor([f for _, _, f in wanted]))
    experts = [e for e, _, _ in wanted]
    blocks = [block for block in zip(*found.blocks.tolist(), strict=True) if block[0] >= 0]
    assert [e for e, _, count in blocks for _ in range(count)] == experts
    assert [first + i for _, first, count in blocks for i in range(count)] == list(range(len(experts)))
    assert all(a[2] == sizes.rows for a, b in itertools.pairwise(blocks) if a[0] == b[0])
    s_row = 0
    for expert in range(num_experts):
        mine = torch.tensor([t for e, t, _ in wanted if e == expert], dtype=torch.int64)
        cut, begin = plan_of_rows(plan, mine).segments if len(mine) else (), experts.index(expert) if len(mine) else 0
        count = int(groups.num_groups[expert])
        first, last, slot, weight, start = groups.groups[:, expert, :count].tolist()
        assert [(a - begin, b - begin) for a, b in zip(first, last, strict=True)] == [(s.start, s.end) for s in cut]
        assert slot == [s.lora_slot for s in cut]
        assert torch.tensor(weight, dtype=torch.int32).view(FP32).tolist() == [s.weight for s in cut]
        assert start == [s_row + sum(s.end - s.start for s in cut[:i]) for i in range(count)]
        s_row += sum(s.end - s.start for s in cut)
    assert s_row <= groups.num_s_rows


@pytest.mark.parametrize("shape", [MIXTRAL, QWEN_MOE, OLMOE, TINY_EXPERTS], ids=lambda shape: shape.name)
def test_any_choice_fits_into_the_blocks(shape: ExpertShape) -> None:
    layer = Experts((), (None,) * shape.num_experts, shape.top_k, True)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    for rows in (*range(1, 40), 64, 100, 511, 2048):
        for bias in (0.0, 5.0):  # all experts alike, or some far more often
            logits = rng.normal(size=(rows, shape.num_experts)) + bias * rng.normal(size=shape.num_experts)
            counts = Counter(np.argsort(-logits, axis=1)[:, : shape.top_k].ravel().tolist())
            for dtype in (FP32, FP16):
                sizes = _Sizes.of(rows, layer, dtype)
                assert sum(-(-count // sizes.rows) for count in counts.values()) <= sizes.num_blocks


# ----------------------------------------------------------------------------------------------------- weights and gaps


def test_a_layer_of_several_forms_is_left_to_stock_torch() -> None:
    """Eager, and counted; a captured step cannot have it."""
    layer = Layer.make((FP32, FP32), "int8")
    first = replace(layer.layer.down[0], weight=torch.randn(TINY_EXPERTS.hidden, TINY_EXPERTS.inner))
    mixed = replace(layer.layer, down=(first, *layer.layer.down[1:]))
    x, logits = layer.draw(2)
    assert layer.backend.experts(x, logits, mixed, None).shape == x.shape
    (fallback,) = layer.backend.fallbacks()
    assert fallback.op == "experts"
    assert "several forms: torch.float32, torch.int8" in fallback.reason
    with layer.backend.capturing(), pytest.raises(EngineError, match="several forms"):
        layer.backend.experts(x, logits, mixed, None)


def test_what_kernels_cannot_read_has_a_reason() -> None:
    layer, (x, logits) = Layer.make(), Layer.make().draw(2)
    tables = layer.backend.expert_tables
    found = tables.find(layer.layer.down), tables.find(layer.layer.gate_up)
    assert moe.experts_gap(x, logits, found, layer.layer) is None
    assert "float64" in str(moe.experts_gap(x.double(), logits, found, layer.layer))
    assert "weights torch.float32" in str(moe.experts_gap(x.half(), logits, found, layer.layer))
    scaled = replace(layer.layer, scales_inputs=True)
    assert "experts' inputs" in str(moe.experts_gap(x, logits, found, scaled))
    shifted = torch.zeros(TINY_EXPERTS.hidden * TINY_EXPERTS.inner + 1)[1:].view(TINY_EXPERTS.hidden, -1)
    odd = tuple(replace(each, weight=shifted) for each in layer.layer.down)
    assert "odd addresses" in str(tables.find(odd))


def test_tables_live_as_long_as_their_weights() -> None:
    tables, layer = moe.ExpertTables(), Layer.make()
    found = tables.find(layer.layer.down)
    assert tables.find(layer.layer.down) is found
    assert isinstance(found, _Linears)
    elsewhere = tuple(replace(each, first_row=each.first_row + 1) for each in layer.layer.down)
    assert tables.find(elsewhere) is not found
    assert tables.find(layer.layer.down) is found
    assert len(tables._found) == 1
    del layer, elsewhere
    gc.collect()
    assert len(tables._found) == 0


@pytest.mark.parametrize("target", [A100, L4, H100], ids=lambda t: f"sm_{t.capability[0]}{t.capability[1]}")
@pytest.mark.parametrize("quantization", [None, "int8", "int4", "fp8"])
def test_stages_fit_into_shared_memory(target: GpuTarget, quantization: str | None) -> None:
    weight = torch.zeros(1, 4096, dtype=FP16)
    kept = weight if quantization is None else QuantizedWeight.of(weight, quantization).q
    linears = _Linears(weight, kept.dtype, FP32, 4096, 14336, kept.shape[1], False)
    for dtype, rows in ((FP16, 16), (FP16, 64), (FP16, 128), (FP32, 16), (FP32, 32)):
        for is_first in (True, False):
            blocks = ProductBlocks.of(rows, linears, is_first, dtype, target)
            itemsize = linears.weight_dtype.itemsize if quantization else dtype.itemsize
            stage_bytes = blocks.depth * ((1 + is_first) * blocks.columns * itemsize + rows * dtype.itemsize)
            assert 2 <= blocks.num_stages <= 4
            assert (blocks.num_stages - 1) * stage_bytes <= target.max_shared_bytes // 2
