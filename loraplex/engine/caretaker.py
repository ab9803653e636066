"""Between steps: the monitor's look at the memory, a scrub of weights, and what follows when an adapter's results are wrong.

logits not finite -> the request ends (503), all others go on; the adapter is in doubt, the base too
                  -> the base answers the diagnostic prompt: wrong, and the engine starts again
                  -> the adapter answers it where it lies: right, and that is all; at most one such look a second
                  -> wrong: it is quarantined, its requests end (503, Retry-After)
                  -> it is read again and answers: right, and it is served again; wrong, and it is tried later
damaged weights   -> the requests that run on them end, the copy is let go, the next demand restores it
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from loraplex.config import EngineConfig, LoRAConfig
from loraplex.core import Request, TokenOutput
from loraplex.engine.diagnosis import Diagnosis
from loraplex.engine.engine_memory import EngineMemory
from loraplex.engine.forecast import Forecast
from loraplex.engine.model_runner import ModelRunner
from loraplex.engine.schedule_plan import SampledToken, SchedulePlan
from loraplex.engine.scheduler import Scheduler
from loraplex.errors import (
    AdapterError,
    AdapterFaultError,
    AdapterNoRoomError,
    AdapterNotFoundError,
    BaseModelFaultError,
    LoraplexError,
)
from loraplex.events import EventLog
from loraplex.kvcache.allocator import KVBlockAllocator
from loraplex.memory.care.damage import damage_error
from loraplex.memory.care.monitor import MemoryMonitor, Thresholds, system_pressure
from loraplex.memory.manager import LoRAModelManager

SCRUB_INTERVAL_S = 1.0
FORECAST_INTERVAL_S = 1.0
BASE_CHECK_INTERVAL_S = 1.0
MAX_SCRUB_DELAY_S = 5.0
"""After a longer pause no more is checked at once than in this time."""


def make_caretaker(
    config: EngineConfig,
    adapters: LoRAModelManager | None,
    scheduler: Scheduler,
    blocks: KVBlockAllocator,
    runner: ModelRunner,
    events: EventLog,
    vocab_size: int,
) -> Caretaker:
    """The caretaker of an engine with these parts, on the real clock."""
    lora = config.lora or LoRAConfig()
    forecast = Forecast(time.monotonic) if adapters is not None and lora.enable_prediction else None
    memory = EngineMemory(adapters, blocks, runner, scheduler, system_pressure, forecast, time.monotonic)
    thresholds = Thresholds(
        config.monitor_interval_s,
        config.high_pressure,
        config.critical_pressure,
        config.relaxed_pressure,
        config.long_idle_s,
        config.max_fragmentation,
    )
    monitor = MemoryMonitor(memory, thresholds, events, time.monotonic, time.time)
    diagnosis = Diagnosis(runner.answer, blocks, vocab_size)
    if adapters is not None:
        adapters.alarm_with(monitor.alarm)
    return Caretaker(adapters, scheduler, diagnosis, monitor, forecast, lora, time.monotonic)


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
    ) -> None:
        self._adapters = adapters
        self._scheduler = scheduler
        self._diagnosis = diagnosis
        self._forecast = forecast
        self._lora = lora
        self._clock = clock
        self._last_scrub_s = self._last_forecast_s = clock()
        self._in_diagnosis: int | None = None
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

    def refusal(self, adapter_id: int | None) -> AdapterFaultError | None:
        """The error for a new request, when its adapter is quarantined."""
        return None if adapter_id is None or self._adapters is None else self._adapters.health.refusal(adapter_id)

    def arrived(self, request: Request) -> None:
        """A request is about to be queued."""
        if self._forecast is not None:
            self._forecast.arrived(request)

    def before_step(self) -> list[TokenOutput]:
        """Care that is due; returns the requests that it ended. Raises BaseModelFaultError when the base itself is wrong.

        Only while no step is in flight.
        """
        self.monitor.tick()
        if self._is_base_check_due:
            self._check_base()
        if self._adapters is None:
            return []
        ended = [*self._scrub(self._adapters), *self._end_faulty(self._adapters), *self._examine(self._adapters)]
        self._diagnose(self._adapters)
        self._prefetch()
        if self._lora.enable_diagnosis and not self._scheduler.has_unfinished:
            self._record_one(self._adapters)
        return ended

    def after_step(self, plan: SchedulePlan, tokens: Mapping[str, SampledToken]) -> None:
        """Doubt the adapters whose results in this step were odd, and the base if its own were."""
        bad = {
            sequence.state.request.adapter_id
            for sequence in plan.sequences
            if (token := tokens.get(sequence.state.request.request_id)) is not None and token.has_odd_logits
        }
        self._is_base_suspect |= None in bad
        for adapter_id in bad - {None}:
            assert adapter_id is not None
            assert self._adapters is not None
            self._adapters.health.doubt(adapter_id)

    def _prefetch(self) -> None:
        if self._is_forecast_due:
            self._last_forecast_s = self._clock()
            self.monitor.prefetch()

    @property
    def _is_forecast_due(self) -> bool:
        return self._forecast is not None and self._clock() - self._last_forecast_s >= FORECAST_INTERVAL_S

    # ------------------------------------------------------------------------------------------------- wrong results

    def _examine(self, adapters: LoRAModelManager) -> list[TokenOutput]:
        """Look at adapters in doubt where they lie, while they are served; returns the requests of wrong ones, ended."""
        ended: list[TokenOutput] = []
        for adapter_id in adapters.health.doubted():
            damaged = adapters.health.scrub_one(adapter_id)
            for each, name in damaged.items():
                ended += self._end_and_restore(adapters, each, damage_error(name))
            wrong = None if damaged else self._what_is_wrong(adapters, adapter_id)
            adapters.health.looked(adapter_id)
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
        return self._is_base_suspect and self._clock() - self._last_base_check_s >= BASE_CHECK_INTERVAL_S

    def _check_base(self) -> None:
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
            self._check_base()
        adapter_id = self._in_diagnosis
        try:
            acquired = adapters.try_acquire(adapter_id)
        except (AdapterNoRoomError, AdapterNotFoundError):  # no fault of its own
            self._in_diagnosis = None
            adapters.health.postpone(adapter_id)
            return
        except AdapterError as error:
            self._in_diagnosis = None
            adapters.health.still_ill(adapter_id, str(error))
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
        """The answer of one adapter that has none yet, while nobody waits."""
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
