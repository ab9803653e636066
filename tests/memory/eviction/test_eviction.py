"""One contract for every eviction policy, and what each of them goes by."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.config import EVICTION_POLICIES
from loraplex.errors import ConfigError
from loraplex.memory.eviction.policies import (
    GHOSTS_PER_KEY,
    HALF_LIFE_S,
    LFU,
    MIN_GHOSTS,
    POLICIES,
    EvictionPolicy,
    _Ranking,
    get_policy,
)
from tests.memory.rig import FakeClock, Rig

NBYTES = 1_000_000
CALLS = ("enter", "use", "touch", "evict", "forget")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest, clock: FakeClock) -> EvictionPolicy:
    return get_policy(request.param, clock)


def enter(policy: EvictionPolicy, *keys: str) -> None:
    """As a cold request does it: there, then used."""
    for key in keys:
        policy.enter(key, NBYTES)
        policy.use(key)


def use(policy: EvictionPolicy, *keys: str) -> None:
    for key in keys:
        policy.use(key)


# --------------------------------------------------------------------------------------------------------- the contract


def test_it_is_found_by_its_name(policy: EvictionPolicy) -> None:
    assert type(get_policy(policy.name)) is type(policy)
    assert get_policy(policy.name) is not policy
    assert policy.evicts == (policy.name != "none")


def test_the_settings_name_the_same_policies() -> None:
    assert tuple(POLICIES) == EVICTION_POLICIES


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"one of \('lru', .*'none'\), got 'random'"):
        get_policy("random")


def test_a_new_policy_is_empty(policy: EvictionPolicy) -> None:
    assert list(policy.order()) == []


def test_it_has_what_entered_until_it_leaves(policy: EvictionPolicy) -> None:
    enter(policy, "a", "b", "c", "d")
    policy.enter("a", NBYTES, 0.5)
    assert sorted(policy.order()) == ["a", "b", "c", "d"]
    policy.forget("b")
    policy.evict("d")
    policy.forget("d")
    policy.forget("unknown")
    policy.evict("unknown")
    assert sorted(policy.order()) == ["a", "c"]


def test_a_use_or_a_touch_brings_nothing_in(policy: EvictionPolicy) -> None:
    enter(policy, "a")
    use(policy, "b", "b")
    policy.touch("c")
    policy.forget("a")
    policy.use("a")
    assert list(policy.order()) == []


def test_of_those_used_once_the_first_goes_first(policy: EvictionPolicy) -> None:
    enter(policy, "a", "b", "c")
    assert list(policy.order()) == ["a", "b", "c"]


def test_a_newcomer_does_not_go_before_those_used_once(policy: EvictionPolicy) -> None:
    """It was loaded for a request: were it the next to go, two cold requests would evict each other."""
    enter(policy, "a")
    policy.enter("b", NBYTES)
    assert list(policy.order()) == ["a", "b"]


@given(
    st.sampled_from(sorted(POLICIES)),
    st.lists(
        st.tuples(
            st.sampled_from(CALLS), st.integers(0, 5), st.floats(0, 1e7), st.integers(0, 10**9), st.floats(0, 1e4)
        )
    ),
)
def test_any_calls_leave_exactly_what_is_there(name: str, calls: Sequence[tuple[str, int, float, int, float]]) -> None:
    clock, present = FakeClock(), set()
    policy = get_policy(name, clock)
    for call, number, seconds, nbytes, reload_s in calls:
        key = str(number)
        clock.now_s += seconds
        if call == "enter":
            policy.enter(key, nbytes, reload_s)
            present.add(key)
        else:
            getattr(policy, call)(key)
            present -= {key} if call in ("evict", "forget") else set()
        assert sorted(policy.order()) == sorted(present)
        assert sorted(policy.order(lambda each: each < "3")) == sorted(present)


# ---------------------------------------------------------------------------------------------------- what each goes by


def test_lru_goes_by_the_last_use_or_touch() -> None:
    policy = get_policy("lru")
    enter(policy, "a", "b", "c")
    use(policy, "a")
    policy.touch("b")
    policy.enter("c", NBYTES, 1.0)  # its cost is known now: no use
    assert list(policy.order()) == ["c", "a", "b"]


def test_fifo_goes_by_the_entry_alone() -> None:
    policy = get_policy("fifo")
    enter(policy, "a", "b", "c")
    use(policy, "a", "a", "b")
    policy.touch("a")
    assert list(policy.order()) == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["lfu", "gdsf", "cost_aware"])
def test_uses_count_and_looks_do_not(name: str, clock: FakeClock) -> None:
    policy = get_policy(name, clock)
    enter(policy, "a", "b", "c")
    use(policy, "a", "a", "b")
    for _ in range(100):
        policy.touch("c")
    assert list(policy.order()) == ["c", "b", "a"]


@pytest.mark.parametrize("name", ["lfu", "gdsf", "cost_aware"])
def test_who_returns_has_its_history(name: str, clock: FakeClock) -> None:
    policy = get_policy(name, clock)
    enter(policy, "popular", "a", "b")
    use(policy, *["popular"] * 8, "a")
    policy.forget("popular")
    policy.enter("popular", NBYTES)
    policy.enter("new", NBYTES)
    assert list(policy.order())[-1] == "popular"


@pytest.mark.parametrize("name", ["lfu", "gdsf", "cost_aware"])
def test_uses_elsewhere_count_too(name: str, clock: FakeClock) -> None:
    """A host tier that gave up its spare copy: requests run on the device's."""
    policy = get_policy(name, clock)
    use(policy, *["a"] * 5)
    enter(policy, "b", "b2")
    policy.enter("a", NBYTES)
    assert list(policy.order()) == ["b", "b2", "a"]


