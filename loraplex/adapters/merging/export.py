"""What is served of an adapter, as a PEFT directory.

What is served as it is filed is written so, bit for bit: in one safetensors file, whichever files it came in, with the
digest that it has here. AdaLoRA, LoHa and LoKr are written as the LoRA that they are served as, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from loraplex.adapters.kinds import OWN_PARTS, PEFT_TYPES, Kind, TypeVerdict
from loraplex.adapters.merging.outline import Origin, Outline, check_memory, reader_limits
from loraplex.adapters.merging.written import MadeAdapter, check_output, write_directory
from loraplex.adapters.source import AdapterSource
from loraplex.config import LoRAConfig
from loraplex.errors import AdapterValidationError, RequestAbortedError

IsCancelled = Callable[[], bool]


def export_directory(path_or_id: str, output: Path, max_bytes: int) -> MadeAdapter:
    """Write an adapter that is named by directory or hub id. Raises what the steps raise."""
    check_output(output)
    source = AdapterSource()
    made, _ = export_adapter(Origin(path_or_id, str(source.fetch(path_or_id)), source), max_bytes)
    write_directory(made, output)
    return made


def export_adapter(
    origin: Origin, max_bytes: int, is_cancelled: IsCancelled = lambda: False
) -> tuple[MadeAdapter, str]:
    """What is to be written, and the digest of what was read.

    Raises what reading raises, AdapterContentChangedError (of an origin with a digest before all else), and
    AdapterTooLargeError beyond `max_bytes` of memory. AdapterValidationError for what cannot be written exactly, and
    RequestAbortedError when it is cancelled.
    """

    def begin() -> None:
        if is_cancelled():
            raise RequestAbortedError("the export was cancelled")

    begin()
    limits = reader_limits(max_bytes)
    check_memory("export", origin.bytes_to_open, max_bytes)
    if origin.digest is not None:
        origin.check_content(limits, max_bytes)
    begin()
    outline = Outline.read(origin, limits)
    check_memory("export", outline.export_bytes, max_bytes)
    begin()
    made = _exported(outline, limits)
    begin()
    return made


def _exported(outline: Outline, limits: LoRAConfig) -> tuple[MadeAdapter, str]:
    kind, what = outline.helper.kind, f"{outline.helper.kind}{' with DoRA' if outline.helper.use_dora else ''}"
    if kind is not Kind.VERA and PEFT_TYPES[kind].verdict is TypeVerdict.CONVERTED:
        return _as_lora(outline, limits)
    tensors, digest = outline.tensors(limits)
    filed = {entry.name: tensors[name].contiguous() for name, entry in outline.entries.items()}
    return MadeAdapter(outline.document, filed, f"{what} {outline.origin.name!r} ({digest[:16]})"), digest


def _as_lora(outline: Outline, limits: LoRAConfig) -> tuple[MadeAdapter, str]:
    odd = [name.canonical for name in outline.entries if name.part == "bias" or name.part in OWN_PARTS]
    if odd:
        text = f"{odd[0]!r}: a converted adapter with biases or weights of its own cannot be written as a plain LoRA"
        raise AdapterValidationError.from_reasons(outline.origin.name, [text])
    model, helper = outline.model(limits), outline.helper
    factors = {
        name: (layer.lora_a, layer.lora_b, layer.scaling)
        for name, layer in model.layers.items()
        if layer.lora_a is not None and layer.lora_b is not None
    }
    digest = model.adapter_digest
    what = f"{helper.kind} {outline.origin.name!r} ({digest[:16]}), as the LoRA that it is served as"
    return MadeAdapter.of_lora(factors, helper.base_model_name, what), digest
