"""What tenants are served: virtual token counters in the scheduler, with a model that is not there.

Service is weighted tokens, as the counters have it. The bound is the paper's (Sheng et al., OSDI 2024, theorem 4.4).
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine.schedule_plan import SampledToken
from loraplex.engine.waiting.queue import HURRY_STEPS
from loraplex.engine.waiting.shares import OUTPUT_COST, PROMPT_COST, TenantShares
from loraplex.sampling_params import Claim
from tests.engine.test_scheduler import Harness

SEATS, TOKENS, BLOCKS = 8, 64, 128
MAX_PROMPT, MAX_OUTPUT = 30, 24


class Load:
    """A scheduler under load. first_steps: of each request, the step of its first token after it came."""

    def __init__(self, seed: int = 0, **sizes: int) -> None:
        self.random = random.Random(seed)
        self.harness = Harness(**{"num_blocks": BLOCKS, "seqs": SEATS, "tokens": TOKENS, "aging_steps": 32, **sizes})
        self.num_come = 0
        self.num_steps = 0
        self.first_steps: dict[str, int] = {}
        self._came: dict[str, int] = {}

    def add(self, tenant: str, prompt: int, output: int, weight: float = 1.0, adapter: int | None = None) -> str:
        self.num_come += 1
        name = f"{tenant}-{self.num_come}"
        self._came[name] = self.num_steps
        self.harness.add(name, prompt, adapter, output, claim=Claim(tenant, weight))
        return name

    def add_any(self, tenant: str, weight: float = 1.0, adapter: int | None = None) -> str:
        prompt, output = self.random.randint(1, MAX_PROMPT), self.random.randint(1, MAX_OUTPUT)
        return self.add(tenant, prompt, output, weight, adapter)

    def keep_waiting(self, tenant: str, num_waiting: int, weight: float = 1.0) -> None:
        while self.num_waiting(tenant) < num_waiting:
            self.add_any(tenant, weight)

    def num_waiting(self, tenant: str) -> int:
        shares = self.harness.scheduler.shares()
        return sum(share.num_requests - share.num_running for share in shares if share.name == tenant)

    def step(self) -> None:
        self.num_steps += 1
        plan = self.harness.step()
        for sequence in plan.sequences:
            if sequence.is_sampled:
                name = sequence.state.request.request_id
                self.first_steps.setdefault(name, self.num_steps - self._came[name])

    def served(self) -> dict[str, float]:
        return {share.name: share.served for share in self.harness.scheduler.shares()}

    def num_generated(self) -> Counter[str]:
        """Tokens, by tenant."""
        found: Counter[str] = Counter()
        for name, outputs in self.harness.outputs.items():
            found[name.rpartition("-")[0]] += sum(len(each.token_ids) for each in outputs)
        return found

    def waits(self, tenant: str) -> list[int]:
        return sorted(steps for name, steps in self.first_steps.items() if name.startswith(f"{tenant}-"))


def bound(least_weight: float) -> float:
    """Twice the larger of a prompt and of what running requests may come to have, over the least weight."""
    return 2 * max(PROMPT_COST * MAX_PROMPT, OUTPUT_COST * SEATS * (MAX_PROMPT + MAX_OUTPUT)) / least_weight


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), weights=st.tuples(*[st.sampled_from([0.5, 1.0, 2.0, 4.0])] * 3))
def test_of_tenants_that_always_wait_none_gets_ahead_by_more_than_the_bound(
    seed: int, weights: tuple[float, ...]
) -> None:
    """In every interval: the largest change of a difference is that between its extremes."""
    load, tenants = Load(seed), {f"t{index}": weight for index, weight in enumerate(weights)}
    differences = []
    for _ in range(200):
        for tenant, weight in tenants.items():
            load.keep_waiting(tenant, 3, weight)
        load.step()
        served = load.served()
        differences.append([served[one] - served["t0"] for one in ("t1", "t2")])
    for which in range(2):
        series = [each[which] for each in differences]
        assert max(series) - min(series) <= bound(min(weights))
    assert max(map(max, differences)) < sum(load.served().values()) / 4, "so long that it says something"


def test_service_is_in_proportion_to_the_weights() -> None:
    load = Load()
    for _ in range(1500):
        load.keep_waiting("small", 4)
        load.keep_waiting("large", 4, weight=3.0)
        load.step()
    tokens = {share.name: share.num_generated_tokens for share in load.harness.scheduler.shares()}
    assert math.isclose(tokens["large"] / tokens["small"], 3.0, rel_tol=0.1)


def test_time_away_is_no_credit() -> None:
    """A tenant that comes and goes gets no more, while it is there, than one that always waits: its counter is lifted
    to the other's. Without that it had 443 of 480 tokens."""
    load = Load()
    for _ in range(4):
        for _ in range(60):
            load.keep_waiting("steady", 4)
            load.step()
        before = load.num_generated()
        for _ in range(60):
            load.keep_waiting("steady", 4)
            load.keep_waiting("bursts", 4)
            load.step()
        gained = load.num_generated() - before
        assert 0.4 <= gained["bursts"] / gained.total() <= 0.6, gained
        for name in list(load.harness.scheduler._states):
            if name.startswith("bursts"):
                load.harness.scheduler.abort(name)


