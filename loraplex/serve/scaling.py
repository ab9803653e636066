"""How many replicas the load needs: by queue, as Serve counts it, and by how many requests got their first token late.

    desired = queue                              late <= max_late / 2
              max(queue, current)                max_late / 2 < late <= max_late
              max(queue, current * (1 + late))   late > max_late          (at least one more)

`queue` is the requests of all replicas over what one of them is to have. Between the two shares nothing is removed:
with fewer replicas more requests would be late.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol

LATE_SHARE = "late_share"
"""Of the requests whose first token came since the last look."""


class Sample(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def labels(self) -> dict[str, str]: ...
    @property
    def value(self) -> float: ...


class LateShare:
    """Of requests, between two looks at a histogram of seconds; the bound is the first bucket's that holds the
    target."""

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._in_time = self._all = 0.0

    def look(self, samples: Iterable[Sample]) -> float:
        buckets = sorted((float(each.labels["le"]), each.value) for each in samples if each.name.endswith("_bucket"))
        num_all = buckets[-1][1]
        in_time = next((count for bound, count in buckets if bound >= self._target_s), num_all)
        new_all, new_in_time = num_all - self._all, in_time - self._in_time
        self._all, self._in_time = num_all, in_time
        return 0.0 if not new_all else 1.0 - new_in_time / new_all


def desired_replicas(by_queue: float, current: int, late_share: float, max_late_share: float) -> float:
    """Not yet between the least and the most replicas, which Serve sees to."""
    if late_share > max_late_share:
        return max(by_queue, current + 1, math.ceil(current * (1.0 + late_share)))
    return max(by_queue, current) if late_share > max_late_share / 2 else by_queue


class QueueAndServiceLevels:
    """Serve's autoscaling policy: its context in, replicas out."""

    def __init__(self, max_late_share: float) -> None:
        self._max_late_share = max_late_share

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        shares = ((context.aggregated_metrics or {}).get(LATE_SHARE) or {}).values()
        late_share = sum(shares) / len(shares) if shares else 0.0
        by_queue = context.total_num_requests / context.config.target_ongoing_requests
        current = context.current_num_replicas
        return desired_replicas(by_queue, current, late_share, self._max_late_share), {}
