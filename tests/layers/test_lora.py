"""Layers with LoRA: base rows and base layers untouched, deltas per slice, classes by kind, slicing that recombines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from loraplex.core import LoraSlice, LoraTarget, Shard, ShardKind
from loraplex.kernels.plan import LoraPlan, LoraSegment
from loraplex.kernels.slices import SliceWeights
from loraplex.kernels.torch_ops import TorchBackend
from loraplex.layers.lora import (
    BaseLayerWithLoRA,
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
    ReplicatedLinearWithLoRA,
    RowParallelLinearWithLoRA,
    with_lora,
)
from tests.kernels.cases import (
    BACKENDS,
    FP32,
    assert_close,
    draw_gain,
    expected_input,
    expected_lora,
    make_table,
    make_weights,
    same_bits,
)

each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
IN, TOKENS = 24, 7


@dataclass(frozen=True)
class PlainLinear:
    """The least that a model of one's own must bring."""

    target: LoraTarget
    weight: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T

    def forward_slice(self, x: torch.Tensor, slice_index: int) -> torch.Tensor:
        s = self.target.slices[slice_index]
        return x @ self.weight[s.out_offset : s.out_offset + s.out_features].T


def make_base(kind: ShardKind, full: list[int], size: int = 1, in_features: int = IN) -> PlainLinear:
    """The layer of rank 0 of `size`."""
    here = [n if kind in (ShardKind.ROW, ShardKind.REPLICATED) else n // size for n in full]
    offsets = [sum(here[:i]) for i in range(len(here))]
    slices = tuple(
        LoraSlice(f"linear.{i}", offset, n, f) for i, (offset, n, f) in enumerate(zip(offsets, here, full, strict=True))
    )
    own_in = in_features // size if kind is ShardKind.ROW else in_features
    target = LoraTarget("linear", 0, own_in, in_features, slices, kind, Shard(0, size))
    weight = torch.randn(sum(here), own_in, generator=torch.Generator().manual_seed(0))
    return PlainLinear(target, weight)


KINDS = [
    (ShardKind.REPLICATED, [16], ReplicatedLinearWithLoRA),
    (ShardKind.COLUMN, [16], ColumnParallelLinearWithLoRA),
    (ShardKind.COLUMN, [16, 16], MergedColumnParallelLinearWithLoRA),
    (ShardKind.QKV, [16, 8, 8], QKVParallelLinearWithLoRA),
    (ShardKind.ROW, [16], RowParallelLinearWithLoRA),
]
each_kind = pytest.mark.parametrize(("kind", "full", "cls"), KINDS, ids=[c.__name__ for *_, c in KINDS])


@each_kind
def test_with_lora_goes_by_the_targets_kind(kind: ShardKind, full: list[int], cls: type[BaseLayerWithLoRA]) -> None:
    base = make_base(kind, full)
    layer = with_lora(base)
    assert type(layer) is cls
    assert layer.base_layer is base
    assert layer.target is base.target
    assert layer.lora_backend is None
    assert layer.set_lora is False


def test_a_layer_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="RowParallelLinearWithLoRA takes row layers, linear is column"):
        RowParallelLinearWithLoRA(make_base(ShardKind.COLUMN, [16]))


@each_backend
@each_kind
def test_forward_adds_each_slices_delta(backend: Any, kind: ShardKind, full: list[int], cls: type) -> None:
    generator = torch.Generator().manual_seed(1)
    base = make_base(kind, full)
    adapters = [make_weights(base.target, [rank] * len(full), FP32, True, generator) for rank in (3, 8)]
    layer = with_lora(base)
    layer.set_lora_info(make_table(base.target, adapters, FP32, backend), backend)
    assert layer.lora_backend is backend
    assert layer.set_lora is True
    segments = [LoraSegment(1, 3, 1), LoraSegment(3, 6, 0, 0.5)]
    x = torch.randn(TOKENS, IN, generator=generator)
    got = layer.forward(x, LoraPlan.build(segments, TOKENS, 4))
    assert_close(got, expected_lora(base.forward(x), x, segments, adapters, base.target.slices))
    assert same_bits(got[[0, 6]], base.forward(x)[[0, 6]])
    assert same_bits(layer.apply_lora(base.forward(x), x, LoraPlan.build(segments, TOKENS, 4)), got)


@each_backend
@each_kind
def test_gains_multiply_outputs_and_in_a_layer_of_one_slice_inputs(
    backend: Any, kind: ShardKind, full: list[int], cls: type
) -> None:
    """An adapter that has them, one that does not, and base rows."""
    generator = torch.Generator().manual_seed(2)
    base = make_base(kind, full)
    adapters = [
        make_weights(base.target, [4] * len(full), FP32, True, generator, has_gain) for has_gain in (True, False)
    ]
    has_input_gain = len(full) == 1
    if has_input_gain:
        (weights,) = adapters[0]
        assert weights is not None
        adapters[0] = (replace(weights, input_gain=draw_gain(IN, generator)),)
    table = make_table(base.target, adapters, FP32, backend)
    assert (table.has_gains, table.has_input_gains) == (True, has_input_gain)
    layer = with_lora(base)
    layer.set_lora_info(table, backend)
    segments = [LoraSegment(1, 3, 0, 0.5), LoraSegment(3, 4, 1), LoraSegment(4, 6, 0)]
    x = torch.randn(TOKENS, IN, generator=generator)
    inputs = expected_input(x, segments, adapters).float() if has_input_gain else x
    given = x.clone()
    got = layer.forward(given, LoraPlan.build(segments, TOKENS, 4))
    assert_close(given, inputs)
    assert_close(got, expected_lora(base.forward(inputs), inputs, segments, adapters, base.target.slices))
    for t in (0, 3, 6):
        assert same_bits(given[t], x[t])
    for t in (0, 6):
        assert same_bits(got[t], base.forward(x)[t])