def light_waits(flood: int, prompt: int, adapters: int = 0) -> list[int]:
    """Steps until the first token of one request every 40 steps, beside a tenant that always has so many waiting."""
    load = Load(1)
    for step in range(600):
        while load.num_waiting("flood") < flood:
            adapter = load.random.randint(1, adapters) if adapters else None
            load.add("flood", load.random.randint(1, MAX_PROMPT), 20, adapter=adapter)
        if step % 40 == 0:
            load.add("light", prompt, 8, adapter=1000 + step)  # it finds no prefix of another
        load.step()
    return load.waits("light")


@pytest.mark.parametrize("flood", [30, 300])
@pytest.mark.parametrize("prompt", [8, 200])
def test_a_flood_hardly_delays_a_light_tenant(flood: int, prompt: int) -> None:
    """The slowest takes 1.5 times as many steps to its first token, or one step more. Without the seat that the flood
    gives it would wait for one up to 20 steps more, and behind the flood's queue hundreds."""
    alone, waits = light_waits(0, prompt), light_waits(flood, prompt)
    assert len(waits) == len(alone) == 15
    assert waits[-1] <= max(1.5 * alone[-1], alone[-1] + 1)


def test_a_tenant_that_comes_back_takes_a_seat_in_its_first_step() -> None:
    """It is lifted to the least served one that waits: of the two it is the first, and that one gives a seat."""
    load = Load()
    for _ in range(50):
        while load.num_waiting("flood") < 20:
            load.add("flood", 4, 20)
        load.step()
    light = load.add("light", 8, 4, adapter=1000)
    load.step()
    assert load.first_steps[light] == 1


def test_no_other_prompt_begins_in_the_first_step_of_a_tenant_that_comes_back() -> None:
    """Its tokens would be most of the step's; the seat that is free beside it is taken in the next one."""
    load = Load()
    for tenant in ("flood", "third"):
        for _ in range(2 * SEATS if tenant == "flood" else 1):
            load.add(tenant, 4, 40)
    load.step()
    harness = load.harness

    def end(num_requests: int) -> None:
        running = [each for each in harness.scheduler._running if each.share.name == "flood"]
        for state in running[:num_requests]:
            harness.scheduler.abort(state.request.request_id)

    for _ in range(HURRY_STEPS):
        load.step()
    end(2)
    light = load.add("light", 8, 4, adapter=1000)
    plan = harness.step()
    assert [each.state.request.request_id for each in plan.sequences if each.num_tokens > 1] == [light]
    assert len(plan.sequences) == SEATS - 1
    assert len(harness.step().sequences) == SEATS
    end(2)
    load.add("fourth", 8, 4, adapter=1001)
    assert len(harness.step().sequences) == SEATS, "not again so soon: seats would stay empty"
    for _ in range(HURRY_STEPS):
        load.step()
    end(5)
    load.add("fifth", 8, 4, adapter=1002)
    assert len(harness.step().sequences) == SEATS, "nor where so many are free"


