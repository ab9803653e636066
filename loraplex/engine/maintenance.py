"""Between steps: a look at the memory, a scrub of weights, and what follows when an adapter's results are wrong.

logits not finite -> the request ends (503), all others go on; the adapter is in doubt, the base too
                  -> the base answers the diagnostic prompt: wrong, and the engine starts again
                  -> the adapter answers it where it lies: right, and that is all; one such look a second at most
                  -> wrong: it is quarantined, its requests end (503, Retry-After)
                  -> it is read again and answers: right, and it is served again; wrong, and it is tried later
damaged weights   -> the requests that run on them end, the copy is let go, the next demand restores it
"""

from __future__ import annotations

import ctypes
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

import torch

from loraplex.config import EngineConfig, LoRAConfig
from loraplex.core import Request, TokenOutput, WaitsFor
from loraplex.engine.diagnosis import Answer, Diagnosis
from loraplex.engine.schedule_plan import SampledToken, SchedulePlan
from loraplex.engine.scheduler import Scheduler
from loraplex.errors import (
    AdapterError,
    AdapterFaultError,
    AdapterMemoryError,
    AdapterNotFoundError,
    BaseModelFaultError,
    LoraplexError,
)
from loraplex.events import EventLog
from loraplex.kvcache.allocator import KVBlockAllocator
from loraplex.memory.care.damage import damage_error
from loraplex.memory.care.monitor import MemoryLook, MemoryMonitor, Thresholds, system_pressure
from loraplex.memory.care.prediction import MAX_KEYS, ArrivalPredictor
from loraplex.memory.manager import LoRAModelManager
from loraplex.metrics import MEMORY_TIERS, TierReport
from loraplex.models.dominant import DominantMerger

SCRUB_INTERVAL_S = 1.0
FORECAST_INTERVAL_S = 1.0
BASE_CHECK_INTERVAL_S = 1.0
RECORD_IDLE_S = 0.5
"""Without requests, before an adapter is asked what it answers: that takes a step, and the next client waits for it."""

MAX_WAIT_FOR_ROOM_S = 5.0
"""Of a diagnosis: then that of another adapter may begin. What runs of one tenant may keep room from it for good."""

MAX_SCRUB_DELAY_S = 5.0
"""After a longer pause no more is checked at once than in this time."""


def make_caretaker(
    config: EngineConfig,
    adapters: LoRAModelManager | None,
    scheduler: Scheduler,
    blocks: KVBlockAllocator,
    runner: TendedRunner,
    events: EventLog,
    vocab_size: int,
    clock: Callable[[], float] = time.monotonic,
    pressure: Callable[[], float | None] = system_pressure,
) -> Caretaker:
    """The caretaker of an engine with these parts. clock: seconds; pressure: of the machine's memory."""
    lora = config.lora or LoRAConfig()
    forecast = Forecast(clock) if adapters is not None and lora.enable_prediction else None
    gpu = GpuMemory(runner.device) if runner.device.type == "cuda" else None
    memory = EngineMemory(adapters, blocks, runner, scheduler, pressure, forecast, clock, gpu)
    thresholds = Thresholds(
        config.monitor_interval_s,
        config.high_pressure,
        config.critical_pressure,
        config.relaxed_pressure,
        config.long_idle_s,
        config.max_fragmentation,
    )
    monitor = MemoryMonitor(memory, thresholds, events, clock, time.time)
    diagnosis = Diagnosis(runner.answer, blocks, vocab_size)
    if adapters is not None:
        adapters.alarm_with(monitor.alarm)
    return Caretaker(adapters, scheduler, diagnosis, monitor, forecast, lora, clock, runner.merger)


