"""How many replicas the load needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from loraplex.serve.scaling import LATE_SHARE, LateShare, QueueAndServiceLevels, desired_replicas
from loraplex.server.latency import LatencyHistograms


def context(num_requests: float, current: int, late: dict[str, float] | None) -> Any:
    return SimpleNamespace(
        aggregated_metrics=None if late is None else {LATE_SHARE: late},
        total_num_requests=num_requests,
        current_num_replicas=current,
        config=SimpleNamespace(target_ongoing_requests=4.0),
    )


@pytest.mark.parametrize(
    ("num_requests", "current", "late", "wanted"),
    [
        (8, 1, None, 2.0),
        (8, 4, {"a": 0.0}, 2.0),
        (8, 4, {"a": 0.08, "b": 0.08}, 4.0),
        (4, 4, {"a": 0.5, "b": 0.0}, 5.0),
        (4, 4, {"a": 1.0}, 8.0),
        (40, 4, {"a": 1.0}, 10.0),
    ],
)
def test_queues_and_late_requests(
    num_requests: int, current: int, late: dict[str, float] | None, wanted: float
) -> None:
    replicas, state = QueueAndServiceLevels(0.1)(context(num_requests, current, late))
    assert (replicas, state) == (wanted, {})


@given(st.floats(0, 100), st.integers(1, 50), st.floats(0, 1), st.floats(0.01, 0.99))
def test_late_requests_never_take_replicas_away(
    by_queue: float, current: int, late_share: float, max_late_share: float
) -> None:
    desired = desired_replicas(by_queue, current, late_share, max_late_share)
    assert desired >= by_queue
    assert desired <= max(by_queue, 2 * current + 1)
    if late_share > max_late_share:
        assert desired > current


def test_a_share_is_of_the_requests_since_the_last_look() -> None:
    first_token = LatencyHistograms(CollectorRegistry(), "demo").first_token
    late = LateShare(0.5)

    def look() -> float:
        (family,) = first_token.collect()
        return late.look(family.samples)

    assert look() == 0.0
    for seconds in (0.1, 0.2, 0.4, 3.0):
        first_token.observe(seconds)
    assert look() == 0.25
    assert look() == 0.0
    first_token.observe(9000.0)
    assert look() == 1.0
