"""One adapter merged into the base weights while they are read: its W' is in W's place, and no step knows of it.

    own     W' = the adapter's weight, or its rows in W             b' = the adapter's
    LoRA    W' = W + scaling B A                                    b' = b + scaling lora_bias
    DoRA    W' = magnitude / ||W + scaling B A|| (W + scaling B A)  norms of rows
    IA3     W' = gain W, or W input_gain                            b' = gain b

VeRA and the other kinds are the LoRA that they are served as. Of an embedding, W is [vocabulary, hidden] and the delta
is transposed. In float32, whatever the model's dtype is, and rounded once. Each delta is made once, so none is cached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.merging.outline import Origin, Outline
from loraplex.adapters.source import AdapterSource
from loraplex.adapters.source_reader import read_adapter
from loraplex.adapters.weights import CheckedReader, LoRALayerWeights, LoRAModel
from loraplex.config import LoRAConfig
from loraplex.core import LoraTarget, ShardKind
from loraplex.errors import AdapterContentChangedError, AdapterValidationError, shortened

MERGED_FIELDS = {"lora_a", "lora_b", "lora_bias", "bias", "magnitude", "gain", "input_gain", "weight", "row_ids"}
ROW_FIELDS = {"lora_b", "magnitude", "gain", "weight"}
"""Of a linear, what has a row for each row of W."""


@dataclass(frozen=True)
class MergedAdapter:
    """What is merged. digest: of its content, which goes into the names of what is packed of the weights. embedding:
    the module's name."""

    name: str
    layers: Mapping[str, LoRALayerWeights]
    digest: str
    embedding: str = ""

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
        reasons = _of_tied_ends(model, targets)
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
        embedding = next((target.name for target in targets if target.kind is ShardKind.EMBEDDING), "")
        return cls(name, model.layers, model.adapter_digest, embedding)

    def changed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the checkpoint, as the adapter makes it; those of other modules as they are."""
        module, _, part = name.rpartition(".")
        layer = self.layers.get(module)
        if layer is None or part not in ("weight", "bias"):
            return tensor
        if part == "bias":
            merged = _bias(layer, tensor.float())
        else:
            merged = _weight(layer, tensor.float(), is_embedding=module == self.embedding)
        if not torch.isfinite(merged.to(tensor.dtype)).all():
            reason = f"{name}: merged, it does not fit in {tensor.dtype}; serve the adapter unmerged"
            raise AdapterValidationError.from_reasons(self.name, [reason])
        return merged


def delta_weight(lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float) -> torch.Tensor:
    """scaling * B @ A, [out, in], computed in float32, as peft does on a CPU."""
    return (lora_b.float() @ lora_a.float()) * scaling


def merged_rows(layer: LoRALayerWeights, rows: slice, weight: torch.Tensor) -> torch.Tensor:
    """Rows of a linear's W', of these rows of W: float32, as `MergedAdapter` makes them."""
    by_row = {field: tensor[rows] for field, tensor in layer.tensors.items() if field in ROW_FIELDS}
    return _weight(layer.with_tensors({**layer.tensors, **by_row}), weight, is_embedding=False)


def merged_bias(layer: LoRALayerWeights, bias: torch.Tensor) -> torch.Tensor:
    """b' of b, float32."""
    return _bias(layer, bias)


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


def _of_tied_ends(model: LoRAModel, targets: Sequence[LoraTarget]) -> list[str]:
    """A head that is tied becomes what the embedding becomes: the adapter must change both alike."""
    head = next((target.name for target in targets if target.is_tied), None)
    if head is None:
        return []
    embedding = next(target.name for target in targets if target.kind is ShardKind.EMBEDDING)
    at_embedding, at_head = (model.layers.get(name) for name in (embedding, head))
    if _is_one_change(at_embedding, at_head):
        return []
    text = "one weight for both cannot become two; serve the adapter unmerged"
    return [f"{head} is tied to {embedding}, and the adapter does not change both alike: {text}"]


def _is_one_change(at_embedding: LoRALayerWeights | None, at_head: LoRALayerWeights | None) -> bool:
    if at_embedding is None or at_head is None:
        return at_embedding is at_head
    ours, theirs = at_embedding.tensors, at_head.tensors
    if at_embedding.lora_a is not None and at_embedding.lora_b is not None:
        ours = {**ours, "lora_a": at_embedding.lora_b.T, "lora_b": at_embedding.lora_a.T}
    return (
        at_embedding.scaling == at_head.scaling
        and ours.keys() == theirs.keys()
        and all(torch.equal(tensor, theirs[field]) for field, tensor in ours.items())
    )


def _weight(layer: LoRALayerWeights, weight: torch.Tensor, is_embedding: bool) -> torch.Tensor:
    if layer.weight is not None:
        own = layer.weight.float()
        weight = own if layer.row_ids is None else weight.index_copy(0, layer.row_ids, own)
    if layer.lora_a is not None and layer.lora_b is not None:
        delta = delta_weight(layer.lora_a, layer.lora_b, layer.scaling)
        weight = weight + (delta.T if is_embedding else delta)
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