class Caretaker:
    """Owned by the engine's thread. `adapters` is None in an engine without LoRA."""

    def __init__(
        self,
        adapters: LoRAModelManager | None,
        scheduler: Scheduler,
        diagnosis: Diagnosis,
        monitor: MemoryMonitor,
        forecast: Forecast | None,
        lora: LoRAConfig,
        clock: Callable[[], float],
        merger: DominantMerger | None = None,
    ) -> None:
        self._merger = merger
        self._adapters = adapters
        self._scheduler = scheduler
        self._diagnosis = diagnosis
        self._forecast = forecast
        self._lora = lora
        self._clock = clock
        self._last_scrub_s = self._last_forecast_s = self._last_busy_s = clock()
        self._in_diagnosis: int | None = None
        self._diagnosis_began_s = -math.inf
        self._is_base_suspect = False
        self._last_base_check_s = -math.inf
        self.monitor = monitor

    @property
    def is_at_work(self) -> bool:
        """Whether a diagnosis waits for its adapter: the engine should not sleep."""
        return self._in_diagnosis is not None or self._is_base_suspect

    @property
    def is_due(self) -> bool:
        """Whether `before_step` has something to do."""
        if self.monitor.is_due or self._in_diagnosis is not None or self._is_base_check_due:
            return True
        if self._adapters is None:
            return False
        return self._is_scrub_due or self._is_forecast_due or self._adapters.health.is_diagnosis_due

    def refusal(self, adapter_id: int) -> AdapterFaultError | None:
        """The error for a new request, when its adapter is quarantined."""
        return None if self._adapters is None else self._adapters.health.refusal(adapter_id)

    def arrived(self, request: Request) -> None:
        """A request is about to be queued."""
        self._last_busy_s = self._clock()
        if self._forecast is not None:
            self._forecast.arrived(request)

    def before_step(self) -> list[TokenOutput]:
        """Care that is due; returns the requests that it ended. Raises BaseModelFaultError when the base is wrong.

        Only while no step is in flight.
        """
        self.monitor.tick()
        if self._is_base_suspect:
            self._check_base()
        if self._adapters is None:
            return []
        ended = [*self._scrub(self._adapters), *self._end_faulty(self._adapters), *self._examine(self._adapters)]
        self._diagnose(self._adapters)
        self._prefetch()
        is_idle = not self._scheduler.has_unfinished and self._clock() - self._last_busy_s >= RECORD_IDLE_S
        if self._lora.enable_diagnosis and is_idle:
            self._record_one(self._adapters)
        return ended

    def after_step(self, plan: SchedulePlan, tokens: Mapping[str, SampledToken]) -> None:
        """Doubt the adapters whose results in this step were odd, each of a mix, and the base if its own were."""
        self._last_busy_s = self._clock()
        bad = [
            sequence.state.request
            for sequence in plan.sequences
            if (token := tokens.get(sequence.state.request.request_id)) is not None
            and any(each.has_odd_logits for each in token.run)
        ]
        self._is_base_suspect |= any(request.adapter_id is None for request in bad)
        for adapter_id in {adapter_id for request in bad for adapter_id in request.adapter_ids}:
            assert self._adapters is not None
            self._adapters.health.doubt(adapter_id)
        if self._merger is not None:
            for request in bad:
                self._merger.suspect(request.adapter_digest)

    def _prefetch(self) -> None:
        if self._is_forecast_due:
            self._last_forecast_s = self._clock()
            self.monitor.prefetch()

    @property
    def _is_forecast_due(self) -> bool:
        return self._forecast is not None and self._clock() - self._last_forecast_s >= FORECAST_INTERVAL_S

    # ------------------------------------------------------------------------------------------------- wrong results

    def _examine(self, adapters: LoRAModelManager) -> list[TokenOutput]:
        """Look at an adapter in doubt where it lies, while it is served; returns the ended requests of a wrong one."""
        ended: list[TokenOutput] = []
        adapter_id = adapters.health.next_doubt()
        if adapter_id is None:
            return ended
        damaged = adapters.health.scrub_one(adapter_id)
        for each, name in damaged.items():
            ended += self._end_and_restore(adapters, each, damage_error(name))
        wrong = None if damaged else self._what_is_wrong(adapters, adapter_id)
        if wrong is not None:
            for each in adapters.health.quarantine(adapter_id, f"its logits are not finite, and {wrong}"):
                ended += self._end_requests(each)
        return ended

    def _what_is_wrong(self, adapters: LoRAModelManager, adapter_id: int) -> str | None:
        """With an adapter on the device; None for one that has left, and without KV blocks for the prompt."""
        self._check_base()
        with adapters.health.lent(adapter_id) as lent, suppress(MemoryError):
            if lent is not None:
                return self._diagnosis.what_is_wrong(*lent)
        return None

    def _end_requests(self, adapter_id: int, error: LoraplexError | None = None) -> list[TokenOutput]:
        error = error or self.refusal(adapter_id)
        return [] if error is None else self._scheduler.fail_adapter(adapter_id, error)

    @property
    def _is_base_check_due(self) -> bool:
        return self._is_base_suspect and self._may_check_base

    @property
    def _may_check_base(self) -> bool:
        return self._clock() - self._last_base_check_s >= BASE_CHECK_INTERVAL_S

    def _check_base(self) -> None:
        """Unless that was done less than an interval ago."""
        if not self._may_check_base:
            return
        self._last_base_check_s = self._clock()
        try:
            self._is_base_suspect = not self._diagnosis.is_base_well()
        except MemoryError:  # no KV blocks for the prompt now
            self._is_base_suspect = True
            return
        if self._is_base_suspect:
            raise BaseModelFaultError("the base model answers the diagnostic prompt otherwise than at the start")

    def _diagnose(self, adapters: LoRAModelManager) -> None:
        if self._in_diagnosis is None:
            self._in_diagnosis = adapters.health.next_diagnosis()
            if self._in_diagnosis is None:
                return
            self._diagnosis_began_s = self._clock()
            self._check_base()
        adapter_id = self._in_diagnosis
        try:
            acquired = adapters.try_acquire(adapter_id)
        except (AdapterMemoryError, AdapterNotFoundError):  # no fault of its own
            self._in_diagnosis = None
            adapters.health.postpone(adapter_id)
            return
        except AdapterError as error:
            self._in_diagnosis = None
            adapters.health.still_ill(adapter_id, str(error))
            return
        if acquired.waits_for is WaitsFor.ROOM and self._clock() - self._diagnosis_began_s > MAX_WAIT_FOR_ROOM_S:
            self._in_diagnosis = None
            adapters.health.postpone(adapter_id)
            return
        if acquired.lora_slot is None:
            return  # it is being read; the next step asks again
        self._in_diagnosis = None
        try:
            wrong = self._diagnosis.what_is_wrong(adapters.digest_of(adapter_id), acquired.lora_slot)
        except MemoryError:  # no KV blocks for the prompt now
            adapters.health.postpone(adapter_id)
            return
        finally:
            adapters.release(adapter_id)
        if wrong is None:
            adapters.health.cleared(adapter_id)
        else:
            adapters.health.still_ill(adapter_id, wrong)

    def _record_one(self, adapters: LoRAModelManager) -> None:
        """The answer of one adapter that has none yet, while there are no requests."""
        with adapters.health.borrowed(lambda digest: not self._diagnosis.has(digest)) as borrowed:
            if borrowed is not None:
                with suppress(MemoryError):  # no KV blocks for the prompt now
                    self._diagnosis.record(*borrowed)

    # ------------------------------------------------------------------------------------------------ damaged memory

    @property
    def _is_scrub_due(self) -> bool:
        return self._lora.scrub_bytes_per_s > 0 and self._clock() - self._last_scrub_s >= SCRUB_INTERVAL_S

    def _scrub(self, adapters: LoRAModelManager) -> list[TokenOutput]:
        if not self._is_scrub_due:
            return []
        elapsed_s = self._clock() - self._last_scrub_s
        self._last_scrub_s += elapsed_s
        ended: list[TokenOutput] = []
        num_bytes = int(self._lora.scrub_bytes_per_s * min(elapsed_s, MAX_SCRUB_DELAY_S))
        for adapter_id, name in adapters.health.scrub(num_bytes).items():
            ended += self._end_and_restore(adapters, adapter_id, damage_error(name))
        return ended

    def _end_faulty(self, adapters: LoRAModelManager) -> list[TokenOutput]:
        """Requests on weights that did not come to the device whole, or that a check beside the steps found damaged."""
        ended: list[TokenOutput] = []
        for adapter_id, error in adapters.health.take_faults().items():
            ended += self._end_and_restore(adapters, adapter_id, error)
        return ended

    def _end_and_restore(self, adapters: LoRAModelManager, adapter_id: int, error: LoraplexError) -> list[TokenOutput]:
        ended = self._end_requests(adapter_id, error)
        adapters.health.restore(adapter_id)
        return ended