def steps_to_serve(tenant_of: Callable[[int], str], seed: int) -> int:
    load = Load(seed)
    for index in range(200):
        load.add_any(tenant_of(index))
    while load.harness.scheduler.has_unfinished:
        load.step()
    return load.num_steps


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_shares_cost_no_throughput(seed: int) -> None:
    """Steps for the same requests, from one tenant (first come, first served) and from several, one much larger."""
    first_come = steps_to_serve(lambda index: "", seed)
    shared = steps_to_serve(lambda index: "large" if index % 10 else f"t{index % 30}", seed)
    assert shared <= first_come / 0.97 + 1


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), room=st.integers(1, 4))
def test_no_seat_is_free_while_a_request_could_run(seed: int, room: int) -> None:
    """Work-conserving: a tenant whose adapters lack room, or that was served most, holds no seat back. A quarter of
    them may be free for a step, now and then, for the first step of another tenant."""
    load, short_at = Load(seed, room=room), -HURRY_STEPS
    for step in range(60):
        for _ in range(load.random.choice([0, 1, 3])):
            load.add_any(load.random.choice(["a", "b", "c"]), adapter=load.random.choice([None, 1, 2, 3, 4, 5]))
        harness, scheduler, refs = load.harness, load.harness.scheduler, load.harness.residency.refs
        plan = scheduler.schedule()
        can_run = [
            state
            for state in scheduler._waiting
            if state.request.adapter_id in (None, *refs) and state.preempted_at_step != plan.step_id
        ]
        is_full = plan.num_tokens == TOKENS or len(plan.sequences) == SEATS
        if can_run and not is_full and 4 * (SEATS - len(plan.sequences)) <= SEATS and step - short_at >= HURRY_STEPS:
            is_full, short_at = True, step
        assert not can_run or is_full or harness.blocks.num_free_blocks < 8
        if plan.sequences:
            names = [each.state.request.request_id for each in plan.sequences if each.is_sampled]
            scheduler.commit(plan, dict.fromkeys(names, SampledToken(5)))


def test_no_request_is_paused_for_a_tenant_that_was_served_more() -> None:
    """Adapters take turns within what the tenants were served."""
    load = Load(room=1)
    for _ in range(40):
        load.add("flood", 8, 60, adapter=1)
    for _ in range(40):
        load.step()
    light = load.add("light", 4, 150, adapter=2)
    for _ in range(40):
        load.step()
    assert load.first_steps[light] <= 32, "the flood makes room for it"
    num_pauses = load.harness.scheduler.num_pauses
    while load.served().get("light", math.inf) < load.served()["flood"]:
        assert load.harness.scheduler.num_pauses == num_pauses
        load.step()


class TestTenantShares:
    def test_idle_ones_are_bounded_and_those_served_most_are_kept(self) -> None:
        shares = TenantShares(max_idle=8)
        for index in range(1000):
            share = shares.enter(Claim(f"t{index}"))
            share.served += 1000 - index
            share.num_requests -= 1
            assert len(shares) <= 8
        assert shares.enter(Claim("t0")).served == 1000

    def test_one_with_a_request_is_never_forgotten(self) -> None:
        shares = TenantShares(max_idle=2)
        busy = [shares.enter(Claim(f"busy{index}")) for index in range(10)]
        for index in range(50):
            shares.enter(Claim(f"t{index}")).num_requests -= 1
        assert set(busy) <= set(shares.active())

    def test_the_newest_weight_counts(self) -> None:
        shares = TenantShares()
        shares.enter(Claim("a"))
        share = shares.enter(Claim("a", 4.0))
        share.charge_prompt(8)
        share.charge_output()
        assert share.served == (8 * PROMPT_COST + OUTPUT_COST) / 4
