"""The delta of a module's weight, and deltas kept within a budget.

Requests never need one: the kernels multiply by A and B of many adapters at once. What does: an adapter merged into the
base weights (base.py).
"""

from __future__ import annotations

from collections import OrderedDict

import torch

from loraplex.adapters.weights import FLOAT32_FIELDS, LoRALayerWeights


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
        found = ((layer.lora_b.float() @ layer.lora_a.float()) * layer.scaling).to(layer.lora_b.dtype)
        if cache is not None:
            cache.put(layer, found)
    return found
