"""How fast this machine (machine.py) could run a step: from the model's shape, read bandwidth and arithmetic.

    linear(rows)       = max(bytes of the weight / bandwidth, 2 rows out in / peak)
    step(rows)         = sum of linear(rows) over the linears of all layers + the head's for the sampled rows + lora
    lora               = max(bytes of the batch's distinct adapters / bandwidth,
                             2 sum over rows of the adapter's parameters / fp32 peak)
    tokens a second    = requests output_len / (step of the prompts + (output_len - 1) decode steps)

`peak` is the fp32 multiply-add for float weights of any width and int16 multiply-add for int8 weights (W8A16); for int4
twice that, since its activations have 8 bits. The head of an int4 model is int8.
Attention, norms and sampling are left out: the limit is a little higher than anything can be. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int4": 17 / 32, "int4-a16": 17 / 32}
"""Of int4: 4 bits, and a float16 for 64 numbers."""

INTEGER_SPEED = {"int8": 1, "int4-a16": 1, "int4": 2}
"""Operations for one of int16."""

HEADS = {"int4": "int8", "int4-a16": "int8"}
"""What the head is stored as, where it is not as the linears are."""


@dataclass(frozen=True)
class Peaks:
    """What the machine does on as many threads as the engine has: bytes/s read from memory, float operations/s (a fused
    multiply-add is two), int16 operations/s."""

    bandwidth: float
    fp32: float
    int16: float

    def of_weights(self, storage: str) -> float:
        """Operations/s on weights of a storage type. A machine that is faster on floats than int16 would use those."""
        return max(self.int16 * INTEGER_SPEED.get(storage, 0), self.fp32)


@dataclass(frozen=True)
class ModelShape:
    """(out, in) of the linears of one layer, how many layers, and (out, in) of the head."""

    linears: tuple[tuple[int, int], ...]
    num_layers: int
    head: tuple[int, int]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """From a config.json of a Llama or what is shaped like one."""
        hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or hidden // heads)
        qkv = (head_dim * (heads + 2 * kv_heads), hidden)
        return cls(
            linears=(qkv, (hidden, head_dim * heads), (2 * inner, hidden), (hidden, inner)),
            num_layers=int(config["num_hidden_layers"]),
            head=(int(config["vocab_size"]), hidden),
        )

    @classmethod
    def of_folder(cls, model: Path) -> ModelShape:
        return cls.of(json.loads((model / "config.json").read_text()))


@dataclass(frozen=True)
class AdapterSize:
    """Bytes of an adapter as its file stores it, and its parameters: a row costs two operations for each."""

    num_bytes: int
    num_parameters: int

    @classmethod
    def of_folder(cls, adapter: Path) -> AdapterSize:
        """From the header of adapter_model.safetensors."""
        with (adapter / "adapter_model.safetensors").open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        num_bytes = sum(end - begin for begin, end in (entry["data_offsets"] for entry in tensors))
        return cls(num_bytes, sum(_product(entry["shape"]) for entry in tensors))


def linear_s(rows: int, shape: tuple[int, int], storage: str, peaks: Peaks) -> float:
    """Seconds of one linear of shape (out, in)."""
    num_weights = shape[0] * shape[1]
    return max(
        WEIGHT_BYTES[storage] * num_weights / peaks.bandwidth, 2 * rows * num_weights / peaks.of_weights(storage)
    )


def lora_s(rows_each: int, adapters: Sequence[AdapterSize | None], peaks: Peaks) -> float:
    """Seconds of LoRA for a batch: `adapters` has one per request, None for the base; equal ones are read once."""
    used = [adapter for adapter in adapters if adapter is not None]
    distinct = {id(adapter): adapter for adapter in used}.values()
    read = sum(adapter.num_bytes for adapter in distinct) / peaks.bandwidth
    return max(read, 2 * rows_each * sum(adapter.num_parameters for adapter in used) / peaks.fp32)


def step_s(
    model: ModelShape, storage: str, rows_each: int, adapters: Sequence[AdapterSize | None], peaks: Peaks
) -> float:
    """Seconds of a step with `rows_each` rows for each request: 1 is a decode step, the prompt's length a prefill."""
    rows = rows_each * len(adapters)
    layer = sum(linear_s(rows, shape, storage, peaks) for shape in model.linears)
    head = linear_s(len(adapters), model.head, HEADS.get(storage, storage), peaks)
    return model.num_layers * layer + head + lora_s(rows_each, adapters, peaks)


@dataclass(frozen=True)
class Limit:
    """The most that a batch could reach: milliseconds of a decode step, output tokens a second over the whole of it."""

    step_ms: float
    tokens_per_s: float


def limit_of(
    model: ModelShape,
    storage: str,
    adapters: Sequence[AdapterSize | None],
    prompt_len: int,
    output_len: int,
    peaks: Peaks,
) -> Limit:
    """For one request per entry of `adapters`."""
    decode = step_s(model, storage, 1, adapters, peaks)
    seconds = step_s(model, storage, prompt_len, adapters, peaks) + (output_len - 1) * decode
    return Limit(1e3 * decode, len(adapters) * output_len / seconds)


def _product(shape: Sequence[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
