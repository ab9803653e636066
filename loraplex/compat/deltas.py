"""The field's verbs over one adapter's weights: the delta of a module, and packed tensors.

Requests never need a delta: the kernels multiply by A and B of many adapters at once. What does is an adapter that is
merged into the base weights (adapters/merging/base.py), each once: there is no cache of deltas.
"""

from __future__ import annotations

from dataclasses import replace
from typing import overload

import torch

from loraplex.adapters.merging.base import delta_weight
from loraplex.adapters.tensors import ALIGNMENT
from loraplex.adapters.weights import FLOAT32_FIELDS, LoRALayerWeights, LoRAModel


def compute_delta_weight(layer: LoRALayerWeights) -> torch.Tensor:
    """scaling * B @ A, [out, in], in the dtype of B; computed in float32, as peft does on a CPU.

    Raises ValueError for a layer that only replaces the bias, or whose change of the weight depends on the weight.
    """
    of_the_weight = [field for field in FLOAT32_FIELDS if field in layer.tensors]
    if of_the_weight:
        text = f"the change of the weight depends on the weight ({', '.join(of_the_weight)})"
        raise ValueError(f"{layer.module_name}: {text}; there is no delta weight")
    if layer.lora_a is None or layer.lora_b is None:
        raise ValueError(f"{layer.module_name}: this adapter only replaces the bias here; there is no delta weight")
    return delta_weight(layer.lora_a, layer.lora_b, layer.scaling).to(layer.lora_b.dtype)


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
