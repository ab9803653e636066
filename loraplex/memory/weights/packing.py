"""From an adapter's tensors to packed blocks: cut for this shard, sized, written into one extent per decoder layer.

    extent of a layer := the packed blocks of the layer's targets, one after the other, each a multiple of 64 bytes
    additive bias     := scaling * lora_bias + (bias - base_bias), where `bias` replaces the base's bias of the module
    with a magnitude  :  gain_n := magnitude_n / ||W_n + scaling * (B A)_n||_2, W the base's weight (DoRA);
                         additive bias := gain * scaling * lora_bias + (b - gain * base_bias), b := bias where there is
                         one, else base_bias

A gain of DoRA is for the base's product without its bias, and kernels multiply what has it: hence the difference.
What a block holds is the backend's business; here it is a number of opaque bytes. own_packing.py adds what an adapter
has of its own. With an own weight the base's bias is not in the product, and the additive bias is all of it.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from loraplex.adapters.weights import Blueprint, LoRALayerWeights, LoRAModel, Projections
from loraplex.core import LoraTarget, ShardKind
from loraplex.distributed import (
    shard_bias,
    shard_gain,
    shard_input_gain,
    shard_lora,
    shard_token_rows,
    shard_weight,
)
from loraplex.kernels.protocols import AdapterPacking
from loraplex.kernels.slices import ABSENT, ProjectionsLayout, SliceLayout, SliceWeights, align
from loraplex.memory.weights.own_packing import OwnPacking
from loraplex.memory.weights.vocabulary import BaseRows, Ends, fitted
from loraplex.memory.weights.vocabulary import UnfitWeightsError as UnfitWeightsError

MAX_LAYOUTS = 64
"""Of one blueprint, one for each pair of projections."""

RowNorms = Callable[[str, torch.Tensor, torch.Tensor, float], torch.Tensor]


class BaseWeights(BaseRows, Protocol):
    """What packing needs of the base model: this shard's part. Any number of threads may ask at once."""

    @property
    def weights_name(self) -> str:
        """Names the weights and their form: equal names, equal numbers."""
        ...

    def base_bias(self, module_name: str) -> torch.Tensor | None:
        """None for a module without one."""
        ...

    def row_norms(self, module_name: str, lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float) -> torch.Tensor:
        """||W_n + scaling * (B A)_n||_2 of each row n, float32 on the host; A and B are this shard's, too."""
        ...


@dataclass(frozen=True, slots=True)
class PackedBlock:
    """The block of one target at byte `offset` of the adapter's extent number `extent_index`; one layout per slice."""

    target_name: str
    extent_index: int
    offset: int
    layouts: tuple[SliceLayout | None, ...]


