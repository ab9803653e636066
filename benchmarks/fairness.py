"""Shares of tenants on the real engine: the suites of the virtual token counters' paper (Sheng et al., OSDI 2024).

    python -m benchmarks.fairness --json results/fairness.json
    python -m benchmarks.fairness --quick

The demo's model on the CPU, one thread, 8 in a batch, 256 tokens a step, each client through an adapter of its own.
Service is counted from the plans of the steps: 1 for a prompt's token that was computed, 2 for one that was drawn. The
clock is the process's CPU time, so that neighbours on the machine count little. Each suite also runs as one tenant,
which is first come, first served.

two     two clients that always wait, one of which sends three times as much: the largest difference of their services
        in any interval, beside the bound.
onoff   one client always waits, the other in every second period: its share of the service while it is there.
light   one request at a time, of 48 and of 160 tokens, beside a client with 64 waiting: CPU ms and steps to the first
        token, over those alone.
cost    the same 300 requests of one client and of 30, through adapters by chance and through each client's own: tokens
        a CPU second, over first come, first served, both in turns. The latter has fewer adapters in a batch where one
        client sends most.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from benchmarks.arguments import positive
from benchmarks.report import wide_console
from loraplex.config import EngineConfig, LoRAConfig
from loraplex.core import SamplingParams, TokenOutput
from loraplex.demo.tasks import TASKS, adapter_path, assets_path
from loraplex.engine.build import build_engine
from loraplex.engine.schedule_plan import SchedulePlan
from loraplex.engine.waiting.shares import OUTPUT_COST, PROMPT_COST
from loraplex.frontend.frontend import adapter_ref, make_front
from loraplex.frontend.store import store_of
from loraplex.sampling_params import Claim

SEATS, TOKENS = 8, 256
MAX_PROMPT, MAX_OUTPUT, LIGHT_PROMPT = 48, 24, 160
BOUND = 2 * max(PROMPT_COST * MAX_PROMPT, OUTPUT_COST * SEATS * (MAX_PROMPT + MAX_OUTPUT))
"""Of two tenants of weight 1: twice the larger of a prompt and of the tokens that running requests may come to have."""

TURN = 5

ADAPTERS = tuple(task.name for task in TASKS)
FIRST_COME = "one for all"


@dataclass(frozen=True, slots=True)
class First:
    """A request's way to its first token."""

    steps: int
    cpu_ms: float


