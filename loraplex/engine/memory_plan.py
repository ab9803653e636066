"""How much memory the KV cache and adapters may have, and the arena that they share.

    device_memory unset    arena = the KV cache's ceiling + the adapters': nothing contends, and the KV cache has its
                           chunks from the start
    device_memory set      arena = device_memory; each has its floor for sure and may grow to its ceiling while the
                           other leaves it free
    unset, on a GPU        as if it were set to what the GPU has left, `shareable`, unless both ceilings are given

max_model_len is by default as far as the model's positions go, as long as the KV cache holds it. In a shared arena it
ends at half of what is not the adapters' floor, or at kv_cache_floor, but not below 8192 tokens that fit.

The KV cache's floor holds one request of max_model_len; less, and that request could wait without end for adapters that
are in use.

What a GPU has left once the model is on it:

    shareable := gpu_memory_utilization * total - what is taken (weights, scratch memory, other processes) - reserve
    reserve   := activations of the largest step + logits + captured graphs + slot table

The reserve is an estimate, made of the model's shapes (no step is run): a step of max_num_batched_tokens keeps about
four hidden states, queries, keys, values and attention, and three of the MLP's inner states a token, or what experts
take instead (graph_sizes.py); sampling keeps the logits of max_num_seqs rows four times in float32, with the tokens
that an adapter may add; what graphs get says graph_sizes.py. Logits of prompts (`prompt_logprobs`) are not in it: what
gpu_memory_utilization leaves is for them, for what torch's allocator loses to rounding, and for the driver.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from loraplex.config import (
    DEFAULT_ADAPTER_BYTES,
    DEFAULT_HOST_BYTES,
    DEFAULT_KV_CACHE_BYTES,
    MAX_CONTEXT,
    EngineConfig,
    LoRAConfig,
    Size,
    num_bytes,
)
from loraplex.core import STRETCHED_ROPE_TYPES
from loraplex.engine.graph_sizes import graph_bytes, inner_numbers
from loraplex.errors import ConfigError
from loraplex.memory.space.arena import Arena, Limits, Owner
from loraplex.models.config import ModelConfig
from loraplex.models.decoder import Decoder

logger = logging.getLogger(__name__)

SHARED_MODEL_LEN = 8192
"""The default of max_model_len in a shared arena is at least this, where the model and the KV cache have it."""

Allocate = Callable[[int], torch.Tensor]

CHUNK_BYTES = 1 << 20
GPU_CHUNK_BYTES = 16 << 20
MIN_GPU_CHUNKS, MAX_GPU_CHUNKS = 64, 4096
DEFAULT_FLOOR_PARTS = 10  # a floor is a tenth of the whole unless it is said
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class MemoryPlan:
    """The arena, and all of it as KV blocks: block i is bytes [i, i + 1) * block bytes, for any owner of its chunk.

    num_kv_blocks: at the KV cache's ceiling. lora: the adapters' settings with their sizes in bytes. choice: why
    max_model_len is what it is, where no setting says. longest_len: the longest sequence, of the base or of an adapter
    with a longer context.
    """

    arena: Arena
    kv: torch.Tensor
    blocks_per_chunk: int
    num_kv_blocks: int
    max_model_len: int
    lora: LoRAConfig | None
    choice: str = ""
    longest_len: int = 0


@dataclass(frozen=True)
class _Sizes:
    """What the settings say, in bytes. whole: the arena's, None where nothing contends. kv_floor: None for the default.

    adapters: what they may have of the arena, the host tier included on a CPU.
    """

    whole: int | None
    kv_ceiling: int
    kv_floor: int | None
    adapters: int
    adapter_floor: int
    lora: LoRAConfig | None


def plan_memory(
    config: EngineConfig,
    model_config: ModelConfig,
    model: Decoder,
    kv_dtype: torch.dtype,
    device: torch.device,
    gpu: DeviceMemory | None = None,
    allocate: Allocate | None = None,
) -> MemoryPlan:
    """gpu: its memory with the model on it, None elsewhere. allocate: as Arena has it. ConfigError has both numbers of
    sizes that cannot be."""
    sizes = _sizes(_with_gpu(config, model_config, model.activation_dtype, gpu), device, gpu)
    block_bytes = math.prod(model.kv_shape(1, config.block_size, kv_dtype)) * kv_dtype.itemsize
    most_blocks = sizes.kv_ceiling // block_bytes
    wanted = _wanted_model_len(config, model_config.max_model_len, sizes, block_bytes / config.block_size)
    stretched = _stretched_len(config, model_config)
    num_blocks = min(most_blocks, config.max_num_seqs * -(-max(wanted, stretched) // config.block_size))
    whole = sizes.kv_ceiling + sizes.adapters if sizes.whole is None else sizes.whole
    blocks_per_chunk = max(1, min(num_blocks, chunk_size(whole, gpu is not None) // block_bytes))
    chunk_bytes = blocks_per_chunk * block_bytes
    kv_ceiling = min(-(-num_blocks // blocks_per_chunk), most_blocks // blocks_per_chunk)
    kv_tokens = kv_ceiling * blocks_per_chunk * config.block_size
    max_model_len, choice = _max_model_len(config, model_config.max_model_len, sizes, wanted, kv_tokens)
    longest_len = max(max_model_len, stretched)
    _check_stretched(config, sizes, stretched, kv_tokens)
    longest = -(-longest_len // (config.block_size * blocks_per_chunk))  # chunks of one request
    if sizes.whole is None:
        num_chunks = kv_ceiling + -(-sizes.adapters // chunk_bytes)
        limits = {Owner.KV: Limits(kv_ceiling, kv_ceiling)}
    else:
        num_chunks = max(1, sizes.whole // chunk_bytes)
        limits = _limits(sizes, num_chunks * chunk_bytes, chunk_bytes, kv_ceiling, longest, longest_len)
    arena = _arena(num_chunks, chunk_bytes, device, limits, gpu, allocate)
    kv = arena.memory.view(kv_dtype).view(model.kv_shape(num_chunks * blocks_per_chunk, config.block_size, kv_dtype))
    num_kv_blocks = arena.ceiling(Owner.KV) * blocks_per_chunk
    return MemoryPlan(arena, kv, blocks_per_chunk, num_kv_blocks, max_model_len, sizes.lora, choice, longest_len)


def chunk_size(whole: int, is_gpu: bool) -> int:
    """Bytes of a chunk, about: what KV cache and adapters lend each other at a time.

    On a GPU it is larger. A layer of an adapter is some megabytes there (2.6 MB: rank 16 on an 8B model), so a small
    chunk holds no two of them; and finding a free chunk is a walk over all of them, in the path of a promote: 80 GB in
    chunks of 1 MiB are 80,000.
    """
    if not is_gpu:
        return CHUNK_BYTES
    return max(whole // MAX_GPU_CHUNKS, min(GPU_CHUNK_BYTES, max(CHUNK_BYTES, whole // MIN_GPU_CHUNKS)))


def _arena(
    num_chunks: int,
    chunk_bytes: int,
    device: torch.device,
    limits: dict[Owner, Limits],
    gpu: DeviceMemory | None,
    allocate: Allocate | None,
) -> Arena:
    try:
        return Arena(num_chunks * chunk_bytes, chunk_bytes, device, limits=limits, allocate=allocate)
    except torch.OutOfMemoryError as error:
        free = "" if gpu is None else f", of which {gpu.free_bytes} bytes were free"
        raise ConfigError(
            f"KV cache and adapters are to have {num_chunks * chunk_bytes} bytes of the device{free}; lower "
            "device_memory, or gpu_memory_utilization where that is not given"
        ) from error


def _with_gpu(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, gpu: DeviceMemory | None) -> EngineConfig:
    """With device_memory as what the GPU has left, where no setting says how much."""
    has_kv = config.kv_cache_memory is not None or config.kv_cache_memory_bytes != DEFAULT_KV_CACHE_BYTES
    lora = config.lora
    has_adapters = lora is None or lora.adapter_memory is not None or lora.adapter_memory_bytes != DEFAULT_ADAPTER_BYTES
    if gpu is None or config.device_memory is not None or (has_kv and has_adapters):
        return config
    return replace(config, device_memory=shareable_bytes(config, model, dtype, gpu))


def _sizes(config: EngineConfig, device: torch.device, gpu: DeviceMemory | None) -> _Sizes:
    if config.device_memory is None:
        kv = _size("kv_cache_memory", config.kv_cache_memory, None) or config.kv_cache_memory_bytes
        lora = None if config.lora is None else _in_bytes(config.lora, None, device)
        return _Sizes(None, kv, None, _arena_bytes(lora, device), 0, lora)
    whole = num_bytes("device_memory", config.device_memory, _machine_bytes(device) if gpu is None else gpu.total_bytes)
    lora = None if config.lora is None else _in_bytes(config.lora, whole, device)
    adapters = _arena_bytes(lora, device)
    floor = None if config.lora is None else _size("adapter_floor", config.lora.adapter_floor, whole)
    if floor is None:
        floor = min(adapters, whole // DEFAULT_FLOOR_PARTS)
    is_unset = config.kv_cache_memory_bytes == DEFAULT_KV_CACHE_BYTES
    otherwise = whole - floor if is_unset else config.kv_cache_memory_bytes
    kv = _size("kv_cache_memory", config.kv_cache_memory, whole) or otherwise
    _check("the KV cache may have", kv, "device_memory is", whole)
    _check("adapters may have", adapters, "device_memory is", whole)
    _check("adapter_floor is", floor, "adapters may have", adapters)
    return _Sizes(whole, kv, _size("kv_cache_floor", config.kv_cache_floor, whole), adapters, floor, lora)


def _check(what: str, size: int, than_what: str, most: int) -> None:
    if size > most:
        raise ConfigError(f"{what} {size} bytes and {than_what} {most}; lower the first or raise the second")


def _size(name: str, size: Size | None, whole: int | None) -> int | None:
    return None if size is None else num_bytes(name, size, whole)


def _in_bytes(lora: LoRAConfig, whole: int | None, device: torch.device) -> LoRAConfig:
    """`adapter_memory` as bytes. With device_memory, the default is all of it; a CPU's host budget is the device's."""
    adapters, host = _size("adapter_memory", lora.adapter_memory, whole), lora.host_memory_bytes
    if adapters is None:
        is_unset = whole is not None and lora.adapter_memory_bytes == DEFAULT_ADAPTER_BYTES
        adapters = whole if whole is not None and is_unset else lora.adapter_memory_bytes
    if whole is not None and device.type == "cpu" and host == DEFAULT_HOST_BYTES:
        host = adapters
    return replace(lora, adapter_memory_bytes=adapters, host_memory_bytes=host, adapter_memory=None, adapter_floor=None)


def _arena_bytes(lora: LoRAConfig | None, device: torch.device) -> int:
    """On a CPU host and device are one memory, and the host budget bounds both."""
    if lora is None:
        return 0
    return max(lora.host_memory_bytes, lora.adapter_memory_bytes) if device.type == "cpu" else lora.adapter_memory_bytes


def _limits(
    sizes: _Sizes, whole: int, chunk_bytes: int, kv_ceiling: int, longest: int, max_model_len: int
) -> dict[Owner, Limits]:
    """Floors and ceilings in chunks; `longest` are those of one request of max_model_len, or of the longest context of
    adapters."""
    kv_floor = max(longest, min(kv_ceiling, whole // DEFAULT_FLOOR_PARTS // chunk_bytes))
    if sizes.kv_floor is not None:
        kv_floor = -(-sizes.kv_floor // chunk_bytes)
        if kv_floor < longest:
            raise ConfigError(
                f"kv_cache_floor is {sizes.kv_floor} bytes and one request of max_model_len {max_model_len} tokens "
                f"needs {longest * chunk_bytes}; raise kv_cache_floor or lower max_model_len"
            )
    _check("kv_cache_floor is", kv_floor * chunk_bytes, "the KV cache may have", kv_ceiling * chunk_bytes)
    adapter_floor = sizes.adapter_floor // chunk_bytes
    if sizes.lora is not None and (kv_floor + max(1, adapter_floor)) * chunk_bytes > whole:
        raise ConfigError(
            f"device_memory of {whole} bytes leaves no room for adapters: the KV cache's floor is "
            f"{kv_floor * chunk_bytes} bytes, since one request of max_model_len {max_model_len} tokens has to fit; "
            "raise device_memory, or lower max_model_len or kv_cache_floor"
        )
    floors = (kv_floor + adapter_floor) * chunk_bytes
    _check("the floors of KV cache and adapters are together", floors, "device_memory is", whole)
    return {
        Owner.KV: Limits(kv_floor, kv_ceiling),
        Owner.ADAPTERS: Limits(adapter_floor, -(-sizes.adapters // chunk_bytes)),
    }


def _wanted_model_len(config: EngineConfig, allowed: int, sizes: _Sizes, token_bytes: float) -> int:
    """What is asked for, or the default; the KV cache's last part of a chunk may still be too small for it."""
    if config.max_model_len is not None:
        if config.max_model_len > allowed:
            raise ConfigError(
                f"max_model_len is {config.max_model_len}, the model's positions end at {allowed}; lower it"
            )
        return config.max_model_len
    if sizes.whole is None or sizes.lora is None:
        return min(allowed, int(sizes.kv_ceiling / token_bytes))
    kept = (sizes.whole - sizes.adapter_floor) // 2 if sizes.kv_floor is None else sizes.kv_floor
    return min(allowed, max(SHARED_MODEL_LEN, int(kept / token_bytes)))


