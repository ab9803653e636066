"""Who comes next: periods, successors, bounds; and what prediction is worth to a small cache."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.memory.care.prediction import (
    MAX_BEATS,
    MAX_SUCCESSORS,
    MIN_PROBABILITY,
    NUM_INTERVALS,
    ArrivalPredictor,
    Prediction,
    PrefetchLedger,
)

Arrivals = list[tuple[float, str]]


def seen(arrivals: Sequence[tuple[float, str]], min_probability: float = MIN_PROBABILITY) -> ArrivalPredictor:
    predictor = ArrivalPredictor(min_probability=min_probability)
    for now_s, key in arrivals:
        predictor.observe(key, now_s)
    return predictor


def every(period_s: float, key: str, num: int) -> Arrivals:
    return [(period_s * i, key) for i in range(num)]


def keys(predictions: Sequence[Prediction]) -> list[str]:
    return [prediction.key for prediction in predictions]


# -------------------------------------------------------------------------------------------------------------- periods


def test_a_periodic_key_is_told_when_it_is_due_and_not_before() -> None:
    predictor = seen(every(60, "a", 9))  # the last at 480 s
    assert predictor.predict(500, 10, 5) == []
    (due,) = predictor.predict(535, 10, 5)
    assert (due.key, due.expected_in_s) == ("a", pytest.approx(5))
    assert due.probability == pytest.approx(8 / 9)


def test_a_few_arrivals_are_no_period_yet() -> None:
    assert seen(every(60, "a", 4)).predict(235, 10, 5) == []
    assert keys(seen(every(60, "a", 5)).predict(295, 10, 5)) == ["a"]


def test_a_period_that_changes_is_learnt_anew() -> None:
    predictor = seen(every(60, "a", 9) + [(480 + 20 * i, "a") for i in range(1, NUM_INTERVALS + 1)])
    assert keys(predictor.predict(655, 10, 5)) == ["a"]  # the last came at 640 s


def test_who_stays_away_is_expected_less_each_time_and_then_no_more() -> None:
    predictor = seen(every(60, "a", 9), min_probability=0.01)
    for beat in range(1, MAX_BEATS + 1):
        (prediction,) = predictor.predict(480 + 60 * beat - 5, 10, 5)
        assert prediction.probability == pytest.approx(8 / 9 / 2 ** (beat - 1))
    assert predictor.predict(480 + 60 * (MAX_BEATS + 1) - 5, 10, 5) == []


def test_intervals_below_any_clock_do_no_harm() -> None:
    predictor = seen([(i * 5e-324, "a") for i in range(9)])
    assert predictor.predict(1e6, 10, 5) == []


def test_a_frequent_key_without_a_period_is_expected_until_it_falls_silent() -> None:
    draw = random.Random(1)
    now_s, predictor = 0.0, ArrivalPredictor()
    for _ in range(100):
        now_s += draw.expovariate(1.0)
        predictor.observe("a", now_s)
    assert keys(predictor.predict(now_s, 5, 5)) == ["a"]
    assert predictor.predict(now_s + 60, 5, 5) == []


# ----------------------------------------------------------------------------------------------------------- successors


def pairs(num: int, rest: Sequence[str] = ()) -> Arrivals:
    """ "b" 2 s after "a", at odd times, with others in between."""
    draw = random.Random(2)
    now_s, arrivals = 0.0, []
    for _ in range(num):
        now_s += draw.choice([30, 77, 210, 555])
        arrivals += [(now_s, "a"), *((now_s + 1, draw.choice(rest)) for _ in range(5 if rest else 0)), (now_s + 2, "b")]
    return arrivals


@pytest.mark.parametrize("rest", [(), [f"other{i}" for i in range(200)]], ids=["alone", "among others"])
def test_what_follows_a_key_is_told_when_that_key_comes(rest: Sequence[str]) -> None:
    arrivals = pairs(40, rest)
    predictor, end_s = seen(arrivals), arrivals[-1][0]
    assert predictor.predict(end_s + 20, 5, 5) == []
    predictor.observe("a", end_s + 30)
    (b,) = predictor.predict(end_s + 30.5, 5, 5)
    assert b.key == "b"
    assert b.probability > 0.7
    assert b.expected_in_s == pytest.approx(1.5, abs=0.01)
    predictor.observe("b", end_s + 32)
    assert predictor.predict(end_s + 32.5, 5, 5) == []


def test_what_followed_twice_may_be_chance() -> None:
    assert seen([*pairs(2), (5000, "a")]).predict(5000, 5, 5) == []
    assert keys(seen([*pairs(3), (5000, "a")]).predict(5000, 5, 5)) == ["b"]


def test_a_successor_that_does_not_come_any_more_is_unlearnt() -> None:
    predictor = seen(pairs(20))
    for i in range(10):
        predictor.observe("a", 20_000 + 1000 * i + 300 * (i % 2))
    assert predictor.predict(29_300, 5, 5) == []


# ---------------------------------------------------------------------------------------------------- order, forgetting


def test_the_likeliest_come_first_and_no_more_than_asked() -> None:
    arrivals = every(60, "sure", 9) + every(96, "late", 6) + every(60, "new", 9)[-5:]
    predictor = seen(sorted(arrivals))
    predictions = predictor.predict(535, 60, 5)
    assert keys(predictions) == ["sure", "late", "new"]
    assert keys(predictor.predict(535, 60, 1)) == ["sure"]
    assert predictor.predict(535, 60, 0) == []


def test_what_is_forgotten_is_told_no_more() -> None:
    predictor = seen([*pairs(10), (9000, "a")])
    predictor.forget("b")
    predictor.forget("unknown")
    assert predictor.predict(9000, 5, 5) == []
    predictor.observe("b", 9001)
    predictor.observe("a", 9100)
    assert predictor.predict(9100, 5, 5) == []  # what was known of "a" and "b" went with "b"


def test_the_longest_unseen_key_makes_way() -> None:
    predictor = ArrivalPredictor(max_keys=2)
    for now_s in range(6):
        predictor.observe("a", 10.0 * now_s)
    predictor.observe("b", 51)
    assert keys(predictor.predict(55, 10, 5)) == ["a"]
    predictor.observe("c", 52)
    assert len(predictor) == 2
    assert predictor.predict(55, 10, 5) == []


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 30)), max_size=200),
    st.floats(0, 1000),
    st.floats(0.1, 1000),
    st.integers(0, 5),
)
def test_memory_and_predictions_are_bounded(
    steps: list[tuple[float, int]], later_s: float, horizon_s: float, limit: int
) -> None:
    predictor, now_s = ArrivalPredictor(max_keys=10, min_probability=0.1), 0.0
    for interval_s, key in steps:
        now_s += interval_s
        predictor.observe(str(key), now_s)
    assert len(predictor) <= 10
    for history in predictor._histories.values():
        assert len(history.intervals) <= NUM_INTERVALS
        assert len(history.successors) <= MAX_SUCCESSORS
    predictions = predictor.predict(now_s + later_s, horizon_s, limit)
    assert len(predictions) <= limit
    assert len(set(keys(predictions))) == len(predictions)
    for prediction in predictions:
        assert prediction.key in predictor._histories
        assert 0.1 <= prediction.probability <= 1
        assert prediction.expected_in_s >= 0
    assert predictions == sorted(predictions, key=lambda each: (-each.probability, each.expected_in_s, each.key))


# ----------------------------------------------------------------------------------------------- worth to a small cache

NBYTES = 10
HORIZON_S = 5.0


class SmallCache:
    """An LRU cache of a few keys that prediction fills once a second, if it is on."""

    def __init__(self, size: int, is_predicting: bool) -> None:
        self.size = size
        self.is_predicting = is_predicting
        self.held: OrderedDict[str, None] = OrderedDict()
        self.predictor = ArrivalPredictor()
        self.ledger = PrefetchLedger()
        self.num_cold = 0
        self.num_prefetched = 0

    def run(self, arrivals: Sequence[tuple[float, str]]) -> None:
        tick_s = 0.0
        for now_s, key in arrivals:
            while self.is_predicting and tick_s <= now_s:
                self._prefetch(tick_s)
                tick_s += 1
            self.predictor.observe(key, now_s)
            if key in self.held:
                self.ledger.used(key)
            else:
                self.num_cold += 1
                self.ledger.missed(key)
            self._bring(key)

    def _prefetch(self, now_s: float) -> None:
        for prediction in self.predictor.predict(now_s, HORIZON_S, self.size // 2):
            if prediction.key not in self.held:
                self.num_prefetched += 1
                self.ledger.prefetched(prediction.key, NBYTES)
            self._bring(prediction.key)

    def _bring(self, key: str) -> None:
        self.held[key] = None
        self.held.move_to_end(key)
        if len(self.held) > self.size:
            self.ledger.evicted_unused(self.held.popitem(last=False)[0])


def periodic(num_keys: int, length_s: float, seed: int) -> Arrivals:
    """Each key at its own interval of 40 to 200 s, give or take 5 %."""
    draw = random.Random(seed)
    arrivals = []
    for key in range(num_keys):
        period_s = draw.uniform(40, 200)
        now_s = draw.uniform(0, period_s)
        while now_s < length_s:
            arrivals.append((now_s, f"k{key}"))
            now_s += period_s * draw.gauss(1, 0.05)
    return sorted(arrivals)


def at_random(num_keys: int, rate: float, length_s: float, seed: int) -> Arrivals:
    draw = random.Random(seed)
    now_s, arrivals = 0.0, []
    while now_s < length_s:
        now_s += draw.expovariate(rate)
        arrivals.append((now_s, f"k{draw.randrange(num_keys)}"))
    return arrivals


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_on_a_periodic_trace_prediction_halves_the_cold_starts(seed: int) -> None:
    arrivals = periodic(50, 3600, seed)
    without, with_it = SmallCache(12, is_predicting=False), SmallCache(12, is_predicting=True)
    without.run(arrivals)
    with_it.run(arrivals)
    assert without.num_cold > len(arrivals) // 2
    assert with_it.num_cold <= without.num_cold / 2
    ledger = with_it.ledger
    assert ledger.num_hits > 2 * ledger.num_wasted
    assert ledger.num_missed + ledger.num_late == with_it.num_cold
    assert ledger.wasted_bytes == NBYTES * ledger.num_wasted


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("rate", [0.5, 5.0])
def test_on_random_traffic_next_to_nothing_is_prefetched(rate: float, seed: int) -> None:
    arrivals = at_random(100, rate, 3000 / rate, seed)
    without, with_it = SmallCache(20, is_predicting=False), SmallCache(20, is_predicting=True)
    without.run(arrivals)
    with_it.run(arrivals)
    assert with_it.num_prefetched < 0.05 * len(arrivals)
    assert with_it.num_cold < 1.02 * without.num_cold


# ----------------------------------------------------------------------------------------------------------- the ledger


def test_each_prefetch_is_a_hit_late_or_wasted_once() -> None:
    ledger = PrefetchLedger()
    for key in ("hit", "late", "wasted", "waiting"):
        ledger.prefetched(key, 100)
    ledger.prefetched("hit", 999)  # told again: one load
    for _ in range(2):
        ledger.used("hit")
        ledger.evicted_unused("hit")
        ledger.evicted_unused("wasted")
    ledger.missed("late")
    ledger.missed("never prefetched")
    ledger.used("resident anyway")
    assert (ledger.num_hits, ledger.num_late, ledger.num_missed) == (1, 1, 1)
    assert (ledger.num_wasted, ledger.wasted_bytes) == (1, 100)
    assert ledger.num_unused == 1, "`waiting`"


@given(st.lists(st.tuples(st.sampled_from(["prefetched", "used", "missed", "evicted_unused"]), st.integers(0, 4))))
def test_the_ledger_adds_up(calls: list[tuple[str, int]]) -> None:
    ledger, num_prefetched, open_keys = PrefetchLedger(), 0, set()
    for name, number in calls:
        key = str(number)
        if name == "prefetched":
            num_prefetched += key not in open_keys
            open_keys.add(key)
            ledger.prefetched(key, 7)
        else:
            open_keys.discard(key)
            getattr(ledger, name)(key)
    assert ledger.num_hits + ledger.num_late + ledger.num_wasted + len(open_keys) == num_prefetched
    assert ledger.wasted_bytes == 7 * ledger.num_wasted
    assert ledger.num_unused == len(open_keys)
