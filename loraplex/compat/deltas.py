"""The field's verbs over one adapter's weights: the delta of a module, kept within a budget, and packed tensors.

Requests never need a delta: the kernels multiply by A and B of many adapters at once. What does is an adapter that is
merged into the base weights (adapters/merging/base.py).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import overload

import torch

from loraplex.adapters.merging.base import delta_weight
from loraplex.adapters.tensors import ALIGNMENT
from loraplex.adapters.weights import FLOAT32_FIELDS, LoRALayerWeights, LoRAModel


class DeltaCache:
    """Deltas of layers, least recently used dropped beyond `max_bytes`; `clear()` under memory pressure.

    Not thread-safe.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._deltas: OrderedDict[LoRALayerWeights, torch.Tensor] = OrderedDict()

    def get(self, layer: LoRALayerWeights) -> torch.Tensor | None:
        if layer in self._deltas:
            self._deltas.move_to_end(layer)
        return self._deltas.get(layer)

    def put(self, layer: LoRALayerWeights, delta: torch.Tensor) -> None:
        if delta.nbytes > self.max_bytes or layer in self._deltas:
            return
        self._deltas[layer] = delta
        self.nbytes += delta.nbytes
        while self.nbytes > self.max_bytes:
            self.nbytes -= self._deltas.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        self._deltas.clear()
        self.nbytes = 0


def compute_delta_weight(layer: LoRALayerWeights, cache: DeltaCache | None = None) -> torch.Tensor:
    """scaling * B @ A, [out, in], in the dtype of B; computed in float32, as peft does on a CPU.

    Raises ValueError for a layer that only replaces the bias, or whose change of the weight depends on the weight.
    """
    of_the_weight = [field for field in FLOAT32_FIELDS if field in layer.tensors]
    if of_the_weight:
        text = f"the change of the weight depends on the weight ({', '.join(of_the_weight)})"
        raise ValueError(f"{layer.module_name}: {text}; there is no delta weight")
    if layer.lora_a is None or layer.lora_b is None:
        raise ValueError(f"{layer.module_name}: this adapter only replaces the bias here; there is no delta weight")
    found = None if cache is None else cache.get(layer)
    if found is None:
        found = delta_weight(layer.lora_a, layer.lora_b, layer.scaling).to(layer.lora_b.dtype)
        if cache is not None:
            cache.put(layer, found)
    return found


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
