"""Thousands of replicas without steps: placement and eviction are the real ones, a replica's time is a formula.

    placement   routing.place, over the replicas that can be its answer (below)
    eviction    the real policy of each replica, over adapters of known bytes; what runs does not leave
    a request   waits for a place in the batch, then for its adapter, then runs: prompt, and for each token a step of
                a batch as large as the replica's is when it begins

So residency, loads and balance are those of the policies, and waiting is an estimate. A front is taken to know at once
where adapters are. There is one tier, and what is not in it is loaded in `source.seconds`, beside the steps.

Which replicas can be the answer: `routing.order` of one that does not have the adapter depends on its load alone, and
to have it is never worse. Kept are all replicas in that order (a heap), and for each adapter those that have it;
`place` is asked about the holders and the first of all. It gives what it would of every replica; a test compares.
"""

from __future__ import annotations

import heapq
import itertools
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from loraplex.core import Tier
from loraplex.errors import ConfigError
from loraplex.memory.eviction.custom import policy_maker
from loraplex.memory.eviction.policies import EvictionPolicy
from loraplex.routing import POLICIES, Needs, Policy, Snapshot, order, place
from loraplex.twin.calibration import Calibration
from loraplex.twin.results import SimulationResult, Spread
from loraplex.twin.settings import FleetSettings, TwinSettings
from loraplex.twin.step_model import StepModel, StepWork
from loraplex.twin.workload import Arrivals, Workload

NOWHERE: Mapping[str, Tier] = MappingProxyType({})
ANY = Needs(adapter="?", num_prompt_tokens=1)
"""A request for an adapter that no replica has: the order of those that do not have one's own."""

Tell = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ReplicaSize:
    """Of each replica: bytes and number of adapters that fit, places of its batch, bytes of an adapter by its rank."""

    adapter_bytes: int
    max_adapters: int | None
    max_num_seqs: int
    nbytes_of: Mapping[int, int]

    @classmethod
    def of(cls, calibration: Calibration, settings: TwinSettings, workload: Workload) -> ReplicaSize:
        """Raises ConfigError where an adapter is larger than the memory for all."""
        nbytes_of = {rank: calibration.nbytes_of(rank) for rank in set(workload.ranks)}
        largest = max(nbytes_of.values())
        if largest > settings.adapter_memory_bytes:
            raise ConfigError(
                f"adapter_memory_bytes {settings.adapter_memory_bytes} hold no adapter of {largest} bytes; raise it"
            )
        return cls(settings.adapter_memory_bytes, settings.max_loras, settings.max_num_seqs, nbytes_of)