class Mixing(enum.Enum):
    """How an adapter goes with others on one row: as PEFT has it for several active adapters, or not at all."""

    SUM = "adds a delta"
    IN_ORDER = "multiplies what is there before it, and adds a delta"
    PRODUCT = "multiplies"
    ALONE = "brings whole weights of its own"


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where the blocks of one adapter lie: `sizes[i]` are the bytes of its extent i. The same in every tier.

    vocab_size: where the adapter's vocabulary ends, None: where the base's does. rope_factor: what its rows divide the
    rotary frequencies by, None: as the base's do. projections: what lies in the last extent, which adapters of equal
    projections share (space/shared.py).
    """

    sizes: tuple[int, ...]
    blocks: tuple[PackedBlock, ...]
    vocab_size: int | None = None
    rope_factor: float | None = None
    projections: ProjectionsLayout | None = None

    @property
    def nbytes(self) -> int:
        """All that its kernels read, whether others read it, too."""
        return sum(self.sizes)

    @property
    def own_nbytes(self) -> int:
        """What it has alone."""
        return self.nbytes - self.shared_nbytes

    @property
    def own_sizes(self) -> tuple[int, ...]:
        return self.sizes if self.projections is None else self.sizes[:-1]

    @property
    def shared_nbytes(self) -> int:
        return 0 if self.projections is None else self.sizes[-1]

    @property
    def depends_on_base(self) -> bool:
        """Whether the bytes do: a gain beside A and B was made of norms of its rows, and rows of an embedding or a head
        are those that differ from it."""
        return any(
            (each.rank > 0 and each.gain_offset != ABSENT) or each.row_ids_offset != ABSENT for each in self._slices
        )

    @property
    def mixing(self) -> Mixing:
        """DoRA is `IN_ORDER`, IA3 a `PRODUCT`."""
        slices = list(self._slices)
        if self.vocab_size is not None or any(each.weight_offset != ABSENT for each in slices):
            return Mixing.ALONE
        gained = [each for each in slices if each.gain_offset != ABSENT or each.input_gain_offset != ABSENT]
        if not gained:
            return Mixing.SUM
        return Mixing.IN_ORDER if all(each.rank for each in gained) else Mixing.PRODUCT

    @property
    def biased(self) -> frozenset[tuple[str, int]]:
        """Targets and the numbers of their slices with an additive bias. Where the base has none, it is LoRA's own;
        else it may be trained, or the base's under a DoRA."""
        return frozenset(
            (block.target_name, index)
            for block in self.blocks
            for index, each in enumerate(block.layouts)
            if each is not None and each.bias_offset != ABSENT
        )

    @property
    def _slices(self) -> Iterator[SliceLayout]:
        return (each for block in self.blocks for each in block.layouts if each is not None)


def can_share(backend: AdapterPacking, targets: Sequence[LoraTarget], is_one_memory: bool) -> bool:
    """Whether adapters may keep their projections: a shard of a linear would need another part of them, and a device
    with a memory of its own would have them copied under adapters that run (docs/adr/0049)."""
    is_whole = all(
        (target.full_in_features, s.full_out_features) == (target.in_features, s.out_features)
        for target in targets
        for s in target.slices
        if target.is_linear
    )
    return is_one_memory and is_whole and backend.shares_projections


