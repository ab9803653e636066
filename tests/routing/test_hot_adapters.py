"""Copies of adapters that one runner has too many requests for: made where there is room, and taken back later."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.core import Tier
from loraplex.routing import POLICIES, Copies, Copy, HotAdapters, HotRules, Needs, Policy, Snapshot, place

NOW_S, PLACES = 100.0, 8
NOTHING = Copies()
SQL = {"sql": Tier.DEVICE}


def runner(
    name: str, requests: Mapping[str, int] | None = None, tiers: Mapping[str, Tier] | None = None, **fields: object
) -> Snapshot:
    requests = requests or {}
    return Snapshot(
        name,
        NOW_S,
        num_running=sum(requests.values()),
        max_requests=PLACES,
        tiers=tiers or {},
        num_by_adapter=requests,
        **fields,  # type: ignore[arg-type]
    )


def test_a_queue_on_one_runner_makes_the_adapter_resident_on_another() -> None:
    hot = HotAdapters()
    assert hot.decide([runner("a", {"sql": 4}, SQL), runner("b")], NOW_S) == NOTHING
    fleet = [runner("a", {"sql": 5}, SQL), runner("b")]
    assert hot.decide(fleet, NOW_S) == Copies(make=(Copy("sql", "b"),))
    assert hot.decide(fleet, NOW_S) == NOTHING, "it is on its way"


def test_it_goes_where_it_is_nearest_then_where_there_is_most_room() -> None:
    source = runner("a", {"sql": 8}, SQL)
    near = runner("d", tiers={"sql": Tier.HOST}, adapter_room=0.2)
    nearer = runner("c", tiers={"sql": Tier.HOST}, adapter_room=0.4)
    fleet = [source, runner("b", adapter_room=0.9), nearer, near]
    assert HotAdapters().decide(fleet, NOW_S).make == (Copy("sql", "c"),)
    full = [source, runner("b", tiers={"sql": Tier.HOST}, adapter_room=0.05)]
    assert HotAdapters().decide(full, NOW_S) == NOTHING


def test_as_many_copies_as_its_requests_need_one_at_a_time() -> None:
    hot = HotAdapters()
    fleet = [runner("a", {"sql": 11}, SQL), runner("b"), runner("c"), runner("d")]
    assert [hot.decide(fleet, NOW_S).make for _ in range(3)] == [(Copy("sql", "b"),), (Copy("sql", "c"),), ()]


def test_a_copy_is_taken_back_when_it_was_not_needed_for_a_while() -> None:
    hot = HotAdapters(HotRules(hold_s=10))
    hot.decide([runner("a", {"sql": 8}, SQL), runner("b")], NOW_S)
    quiet = [runner("a", {"sql": 1}, SQL), runner("b", tiers=SQL)]
    assert hot.decide(quiet, NOW_S + 9) == NOTHING
    again = [runner("a", {"sql": 5}, SQL), runner("b", tiers=SQL)]
    assert hot.decide(again, NOW_S + 9.5) == NOTHING
    assert hot.decide(quiet, NOW_S + 19) == NOTHING, "needed at 9.5"
    in_use = [runner("a", {"sql": 1}, SQL), runner("b", {"sql": 1}, tiers=SQL)]
    assert hot.decide(in_use, NOW_S + 30) == NOTHING
    assert hot.decide(quiet, NOW_S + 39) == NOTHING
    assert hot.decide(quiet, NOW_S + 40) == Copies(take_back=(Copy("sql", "b"),))
    assert hot.decide(quiet, NOW_S + 90) == NOTHING


def test_what_was_resident_before_is_not_taken_back() -> None:
    hot = HotAdapters(HotRules(hold_s=0))
    assert hot.decide([runner("a", {"sql": 8}, SQL), runner("b", tiers=SQL)], NOW_S) == NOTHING
    assert hot.decide([runner("a", tiers=SQL), runner("b", tiers=SQL)], NOW_S + 99) == NOTHING


def test_a_copy_of_a_runner_that_ended_or_drains_is_forgotten() -> None:
    hot, fleet = HotAdapters(HotRules(hold_s=0)), [runner("a", {"sql": 8}, SQL), runner("b")]
    copy = Copy("sql", "b")
    assert hot.decide(fleet, NOW_S).make == (copy,)
    assert hot.decide([fleet[0], runner("b", is_healthy=False)], NOW_S) == NOTHING
    assert hot.decide(fleet, NOW_S).make == (copy,)
    assert hot.decide([fleet[0], runner("b", is_draining=True)], NOW_S) == NOTHING
    assert hot.decide(fleet, NOW_S).make == (copy,)


@settings(deadline=None)
@given(
    requests=st.lists(st.dictionaries(st.sampled_from(["sql", "chat"]), st.integers(1, 12)), min_size=1, max_size=4),
    rooms=st.lists(st.floats(0, 1), min_size=4, max_size=4),
)
def test_copies_are_few_and_new_and_a_steady_load_keeps_them(
    requests: list[dict[str, int]], rooms: list[float]
) -> None:
    def fleet(copies: set[Copy]) -> list[Snapshot]:
        return [
            runner(
                f"r{number}",
                each,
                {name: Tier.DEVICE for name in ("sql", "chat") if name in each or Copy(name, f"r{number}") in copies},
                adapter_room=rooms[number],
            )
            for number, each in enumerate(requests)
        ]

    hot, made = HotAdapters(HotRules(hold_s=5)), set[Copy]()
    for tick in range(40):
        decided = hot.decide(fleet(made), NOW_S + tick)
        assert not decided.take_back, "the load is the same"
        for copy in decided.make:
            number = int(copy.runner[1:])
            assert copy not in made
            assert copy.adapter not in requests[number]
            assert rooms[number] >= HotRules().min_room
            made.add(copy)
        assert tick < 8 or not decided.make
    for name in ("sql", "chat"):
        total = sum(each.get(name, 0) for each in requests)
        having = {number for number, each in enumerate(requests) if name in each}
        having |= {int(copy.runner[1:]) for copy in made if copy.adapter == name}
        if any(copy.adapter == name for copy in made):
            assert len(having) <= -(-total // (PLACES // 2))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))
def test_a_newly_loaded_adapter_goes_where_there_is_most_room_at_its_tier(policy: Policy) -> None:
    loaded = {"new": Tier.HOST}
    fleet = [runner("a", tiers=loaded, adapter_room=0.3), runner("b", tiers=loaded, adapter_room=0.6)]
    assert place(Needs("new"), fleet, policy, NOW_S) == "b"
    assert place(Needs("new"), [*fleet, runner("c", adapter_room=1.0)], policy, NOW_S) == "b", "where its weights are"
