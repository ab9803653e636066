"""The experts of a layer on every instruction set: a float64 loop, and bits of a row that no other row decides."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from loraplex.core import LoraSlice, LoraTarget
from loraplex.errors import ModelConfigError
from loraplex.kernels.experts import ClampedGate, ExpertLinear, ExpertLora, Experts, route
from loraplex.kernels.native.backend import NativeBackend
from loraplex.kernels.plan import LoraPlan, LoraSegment, SlotTable
from loraplex.kernels.protocols import KernelBackend
from loraplex.kernels.reference import ReferenceBackend
from loraplex.kernels.slices import SliceWeights
from tests.kernels.cases import BF16, FP16, FP32, assert_close, make_weights, same_bits, segments_of
from tests.kernels.native.machine import (
    ISAS,
    assert_same_on_every_isa,
    assert_same_on_threads,
    library_or_skip,
)

NUM_EXPERTS, TOP_K, HIDDEN, INNER = 5, 2, 52, 37
RANKS: tuple[tuple[tuple[int | None, ...], tuple[int | None, ...]], ...] = (
    ((8, 8), (5,)),
    ((None, 24), (None,)),
    ((3, None), (70,)),
)
"""Of an adapter's gate and up, and of its down; one of them has nothing on experts with odd numbers."""


def targets() -> list[LoraTarget]:
    found = []
    for expert in range(NUM_EXPERTS):
        slices = LoraSlice(f"{expert}.gate", 0, INNER, INNER), LoraSlice(f"{expert}.up", INNER, INNER, INNER)
        found.append(LoraTarget(f"{expert}.gate_up", 0, HIDDEN, HIDDEN, slices))
        found.append(LoraTarget(f"{expert}.down", 0, INNER, INNER, (LoraSlice(f"{expert}.down", 0, HIDDEN, HIDDEN),)))
    return found


class Layer:
    """Weights of one layer and adapters on them, drawn; `run` is one step of a backend."""

    def __init__(
        self,
        dtype: torch.dtype = FP32,
        quantization: str | None = None,
        clamp: ClampedGate | None = None,
        scales_inputs: bool = False,
    ) -> None:
        """With a clamp the linears have biases, too."""
        generator = torch.Generator().manual_seed(3)
        self.quantization, self.clamp, self.scales_inputs = quantization, clamp, scales_inputs
        self.targets = targets()
        self.weights = [
            (
                torch.randn(sum(s.out_features for s in t.slices), t.in_features, generator=generator)
                / t.in_features**0.5
            ).to(dtype)
            for t in self.targets
        ]
        self.adapters: list[list[tuple[SliceWeights | None, ...]]] = [
            [
                make_weights(target, ranks[index % 2], FP32, False, generator)
                if slot != 1 or index // 2 % 2 == 0
                else (None,) * len(target.slices)
                for index, target in enumerate(self.targets)
            ]
            for slot, ranks in enumerate(RANKS)
        ]

        self.biases = [None if clamp is None else torch.randn(len(w), generator=generator) for w in self.weights]

    def table(self, ops: KernelBackend) -> SlotTable:
        buffer = torch.full((1 << 21,), 255, dtype=torch.uint8)
        table, end = SlotTable(self.targets, len(self.adapters), buffer), 0
        for slot, adapter in enumerate(self.adapters):
            for target, slices in zip(self.targets, adapter, strict=True):
                if any(slices):
                    layouts = ops.pack(slices, FP32, buffer[end:])
                    table.set_block(target.name, slot, end, layouts)
                    end += ops.packed_nbytes(slices, FP32)
        return table

    def experts(self, ops: KernelBackend, table: SlotTable, normalizes: bool = True) -> Experts:
        linears = [
            ExpertLinear(ops.prepare_linear(w, self.quantization), bias, t.slices, table.first_row(t.name))
            for w, bias, t in zip(self.weights, self.biases, self.targets, strict=True)
        ]
        return Experts(tuple(linears[0::2]), tuple(linears[1::2]), TOP_K, normalizes, self.clamp, self.scales_inputs)

    def run(self, ops: KernelBackend, x: Tensor, logits: Tensor, segments: list[LoraSegment]) -> Tensor:
        table = self.table(ops)
        plan = LoraPlan.build(segments, len(x), max(1, len(segments)))
        return ops.experts(x, logits, self.experts(ops, table), ExpertLora(plan, table) if segments else None)


def draw(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, HIDDEN, generator=generator)
    return x, torch.randn(rows, NUM_EXPERTS, generator=generator)