class Packer:
    """Packs adapters for one model. Any number of threads may use it at once.

    Adapters of one blueprint share one layout object: it is hundreds of small ones.
    """

    def __init__(
        self,
        targets: Sequence[LoraTarget],
        backend: AdapterPacking,
        compute_dtype: torch.dtype,
        base: BaseWeights,
        is_one_memory: bool = True,
    ) -> None:
        """is_one_memory: whether kernels read what is packed where it is."""
        self._targets = sorted(targets, key=lambda target: target.layer)
        self._linears = [target for target in self._targets if target.is_linear]
        self._by_name = {target.name: target for target in targets}
        self._backend = backend
        self._compute_dtype = compute_dtype
        self._base = base
        self._can_share = can_share(backend, targets, is_one_memory)
        self._own = OwnPacking(backend, compute_dtype)
        self._ends = Ends.of(targets)
        self._layouts: WeakKeyDictionary[Blueprint, dict[str, PackedLayout]] = WeakKeyDictionary()
        self._fitted: WeakKeyDictionary[LoRAModel, LoRAModel] = WeakKeyDictionary()

    def lay_out(self, model: LoRAModel) -> PackedLayout:
        """Where `write` will put `model`. Raises ValueError when a tensor does not fit its target, UnfitWeightsError
        for a gain where none can be."""
        model = self.fit(model)
        known = {} if model.blueprint is None else self._layouts.setdefault(model.blueprint, {})
        shared = "" if model.projections is None else model.projections.digest
        layout = known.get(shared)
        if layout is None:
            is_the_bases = self._ends is not None and model.vocab_size == self._ends.vocab_size
            vocab_size = None if is_the_bases else model.vocab_size
            layout = self._lay_out(lambda target: self._slices(model, target, _unit_norms), vocab_size)
            if model.long_context is not None:
                layout = replace(layout, rope_factor=model.long_context.rope_factor)
            layout = layout if model.projections is None else self._with_projections(layout, model.projections)
            if len(known) >= MAX_LAYOUTS:
                known.clear()
            known[shared] = layout
        return layout

    def _with_projections(self, layout: PackedLayout, projections: Projections) -> PackedLayout:
        assert self._can_share, "projections, where each adapter has an A and a B of its own"
        rank, in_features = projections.lora_a.shape
        widths, dtype = (in_features, len(projections.lora_b)), projections.lora_a.dtype
        placed = self._backend.projections_layout(projections.digest, rank, widths, dtype, self._compute_dtype)
        return replace(layout, sizes=(*layout.sizes, placed.nbytes), projections=placed)

    def fit(self, model: LoRAModel) -> LoRAModel:
        """As vocabulary.py brings it to the base's; kept from `lay_out` to `write`."""
        known = self._fitted.get(model)
        if known is None:
            known = fitted(model, self._ends, self._base)
            if known is not model:  # or the value would keep its own key
                self._fitted[model] = known
        return known

    def write(self, model: LoRAModel, layout: PackedLayout, views: Sequence[torch.Tensor]) -> None:
        """Write every block into its extent; `views[i]` is the memory of extent i, uint8 on the host.

        Raises UnfitWeightsError for a gain that is not finite; the extents are half written then.
        """
        self.write_fitted(self.fit(model), layout, views)

    def write_fitted(self, model: LoRAModel, layout: PackedLayout, views: Sequence[torch.Tensor]) -> None:
        """`write` of what `fit` gave."""
        for block in layout.blocks:
            slices = self._slices(model, self._by_name[block.target_name], self._base.row_norms)
            self.repack(block, slices, views[block.extent_index])
        if model.projections is not None and layout.projections is not None:
            shared = model.projections
            self._backend.pack_projections(layout.projections, shared.lora_a, shared.lora_b, views[-1])

    def smallest_nbytes(self) -> int:
        """Bytes of an adapter of rank 1 on every linear: a yardstick for how many adapters a budget may hold."""
        dtype = self._compute_dtype
        return sum(self._backend.packed_nbytes(_rank_one(target, dtype), dtype) for target in self._linears)

    def least_nbytes(self, lora_dtype: str) -> int:
        """Bytes that every adapter has: those of rank 1 on the one smallest linear, in 16 bits if adapters may be, or
        of one gain."""
        gain = min(align(4 * width) for target in self._linears for width in _gain_widths(target))
        dtype = torch.float32 if lora_dtype == "float32" else torch.float16
        least = min(
            self._backend.packed_nbytes(
                [s if index == only else None for index, s in enumerate(slices)], self._compute_dtype
            )
            for target in self._linears
            for slices in [_rank_one(target, dtype)]
            for only in range(len(slices))
        )
        return min(gain, least // 2 if lora_dtype == "int8" else least)

    @property
    def weights_name(self) -> str:
        """Names the base's weights. They decide the bytes of a layout that `depends_on_base`, beside its form."""
        return self._base.weights_name

    def form(self, lora_dtype: str) -> str:
        """Names all that decides packed bytes beside the content, and beside the base's weights where row norms are in
        them: copies of an equal form may be used.

        lora_dtype: of the settings; adapters are cast to it when they are read.
        """
        model = hashlib.blake2b(digest_size=16)
        for target in self._targets:
            model.update(repr(target).encode())
            for s in target.slices if target.is_linear else ():
                bias = self._base.base_bias(s.module_name)
                if bias is not None:
                    model.update(f"{s.module_name} {bias.dtype} {tuple(bias.shape)}".encode())
                    model.update(bias.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        compute_dtype = str(self._compute_dtype).removeprefix("torch.")
        sharing = " projections.1" if self._can_share else ""
        sharing += " exchanged.1" if any(target.is_fully_sharded for target in self._targets) else ""
        return f"{self._backend.adapter_format} {compute_dtype} {lora_dtype} {model.hexdigest()}{sharing}"

    def shares(self, view: torch.Tensor) -> Sequence[torch.Tensor]:
        """Of an extent, each with blocks at the offsets of the layout: one for each rank."""
        return (view,)

    def unpack(self, block: PackedBlock, view: torch.Tensor) -> tuple[SliceWeights | None, ...]:
        """The tensors of a block, in its dtype; they may lie in `view`, one of its extent's `shares` on the host."""
        return tuple(self._own.unpack(self._by_name[block.target_name], block.layouts, view[block.offset :]))

    def repack(self, block: PackedBlock, slices: Sequence[SliceWeights | None], view: torch.Tensor) -> None:
        """Write a block whose tensors have the shapes and dtypes that `unpack` gave."""
        layouts = self._own.pack(self._by_name[block.target_name], slices, view[block.offset :])
        assert tuple(layouts) == block.layouts, f"{block.target_name}: a block of another layout"

    def checksums(self, views: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Of the memory of extents, on the host."""
        return self._backend.checksums(views)

    def check_layout(self, layout: PackedLayout) -> None:
        """ValueError unless an adapter of this model is laid out so: kernels that read by it stay in its extents."""
        said = {block.target_name: block for block in layout.blocks}
        if not said.keys() <= self._by_name.keys():
            raise ValueError(f"blocks of {sorted(said.keys() - self._by_name.keys())}, which the model does not have")
        right = self._lay_out(lambda target: self._shapes_of(said[target.name], target) if target.name in said else ())
        for block, expected in itertools.zip_longest(layout.blocks, right.blocks):
            if block != expected:
                raise ValueError(f"the block of {block.target_name} is not laid out as this model's are")
        if layout.projections is not None:
            right = replace(right, sizes=(*right.sizes, self._checked_nbytes(layout, layout.projections)))
        if right.sizes != layout.sizes:
            raise ValueError(f"extents of {layout.sizes} bytes, the blocks need {right.sizes}")
        self._check_vocabulary(layout.vocab_size or 0, said)

    def _checked_nbytes(self, layout: PackedLayout, shared: ProjectionsLayout) -> int:
        """Of projections. ValueError unless they are laid out as this backend's, and hold all that blocks read."""
        if not self._can_share:
            raise ValueError("projections, where each adapter has an A and a B of its own")
        widths = shared.in_features, shared.out_features
        layout_of = self._backend.projections_layout
        right = layout_of(shared.digest, shared.rank, widths, shared.dtype, self._compute_dtype)
        if right != shared:
            raise ValueError(f"projections laid out as {shared}")
        for block in layout.blocks:
            target = self._by_name[block.target_name]
            for s, part in zip(target.slices, block.layouts, strict=True):
                fits = target.in_features <= widths[0] and s.out_features <= widths[1]
                if part is not None and part.is_shared and not (fits and part.rank == shared.rank):
                    raise ValueError(f"{s.module_name} does not fit in its projections")
        return right.nbytes

    def _check_vocabulary(self, vocab_size: int, blocks: Mapping[str, PackedBlock]) -> None:
        """ValueError unless both ends have a row for each token beyond the base's."""
        if self._ends is None or vocab_size <= self._ends.vocab_size:
            return
        for name in (self._ends.embedding, self._ends.head):
            part = blocks[name].layouts[0] if name in blocks else None
            if part is None or part.row_ids_offset == ABSENT or part.num_rows < vocab_size - self._ends.vocab_size:
                raise ValueError(f"{name} has no rows for a vocabulary of {vocab_size} tokens")

    def _shapes_of(self, block: PackedBlock, target: LoraTarget) -> list[SliceWeights | None]:
        """Tensors without memory from which `block` could be packed. ValueError: another number of slices, or A and B
        beside a gain on an input that several have."""
        pairs = list(zip(target.slices, block.layouts, strict=True))
        if len(pairs) > 1 and any(each and each.rank and each.input_gain_offset != ABSENT for _, each in pairs):
            raise ValueError(f"A and B beside a gain on the input of {target.name}")
        return [
            None if layout is None else self._own.shapes(target, index, layout, _shape_of(layout, target, index))
            for index, (_, layout) in enumerate(pairs)
        ]

    def _lay_out(
        self, slices_of: Callable[[LoraTarget], Sequence[SliceWeights | None]], vocab_size: int | None = None
    ) -> PackedLayout:
        """Targets without slices have no block."""
        blocks: list[PackedBlock] = []
        sizes: list[int] = []
        last_layer: int | None = None
        for target in self._targets:
            slices = slices_of(target)
            nbytes = 0 if not any(slices) else self._own.nbytes(target, slices)
            if nbytes == 0:
                continue
            if target.layer != last_layer:
                sizes.append(0)
                last_layer = target.layer
            layouts = self._own.layouts(target, slices)
            blocks.append(PackedBlock(target.name, len(sizes) - 1, sizes[-1], layouts))
            sizes[-1] += nbytes
        return PackedLayout(tuple(sizes), tuple(blocks), vocab_size)

    def _slices(self, model: LoRAModel, target: LoraTarget, row_norms: RowNorms) -> tuple[SliceWeights | None, ...]:
        return tuple(self._slice(model, target, index, row_norms) for index in range(len(target.slices)))

    def _slice(self, model: LoRAModel, target: LoraTarget, index: int, row_norms: RowNorms) -> SliceWeights | None:
        layer = model.get_lora(target.slices[index].module_name)
        if layer is None:
            return None
        lora_a = lora_b = dora_gain = gain = input_gain = weight = None
        is_exchanged, row_ids = False, layer.row_ids
        if layer.weight is not None:
            weight = shard_weight(target, index, layer.weight)
            if row_ids is not None:
                weight, row_ids = shard_token_rows(target, weight, row_ids)
            _check_finite(layer.module_name, weight, self._compute_dtype)
        if layer.lora_a is not None and layer.lora_b is not None:
            blocks = layer.a_blocks, layer.b_blocks
            lora_a, lora_b, is_exchanged = shard_lora(target, index, layer.lora_a, layer.lora_b, *blocks)
            for part in (lora_a, lora_b) if target.kind is ShardKind.EMBEDDING else ():
                _check_finite(layer.module_name, part, self._compute_dtype)
        if layer.magnitude is not None:
            if weight is not None:
                raise UnfitWeightsError(f"{layer.module_name}: DoRA beside a weight of its own is not supported")
            assert lora_a is not None, f"{layer.module_name}: a magnitude without A and B"
            assert lora_b is not None
            norms = row_norms(layer.module_name, lora_a, lora_b, layer.scaling)
            gain = dora_gain = gain_of_dora(layer, shard_gain(target, index, layer.magnitude), norms)
        if layer.gain is not None:
            gain = shard_gain(target, index, layer.gain).float()
        if layer.input_gain is not None:
            input_gain = shard_input_gain(target, index, layer.input_gain).float()
        bias = self._additive_bias(layer, target, index, dora_gain)
        scales = layer.rank_scale, None if layer.out_scale is None else shard_gain(target, index, layer.out_scale)
        slice_weights = SliceWeights(
            lora_a, lora_b, bias, layer.scaling, gain, input_gain, weight, row_ids, *scales, is_exchanged
        )
        return slice_weights if slice_weights.tensors else None

    def _additive_bias(
        self, layer: LoRALayerWeights, target: LoraTarget, index: int, gain: torch.Tensor | None
    ) -> torch.Tensor | None:
        """[out_features] of this shard; summed in float32: the difference to the base's bias is rounded once.

        gain: of DoRA.
        """
        lora_bias = None if layer.lora_bias is None else shard_bias(target, index, layer.lora_bias)
        replacement = None if layer.bias is None else shard_bias(target, index, layer.bias)
        is_own = layer.weight is not None and target.is_linear
        is_plain = replacement is None and gain is None and not is_own
        base = None if is_plain or not target.is_linear else self._base.base_bias(layer.module_name)
        kept = base if replacement is None else replacement
        base = None if is_own else base  # it is not in the product
        if lora_bias is None and kept is None:
            return None
        total = torch.zeros(target.slices[index].out_features)
        if lora_bias is not None:
            scaled = layer.scaling * lora_bias.float()
            total += scaled if gain is None else gain * scaled
        if kept is not None:
            removed = 0.0 if base is None else base.float().cpu()
            total += kept.float().cpu() - (removed if gain is None else gain * removed)
        own = (each.dtype for each in (lora_bias, replacement) if each is not None)
        return total.to(functools.reduce(torch.promote_types, own, self._compute_dtype))


def _unit_norms(_name: str, _lora_a: torch.Tensor, _lora_b: torch.Tensor, _scaling: float) -> torch.Tensor:
    """For a layout, which the norms do not change. One for all rows."""
    return torch.ones(1)


def _check_finite(module_name: str, weight: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises UnfitWeightsError for a weight that overflows in the dtype in which it may be kept."""
    can_overflow = torch.finfo(weight.dtype).max > torch.finfo(dtype).max
    if can_overflow and not bool(weight.to(dtype).isfinite().all()):
        raise UnfitWeightsError(f"{module_name}: its weight does not fit in {dtype}")


def gain_of_dora(layer: LoRALayerWeights, magnitude: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """magnitude / norms. UnfitWeightsError unless all of it is finite."""
    gain = magnitude.float() / norms
    (wrong,) = (~(gain.isfinite() & norms.isfinite())).nonzero(as_tuple=True)
    if len(wrong):
        n = int(wrong[0])
        raise UnfitWeightsError(
            f"{layer.module_name}: DoRA divides the magnitudes by the row norms of W + scaling B A, and for "
            f"{len(wrong)} of {len(norms)} outputs that is not finite, first output {n}: {magnitude[n]:g} / "
            f"{norms[n]:g}; train it on this base model"
        )
    return gain


def _gain_widths(target: LoraTarget) -> list[int]:
    return [target.in_features, *(s.out_features for s in target.slices)]


def _rank_one(target: LoraTarget, dtype: torch.dtype) -> list[SliceWeights]:
    return [_shape(1, 1, target.in_features, s.out_features, dtype) for s in target.slices]


def _shape_of(layout: SliceLayout, target: LoraTarget, slice_index: int) -> SliceWeights:
    """ValueError for what is exchanged where nothing is."""
    in_features, out_features = target.in_features, target.slices[slice_index].out_features
    size, a_rows, b_rows = target.shard.size, layout.rank, out_features
    if layout.is_exchanged:
        if not target.is_fully_sharded or layout.is_shared or layout.rank % size:
            raise ValueError(f"{target.name}: ranks exchange nothing of that")
        is_row = target.kind is ShardKind.ROW
        a_rows, b_rows = (a_rows, b_rows // size) if is_row else (a_rows // size, b_rows)
    rank = 0 if layout.is_shared else layout.rank
    shape = _shape(rank, a_rows, in_features, b_rows, layout.dtype)

    def part(offset: int, width: int, dtype: torch.dtype) -> torch.Tensor | None:
        return None if offset == ABSENT else torch.empty(width, dtype=dtype, device="meta")

    return replace(
        shape,
        bias=part(layout.bias_offset, out_features, layout.dtype),
        scaling=layout.scale,
        gain=part(layout.gain_offset, out_features, torch.float32),
        input_gain=part(layout.input_gain_offset, in_features, torch.float32),
        rank_scale=part(layout.scales_offset, layout.rank, torch.float32),
        out_scale=part(layout.scales_offset, out_features, torch.float32),
        is_exchanged=layout.is_exchanged,
    )


def _shape(rank: int, a_rows: int, in_features: int, b_rows: int, dtype: torch.dtype) -> SliceWeights:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")  # only shapes and dtypes decide a layout

    lora_a, lora_b = (empty(a_rows, in_features), empty(b_rows, rank)) if rank else (None, None)
    return SliceWeights(lora_a, lora_b, None, 1.0)
