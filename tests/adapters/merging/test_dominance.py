"""Which adapter dominates is a function of the steps and their times alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.merging.dominance import GAIN, MAX_STEP_S, Dominance, DominanceRule

RULE = DominanceRule(window=10)


def after(*runs: tuple[str, int], step_s: float = 0.1) -> Dominance:
    """Steps of one content after the other."""
    dominance, now_s = Dominance(RULE), 0.0
    for content, num_steps in runs:
        for _ in range(num_steps):
            now_s += step_s
            dominance.saw(content, now_s)
    return dominance


@pytest.mark.parametrize(
    ("runs", "dominant"),
    [
        ([("a", 9)], ""),  # the window is not full
        ([("a", 10)], "a"),
        ([("", 1), ("a", 9)], "a"),
        ([("", 2), ("a", 8)], ""),
        ([("", 20)], ""),  # the base, or several adapters at a time, are no content
        ([("a", 10), ("", 5)], "a"),  # what dominated stays until its share is below a half
        ([("a", 10), ("", 6)], ""),
        ([("a", 10), ("b", 5)], "a"),
        ([("a", 10), ("b", 9)], "b"),
        ([("a", 10), ("b", 5), ("a", 5)], "a"),
    ],
)
def test_enough_steps_alone(runs: Sequence[tuple[str, int]], dominant: str) -> None:
    assert after(*runs).dominant == dominant


def test_the_time_is_that_of_steps_since_it_dominates() -> None:
    assert after(("a", 10)).dominant_s == 0
    assert after(("a", 15)).dominant_s == pytest.approx(0.5)
    assert after(("a", 15), ("", 5), ("a", 5)).dominant_s == pytest.approx(1.5)
    assert after(("a", 15), ("", 6), ("a", 10)).dominant_s == pytest.approx(0.1), "it began again at a share of 0.9"
    assert after(("a", 11), step_s=1000).dominant_s == MAX_STEP_S, "a night without requests is no traffic"


def test_what_was_dominant_has_left_at_a_small_share() -> None:
    assert not after(("a", 10), ("", 8)).has_left("a")
    assert after(("a", 10), ("", 9)).has_left("a")
    assert not after(("", 3)).has_left("a"), "nothing is known yet"


def test_a_large_copy_takes_longer_traffic() -> None:
    rule = DominanceRule(bytes_per_s=100.0)
    assert rule.needed_s(500) == pytest.approx(5 / GAIN)
    assert rule.needed_s(0) == 0


@given(st.lists(st.sampled_from(["", "a", "b"]), max_size=80))
def test_it_does_not_flap(contents: list[str]) -> None:
    """Two contents never dominate at once, and a change of the dominant one takes four tenths of a window at least."""
    dominance, last_change, seen = Dominance(RULE), -RULE.window, ""
    for index, content in enumerate(contents):
        dominance.saw(content, float(index))
        shares = {each: contents[max(0, index - 9) : index + 1].count(each) / 10 for each in ("a", "b")}
        assert all(dominance.share(each) == pytest.approx(share) for each, share in shares.items())
        if dominance.dominant:
            assert shares[dominance.dominant] >= RULE.keep
        if dominance.dominant != seen:
            assert index - last_change >= 4
            last_change, seen = index, dominance.dominant