COMPACT_BYTES = 64 << 20
COMPACT_S = 0.001
"""What compaction may copy and spend between two steps."""

THROTTLED_SHARE = 4
"""In low-memory mode one in so many of the usual places of a batch is given out again."""


class Workspace(Protocol):
    """Scratch memory that is kept between steps. `release_workspace` gives back what it can; returns the bytes."""

    @property
    def workspace_nbytes(self) -> int: ...

    def release_workspace(self) -> int: ...


class TendedRunner(Workspace, Protocol):
    """What a caretaker needs of the model runner."""

    @property
    def device(self) -> torch.device: ...

    @property
    def merger(self) -> DominantMerger | None: ...

    def answer(self, request: Request, lora_slot: int) -> Answer | None: ...


class GpuMemory:
    """A GPU's memory as the driver and torch's allocator see it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def taken_share(self) -> float:
        """Of all processes, with what the allocator keeps for later. Waits for nothing."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return 1 - free_bytes / total_bytes

    def release_cache(self) -> int:
        """What the allocator keeps for later goes back to the driver; returns the bytes. Waits for the device."""
        kept_bytes = torch.cuda.memory_reserved(self._device)
        torch.cuda.empty_cache()
        return kept_bytes - torch.cuda.memory_reserved(self._device)


class EngineMemory:
    """monitor.MonitoredMemory: an engine's tiers of adapters, its KV cache, scratch memory, and the machine.

    `adapters` is None in an engine without LoRA; `forecast` is None when nothing is predicted;
    `gpu` is None on a CPU.
    """

    def __init__(
        self,
        adapters: LoRAModelManager | None,
        blocks: KVBlockAllocator,
        workspace: Workspace,
        scheduler: Scheduler,
        system_pressure: Callable[[], float | None],
        forecast: Forecast | None,
        clock: Callable[[], float],
        gpu: GpuMemory | None = None,
    ) -> None:
        self._gpu = gpu
        self._adapters = adapters
        self._blocks = blocks
        self._workspace = workspace
        self._scheduler = scheduler
        self._system_pressure = system_pressure
        self._forecast = forecast
        self._clock = clock

    def look(self) -> MemoryLook:
        pressure = {"kv": 1 - self._blocks.num_free_blocks / self._blocks.num_blocks}
        occupancy: dict[str, float] = {}
        used_bytes: dict[str, int] = {"workspace": self._workspace.workspace_nbytes}
        fragmentation = most_fragmentation = 0.0
        system = self._system_pressure()
        if system is not None:
            pressure["system"] = system
        if self._adapters is not None:
            report = self._adapters.report()
            for name in MEMORY_TIERS:
                tier = report.tier(name)
                occupancy[name] = _occupancy(tier)
                used_bytes[name] = tier.used_bytes
                if name == "device" or not self._adapters.is_shared:
                    pressure[name] = tier.pressure
            fragmentation, most_fragmentation = report.fragmentation, report.most_fragmentation
        gpu = None if self._gpu is None else self._gpu.taken_share()
        return MemoryLook(pressure, occupancy, used_bytes, fragmentation, most_fragmentation, gpu)

    def reclaim_idle(self, tier: str, idle_s: float, share: int) -> int:
        return 0 if self._adapters is None else self._adapters.housekeeping.reclaim_idle(tier, idle_s, share)

    def reclaim_beyond_quotas(self) -> None:
        if self._adapters is not None:
            self._adapters.reclaim_beyond_quotas()

    def compact(self) -> int:
        return (
            0 if self._adapters is None else self._adapters.compact(COMPACT_BYTES, self._clock() + COMPACT_S).num_moved
        )

    def prefetch_predicted(self) -> int:
        if self._adapters is None or self._forecast is None:
            return 0
        return self._adapters.housekeeping.prefetch(self._forecast.due())

    def release_caches(self, short_of: str | None) -> int:
        released = self._workspace.release_workspace()
        self._blocks.reset_cache()
        if self._adapters is not None:
            released += self._adapters.housekeeping.release_idle()
            if short_of is not None:
                released += self._adapters.housekeeping.release_host(is_machine_short=short_of == "system")
            self._adapters.release_pages()
        _trim_heap()
        return released + self.release_gpu()

    def release_gpu(self) -> int:
        return 0 if self._gpu is None else self._gpu.release_cache()

    def throttle(self, is_on: bool) -> None:
        self._scheduler.throttle(THROTTLED_SHARE if is_on else 1)


