"""Durations in few bytes: counts by size, and quantiles from them that are off by at most half a bucket (2.5 %)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

LEAST_S = 1e-6
GROWTH = 1.05


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of `count` durations, in seconds; all 0 when there are none."""

    count: int = 0
    mean_s: float = 0.0
    p50_s: float = 0.0
    p95_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0


@dataclass(slots=True)
class Histogram:
    """counts: by bucket i, which holds LEAST_S * GROWTH^i up to the next; about 600 span a microsecond to years."""

    counts: dict[int, int] = field(default_factory=dict)
    count: int = 0
    total_s: float = 0.0
    min_s: float = 0.0
    max_s: float = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        bucket = 0 if seconds <= LEAST_S else int(math.log(seconds / LEAST_S) / math.log(GROWTH))
        self.counts[bucket] = self.counts.get(bucket, 0) + times
        self.min_s = seconds if self.count == 0 else min(self.min_s, seconds)
        self.max_s = max(self.max_s, seconds)
        self.count += times
        self.total_s += seconds * times

    def add(self, other: Histogram) -> None:
        """Everything that `other` has observed."""
        if other.count == 0:
            return
        for bucket, count in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count
        self.min_s = other.min_s if self.count == 0 else min(self.min_s, other.min_s)
        self.max_s = max(self.max_s, other.max_s)
        self.count += other.count
        self.total_s += other.total_s

    def quantile(self, share: float) -> float:
        """The smallest duration that at least `share` of all do not exceed (its bucket's middle), or 0."""
        left = max(1, math.ceil(share * self.count))
        for bucket in sorted(self.counts):
            left -= self.counts[bucket]
            if left <= 0:
                middle_s: float = LEAST_S * GROWTH ** (bucket + 0.5)
                return min(self.max_s, max(self.min_s, middle_s))
        return 0.0

    def quantiles(self) -> Quantiles:
        if self.count == 0:
            return Quantiles()
        p50, p95, p99 = (self.quantile(share) for share in (0.5, 0.95, 0.99))
        return Quantiles(self.count, self.total_s / self.count, p50, p95, p99, self.max_s)
