"""The field's verbs over one adapter's weights: the delta of a module, kept within a budget, and packed tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import overload

import torch

from loraplex.adapters.merging.deltas import DeltaCache, compute_delta_weight
from loraplex.adapters.tensors import ALIGNMENT
from loraplex.adapters.weights import LoRALayerWeights, LoRAModel

__all__ = ["DeltaCache", "compute_delta_weight", "optimize"]


@overload
def optimize(weights: LoRALayerWeights) -> LoRALayerWeights: ...
@overload
def optimize(weights: LoRAModel) -> LoRAModel: ...


def optimize(weights: LoRALayerWeights | LoRAModel) -> LoRALayerWeights | LoRAModel:
    """The same weights, each layer in one block of memory, its tensors contiguous and aligned; scaling stays apart.

    What is read from a directory is packed already.
    """
    if isinstance(weights, LoRAModel):
        return replace(weights, layers={name: optimize(layer) for name, layer in weights.layers.items()})
    tensors = weights.tensors
    aligned = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors.values()]
    block, packed, start = torch.empty(sum(aligned), dtype=torch.uint8), {}, 0
    for (field, tensor), nbytes in zip(tensors.items(), aligned, strict=True):
        view = block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        packed[field] = view.copy_(tensor)
        start += nbytes
    return weights.with_tensors(packed)
