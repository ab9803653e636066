"""The report of a profile: how adapters fared, what they cost, and findings in words. Times are seconds, sizes bytes,
shares 0 to 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from loraplex.cpu import CpuUse
from loraplex.metrics import KernelSpeedup, MemoryReport
from loraplex.performance.histogram import Quantiles
from loraplex.performance.requests import ServiceTargets
from loraplex.performance.steps import Timeline


@dataclass(frozen=True, slots=True)
class Finding:
    """severity: `info`, `advice` or `warning`. text: what was seen, with its number; remedy: what to do about it."""

    name: str
    severity: str
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class AdapterPerformance:
    """The requests of one adapter; name None: of the base model, `(all)`: of all. tier, nbytes, rank: at the end.

    share_*: of the finished requests, those that kept the targets.
    """

    name: str | None
    num_requests: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    first_token: Quantiles = field(default_factory=Quantiles)
    inter_token: Quantiles = field(default_factory=Quantiles)
    end_to_end: Quantiles = field(default_factory=Quantiles)
    share_in_first_token: float = 0.0
    share_in_inter_token: float = 0.0
    share_in_both: float = 0.0
    tier: str = ""
    nbytes: int = 0
    rank: int = 0


@dataclass(frozen=True, slots=True)
class MixPerformance:
    """Decode steps with `least_adapters` up to (not with) twice as many distinct adapters.

    lora_share: of the operators' time, None when the backend cannot tell. slowdown: mean time against steps without
    adapters that have as many rows, None when there were none.
    """

    least_adapters: int
    num_steps: int
    mean_rows: float
    tokens_per_s: float
    step: Quantiles
    lora_share: float | None = None
    slowdown: float | None = None


@dataclass(frozen=True, slots=True)
class SwitchCost:
    """load: source or disk to host; switch: until the new adapter answered.

    promote_mean_s: host to device by copying; 0 where it is a table write.
    """

    load: Quantiles = field(default_factory=Quantiles)
    num_promotions: int = 0
    num_copies: int = 0
    promote_mean_s: float = 0.0
    switch: Quantiles = field(default_factory=Quantiles)


@dataclass(frozen=True, slots=True)
class LoraPerformanceReport:
    """admitted: requests by what of their adapter they had to wait for; served_from: the tier where a request found its
    adapter; evictions and loads: by cause; part_seconds: of the steps (performance/profiler.py); device_share: of the
    time, in steps on the device, None where that was not measured; cpu: what the engine's threads got of the processor;
    kernel_fallbacks: calls that stock torch ran, by operator and reason; kernel_speedups: empty unless they were asked
    for;
    operator_seconds: of forward, empty when the backend cannot tell; slowdown: of decode steps with adapters against
    those without.
    """

    begun_time: float
    seconds: float
    backend: str
    backend_description: str
    device: str = "cpu"
    targets: ServiceTargets = field(default_factory=ServiceTargets)
    requests: AdapterPerformance = field(default_factory=lambda: AdapterPerformance("(all)"))
    adapters: tuple[AdapterPerformance, ...] = ()
    num_adapters: int = 0
    admitted: Mapping[str, int] = field(default_factory=dict)
    served_from: Mapping[str, int] = field(default_factory=dict)
    loads: Mapping[str, int] = field(default_factory=dict)
    num_load_failures: int = 0
    evictions: Mapping[str, int] = field(default_factory=dict)
    switch_cost: SwitchCost = field(default_factory=SwitchCost)
    memory: MemoryReport = field(default_factory=MemoryReport)
    fragmentation_before: float = 0.0
    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_tokens: int = 0
    num_preemptions: int = 0
    part_seconds: Mapping[str, float] = field(default_factory=dict)
    operator_seconds: Mapping[str, float] = field(default_factory=dict)
    device_share: float | None = 0.0
    kernel_fallbacks: Mapping[str, int] = field(default_factory=dict)
    kernel_speedups: tuple[KernelSpeedup, ...] = ()
    cpu: CpuUse = field(default_factory=CpuUse)
    mixes: tuple[MixPerformance, ...] = ()
    slowdown: float | None = None
    timeline: Timeline = field(default_factory=Timeline)
    num_restarts: int = 0
    num_faults: int = 0
    findings: tuple[Finding, ...] = ()

    @property
    def num_admitted(self) -> int:
        return sum(self.admitted.values())

    def share_that_waited_for(self, what: str) -> float:
        """`load` or `room`."""
        return self.admitted.get(what, 0) / max(1, self.num_admitted)

    @property
    def step_seconds(self) -> float:
        return sum(self.part_seconds.values())