def expected(layer: Layer, x: Tensor, logits: Tensor, segments: list[LoraSegment]) -> Tensor:
    """Row by row in float64, each weight with its adapters' deltas in it."""
    y = np.zeros(x.shape)
    for t in range(len(x)):
        mine = [s for s in segments if s.start <= t < s.end]
        p = np.exp(logits[t].double().numpy() - logits[t].max().item())
        p /= p.sum()
        chosen = np.argsort(-p, kind="stable")[:TOP_K]

        def product(index: int, v: np.ndarray, mine: list[LoraSegment] = mine) -> np.ndarray:
            w = layer.weights[index].double().numpy().copy()
            for s in mine:
                for part, slices in zip(layer.adapters[s.lora_slot][index], layer.targets[index].slices, strict=True):
                    if part is not None and part.lora_a is not None and part.lora_b is not None:
                        delta = part.lora_b.double().numpy() @ part.lora_a.double().numpy()
                        rows = slice(slices.out_offset, slices.out_offset + slices.out_features)
                        w[rows] += s.weight * part.scaling * delta
            bias = layer.biases[index]
            return w @ v + (0 if bias is None else bias.double().numpy())

        for e in chosen:
            before, behind = 1.0, p[e] / p[chosen].sum()
            if layer.scales_inputs:
                before, behind = 1 / (1 + np.exp(-logits[t, e].double().item())), 1.0
            gate, up = np.split(product(2 * e, before * x[t].double().numpy()), 2)
            y[t] += behind * product(2 * e + 1, between(layer.clamp, gate, up))
    return torch.from_numpy(y)