def _max_model_len(config: EngineConfig, allowed: int, sizes: _Sizes, wanted: int, kv_tokens: int) -> tuple[int, str]:
    """(`wanted`, or as a default what the KV cache of `kv_tokens` holds of it; why, for a default)."""
    length = wanted if config.max_model_len is not None else min(wanted, kv_tokens)
    if length > kv_tokens or length < 2:
        raise ConfigError(
            f"one request of max_model_len {config.max_model_len or allowed} tokens does not fit in the KV cache of "
            f"{sizes.kv_ceiling} bytes, which holds {kv_tokens} tokens; "
            "raise kv_cache_memory_bytes or lower max_model_len"
        )
    choice = ""
    if config.max_model_len is None:
        reason = "as far as the model's positions go"
        if length < wanted or (length < allowed and (sizes.whole is None or sizes.lora is None)):
            reason = f"all that the KV cache of {sizes.kv_ceiling} bytes holds; the model's positions end at {allowed}"
        elif length < allowed:
            reason = f"more would take from adapters' part of device_memory; the model's positions end at {allowed}"
        choice = f"max_model_len: {length} tokens ({reason})"
        logger.info("%s", choice)
    return length, choice


def _stretched_len(config: EngineConfig, model_config: ModelConfig) -> int:
    """The longest context that adapters may have; 0 where none is longer. ConfigError for what cannot be."""
    factors = () if config.lora is None else config.lora.long_lora_scaling_factors
    base = model_config.long_contexts(factors)
    if factors and base.rope_type not in STRETCHED_ROPE_TYPES:
        raise ConfigError(
            f"long_lora_scaling_factors are {factors}, but the model's rope_type is {base.rope_type!r}, which adapters "
            f"cannot stretch: only {' or '.join(STRETCHED_ROPE_TYPES)}; leave them out"
        )
    if base.longest > MAX_CONTEXT:
        raise ConfigError(
            f"long_lora_scaling_factors of {factors} stretch the model's {base.num_positions} positions to "
            f"{base.longest}, and {MAX_CONTEXT} are the limit; lower them"
        )
    return base.longest


