"""Counters of an engine: one frozen snapshot that any front may show. Times are seconds, sizes bytes."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from loraplex.cpu import CpuUse

MEMORY_TIERS = ("device", "host")
"""What kernels, or copies to them, can read."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How many steps ran since the start, and the seconds of each part of them (performance.profiler.STEP_PARTS)."""

    num_steps: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KernelFallback:
    """Calls of an operator that stock torch ran because no kernel of `backend` covered them, and the reason."""

    op: str
    backend: str
    reason: str
    calls: int

    @property
    def label(self) -> str:
        """Of `loraplex:kernel_fallbacks`."""
        return f"{self.op}: {self.reason}"


@dataclass(frozen=True, slots=True)
class KernelSpeedup:
    """Seconds of one call of an operator on `backend`, and of the same on `fallback`; `shape` says on what tensors."""

    op: str
    backend: str
    fallback: str
    shape: str
    kernel_s: float
    fallback_s: float

    @property
    def speedup(self) -> float:
        return self.fallback_s / self.kernel_s


class MemoryMode(enum.StrEnum):
    """`low_memory`: inactive adapters are off the device, scratch and caches released, admission throttled."""

    NORMAL = "normal"
    LOW_MEMORY = "low_memory"


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier of adapters: `device`, `host`, `compressed`, `disk` or `merged`. num_adapters counts contents, up to
    max_adapters.

    pressure: the share of the budget that cannot be freed now (in use, pinned, on its way), 0 to 1; what is idle is no
    pressure.
    """

    tier: str
    used_bytes: int
    max_bytes: int
    num_adapters: int
    pressure: float
    max_adapters: int | None = None


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """`num_chunks` adjacent chunks of the arena with one owner: `kv`, `adapters`, `free` or `fenced`."""

    owner: str
    num_chunks: int


@dataclass(frozen=True, slots=True)
class MemorySample:
    """One look of the monitor. By tier (`device`, `host`, `disk`), `kv` and `system`, where known."""

    time_s: float
    mode: MemoryMode
    pressure: Mapping[str, float]
    used_bytes: Mapping[str, int]
    fragmentation: float


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """All that `GET /v1/memory` shows. Times are Unix time, sizes bytes; history is oldest first.

    fragmentation: share of the adapters' chunks of the device that perfect packing would give back; most_fragmentation:
    of those or of the host's, the larger one. quarantined: adapter id -> why, and until when it is not served.
    num_waiting: contents that requests asked for in the last two scheduling passes and did not get, by what they wait
    for. found: requests by where their adapter was: `device`, `host`, `compressed`, `disk`, `source`; those that wait
    for one load together count one for what it read. counters: only grow, by name. merged: ids of the adapters whose
    content is merged into a copy of weights.
    """

    mode: MemoryMode = MemoryMode.NORMAL
    tiers: tuple[TierReport, ...] = ()
    pinned_bytes: int = 0
    in_use_bytes: int = 0
    retiring_bytes: int = 0
    num_adapters: int = 0
    num_loading: int = 0
    chunk_bytes: int = 0
    chunks: tuple[ChunkRun, ...] = ()
    fragmentation: float = 0.0
    kv_block_bytes: int = 0
    num_kv_blocks: int = 0
    num_free_kv_blocks: int = 0
    workspace_bytes: int = 0
    quarantined: Mapping[int, str] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    history: tuple[MemorySample, ...] = ()
    most_fragmentation: float = 0.0
    num_waiting: Mapping[str, int] = field(default_factory=dict)
    found: Mapping[str, int] = field(default_factory=dict)
    merged: tuple[int, ...] = ()

    def tier(self, name: str) -> TierReport:
        """One tier; an empty one for a tier that is not there."""
        return next((each for each in self.tiers if each.tier == name), TierReport(name, 0, 0, 0, 0.0))

    def count(self, name: str) -> int:
        """A counter; 0 for one that is not there."""
        return int(self.counters.get(name, 0))

    @property
    def kv_cache_usage(self) -> float:
        """Used share of the KV cache, 0 to 1."""
        return 1 - self.num_free_kv_blocks / self.num_kv_blocks if self.num_kv_blocks else 0.0

    @property
    def resident_bytes(self) -> Mapping[str, int]:
        """Bytes of adapters by tier."""
        return {each.tier: each.used_bytes for each in self.tiers}

    @property
    def loads(self) -> Mapping[str, int]:
        """Finished ones, by what asked for them."""
        return {cause: count for cause, count in self._counts("loads_").items() if not cause.startswith("from_")}

    @property
    def evictions(self) -> Mapping[str, int]:
        """By tier and reason."""
        return self._counts("evictions_")

    def _counts(self, start: str) -> dict[str, int]:
        return {key.removeprefix(start): int(n) for key, n in self.counters.items() if key.startswith(start)}

    @property
    def chunks_by_owner(self) -> Mapping[str, int]:
        total: dict[str, int] = {}
        for run in self.chunks:
            total[run.owner] = total.get(run.owner, 0) + run.num_chunks
        return total


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One consistent look at an engine. Counters only grow; gauges are of now.

    waiting_by_cause: `seat` (a place in the batch or KV), `load` (of the adapter), `room` (on the device for the
    adapter). adapter_loads: finished ones by what asked for them; adapter_evictions: by tier and reason;
    resident_bytes: by tier, `device` and `host`; these three are of `memory`. adapters_found: requests by where their
    adapter was: `device`, `host`, `compressed`, `disk`, `source`; those that wait for one load together count one for
    what it read. num_preemptions: running requests that were preempted and were, or will be, computed again;
    num_pauses: those that made room for another adapter, with their KV kept as long as no other request needed the
    memory (a KV that was needed makes a preemption of it too). num_drafts, num_draft_tokens: that were verified;
    num_accepted_tokens: of those, the ones that requests got. num_admitted: requests that began to run, by what of
    their adapter they had last waited for: `nothing`, `load`, `room`. kernel_fallbacks: calls of operators that stock
    torch ran because no kernel covered them, by operator and reason. target_outcomes: first tokens (`ttft`) and later
    ones (`itl`) of tenants with such a target, `ttft_met`, `ttft_missed`, `itl_met`, `itl_missed`.
    running_adapter_ids, waiting_adapter_ids: ids of adapters of running and of waiting requests. graph_steps: replayed
    CUDA graphs, `base` and `lora`; eager_steps: steps beside them by reason. Both empty in an engine without graphs.
    """

    num_running: int = 0
    num_waiting: int = 0
    waiting_by_cause: Mapping[str, int] = field(default_factory=dict)
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_preemptions: int = 0
    num_pauses: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_finished: Mapping[str, int] = field(default_factory=dict)
    num_admitted: Mapping[str, int] = field(default_factory=dict)
    target_outcomes: Mapping[str, int] = field(default_factory=dict)
    adapters_found: Mapping[str, int] = field(default_factory=dict)
    max_lora: int = 0
    kernel_fallbacks: Mapping[str, int] = field(default_factory=dict)
    running_adapter_ids: tuple[int, ...] = ()
    waiting_adapter_ids: tuple[int, ...] = ()
    step_times: StepTimes = field(default_factory=StepTimes)
    graph_steps: Mapping[str, int] = field(default_factory=dict)
    eager_steps: Mapping[str, int] = field(default_factory=dict)
    cpu: CpuUse = field(default_factory=CpuUse)
    memory: MemoryReport = field(default_factory=MemoryReport)

    @property
    def adapter_loads(self) -> Mapping[str, int]:
        return self.memory.loads

    @property
    def adapter_evictions(self) -> Mapping[str, int]:
        return self.memory.evictions

    @property
    def resident_bytes(self) -> Mapping[str, int]:
        return {tier: nbytes for tier, nbytes in self.memory.resident_bytes.items() if tier in MEMORY_TIERS}


@dataclass(frozen=True, slots=True)
class RunnerReport:
    """One engine process of a server. device: as torch names it. message: why it takes no requests, "" while it does.
    stats: None while it does not answer. is_released: it was ended since the load does not need it. num_moved: requests
    that went on in another runner."""

    name: str
    device: str
    message: str = ""
    stats: EngineStats | None = None
    is_released: bool = False
    num_moved: int = 0

    @property
    def is_serving(self) -> bool:
        return not self.message
