"""How long the requests of each adapter took, followed from the front: first token, between tokens, end to end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

from loraplex.core import FinishReason, Request, TokenOutput
from loraplex.performance.histogram import Histogram

MAX_ADAPTERS = 2048
OTHERS = "(others)"
"""Where the adapters beyond MAX_ADAPTERS are counted together."""

NameOf = Callable[[int], str | None]
"""What a client writes for an adapter, by its id; None when that is not known any more."""


@dataclass(frozen=True, slots=True)
class ServiceTargets:
    """What a request should keep: seconds to its first token, and mean seconds between two tokens."""

    first_token_s: float = 1.0
    inter_token_s: float = 0.1


@dataclass(slots=True)
class Latencies:
    """Of one adapter, or of all. num_in_*: finished requests that kept the target."""

    num_requests: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    num_in_first_token: int = 0
    num_in_inter_token: int = 0
    num_in_both: int = 0
    first_token: Histogram = field(default_factory=Histogram)
    inter_token: Histogram = field(default_factory=Histogram)
    end_to_end: Histogram = field(default_factory=Histogram)

    def add(self, other: Latencies) -> None:
        """Everything that `other` has counted."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("first_token", "inter_token", "end_to_end"):
            getattr(self, name).add(getattr(other, name))


_COUNTS = tuple(each.name for each in fields(Latencies) if each.name.startswith("num_"))


@dataclass(slots=True)
class _Open:
    """A request that runs or waits."""

    latencies: Latencies
    begun_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0


class RequestRecorder:
    """Follows requests from `begin` to their last output; those that began before are passed over. One thread calls it.

    name_of: asked once a request, so that a version is counted under what it is called then.
    """

    def __init__(
        self,
        targets: ServiceTargets,
        name_of: NameOf,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._targets = targets
        self._name_of = name_of
        self._clock = clock
        self._open: dict[str, _Open] = {}
        self._latencies: dict[str | None, Latencies] = {}

    @property
    def by_adapter(self) -> Mapping[str | None, Latencies]:
        """By name; None is the base model."""
        return self._latencies

    def begin(self, request: Request) -> None:
        latencies = self._of(self._name(request))
        latencies.num_requests += 1
        self._open[request.request_id] = _Open(latencies, self._clock())

    def see(self, output: TokenOutput) -> None:
        """Count what a step added to a request, and its end."""
        known = self._open.get(output.request_id)
        if known is None:
            return
        now_s = self._clock()
        if output.token_ids:
            self._count_tokens(known, len(output.token_ids), now_s)
        if output.finish_reason is not None:
            del self._open[output.request_id]
            self._finish(known, output.finish_reason, now_s)

    def stop(self, request_id: str) -> None:
        """A stop string ended it, which the engine does not know yet."""
        known = self._open.pop(request_id, None)
        if known is not None:
            self._finish(known, FinishReason.STOP, self._clock())

    def forget(self, request_id: str) -> None:
        """Its client left: it has no end to measure."""
        self._open.pop(request_id, None)

    def _of(self, name: str | None) -> Latencies:
        if name not in self._latencies and len(self._latencies) >= MAX_ADAPTERS:
            name = OTHERS
        latencies = self._latencies.get(name)
        if latencies is None:
            latencies = self._latencies[name] = Latencies()
        return latencies

    def _name(self, request: Request) -> str | None:
        """Of a mix, all names: what its requests take says nothing of each alone."""
        names = [self._name_of(adapter_id) or f"adapter {adapter_id}" for adapter_id in request.adapter_ids]
        return " + ".join(names) or None

    @staticmethod
    def _count_tokens(known: _Open, num_tokens: int, now_s: float) -> None:
        latencies = known.latencies
        if known.num_tokens == 0:
            known.first_s = now_s
            latencies.first_token.observe(now_s - known.begun_s)
        else:
            latencies.inter_token.observe((now_s - known.last_s) / num_tokens, num_tokens)
        known.last_s = now_s
        known.num_tokens += num_tokens
        latencies.num_tokens += num_tokens

    def _finish(self, known: _Open, reason: FinishReason, now_s: float) -> None:
        latencies = known.latencies
        if reason in (FinishReason.ABORT, FinishReason.ERROR) or known.num_tokens == 0:
            latencies.num_failed += reason is FinishReason.ERROR
            return
        latencies.num_finished += 1
        latencies.end_to_end.observe(now_s - known.begun_s)
        gap_s = (known.last_s - known.first_s) / max(1, known.num_tokens - 1)
        is_first_in = known.first_s - known.begun_s <= self._targets.first_token_s
        is_gap_in = gap_s <= self._targets.inter_token_s
        latencies.num_in_first_token += is_first_in
        latencies.num_in_inter_token += is_gap_in
        latencies.num_in_both += is_first_in and is_gap_in
