"""The log of events."""

from __future__ import annotations

from loraplex.events import MAX_KEPT_EVENTS, EventKind, EventLog


def test_events_are_taken_once_and_in_order() -> None:
    now = iter((1.0, 2.0))
    log = EventLog(lambda: next(now))
    log.add(EventKind.LOAD, "adapter 'a' is there", adapter_id=1, adapter_name="a", nbytes=64)
    log.add(EventKind.EVICT, "adapter 'a' left")
    first, second = log.take()
    assert (first.kind, first.time_s, first.adapter_name, first.details) == (EventKind.LOAD, 1.0, "a", {"nbytes": 64})
    assert (second.time_s, second.adapter_id) == (2.0, None)
    assert log.take() == ()


def test_the_oldest_are_forgotten_when_nobody_takes_them() -> None:
    log = EventLog()
    for index in range(MAX_KEPT_EVENTS + 5):
        log.add(EventKind.DROP, str(index))
    assert [event.text for event in log.take()] == [str(index) for index in range(5, MAX_KEPT_EVENTS + 5)]
