"""When a merge rests. What the process makes is tested in tests/server/test_merges.py."""

from __future__ import annotations

import pytest

from loraplex.frontend.merge_process import LONGEST_REST_S, RESTS_FOR_WORK, Pace


class Machine:
    """Its clocks are moved by hand, and by rests."""

    def __init__(self) -> None:
        self.wall = self.busy = 100.0
        self.rests: list[float] = []

    def work(self, seconds: float, share: float) -> None:
        self.wall += seconds / share
        self.busy += seconds

    def sleep(self, seconds: float) -> None:
        self.wall += seconds
        self.rests.append(seconds)


def paced(machine: Machine) -> Pace:
    return Pace(lambda: machine.wall, lambda: machine.busy, machine.sleep)


def test_a_merge_alone_on_the_machine_does_not_rest() -> None:
    machine = Machine()
    pace = paced(machine)
    for _ in range(5):
        machine.work(0.01, share=0.97)
        pace.rest()
    assert machine.rests == []


def test_it_rests_for_what_it_worked_while_others_want_the_core() -> None:
    machine = Machine()
    pace = paced(machine)
    for _ in range(5):
        machine.work(0.01, share=0.5)
        pace.rest()
    assert machine.rests == pytest.approx([RESTS_FOR_WORK * 0.01] * 5)


def test_a_rest_is_no_reason_for_the_next_one() -> None:
    machine = Machine()
    pace = paced(machine)
    machine.work(0.01, share=0.1)
    pace.rest()
    machine.work(0.01, share=1.0)
    pace.rest()
    assert machine.rests == pytest.approx([RESTS_FOR_WORK * 0.01])


def test_no_rest_is_long() -> None:
    machine = Machine()
    pace = paced(machine)
    machine.work(7.0, share=0.02)
    pace.rest()
    assert machine.rests == [LONGEST_REST_S]
