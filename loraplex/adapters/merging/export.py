"""What is served of an adapter, as a PEFT directory.

LoRA, DoRA and IA3 are written as they are: in one safetensors file, whichever files they came in, with the digest that
they have here. AdaLoRA, LoHa and LoKr are written as the LoRA that they are served as, in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from loraplex.adapters.kinds import PARTS, PEFT_TYPES, Kind, TypeVerdict
from loraplex.adapters.merging.outline import Origin, Outline, reader_limits
from loraplex.adapters.merging.written import MadeAdapter, check_output, write_directory
from loraplex.adapters.source import AdapterSource
from loraplex.adapters.weights import LoRAModel
from loraplex.errors import AdapterValidationError


def export_directory(path_or_id: str, output: Path, max_bytes: int) -> MadeAdapter:
    """Write an adapter that is named by directory or hub id. Raises what the steps raise."""
    check_output(output)
    source = AdapterSource()
    made, _ = export_adapter(Origin(path_or_id, str(source.fetch(path_or_id)), source), max_bytes)
    write_directory(made, output)
    return made


def export_adapter(origin: Origin, max_bytes: int) -> tuple[MadeAdapter, LoRAModel]:
    """What is to be written, and the adapter as it was read. Raises what reading raises, AdapterContentChangedError,
    and AdapterValidationError for what cannot be written exactly."""
    limits = reader_limits(max_bytes)
    outline = Outline.read(origin, limits)
    model, kind = outline.model(limits), outline.helper.kind
    what = f"{kind}{' with DoRA' if outline.helper.use_dora else ''} {origin.name!r} ({model.adapter_digest[:16]})"
    if PEFT_TYPES[kind].verdict is not TypeVerdict.CONVERTED:
        return MadeAdapter(outline.document, dict(_as_they_are(outline, model)), what), model
    odd = [name.canonical for name in outline.entries if name.part == "bias"]
    if odd:
        text = f"{odd[0]!r}: a converted adapter with biases cannot be written as a plain LoRA"
        raise AdapterValidationError.from_reasons(origin.name, [text])
    factors = {
        name: (layer.lora_a, layer.lora_b, layer.scaling)
        for name, layer in model.layers.items()
        if layer.lora_a is not None and layer.lora_b is not None
    }
    made = MadeAdapter.of_lora(factors, outline.helper.base_model_name, f"{what}, as the LoRA that it is served as")
    return made, model


def _as_they_are(outline: Outline, model: LoRAModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors by their names in the file."""
    kind = outline.helper.kind
    fields = {part: field for field, part in PARTS[kind].items()}
    for name, entry in outline.entries.items():
        layer, field = model.layers[name.module], fields[name.part]
        if kind is Kind.IA3:
            field = "gain" if layer.input_gain is None else "input_gain"
        tensor = layer.tensors.get(field)
        if tensor is None or tensor.numel() != _numel(entry.shape):
            text = f"tensor {entry.name!r} is served in another form than it is filed in, and cannot be written"
            raise AdapterValidationError.from_reasons(outline.origin.name, [text])
        yield entry.name, tensor.reshape(entry.shape).contiguous()


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
