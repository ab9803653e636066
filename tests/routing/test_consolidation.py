"""Which runners drain, end and come back, and what moves: one contract for all policies of placement, and a fleet whose
load rises and falls."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.routing import (
    POLICIES,
    Decision,
    Held,
    Load,
    Member,
    Move,
    Needs,
    Policy,
    Rules,
    RunnerState,
    Snapshot,
    decide,
)

NOW_S, START_S, TICK_S = 100.0, 3.0, 0.25
NAMES = tuple(f"r{index}" for index in range(5))
EVERY_POLICY = pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))
BLOCK = 16

RULES = st.builds(
    Rules, min_runners=st.integers(1, 3), idle_s=st.sampled_from([0.0, 1.0, 5.0]), max_moving=st.integers(1, 3)
)


def held_at(name: str) -> st.SearchStrategy[tuple[Held, ...]]:
    one = st.builds(
        Held,
        key=st.just(""),
        needs=st.builds(Needs, num_prompt_tokens=st.integers(1, 80)),
        num_completions=st.integers(1, 2),
        num_tokens_left=st.sampled_from([1, 16, 17, 500]),
        target=st.none() | st.none() | st.sampled_from(NAMES),
        can_move=st.booleans(),
        is_waiting=st.booleans(),
    )
    return st.lists(one, max_size=5).map(
        lambda found: tuple(replace(each, key=f"{name}.{number}") for number, each in enumerate(found))
    )


@st.composite
def members_of(draw: st.DrawFn, name: str) -> Member:
    held, total = draw(held_at(name)), draw(st.integers(8, 40))
    state = draw(st.sampled_from([RunnerState.OPEN, RunnerState.OPEN, *RunnerState]))
    held = held if state in (RunnerState.OPEN, RunnerState.DRAINING) else ()
    used = sum(-(-each.needs.num_prompt_tokens // BLOCK) for each in held)
    snapshot = Snapshot(
        name,
        NOW_S,
        num_running=sum(each.num_completions for each in held),
        max_requests=draw(st.integers(1, 12)),
        num_free_kv_blocks=max(0, total - used),
        num_kv_blocks=total,
        is_healthy=state in (RunnerState.OPEN, RunnerState.DRAINING) and draw(st.integers(0, 5).map(bool)),
    )
    empty_since_s = None if held else draw(st.sampled_from([NOW_S, NOW_S - 1, NOW_S - 9]))
    return Member(snapshot, state, held, empty_since_s)


FLEETS = st.integers(2, 5).flatmap(lambda num: st.tuples(*(members_of(NAMES[index]) for index in range(num))))


def steady(num_requests: float) -> Load:
    load = Load()
    for tick in range(20):
        load.note(NOW_S - 5 + tick * TICK_S, int(num_requests))
    return load


def load_of(fleet: tuple[Member, ...]) -> Load:
    return steady(sum(each.snapshot.num_requests for each in fleet))


def decided(fleet: tuple[Member, ...], rules: Rules, policy: Policy) -> Decision:
    return decide(fleet, load_of(fleet), START_S, rules, policy, NOW_S)


@EVERY_POLICY
@settings(deadline=None)
@given(fleet=FLEETS, rules=RULES, seed=st.integers(0, 100))
def test_the_order_of_the_members_decides_nothing(
    policy: Policy, fleet: tuple[Member, ...], rules: Rules, seed: int
) -> None:
    shuffled = random.Random(seed).sample(fleet, len(fleet))
    assert decided(tuple(shuffled), rules, policy) == decided(fleet, rules, policy)


@EVERY_POLICY
@settings(deadline=None)
@given(fleet=FLEETS, rules=RULES)
def test_never_fewer_open_ones_than_the_least(policy: Policy, fleet: tuple[Member, ...], rules: Rules) -> None:
    decision = decided(fleet, rules, policy)
    num_open = sum(each.is_open for each in fleet)
    if decision.drain:
        assert num_open - len(decision.drain) >= rules.min_runners
    if decision.release:
        assert num_open >= rules.min_runners
    num_ready = num_open + sum(each.is_starting for each in fleet)
    spare = [each for each in fleet if each.state is RunnerState.RELEASED]
    spare += [each for each in fleet if each.state is RunnerState.DRAINING and each.snapshot.is_healthy]
    assert num_ready + len(decision.start) + len(decision.reopen) >= min(rules.min_runners, num_ready + len(spare))


@EVERY_POLICY
@settings(deadline=None)
@given(fleet=FLEETS, rules=RULES)
def test_what_changes_may_change_so(policy: Policy, fleet: tuple[Member, ...], rules: Rules) -> None:
    by_name, decision = {each.name: each for each in fleet}, decided(fleet, rules, policy)
    assert all(by_name[name].is_open for name in decision.drain)
    assert all(by_name[name].state is RunnerState.DRAINING for name in (*decision.reopen, *decision.release))
    assert all(by_name[name].state is RunnerState.RELEASED for name in decision.start)
    assert not any(by_name[name].held for name in decision.release), "nothing runs there"
    assert all(NOW_S - (by_name[name].empty_since_s or NOW_S) >= rules.idle_s for name in decision.release)
    if decision.reopen or decision.start:
        assert (decision.drain, decision.release, decision.moves) == ((), (), ()), "one direction at a time"


@EVERY_POLICY
@settings(deadline=None)
@given(fleet=FLEETS, rules=RULES)
def test_moves_go_where_there_is_room_for_all_of_them(policy: Policy, fleet: tuple[Member, ...], rules: Rules) -> None:
    by_name, decision = {each.name: each for each in fleet}, decided(fleet, rules, policy)
    held = {each.key: each for member in fleet for each in member.held}
    assert len({move.key for move in decision.moves}) == len(decision.moves)
    for move in decision.moves:
        source, target = by_name[move.source], by_name[move.target]
        drains = source.state is RunnerState.DRAINING or source.name in decision.drain
        is_over = source.is_open and source.snapshot.num_requests > source.snapshot.max_requests
        assert drains or (is_over and held[move.key].is_waiting)
        assert target.is_open
        assert target.name not in decision.drain
        assert held[move.key] in source.held
        assert held[move.key].can_move
        assert held[move.key].target is None
        assert held[move.key].num_tokens_left > rules.min_tokens_left
    for target in fleet:
        arriving = [held[move.key] for move in decision.moves if move.target == target.name]
        sources = [each for each in fleet if each.is_open or each.state is RunnerState.DRAINING]
        coming = [held for each in sources for held in each.held if held.target == target.name]
        if not arriving:
            continue
        assert len(arriving) + len(coming) <= rules.max_moving
        seats = sum(each.num_completions for each in (*arriving, *coming))
        assert target.snapshot.num_requests + seats <= target.snapshot.max_requests
        blocks = sum(-(-each.needs.num_prompt_tokens // BLOCK) for each in arriving)
        assert blocks <= (target.snapshot.num_free_kv_blocks or 0)


# ------------------------------------------------------------------------------------------------------ a fleet in time


@dataclass
class Fleet:
    """Runners that do what is decided; a start takes START_S, a move one tick."""

    policy: Policy
    rules: Rules
    num_runners: int
    places: int = 8
    now_s: float = NOW_S
    load: Load = field(default_factory=Load)
    num_moves: int = 0

    def __post_init__(self) -> None:
        names = NAMES[: self.num_runners]
        self.states = dict.fromkeys(names, RunnerState.OPEN)
        self.requests: dict[str, list[Held]] = {name: [] for name in names}
        self.empty_since_s = dict.fromkeys(names, self.now_s)
        self.ready_s: dict[str, float] = {}
        self.dead: set[str] = set()

    def add(self, name: str, num_requests: int = 1, **fields: object) -> None:
        for _ in range(num_requests):
            key = f"{name}.{len(self.requests[name])}.{self.now_s}"
            self.requests[name].append(Held(key, Needs(num_prompt_tokens=10), **fields))  # type: ignore[arg-type]

    def members(self) -> list[Member]:
        return [self._member(name) for name in self.states]

    def _member(self, name: str) -> Member:
        state, held = self.states[name], tuple(self.requests[name])
        is_healthy = state in (RunnerState.OPEN, RunnerState.DRAINING) and name not in self.dead
        snapshot = Snapshot(name, self.now_s, 0, len(held), self.places, is_healthy=is_healthy)
        return Member(snapshot, state, held, None if held else self.empty_since_s[name])

    def tick(self) -> Decision:
        self.now_s += TICK_S
        for name, ready_s in list(self.ready_s.items()):
            if self.now_s >= ready_s:
                self.states[name] = RunnerState.OPEN
                del self.ready_s[name]
        self.load.note(self.now_s, sum(map(len, self.requests.values())))
        decision = decide(self.members(), self.load, START_S, self.rules, self.policy, self.now_s)
        for names, state in (
            (decision.drain, RunnerState.DRAINING),
            (decision.reopen, RunnerState.OPEN),
            (decision.release, RunnerState.RELEASED),
            (decision.start, RunnerState.STARTING),
        ):
            self.states.update(dict.fromkeys(names, state))
        self.ready_s.update(dict.fromkeys(decision.start, self.now_s + START_S))
        for move in decision.moves:
            self._move(move)
        return decision

    def _move(self, move: Move) -> None:
        held = next(each for each in self.requests[move.source] if each.key == move.key)
        self.requests[move.source].remove(held)
        self.requests[move.target].append(held)
        self.num_moves += 1
        if not self.requests[move.source]:
            self.empty_since_s[move.source] = self.now_s

    def run(self, seconds: float) -> list[Decision]:
        return [self.tick() for _ in range(round(seconds / TICK_S))]

    def count(self, state: RunnerState) -> int:
        return list(self.states.values()).count(state)


@EVERY_POLICY
def test_load_of_two_that_falls_to_half_of_one_ends_on_one_and_comes_back(policy: Policy) -> None:
    fleet = Fleet(policy, Rules(idle_s=4.0), 2)
    fleet.add("r0", 8)
    fleet.add("r1", 8)
    assert all(each == Decision() for each in fleet.run(10)), "both are needed"
    for name in fleet.requests:
        del fleet.requests[name][2:]
    fleet.run(4.0 + 2.0)
    assert fleet.count(RunnerState.RELEASED) == fleet.count(RunnerState.OPEN) == 1
    assert fleet.num_moves == 2
    left = next(name for name, state in fleet.states.items() if state is RunnerState.OPEN)
    fleet.add(left, 6)
    assert fleet.tick().start
    fleet.run(START_S)
    assert fleet.count(RunnerState.OPEN) == 2


@EVERY_POLICY
@settings(deadline=None, max_examples=20)
@given(
    num_runners=st.integers(2, 5),
    loads=st.lists(st.integers(0, 8), min_size=5, max_size=5),
    min_runners=st.integers(1, 3),
)
def test_a_steady_load_ends_on_the_fewest_that_hold_it_and_stays(
    policy: Policy, num_runners: int, loads: list[int], min_runners: int
) -> None:
    rules = Rules(min_runners, idle_s=1.0)
    fleet = Fleet(policy, rules, num_runners)
    for name, load in zip(NAMES[:num_runners], loads, strict=False):
        fleet.add(name, load)
    fleet.run(60)
    states, total = dict(fleet.states), sum(loads[:num_runners])
    num_open = fleet.count(RunnerState.OPEN)
    assert num_open + fleet.count(RunnerState.RELEASED) == num_runners, "none drains for ever"
    assert num_open >= min(min_runners, num_runners)
    assert num_open in (min(min_runners, num_runners), num_runners) or total > rules.low * (num_open - 1) * fleet.places
    assert all(each == Decision() for each in fleet.run(20))
    assert fleet.states == states


def test_a_lull_shorter_than_the_calm_moves_nothing() -> None:
    fleet = Fleet(POLICIES["latency"], Rules(idle_s=0.0), 2)
    fleet.add("r0", 6)
    fleet.add("r1", 6)
    fleet.run(3)
    kept = {name: list(held) for name, held in fleet.requests.items()}
    fleet.requests = {"r0": [], "r1": []}
    fleet.run(0.75)
    fleet.requests = kept
    fleet.run(3)
    assert fleet.count(RunnerState.OPEN) == 2
    assert fleet.num_moves == 0


def test_what_cannot_move_keeps_its_runner_until_it_ends() -> None:
    fleet = Fleet(POLICIES["pack"], Rules(idle_s=0.0), 2)
    fleet.add("r0", 3)
    fleet.add("r1", 1, can_move=False)
    fleet.add("r1", 1, num_tokens_left=16)
    fleet.add("r1", 1)
    fleet.run(5)
    assert fleet.states == {"r0": RunnerState.OPEN, "r1": RunnerState.DRAINING}
    assert [len(held) for held in fleet.requests.values()] == [4, 2]
    fleet.requests["r1"].clear()
    fleet.run(1)
    assert fleet.states["r1"] is RunnerState.RELEASED


def test_more_load_opens_what_drains_before_it_starts_what_ended() -> None:
    fleet = Fleet(POLICIES["pack"], Rules(idle_s=60.0), 3)
    fleet.states["r2"] = RunnerState.RELEASED
    fleet.add("r0", 2)
    fleet.run(3)
    assert fleet.states["r1"] is RunnerState.DRAINING
    fleet.add("r0", 6)
    assert fleet.tick() == Decision(reopen=("r1",))
    fleet.add("r1", 7)
    assert fleet.tick() == Decision(start=("r2",))


@EVERY_POLICY
def test_what_waits_for_a_place_goes_to_the_one_that_comes_back(policy: Policy) -> None:
    """All that came while one was away stayed in the queue of the other."""
    fleet = Fleet(policy, Rules(), num_runners=2)
    fleet.states["r1"] = RunnerState.RELEASED
    fleet.add("r0", 8)
    fleet.add("r0", 4, is_waiting=True)
    fleet.run(START_S + 1)
    assert fleet.count(RunnerState.OPEN) == 2
    assert [sorted(held.is_waiting for held in fleet.requests[name]) for name in ("r0", "r1")] == [
        [False] * 8,
        [True] * 4,
    ]
    assert fleet.num_moves == 4
    fleet.run(5)
    assert fleet.num_moves == 4


def test_growth_starts_a_runner_before_its_places_are_taken_and_a_burst_does_not() -> None:
    ramp, burst = (Fleet(POLICIES["latency"], Rules(), 2, places=40) for _ in range(2))
    for fleet in (ramp, burst):
        fleet.states["r1"] = RunnerState.RELEASED
        fleet.run(3)
    started_at = None
    for _ in range(24):
        ramp.add("r0", 2)
        if ramp.tick().start and started_at is None:
            started_at = len(ramp.requests["r0"])
    assert started_at is not None
    assert started_at < 0.9 * 40, "it is there when it is needed"
    burst.add("r0", 24)
    assert not any(each.start for each in burst.run(3))


def test_one_that_dies_brings_another_back() -> None:
    fleet = Fleet(POLICIES["latency"], Rules(), 2)
    fleet.states["r1"] = RunnerState.RELEASED
    fleet.run(2)
    fleet.dead.add("r0")
    assert fleet.tick() == Decision(start=("r1",))
    assert fleet.tick() == Decision(), "it is on its way"


def test_kv_counts_as_places_do() -> None:
    """Few long requests need both runners as many short ones would."""
    rules, policy = Rules(idle_s=0.0), POLICIES["latency"]

    def member(name: str, tokens: int, state: RunnerState = RunnerState.OPEN) -> Member:
        held = (Held(f"{name}.0", Needs(num_prompt_tokens=tokens)),) if tokens else ()
        free = 20 - -(-tokens // BLOCK)
        snapshot = Snapshot(
            name,
            NOW_S,
            num_running=len(held),
            num_free_kv_blocks=free,
            num_kv_blocks=20,
            is_healthy=state is not RunnerState.RELEASED,
        )
        return Member(snapshot, state, held, None if held else NOW_S)

    long = (member("r0", 10 * BLOCK), member("r1", 6 * BLOCK))
    assert decided(long, rules, policy) == Decision()
    short = (member("r0", 6 * BLOCK), member("r1", 6 * BLOCK))
    assert decided(short, rules, policy).drain == ("r1",)
    full = (member("r0", 19 * BLOCK), member("r1", 0, RunnerState.RELEASED))
    assert decided(full, rules, policy).start == ("r1",)
