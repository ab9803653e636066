"""What a simulation says: figures as JSON and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Spread:
    """Of some values: mean and percentiles, linear between neighbours; all 0 of no values."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        listed = np.fromiter(values, float)
        if not len(listed):
            return cls()
        p50, p90, p99, most = (float(value) for value in np.percentile(listed, (50, 90, 99, 100)))
        return cls(float(listed.mean()), p50, p90, p99, most)


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Of all requests of a simulation. Seconds, unless a name says otherwise.

    tokens_per_s: output tokens over the time from the first arrival to the last token. first_token_s, end_to_end_s:
    since a request arrived; waiting_s: until its first step began. inter_token_s is None without steps (`requests`).
    hits, misses: requests that found their adapter on the device, or had to wait for it; found: by the tier in which it
    was. evictions: by tier and reason. utilization: share of the time in which a device ran steps, for each runner.
    max_load: of the runner with the most work, over the mean. kv_bytes: most that requests of one runner used at once.
    """

    detail: str
    num_requests: int
    num_failed: int
    seconds: float
    tokens_per_s: float
    requests_per_s: float
    first_token_s: Spread
    inter_token_s: Spread | None
    end_to_end_s: Spread
    waiting_s: Spread
    hits: int
    misses: int
    found: Mapping[str, int]
    evictions: Mapping[str, int]
    loads: int
    preemptions: int
    pauses: int
    kv_bytes: int
    num_steps: int
    utilization: tuple[float, ...]
    max_load: float
    wall_s: float = 0.0
    notes: tuple[str, ...] = field(default=())

    @property
    def hit_rate(self) -> float:
        asked = self.hits + self.misses
        return self.hits / asked if asked else 1.0

    @property
    def mean_utilization(self) -> float:
        return sum(self.utilization) / len(self.utilization)

    @property
    def num_evictions(self) -> int:
        return sum(self.evictions.values())

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "hit_rate": self.hit_rate, "mean_utilization": self.mean_utilization}

    def table(self, title: str) -> Table:
        table = Table(title=Text(title, "table.title"), title_justify="left", show_header=False)
        table.add_column("figure")
        table.add_column("value", justify="right")
        for name, value in self._rows():
            table.add_row(name, value)
        return table

    def _rows(self) -> Iterable[tuple[str, str]]:
        yield "requests", f"{self.num_requests}" + (f", {self.num_failed} failed" if self.num_failed else "")
        yield "simulated time", f"{self.seconds:.1f} s"
        yield "throughput", f"{self.tokens_per_s:.1f} tokens/s, {self.requests_per_s:.2f} requests/s"
        yield "first token, P50 / P90 / P99", shown_ms(self.first_token_s)
        yield "until the first step, P50 / P90 / P99", shown_ms(self.waiting_s)
        if self.inter_token_s is not None:
            yield "between tokens, P50 / P90 / P99", shown_ms(self.inter_token_s)
        yield "last token, P50 / P90 / P99", shown_ms(self.end_to_end_s)
        yield "adapter was on the device", f"{100 * self.hit_rate:.1f} % ({self.misses} misses)"
        yield "found in", ", ".join(f"{tier} {count}" for tier, count in sorted(self.found.items())) or "-"
        yield "loads", str(self.loads)
        yield "evictions", ", ".join(f"{cause} {count}" for cause, count in sorted(self.evictions.items())) or "0"
        yield "preemptions, pauses", f"{self.preemptions}, {self.pauses}"
        if self.kv_bytes:
            yield "KV cache in use, at most", f"{self.kv_bytes / 2**20:.1f} MiB"
        yield "busy runners", f"{100 * self.mean_utilization:.0f} % of the time"
        if len(self.utilization) > 1:
            yield "most work over mean work", f"{self.max_load:.2f}"
        yield "simulation took", f"{self.wall_s:.1f} s"


def shown_ms(spread: Spread) -> str:
    return " / ".join(f"{1000 * value:.0f}" for value in (spread.p50, spread.p90, spread.p99)) + " ms"
