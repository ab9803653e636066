"""Prediction on the memory itself, with a fake clock: adapters that come again and again are there in time."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from loraplex.core import Request, SamplingParams, Tier
from loraplex.engine.maintenance import Forecast
from tests.engine.rules_bench import Bench, OpenDriver
from tests.memory.rig import Rig

NUM_ADAPTERS = 12
ROOM = 4
PERIOD_S = 36.0
SECONDS = 1800


def request_for(adapter_id: int) -> Request:
    return Request(
        f"r{adapter_id}", (1,), SamplingParams(), 1, 0, adapter_id=adapter_id, adapter_digest=f"d{adapter_id}"
    )


def periodic() -> Iterator[tuple[float, int]]:
    """(second, adapter): each comes every PERIOD_S, one after the other, a little early or late."""
    draw = random.Random(0)
    for start_s in range(0, SECONDS, int(PERIOD_S)):
        for index in range(NUM_ADAPTERS):
            yield start_s + PERIOD_S * index / NUM_ADAPTERS + draw.uniform(-0.5, 0.5), index + 1


def at_random() -> Iterator[tuple[float, int]]:
    draw = random.Random(0)
    for number in range(600):
        yield 3.0 * number + draw.uniform(0, 2.0), draw.randrange(NUM_ADAPTERS) + 1


def serve(trace: Iterator[tuple[float, int]], is_predicting: bool) -> Rig:
    """Requests one by one, each done at once; once a second what is predicted is brought nearer."""
    rig = Rig(num_device=ROOM, num_host=ROOM)
    rig.add(*range(1, NUM_ADAPTERS + 1))
    forecast = Forecast(rig.clock)
    assert rig.loader is not None
    for at_s, adapter_id in trace:
        while rig.clock.now_s + 1 < at_s:
            rig.clock.now_s += 1
            rig.manager.poll()
            rig.manager.housekeeping.prefetch(forecast.due() if is_predicting else [])
            rig.loader.run_all()
        rig.clock.now_s = max(rig.clock.now_s, at_s)
        forecast.arrived(request_for(adapter_id))
        rig.acquire(adapter_id)
        rig.manager.release(adapter_id)
    rig.manager.check_integrity()
    return rig


def test_on_a_periodic_trace_prediction_halves_the_cold_starts() -> None:
    without, with_it = serve(periodic(), False), serve(periodic(), True)
    cold_without = without.manager.report().counters["cold_starts"]
    counters = with_it.manager.report().counters
    assert counters["cold_starts"] <= cold_without / 2
    assert counters["prefetch_hits"] > 10 * counters["prefetches_wasted"]
    assert counters["loads_prediction"] > 0


@pytest.mark.parametrize("was_evicted", [False, True])
def test_what_a_verb_takes_out_of_memory_is_not_predicted_until_a_request_asks(was_evicted: bool) -> None:
    """As a replaced version that is only kept for a rollback, also where it had left memory for others before."""
    rig = Rig()
    rig.add(1)
    forecast, store = Forecast(rig.clock), rig.manager._residency

    def arrive() -> None:
        rig.clock.now_s += 10
        forecast.arrived(request_for(1))
        rig.acquire(1)
        rig.manager.release(1)

    def leave_for_others() -> None:
        with store.held():
            store.leave_locked(store.weights["d1"], Tier.HOST)

    def is_brought() -> bool:
        """Shortly before the next arrival is expected."""
        rig.clock.now_s += 9
        assert forecast.due() == [1]
        is_begun = rig.manager.housekeeping.prefetch(forecast.due()) == 1
        rig.clock.now_s -= 9
        assert rig.loader is not None
        rig.loader.run_all()
        assert (rig.tier_of(1) != "source") is is_begun
        return is_begun

    for _ in range(8):
        arrive()
    if was_evicted:
        leave_for_others()
    while rig.manager.evict_adapter(1):
        pass
    assert not is_brought()
    arrive()
    leave_for_others()
    assert is_brought()


def test_a_replaced_version_is_not_predicted_whatever_tier_it_was_in(open_driver: OpenDriver, bench: Bench) -> None:
    driver = open_driver()
    old, new = map(str, bench.versions)
    housekeeping = driver.engine.adapters.housekeeping
    for left in (None, Tier.DEVICE, Tier.HOST):
        driver.registry.load("mine", old, load_inplace=True)
        before = driver.registry.resolve("mine").adapter_id
        driver.submit([5, 6], "mine", max_tokens=1)
        driver.finish()
        store = driver.engine.adapters._residency
        if left is not None:  # for others
            with store.held():
                store.leave_locked(store.weights[driver.registry.resolve("mine").adapter_digest], left)
        driver.registry.load("mine", new, load_inplace=True)
        assert housekeeping.prefetch([before]) == 0
        assert [each.tier for each in driver.engine.adapters.list_adapters([before])] == [Tier.SOURCE]


def test_random_traffic_is_not_prefetched_for() -> None:
    counters = serve(at_random(), True).manager.report().counters
    assert counters.get("loads_prediction", 0) <= 600 / 20
