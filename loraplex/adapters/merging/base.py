"""One adapter merged into the base weights while they are read: its W' is in W's place, and no step knows of it.

    LoRA    W' = W + scaling B A                                    b' = b + scaling lora_bias
    DoRA    W' = magnitude / ||W + scaling B A|| (W + scaling B A)  norms of rows
    IA3     W' = gain W, or W input_gain                            b' = gain b
    bias    b' = the adapter's

In float32, whatever the model's dtype is, and rounded once. Each delta is made once, so none is cached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.merging.outline import Origin, Outline
from loraplex.adapters.opener import read_adapter
from loraplex.adapters.source import AdapterSource
from loraplex.adapters.weights import CheckedReader, LoRALayerWeights
from loraplex.config import LoRAConfig
from loraplex.core import LoraTarget
from loraplex.errors import AdapterContentChangedError, AdapterValidationError, shortened

MERGED_FIELDS = {"lora_a", "lora_b", "lora_bias", "bias", "magnitude", "gain", "input_gain"}


@dataclass(frozen=True)
class MergedAdapter:
    """What is merged. digest: of its content, which goes into the names of what is packed of the weights."""

    name: str
    layers: Mapping[str, LoRALayerWeights]
    digest: str

    @classmethod
    def read(cls, path_or_id: str, targets: Sequence[LoraTarget], digest: str | None = None) -> MergedAdapter:
        """Raises what reading raises, AdapterContentChangedError for another content than `digest`, and
        AdapterValidationError for what the base's weights cannot express."""
        source, name = AdapterSource(), shortened(path_or_id)
        directory = str(source.fetch(path_or_id))
        model = read_adapter(directory, name, source, CheckedReader(targets, LoRAConfig()))
        if digest not in (None, model.adapter_digest):
            raise AdapterContentChangedError(f"adapter {name!r} has changed since the server started; start it again")
        biased = {part.module_name for target in targets for part in target.slices if part.has_bias}
        linears = {part.module_name for target in targets if target.is_linear for part in target.slices}
        reasons = [
            f"{layer.module_name}: only linears of decoder layers are merged; serve the adapter unmerged"
            for layer in model
            if layer.module_name not in linears
        ]
        if model.vocab_size is not None:
            reasons.append("it has a vocabulary of its own, which the base's cannot become; serve the adapter unmerged")
        if model.invocation_tokens:
            text = "alora_invocation_tokens: an aLoRA does not act on all rows, and base weights do"
            reasons.append(f"{text}; serve the adapter unmerged")
        for field in PEFTHelper.from_local_dir(directory, name).context_fields:
            reasons.append(f"{field}: a longer context is not merged into base weights; serve the adapter unmerged")
        reasons += [reason for layer in model for reason in _unmergeable(layer, layer.module_name in biased)]
        if reasons:
            raise AdapterValidationError.from_reasons(name, reasons)
        return cls(name, model.layers, model.adapter_digest)

    def changed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the checkpoint, as the adapter makes it; those of other modules as they are."""
        module, _, part = name.rpartition(".")
        layer = self.layers.get(module)
        if layer is None or part not in ("weight", "bias"):
            return tensor
        merged = (_weight if part == "weight" else _bias)(layer, tensor.float())
        if not torch.isfinite(merged.to(tensor.dtype)).all():
            reason = f"{name}: merged, it does not fit in {tensor.dtype}; serve the adapter unmerged"
            raise AdapterValidationError.from_reasons(self.name, [reason])
        return merged


def delta_weight(lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float) -> torch.Tensor:
    """scaling * B @ A, [out, in], computed in float32, as peft does on a CPU."""
    return (lora_b.float() @ lora_a.float()) * scaling


def fetched(path_or_id: str) -> tuple[str, str]:
    """(local directory, digest) of an adapter to merge, before a base model is there to check it against."""
    source = AdapterSource()
    directory, limits = str(source.fetch(path_or_id)), LoRAConfig()
    return directory, Outline.read(Origin(shortened(path_or_id), directory, source), limits).model(
        limits
    ).adapter_digest


def _unmergeable(layer: LoRALayerWeights, has_bias: bool) -> list[str]:
    name, unknown = layer.module_name, sorted(layer.tensors.keys() - MERGED_FIELDS)
    reasons = [f"{name}: {field} is not merged into base weights; serve the adapter unmerged" for field in unknown]
    if layer.lora_bias is not None and not has_bias:
        reasons.append(f"{name}: lora_bias has no bias of the base to be merged into; serve the adapter unmerged")
    return reasons


def _weight(layer: LoRALayerWeights, weight: torch.Tensor) -> torch.Tensor:
    if layer.lora_a is not None and layer.lora_b is not None:
        weight = weight + delta_weight(layer.lora_a, layer.lora_b, layer.scaling)
    if layer.magnitude is not None:
        weight = weight * (layer.magnitude / weight.norm(dim=1))[:, None]
    if layer.gain is not None:
        weight = weight * layer.gain[:, None]
    return weight if layer.input_gain is None else weight * layer.input_gain


def _bias(layer: LoRALayerWeights, bias: torch.Tensor) -> torch.Tensor:
    if layer.bias is not None:
        bias = layer.bias.float()
    if layer.lora_bias is not None:
        bias = bias + layer.scaling * layer.lora_bias.float()
    return bias if layer.gain is None else bias * layer.gain
