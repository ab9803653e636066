"""Adapters of other kinds than plain LoRA, and what a kernel computes with a slice of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from loraplex.adapters.weights import LoRALayerWeights, LoRAModel
from loraplex.kernels.slices import SliceWeights
from tests.memory.rig import TARGETS, make_model


def applied(s: SliceWeights, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The base's product with a slice on it, as kernels compute it (SliceWeights), in float64."""
    x = x.double() if s.input_gain is None else x.double() * s.input_gain
    y = x @ weight.double().T + (0 if bias is None else bias.double())
    gain = 1 if s.gain is None else s.gain.double()
    delta = 0
    if s.lora_a is not None and s.lora_b is not None:
        delta = s.scaling * (x @ s.lora_a.double().T) @ s.lora_b.double().T
    return gain * (y + delta) + (0 if s.bias is None else s.bias.double())


# ------------------------------------------------------------------------------------------------------------- adapters


def make_dora(
    digest: str,
    rank: int = 4,
    modules: Sequence[str] = ("q_proj", "k_proj", "v_proj", "down_proj"),
    *,
    with_biases: bool = False,
) -> LoRAModel:
    """Random weights with a magnitude in every module; `with_biases`: and those of make_model."""
    model = make_model(digest, rank, modules=modules)
    return replace(model, layers={layer.module_name: _with_magnitude(layer, with_biases) for layer in model})


def _with_magnitude(layer: LoRALayerWeights, with_biases: bool) -> LoRALayerWeights:
    assert layer.lora_b is not None
    bias, lora_bias = (layer.bias, layer.lora_bias) if with_biases else (None, None)
    magnitude = torch.linspace(0.5, 3, layer.lora_b.size(0))
    return replace(layer, magnitude=magnitude, bias=bias, lora_bias=lora_bias)


def make_ia3(digest: str, input_modules: Sequence[str] = ("down_proj",)) -> LoRAModel:
    """Gains on the outputs of every module, but of `input_modules` on the inputs."""
    layers = {}
    for target in TARGETS:
        for s in target.slices:
            is_input = s.module_name.rpartition(".")[2] in input_modules
            generator = torch.Generator().manual_seed(int.from_bytes(digest.encode()) % 2**40 + target.layer)
            gain = torch.randn(target.in_features if is_input else s.out_features, generator=generator)
            field = {"input_gain" if is_input else "gain": gain}
            layers[s.module_name] = LoRALayerWeights(s.module_name, 0, 0.0, None, None, **field)
    return LoRAModel(digest, 0, layers)
