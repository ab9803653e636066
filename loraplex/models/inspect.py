"""What a base model is, and how it would be served or why it is refused: `loraplex model inspect`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from loraplex.core import ShardKind
from loraplex.errors import ModelConfigError, ModelError, shown
from loraplex.kernels.ops import get_backend
from loraplex.kernels.protocols import KernelBackend
from loraplex.kernels.quantized_linear import QuantizedWeight, quantizations_of
from loraplex.layers.common import WeightedLayer
from loraplex.layers.linear import ParallelLinear, ParallelLMHead, VocabParallelEmbedding
from loraplex.logs import printable
from loraplex.models.checkpoints.files import Safetensors
from loraplex.models.checkpoints.gguf import GgufFile
from loraplex.models.config import ModelConfig
from loraplex.models.decoder import Decoder
from loraplex.models.headers import CONFIG_FILE, TensorHeader, gguf_headers, headers_of, read_config, read_headers
from loraplex.models.loader import Checkpoint
from loraplex.models.source import fetch_description, fetch_headers, local_model
from loraplex.text.conversion import TOKENIZER_FILE, other_files
from loraplex.text.tokenizer import read_chat_templates

SAMPLE_ROWS = 16
"""Of a weight that is prepared to see how many bytes the prepared form has: panels are of so many rows."""

USUAL_RANK = 16
MAX_REASONS = 20
MAX_TEXT_CHARS = 200
MAX_LAYERS, MAX_SIZE = 2**12, 2**24
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
GPU_CAPABILITY = (9, 0)
"""Of the GPU that is spoken of where there is none; one of 8.0 has no fp8."""

META = torch.device("meta")
READABLE = ("F32", "F16", "BF16", "F64")
"""As safetensors names what a load reads."""

NumBytes = Callable[[torch.Tensor, str | None], int]
"""(shape of a weight [out, in], quantization) -> bytes of the form that is kept"""


@dataclass(frozen=True, slots=True)
class DtypeFact:
    """What a checkpoint has in one dtype, which is named as safetensors does."""

    dtype: str
    num_tensors: int
    num_elements: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ServedForm:
    """One way to serve a model. quantization: the setting, "" without; kept: how weights are kept, weight_bytes: what
    they take."""

    device: str
    kernels: str
    quantization: str
    kept: str
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class TargetFact:
    """Linears that an adapter may act on, which have one name and one shape."""

    name: str
    num_modules: int
    in_features: int
    out_features: int

    def __str__(self) -> str:
        return f"{self.name} ({self.num_modules} of [{self.in_features} -> {self.out_features}])"


@dataclass(frozen=True)
class ModelReport:
    """All that can be said of a model without its weights. `reasons` empty: it would be served.

    num_parameters: as the model counts them; where it is refused, elements of the checkpoint, which may be packed.
    shape: sizes by Hugging Face's names. kv_token_bytes: of the KV cache, for a token, in `dtype`. adapter_bytes: of
    one of rank 16 on all `targets`, in `dtype`.
    """

    path: str
    reasons: tuple[str, ...] = ()
    model_type: str = ""
    architecture: str = ""
    num_parameters: int = 0
    checkpoint: tuple[DtypeFact, ...] = ()
    checkpoint_bytes: int = 0
    checkpoint_form: str = ""
    dtype: str = ""
    shape: Mapping[str, int] | None = None
    max_model_len: int = 0
    sliding_windows: Mapping[str, int] | None = None
    kv_token_bytes: int = 0
    forms: tuple[ServedForm, ...] = ()
    targets: tuple[TargetFact, ...] = ()
    adapter_bytes: int = 0
    tokenizer: str = ""
    chat_templates: tuple[str, ...] = ()

    @property
    def is_served(self) -> bool:
        return not self.reasons

    def describe(self) -> str:
        """The report as text, but for `forms`: the verdict, its reasons, what the files hold."""
        lines = [f"{self.path}: {'would be served' if self.is_served else 'is refused'}"]
        lines += [f"  refused: {reason}" for reason in self.reasons]
        lines += [f"  {label}: {value}" for label, value in self._facts() if value]
        return "\n".join(map(printable, lines))

    def _facts(self) -> Iterator[tuple[str, str]]:
        yield "family", self.model_type + (f" ({self.architecture})" if self.architecture else "")
        yield "parameters", f"{self.num_parameters:,}" if self.num_parameters else ""
        plain = shown_bytes(self.checkpoint_bytes) if self.checkpoint else ""
        yield "checkpoint", f"{self.checkpoint_form}, {plain}" if self.checkpoint_form else plain
        for fact in self.checkpoint:
            yield "dtype", f"{fact.dtype}, {fact.num_tensors} tensors, {shown_bytes(fact.nbytes)}"
        yield "shape", ", ".join(f"{name} {size}" for name, size in (self.shape or {}).items())
        yield "longest context", f"{self.max_model_len} tokens" if self.max_model_len else ""
        windows = (self.sliding_windows or {}).items()
        yield "attention", ", ".join(f"{count} layers over {window}" for window, count in windows)
        if self.kv_token_bytes:
            longest = shown_bytes(self.max_model_len * self.kv_token_bytes)
            yield "KV cache", f"{self.kv_token_bytes} bytes a token in {self.dtype}, {longest} for the longest context"
        yield "adapters on", ", ".join(map(str, self.targets))
        if self.targets:
            on_all = f"of rank {USUAL_RANK} on all of them has {shown_bytes(self.adapter_bytes)} in {self.dtype}"
            yield "an adapter", on_all
        yield "tokenizer", self.tokenizer
        yield "chat templates", ", ".join(self.chat_templates)


def shown_bytes(num_bytes: int) -> str:
    """In the largest binary unit of which it has one."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


