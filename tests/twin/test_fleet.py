"""The shortcut of a fleet is none: the shortlist gives what placement over all replicas gives. And a fleet's books."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.core import Tier
from loraplex.errors import ConfigError
from loraplex.routing import POLICIES, Needs, place
from loraplex.twin.fleet import Fleet
from loraplex.twin.settings import FleetSettings, TwinSettings
from loraplex.twin.workload import Workload
from tests.twin.parts import ADAPTER_BYTES, MIB, calibration

RANK = 16


def fleet_of(workload: Workload, replicas: int = 6, room: int = 4, warm_up: float = 0.0, **changes: object) -> Fleet:
    own = TwinSettings(adapter_memory_bytes=room * ADAPTER_BYTES, **{"max_num_seqs": 3, **changes})  # type: ignore[arg-type]
    return Fleet(calibration(), workload, own, FleetSettings(replicas=replicas, warm_up=warm_up))


class Checked(Fleet):
    """Places each request over all replicas too, and looks at the books."""

    num_checked = 0

    def placed(self, needs: Needs, now_s: float) -> str:
        found = super().placed(needs, now_s)
        every = [each.snapshot(now_s) for each in self.replicas]
        assert found == place(needs, every, self._policy, now_s)
        self.num_checked += 1
        for each in self.replicas:
            assert each.used_bytes == sum(each.nbytes.values()) <= each._size.adapter_bytes
            assert each.tiers == dict.fromkeys(each.nbytes, Tier.DEVICE)
            assert set(each.policy.order()) == each.nbytes.keys()
            assert each.running.keys() <= each.nbytes.keys()
        held = {(key, name) for key, names in self.shortlist.holders.items() for name in names}
        assert held == {(key, each.name) for each in self.replicas for key in each.nbytes}
        return found


@settings(deadline=None, max_examples=40)
@given(
    placement=st.sampled_from(list(POLICIES)),
    policy=st.sampled_from(["lru", "lfu", "gdsf", "cost_aware"]),
    replicas=st.integers(1, 7),
    room=st.integers(1, 4),
    rate=st.floats(5, 400),
    start=st.sampled_from(["loaded", "cold"]),
    seed=st.integers(0, 99),
)
def test_the_shortlist_places_as_all_replicas_would(
    placement: str, policy: str, replicas: int, room: int, rate: float, start: str, seed: int
) -> None:
    workload = Workload(
        adapters=20, rate=rate, requests=120, prompt_tokens="4-64", output_tokens="1-20", base_share=0.1, seed=seed
    )
    own = TwinSettings(
        adapter_memory_bytes=room * ADAPTER_BYTES, max_num_seqs=3, placement=placement, eviction_policy=policy,
        start=start,
    )  # fmt: skip
    fleet = Checked(calibration(), workload, own, FleetSettings(replicas=replicas, warm_up=0.0))
    result = fleet.run()
    assert fleet.num_checked == result.num_requests == 120
    assert result.num_failed == 0
    assert result.hits + result.misses == int((fleet.arrivals.adapters >= 0).sum())
    assert not any(each.num_running or each.waiting or each.running for each in fleet.replicas)


def test_a_warm_fleet_holds_the_popular_ones() -> None:
    """Four places on each of three replicas: the twelve most popular, dealt out so that their shares are level."""
    fleet = fleet_of(Workload(adapters=30, requests=1, rate=1), replicas=3)
    assert {key for each in fleet.replicas for key in each.nbytes} == {str(number) for number in range(12)}
    shares = fleet._workload.popularity()
    loads = [sum(shares[int(key)] for key in each.nbytes) for each in fleet.replicas]
    assert max(loads) < 1.5 * min(loads)
    assert not any(each.nbytes for each in fleet_of(Workload(adapters=30, requests=1), start="cold").replicas)


def test_a_hot_adapter_is_at_several_replicas_once_it_is_too_much_for_one() -> None:
    workload = Workload(adapters=20, zipf=3.0, rate=200, requests=600, prompt_tokens="8", output_tokens="32")
    fleet = fleet_of(workload)
    result = fleet.run()
    assert sum("0" in each.nbytes for each in fleet.replicas) > 1
    assert result.hit_rate > 0.9
    assert result.max_load < 1.5


def test_the_first_requests_are_not_counted() -> None:
    workload = Workload(adapters=12, requests=400, rate=20, output_tokens="4")
    whole, later = fleet_of(workload, start="cold").run(), fleet_of(workload, start="cold", warm_up=0.5).run()
    assert (whole.num_requests, later.num_requests) == (400, 200)
    assert later.misses < whole.misses
    assert later.hits + later.misses == 200
    assert later.inter_token_s is None


def test_times_are_those_of_the_step_model() -> None:
    """A request alone, warm: a step of 10 ms and 0.1 ms a token for its prompt, then a step for each token."""
    result = fleet_of(Workload(adapters=1, requests=1, rate=1, prompt_tokens="16", output_tokens="5")).run()
    assert result.first_token_s.p50 == pytest.approx(0.010 + 0.0001 * 16)
    assert result.end_to_end_s.p50 == pytest.approx(0.0116 + 4 * 0.0101)


def test_what_a_fleet_has_not() -> None:
    with pytest.raises(ConfigError, match="shared_prefix_tokens is of --runners"):
        fleet_of(Workload(shared_prefix_tokens=8))
    with pytest.raises(ConfigError, match="hold no adapter of 1280000 bytes"):
        Fleet(calibration(), Workload(), TwinSettings(adapter_memory_bytes=MIB), FleetSettings(replicas=1))
    with pytest.raises(ConfigError, match=r"replicas must be 0\.\.10000"):
        FleetSettings(replicas=-1)
    with pytest.raises(ConfigError, match="warm_up must be >= 0 and < 1"):
        FleetSettings(warm_up=1.0)
    assert replace(FleetSettings(), replicas=2).replicas == 2
