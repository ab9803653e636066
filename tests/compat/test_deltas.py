"""Deltas and packed tensors of an adapter's weights. Parity with peft: tests/adapters/test_weights.py."""

from __future__ import annotations

import pytest
import torch

from loraplex.adapters.tensors import ALIGNMENT
from loraplex.adapters.weights import LoRALayerWeights, LoRAModel
from loraplex.compat.deltas import compute_delta_weight, optimize


def test_optimize_packs_and_keeps_scaling_apart() -> None:
    a, b, bias = torch.randn(8, 3).T, torch.randn(6, 5)[:, :3], torch.randn(6)
    layer = LoRALayerWeights("m", 3, 6, a, b, lora_bias=bias, scaling=2.0)
    packed = optimize(layer)
    assert not a.is_contiguous()
    for field, tensor in packed.tensors.items():
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % ALIGNMENT == 0
        assert torch.equal(tensor, layer.tensors[field])
    assert (packed.scaling, packed.bias) == (2.0, None)
    starts = sorted(tensor.data_ptr() for tensor in packed.tensors.values())
    assert starts[-1] - starts[0] < 512, "one block"
    assert torch.allclose(compute_delta_weight(packed), 2.0 * b @ a)
    model = optimize(LoRAModel("d", 3, {"m": layer}))
    assert model.get_lora("m").lora_a.is_contiguous()


@pytest.mark.parametrize("field", ["magnitude", "gain", "input_gain"])
def test_what_depends_on_the_base_weight_has_no_delta(field: str) -> None:
    """DoRA and IA3: scaling * B A alone would be another adapter."""
    layer = LoRALayerWeights("m", 4, 6, torch.randn(4, 32), torch.randn(32, 4), **{field: torch.ones(32)})
    with pytest.raises(ValueError, match=rf"m: .* depends on the weight \({field}\); there is no delta weight"):
        compute_delta_weight(layer)
    assert torch.equal(optimize(layer).tensors[field], torch.ones(32))
