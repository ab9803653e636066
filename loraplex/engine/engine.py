"""The heart: one engine, synchronous. A step is schedule, launch, commit; with async scheduling, of the step before.

Nothing here knows of names, files or sockets: requests are token ids, adapters are ids with a digest.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Protocol

from loraplex.core import EngineInfo, FinishReason, Request, TokenOutput
from loraplex.cpu import CpuUse
from loraplex.engine.decode_graphs import DecodeGraphs
from loraplex.engine.maintenance import Caretaker
from loraplex.engine.schedule_plan import RequestStatus, SampledToken, SchedulePlan
from loraplex.engine.scheduler import Scheduler
from loraplex.errors import DeviceLostError, EngineError, EngineOverloadedError, InvalidRequestError, LoraDisabledError
from loraplex.events import EngineEvent, EventLog
from loraplex.kvcache.allocator import KVBlockAllocator
from loraplex.memory.manager import LoRAModelManager
from loraplex.memory.weights.loading import is_device_lost, is_out_of_memory
from loraplex.metrics import EngineStats, KernelSpeedup, MemoryReport, StepTimes
from loraplex.models.dominant import DominantMerger
from loraplex.performance.profiler import STEP_PARTS, Profiler
from loraplex.performance.steps import StepProfile, StepRecorder, StepRow
from loraplex.structured.grammars import GrammarCompiler, GrammarState
from loraplex.tenants.fair_limit import has_room

logger = logging.getLogger(__name__)

MAX_LOGGED_REQUESTS = 4
"""Of a step that failed."""

MAX_VOCABULARY = 1 << 29
"""Token ids are less, whatever adapter they are for."""

MAX_VACATED_CHUNKS = 8
"""Of a step: KV chunks that are emptied, by copying, for adapters that wait for memory."""


class LaunchedStep(Protocol):
    """A step that runs, or has run."""

    def result(self) -> Mapping[str, SampledToken]:
        """One token for each sampled sequence, by request_id, with those behind its draft. Waits for the step; raises
        what it failed with."""
        ...


class StepRunner(Protocol):
    """What runs steps, as an engine sees it: ModelRunner, or one that only says what steps would take."""

    @property
    def kernel_fallbacks(self) -> Mapping[str, int]: ...
    @property
    def kv_block_bytes(self) -> int: ...
    @property
    def workspace_nbytes(self) -> int: ...
    @property
    def graphs(self) -> DecodeGraphs | None: ...
    @property
    def merger(self) -> DominantMerger | None: ...
    def threads(self) -> AbstractContextManager[None]: ...
    def check_ranks(self) -> None: ...
    def launch(self, plan: SchedulePlan) -> LaunchedStep: ...
    def recover(self) -> None: ...
    def move_kv_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None: ...
    def measure_operators(self, is_on: bool) -> None: ...
    def measure_kernels(self, dtype_name: str) -> tuple[KernelSpeedup, ...]: ...
    def cpu_use(self) -> CpuUse: ...
    def close(self) -> None: ...


class EngineCore:
    """One model with its memory, its queue and its adapters. Any thread may call verbs of `adapters`, and nothing else.

    `is_stalled` says that the last step had nothing to run although requests wait (for an adapter's load, say).
    """

    def __init__(
        self,
        info: EngineInfo,
        scheduler: Scheduler,
        runner: StepRunner,
        blocks: KVBlockAllocator,
        adapters: LoRAModelManager | None,
        max_waiting_requests: int,
        profiler: Profiler,
        events: EventLog,
        caretaker: Caretaker,
        look_ahead: bool = False,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.info = info
        self.grammars = grammars
        self.is_stalled = False
        self._scheduler = scheduler
        self._runner = runner
        self._blocks = blocks
        self._adapters = adapters
        self._max_waiting_requests = max_waiting_requests
        self._num_steps = 0
        self._checked_prompt: tuple[Sequence[int], int | None] = (), None
        self._profiler = profiler
        self._events = events
        self._caretaker = caretaker
        self._flights = StepsInFlight(scheduler, runner, adapters, caretaker, profiler, look_ahead)

    def step(self) -> list[TokenOutput]:
        """Run one step; returns what it added to requests. With async scheduling: what the one before it added."""
        with self._runner.threads():
            return self._step()

    def _step(self) -> list[TokenOutput]:
        had_flights = len(self._flights) > 0
        outputs = self._flights.commit_all() if had_flights and self._is_commit_due() else []
        with self._profiler.part("schedule"):
            outputs += [] if self._flights else self._caretaker.before_step()
            plan = self._schedule()
        self.is_stalled = not plan.sequences and not had_flights
        self._num_steps += bool(plan.sequences)
        return [*outputs, *plan.failed, *self._flights.advance(plan)]

    def settle(self) -> list[TokenOutput]:
        """Wait for the step in flight, if there is one; returns what it added."""
        return self._flights.commit_all()

    def _is_commit_due(self) -> bool:
        """Whether the step in flight has to be committed before the next is scheduled: for care, or the scheduler."""
        try:
            is_quiet_wanted = self._caretaker.is_due or self._blocks.num_chunks_owed > 0
            return is_quiet_wanted or not self._scheduler.has_unfinished or self._scheduler.needs_commit()
        except MemoryError:
            return True

    def _schedule(self) -> SchedulePlan:
        """An empty plan when there was no memory for it: what was admitted until then runs in the next step."""
        if self._flights.recorder is not None:
            self._flights.recorder.begin(self._profiler.seconds)
        self._runner.check_ranks()
        try:
            if self._adapters is not None:
                self._adapters.poll()
            if self.grammars is not None:
                self.grammars.turns.poll()
            if self._blocks.num_chunks_owed and not self._flights:
                self.vacate_kv(min(MAX_VACATED_CHUNKS, self._blocks.num_chunks_owed))
            return self._scheduler.schedule()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._caretaker.monitor.alarm(f"a step could not be scheduled for lack of memory: {error}")
            return SchedulePlan(-1, ())

    def vacate_kv(self, num_chunks: int) -> int:
        """Move KV blocks together while no step is in flight, until that many chunks went back to the arena; returns
        how many did."""
        assert not self._flights, "a step in flight reads the blocks"
        return self._blocks.vacate(num_chunks, self._runner.move_kv_blocks)

    # --------------------------------------------------------------------------------------------------------- requests

    def add_request(self, request: Request) -> list[TokenOutput]:
        """Queue a request. What cannot even wait is answered at once.

        Raises InvalidRequestError for one that no front would send: kernels read what it says without another look.
        """
        long_contexts = self.info.long_contexts
        request.check(self.info.max_model_len, 0 if long_contexts is None else long_contexts.longest)
        if request.adapter_id is not None and self._adapters is None:
            raise LoraDisabledError("LoRA is off in this engine")
        vocab_size = self._vocab_size_of(None if request.mix else request.adapter_id)  # no adapter of a mix has its own
        checked = request.prompt_token_ids, vocab_size
        is_known = checked[0] is self._checked_prompt[0] and vocab_size == self._checked_prompt[1]
        if not is_known or request.output_token_ids:
            request.check_prompt(vocab_size or MAX_VOCABULARY)
            self._checked_prompt = checked
        if self._scheduler.has(request.request_id):
            raise InvalidRequestError(f"request {request.request_id[:40]!r} is known already")
        if not self._has_room(request.claim.tenant):
            error = EngineOverloadedError(f"{self._scheduler.num_waiting} requests wait already; try again later")
            return [TokenOutput(request.request_id, finish_reason=FinishReason.ERROR, error=error.to_payload())]
        for refusal in filter(None, map(self._caretaker.refusal, request.adapter_ids)):
            return [TokenOutput(request.request_id, finish_reason=FinishReason.ERROR, error=refusal.to_payload())]
        self._caretaker.arrived(request)
        self._scheduler.add(request, is_prompt_checked=vocab_size is not None, grammar=self._grammar_of(request))
        return []

    def _has_room(self, tenant: str) -> bool:
        """For one more waiting request."""
        limit, total = self._max_waiting_requests, self._scheduler.num_waiting + 1
        if total <= limit:
            return True
        shares = self._scheduler.shares()
        own = next((each.num_requests - each.num_running for each in shares if each.name == tenant), 0)
        return has_room(limit, total, tenant, own + 1)

    def _grammar_of(self, request: Request) -> GrammarState | None:
        wanted = request.sampling_params.structured_outputs
        if wanted is None:
            return None
        if self.grammars is None:
            raise InvalidRequestError("this engine compiles no grammars", param="structured_outputs")
        client = request.claim.tenant or request.cache_salt  # clients choose a part of the salt
        return self.grammars.start(wanted, request.eos_token_ids, request.output_token_ids, client)

    def _vocab_size_of(self, adapter_id: int | None) -> int | None:
        """None: the adapter is to be loaded first."""
        if adapter_id is None or self._adapters is None:
            return self.info.vocab_size
        return self._adapters.vocab_size(adapter_id)

    def abort(self, request_ids: Iterable[str]) -> list[TokenOutput]:
        """End requests; unknown ids are passed over."""
        return [output for output in map(self._scheduler.abort, request_ids) if output is not None]

    def withdraw(self, request_ids: Iterable[str]) -> dict[str, int | None]:
        """Forget requests, which go on in another engine; of each its `Request.num_cached_tokens` there.

        Unknown ids are passed over. What a step in flight draws for them is dropped.
        """
        return {each: self._scheduler.withdraw(each) for each in request_ids if self._scheduler.has(each)}

    def abort_adapter(self, adapter_id: int) -> list[TokenOutput]:
        return self._scheduler.abort_adapter(adapter_id)

    @property
    def is_in_care(self) -> bool:
        """Whether something is being restored, so that `step` should be called soon although no request waits."""
        return self._caretaker.is_at_work

    def wait_for_change(self, timeout_s: float) -> None:
        """While `is_stalled`: until a load or a grammar that requests wait for has come on, at most so long."""
        if self.grammars is not None and self.grammars.turns.is_busy:
            self.grammars.turns.wait(timeout_s)
        elif self._adapters is not None:
            self._adapters.wait_for_change(timeout_s)

    @property
    def has_unfinished(self) -> bool:
        """Whether there is something left to step for."""
        return self._scheduler.has_unfinished or len(self._flights) > 0

    # --------------------------------------------------------------------------------------------------------- adapters

    @property
    def adapters(self) -> LoRAModelManager:
        """The adapters' memory. Raises LoraDisabledError in an engine without LoRA."""
        if self._adapters is None:
            raise LoraDisabledError("LoRA is off in this engine")
        return self._adapters

    # ----------------------------------------------------------------------------------------------------- see and end

    def stats(self) -> EngineStats:
        scheduler, blocks, graphs = self._scheduler, self._blocks, self._runner.graphs
        memory = self.memory_report()
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            waiting_by_cause=scheduler.waiting_by_cause(),
            num_prefix_queried_tokens=blocks.num_queried_tokens,
            num_prefix_hit_tokens=blocks.num_hit_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_pauses=scheduler.num_pauses,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_generated_tokens=scheduler.num_generated_tokens,
            num_drafts=scheduler.speculation.num_drafts,
            num_draft_tokens=scheduler.speculation.num_draft_tokens,
            num_accepted_tokens=scheduler.speculation.num_accepted_tokens,
            num_finished=dict(scheduler.num_finished),
            num_admitted=dict(scheduler.num_admitted),
            target_outcomes=dict(scheduler.levels.outcomes),
            running_adapter_ids=tuple(sorted(scheduler.adapters_of(RequestStatus.RUNNING))),
            waiting_adapter_ids=tuple(sorted(scheduler.adapters_of(RequestStatus.WAITING))),
            kernel_fallbacks=self._runner.kernel_fallbacks,
            step_times=self._step_times(),
            graph_steps={} if graphs is None else graphs.graph_steps,
            eager_steps={} if graphs is None else graphs.eager_steps,
            cpu=self._runner.cpu_use(),
            adapters_found=memory.found,
            max_lora=0 if self._adapters is None else self._adapters.table.capacity,
            memory=memory,
        )

    @property
    def graphs(self) -> DecodeGraphs | None:
        """Captured decode steps; None where every step runs kernel by kernel."""
        return self._runner.graphs

    def take_events(self) -> tuple[EngineEvent, ...]:
        """What happened since the last call, oldest first."""
        return self._events.take()

    def memory_report(self) -> MemoryReport:
        """The memory of adapters and KV cache as it is now."""
        report, monitor = MemoryReport() if self._adapters is None else self._adapters.report(), self._caretaker.monitor
        if self._runner.merger is not None:
            report = self._runner.merger.report(report)
        return replace(
            report,
            mode=monitor.mode,
            history=tuple(monitor.history),
            workspace_bytes=self._runner.workspace_nbytes,
            counters={**report.counters, "mode_changes": monitor.num_mode_changes},
            kv_block_bytes=self._runner.kv_block_bytes,
            num_kv_blocks=self._blocks.num_blocks,
            num_free_kv_blocks=self._blocks.num_free_blocks,
        )

    def watch_steps(self, watch: Callable[[SchedulePlan], None] | None) -> None:
        """Have `watch` called with the plan of each step before it is launched; None: no more."""
        self._flights.watch = watch

    def start_profile(self) -> None:
        """Record steps from now on; the kernels one by one where the backend can tell. Earlier records are dropped."""
        self._runner.measure_operators(True)
        self._flights.recorder = StepRecorder()
        self._flights.recorder.begin(self._profiler.seconds)

    def stop_profile(self) -> StepProfile:
        """What was recorded; nothing when no profile was started."""
        recorder, self._flights.recorder = self._flights.recorder, None
        if recorder is None:
            return StepProfile()
        self._runner.measure_operators(False)
        return recorder.profile()

    def measure_kernels(self) -> tuple[KernelSpeedup, ...]:
        """Each kernel of the backend beside stock torch on this model's shapes, in about half a second. Only while no
        step is in flight."""
        assert not self._flights, "kernels share memory with a step in flight"
        return self._runner.measure_kernels(self.info.dtype)

    def _step_times(self) -> StepTimes:
        seconds = self._profiler.seconds
        return StepTimes(self._num_steps, {part: seconds.get(part, 0.0) for part in STEP_PARTS})

    def check_integrity(self) -> None:
        """Assert that queues, KV blocks and adapter memory are consistent; when idle, that all references are back."""
        self._scheduler.check_integrity()
        self._blocks.check_integrity()
        if self._adapters is not None:
            self._adapters.check_integrity()
        if not self.has_unfinished:
            assert self._blocks.num_free_blocks == self._blocks.num_blocks, "KV blocks did not return"
            running = [r.adapter_id for r in self._adapters.list_adapters() if r.num_running] if self._adapters else []
            assert not running, f"adapters {running} are referenced by no request"

    def close(self) -> None:
        self._flights.drain()
        self._runner.close()
        if self.grammars is not None:
            self.grammars.close()
        if self._adapters is not None:
            self._adapters.close()


