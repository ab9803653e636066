"""One contract for all policies of placement, and what each alone promises."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.core import Tier
from loraplex.routing import POLICIES, Needs, Policy, Snapshot, place
from loraplex.routing.policies import MAX_AGE_S

NOW_S = 100.0
ADAPTERS = ("sql", "chat", "code")
DIGESTS = (b"a", b"b", b"c")
EVERY_POLICY = pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))


def snapshots_of(name: str) -> st.SearchStrategy[Snapshot]:
    return st.builds(
        Snapshot,
        name=st.just(name),
        seen_s=st.sampled_from([NOW_S, NOW_S - 1, NOW_S - MAX_AGE_S - 1]),
        num_waiting=st.integers(0, 3),
        num_running=st.integers(0, 4),
        max_requests=st.integers(1, 6),
        num_free_kv_blocks=st.none() | st.integers(0, 20),
        tiers=st.dictionaries(st.sampled_from(ADAPTERS), st.sampled_from(Tier)),
        prefix_digests=st.frozensets(st.sampled_from(DIGESTS)),
        ranks=st.integers(0, 4096),
        num_by_tenant=st.dictionaries(st.sampled_from(["x", "y"]), st.integers(0, 3)),
        adapter_room=st.floats(0, 1),
        is_healthy=st.integers(0, 4).map(bool),
        is_draining=st.integers(0, 4).map(lambda number: number == 0),
    )


FLEETS = st.integers(1, 6).flatmap(lambda num: st.tuples(*(snapshots_of(f"r{index}") for index in range(num))))
NEEDS = st.builds(
    Needs,
    adapter=st.none() | st.sampled_from(ADAPTERS),
    num_prompt_tokens=st.integers(0, 400),
    prefix_digests=st.sampled_from([(), DIGESTS[:1], DIGESTS]),
    rank=st.sampled_from([0, 8, 64]),
    tenant=st.none() | st.sampled_from(["x", "y"]),
)


def is_fresh(runner: Snapshot) -> bool:
    return NOW_S - runner.seen_s <= MAX_AGE_S


@EVERY_POLICY
@settings(deadline=None)
@given(fleet=FLEETS, needs=NEEDS, seed=st.integers(0, 100))
def test_the_order_of_the_snapshots_decides_nothing(
    policy: Policy, fleet: tuple[Snapshot, ...], needs: Needs, seed: int
) -> None:
    shuffled = random.Random(seed).sample(fleet, len(fleet))
    assert place(needs, fleet, policy, NOW_S) == place(needs, shuffled, policy, NOW_S)


@EVERY_POLICY
@settings(deadline=None)
@given(fleet=FLEETS, needs=NEEDS)
def test_one_that_fits_is_chosen_before_any_other(policy: Policy, fleet: tuple[Snapshot, ...], needs: Needs) -> None:
    """Never an unhealthy, draining, full or forgotten one while another fits; and none waits while one fits."""
    chosen = place(needs, fleet, policy, NOW_S)
    by_name = {runner.name: runner for runner in fleet}
    if any(runner.fits(needs) and is_fresh(runner) for runner in fleet):
        assert chosen is not None
        assert by_name[chosen].fits(needs)
        assert is_fresh(by_name[chosen])
    if any(runner.is_open for runner in fleet):
        assert chosen is not None
        assert by_name[chosen].is_open
    else:
        assert chosen is None


@EVERY_POLICY
@settings(deadline=None)
@given(
    runner=snapshots_of("r0"),
    needs=NEEDS,
    tiers=st.lists(st.sampled_from(Tier), min_size=2, max_size=5),
)
def test_at_equal_load_the_nearest_weights_win(
    policy: Policy, runner: Snapshot, needs: Needs, tiers: list[Tier]
) -> None:
    needs = replace(needs, adapter="sql")
    opened = replace(runner, is_healthy=True, is_draining=False, seen_s=NOW_S)
    fleet = [replace(opened, name=f"r{index}", tiers={"sql": tier}) for index, tier in enumerate(tiers)]
    nearest = min(range(len(tiers)), key=lambda index: (list(Tier).index(tiers[index]), index))
    assert place(needs, fleet, policy, NOW_S) == f"r{nearest}"


@EVERY_POLICY
@settings(deadline=None)
@given(runner=snapshots_of("r0"), needs=NEEDS)
def test_at_equal_load_the_longest_cached_prefix_wins(policy: Policy, runner: Snapshot, needs: Needs) -> None:
    needs = replace(needs, prefix_digests=DIGESTS)
    opened = replace(runner, is_healthy=True, is_draining=False, seen_s=NOW_S, num_free_kv_blocks=None)
    known = (frozenset(), frozenset(DIGESTS[1:]), frozenset(DIGESTS[:2]))
    fleet = [replace(opened, name=f"r{index}", prefix_digests=each) for index, each in enumerate(known)]
    assert place(needs, fleet, policy, NOW_S) == "r2"


@EVERY_POLICY
def test_between_equals_the_tenants_fewest_then_the_name(policy: Policy) -> None:
    busy, quiet = {"x": 2}, {"x": 1}
    fleet = [Snapshot("a", NOW_S, num_by_tenant=busy), Snapshot("c", NOW_S, num_by_tenant=quiet)]
    fleet.append(Snapshot("b", NOW_S, num_by_tenant=quiet))
    assert place(Needs(tenant="x"), fleet, policy, NOW_S) == "b"
    assert place(Needs(), fleet, policy, NOW_S) == "a"


@EVERY_POLICY
def test_a_prompt_that_its_free_kv_cannot_hold_goes_elsewhere(policy: Policy) -> None:
    small = Snapshot("a", NOW_S, num_free_kv_blocks=2, kv_block_tokens=16)
    large = replace(small, name="b", num_free_kv_blocks=3)
    assert place(Needs(num_prompt_tokens=32), [small, large], policy, NOW_S) == "a"
    assert place(Needs(num_prompt_tokens=33), [small, large], policy, NOW_S) == "b"


@EVERY_POLICY
@settings(deadline=None)
@given(num_requests=st.integers(1, 40), max_requests=st.integers(1, 8))
def test_all_runners_work_when_there_is_more_than_they_hold(
    policy: Policy, num_requests: int, max_requests: int
) -> None:
    loads = placed(policy, num_requests, num_runners=3, max_requests=max_requests)
    assert sum(loads) == num_requests
    if num_requests >= 3 * max_requests:
        assert min(loads) >= max_requests
        assert max(loads) - min(loads) <= 1, "what waits is shared"


@settings(deadline=None)
@given(num_requests=st.integers(1, 40), max_requests=st.integers(1, 8))
def test_pack_uses_the_fewest_and_spread_levels(num_requests: int, max_requests: int) -> None:
    num_runners = 40
    packed = placed(POLICIES["pack"], num_requests, num_runners, max_requests)
    assert sum(load > 0 for load in packed) == -(-num_requests // max_requests)
    levelled = placed(POLICIES["spread"], num_requests, num_runners, max_requests)
    assert max(levelled) - min(levelled) <= 1


def placed(policy: Policy, num_requests: int, num_runners: int, max_requests: int) -> list[int]:
    """How many requests each runner has, when they come one after the other."""
    loads = {f"r{index:02}": 0 for index in range(num_runners)}
    for _ in range(num_requests):
        fleet = [Snapshot(name, NOW_S, num_running=load, max_requests=max_requests) for name, load in loads.items()]
        chosen = place(Needs(), fleet, policy, NOW_S)
        assert chosen is not None
        loads[chosen] += 1
    return list(loads.values())


def test_latency_leaves_the_resident_runner_when_its_queue_costs_more_than_a_load() -> None:
    policy = POLICIES["latency"]
    resident = Snapshot("a", NOW_S, tiers={"sql": Tier.DEVICE}, num_waiting=1)
    other = Snapshot("b", NOW_S)
    assert place(Needs("sql"), [resident, other], policy, NOW_S) == "a"
    assert place(Needs("sql"), [replace(resident, num_waiting=9), other], policy, NOW_S) == "b"


def test_latency_counts_the_ranks_of_what_runs() -> None:
    dear = Snapshot("a", NOW_S, num_running=4, ranks=4 * 512)
    cheap = Snapshot("b", NOW_S, num_running=5, ranks=5 * 8)
    assert place(Needs(rank=8), [dear, cheap], POLICIES["latency"], NOW_S) == "b"
    assert place(Needs(rank=8), [replace(dear, ranks=4 * 8), cheap], POLICIES["latency"], NOW_S) == "a"
    assert place(Needs(rank=8), [dear, cheap], POLICIES["spread"], NOW_S) == "a"
