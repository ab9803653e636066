"""Targets of tenants: admission within the counters' bound, prompts beside requests that draw tokens, and what is
missed. The clock is the test's."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine.waiting.service_levels import GROWTH, LEAST_SHARE, STEP_TARGET_S, ServiceLevels
from loraplex.engine.waiting.shares import HINT_SERVICE, OUTPUT_COST, PROMPT_COST
from loraplex.sampling_params import Claim
from tests.engine.test_scheduler import Harness

SEATS, TOKENS, MAX_PROMPT, MAX_OUTPUT = 4, 64, 60, 8
STEP_S = 0.01


def bound(least_weight: float) -> float:
    """Of the counters, and what a target may add to it."""
    counters = max(PROMPT_COST * MAX_PROMPT, OUTPUT_COST * SEATS * (MAX_PROMPT + MAX_OUTPUT))
    return 2 * (counters + HINT_SERVICE) / least_weight


class Load:
    def __init__(self, seed: int, tokens: int = TOKENS, num_blocks: int = 128) -> None:
        self.random = random.Random(seed)
        self.harness = Harness(num_blocks=num_blocks, seqs=SEATS, tokens=tokens, aging_steps=32)
        self.num_come = 0

    @property
    def scheduler(self):
        return self.harness.scheduler

    def add(self, claim: Claim, prompt: int, output: int) -> str:
        self.num_come += 1
        name = f"{claim.tenant}-{self.num_come}"
        self.harness.add(name, prompt, None, output, claim=claim, cache_salt=name)
        return name

    def keep_waiting(self, claim: Claim, num_waiting: int) -> None:
        waiting = {share.name: share.num_requests - share.num_running for share in self.scheduler.shares()}
        for _ in range(num_waiting - waiting.get(claim.tenant, 0)):
            self.add(claim, self.random.randint(1, MAX_PROMPT), self.random.randint(1, MAX_OUTPUT))

    def step(self, seconds: float = STEP_S) -> None:
        plan = self.scheduler.schedule()
        self.harness.now_s += seconds
        self.harness.commit(plan)

    def served(self, tenant: str) -> float:
        return {share.name: share.served for share in self.scheduler.shares()}[tenant]


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    weights=st.tuples(*[st.sampled_from([0.5, 1.0, 4.0])] * 3),
    targets=st.tuples(*[st.sampled_from([None, 1, 50, 5000])] * 3),
    itl=st.sampled_from([None, 1, 20]),
)
def test_targets_add_to_the_bound_what_is_said_and_no_more(
    seed: int, weights: tuple[float, ...], targets: tuple[int | None, ...], itl: int | None
) -> None:
    load = Load(seed)
    claims = [
        Claim(f"t{index}", weight, ttft_target_ms=target, itl_target_ms=itl)
        for index, (weight, target) in enumerate(zip(weights, targets, strict=True))
    ]
    differences = []
    for _ in range(250):
        for claim in claims:
            load.keep_waiting(claim, SEATS)  # they cannot all end in one step
        load.step()
        differences.append([load.served(one) - load.served("t0") for one in ("t1", "t2")])
    for which in range(2):
        series = [each[which] for each in differences]
        assert max(series) - min(series) <= bound(min(weights))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), target=st.sampled_from([None, 1, 100]), itl=st.sampled_from([None, 1, 15]))
def test_no_seat_is_free_while_a_request_could_run(seed: int, target: int | None, itl: int | None) -> None:
    """Work-conserving: whatever the targets, a step that leaves a seat and a waiting request has spent its tokens of
    prompts, and these are never fewer than an eighth of the step's; or it is the first one of a tenant."""
    load = Load(seed)
    hinted, plain = Claim("hinted", ttft_target_ms=target, itl_target_ms=itl), Claim("plain")
    for _ in range(150):
        for claim in (hinted, plain):
            if load.random.random() < 0.5:
                load.keep_waiting(claim, 2)
        plan = load.scheduler.schedule()
        is_first = load.scheduler._waiting.hurried_at == plan.step_id
        if load.scheduler.num_waiting and len(plan.sequences) < SEATS - is_first:
            num_prompt_tokens = sum(each.num_tokens for each in plan.sequences if each.num_tokens > 1)
            assert num_prompt_tokens >= TOKENS // LEAST_SHARE or plan.num_tokens == TOKENS
        load.harness.now_s += load.random.choice([0.001, 0.02])
        load.harness.commit(plan)
    load.harness.run()


