"""Backends that pack gains, and what a kernel computes with a packed slice: adapters of other kinds than plain LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from loraplex.adapters.weights import LoRALayerWeights, LoRAModel
from loraplex.kernels.ops import KernelBackend
from loraplex.kernels.plan import ABSENT, SliceLayout, SliceWeights, align
from loraplex.kernels.reference import ReferenceBackend, copy_part
from tests.kernels.cases import BACKENDS
from tests.memory.rig import TARGETS, make_model

Slices = Sequence[SliceWeights | None]
Layouts = tuple[SliceLayout | None, ...]


class GainBackend(ReferenceBackend):
    """The stock block of A, B and bias, and behind it the gains of its slices."""

    name = "gains"

    def packed_nbytes(self, slices: Slices, compute_dtype: torch.dtype) -> int:
        return self._layout(slices, compute_dtype)[0]

    def packed_layouts(self, slices: Slices, compute_dtype: torch.dtype) -> Layouts:
        return self._layout(slices, compute_dtype)[1]

    def pack(self, slices: Slices, compute_dtype: torch.dtype, out: torch.Tensor) -> Layouts:
        super().pack(_without_gains(slices), compute_dtype, out)
        layouts = self._layout(slices, compute_dtype)[1]
        for s, layout in zip(slices, layouts, strict=True):
            if s is not None and layout is not None:
                copy_part(s.gain, out, layout.gain_offset, torch.float32)
                copy_part(s.input_gain, out, layout.input_gain_offset, torch.float32)
        return layouts

    def unpack(
        self, layouts: Sequence[SliceLayout | None], in_features: int, out_features: Sequence[int], block: torch.Tensor
    ) -> tuple[SliceWeights | None, ...]:
        def part(offset: int, width: int) -> torch.Tensor | None:
            return None if offset == ABSENT else block[offset : offset + 4 * width].view(torch.float32)

        plain = [None if x is None else replace(x, gain_offset=ABSENT, input_gain_offset=ABSENT) for x in layouts]
        slices = super().unpack(plain, in_features, out_features, block)
        return tuple(
            None
            if s is None or layout is None
            else replace(s, gain=part(layout.gain_offset, n), input_gain=part(layout.input_gain_offset, in_features))
            for s, layout, n in zip(slices, layouts, out_features, strict=True)
        )

    def _layout(self, slices: Slices, compute_dtype: torch.dtype) -> tuple[int, Layouts]:
        plain = _without_gains(slices)
        cursor = super().packed_nbytes(plain, compute_dtype)
        layouts: list[SliceLayout | None] = []
        for s, layout in zip(slices, super().packed_layouts(plain, compute_dtype), strict=True):
            if s is None or layout is None:
                layouts.append(None)
                continue
            offsets = []
            for gain in (s.gain, s.input_gain):
                offsets.append(ABSENT if gain is None else cursor)
                cursor += 0 if gain is None else align(4 * gain.numel())
            layouts.append(replace(layout, gain_offset=offsets[0], input_gain_offset=offsets[1]))
        return cursor, tuple(layouts)


def _without_gains(slices: Slices) -> list[SliceWeights | None]:
    return [None if s is None else replace(s, gain=None, input_gain=None) for s in slices]


def _packs_gains(backend: KernelBackend) -> bool:
    (layout,) = backend.packed_layouts([SliceWeights(None, None, None, 1.0, torch.ones(4))], torch.float32)
    return layout is not None and layout.gain_offset != ABSENT


GAIN_BACKENDS: tuple[KernelBackend, ...] = (GainBackend(), *filter(_packs_gains, BACKENDS))


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
