"""The circuit breaker's transitions, with times that the test says."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.routing import Breaker, BreakerState


def closed() -> Breaker:
    breaker = Breaker(num_failures=3, pause_s=1.0, max_pause_s=4.0)
    breaker.succeed()
    return breaker


def test_it_begins_half_open_and_a_probe_closes_it() -> None:
    breaker = Breaker()
    assert not breaker.is_closed
    assert breaker.may_probe(0.0)
    breaker.succeed()
    assert breaker.is_closed


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not_count() -> None:
    breaker = closed()
    breaker.fail(0.0)
    breaker.fail(0.0)
    breaker.succeed()
    breaker.fail(0.0)
    breaker.fail(0.0)
    assert breaker.is_closed
    breaker.fail(0.0)
    assert breaker.state is BreakerState.OPEN


def test_the_pause_doubles_with_each_failed_probe_and_is_bounded() -> None:
    breaker, now_s = closed(), 0.0
    for _ in range(3):
        breaker.fail(now_s)
    for pause_s in (1.0, 2.0, 4.0, 4.0):
        assert not breaker.may_probe(now_s + pause_s - 0.01)
        now_s += pause_s
        assert breaker.may_probe(now_s)
        assert breaker.state is BreakerState.HALF_OPEN
        breaker.fail(now_s)
    now_s += 4.0
    assert breaker.may_probe(now_s)
    breaker.succeed()
    for _ in range(3):
        breaker.fail(now_s)
    assert breaker.may_probe(now_s + 1.0), "after a success pauses begin short"


def test_failures_of_requests_while_it_is_open_do_not_make_the_pause_longer() -> None:
    breaker = closed()
    for _ in range(50):
        breaker.fail(0.0)
    assert breaker.may_probe(1.0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["fail", "succeed", "probe"]), st.floats(0, 3)), max_size=60))
def test_it_is_never_open_for_longer_than_its_longest_pause(steps: list[tuple[str, float]]) -> None:
    breaker, now_s = closed(), 0.0
    for what, after_s in steps:
        now_s += after_s
        if what == "fail":
            breaker.fail(now_s)
        elif what == "succeed":
            breaker.succeed()
        else:
            breaker.may_probe(now_s)
        assert breaker.is_closed is (breaker.state is BreakerState.CLOSED)
    assert breaker.may_probe(now_s + 4.0)