def _occupancy(tier: TierReport) -> float:
    by_count = tier.num_adapters / tier.max_adapters if tier.max_adapters else 0.0
    return max(tier.used_bytes / tier.max_bytes, by_count)


def _trim_heap() -> None:
    """What malloc keeps for later goes back to the system; glibc only."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


HORIZON_S = 5.0
"""A load from disk takes milliseconds and one from a slow source seconds: earlier is only longer in memory."""

MAX_PREDICTIONS = 4
"""At once; the next look brings more."""


class Forecast:
    """Which adapters the arrivals so far say will be asked for soon, by adapter id.

    Told of every request for an adapter; contents are what is predicted, so a reload under the same name is another
    one.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._predictor = ArrivalPredictor()
        self._adapter_of: OrderedDict[str, int] = OrderedDict()  # of the contents that the predictor may know

    def arrived(self, request: Request) -> None:
        if request.mix:
            for part in request.mix:
                self._see(part.adapter_id, part.adapter_digest)
        elif request.adapter_id is not None:
            self._see(request.adapter_id, request.adapter_digest)

    def _see(self, adapter_id: int, adapter_digest: str) -> None:
        self._adapter_of[adapter_digest] = adapter_id
        self._adapter_of.move_to_end(adapter_digest)
        if len(self._adapter_of) > MAX_KEYS:
            self._adapter_of.popitem(last=False)
        self._predictor.observe(adapter_digest, self._clock())

    def due(self) -> list[int]:
        """Adapters that will probably be asked for within the horizon, the likeliest first."""
        predictions = self._predictor.predict(self._clock(), HORIZON_S, MAX_PREDICTIONS)
        return [self._adapter_of[each.key] for each in predictions if each.key in self._adapter_of]
