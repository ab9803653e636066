"""From an adapter's tensors to packed blocks: cut for this shard, sized, written into one extent per decoder layer.

    extent of a layer := the packed blocks of the layer's targets, one after the other, each a multiple of 64 bytes
    additive bias     := scaling * lora_bias + (bias - base_bias), where `bias` replaces the base's bias of the module

What a block holds is the backend's business; here it is a number of opaque bytes.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from loraplex.adapters.weights import Blueprint, LoRALayerWeights, LoRAModel
from loraplex.core import LoraTarget
from loraplex.distributed import shard_bias, shard_lora_a, shard_lora_b
from loraplex.kernels.plan import ABSENT, SliceLayout, SliceWeights
from loraplex.kernels.protocols import AdapterPacking

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


class Packer:
    """Packs adapters for one model. Any number of threads may use it at once.

    Adapters of one blueprint share one layout object: it is hundreds of small ones.
    """

    def __init__(
        self, targets: Sequence[LoraTarget], backend: AdapterPacking, compute_dtype: torch.dtype, base_bias: BaseBias
    ) -> None:
        self._targets = sorted(targets, key=lambda target: target.layer)
        self._by_name = {target.name: target for target in targets}
        self._backend = backend
        self._compute_dtype = compute_dtype
        self._base_bias = base_bias
        self._layouts: WeakKeyDictionary[Blueprint, PackedLayout] = WeakKeyDictionary()

    def lay_out(self, model: LoRAModel) -> PackedLayout:
        """Where `write` will put `model`. Raises ValueError when a tensor does not fit its target."""
        layout = None if model.blueprint is None else self._layouts.get(model.blueprint)
        if layout is None:
            layout = self._lay_out(lambda target: self._slices(model, target))
            if model.blueprint is not None:
                self._layouts[model.blueprint] = layout
        return layout

    def write(self, model: LoRAModel, layout: PackedLayout, views: Sequence[torch.Tensor]) -> None:
        """Write every block into its extent; `views[i]` is the memory of extent i, uint8 on the host."""
        for block in layout.blocks:
            self.repack(block, self._slices(model, self._by_name[block.target_name]), views[block.extent_index])

    def smallest_nbytes(self) -> int:
        """Bytes of an adapter of rank 1 on every target: a yardstick for how many adapters a budget may hold."""
        dtype = self._compute_dtype
        return sum(self._backend.packed_nbytes(_rank_one(target, dtype), dtype) for target in self._targets)

    def least_nbytes(self, lora_dtype: str) -> int:
        """Bytes that every adapter has: those of rank 1 on the one smallest module, in 16 bits if adapters may be."""
        dtype = torch.float32 if lora_dtype == "float32" else torch.float16
        least = min(
            self._backend.packed_nbytes(
                [s if index == only else None for index, s in enumerate(slices)], self._compute_dtype
            )
            for target in self._targets
            for slices in [_rank_one(target, dtype)]
            for only in range(len(slices))
        )
        return least // 2 if lora_dtype == "int8" else least

    def form(self, lora_dtype: str) -> str:
        """Names all that decides packed bytes beside the content: copies of an equal form may be used.

        lora_dtype: of the settings; adapters are cast to it when they are read.
        """
        model = hashlib.blake2b(digest_size=16)
        for target in self._targets:
            model.update(repr(target).encode())
            for s in target.slices:
                bias = self._base_bias(s.module_name)
                if bias is not None:
                    model.update(f"{s.module_name} {bias.dtype} {tuple(bias.shape)}".encode())
                    model.update(bias.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        compute_dtype = str(self._compute_dtype).removeprefix("torch.")
        return f"{self._backend.adapter_format} {compute_dtype} {lora_dtype} {model.hexdigest()}"

    def unpack(self, block: PackedBlock, view: torch.Tensor) -> tuple[SliceWeights | None, ...]:
        """The tensors of a block, in its dtype; they may lie in `view`, the block's extent on the host."""
        target = self._by_name[block.target_name]
        widths = [s.out_features for s in target.slices]
        return self._backend.unpack(block.layouts, target.in_features, widths, view[block.offset :])

    def repack(self, block: PackedBlock, slices: Sequence[SliceWeights | None], view: torch.Tensor) -> None:
        """Write a block whose tensors have the shapes and dtypes that `unpack` gave."""
        layouts = self._backend.pack(slices, self._compute_dtype, view[block.offset :])
        assert tuple(layouts) == block.layouts, f"{block.target_name}: a block of another layout"

    def checksums(self, views: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Of the memory of extents, on the host."""
        return self._backend.checksums(views)

    def check_layout(self, layout: PackedLayout) -> None:
        """ValueError unless an adapter of this model is laid out so: kernels that read by it stay in its extents."""
        said = {block.target_name: block for block in layout.blocks}
        if not said.keys() <= self._by_name.keys():
            raise ValueError(f"blocks of {sorted(said.keys() - self._by_name.keys())}, which the model does not have")
        right = self._lay_out(lambda target: _shapes_of(said[target.name], target) if target.name in said else ())
        for block, expected in itertools.zip_longest(layout.blocks, right.blocks):
            if block != expected:
                raise ValueError(f"the block of {block.target_name} is not laid out as this model's are")
        if right.sizes != layout.sizes:
            raise ValueError(f"extents of {layout.sizes} bytes, the blocks need {right.sizes}")

    def _lay_out(self, slices_of: Callable[[LoraTarget], Sequence[SliceWeights | None]]) -> PackedLayout:
        """Targets without slices have no block."""
        blocks: list[PackedBlock] = []
        sizes: list[int] = []
        last_layer: int | None = None
        for target in self._targets:
            slices = slices_of(target)
            nbytes = self._backend.packed_nbytes(slices, self._compute_dtype)
            if nbytes == 0:
                continue
            if target.layer != last_layer:
                sizes.append(0)
                last_layer = target.layer
            layouts = self._backend.packed_layouts(slices, self._compute_dtype)
            blocks.append(PackedBlock(target.name, len(sizes) - 1, sizes[-1], layouts))
            sizes[-1] += nbytes
        return PackedLayout(tuple(sizes), tuple(blocks))

    def _slices(self, model: LoRAModel, target: LoraTarget) -> tuple[SliceWeights | None, ...]:
        return tuple(self._slice(model, target, index) for index in range(len(target.slices)))

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
        """[out_features] of this shard; summed in float32: the difference to the base's bias is rounded once."""
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


def _rank_one(target: LoraTarget, dtype: torch.dtype) -> list[SliceWeights]:
    return [_shape(1, target.in_features, s.out_features, dtype) for s in target.slices]


def _shapes_of(block: PackedBlock, target: LoraTarget) -> list[SliceWeights | None]:
    """Tensors without memory from which `block` could be packed. ValueError: another number of slices."""
    return [
        None
        if layout is None
        else _shape(
            layout.rank, target.in_features, s.out_features, layout.dtype, layout.bias_offset != ABSENT, layout.scale
        )
        for s, layout in zip(target.slices, block.layouts, strict=True)
    ]


def _shape(
    rank: int, in_features: int, out_features: int, dtype: torch.dtype, has_bias: bool = False, scaling: float = 1.0
) -> SliceWeights:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")  # only shapes and dtypes decide a layout

    lora_a, lora_b = (empty(rank, in_features), empty(out_features, rank)) if rank else (None, None)
    return SliceWeights(lora_a, lora_b, empty(out_features) if has_bias else None, scaling)