class Clients:
    """An engine, stepped by hand, and what each client of it was served; is_shared: they are tenants.

    service: in weighted tokens, by client. firsts: of requests by name.
    """

    def __init__(self, *, is_shared: bool, seed: int = 0) -> None:
        config = EngineConfig(
            model=str(assets_path() / "base"),
            lora=LoRAConfig(),
            num_threads=1,
            max_num_seqs=SEATS,
            max_num_batched_tokens=TOKENS,
            enable_prefix_caching=False,
        )
        self.engine = build_engine(config)
        store = store_of(self.engine, self._see)
        self._front = make_front(config, self.engine.info, store, lambda job: job(), served_model_name="base")
        assert self._front.registry is not None
        for name in ADAPTERS:
            self._front.registry.load(name, str(adapter_path(name)))
        self._is_shared = is_shared
        self._random = random.Random(seed)
        self._client_of: dict[str, str] = {}
        self._began: dict[str, tuple[int, float]] = {}
        self.num_steps = 0
        self.num_tokens = 0
        self._begun: set[str] = set()
        self.waiting: Counter[str] = Counter()
        self.service: defaultdict[str, float] = defaultdict(float)
        self.firsts: dict[str, First] = {}
        self.engine.watch_steps(self._watch)

    def close(self) -> None:
        self.engine.close()

    def add(self, client: str, num_prompt: int, num_output: int, adapter: str | None = None) -> str:
        """adapter: None: the client's own."""
        adapter = adapter or ADAPTERS[sum(client.encode()) % len(ADAPTERS)]
        prompt = [self._random.randint(3, 30) for _ in range(num_prompt)]
        prepared = self._front.inputs.prepare(
            f"{client}-{len(self._client_of)}",
            prompt,
            SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True, detokenize=False),
            adapter=adapter_ref(self._front.acquire(adapter), adapter),
            claim=Claim(client if self._is_shared else FIRST_COME),
        )
        (request,) = prepared.children
        name = request.request_id
        self._client_of[name] = client
        self._began[name] = self.num_steps, time.process_time()
        self.waiting[client] += 1
        if self.engine.add_request(request):
            raise SystemExit(f"the engine refused request {name}")
        return name

    def add_any(self, client: str, adapter: str | None = None) -> str:
        return self.add(client, self._random.randint(8, MAX_PROMPT), self._random.randint(4, MAX_OUTPUT), adapter)

    def keep_waiting(self, client: str, num_waiting: int) -> None:
        for _ in range(num_waiting - self.waiting[client]):
            self.add_any(client)

    def step(self) -> None:
        self.num_steps += 1
        self._see(self.engine.step())
        self._see(self.engine.settle())

    def run(self) -> None:
        while self.engine.has_unfinished:
            self.step()

    def _watch(self, plan: SchedulePlan) -> None:
        for each in plan.sequences:
            name = each.state.request.request_id
            client = self._client_of[name]
            num_prompt = max(0, min(each.end, each.state.num_prompt_tokens) - each.start)
            self.service[client] += PROMPT_COST * num_prompt + OUTPUT_COST * each.is_sampled
            self.num_tokens += num_prompt + each.is_sampled
            if name not in self._begun:
                self._begun.add(name)
                self.waiting[client] -= 1

    def _see(self, outputs: Iterable[TokenOutput]) -> None:
        for output in outputs:
            name = output.request_id
            if output.error is not None:
                raise SystemExit(f"request {name} failed: {output.error}")
            if name not in self.firsts:
                began_step, began_s = self._began[name]
                self.firsts[name] = First(self.num_steps - began_step, 1000 * (time.process_time() - began_s))


def two_clients(num_steps: int, *, is_shared: bool) -> float:
    """The largest change of the difference of their services, in any interval, after both wait."""
    clients, differences = Clients(is_shared=is_shared), []
    try:
        for _ in range(num_steps):
            while min(clients.waiting["much"], clients.waiting["little"]) < 4:
                for client in ("much", "much", "much", "little"):
                    clients.add_any(client)
            clients.step()
            differences.append(clients.service["much"] - clients.service["little"])
    finally:
        clients.close()
    return max(differences) - min(differences)