@dataclass(frozen=True, slots=True)
class _Found:
    """A model's files as they are. raw: its config.json; is_remote: its weights are on the hub still."""

    path: Path
    is_remote: bool
    reasons: list[str]
    raw: Mapping[str, Any]
    headers: Mapping[str, TensorHeader]
    config: ModelConfig | None


def inspect_model(name: str, revision: str | None = None) -> ModelReport:
    """Judge a directory or hub id by its config.json and the headers of its weights.

    Raises ModelNotFoundError where there is no model; everything else is in `reasons`.
    """
    local = local_model(name)
    found = _read(fetch_description(name, revision) if local is None else local, local is None, name, revision)
    report = ModelReport(
        name,
        tuple(found.reasons),
        _text(found.raw.get("model_type")),
        _architecture(found.raw),
        **_checkpoint_facts(found.headers),
        **_text_facts(found.path),
    )
    return _judged(report, found, found.config) if found.config is not None and found.headers else report


def _judged(report: ModelReport, found: _Found, config: ModelConfig) -> ModelReport:
    """The report with what the model is, and what is wrong with its weights."""
    reasons = list(report.reasons)
    try:
        dtype: torch.dtype = getattr(torch, config.effective_dtype("auto"))
    except ModelConfigError as error:
        reasons.append(error.message)
        dtype = torch.float32
    model = _shapes(config, get_backend("reference", META), dtype, None)
    checkpoint = None if found.is_remote else Checkpoint(found.path, config)
    if checkpoint is None and config.form is None:
        reasons += _name_reasons(Checkpoint(Path(report.path), config), model, found.headers)
    reasons += _weight_reasons(checkpoint, model, config, found.headers)
    form = "GGUF" if found.path.is_file() else "" if config.form is None else config.form.title
    targets = _targets(model)
    parts = {part.name: math.prod(part.shape) for part in model.weight_parts()}
    windows = Counter("all tokens" if w is None else f"{w} tokens" for w in config.sliding_windows)
    return replace(
        report,
        reasons=tuple(reasons[:MAX_REASONS]),
        num_parameters=sum(parts.values()),
        checkpoint_form=form,
        dtype=str(dtype).removeprefix("torch."),
        shape=_shape(config),
        max_model_len=config.max_model_len,
        sliding_windows=dict(windows),
        kv_token_bytes=math.prod(model.kv_shape(1, 1)) * dtype.itemsize,
        forms=() if reasons else tuple(_forms(config, dtype, checkpoint, found.headers, not form)),
        targets=targets,
        adapter_bytes=sum(_adapter_size(target) for target in targets) * dtype.itemsize,
    )


# ----------------------------------------------------------------------------------------------------------- the files


def _read(path: Path, is_remote: bool, name: str, revision: str | None) -> _Found:
    """What can be read, and reasons for the rest."""
    reasons, raw, config = list[str](), dict[str, Any](), None
    headers: dict[str, TensorHeader] = {}
    try:
        if path.is_file():
            file = GgufFile(path)
            headers, raw = gguf_headers(file), file.config()
        elif is_remote:
            headers = headers_of(fetch_headers(name, revision))
        else:
            headers = read_headers(path)
    except ModelError as error:
        reasons.append(error.message)
    try:
        raw = raw or ({} if path.is_file() else read_config(path))
        if raw:
            _check_sizes(raw, headers)
            config = ModelConfig.from_dict(raw, source=str(path if path.is_file() else path / CONFIG_FILE))
    except ModelConfigError as error:
        reasons.insert(0, error.message)
    return _Found(path, is_remote, reasons, raw, headers, config)


