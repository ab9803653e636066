"""Which adapters will be asked for soon, by what they did so far; and what came of bringing them early.

Pure bookkeeping: time comes in as an argument, nothing is loaded here. Two signs are read, and the stronger one counts:

    arrivals     of a key that comes at regular intervals, the share of its last intervals that would end within the
                 horizon; of any other key, 1 - exp(-horizon / mean interval), the mean decayed, and never below the
                 time since its last arrival
    successors   how often this key came within SUCCESSOR_WINDOW_S after that one, decayed, when that one has just come

Random traffic over many keys gives low probabilities by itself; what is below `min_probability` is not told, so next to
nothing is brought in for it.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

MAX_KEYS = 4096
"""Keys whose history is kept; the longest unseen is forgotten."""

MAX_SUCCESSORS = 8
LEAST_SUCCESSIONS = 0.5
"""Of each key so many successors are counted; one whose count has decayed below the least is replaced by another."""

MIN_PROBABILITY = 0.5
"""Less likely than this, a load is wasted more often than not."""

NUM_INTERVALS = 8
"""The last ones of a key that are kept."""

MIN_INTERVALS = 4
"""With fewer, chance looks regular, or frequent, too often."""

REGULAR_SPREAD = 0.25
"""Intervals are regular when their median deviation is at most this share of their median (0.7 for random arrivals)."""

MAX_BEATS = 4
"""A regular key that stayed away so many times is not expected any more."""

SUCCESSOR_WINDOW_S = 5.0
NUM_RECENT = 16
"""A key is counted as the successor of each of so many arrivals before it, within this time."""

DECAY = 0.9
"""What an interval or a succession counts when the next one comes: the last ten are most of it."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """`key` comes within the horizon with this probability, and if so in about so many seconds."""

    key: str
    probability: float
    expected_in_s: float


@dataclass(slots=True)
class _Successor:
    """count: decayed with each arrival of the key before it. delay_s: decayed mean. was_seen: since that one's last."""

    count: float = 0.0
    delay_s: float = 0.0
    was_seen: bool = False


@dataclass(slots=True)
class _History:
    """Of a key. num_seen: arrivals, decayed. mean_s: intervals, decayed. period_s, deviations_s: of regular ones."""

    last_s: float
    num_seen: float = 1.0
    mean_s: float = 0.0
    intervals: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_INTERVALS))
    period_s: float | None = None
    deviations_s: list[float] = field(default_factory=list)
    successors: dict[str, _Successor] = field(default_factory=dict)

    def arrive(self, now_s: float) -> None:
        interval_s = max(0.0, now_s - self.last_s)
        self.last_s = now_s
        self.mean_s += (interval_s - self.mean_s) / self.num_seen
        self.num_seen = 1 + DECAY * self.num_seen
        self.intervals.append(interval_s)
        for successor in self.successors.values():
            successor.count *= DECAY
            successor.was_seen = False
        self._find_period()

    def _find_period(self) -> None:
        period_s = statistics.median(self.intervals)
        deviations_s = sorted(interval_s - period_s for interval_s in self.intervals)
        spread_s = statistics.median(abs(each) for each in deviations_s)
        is_regular = len(self.intervals) >= MIN_INTERVALS and period_s > 0 and spread_s <= REGULAR_SPREAD * period_s
        self.period_s, self.deviations_s = (period_s, deviations_s) if is_regular else (None, [])

    def follow(self, key: str, delay_s: float) -> None:
        """`key` came after this one."""
        successor = self.successors.get(key)
        if successor is None and self._has_place():
            successor = self.successors[key] = _Successor(delay_s=delay_s)
        if successor is not None and not successor.was_seen:
            successor.was_seen = True
            successor.count += 1
            successor.delay_s = DECAY * successor.delay_s + (1 - DECAY) * delay_s

    def _has_place(self) -> bool:
        """For one more successor; the rarest is dropped if it is rare enough."""
        if len(self.successors) < MAX_SUCCESSORS:
            return True
        rarest = min(self.successors, key=lambda each: self.successors[each].count)
        is_rare = self.successors[rarest].count < LEAST_SUCCESSIONS
        if is_rare:
            del self.successors[rarest]
        return is_rare

    def arrival(self, now_s: float, horizon_s: float) -> tuple[float, float]:
        """(probability of an arrival within the horizon, seconds until it is expected)."""
        waited_s = max(0.0, now_s - self.last_s)
        if self.period_s is not None:
            return self._regular(self.period_s, waited_s, horizon_s)
        if len(self.intervals) < MIN_INTERVALS:
            return 0.0, horizon_s
        mean_s = max(self.mean_s, waited_s)
        return (1.0 if mean_s == 0 else -math.expm1(-horizon_s / mean_s)), mean_s

    def _regular(self, period_s: float, waited_s: float, horizon_s: float) -> tuple[float, float]:
        """Of the intervals not over by now, the share that ends within the horizon; half of it for each absence."""
        latest_s = max(self.deviations_s[-1], 0.0)
        if waited_s - latest_s > MAX_BEATS * period_s:
            return 0.0, horizon_s
        beat = max(1, math.ceil((waited_s - latest_s) / period_s))
        due_s = beat * period_s - waited_s
        ends_s = [due_s + deviation_s for deviation_s in self.deviations_s if due_s + deviation_s >= 0]
        num_within = sum(end_s <= horizon_s for end_s in ends_s)
        return num_within / (len(ends_s) + 1) / 2 ** (beat - 1), max(0.0, due_s)


