"""The policy of limits, without a server: what a bucket lets through at most, and when it does again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.errors import InvalidRequestError, TenantLimitError
from loraplex.tenants.limits import Bucket, Limits, TenantMeter

STEPS = st.lists(st.tuples(st.floats(0, 30), st.integers(1, 200)), min_size=1, max_size=60)


@given(steps=STEPS, rate=st.floats(0.1, 50))
def test_requests_of_any_interval_stay_within_the_bucket(steps: list[tuple[float, int]], rate: float) -> None:
    meter = TenantMeter(Limits(requests_per_s=rate), 0.0)
    now_s, admitted, refused = 0.0, [], []
    for pause_s, _ in steps:
        now_s += pause_s
        try:
            meter.admit(1, 1, now_s)
        except TenantLimitError as error:
            refused.append(error)
        else:
            admitted.append(now_s)
    assert all(each.limit == "requests_per_s" and each.retry_after_s > 0 for each in refused)
    for index, begin in enumerate(admitted):
        for number, end in enumerate(admitted[index:], 1):
            assert number <= max(1.0, rate) + rate * (end - begin) + 1e-6


@given(steps=STEPS, minute=st.integers(1, 5000))
def test_tokens_are_bounded_and_a_debt_is_paid_back(steps: list[tuple[float, int]], minute: int) -> None:
    """A prompt that is longer than the bucket is admitted when it is full, once."""
    meter = TenantMeter(Limits(tokens_per_minute=minute), 0.0)
    now_s, used, longest = 0.0, 0, 0
    for pause_s, num_tokens in steps:
        now_s += pause_s
        try:
            meter.admit(num_tokens, 1, now_s)
        except TenantLimitError as error:
            later = TenantMeter(Limits(tokens_per_minute=minute), 0.0)
            assert later.num_running == 0
            meter.admit(num_tokens, 1, now_s + error.retry_after_s + 1e-6)  # it says when to come again
            now_s += error.retry_after_s + 1e-6
        used += num_tokens
        longest = max(longest, num_tokens)
        assert used <= minute + minute / 60 * now_s + longest + 1e-3


@given(st.integers(1, 1000), st.floats(0, 100), st.floats(0, 1000), st.floats(-50, 50))
def test_a_bucket_is_never_fuller_than_full(capacity: int, rate: float, amount: float, seconds: float) -> None:
    bucket = Bucket.full(capacity, rate, 100.0)
    bucket.level -= amount
    before = bucket.level
    bucket.fill(100.0 + seconds)
    assert before <= bucket.level <= capacity
    if seconds <= 0:
        assert bucket.level == before, "a clock that goes back gives nothing"


def test_generated_tokens_are_paid_afterwards() -> None:
    meter = TenantMeter(Limits(tokens_per_minute=60), 0.0)
    meter.admit(10, 1, 0.0)
    meter.count_tokens(110)
    with pytest.raises(TenantLimitError) as refused:
        meter.admit(1, 1, 0.0)
    assert refused.value.retry_after_s == pytest.approx(61.0)
    meter.admit(1, 1, 61.0)


def test_completions_at_a_time() -> None:
    meter = TenantMeter(Limits(concurrency=3), 0.0)
    meter.admit(1, 2, 0.0)
    with pytest.raises(TenantLimitError, match="3 may"):
        meter.admit(1, 2, 0.0)
    meter.admit(1, 1, 0.0)
    meter.end(2)
    meter.admit(1, 2, 0.0)
    with pytest.raises(InvalidRequestError, match="at most 3"):
        meter.admit(1, 4, 0.0)


def test_what_is_refused_takes_nothing() -> None:
    meter = TenantMeter(Limits(requests_per_s=5, tokens_per_minute=60), 0.0)
    meter.admit(60, 1, 0.0)
    for _ in range(20):
        with pytest.raises(TenantLimitError):
            meter.admit(60, 1, 0.0)
    left = meter.allowances(0.0)
    assert (left["requests"].limit, left["requests"].remaining) == (5, 4)
    assert (left["tokens"].remaining, left["tokens"].reset_s) == (0, 60.0)
    assert meter.num_running == 1


def test_what_is_given_back_is_no_more_than_a_bucket() -> None:
    meter = TenantMeter(Limits(tokens_per_minute=60), 0.0)
    meter.admit(60, 1, 0.0)
    meter.count_tokens(-60)
    assert meter.allowances(0.0)["tokens"].remaining == 60
    meter.count_tokens(-60)
    assert meter.allowances(0.0)["tokens"].remaining == 60


def test_limits_change_while_requests_run() -> None:
    meter = TenantMeter(Limits(requests_per_s=10), 0.0)
    for _ in range(10):
        meter.admit(1, 1, 0.0)
    meter.set_limits(Limits(requests_per_s=20), 0.0)
    with pytest.raises(TenantLimitError):
        meter.admit(1, 1, 0.0)
    meter.set_limits(Limits(), 0.0)
    meter.admit(1, 1, 0.0)
    assert meter.allowances(0.0) == {}
    assert meter.num_running == 11


@pytest.mark.parametrize(
    "given",
    [{"pins": -1}, {"requests_per_s": 0}, {"tokens_per_minute": 0}, {"adapters": 2e18}, {"requests_per_s": math.nan}],
)
def test_numbers_that_are_no_limits(given: dict[str, float]) -> None:
    with pytest.raises(InvalidRequestError, match="limit"):
        Limits(**given)  # type: ignore[arg-type]


def test_limits_are_stored_as_they_are() -> None:
    limits = Limits(adapters=0, requests_per_s=0.5, max_context=8)
    assert Limits.of(limits.given()) == limits
    with pytest.raises(InvalidRequestError, match="no limit"):
        Limits.of({"speed": 1})