def _text(value: Any) -> str:
    return value[:MAX_TEXT_CHARS] if isinstance(value, str) else ""


def _architecture(raw: Mapping[str, Any]) -> str:
    named = raw.get("architectures")
    return _text(named[0]) if isinstance(named, list) and named else ""


def _checkpoint_facts(headers: Mapping[str, TensorHeader]) -> dict[str, Any]:
    by_dtype: dict[str, list[TensorHeader]] = {}
    for header in headers.values():
        by_dtype.setdefault(header.dtype[:MAX_TEXT_CHARS], []).append(header)
    facts = tuple(
        DtypeFact(dtype, len(each), sum(h.num_elements for h in each), sum(h.nbytes for h in each))
        for dtype, each in sorted(by_dtype.items())
    )
    sums = {"checkpoint_bytes": sum(f.nbytes for f in facts), "num_parameters": sum(f.num_elements for f in facts)}
    return {"checkpoint": facts, **sums}


def _text_facts(directory: Path) -> dict[str, Any]:
    """Of the tokenizer and chat templates, by their files."""
    if directory.is_file():
        return {"tokenizer": "of the GGUF file"}
    found = [TOKENIZER_FILE] if (directory / TOKENIZER_FILE).is_file() else other_files(directory)
    try:
        templates = tuple(sorted(read_chat_templates(directory)))
    except ModelError as error:
        return {"tokenizer": error.message}
    return {"tokenizer": found[0] if found else "none: prompts must be token ids", "chat_templates": templates}


def _check_sizes(raw: Mapping[str, Any], headers: Mapping[str, TensorHeader]) -> None:
    """Raises ModelConfigError for sizes that no model has: what is built of them would fill the memory."""
    most = dict.fromkeys(SIZES, MAX_SIZE) | {"num_hidden_layers": min(MAX_LAYERS, len(headers) or MAX_LAYERS)}
    nested = raw.get("text_config")
    for fields in (raw, nested if isinstance(nested, Mapping) else {}):
        for key, limit in most.items():
            value = fields.get(key)
            if isinstance(value, int) and value > limit:
                raise ModelConfigError(f"config.json: {key} is {value}, and with these weights at most {limit} can be")


@dataclass(frozen=True, slots=True)
class _Headers:
    """An opened file of safetensors, as far as its header tells of it."""

    headers: Mapping[str, TensorHeader]

    def get_slice(self, name: str) -> TensorHeader:
        return self.headers[name]


def _name_reasons(checkpoint: Checkpoint, model: Decoder, headers: Mapping[str, TensorHeader]) -> Iterator[str]:
    """Of plain floats that are not here: weights that are missing or not used."""
    files = Safetensors(dict.fromkeys(headers, _Headers(headers)), None, checkpoint.config.family)
    try:
        checkpoint.check_names(model.weighted_layers(), files)
    except ModelError as error:
        yield error.message


def _weight_reasons(
    checkpoint: Checkpoint | None, model: Decoder, config: ModelConfig, headers: Mapping[str, TensorHeader]
) -> Iterator[str]:
    """What a load would refuse the weights for: names, shapes, dtypes. Those of a form are judged by the form, which
    looks at them where they are here."""
    if checkpoint is not None:
        try:
            checkpoint.check(model.weighted_layers())
            checkpoint.keep_integers(model.weighted_layers(), get_backend("reference", META), None, model.dtype)
        except ModelError as error:
            yield error.message
    for part in () if config.form is not None else model.weight_parts():
        header = headers.get(part.name)
        if header is not None and header.shape != part.shape:
            yield f"weight {part.name} has shape {header.shape}, the model's config.json asks for {part.shape}"
        elif header is not None and header.dtype not in READABLE:
            yield f"weight {part.name} has dtype {shown(header.dtype)}; only {', '.join(READABLE)} are read"


# ----------------------------------------------------------------------------------------------------------- the model


def _shapes(config: ModelConfig, ops: KernelBackend, dtype: torch.dtype, quantization: str | None) -> Decoder:
    """The model without memory."""
    return Decoder(config, ops, dtype, META, enable_lora=False, quantization=quantization)


