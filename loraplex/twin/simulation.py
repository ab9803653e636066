"""Engines behind one front, event by event: arrivals, ends of steps, ends of loads.

    arrival      routing.place over snapshots -> a runner's inbox; a runner that rests begins a step
    end of step  its tokens reach the front; what is in the inbox joins the queue; the next step begins
    stall        nothing can run: the runner rests until a load is done or a request comes

A step begins with what has arrived by then, as in an engine's process: what comes while it runs waits for the next.
Tokens count as seen when the front has them, behind the step: time on the network and in the server is not in the
figures.
"""

from __future__ import annotations

import heapq
import itertools
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from loraplex.core import FinishReason, TokenOutput
from loraplex.engine.schedule_plan import SchedulePlan
from loraplex.errors import ConfigError, LoraplexError
from loraplex.events import EventKind
from loraplex.routing import POLICIES, KnownMemory, Needs, Snapshot, place, prefix_digests
from loraplex.twin.calibration import Calibration
from loraplex.twin.engine import VOCAB_SIZE, TwinEngine, request_of, spec_of
from loraplex.twin.results import SimulationResult, Spread
from loraplex.twin.settings import TwinSettings
from loraplex.twin.workload import Arrival, Arrivals, Workload

STALL_S = 0.05
"""An engine that has nothing to run looks again so soon."""

MAX_STALLS = 20_000
"""In a row: a simulated engine that is stuck so long is a fault of the twin's."""

BLOCK_TOKENS, MAX_BLOCKS, TOKEN_BYTES = 64, 64, 4
"""Of a prompt's digests: what one stands for, as the front of several runners has them."""

FIRST_TOKEN_ID = 3
OF_MEMORY = {EventKind.LOAD, EventKind.EVICT, EventKind.DROP}

Tell = Callable[[int, int], None]


@dataclass(slots=True)
class _Flight:
    """A request on its way. needs: what it was placed by."""

    arrival: Arrival
    runner: _Runner
    needs: Needs
    num_tokens: int = 0
    last_s: float = 0.0


@dataclass(slots=True)
class _Figures:
    """What is measured."""

    first_token_s: array[float] = field(default_factory=lambda: array("d"))
    inter_token_s: array[float] = field(default_factory=lambda: array("d"))
    end_to_end_s: array[float] = field(default_factory=lambda: array("d"))
    waiting_s: array[float] = field(default_factory=lambda: array("d"))
    num_tokens: int = 0
    num_failed: int = 0
    ended_s: float = 0.0
    most_kv_blocks: int = 0