class Times:
    """What a request takes in a batch of so many rows, by the model of steps; each batch is worked out once."""

    def __init__(self, model: StepModel, rank: int, context: int) -> None:
        self._model = model
        self._rank = rank
        self._context = context
        self._of_batch: dict[int, float] = {}

    def step_s(self, num_rows: int) -> float:
        """A step of `num_rows` decodes, each through an adapter of its own."""
        known = self._of_batch.get(num_rows)
        if known is None:
            work = StepWork(num_rows, num_rows, num_rows * self._context, 0, ((self._rank, 1),) * num_rows)
            known = self._of_batch[num_rows] = 1e-3 * self._model.ms(work)
        return known

    def prompt_s(self, num_rows: int, num_tokens: int) -> float:
        """A step of a prompt beside `num_rows` decodes. Lengths are rounded to a sixteenth of their size."""
        grain = max(1, (1 << num_tokens.bit_length()) // 32)
        num_tokens = -(-num_tokens // grain) * grain
        key = -(num_rows * (1 << 24) + num_tokens) - 1
        known = self._of_batch.get(key)
        if known is None:
            kv = num_tokens * (num_tokens + 1) // 2
            adapters = ((self._rank, num_tokens), *((self._rank, 1),) * num_rows)
            work = StepWork(num_rows + num_tokens, num_rows + 1, num_rows * self._context, kv, adapters)
            known = self._of_batch[key] = 1e-3 * self._model.ms(work)
        return known


class Replica:
    """Its adapters, its batch and its queue. tiers: as a front knows them; running: requests by adapter."""

    def __init__(self, name: str, size: ReplicaSize, policy: EvictionPolicy) -> None:
        self.name = name
        self._size = size
        self.policy = policy
        self.tiers: dict[str, Tier] = {}
        self.nbytes: dict[str, int] = {}
        self.used_bytes = 0
        self.num_running = 0
        self.waiting: deque[int] = deque()
        self.running: dict[str, int] = {}
        self.busy_s = 0.0
        self.version = 0
        """Counts changes of the load: an entry of the heap with another one is out of date."""

    def snapshot(self, now_s: float, tiers: Mapping[str, Tier] | None = None) -> Snapshot:
        return Snapshot(
            name=self.name,
            seen_s=now_s,
            num_waiting=len(self.waiting),
            num_running=self.num_running,
            max_requests=self._size.max_num_seqs,
            tiers=self.tiers if tiers is None else tiers,
        )

    def bring(self, key: str, nbytes: int, reload_s: float) -> list[str] | None:
        """Load an adapter; what left for it. None: what runs has all the room."""
        victims: list[str] = []
        freed = 0
        most = self._size.max_adapters
        while self._is_over(nbytes - freed, 1 - len(victims), most):
            if not victims:
                candidates = (each for each in self.policy.order() if not self.running.get(each))
            victim = next(candidates, None)
            if victim is None:
                return None
            victims.append(victim)
            freed += self.nbytes[victim]
        for victim in victims:
            self.policy.evict(victim)
            self.used_bytes -= self.nbytes.pop(victim)
            del self.tiers[victim]
        self.policy.enter(key, nbytes, reload_s)
        self.nbytes[key] = nbytes
        self.used_bytes += nbytes
        self.tiers[key] = Tier.DEVICE
        return victims

    def _is_over(self, more_bytes: int, more: int, most: int | None) -> bool:
        is_full = most is not None and len(self.nbytes) + more > most
        return is_full or self.used_bytes + more_bytes > self._size.adapter_bytes


class Shortlist:
    """Which replicas `place` has to be asked about."""

    def __init__(self, replicas: list[Replica], policy: Policy) -> None:
        self._replicas = {each.name: each for each in replicas}
        self._policy = policy
        self.holders: dict[str, set[str]] = {}
        self._heap: list[tuple[tuple[object, ...], int, str]] = []
        for each in replicas:
            self.changed(each, 0.0)

    def changed(self, replica: Replica, now_s: float) -> None:
        """Its load is another one."""
        replica.version += 1
        key = order(ANY, replica.snapshot(now_s, NOWHERE), self._policy, now_s)
        heapq.heappush(self._heap, (key, replica.version, replica.name))

    def entered(self, replica: Replica, key: str) -> None:
        self.holders.setdefault(key, set()).add(replica.name)

    def left(self, replica: Replica, key: str) -> None:
        holders = self.holders[key]
        holders.remove(replica.name)
        if not holders:
            del self.holders[key]

    def candidates(self, key: str | None) -> Iterator[Replica]:
        """Those that have the adapter, and the first of all: where that one has it too, none without it is better."""
        for name in self.holders.get(key, ()) if key is not None else ():
            yield self._replicas[name]
        while self._heap[0][1] != self._replicas[self._heap[0][2]].version:
            heapq.heappop(self._heap)
        yield self._replicas[self._heap[0][2]]


class Fleet:
    """One run of many replicas."""

    def __init__(
        self,
        calibration: Calibration,
        workload: Workload,
        settings: TwinSettings,
        fleet: FleetSettings,
    ) -> None:
        """Raises ConfigError for a setting that replicas without steps do not have."""
        fleet.check_uses(settings)
        _check_workload(workload)
        size = ReplicaSize.of(calibration, settings, workload)
        self.arrivals: Arrivals = workload.arrivals()
        self._calibration, self._size, self._workload, self._settings = calibration, size, workload, fleet
        self._policy = POLICIES[settings.placement]
        self._now_s = 0.0
        new_policy = policy_maker(settings.eviction_policy)
        self.replicas = [
            Replica(f"{number:05d}", size, new_policy(lambda: self._now_s)) for number in range(fleet.replicas)
        ]
        self._by_name = {each.name: each for each in self.replicas}
        self.shortlist = Shortlist(self.replicas, self._policy)
        context = int(self.arrivals.prompts.mean() + self.arrivals.outputs.mean() / 2)
        self._times = Times(calibration.step_model(), int(np.mean(workload.ranks)), context)
        self._ends: list[tuple[float, int, Replica, int]] = []
        self._order = itertools.count()
        self._keys = [str(number) for number in range(max(workload.adapters, self.arrivals.num_adapters))]
        self._first_s, self._end_s, self._wait_s = array("d"), array("d"), array("d")
        self._hits = self._misses = self._loads = self._evictions = 0
        self._counted_from = int(fleet.warm_up * len(self.arrivals))
        if settings.start == "loaded":
            self._fill()

    def _fill(self) -> None:
        """Adapters in the order of their popularity, each to the replica that has the least of it, until all are full.

        So they lie after a long time of the same traffic; which of them stay is then the policy's."""
        shares = self._workload.popularity()
        loads = [(0.0, 0, number) for number in range(len(self.replicas))]
        for adapter, key in enumerate(self._keys):
            rank = self._workload.rank_of(adapter)
            nbytes = self._size.nbytes_of[rank]
            while loads:
                load, _, number = heapq.heappop(loads)
                replica = self.replicas[number]
                most = self._size.max_adapters
                is_full = most is not None and len(replica.nbytes) >= most
                if not is_full and replica.used_bytes + nbytes <= self._size.adapter_bytes:
                    replica.bring(key, nbytes, self._calibration.source.seconds(nbytes))
                    self.shortlist.entered(replica, key)
                    share = float(shares[adapter]) if adapter < len(shares) else 0.0
                    heapq.heappush(loads, (load + share, len(replica.nbytes), number))
                    break
            if not loads:
                return

    def run(self, tell: Tell = lambda done, total: None) -> SimulationResult:
        """tell(done, total): requests that have come."""
        began, total = time.perf_counter(), len(self.arrivals)
        rows = zip(self.arrivals.at_s.tolist(), self.arrivals.adapters.tolist(), strict=True)
        for number, (at_s, adapter) in enumerate(rows):
            self._end_until(at_s)
            self._now_s = at_s
            if number == self._counted_from:
                self._begin_counting()
            self._arrive(number, adapter, at_s)
            if number % 4096 == 0:
                tell(number, total)
        self._end_until(float("inf"))
        tell(total, total)
        return self._result(time.perf_counter() - began)

    def _begin_counting(self) -> None:
        self._hits = self._misses = self._loads = self._evictions = 0
        self._first_s, self._end_s, self._wait_s = array("d"), array("d"), array("d")
        for replica in self.replicas:
            replica.busy_s = 0.0

    def _arrive(self, number: int, adapter: int, at_s: float) -> None:
        key = None if adapter < 0 else self._keys[adapter]
        rank = 0 if adapter < 0 else self._workload.rank_of(adapter)
        needs = Needs(adapter=key, num_prompt_tokens=int(self.arrivals.prompts[number]), rank=rank)
        replica = self._by_name[self.placed(needs, at_s)]
        replica.waiting.append(number)
        if replica.num_running < self._size.max_num_seqs:
            self._begin(replica, at_s)
        self.shortlist.changed(replica, at_s)

    def placed(self, needs: Needs, now_s: float) -> str:
        """The replica that takes the request."""
        snapshots = [each.snapshot(now_s) for each in self.shortlist.candidates(needs.adapter)]
        name = place(needs, snapshots, self._policy, now_s)
        assert name is not None, "every replica is open"
        return name

    def _begin(self, replica: Replica, now_s: float) -> None:
        """The first that waits runs, if its adapter has room."""
        number = replica.waiting[0]
        adapter = int(self.arrivals.adapters[number])
        ready_s = now_s if adapter < 0 else self._ready_s(replica, adapter, now_s)
        if ready_s is None:
            return
        replica.waiting.popleft()
        replica.num_running += 1
        rows, prompt = replica.num_running, int(self.arrivals.prompts[number])
        first_s = ready_s + self._times.prompt_s(rows - 1, prompt)
        step_s = self._times.step_s(rows)
        ends_s = first_s + (int(self.arrivals.outputs[number]) - 1) * step_s
        replica.busy_s += (ends_s - ready_s) / rows
        heapq.heappush(self._ends, (ends_s, next(self._order), replica, number))
        if number >= self._counted_from:
            arrived_s = float(self.arrivals.at_s[number])
            self._wait_s.append(ready_s - arrived_s)
            self._first_s.append(first_s - arrived_s)
            self._end_s.append(ends_s - arrived_s)

    def _ready_s(self, replica: Replica, adapter: int, now_s: float) -> float | None:
        """When its weights are there; None: it has to wait for room."""
        key, ready_s = self._keys[adapter], now_s
        if key in replica.nbytes:
            self._hits += 1
        else:
            nbytes = self._size.nbytes_of[self._workload.rank_of(adapter)]
            load_s = self._calibration.source.seconds(nbytes)
            left = replica.bring(key, nbytes, load_s)
            if left is None:
                return None
            for each in left:
                self.shortlist.left(replica, each)
            self.shortlist.entered(replica, key)
            self._misses += 1
            self._loads += 1
            self._evictions += len(left)
            ready_s += load_s
        replica.running[key] = replica.running.get(key, 0) + 1
        replica.policy.use(key)
        return ready_s

    def _end_until(self, at_s: float) -> None:
        while self._ends and self._ends[0][0] <= at_s:
            ends_s, _, replica, number = heapq.heappop(self._ends)
            self._now_s = ends_s
            replica.num_running -= 1
            adapter = int(self.arrivals.adapters[number])
            if adapter >= 0:
                key = self._keys[adapter]
                replica.running[key] -= 1
                if not replica.running[key]:
                    del replica.running[key]
                replica.policy.touch(key)
            while replica.waiting and replica.num_running < self._size.max_num_seqs:
                num_waiting = len(replica.waiting)
                self._begin(replica, ends_s)
                if len(replica.waiting) == num_waiting:
                    break
            self.shortlist.changed(replica, ends_s)

    def _result(self, wall_s: float) -> SimulationResult:
        first = float(self.arrivals.at_s[self._counted_from])
        seconds = max(1e-9, self._now_s - first)
        work = [replica.busy_s for replica in self.replicas]
        num_tokens = int(self.arrivals.outputs[self._counted_from :].sum())
        count = len(self.arrivals) - self._counted_from
        return SimulationResult(
            detail="requests",
            num_requests=count,
            num_failed=count - len(self._end_s),
            seconds=seconds,
            tokens_per_s=num_tokens / seconds,
            requests_per_s=count / seconds,
            first_token_s=Spread.of(self._first_s),
            inter_token_s=None,
            end_to_end_s=Spread.of(self._end_s),
            waiting_s=Spread.of(self._wait_s),
            hits=self._hits,
            misses=self._misses,
            found={"device": self._hits, "source": self._misses},
            evictions={"device_room": self._evictions} if self._evictions else {},
            loads=self._loads,
            preemptions=0,
            pauses=0,
            kv_bytes=0,
            num_steps=0,
            utilization=tuple(min(1.0, each / seconds) for each in work),
            max_load=max(work) * len(work) / max(1e-9, sum(work)),
            wall_s=wall_s,
            notes=("replicas without steps: waiting is an estimate", *self._calibration.notes_on(self._workload.ranks)),
        )


def _check_workload(workload: Workload) -> None:
    """Raises ConfigError for what only steps tell apart."""
    if workload.shared_prefix_tokens:
        raise ConfigError("shared_prefix_tokens is of --runners: replicas without steps have no KV cache; leave it out")