@pytest.mark.parametrize("name", ["gdsf", "cost_aware"])
def test_large_and_cheap_go_before_small_and_dear(name: str, clock: FakeClock) -> None:
    policy = get_policy(name, clock)
    for key, nbytes, reload_s in (("dear", NBYTES, 2.0), ("large", 8 * NBYTES, 1.0), ("plain", NBYTES, 1.0)):
        policy.enter(key, nbytes, reload_s)
        policy.use(key)
    assert list(policy.order()) == ["large", "plain", "dear"]
    policy.enter("large", 8 * NBYTES, 100.0)  # the last load was slow
    assert list(policy.order()) == ["plain", "dear", "large"]


def test_with_gdsf_what_was_valued_long_ago_falls_behind() -> None:
    policy = get_policy("gdsf")
    enter(policy, "old")
    use(policy, *["old"] * 2)
    for number in range(2):
        enter(policy, f"new{number}")
        victim = next(policy.order())
        assert victim == f"new{number}"
        policy.evict(victim)
    enter(policy, "newest")
    assert list(policy.order()) == ["old", "newest"]


def test_with_gdsf_only_a_victim_moves_the_clock() -> None:
    policy = get_policy("gdsf")
    enter(policy, "a", "popular")
    use(policy, "a", *["popular"] * 9)
    policy.forget("popular")  # dropped by name: no other needed its room
    enter(policy, "b")
    assert list(policy.order()) == ["b", "a"]


def test_with_cost_aware_uses_fade(clock: FakeClock) -> None:
    policy = get_policy("cost_aware", clock)
    enter(policy, "old", "other")
    use(policy, *["old"] * 3)
    clock.now_s = 1.9 * HALF_LIFE_S  # four uses: a bit more than one of now
    enter(policy, "new")
    assert list(policy.order()) == ["other", "new", "old"]
    clock.now_s = 2.1 * HALF_LIFE_S
    use(policy, "other")
    clock.now_s = 2.2 * HALF_LIFE_S
    enter(policy, "newer")
    assert list(policy.order()) == ["new", "old", "newer", "other"]