def seconds_waited(target_ms: int | None) -> float:
    """Until the first tokens of a tenant that sends a request every 6 steps, beside two that always wait."""
    load, came = Load(3), {}
    waited: dict[str, float] = {}
    for step in range(480):
        for name in ("one", "two"):
            load.keep_waiting(Claim(name), 4)
        if step % 6 == 0:
            came[load.add(Claim("hinted", ttft_target_ms=target_ms), 60, 8)] = load.harness.now_s
        load.step()
        for name in came.keys() & load.harness.outputs.keys() - waited.keys():
            waited[name] = load.harness.now_s - came[name]
    return sum(waited.values())


def test_an_urgent_request_goes_before_those_of_tenants_served_a_little_less() -> None:
    """Its tenant asks for about its share, so without a target it often waits for the others' turn."""
    assert seconds_waited(40) < 0.75 * seconds_waited(None)


def test_a_tenant_is_given_credit_only_while_its_next_request_is_urgent() -> None:
    load = Load(0)
    for _ in range(SEATS):
        load.add(Claim("other"), 4, 60)
    load.step()
    name = load.add(Claim("hinted", weight=2.0, ttft_target_ms=100), 4, 4)
    share = load.scheduler._states[name].share
    load.scheduler._waiting.tell_time(load.harness.now_s + 0.049)
    assert share.credit == 0
    load.scheduler._waiting.tell_time(load.harness.now_s + 0.051)
    assert share.credit == HINT_SERVICE / 2
    load.harness.now_s += 0.06
    while not load.harness.outputs.get(name):
        load.step()
    assert share.credit == 0


def test_a_target_that_is_taken_away_is_none() -> None:
    load = Load(0)
    for _ in range(SEATS):
        load.add(Claim("other"), 4, 60)
    load.step()
    load.add(Claim("other", ttft_target_ms=100), 4, 4)
    load.add(Claim("other"), 4, 4)
    load.harness.now_s += 10
    load.harness.run()
    assert not load.scheduler.levels.outcomes


class TestStepsBesideTokens:
    """A step takes a + b * (tokens of prompts)."""

    def run(self, base_s: float, token_s: float, target_ms: int, num_steps: int = 200) -> list[int]:
        """Tokens of prompts in each step beside a request that draws tokens."""
        load, counts = Load(1, tokens=512), []
        load.add(Claim("talker", itl_target_ms=target_ms), 4, 600)
        load.step()
        for _ in range(num_steps):
            while load.scheduler.num_waiting < 2:
                load.add(Claim("reader"), 200, 1)
            plan = load.scheduler.schedule()
            counts.append(sum(each.num_tokens for each in plan.sequences if each.num_tokens > 1))
            load.harness.now_s += base_s + token_s * counts[-1]
            load.harness.commit(plan)
        self.outcomes = load.scheduler.levels.outcomes
        return counts

    def test_they_settle_where_the_target_is_met(self) -> None:
        counts = self.run(0.002, 0.0001, 20)
        late = counts[50:]
        assert all(0.002 + 0.0001 * num <= 0.020 for num in late), "no step takes longer than the target"
        assert min(late) >= 512 // LEAST_SHARE
        assert self.outcomes["itl_missed"] < 10

    def test_a_target_that_no_step_meets_is_missed_and_counted_and_prompts_go_on(self) -> None:
        counts = self.run(0.030, 0.0001, 20)
        assert self.outcomes["itl_missed"] == 200
        assert min(counts) >= 512 // LEAST_SHARE

    def test_a_target_that_all_steps_meet_costs_nothing(self) -> None:
        assert min(self.run(0.0, 0.00001, 1000)) >= 200 * (SEATS - 1) - 200