def _check_stretched(config: EngineConfig, sizes: _Sizes, stretched: int, kv_tokens: int) -> None:
    if stretched > kv_tokens:
        factors = () if config.lora is None else config.lora.long_lora_scaling_factors
        raise ConfigError(
            f"long_lora_scaling_factors of {factors} allow requests of {stretched} tokens, and the KV cache of "
            f"{sizes.kv_ceiling} bytes holds {kv_tokens}; raise kv_cache_memory_bytes or leave out the largest factor"
        )


def _machine_bytes(device: torch.device) -> int | None:
    """The memory of this machine as far as its control group goes; None where that is unknown."""
    if device.type != "cpu":
        return None
    with suppress(OSError, ValueError, AttributeError):
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        with suppress(OSError, ValueError):  # "max" is no number
            return min(physical, int(CGROUP_LIMIT.read_text()))
        return physical
    return None


SLOT_TABLE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a GPU: all of them, and those that no process has."""

    total_bytes: int
    free_bytes: int


def device_memory(device: torch.device) -> DeviceMemory | None:
    """As it is now, torch's own cache given back; None where the device's memory is the host's or unknown."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return DeviceMemory(total_bytes, free_bytes)


def shareable_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, memory: DeviceMemory) -> int:
    """What KV cache and adapters may share. Raises ConfigError, with the numbers, when nothing is left."""
    taken, reserve = memory.total_bytes - memory.free_bytes, reserve_bytes(config, model, dtype)
    allowed = int(memory.total_bytes * config.gpu_memory_utilization)
    if allowed - taken - reserve <= 0:
        raise ConfigError(
            "nothing is left of the GPU for KV cache and adapters: gpu_memory_utilization "
            f"{config.gpu_memory_utilization} of {memory.total_bytes} bytes is {allowed}, {taken} are taken (weights, "
            f"other processes) and a step needs {reserve}; raise gpu_memory_utilization, lower max_num_batched_tokens "
            "or max_num_seqs, or quantize the model"
        )
    return allowed - taken - reserve


def reserve_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """Kept free for the steps; see above."""
    attention = (2 * model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim
    a_token = (4 * model.hidden_size + attention + inner_numbers(model)) * dtype.itemsize
    vocab_size = model.vocab_size + (0 if config.lora is None else config.lora.lora_extra_vocab_size)
    logits = 4 * config.max_num_seqs * vocab_size * torch.float32.itemsize
    table = 0 if config.lora is None else SLOT_TABLE_BYTES
    graphs = 0 if config.enforce_eager else graph_bytes(config, model, dtype.itemsize)
    return config.max_num_batched_tokens * a_token + logits + table + graphs
