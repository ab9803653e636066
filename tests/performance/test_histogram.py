"""Quantiles of a histogram against those of the numbers themselves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.performance.histogram import GROWTH, Histogram, Quantiles

durations = st.lists(st.floats(2e-6, 1e4), min_size=1, max_size=60)


def histogram_of(values: list[float]) -> Histogram:
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    return histogram


@given(durations, st.floats(0.01, 1.0))
def test_a_quantile_is_off_by_at_most_half_a_bucket(values: list[float], share: float) -> None:
    true = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    assert histogram_of(values).quantile(share) == pytest.approx(true, rel=GROWTH**0.5 - 1 + 1e-6)


@given(durations, durations)
def test_adding_is_observing_all(left: list[float], right: list[float]) -> None:
    both, added = histogram_of(left + right), histogram_of(left)
    added.add(histogram_of(right))
    assert (added.counts, added.count, added.min_s, added.max_s) == (both.counts, both.count, both.min_s, both.max_s)
    assert added.total_s == pytest.approx(both.total_s)


def test_nothing_observed() -> None:
    assert Histogram().quantiles() == Quantiles()
    empty = Histogram()
    empty.add(Histogram())
    assert empty == Histogram()


def test_one_observed_many_times() -> None:
    histogram = Histogram()
    histogram.observe(0.5, times=10)
    quantiles = histogram.quantiles()
    assert quantiles == Quantiles(10, 0.5, 0.5, 0.5, 0.5, 0.5)


def test_what_is_shorter_than_the_least_is_counted() -> None:
    histogram = histogram_of([0.0, -1e-9, 1e-7])
    assert histogram.count == 3
    assert histogram.quantile(0.99) == 1e-7