@each_backend
@pytest.mark.parametrize("cuts_slices", [False, True])
@pytest.mark.parametrize(("kind", "full"), [(kind, full) for kind, full, _ in KINDS if len(full) > 1], ids=str)
def test_gains_on_a_shared_input_are_each_slices_own(
    backend: Any, kind: ShardKind, full: list[int], cuts_slices: bool
) -> None:
    """Beside output gains and biases, on rows of two such adapters, beside a LoRA; all other rows keep their bits, and
    the input too."""
    generator = torch.Generator().manual_seed(3)
    base = make_base(kind, full)
    plain = make_weights(base.target, [4] * len(full), FP32, True, generator)

    def ia3(*has_input_gain: bool) -> tuple[SliceWeights | None, ...]:
        gains = [draw_gain(IN if of_input else n, generator) for of_input, n in zip(has_input_gain, full, strict=True)]
        return tuple(
            SliceWeights(None, None, None, 1.0, **{"input_gain" if of_input else "gain": gain})
            for of_input, gain in zip(has_input_gain, gains, strict=True)
        )

    adapters = [ia3(*(i > 0 for i in range(len(full)))), plain, ia3(*(True for _ in full))]
    table = make_table(base.target, adapters, FP32, backend)
    assert table.shared_input_slots == {0, 2}
    layer = with_lora(base, base.forward_slice if cuts_slices else None)
    layer.set_lora_info(table, backend)
    x = torch.randn(TOKENS, IN, generator=generator)
    without = [LoraSegment(3, 4, 1)]
    segments = [LoraSegment(1, 3, 0, 0.5), *without, LoraSegment(4, 6, 2), LoraSegment(5, 6, 0)]
    given = x.clone()
    got = layer.forward(given, LoraPlan.build(segments, TOKENS, 4))
    assert same_bits(given, x)
    product = base.forward(x)
    for index, s in enumerate(base.target.slices):
        columns = slice(s.out_offset, s.out_offset + s.out_features)
        product[:, columns] = base.forward(expected_input(x, segments, adapters, index).float())[:, columns]
    assert_close(got, expected_lora(product, x, segments, adapters, base.target.slices))
    expected = layer.forward(x, LoraPlan.build(without, TOKENS, 4))
    for t in (0, 3, 6):
        assert same_bits(got[t], expected[t])
    table.clear_slot(0)
    table.clear_slot(2)
    assert not table.shared_input_slots


def test_inputs_are_left_alone_until_an_adapter_has_an_input_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers without such adapters have no call for them, and layers of several slices never."""
    calls: list[int] = []
    for kind, full in ((ShardKind.ROW, [16]), (ShardKind.COLUMN, [16, 16])):
        base, backend = make_base(kind, full), TorchBackend()
        monkeypatch.setattr(backend, "scale_input", lambda *_arguments: calls.append(1))
        adapter = make_weights(base.target, [2] * len(full), FP32, False, torch.Generator(), True)
        table = make_table(base.target, [adapter], FP32, backend)
        layer, plan = with_lora(base), LoraPlan.build([LoraSegment(0, 1, 0)], TOKENS, 1)
        layer.set_lora_info(table, backend)
        layer.forward(torch.randn(TOKENS, IN), plan)
        assert not calls
        table.expect(0, (), has_input_gains=True)
        layer.forward(torch.randn(TOKENS, IN), plan)
        layer.forward(torch.randn(TOKENS, IN))
        layer.forward(torch.randn(TOKENS, IN), LoraPlan(2))
        assert len(calls) == (kind is ShardKind.ROW)
        calls.clear()


def test_without_adapters_it_is_the_base_layer() -> None:
    base = make_base(ShardKind.COLUMN, [16])
    layer, x = with_lora(base), torch.randn(TOKENS, IN)
    assert same_bits(layer.forward(x), base.forward(x))
    assert same_bits(layer.forward(x, LoraPlan(2)), base.forward(x))
    with pytest.raises(RuntimeError, match="linear has a plan with adapters but no slot table"):
        layer.forward(x, LoraPlan.build([LoraSegment(0, 1, 0)], TOKENS, 1))


def test_a_table_of_another_model_is_refused() -> None:
    backend, base = BACKENDS[0], make_base(ShardKind.COLUMN, [16])
    other = LoraTarget("other", 0, IN, IN, base.target.slices)
    weights: tuple[SliceWeights | None, ...] = make_weights(other, [2], FP32, False, torch.Generator())
    with pytest.raises(KeyError, match="linear"):
        with_lora(base).set_lora_info(make_table(other, [weights], FP32, backend), backend)
