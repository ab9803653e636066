"""What the scheduler itself takes while a queue waits: a step, an arrival, an abort. No model runs.

    python -m benchmarks.scheduling --json results/scheduling.json
    python -m benchmarks.scheduling --sizes 200,8000 --tenants 1,100

Requests of 32 tokens get 16 each, through one of --adapters by chance, 64 in a batch. For each request that ends
another arrives, so the queue keeps its length. The KV blocks are the engine's own; the adapters' memory is a fake that
counts references. CPU time of the thread, in microseconds: the median and the 99th percentile of --steps steps, and of
as many arrivals and aborts of requests from anywhere in the queue. A step is needs_commit, schedule and commit.

seats   every adapter is there: a batch is full, and the queue waits for a seat.
room    a quarter of the adapters fit: requests that lack room let others pass, and adapters take turns.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich.table import Table

from benchmarks.arguments import positive
from benchmarks.report import wide_console
from loraplex.core import AcquireResult, MixPart, Request, SamplingParams, WaitsFor
from loraplex.engine.schedule_plan import SampledToken
from loraplex.engine.scheduler import Scheduler
from loraplex.kvcache.allocator import KVBlockAllocator
from loraplex.sampling_params import Claim

SEATS, PROMPT, OUTPUT, BLOCK = 64, 32, 16, 16
TOKEN = SampledToken(5)


class CountedAdapters:
    """core.ResidencyView of adapters that take a place each, of `room`."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._references: dict[int, int] = {}

    def try_acquire(self, adapter_id: int) -> AcquireResult:
        if adapter_id not in self._references and len(self._references) >= self._room:
            return AcquireResult(None, WaitsFor.ROOM)
        self._references[adapter_id] = self._references.get(adapter_id, 0) + 1
        return AcquireResult(adapter_id)

    def try_acquire_mix(self, mix: Sequence[MixPart]) -> AcquireResult:
        raise NotImplementedError("this benchmark asks for no mix")

    def release(self, adapter_id: int) -> None:
        self._references[adapter_id] -= 1
        if not self._references[adapter_id]:
            del self._references[adapter_id]

    def prefetch(self, adapter_id: int) -> None:
        """Every adapter is as near as it can be."""

    def victims_for(self, adapter_id: int, in_use: Sequence[int]) -> Sequence[int]:
        is_out = adapter_id not in self._references and len(self._references) >= self._room
        return in_use[:1] if is_out else ()

    def victims_for_mix(self, adapter_ids: Sequence[int], in_use: Sequence[int]) -> Sequence[int]:
        raise NotImplementedError("this benchmark asks for no mix")


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds: of each verb the median and the 99th percentile."""

    case: str
    num_waiting: int
    num_tenants: int
    step_us: tuple[float, float]
    arrival_us: tuple[float, float]
    abort_us: tuple[float, float]


class Queue:
    """A scheduler with `num_waiting` requests before it."""

    def __init__(self, room: int, num_waiting: int, num_adapters: int, num_tenants: int) -> None:
        self._random = random.Random(0)
        self._num_adapters = num_adapters
        self._num_tenants = num_tenants
        self._num_come = 0
        self.scheduler = Scheduler(
            KVBlockAllocator(SEATS * 16, BLOCK),
            CountedAdapters(room),
            max_num_seqs=SEATS,
            max_num_batched_tokens=512,
            max_model_len=PROMPT + OUTPUT + BLOCK,
        )
        self.request_ids: list[str] = []
        for _ in range(num_waiting + SEATS):
            self.arrive(self.next_request())

    def next_request(self) -> Request:
        adapter_id, tenant = self._random.randint(1, self._num_adapters), self._random.randrange(self._num_tenants)
        start, self._num_come = self._num_come * PROMPT, self._num_come + 1
        tokens = tuple(range(start, start + PROMPT))
        claim = Claim(f"t{tenant}")
        params = SamplingParams(max_tokens=OUTPUT)
        digest = f"d{adapter_id}"
        name = f"r{self._num_come}"
        return Request(name, tokens, params, OUTPUT, 0, adapter_id=adapter_id, adapter_digest=digest, claim=claim)

    def arrive(self, request: Request) -> None:
        self.scheduler.add(request)
        self.request_ids.append(request.request_id)

    def step(self) -> int:
        """Returns how many requests ended."""
        scheduler = self.scheduler
        scheduler.needs_commit()
        plan = scheduler.schedule()
        outputs = scheduler.commit(plan, {each.state.request.request_id: TOKEN for each in plan.sequences})
        return sum(output.finish_reason is not None for output in outputs)

    def any_request_id(self) -> str:
        """Of a request that has not ended, taken from the list."""
        while True:
            index = self._random.randrange(len(self.request_ids))
            self.request_ids[index], self.request_ids[-1] = self.request_ids[-1], self.request_ids[index]
            request_id = self.request_ids.pop()
            if self.scheduler.has(request_id):
                return request_id


def timed_us(samples: list[float], verb: Callable[[], object]) -> object:
    """Its result; appends the CPU time of this thread."""
    start_ns = time.thread_time_ns()
    result = verb()
    samples.append((time.thread_time_ns() - start_ns) / 1e3)
    return result


def summary(samples: Sequence[float]) -> tuple[float, float]:
    return round(float(np.median(samples)), 1), round(float(np.percentile(samples, 99)), 1)


def measure(case: str, num_waiting: int, num_tenants: int, num_adapters: int, num_steps: int) -> Row:
    queue = Queue(num_adapters if case == "seats" else num_adapters // 4, num_waiting, num_adapters, num_tenants)
    for _ in range(3 * OUTPUT):
        for _ in range(queue.step()):
            queue.arrive(queue.next_request())
    steps, arrivals, aborts = list[float](), list[float](), list[float]()
    for _ in range(num_steps):
        ended = timed_us(steps, queue.step)
        assert isinstance(ended, int)
        for _ in range(ended):
            queue.arrive(queue.next_request())
        request_id, request = queue.any_request_id(), queue.next_request()
        timed_us(aborts, partial(queue.scheduler.abort, request_id))
        timed_us(arrivals, partial(queue.arrive, request))
    return Row(case, num_waiting, num_tenants, summary(steps), summary(arrivals), summary(aborts))


def numbers(text: str) -> list[int]:
    """Whole numbers of at least 1, separated by commas."""
    return [positive(each) for each in text.split(",")]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=numbers, default=[200, 8_000, 100_000], help="requests that wait")
    parser.add_argument("--tenants", type=numbers, default=[1], help="tenants that they come from")
    parser.add_argument("--adapters", type=positive, default=256)
    parser.add_argument("--steps", type=positive, default=400)
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args(argv)
    table = Table("case", "waiting", "tenants", "step us", "P99", "arrival us", "P99", "abort us", "P99")
    rows = []
    for case in ("seats", "room"):
        for num_waiting in args.sizes:
            for num_tenants in args.tenants:
                row = measure(case, num_waiting, num_tenants, args.adapters, args.steps)
                rows.append(row)
                both = (*row.step_us, *row.arrival_us, *row.abort_us)
                table.add_row(case, f"{num_waiting:,}", str(num_tenants), *(f"{each:,.1f}" for each in both))
    wide_console().print(table)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
