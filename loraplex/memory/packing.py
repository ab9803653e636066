"""From an adapter's tensors to packed blocks: cut for this shard, sized, then written into one extent per decoder layer.

    extent of a layer := the packed blocks of the layer's targets, one after the other, each a multiple of 64 bytes
    additive bias     := scaling * lora_bias + (bias - base_bias), where `bias` replaces the base's bias of the module

What a block holds is the backend's business; here it is a number of opaque bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from loraplex.adapters.weights import LoRALayerWeights, LoRAModel
from loraplex.core import LoraTarget
from loraplex.distributed import shard_bias, shard_lora_a, shard_lora_b
from loraplex.kernels.ops import KernelBackend
from loraplex.kernels.plan import SliceLayout, SliceWeights

BaseBias = Callable[[str], torch.Tensor | None]
"""Module name -> this shard's slice of the base bias, None for a module without one."""


@dataclass(frozen=True, slots=True)
class PackedBlock:
    """The block of one target at byte `offset` of the adapter's extent number `extent_index`; one layout per slice."""

    target_name: str
    extent_index: int
    offset: int
    layouts: tuple[SliceLayout | None, ...]


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where the blocks of one adapter lie: `sizes[i]` are the bytes of its extent i. The same in every tier."""

    sizes: tuple[int, ...]
    blocks: tuple[PackedBlock, ...]

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class _PlannedBlock:
    target_name: str
    slices: tuple[SliceWeights | None, ...]
    extent_index: int
    offset: int
    nbytes: int


class Packer:
    """Packs adapters for one model. No state of its own: any number of threads may use it at once."""

    def __init__(
        self, targets: Sequence[LoraTarget], backend: KernelBackend, compute_dtype: torch.dtype, base_bias: BaseBias
    ) -> None:
        self._targets = sorted(targets, key=lambda target: target.layer)
        self._backend = backend
        self._compute_dtype = compute_dtype
        self._base_bias = base_bias

    def plan(self, model: LoRAModel) -> PackingPlan:
        """Cut `model` and lay it out. Raises ValueError when a tensor does not fit its target."""
        blocks: list[_PlannedBlock] = []
        sizes: list[int] = []
        last_layer: int | None = None
        for target in self._targets:
            slices = tuple(self._slice(model, target, index) for index in range(len(target.slices)))
            nbytes = self._backend.packed_nbytes(slices, self._compute_dtype)
            if nbytes == 0:
                continue
            if target.layer != last_layer:
                sizes.append(0)
                last_layer = target.layer
            blocks.append(_PlannedBlock(target.name, slices, len(sizes) - 1, sizes[-1], nbytes))
            sizes[-1] += nbytes
        return PackingPlan(self._backend, self._compute_dtype, tuple(sizes), tuple(blocks))

    def smallest_nbytes(self) -> int:
        """Bytes of an adapter of rank 1 on every target: a yardstick for how many adapters a budget may hold."""
        dtype = self._compute_dtype
        return sum(self._backend.packed_nbytes(_rank_one(target, dtype), dtype) for target in self._targets)

    def _slice(self, model: LoRAModel, target: LoraTarget, index: int) -> SliceWeights | None:
        layer = model.get_lora(target.slices[index].module_name)
        if layer is None:
            return None
        bias = self._additive_bias(layer, target, index)
        if layer.lora_a is None or layer.lora_b is None:
            return None if bias is None else SliceWeights(None, None, bias, layer.scaling)
        lora_a = shard_lora_a(target, index, layer.lora_a)
        return SliceWeights(lora_a, shard_lora_b(target, index, layer.lora_b), bias, layer.scaling)

    def _additive_bias(self, layer: LoRALayerWeights, target: LoraTarget, index: int) -> torch.Tensor | None:
        """[out_features] of this shard; summed in float32, so that the difference to the base's bias is rounded once."""
        lora_bias = None if layer.lora_bias is None else shard_bias(target, index, layer.lora_bias)
        replacement = None if layer.bias is None else shard_bias(target, index, layer.bias)
        if lora_bias is None and replacement is None:
            return None
        total = torch.zeros(target.slices[index].out_features)
        dtype = self._compute_dtype
        if lora_bias is not None:
            total += layer.scaling * lora_bias.float()
            dtype = torch.promote_types(dtype, lora_bias.dtype)
        if replacement is not None:
            base = self._base_bias(layer.module_name)
            total += replacement.float() if base is None else replacement.float() - base.float().cpu()
            dtype = torch.promote_types(dtype, replacement.dtype)
        return total.to(dtype)


class PackingPlan:
    """An adapter cut and laid out, not yet written. `sizes` are the bytes of its extents, one per layer that it touches."""

    def __init__(
        self,
        backend: KernelBackend,
        compute_dtype: torch.dtype,
        sizes: tuple[int, ...],
        blocks: tuple[_PlannedBlock, ...],
    ) -> None:
        self.sizes = sizes
        self._backend = backend
        self._compute_dtype = compute_dtype
        self._blocks = blocks

    def layout(self) -> PackedLayout:
        """The layout alone; what is packed for it is thrown away."""
        return self.write([torch.empty(nbytes, dtype=torch.uint8) for nbytes in self.sizes])

    def write(self, views: Sequence[torch.Tensor]) -> PackedLayout:
        """Write every block into its extent; `views[i]` is the memory of extent i, uint8 on the host."""
        placed = []
        for block in self._blocks:
            out = views[block.extent_index][block.offset : block.offset + block.nbytes]
            layouts = self._backend.pack(block.slices, self._compute_dtype, out)
            placed.append(PackedBlock(block.target_name, block.extent_index, block.offset, tuple(layouts)))
        return PackedLayout(self.sizes, tuple(placed))


def _rank_one(target: LoraTarget, dtype: torch.dtype) -> list[SliceWeights]:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")  # only shapes and dtypes decide a size

    return [SliceWeights(empty(1, target.in_features), empty(s.out_features, 1), None, 1.0) for s in target.slices]
