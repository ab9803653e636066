"""Steps between their launch and their commit: one, or with look-ahead one while the next is scheduled and launched.

    step k     schedule k, launch k, then wait for k - 1 and commit it: the device runs k while the host ends k - 1 and schedules k + 1

Commits are in the order of launches. A launch that fails says so at its commit, after those of the steps before it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from loraplex.core import TokenOutput
from loraplex.engine.caretaker import Caretaker
from loraplex.engine.model_runner import ModelRunner, StepHandle
from loraplex.engine.schedule_plan import RequestStatus, SampledToken, SchedulePlan
from loraplex.engine.scheduler import Scheduler
from loraplex.engine.step_recorder import StepRecorder
from loraplex.errors import DeviceLostError, EngineError
from loraplex.memory.manager import LoRAModelManager
from loraplex.memory.weights.loading import is_device_lost, is_out_of_memory
from loraplex.profiler import STEP_PARTS, Profiler

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Flight:
    """A plan that is not committed, and what its launch gave."""

    plan: SchedulePlan
    launched: StepHandle | Exception

    def result(self) -> Mapping[str, SampledToken]:
        if isinstance(self.launched, Exception):
            raise self.launched
        return self.launched.result()


class StepsInFlight:
    """Launches plans and commits them. `adapters` is None in an engine without LoRA; `recorder` is there while a profile runs."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        adapters: LoRAModelManager | None,
        caretaker: Caretaker,
        profiler: Profiler,
        look_ahead: bool,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._adapters = adapters
        self._caretaker = caretaker
        self._profiler = profiler
        self._look_ahead = look_ahead
        self._flights: deque[_Flight] = deque()
        self.recorder: StepRecorder | None = None

    def __len__(self) -> int:
        return len(self._flights)

    def advance(self, plan: SchedulePlan) -> list[TokenOutput]:
        """Launch a plan, if it is not empty, and commit the steps before it; it too, unless it may run on while the next is scheduled.

        Returns what was committed. Raises DeviceLostError.
        """
        num_left = 0
        if plan.sequences:
            flight = self._launch(plan)
            num_left = int(self._look_ahead and not isinstance(flight.launched, Exception))
        outputs: list[TokenOutput] = []
        while len(self._flights) > num_left:
            outputs += self._commit_oldest()
        if not self._scheduler.has_unfinished:  # nobody waits for what is left: its memory returns now
            outputs += self.commit_all()
        return outputs

    def commit_all(self) -> list[TokenOutput]:
        """Wait for the steps in flight and commit them. Raises DeviceLostError."""
        outputs: list[TokenOutput] = []
        while self._flights:
            outputs += self._commit_oldest()
        return outputs

    def drain(self) -> None:
        """Wait until the device reads no memory any more; what it computed is dropped, and the next step begins anew."""
        with suppress(Exception):
            self._runner.recover()

    def _launch(self, plan: SchedulePlan) -> _Flight:
        if self._adapters is not None:
            self._adapters.step_launched(plan.step_id)
        flight = _Flight(plan, self._try_launch(plan))
        self._flights.append(flight)
        return flight

    def _try_launch(self, plan: SchedulePlan) -> StepHandle | Exception:
        try:
            return self._runner.launch(plan)
        except Exception as error:
            # Frames hold the tensors of the step, for which there was no memory.
            return error.with_traceback(None) if is_out_of_memory(error) else error

    def _commit_oldest(self) -> list[TokenOutput]:
        flight = self._flights[0]
        try:
            tokens: Mapping[str, SampledToken] | Exception = self._result(flight)
        except Exception as error:
            tokens = error
            self.drain()
        finally:
            self._flights.popleft()
            if self._adapters is not None:
                self._adapters.step_committed(flight.plan.step_id)
        return self._fail(flight.plan, tokens) if isinstance(tokens, Exception) else self._commit(flight.plan, tokens)

    def _result(self, flight: _Flight) -> Mapping[str, SampledToken]:
        """Once more in low-memory mode when memory ran out: a step that failed has changed nothing but KV that it writes again.

        So does the step after it, which read what this one did not draw.
        """
        try:
            with self._profiler.part("wait"):
                return flight.result()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._caretaker.monitor.alarm(f"a step could not allocate memory: {error}")
        self.drain()
        self._caretaker.monitor.tick()
        for each in self._flights:
            each.launched = self._try_launch(each.plan)
        return flight.result()

    def _fail(self, plan: SchedulePlan, error: Exception) -> list[TokenOutput]:
        if is_device_lost(error):
            raise DeviceLostError(f"the device does not answer any more: {error}") from error
        logger.error("a step failed; its %d requests end", len(plan.sequences), exc_info=error)
        failure = EngineError(f"the step of this request failed: {type(error).__name__}: {error}")
        return self._scheduler.fail(plan, failure)

    def _commit(self, plan: SchedulePlan, tokens: Mapping[str, SampledToken]) -> list[TokenOutput]:
        is_running = [sequence.state.status is RequestStatus.RUNNING for sequence in plan.sequences]
        wanted = plan
        if not all(is_running):  # some ended while it ran
            kept = zip(plan.sequences, is_running, strict=True)
            wanted = replace(plan, sequences=tuple(sequence for sequence, is_kept in kept if is_kept))
        with self._profiler.part("commit"):
            outputs = self._scheduler.commit(plan, tokens)
        if self.recorder is not None:
            self.recorder.end(wanted, self._profiler.seconds, STEP_PARTS)
        self._caretaker.after_step(wanted, tokens)
        return outputs
