"""What a tenant may use: its limits, and the pure policy that admits a request or says when to come again.

A bucket holds one interval's worth and fills steadily. `requests_per_s` takes 1 at admission. `tokens_per_minute` takes
the prompt's tokens at admission and the generated ones as they are counted; it may fall below zero by those of the
requests that run, and nothing is admitted until that is paid back. So over any time of t seconds, with rate r a second
and bucket b, at most b + r*t tokens are admitted, beside what the running requests draw. The clock is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from loraplex.adapter_store import MemoryQuota
from loraplex.config import setting
from loraplex.errors import InvalidRequestError, TenantLimitError

MAX_LIMIT = 1e18


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """None: no limit. Raises InvalidRequestError for what is no number >= 0, or for a rate of 0."""

    adapters: int | None = setting(None, "most adapters that the tenant's keys may have loaded")
    adapter_bytes: int | None = setting(None, "most bytes of the tenant's adapters, kept versions included")
    host_bytes: int | None = setting(
        None, "most bytes of the tenant's adapters in the host's memory at a time, in each engine process"
    )
    device_bytes: int | None = setting(
        None, "most bytes of the tenant's adapters on the device at a time, in each engine process"
    )
    pins: int | None = setting(None, "most of the tenant's adapters that may be pinned")
    requests_per_s: float | None = setting(None, "most requests a second")
    tokens_per_minute: int | None = setting(None, "most tokens a minute of prompts and completions")
    concurrency: int | None = setting(None, "most completions of the tenant that wait or run")
    max_context: int | None = setting(None, "most tokens of a prompt and its completion together")
    connections: int | None = setting(
        None, "most open connections of the tenant (default: as many as it leaves to others of --max-connections)"
    )

    def __post_init__(self) -> None:
        for name, value in self.given().items():
            is_positive = name in ("requests_per_s", "tokens_per_minute", "concurrency", "max_context", "connections")
            if not (value > 0 if is_positive else value >= 0) or value > MAX_LIMIT:
                least = "> 0" if is_positive else ">= 0"
                raise InvalidRequestError(f"limit {name} must be {least} and at most {MAX_LIMIT:g}, got {value}")

    @classmethod
    def of(cls, given: Mapping[str, float]) -> Self:
        """Of what `given` gave. Raises InvalidRequestError for a name that is no limit."""
        known = {each.name for each in fields(cls)}
        if unknown := sorted(given.keys() - known):
            raise InvalidRequestError(f"{unknown[0][:40]!r} is no limit; there are {', '.join(sorted(known))}")
        made: dict[str, Any] = {
            name: value if name == "requests_per_s" else int(value) for name, value in given.items()
        }
        return cls(**made)

    def given(self) -> dict[str, float]:
        """Those that are set."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def memory(self) -> MemoryQuota:
        """What engine processes heed."""
        return MemoryQuota(self.host_bytes, self.device_bytes)


@dataclass(slots=True)
class Bucket:
    """`capacity` units that come back at `rate` a second; `level` is what is there at `at_s`, and may be negative."""

    capacity: float
    rate: float
    level: float
    at_s: float

    @classmethod
    def full(cls, capacity: float, rate: float, now_s: float) -> Self:
        return cls(capacity, rate, capacity, now_s)

    def fill(self, now_s: float) -> None:
        """A clock that goes back adds nothing."""
        if now_s > self.at_s:
            self.level = min(self.capacity, self.level + (now_s - self.at_s) * self.rate)
            self.at_s = now_s

    def wait_s(self, amount: float) -> float:
        """Until `amount` is there, or all that ever is; 0: it is."""
        return max(0.0, (min(amount, self.capacity) - self.level) / self.rate)


@dataclass(frozen=True, slots=True)
class Allowance:
    """What is left, for the headers: OpenAI's `x-ratelimit-*`. reset_s: until the bucket is full."""

    limit: int
    remaining: int
    reset_s: float

    @classmethod
    def of(cls, bucket: Bucket) -> Self:
        return cls(math.floor(bucket.capacity), max(0, math.floor(bucket.level)), bucket.wait_s(bucket.capacity))


class TenantMeter:
    """The rates of one tenant, for one server. Every method takes the time of a monotonic clock."""

    def __init__(self, limits: Limits, now_s: float) -> None:
        self._limits = Limits()
        self._num_running = 0
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.set_limits(limits, now_s)

    @property
    def num_running(self) -> int:
        return self._num_running

    def set_limits(self, limits: Limits, now_s: float) -> None:
        """What was used stays used; what runs goes on."""
        if limits == self._limits:
            return
        rate, minute = limits.requests_per_s, limits.tokens_per_minute
        self._requests = _changed(self._requests, None if rate is None else max(1.0, rate), rate, now_s)
        self._tokens = _changed(self._tokens, minute, None if minute is None else minute / 60, now_s)
        self._limits = limits

    def admit(self, num_prompt_tokens: int, num_completions: int, now_s: float) -> None:
        """Take it, or raise TenantLimitError and take nothing."""
        limits = self._limits
        if limits.concurrency is not None and self._num_running + num_completions > limits.concurrency:
            if num_completions > limits.concurrency:
                raise InvalidRequestError(
                    f"the request has {num_completions} completions, and at most {limits.concurrency} of this tenant "
                    "may wait or run at a time: send fewer"
                )
            raise TenantLimitError(
                f"{self._num_running} completions of this tenant wait or run, and {limits.concurrency} may: send the "
                "request when one has ended",
                limit="concurrency",
            )
        for bucket, amount, name, what in (
            (self._requests, 1.0, "requests_per_s", "requests a second"),
            (self._tokens, float(num_prompt_tokens), "tokens_per_minute", "tokens a minute"),
        ):
            if bucket is None:
                continue
            bucket.fill(now_s)
            if wait_s := bucket.wait_s(amount):
                most = getattr(limits, name)
                text = f"this tenant may use {most:g} {what}; send the request again in {math.ceil(wait_s)} s"
                raise TenantLimitError(text, retry_after_s=wait_s, limit=name)
        if self._requests is not None:
            self._requests.level -= 1
        self.count_tokens(num_prompt_tokens)
        self._num_running += num_completions

    def count_tokens(self, num_tokens: int) -> None:
        """Tokens that were used; fewer than 0 are given back."""
        if self._tokens is not None:
            self._tokens.level = min(self._tokens.capacity, self._tokens.level - num_tokens)

    def end(self, num_completions: int) -> None:
        self._num_running -= num_completions

    def allowances(self, now_s: float) -> dict[str, Allowance]:
        """By `requests` and `tokens`, those that have a limit."""
        buckets = {"requests": self._requests, "tokens": self._tokens}
        for bucket in buckets.values():
            if bucket is not None:
                bucket.fill(now_s)
        return {name: Allowance.of(bucket) for name, bucket in buckets.items() if bucket is not None}


def _changed(before: Bucket | None, capacity: float | None, rate: float | None, now_s: float) -> Bucket | None:
    if capacity is None or rate is None:
        return None
    if before is None:
        return Bucket.full(capacity, rate, now_s)
    before.fill(now_s)
    return Bucket(capacity, rate, min(capacity, before.level), now_s)