def test_with_cost_aware_years_do_not_overflow(clock: FakeClock) -> None:
    policy = get_policy("cost_aware", clock)
    enter(policy, "a")
    clock.now_s = 1e9
    enter(policy, "b")
    use(policy, "a")
    assert list(policy.order()) == ["b", "a"]


def test_with_cost_aware_the_queued_go_last(clock: FakeClock) -> None:
    policy = get_policy("cost_aware", clock)
    enter(policy, "a", "b", "c", "d")
    use(policy, *["c"] * 9, *["b"] * 5)
    assert list(policy.order({"a", "b"}.__contains__)) == ["d", "c", "a", "b"]


@pytest.mark.parametrize("make", [LFU, lambda: get_policy("cost_aware", FakeClock())])
def test_no_more_is_remembered_than_the_bound(make: Callable[[], _Ranking]) -> None:
    policy = make()
    for number in range(MIN_GHOSTS + 10):
        enter(policy, str(number))
        policy.forget(str(number))
    assert len(policy._ghosts) == MIN_GHOSTS
    assert "9" not in policy._ghosts
    assert "10" in policy._ghosts
    num_there = MIN_GHOSTS // GHOSTS_PER_KEY + 100
    enter(policy, *(f"there{number}" for number in range(num_there)))
    for number in range(1000):
        policy.use(f"elsewhere{number}")
    assert len(policy._ghosts) == GHOSTS_PER_KEY * num_there


# ------------------------------------------------------------------------------------------------------- in the manager


def test_a_request_is_one_use_however_often_it_asks() -> None:
    rig = Rig(num_device=3, num_host=3, policy="lfu")
    rig.add(1, 2, 3)
    for adapter_id in (1, 2, 3, 1, 3):
        rig.acquire(adapter_id)
        rig.manager.release(adapter_id)
    for _ in range(10):
        rig.manager.poll()
        rig.manager.prefetch(2)
    rig.manager.poll()
    rig.manager.poll()
    rig.add(4)
    rig.activate(4)
    assert [rig.tier_of(i) for i in (1, 2, 3)] == ["device", "source", "device"]
    rig.manager.check_integrity()


@pytest.mark.parametrize("is_separate", [False, True], ids=["one memory", "two memories"])
@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"none"}))
def test_the_manager_keeps_its_books_with_every_policy(name: str, is_separate: bool) -> None:
    rig = Rig(num_device=2, num_host=3, policy=name, is_separate=is_separate)
    for adapter_id in (1, 2, 3, 4, 1, 5, 1, 2, 5, 4, 3, 1):
        rig.clock.now_s += 30
        rig.add(adapter_id)
        rig.acquire(adapter_id)
        rig.manager.release(adapter_id)
        rig.manager.check_integrity()
    for adapter_id in range(1, 6):
        rig.manager.remove_adapter(adapter_id)
    rig.check_empty()
    rig.manager.close()


def test_what_a_load_took_is_what_its_eviction_costs() -> None:
    """The slow source's adapter stays, though it is used no more than the other."""
    rig = Rig(num_device=2, num_host=2, policy="cost_aware")
    opened = rig.source.open

    def slow(spec):
        rig.clock.now_s += 5 if spec.adapter_id == 1 else 0.01
        return opened(spec)

    rig.manager._open_weights = slow
    rig.add(1, 2)
    assert [weights.reload_s for weights in rig.manager._residency.weights.values()] == pytest.approx([5, 0.01])
    rig.add(3)
    assert [rig.tier_of(i) for i in (1, 2, 3)] == ["host", "source", "host"]


def test_the_queued_are_spared_when_somebody_else_needs_room() -> None:
    rig = Rig(num_device=1, num_host=2, policy="cost_aware")
    rig.add(1, 2)
    rig.manager.poll()
    rig.manager.prefetch(1)
    rig.add(3)
    assert [rig.tier_of(i) for i in (1, 2, 3)] == ["host", "source", "host"]
    rig.manager.poll()
    rig.manager.poll()  # no request asks any more
    rig.add(4)
    assert [rig.tier_of(i) for i in (1, 3, 4)] == ["source", "host", "host"]