@dataclass(slots=True)
class _Flight:
    """A plan that is not committed, and what its launch gave."""

    plan: SchedulePlan
    launched: LaunchedStep | Exception

    def result(self) -> Mapping[str, SampledToken]:
        if isinstance(self.launched, Exception):
            raise self.launched
        return self.launched.result()


class StepsInFlight:
    """Steps between launch and commit: one, or with async scheduling one while the next is scheduled and launched.

        step k     schedule k, launch k, then wait for k - 1 and commit it:
                   the device runs k while the host ends k - 1 and schedules k + 1

    Commits are in the order of launches. A launch that fails says so at its commit, after those of the steps before it.
    `adapters` is None in an engine without LoRA; `recorder` is there while a profile runs; `watch` is told each plan.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
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
        self.watch: Callable[[SchedulePlan], None] | None = None

    def __len__(self) -> int:
        return len(self._flights)

    def advance(self, plan: SchedulePlan) -> list[TokenOutput]:
        """Launch a plan, if it is not empty, and commit the steps before it; it too, unless it may run on while the
        next is scheduled.

        Returns what was committed. Raises DeviceLostError.
        """
        num_left = 0
        if plan.sequences:
            flight = self._launch(plan)
            num_left = int(self._look_ahead and not isinstance(flight.launched, Exception))
        outputs: list[TokenOutput] = []
        while len(self._flights) > num_left:
            outputs += self._commit_oldest()
        if not self._scheduler.has_unfinished:  # no request waits for what is left: its memory returns now
            outputs += self.commit_all()
        return outputs

    def commit_all(self) -> list[TokenOutput]:
        """Wait for the steps in flight and commit them. Raises DeviceLostError."""
        outputs: list[TokenOutput] = []
        while self._flights:
            outputs += self._commit_oldest()
        return outputs

    def drain(self) -> None:
        """Wait until the device reads no memory any more; what it computed is dropped. The next step begins clean."""
        with suppress(Exception):
            self._runner.recover()

    def _launch(self, plan: SchedulePlan) -> _Flight:
        if self._adapters is not None:
            self._adapters.step_launched(plan.step_id)
        if self.watch is not None:
            self.watch(plan)
        flight = _Flight(plan, self._try_launch(plan))
        self._flights.append(flight)
        return flight

    def _try_launch(self, plan: SchedulePlan) -> LaunchedStep | Exception:
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
        """Once more in low-memory mode when memory ran out: a failed step has changed only KV that it writes again.

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
        if isinstance(error, DeviceLostError):
            raise error
        if is_device_lost(error):
            raise DeviceLostError(f"the device does not answer any more: {error}") from error
        request_ids = [sequence.state.request.request_id for sequence in plan.sequences]
        text, shown = "a step failed; its %d requests end", ", ".join(request_ids[:MAX_LOGGED_REQUESTS])
        logger.error(text, len(request_ids), exc_info=error, extra={"request_id": shown})
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
            num_drawn = Counter(each.request_id for each in outputs if each.token_ids)
            rows = [
                StepRow(request.adapter_ids, each.num_tokens - len(each.draft), num_drawn[request.request_id])
                for each in wanted.sequences
                for request in (each.state.request,)
            ]
            self.recorder.end(rows, self._profiler.seconds, STEP_PARTS)
        self._caretaker.after_step(wanted, tokens)
        return outputs
