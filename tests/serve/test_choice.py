"""Which replica a front chooses, from the figures of replicas and its own requests."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from loraplex.core import Tier
from loraplex.routing import POLICIES, Needs
from loraplex.serve.choice import MAX_ADAPTERS, Choice, Figures


def figures(**values: Any) -> dict[str, Any]:
    return asdict(Figures(**{"number": 1, **values}))


def choice(policy: str = "spread", **replicas: dict[str, Any]) -> Choice:
    made = Choice(policy, 4, lambda: 0.0)
    made.see(replicas)
    return made


def test_weights_that_a_replica_has_decide_between_equal_queues() -> None:
    made = choice(a=figures(), b=figures(tiers={"sql": "device"}), c=figures(tiers={"sql": "host"}))
    assert made.order(Needs("sql"), ("a", "b", "c")) == ["b", "c", "a"]
    assert made.order(Needs("chat"), ("a", "b", "c")) == ["a", "b", "c"]


def test_what_left_a_replicas_memory_is_not_looked_for_there() -> None:
    """Where no disk tier is, figures name it no more."""
    made = choice(a=figures(tiers={"chat": "device"}), b=figures(tiers={"sql": "device"}))
    assert made.order(Needs("sql"), ("a", "b")) == ["b", "a"]
    made.see({"a": figures(number=2), "b": figures(number=2, tiers={"chat": "device"})})
    assert made.order(Needs("sql"), ("a", "b")) == ["a", "b"]
    assert made.order(Needs("chat"), ("a", "b")) == ["b", "a"]


def test_what_was_sent_since_the_last_figures_is_there() -> None:
    made = choice(a=figures(), b=figures())
    made.begin("b", "1", Needs("sql"))
    made.end("b", "1")
    made.see({"a": figures(number=2), "b": figures(number=2)})
    assert made.order(Needs("sql"), ("a", "b")) == ["b", "a"], "these may be older than the request"
    made.see({"a": figures(number=3), "b": figures(number=3)})
    assert made.order(Needs("sql"), ("a", "b")) == ["a", "b"]


def test_a_replica_without_a_place_for_a_request_has_no_weights_of_it() -> None:
    made = choice(a=figures(), b=figures(tiers={"chat": "device"}))
    made.begin("a", "1", Needs("sql"))
    made.begin("b", "1", Needs("sql"))
    made.begin("b", "2", Needs("chat"))
    made.begin("a", "2", Needs("chat"))
    for request_id in "12":
        made.end("a", request_id)
        made.end("b", request_id)
    assert made.order(Needs("sql"), ("a", "b")) == ["b", "a"]
    assert made.order(Needs("chat"), ("a", "b")) == ["a", "b"], "both have it"


def test_a_replica_with_more_on_its_device_than_it_names_keeps_what_is_known() -> None:
    made = choice(a=figures(), b=figures(tiers={"sql": "device"}))
    many = {str(number): "device" for number in range(MAX_ADAPTERS)}
    made.see({"b": figures(number=2, tiers=many), "a": figures(number=2)})
    assert made.order(Needs("sql"), ("a", "b")) == ["b", "a"]


def test_what_it_sent_counts_at_once_and_that_of_others_with_the_next_figures() -> None:
    made = choice(a=figures(), b=figures())
    made.begin("a", "1", Needs())
    assert made.order(Needs(), ("a", "b"))[0] == "b"
    made.see({"a": figures(number=2, num_by_front={"me": 1}), "b": figures(number=2, num_by_front={"other": 2})})
    assert made.order(Needs(), ("a", "b"), "me")[0] == "a", "that of a is this front's own, which is counted once"
    made.see({"a": figures(number=3, num_by_front={"me": 5}), "b": figures(number=3, num_by_front={"me": 5})})
    made.end("a", "1")
    made.begin("b", "2", Needs())
    assert made.order(Needs(), ("a", "b"), "me") == ["a", "b"], "its own have ended since"


def test_a_prompts_beginning_is_looked_for_where_it_was_sent() -> None:
    made = choice("latency", a=figures(), b=figures())
    needs = Needs(num_prompt_tokens=128, prefix_digests=(b"1",))
    made.begin("b", "1", needs)
    made.end("b", "1")
    assert made.order(needs, ("a", "b")) == ["b", "a"]


def test_one_whose_engine_is_being_restarted_comes_last_and_a_new_one_counts() -> None:
    made = choice(a=figures(is_healthy=False), b=figures(num_by_front={"other": 3}))
    assert made.order(Needs(), ("a", "b")) == ["b", "a"]
    made.see({"a": figures(is_healthy=False), "b": figures(num_by_front={"other": 3}), "new": {}})
    assert made.order(Needs(), ("a", "b", "new")) == ["new", "b", "a"]


def test_a_replica_that_is_gone_is_forgotten_with_what_it_had() -> None:
    made = choice(a=figures(tiers={"sql": "device"}), b=figures())
    made.begin("a", "1", Needs("chat"))
    made.see({"b": figures()})
    made.end("a", "1")
    assert made.order(Needs("sql"), ("a", "b")) == ["b"]
    made.see({"a": {}, "b": figures()})
    assert made.order(Needs("chat", tenant="me"), ("a", "b"))[0] == "a", "its name has no requests, and no weights"


def test_a_request_is_in_one_place() -> None:
    """It is counted where it is to go, and moves where that replica has no place."""
    made = choice(a=figures(), b=figures())
    made.begin("a", "1", Needs())
    made.begin("b", "1", Needs())
    made.end("a", "1")
    assert made.order(Needs(), ("a", "b")) == ["a", "b"]
    made.end("b", "1")
    made.begin("a", "2", Needs())
    assert made.order(Needs(), ("a", "b")) == ["b", "a"]


events = st.lists(
    st.tuples(
        st.sampled_from(["begin", "end", "see"]),
        st.sampled_from("abc"),
        st.integers(0, 9),
        st.sampled_from([None, "t", "u"]),
        st.sampled_from([None, "sql", "chat"]),
    ),
    max_size=60,
)


@given(st.sampled_from(list(POLICIES)), events)
def test_all_replicas_are_ordered_and_requests_are_counted_once(policy: str, events: list[Any]) -> None:
    made = choice(policy, a=figures(), b=figures(), c=figures())
    there: set[tuple[str, int]] = set()
    for number, (event, name, request, tenant, adapter) in enumerate(events):
        if event == "begin":
            made.begin(name, str(request), Needs(adapter, tenant=tenant))
            there = {each for each in there if each[1] != request} | {(name, request)}
        elif event == "end":
            made.end(name, str(request))
            there.discard((name, request))
        else:
            tiers = {} if adapter is None else {adapter: Tier.HOST.value}
            made.see({each: figures(number=number + 2, tiers=tiers) for each in "abc"})
        assert sorted(made.order(Needs(adapter, tenant=tenant), "abc")) == ["a", "b", "c"]
    counts = {each: sum(name == each for name, _ in there) for each in "abc"}
    made.see({each: figures(number=10**6) for each in "abc"})
    if policy == "spread":
        assert [counts[each] for each in made.order(Needs(), "abc")] == sorted(counts.values())
    for name, request in there:
        made.end(name, str(request))
    if policy == "spread":
        assert made.order(Needs(tenant="none"), "abc") == ["a", "b", "c"]
