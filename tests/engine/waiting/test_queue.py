"""The queue in lines decides what the rule over a list decides: same admissions, order, preemptions and pauses."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.core import WaitsFor
from loraplex.engine.schedule_plan import PRIORITY_STEPS, SampledToken, SchedulePlan
from loraplex.engine.waiting.queue import MAX_LACKING
from loraplex.sampling_params import Claim
from tests.engine.slow_queue import SlowQueue
from tests.engine.test_scheduler import EOS, Harness, ran

NUM_ADAPTERS = 7


class Trace:
    """The same requests, ends, loads and faults for a scheduler, by chance; `log` has what it decided in each step."""

    def __init__(self, seed: int, *, is_slow: bool, num_priorities: int) -> None:
        self._random = random.Random(seed)
        self._priorities = range(num_priorities)
        choice = self._random.choice
        self._longest = 8 * (num_blocks := choice([8, 16, 24, 64]))
        sizes = {"seqs": choice([2, 4, 8]), "tokens": choice([4, 16, 64]), "room": choice([2, 3, 5])}
        self.harness = Harness(num_blocks=num_blocks, aging_steps=choice([4, 8, 32, 64]), **sizes)
        if is_slow:
            self.harness.scheduler._waiting = SlowQueue()  # type: ignore[assignment]
        self._in_flight: list[SchedulePlan] = []
        self._num_come = 0
        self.log: list[object] = []

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for _ in range(self._random.choice([0, 0, 1, 1, 2, 5])):
                self._arrive()
            self._disturb()
            self._step()

    def _arrive(self) -> None:
        chance, self._num_come = self._random, self._num_come + 1
        adapter: Any = chance.choice([None, *range(1, NUM_ADAPTERS + 1)])
        if chance.random() < 0.1:
            adapter = tuple(chance.sample(range(1, 5), 2))
        length, output = chance.randint(1, min(30, self._longest // 2)), chance.randint(1, min(20, self._longest // 3))
        claim, penalty = Claim(priority=chance.choice(self._priorities)), chance.choice([0, 0, 0, 0.5])
        self.harness.add(str(self._num_come), length, adapter, output, claim=claim, presence_penalty=penalty)

    def _disturb(self) -> None:
        chance, scheduler, residency = self._random, self.harness.scheduler, self.harness.residency
        adapter_id = chance.randint(1, NUM_ADAPTERS)
        verbs: list[tuple[float, Callable[[], object]]] = [
            (0.15, lambda: scheduler.abort(str(chance.randint(1, self._num_come + 1)))),
            (0.1, lambda: residency.loading.symmetric_difference_update({adapter_id} - set(residency.refs))),
            (0.02, lambda: scheduler.abort_adapter(adapter_id)),
            (0.02, lambda: residency.broken.update({adapter_id} - set(residency.refs))),
            (0.05, residency.broken.clear),
            (0.03, lambda: scheduler.forget_kv(f"d{adapter_id}")),
            (0.02, lambda: scheduler.throttle(chance.choice([1, 2]))),
        ]
        for probability, verb in verbs:
            if chance.random() < probability:
                verb()

    def _step(self) -> None:
        scheduler, residency = self.harness.scheduler, self.harness.residency
        if self._in_flight and (self._random.random() < 0.5 or scheduler.needs_commit()):
            self._commit(0)
        residency.prefetched.clear()
        plan = scheduler.schedule()
        self._in_flight += [plan] if plan.sequences else []
        self._commit(1)
        scheduler.check_integrity()
        failed = sorted(output.request_id for output in plan.failed)
        counts = scheduler.num_preemptions, scheduler.num_pauses, scheduler.num_waiting, dict(scheduler.num_admitted)
        self.log.append((ran(plan), failed, counts, sorted(scheduler._waiting.adapter_ids()), [*residency.prefetched]))

    def _commit(self, num_left: int) -> None:
        while len(self._in_flight) > num_left:
            plan = self._in_flight.pop(0)
            names = [each.state.request.request_id for each in plan.sequences if each.is_sampled]
            token = SampledToken(EOS if self._random.random() < 0.05 else 5)
            self.harness.scheduler.commit(plan, dict.fromkeys(names, token))


@pytest.mark.parametrize("num_priorities", [1, 3])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num_steps=st.integers(10, 80))
def test_it_decides_as_the_rule_over_a_list_does(num_priorities: int, seed: int, num_steps: int) -> None:
    fast, slow = (Trace(seed, is_slow=is_slow, num_priorities=num_priorities) for is_slow in (False, True))
    for _ in range(num_steps):
        fast.run(1)
        slow.run(1)
        assert fast.log[-1] == slow.log[-1]
    assert [(state.request.request_id, cause_in(fast, state)) for state in fast.harness.scheduler._waiting] == [
        (state.request.request_id, cause_in(slow, state)) for state in slow.harness.scheduler._waiting
    ]


def cause_in(trace: Trace, state: Any) -> WaitsFor | None:
    queue: Any = trace.harness.scheduler._waiting
    return queue.cause_of(state) if isinstance(queue, SlowQueue) else queue._line_of[state].cause_of(state)


class CountingHarness(Harness):
    """Counts how many waiting requests a step looks at."""

    def num_looked_at(self) -> int:
        return len(self.looked_at())

    def looked_at(self) -> list[str]:
        queue: Any = self.scheduler._waiting
        asked = list[str]()
        original = self.residency.try_acquire
        self.residency.try_acquire = lambda each: (asked.append(str(each)), original(each))[1]  # type: ignore[method-assign]
        self.step()
        self.residency.try_acquire = original  # type: ignore[method-assign]
        assert len(queue) > 500
        return asked


def test_a_step_asks_once_for_each_content_however_many_wait() -> None:
    harness = CountingHarness(seqs=4, room=1)
    for index in range(1000):
        harness.add(str(index), adapter=1 + index % 3, max_tokens=500)
    harness.add("base")
    harness.step()
    harness.scheduler.abort("0")
    assert harness.num_looked_at() <= 5  # a seat is free: the next of adapter 1, and one for each other adapter
    assert harness.scheduler.waiting_by_cause()["room"] > 600


class TestManyThatLackRoom:
    """Each answer costs a walk through the memory: with 4,000 distinct adapters, or mixes, a step took 2 s."""

    def test_a_step_asks_for_few_and_the_next_for_others(self) -> None:
        harness = CountingHarness(seqs=4, room=1, aging_steps=10**6)
        for index in range(600):
            harness.add(str(index), adapter=1 + index, max_tokens=500)
        harness.step()
        asked = [harness.looked_at() for _ in range(10)]
        assert {len(each) for each in asked} == {MAX_LACKING}
        first = [int(each) for step in asked for each in step][: 599 - MAX_LACKING]
        assert first == [*range(2 + MAX_LACKING, 601)], "in order, behind those of the step before"
        harness.scheduler.abort("0")
        harness.step()
        assert harness.scheduler.num_running == 1

    def test_a_request_behind_them_that_lacks_none_is_admitted_soon(self) -> None:
        harness = Harness(seqs=4, room=1, aging_steps=10**6)
        for index in range(600):
            harness.add(str(index), adapter=1 + index, max_tokens=500)
        harness.step()
        harness.add("base", max_tokens=1)
        for _ in range(1 + 600 // MAX_LACKING):
            harness.step()
        assert "base" in harness.outputs

    def test_another_tenant_waits_for_none_of_them(self) -> None:
        """The one that was served least comes first, and has all that lack room."""
        harness = Harness(seqs=4, room=2, aging_steps=10**6)
        for name in ("one", "two"):
            harness.add(name, adapter=name == "one" or 2, max_tokens=100, claim=Claim(tenant="busy"))
        harness.step()
        for index in range(600):
            harness.add(str(index), adapter=10 + index, claim=Claim(tenant="many"))
        harness.add("three", adapter=2, max_tokens=1, claim=Claim(tenant="busy"))
        harness.add("lacking", adapter=700, max_tokens=1, claim=Claim(tenant="busy"))
        harness.add("four", adapter=1, max_tokens=1, claim=Claim(tenant="busy"))
        for _ in range(3):
            harness.step()
        assert {"three", "four"} <= set(harness.outputs)

    def test_all_are_served(self) -> None:
        harness = Harness(seqs=4, room=1, num_blocks=256)
        for index in range(3 * MAX_LACKING):
            harness.add(str(index), adapter=1 + index, max_tokens=1)
        harness.run()

    def test_once_there_are_few_they_come_in_order_again(self) -> None:
        harness = Harness(seqs=4, room=1, num_blocks=256, aging_steps=10**6)
        harness.add("first", adapter=1, max_tokens=500)
        for index in range(MAX_LACKING + 20):
            harness.add(str(index), adapter=2 + index, max_tokens=1)
        harness.step()
        for index in range(5, MAX_LACKING + 10):
            harness.scheduler.abort(str(index))
        harness.step()
        harness.scheduler.abort("first")
        begin = len(harness.plans)
        harness.run()
        order = [name for plan in harness.plans[begin:] for name in ran(plan)]
        assert order == [str(index) for index in (*range(5), *range(MAX_LACKING + 10, MAX_LACKING + 20))]


class TestPriorities:
    def test_lower_is_earlier_and_of_equals_the_first_that_came(self) -> None:
        harness = Harness(seqs=1)
        for name, priority in (("a", 0), ("b", 1), ("c", -1), ("d", 0), ("e", -1)):
            harness.add(name, max_tokens=1, claim=Claim(priority=priority))
        harness.run()
        assert [name for plan in harness.plans for name in ran(plan)] == ["c", "e", "a", "d", "b"]

    def test_none_starves(self) -> None:
        """One of a later priority waits as long as its levels are worth, though others come all the time."""
        harness = Harness(seqs=1)
        harness.add("late", max_tokens=1, claim=Claim(priority=1))
        for step in range(2 * PRIORITY_STEPS):
            harness.add(str(step), max_tokens=1)
            harness.step()
        steps = [step for step, plan in enumerate(harness.plans) if "late" in ran(plan)]
        assert steps == [PRIORITY_STEPS]

    def test_a_late_one_is_preempted_first(self) -> None:
        harness = Harness(num_blocks=4)
        harness.add("late", 14, 1, max_tokens=10, claim=Claim(priority=1))
        harness.step()
        harness.add("early", 14, max_tokens=10)
        while not harness.scheduler.num_preemptions:
            harness.step()
        assert [state.request.request_id for state in harness.scheduler._running] == ["early"]