def between(clamp: ClampedGate | None, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """The two linears of an expert, as GptOssExperts has it where there is a clamp."""
    if clamp is None:
        return gate / (1 + np.exp(-gate)) * up
    gate = np.minimum(gate, clamp.limit)
    return (np.clip(up, -clamp.limit, clamp.limit) + 1) * gate / (1 + np.exp(-clamp.alpha * gate))


SEGMENTS = [[], segments_of([-1] * 3 + [0] * 4 + [1] * 5 + [2] * 9), segments_of([2] * 21)]
MIX = [LoraSegment(2, 15, 0, 0.5), LoraSegment(2, 15, 2, -1.5), LoraSegment(4, 21, 1, 2.0)]


@pytest.fixture(params=ISAS)
def native(request: pytest.FixtureRequest) -> NativeBackend:
    return NativeBackend(library_or_skip(request.param), 2)


@pytest.mark.parametrize("segments", [*SEGMENTS, MIX], ids=["base", "adapters", "one", "mix"])
def test_against_float64(native: NativeBackend, segments: list[LoraSegment]) -> None:
    layer, (x, logits) = Layer(), draw(21)
    wanted = expected(layer, x, logits, segments)
    assert_close(layer.run(native, x, logits, segments), wanted, FP32)
    assert_close(layer.run(ReferenceBackend(), x, logits, segments), wanted, FP32)


CLAMP = ClampedGate(limit=0.75, alpha=1.702)


@pytest.mark.parametrize("segments", [*SEGMENTS, MIX], ids=["base", "adapters", "one", "mix"])
def test_a_clamped_gate_and_biases(native: NativeBackend, segments: list[LoraSegment]) -> None:
    layer, (x, logits) = Layer(clamp=CLAMP), draw(21)
    wanted = expected(layer, x, logits, segments)
    assert_close(layer.run(native, x, logits, segments), wanted, FP32)
    assert_close(layer.run(ReferenceBackend(), x, logits, segments), wanted, FP32)


@pytest.mark.parametrize("clamp", [None, CLAMP])
def test_factors_of_inputs(native: NativeBackend, clamp: ClampedGate | None) -> None:
    """As Llama 4 has them; and a row has the bits that it has alone."""
    layer, (x, logits) = Layer(clamp=clamp, scales_inputs=True), draw(21)
    wanted = expected(layer, x, logits, SEGMENTS[1])
    got = layer.run(native, x, logits, SEGMENTS[1])
    assert_close(got, wanted, FP32)
    assert_close(layer.run(ReferenceBackend(), x, logits, SEGMENTS[1]), wanted, FP32)
    assert same_bits(layer.run(native, x[:3], logits[:3], []), got[:3])


def test_a_clamped_gate_keeps_large_numbers_finite_and_a_nan(native: NativeBackend) -> None:
    """Far beyond what e^x holds, and in one row a number that is none."""
    layer, (x, logits) = Layer(clamp=CLAMP), draw(6)
    x[1:4] *= 1e4
    x[5, 0] = float("nan")
    got, wanted = (layer.run(ops, x, logits, []) for ops in (native, ReferenceBackend()))
    assert_close(got[:5], wanted[:5].double(), FP16)  # numbers of 1e4 cancel out before the gate
    assert got[5].isnan().all()
    assert wanted[5].isnan().all()


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_weights_of_16_bits(native: NativeBackend, dtype: torch.dtype) -> None:
    layer, (x, logits) = Layer(dtype), draw(21)
    assert_close(layer.run(native, x, logits, SEGMENTS[1]), expected(layer, x, logits, SEGMENTS[1]), FP32)


def test_int8_is_the_reference(native: NativeBackend) -> None:
    layer, (x, logits) = Layer(quantization="int8"), draw(21)
    wanted = layer.run(ReferenceBackend(), x, logits, SEGMENTS[1])
    assert_close(layer.run(native, x, logits, SEGMENTS[1]), wanted, FP16)


@pytest.mark.parametrize("clamp", [None, CLAMP])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_row_has_the_bits_that_it_has_alone(
    native: NativeBackend, quantization: str | None, clamp: ClampedGate | None
) -> None:
    layer, (x, logits) = Layer(quantization=quantization, clamp=clamp), draw(40)
    slots = [-1] * 7 + [0] * 9 + [1] * 9 + [2] * 15
    together = layer.run(native, x, logits, segments_of(slots))
    for t, slot in enumerate(slots):
        alone = layer.run(native, x[t : t + 1], logits[t : t + 1], segments_of([slot]))
        assert same_bits(alone[0], together[t]), t
    assert same_bits(layer.run(native, x, logits, [])[:7], together[:7])


@pytest.mark.parametrize("clamp", [None, CLAMP])
def test_threads_and_instruction_sets_change_no_bit(native: NativeBackend, clamp: ClampedGate | None) -> None:
    layer, (x, logits) = Layer(BF16, clamp=clamp), draw(40)
    segments = segments_of([-1] * 7 + [0] * 9 + [1] * 9 + [2] * 15)
    assert_same_on_threads(native, lambda ops: (layer.run(ops, x, logits, segments),))
    if native.library.isa == "avx512":
        assert_same_on_every_isa(lambda ops: (layer.run(ops, x, logits, segments),))


def test_equal_logits_choose_the_first_experts_and_other_rows_do_not_see_a_nan(native: NativeBackend) -> None:
    layer, (x, logits) = Layer(), draw(6)
    before = layer.run(native, x, logits, SEGMENTS[0])
    logits[2], logits[4] = float("nan"), 1.0
    x[1, 3] = float("inf")
    got = layer.run(native, x, logits, SEGMENTS[0])
    assert same_bits(got[[0, 3, 5]], before[[0, 3, 5]])
    assert got[2].isnan().all()
    assert not got[1].isfinite().any()
    assert route(logits[4:5], TOP_K, True)[0].tolist() == [[0, 1]]
    assert_close(got[4:5], expected(layer, x[4:5], logits[4:5], []), FP32)


def test_a_form_of_weights_that_the_kernel_does_not_read_is_refused(native: NativeBackend) -> None:
    layer, (x, logits) = Layer(), draw(2)
    table = layer.table(native)
    plain = Experts(
        tuple(
            ExpertLinear(w, None, t.slices, 0) for w, t in zip(layer.weights[0::2], layer.targets[0::2], strict=True)
        ),
        tuple(
            ExpertLinear(w, None, t.slices, 0) for w, t in zip(layer.weights[1::2], layer.targets[1::2], strict=True)
        ),
        TOP_K,
        False,
    )
    with pytest.raises(ModelConfigError, match="kept as Tensor, which their kernel does not read"):
        native.experts(x, logits, plain, None)
    assert table.capacity == len(layer.adapters)


def test_a_gated_sum(native: NativeBackend) -> None:
    generator = torch.Generator().manual_seed(1)
    y, x = (torch.randn(9, 71, generator=generator) for _ in range(2))
    gate = torch.randn(9, 1, generator=generator) * 4
    wanted = y.double() + torch.sigmoid(gate.double()) * x.double()
    assert_close(ReferenceBackend().add_gated(y, x, gate), wanted)
    assert_close(native.add_gated(y, x, gate), wanted)