@settings(max_examples=100)
@given(seconds=st.lists(st.tuples(st.floats(0, 2 * STEP_TARGET_S), st.integers(0, 512)), max_size=60))
def test_tokens_of_prompts_stay_between_the_least_and_all(seconds: list[tuple[float, int]]) -> None:
    levels, load = ServiceLevels(512), Load(0)
    name = load.add(Claim("talker", itl_target_ms=50), 4, 20)
    load.step()
    state = load.scheduler._states[name]
    now_s, longest_s = 0.0, 0.0
    for step_s, num_tokens in seconds:
        longest_s = max(longest_s, now_s + step_s - now_s)  # as the clock has it: a float rounds
        before = levels.budget([state]).num_prompt_tokens
        plan = [state_of_prompt(state, 1), state_of_prompt(state, min(num_tokens, before))]
        levels.see_step(plan, now_s, now_s := now_s + step_s)
        after = levels.budget([state]).num_prompt_tokens
        assert 512 // LEAST_SHARE <= after <= 512
        assert after <= before + 512 // GROWTH
        beside_none = levels.budget([]).num_prompt_tokens
        assert after <= beside_none <= 512, "nothing is held back for requests that are not there"
        if longest_s <= STEP_TARGET_S:
            assert beside_none == 512


def test_the_steps_of_a_long_prompt_stay_short_where_it_is_alone_and_nothing_has_a_target() -> None:
    """A token of it costs more the more there are before it."""
    load, steps = Load(0, tokens=512, num_blocks=1024), []
    load.add(Claim("reader"), 8000, 1)
    while load.scheduler.has_unfinished:
        plan = load.scheduler.schedule()
        (sequence,) = plan.sequences
        steps.append((sequence.num_tokens, 2e-7 * sequence.num_tokens * sequence.end))
        load.harness.now_s += steps[-1][1]
        load.harness.commit(plan)
    assert steps[0][0] == 512, "all of a step, while it is short"
    too_long = [seconds for _, seconds in steps if seconds > STEP_TARGET_S]
    assert 1 <= len(too_long) <= 8
    assert max(too_long) < 1.3 * STEP_TARGET_S
    assert min(num_tokens for num_tokens, _ in steps[:-1]) >= 512 // LEAST_SHARE


def test_a_draft_is_no_prompt() -> None:
    """However many tokens it has: a step that took too long for it alone changes no limit."""
    from loraplex.engine.schedule_plan import ScheduledSequence

    load = Load(0)
    load.add(Claim("a", itl_target_ms=100), 4, 9)
    load.step(0.01)
    (state,) = load.scheduler._running
    before = load.scheduler.levels.budget([state])
    load.scheduler.levels.see_step([ScheduledSequence(state, 4, 1, is_sampled=True).with_draft((5,) * 8)], 1.0, 9.0)
    assert load.scheduler.levels.budget([state]) == before


def state_of_prompt(state, num_tokens: int):
    from loraplex.engine.schedule_plan import ScheduledSequence

    return ScheduledSequence(state, 0, num_tokens, is_sampled=False)


@pytest.mark.parametrize(("seconds", "outcome"), [(0.05, "ttft_met"), (0.2, "ttft_missed")])
def test_first_tokens_are_counted_by_whether_they_came_in_time(seconds: float, outcome: str) -> None:
    load = Load(0)
    load.add(Claim("a", ttft_target_ms=100), 4, 1)
    load.step(seconds)
    assert dict(load.scheduler.levels.outcomes) == {outcome: 1}


def test_one_that_ends_without_a_token_after_its_target_missed_it() -> None:
    load = Load(0)
    early, late = (load.add(Claim("a", ttft_target_ms=100), 4, 1) for _ in range(2))
    load.scheduler.abort(early)
    assert not load.scheduler.levels.outcomes
    load.harness.now_s += 1
    load.scheduler.abort(late)
    assert dict(load.scheduler.levels.outcomes) == {"ttft_missed": 1}