class ArrivalPredictor:
    """What comes next. `max_keys` bounds the memory; `observe` takes the same time for any number. Not thread-safe."""

    def __init__(self, max_keys: int = MAX_KEYS, min_probability: float = MIN_PROBABILITY) -> None:
        self._max_keys = max_keys
        self._min_probability = min_probability
        self._histories: OrderedDict[str, _History] = OrderedDict()  # the longest unseen in front
        self._recent: deque[tuple[str, float]] = deque(maxlen=NUM_RECENT)

    def __len__(self) -> int:
        return len(self._histories)

    def observe(self, key: str, now_s: float) -> None:
        """A request for `key` came. Times do not go back."""
        history = self._histories.get(key)
        if history is None:
            history = self._histories[key] = _History(now_s)
        else:
            history.arrive(now_s)
            self._histories.move_to_end(key)
        for before, delay_s in self._just_seen(now_s):
            if before != key:
                self._histories[before].follow(key, delay_s)
        self._recent.append((key, now_s))
        if len(self._histories) > self._max_keys:
            self._histories.popitem(last=False)

    def predict(self, now_s: float, horizon_s: float, limit: int) -> list[Prediction]:
        """At most `limit` keys that come within `horizon_s` with `min_probability` or more, likeliest first, then
        soonest."""
        found: dict[str, Prediction] = {}
        for prediction in (*self._arrivals(now_s, horizon_s), *self._successors(now_s, horizon_s)):
            known = found.get(prediction.key)
            if known is None or prediction.probability > known.probability:
                found[prediction.key] = prediction
        return heapq.nsmallest(
            limit, found.values(), key=lambda each: (-each.probability, each.expected_in_s, each.key)
        )

    def forget(self, key: str) -> None:
        """Its content is gone: it is not predicted before it is seen again, nor does it count as a successor."""
        self._histories.pop(key, None)
        for history in self._histories.values():
            history.successors.pop(key, None)

    def _arrivals(self, now_s: float, horizon_s: float) -> Iterator[Prediction]:
        for key, history in self._histories.items():
            probability, expected_in_s = history.arrival(now_s, horizon_s)
            if probability >= self._min_probability:
                yield Prediction(key, probability, expected_in_s)

    def _successors(self, now_s: float, horizon_s: float) -> Iterator[Prediction]:
        for before, delay_s in self._just_seen(now_s):
            history = self._histories[before]
            for key, successor in history.successors.items():
                probability = successor.count / (history.num_seen + 1)
                expected_in_s = max(0.0, successor.delay_s - delay_s)
                is_due = not successor.was_seen and expected_in_s <= horizon_s and key in self._histories
                if is_due and probability >= self._min_probability:
                    yield Prediction(key, probability, expected_in_s)

    def _just_seen(self, now_s: float) -> Iterator[tuple[str, float]]:
        """(key, seconds since) of the last arrivals within the window, each key by its latest."""
        for key, seen_s in self._recent:
            history = self._histories.get(key)
            if history is not None and history.last_s == seen_s and now_s - seen_s <= SUCCESSOR_WINDOW_S:
                yield key, now_s - seen_s


class PrefetchLedger:
    """What came of prefetched keys: of each, one of used, late or wasted. Not thread-safe.

    num_hits: used, and there in time. num_late: asked for while still on their way. num_wasted, wasted_bytes: evicted
    without a use. num_missed: requests that had to wait for a key that was not prefetched.
    """

    def __init__(self) -> None:
        self._unused: dict[str, int] = {}  # key -> bytes
        self.num_hits = 0
        self.num_late = 0
        self.num_wasted = 0
        self.wasted_bytes = 0
        self.num_missed = 0

    def prefetched(self, key: str, nbytes: int) -> None:
        """Loading `key` begins; nothing if that was told and it was not used yet."""
        self._unused.setdefault(key, nbytes)

    def used(self, key: str) -> None:
        """A request got `key` without waiting."""
        self.num_hits += self._unused.pop(key, None) is not None

    def missed(self, key: str) -> None:
        """A request had to wait for `key`."""
        is_late = self._unused.pop(key, None) is not None
        self.num_late += is_late
        self.num_missed += not is_late

    def evicted_unused(self, key: str) -> None:
        """`key` left the memory; nothing if it was not prefetched, or was used."""
        nbytes = self._unused.pop(key, None)
        if nbytes is not None:
            self.num_wasted += 1
            self.wasted_bytes += nbytes

    @property
    def num_unused(self) -> int:
        """What was prefetched and is neither used nor gone."""
        return len(self._unused)
