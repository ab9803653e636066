"""What a GPU has left for KV cache and adapters once the model is on it.

    shareable := gpu_memory_utilization * total - what is taken (weights, scratch memory, other processes) - reserve
    reserve   := activations of the largest step + logits + captured graphs + slot table

The reserve is an estimate, made of the model's shapes (no step is run): a step of max_num_batched_tokens keeps about four hidden
states, queries, keys, values and attention, and three of the MLP's inner states a token; sampling keeps the logits of max_num_seqs
rows four times in float32; what graphs get says graph_sizes.py. Logits of prompts (`prompt_logprobs`) are not in it: what
gpu_memory_utilization leaves is for them, for what torch's allocator loses to rounding, and for the driver.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loraplex.config import EngineConfig
from loraplex.engine.graph_sizes import graph_bytes
from loraplex.errors import ConfigError
from loraplex.models.config import ModelConfig

SLOT_TABLE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a GPU: all of them, and those that no process has."""

    total_bytes: int
    free_bytes: int


def device_memory(device: torch.device) -> DeviceMemory | None:
    """As it is now, torch's own cache given back; None where the device's memory is the host's or nobody says."""
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
            f"nothing is left of the GPU for KV cache and adapters: gpu_memory_utilization {config.gpu_memory_utilization} of "
            f"{memory.total_bytes} bytes is {allowed}, {taken} are taken (weights, other processes) and a step needs {reserve}; "
            "raise gpu_memory_utilization, lower max_num_batched_tokens or max_num_seqs, or quantize the model"
        )
    return allowed - taken - reserve


def reserve_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """Kept free for the steps; see above."""
    attention = (2 * model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim
    a_token = (4 * model.hidden_size + attention + 3 * model.intermediate_size) * dtype.itemsize
    logits = 4 * config.max_num_seqs * model.vocab_size * torch.float32.itemsize
    table = 0 if config.lora is None else SLOT_TABLE_BYTES
    graphs = 0 if config.enforce_eager else graph_bytes(config, model, dtype.itemsize)
    return config.max_num_batched_tokens * a_token + logits + table + graphs