class _Runner:
    """An engine as the front sees it; only requests of this front are there."""

    def __init__(self, name: str, engine: TwinEngine, max_num_seqs: int, block_size: int) -> None:
        self.name = name
        self.engine = engine
        self.memory = KnownMemory()
        self.inbox: deque[tuple[str, _Flight]] = deque()
        self.is_busy = False
        self.num_stalls = 0
        self.num_requests = 0
        self.num_tokens = 0
        self.ranks = 0
        self._max_num_seqs = max_num_seqs
        self._block_size = block_size

    def snapshot(self, now_s: float) -> Snapshot:
        num_used = -(-self.num_tokens // self._block_size)
        return Snapshot(
            name=self.name,
            seen_s=now_s,
            num_waiting=max(0, self.num_requests - self._max_num_seqs),
            num_running=min(self.num_requests, self._max_num_seqs),
            max_requests=self._max_num_seqs,
            num_free_kv_blocks=max(0, self.engine.num_kv_blocks - num_used),
            kv_block_tokens=self._block_size,
            tiers=self.memory.tiers,
            prefix_digests=self.memory.prefixes.keys(),
            ranks=self.ranks,
        )

    def hear(self) -> None:
        """What its memory tells, as a front hears it."""
        for event in self.engine.core.take_events():
            if event.kind in OF_MEMORY and event.adapter_id is not None:
                self.memory.learn_event(event.kind.value, str(event.adapter_id), event.details.get("tier"))


class Simulation:
    """One run. watch: told the plan of every step, by the runner's number."""

    def __init__(
        self,
        calibration: Calibration,
        settings: TwinSettings,
        workload: Workload,
        watch: Callable[[int, SchedulePlan], None] | None = None,
    ) -> None:
        self._watch = watch
        self._block_bytes = calibration.block_bytes
        self._notes = calibration.notes_on(workload.ranks)
        self._front = calibration.front
        self._arrivals: Arrivals = workload.arrivals()
        self._check_lengths(calibration.max_model_len)
        self._shared = workload.shared_prefix_tokens
        self._policy = POLICIES[settings.placement]
        num_adapters = max(workload.adapters if workload.trace is None else 0, self._arrivals.num_adapters)
        self._rank_of = {number + 1: workload.rank_of(number) for number in range(num_adapters)}
        self._runners = []
        for number in range(settings.runners):
            engine = TwinEngine.build(calibration, settings, self._rank_of, workload.seed + number)
            engine.core.watch_steps(partial(self._see, number, engine))
            self._runners.append(_Runner(str(number), engine, settings.max_num_seqs, calibration.block_size))
        self._begin_s = self._register(calibration, settings.start == "loaded")
        self._flights: dict[str, _Flight] = {}
        self._events: list[tuple[float, int, _Runner, list[TokenOutput]]] = []
        self._order = itertools.count()
        self._figures = _Figures()
        self._before = [runner.engine.core.memory_report() for runner in self._runners]

    def _register(self, calibration: Calibration, is_loaded: bool) -> float:
        """When all adapters are known everywhere: the simulated time begins there."""
        for runner in self._runners:
            for adapter_id, rank in self._rank_of.items():
                runner.engine.register(spec_of(adapter_id, rank, calibration.nbytes_of(rank)), is_loaded)
            runner.hear()
        begin_s = max(runner.engine.clock.now_s for runner in self._runners)
        for runner in self._runners:
            runner.engine.clock.reach(begin_s)
        return begin_s

    def _check_lengths(self, max_model_len: int) -> None:
        longest = int((self._arrivals.prompts + self._arrivals.outputs).max())
        if longest > max_model_len:
            raise ConfigError(
                f"a request has {longest} tokens with its answer, and the calibrated engine's longest is "
                f"{max_model_len}; calibrate with a higher --max-model-len"
            )

    def run(self, tell: Tell = lambda done, total: None) -> SimulationResult:
        """tell(done, total): requests that have come."""
        wall_s, total = time.perf_counter(), len(self._arrivals)
        for number, arrival in enumerate(self._arrivals):
            at_s = self._begin_s + arrival.at_s
            self._run_until(at_s)
            self._arrive(f"r{number}", number, arrival, at_s)
            if number % 64 == 0:
                tell(number, total)
        self._run_until(float("inf"))
        tell(total, total)
        return self._result(time.perf_counter() - wall_s)

    # ----------------------------------------------------------------------------------------------------------- events

    def _arrive(self, request_id: str, number: int, arrival: Arrival, at_s: float) -> None:
        prompt = self._prompt(number, arrival)
        needs = self._needs(prompt, arrival)
        runner = self._runners[0]
        if len(self._runners) > 1:
            name = place(needs, [each.snapshot(at_s) for each in self._runners], self._policy, at_s)
            assert name is not None, "every runner serves"
            runner = self._runners[int(name)]
        flight = self._flights[request_id] = _Flight(arrival, runner, needs)
        runner.num_requests += 1
        runner.ranks += needs.rank
        runner.num_tokens += arrival.num_prompt_tokens
        runner.inbox.append((request_id, flight))
        if not runner.is_busy:
            self._step(runner, at_s)

    def _prompt(self, number: int, arrival: Arrival) -> tuple[int, ...]:
        """The shared beginning, and then tokens of its own."""
        length = arrival.num_prompt_tokens
        first = FIRST_TOKEN_ID + (number * 7919) % (VOCAB_SIZE // 2)
        return (*range(FIRST_TOKEN_ID, FIRST_TOKEN_ID + self._shared), *range(first, first + length - self._shared))

    def _needs(self, prompt: tuple[int, ...], arrival: Arrival) -> Needs:
        adapter = None if arrival.adapter is None else str(arrival.adapter + 1)
        digests: tuple[bytes, ...] = ()
        if self._shared and len(self._runners) > 1:
            digests = prefix_digests(
                array("i", prompt).tobytes(), f" {adapter}", BLOCK_TOKENS * TOKEN_BYTES, MAX_BLOCKS
            )
        rank = 0 if arrival.adapter is None else self._rank_of[arrival.adapter + 1]
        return Needs(adapter=adapter, num_prompt_tokens=len(prompt), prefix_digests=digests, rank=rank)

    def _run_until(self, at_s: float) -> None:
        """All that happens before `at_s`."""
        while self._events and self._events[0][0] <= at_s:
            now_s, _, runner, outputs = heapq.heappop(self._events)
            runner.is_busy = False
            for output in outputs:
                self._take(output, now_s)
            if runner.engine.core.has_unfinished or runner.inbox:
                self._step(runner, now_s)

    def _step(self, runner: _Runner, at_s: float) -> None:
        engine = runner.engine
        engine.clock.reach(at_s)
        outputs: list[TokenOutput] = []
        while runner.inbox:
            request_id, flight = runner.inbox.popleft()
            engine.clock.now_s += 1e-3 * self._front.request_ms
            outputs += self._submit(request_id, flight, engine)
        outputs += engine.step()
        runner.hear()
        ends_s = engine.clock.now_s + self._front.after_step_s(len(outputs))
        runner.num_stalls = runner.num_stalls + 1 if engine.core.is_stalled else 0
        if runner.num_stalls > MAX_STALLS:
            raise LoraplexError(f"a simulated engine is stuck: {engine.scheduler.waiting_by_cause()} requests wait")
        if engine.core.is_stalled and engine.core.has_unfinished and not outputs:
            ends_s = min(engine.loader.next_s or float("inf"), at_s + STALL_S)
        runner.is_busy = True
        heapq.heappush(self._events, (max(at_s, ends_s), next(self._order), runner, outputs))

    def _submit(self, request_id: str, flight: _Flight, engine: TwinEngine) -> list[TokenOutput]:
        arrival = flight.arrival
        adapter_id = None if arrival.adapter is None else arrival.adapter + 1
        prompt = self._prompt(int(request_id[1:]), arrival)
        request = request_of(request_id, prompt, arrival.num_output_tokens, adapter_id, arrival.at_s)
        return engine.core.add_request(request)

    def _take(self, output: TokenOutput, now_s: float) -> None:
        flight, figures = self._flights[output.request_id], self._figures
        since_s = now_s - self._begin_s
        if output.token_ids:
            if flight.num_tokens == 0:
                figures.first_token_s.append(since_s - flight.arrival.at_s)
                flight.runner.memory.learn_served(flight.needs)
            else:
                figures.inter_token_s.append(since_s - flight.last_s)
            flight.num_tokens += 1
            flight.runner.num_tokens += 1
            flight.last_s = figures.ended_s = since_s
        if output.finish_reason is None:
            return
        del self._flights[output.request_id]
        flight.runner.num_requests -= 1
        flight.runner.ranks -= flight.needs.rank
        flight.runner.num_tokens -= flight.arrival.num_prompt_tokens + flight.num_tokens
        if output.finish_reason is FinishReason.ERROR:
            figures.num_failed += 1
        else:
            figures.num_tokens += flight.num_tokens
            figures.end_to_end_s.append(since_s - flight.arrival.at_s)

    def _see(self, number: int, engine: TwinEngine, plan: SchedulePlan) -> None:
        """A step is about to run: for some requests it is the first."""
        num_used = engine.num_kv_blocks - engine.blocks.num_free_blocks
        self._figures.most_kv_blocks = max(self._figures.most_kv_blocks, num_used)
        for sequence in plan.sequences:
            if sequence.state.num_steps_run == 1:
                waited_s = engine.clock.now_s - self._begin_s - sequence.state.request.arrival_s
                self._figures.waiting_s.append(waited_s)
        if self._watch is not None:
            self._watch(number, plan)

    # ---------------------------------------------------------------------------------------------------------- figures

    def _result(self, wall_s: float) -> SimulationResult:
        figures, engines = self._figures, [runner.engine for runner in self._runners]
        seconds = max(1e-9, figures.ended_s - float(self._arrivals.at_s[0]))
        counters, found = Counter[str](), Counter[str]()
        for engine, before in zip(engines, self._before, strict=True):
            now = engine.core.memory_report()
            counters.update(_since(now.counters, before.counters))
            found.update({tier: int(count) for tier, count in _since(now.found, before.found).items()})
        busy_s = [engine.runner.busy_s for engine in engines]
        num_ended = len(figures.end_to_end_s)
        return SimulationResult(
            detail="steps",
            num_requests=len(self._arrivals),
            num_failed=figures.num_failed,
            seconds=seconds,
            tokens_per_s=figures.num_tokens / seconds,
            requests_per_s=num_ended / seconds,
            first_token_s=Spread.of(figures.first_token_s),
            inter_token_s=Spread.of(figures.inter_token_s),
            end_to_end_s=Spread.of(figures.end_to_end_s),
            waiting_s=Spread.of(figures.waiting_s),
            hits=int(counters["hits"]),
            misses=int(counters["misses"]),
            found={tier: count for tier, count in found.items() if count},
            evictions={
                name.removeprefix("evictions_"): int(count)
                for name, count in counters.items()
                if name.startswith("evictions_") and count
            },
            loads=int(sum(count for name, count in counters.items() if name.startswith("loads_from_"))),
            preemptions=sum(engine.scheduler.num_preemptions for engine in engines),
            pauses=sum(engine.scheduler.num_pauses for engine in engines),
            kv_bytes=figures.most_kv_blocks * self._block_bytes,
            num_steps=sum(engine.runner.num_steps for engine in engines),
            utilization=tuple(min(1.0, each / seconds) for each in busy_s),
            max_load=max(busy_s) * len(busy_s) / max(1e-9, sum(busy_s)),
            wall_s=wall_s,
            notes=self._notes,
        )


def _since(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0) for name, value in now.items()}
