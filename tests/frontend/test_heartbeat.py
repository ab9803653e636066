"""When silence is a hang: counted in ticks of the watcher, with work of the process told from idleness."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from loraplex.frontend.heartbeat import MAX_STEP, Heartbeat, ProcessWork


def ticks_to_a_hang(heartbeat: Heartbeat, at_most: int = 1000) -> int | None:
    return next((number for number in range(1, at_most + 1) if heartbeat.tick()), None)


def test_silence_without_work_is_a_hang_after_the_limit() -> None:
    heartbeat = Heartbeat(60.0, lambda seconds: False)
    assert ticks_to_a_hang(heartbeat) == 60
    assert heartbeat.silence_s == 60.0


def test_a_sign_of_life_begins_the_count_again() -> None:
    heartbeat = Heartbeat(60.0, lambda seconds: False)
    assert ticks_to_a_hang(heartbeat, 59) is None
    heartbeat.heard()
    assert heartbeat.silence_s == 0.0
    assert ticks_to_a_hang(heartbeat) == 60


def test_a_long_step_is_no_hang_until_it_takes_many_times_the_limit() -> None:
    assert ticks_to_a_hang(Heartbeat(60.0, lambda seconds: True)) == MAX_STEP * 60


def test_idle_ticks_count_although_other_threads_work_now_and_then() -> None:
    answers = iter([True, False] * 1000)
    assert ticks_to_a_hang(Heartbeat(60.0, lambda seconds: next(answers))) == 120


@pytest.mark.parametrize(("limit_s", "tick_s"), [(60.0, 1.0), (3.0, 0.75)])
def test_ticks_are_short_beside_the_limit(limit_s: float, tick_s: float) -> None:
    assert Heartbeat(limit_s, lambda seconds: False).tick_s == tick_s


def test_the_work_of_a_process() -> None:
    """A busy one works, a stopped one and one that has ended do not."""
    process = subprocess.Popen([sys.executable, "-c", "print(1, flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    works, watched = ProcessWork(process.pid), psutil.Process(process.pid)
    try:
        before_s = watched.cpu_times().user
        while watched.cpu_times().user - before_s < 0.1:
            pass
        assert works(1.0)
        watched.suspend()
        while watched.status() != psutil.STATUS_STOPPED:
            pass
        works(1.0)
        assert not works(1.0)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert not works(1.0)