def on_and_off(num_steps: int, *, is_shared: bool) -> tuple[float, float, float]:
    """Least and largest share of the service that the second client gets in its periods; what it lacks of half of it,
    in weighted tokens, in the worst of them."""
    clients, shares, lacks = Clients(is_shared=is_shared), [], []
    try:
        for period in range(6):
            before = dict(clients.service)
            for _ in range(num_steps // 6):
                clients.keep_waiting("steady", 24)
                clients.keep_waiting("bursts", 6 if period % 2 else 0)
                clients.step()
            steady, bursts = (clients.service[name] - before.get(name, 0.0) for name in ("steady", "bursts"))
            if period % 2:
                shares.append(bursts / (steady + bursts))
                lacks.append((steady - bursts) / 2)
    finally:
        clients.close()
    return min(shares), max(shares), max(lacks)


def light(num_requests: int, num_prompt: int, num_flood: int, *, is_shared: bool) -> Sequence[First]:
    """Of the first tokens of one request at a time, in a settled flood."""
    clients = Clients(is_shared=is_shared)
    try:
        for _ in range(30 if num_flood else 0):
            clients.keep_waiting("flood", num_flood)
            clients.step()
        for _ in range(num_requests):
            name = clients.add("light", num_prompt, 4)
            for _ in range(10_000):
                if name in clients.firsts:
                    break
                clients.keep_waiting("flood", num_flood)
                clients.step()
            for _ in range(12 if num_flood else 6):
                clients.keep_waiting("flood", num_flood)
                clients.step()
    finally:
        clients.close()
    return [first for name, first in clients.firsts.items() if name.startswith("light")]


@dataclass(frozen=True, slots=True)
class Cost:
    num_steps: int
    tokens_per_cpu_s: float


def costs(num_requests: int, *, is_own: bool) -> tuple[Cost, Cost]:
    """Of the same requests from 30 tenants, one of which sends most, and from one. is_own: each through its adapter.

    The two engines take turns of TURN steps: the machine's speed changes more in a run than they differ.
    """
    both = [Clients(is_shared=is_shared, seed=7) for is_shared in (True, False)]
    seconds = [0.0, 0.0]
    try:
        for index in range(num_requests):
            adapter = None if is_own else ADAPTERS[index * 5 % 7]
            for clients in both:
                clients.add_any("large" if index % 10 else f"t{index % 30}", adapter)
        while any(clients.engine.has_unfinished for clients in both):
            for which, clients in enumerate(both):
                began_s = time.process_time()
                for _ in range(TURN):
                    if clients.engine.has_unfinished:
                        clients.step()
                seconds[which] += time.process_time() - began_s
    finally:
        for clients in both:
            clients.close()
    by_tenant, first_come = (
        Cost(clients.num_steps, clients.num_tokens / took_s) for clients, took_s in zip(both, seconds, strict=True)
    )
    return by_tenant, first_come


@dataclass(frozen=True, slots=True)
class Row:
    suite: str
    what: str
    shared: float
    first_come: float
    limit: str


def p99(values: Iterable[float]) -> float:
    return float(np.percentile(list(values), 99))


def measure(*, is_quick: bool, num_runs: int) -> list[Row]:
    steps, requests = (200, 12) if is_quick else (1200, 100)
    apart = [two_clients(steps, is_shared=is_shared) / BOUND for is_shared in (True, False)]
    rows = [Row("two", "largest difference, of the bound", apart[0], apart[1], "1")]
    ours, theirs = (on_and_off(steps, is_shared=is_shared) for is_shared in (True, False))
    rows.append(Row("onoff", "least share while there", ours[0], theirs[0], "0.5 less bound"))
    rows.append(Row("onoff", "largest share while there", ours[1], theirs[1], "0.5 and bound"))
    for num_prompt, limits in ((MAX_PROMPT, ("a step more", "1.5")), (LIGHT_PROMPT, ("1.5", "1.5"))):
        alone = light(requests, num_prompt, 0, is_shared=True)
        flooded = [light(requests, num_prompt, 64, is_shared=is_shared) for is_shared in (True, False)]
        for name, limit in zip(("steps", "cpu_ms"), limits, strict=True):
            least = p99(getattr(each, name) for each in alone)
            ratios = [p99(getattr(each, name) for each in firsts) / least for firsts in flooded]
            what = f"{num_prompt} tokens: P99 to first token, {name}, over alone"
            rows.append(Row("light", what, ratios[0], ratios[1], limit))
    for is_own in (False, True):
        found = [costs(60 if is_quick else 300, is_own=is_own) for _ in range(num_runs)]
        rate = statistics.median(ours.tokens_per_cpu_s / theirs.tokens_per_cpu_s for ours, theirs in found)
        num_steps = statistics.median(ours.num_steps / theirs.num_steps for ours, theirs in found)
        whose = "own adapters" if is_own else "any adapter"
        what = f"{whose}: tokens a CPU second, over first come"
        rows.append(Row("cost", what, rate, 1.0, "-" if is_own else "0.97"))
        rows.append(Row("cost", f"{whose}: steps, over first come", num_steps, 1.0, "1.03"))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a sixth of the steps")
    parser.add_argument("--runs", type=positive, default=3, help="of `cost`; the median counts (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args(arguments)
    rows = measure(is_quick=args.quick, num_runs=args.runs)
    show(rows)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        found: Mapping[str, object] = {"bound": BOUND, "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def show(rows: Sequence[Row]) -> None:
    table = Table("suite", "figure", "by tenant", "first come", "limit", title="Shares of tenants, demo model, CPU")
    for row in rows:
        table.add_row(row.suite, row.what, f"{row.shared:.2f}", f"{row.first_come:.2f}", row.limit)
    wide_console().print(table)


if __name__ == "__main__":
    raise SystemExit(main())
