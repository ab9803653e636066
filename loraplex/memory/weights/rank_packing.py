"""Packing for several ranks: an extent has each rank's blocks, of equal sizes, one rank behind the other.

So an adapter is there for all ranks or for none, and what moves, checks, keeps or evicts extents does not know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from loraplex.adapters.weights import LoRALayerWeights, LoRAModel
from loraplex.core import LoraTarget, ShardKind
from loraplex.distributed import shard_outputs
from loraplex.kernels.protocols import AdapterPacking
from loraplex.kernels.slices import SliceWeights
from loraplex.memory.weights.packing import BaseWeights, PackedLayout, Packer, gain_of_dora


class _ShareOfBase:
    """One rank's share of what packing asks of the base. `base` answers for all of them."""

    def __init__(self, base: BaseWeights, targets: Sequence[LoraTarget]) -> None:
        self._base = base
        self._places = {s.module_name: (target, s) for target in targets for s in target.slices}

    @property
    def weights_name(self) -> str:
        return self._base.weights_name

    def base_bias(self, module_name: str) -> torch.Tensor | None:
        """Behind a row-parallel linear each rank is told all of it, and rank 0 alone has it."""
        bias, (target, s) = self._base.base_bias(module_name), self._places[module_name]
        return None if bias is None else shard_outputs(bias, s, target.shard)

    def row_norms(self, module_name: str, lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float) -> torch.Tensor:
        """`RankPacker` has divided by the norms, which are of whole rows."""
        return torch.ones(1)

    def base_rows(self, module_name: str, token_ids: torch.Tensor) -> torch.Tensor | None:
        """All that are asked for: rows are compared before they are cut."""
        return self._base.base_rows(module_name, token_ids)


class _OtherRank(Packer):
    """Of a rank that adds no bias behind a row-parallel linear: it has zeros there, to be laid out as rank 0 is."""

    def _additive_bias(
        self, layer: LoRALayerWeights, target: LoraTarget, index: int, gain: torch.Tensor | None
    ) -> torch.Tensor | None:
        if target.kind is not ShardKind.ROW:
            return super()._additive_bias(layer, target, index, gain)
        first = replace(target, shard=replace(target.shard, rank=0))
        bias = super()._additive_bias(layer, first, index, gain)
        return None if bias is None else torch.zeros_like(bias)


class RankPacker(Packer):
    """Rank 0's, which packs for the others too. other_targets: theirs, by rank from 1 on. base: of all ranks."""

    def __init__(
        self,
        targets: Sequence[LoraTarget],
        backend: AdapterPacking,
        compute_dtype: torch.dtype,
        base: BaseWeights,
        other_targets: Sequence[Sequence[LoraTarget]],
    ) -> None:
        super().__init__(targets, backend, compute_dtype, _ShareOfBase(base, targets), is_one_memory=False)
        self._others = [
            _OtherRank(each, backend, compute_dtype, _ShareOfBase(base, each), is_one_memory=False)
            for each in other_targets
        ]
        self._whole = base
        self.num_ranks = 1 + len(self._others)

    def _lay_out(
        self, slices_of: Callable[[LoraTarget], Sequence[SliceWeights | None]], vocab_size: int | None = None
    ) -> PackedLayout:
        layout = super()._lay_out(slices_of, vocab_size)
        return replace(layout, sizes=tuple(self.num_ranks * nbytes for nbytes in layout.sizes))

    def write(self, model: LoRAModel, layout: PackedLayout, views: Sequence[torch.Tensor]) -> None:
        model = self._with_gains(self.fit(model))
        shares = [self.shares(view) for view in views]
        for rank, packer in enumerate((self, *self._others)):
            packer.write_fitted(model, layout, [each[rank] for each in shares])

    def shares(self, view: torch.Tensor) -> Sequence[torch.Tensor]:
        return view.view(self.num_ranks, -1).unbind()

    def _with_gains(self, model: LoRAModel) -> LoRAModel:
        """Magnitudes of DoRA divided by the norms of whole rows: what is left is cut like any gain."""
        gains: dict[str, LoRALayerWeights] = {}
        for layer in model:
            if layer.magnitude is not None:
                assert layer.lora_a is not None, f"{layer.module_name}: a magnitude without A and B"
                assert layer.lora_b is not None
                norms = self._whole.row_norms(layer.module_name, layer.lora_a, layer.lora_b, layer.scaling)
                gains[layer.module_name] = replace(layer, magnitude=gain_of_dora(layer, layer.magnitude, norms))
        return replace(model, layers={**model.layers, **gains}, blueprint=None) if gains else model

    def smallest_nbytes(self) -> int:
        return self.num_ranks * super().smallest_nbytes()

    def least_nbytes(self, lora_dtype: str) -> int:
        """Of a fully sharded one all ranks together may have no more than one of one rank."""
        is_fully_sharded = any(target.is_fully_sharded for target in self._linears)
        return (1 if is_fully_sharded else self.num_ranks) * super().least_nbytes(lora_dtype)
