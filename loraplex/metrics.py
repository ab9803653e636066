"""Counters of an engine: one frozen snapshot that any front may show. Times are seconds, sizes bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How many steps ran since the start, and the seconds of each part of them (loraplex/profiler.py, STEP_PARTS)."""

    num_steps: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One consistent look at an engine. Counters only grow; gauges are of now.

    waiting_by_cause: `seat` (a place in the batch or KV), `load` (of the adapter), `room` (on the device for the adapter).
    adapter_loads: finished ones by what asked for them; adapter_evictions: by tier and reason; resident_bytes: by tier.
    running_adapter_ids, waiting_adapter_ids: ids of adapters of running and of waiting requests.
    """

    num_running: int = 0
    num_waiting: int = 0
    waiting_by_cause: Mapping[str, int] = field(default_factory=dict)
    kv_cache_usage: float = 0.0
    num_kv_blocks: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_finished: Mapping[str, int] = field(default_factory=dict)
    adapter_loads: Mapping[str, int] = field(default_factory=dict)
    adapter_load_s: float = 0.0
    num_adapter_load_failures: int = 0
    num_adapter_promotions: int = 0
    num_adapter_hits: int = 0
    num_adapter_misses: int = 0
    adapter_evictions: Mapping[str, int] = field(default_factory=dict)
    resident_bytes: Mapping[str, int] = field(default_factory=dict)
    capacity_bytes: Mapping[str, int] = field(default_factory=dict)
    pinned_bytes: int = 0
    num_adapters: int = 0
    max_lora: int = 0
    running_adapter_ids: tuple[int, ...] = ()
    waiting_adapter_ids: tuple[int, ...] = ()
    step_times: StepTimes = field(default_factory=StepTimes)