def _shape(config: ModelConfig) -> dict[str, int]:
    names = "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"
    return {name: getattr(config, name) for name in (*names, "head_dim", "vocab_size")}


def _targets(model: Decoder) -> tuple[TargetFact, ...]:
    ends = (ShardKind.NORM, ShardKind.EMBEDDING, ShardKind.HEAD)
    counts = Counter(
        (each.module_name.rpartition(".")[2], target.full_in_features, each.full_out_features)
        for target in model.lora_targets()
        if target.kind not in ends
        for each in target.slices
    )
    return tuple(TargetFact(name, count, *sizes) for (name, *sizes), count in counts.items())


def _adapter_size(target: TargetFact) -> int:
    """Numbers of A and B."""
    return target.num_modules * USUAL_RANK * (target.in_features + target.out_features)


def _forms(
    config: ModelConfig,
    dtype: torch.dtype,
    checkpoint: Checkpoint | None,
    headers: Mapping[str, TensorHeader],
    is_plain: bool,
) -> Iterator[ServedForm]:
    """On this CPU, and of plain floats on a GPU of GPU_CAPABILITY."""
    name = str(dtype).removeprefix("torch.")
    cpu = get_backend("auto", torch.device("cpu"))
    num_bytes_of = _plain_bytes if cpu.packed_format is None else partial(_packed_bytes, cpu)
    for quantization in (None, *cpu.quantizations):
        layers, kept = _shapes(config, cpu, dtype, quantization).weighted_layers(), ""
        if checkpoint is not None:
            kept = checkpoint.keep_integers(layers, cpu, quantization, dtype).rpartition("kept as ")[2]
        widened = {} if checkpoint is None else checkpoint.widened_nbytes
        num_bytes = sum(_layer_bytes(layer, num_bytes_of, headers, widened) for layer in layers)
        yield ServedForm("cpu", cpu.name, quantization or "", kept or quantization or name, num_bytes)
    for quantization in (None, *quantizations_of(GPU_CAPABILITY)) if is_plain else ():
        layers = _shapes(config, get_backend("reference", META), dtype, quantization).weighted_layers()
        num_bytes = sum(_layer_bytes(layer, _quantized_bytes, headers, {}) for layer in layers)
        yield ServedForm("cuda", "triton", quantization or "", quantization or name, num_bytes)


def _layer_bytes(
    layer: WeightedLayer,
    num_bytes_of: NumBytes,
    headers: Mapping[str, TensorHeader],
    widened: Mapping[str, int],
) -> int:
    """Of its weights as a step reads them; of those that are kept as they are, what the file has, or, of linears that
    are `widened`, what that says."""
    match layer:
        case ParallelLinear():
            bias = 0 if layer.bias is None else layer.bias.nbytes
            if layer.is_kept and layer.name in widened:
                return widened[layer.name] + bias
            if layer.is_kept:
                starts = tuple(f"{s.module_name}." for s in layer.target.slices)
                kept = [
                    h.nbytes for name, h in headers.items() if name.startswith(starts) and not name.endswith(".bias")
                ]
                return sum(kept) + bias
            return num_bytes_of(layer.weight, layer.quantization) + bias
        case ParallelLMHead() if layer.tied_to is not None and layer.quantization is None:
            return 0  # the embedding itself
        case ParallelLMHead():
            return num_bytes_of(layer.weight, layer.quantization)
        case VocabParallelEmbedding() if layer.is_head:
            return num_bytes_of(layer.weight, None)
    return sum(part.destination.nbytes for part in layer.weight_parts())


def _plain_bytes(weight: torch.Tensor, quantization: str | None) -> int:
    return weight.nbytes


def _packed_bytes(backend: KernelBackend, weight: torch.Tensor, quantization: str | None) -> int:
    """What the backend makes of SAMPLE_ROWS rows, for all of them."""
    sample = torch.zeros(SAMPLE_ROWS, weight.shape[1], dtype=weight.dtype)
    kept = backend.linear_tensors(backend.prepare_linear(sample, quantization))
    return sum(tensor.nbytes for tensor in kept.values()) * -(-weight.shape[0] // SAMPLE_ROWS)


def _quantized_bytes(weight: torch.Tensor, quantization: str | None) -> int:
    """On a GPU."""
    if quantization is None:
        return _plain_bytes(weight, quantization)
    kept = QuantizedWeight.of(torch.zeros(SAMPLE_ROWS, weight.shape[1], dtype=weight.dtype), quantization)
    return (kept.q.nbytes + kept.scale.nbytes) * -(-weight.shape[0] // SAMPLE_ROWS)
