"""Loaders' threads where the system has no more."""

from __future__ import annotations

import threading
from typing import cast

import pytest

from loraplex.processes.loader_threads import LoaderThreads


def refuse_threads(patch: pytest.MonkeyPatch) -> None:
    def fail(_thread: object) -> None:
        raise RuntimeError("can't start new thread")

    patch.setattr(threading.Thread, "start", fail)


def test_a_job_without_a_thread_of_its_own_runs_in_one_that_comes_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the engine, whose thread submits loads."""
    loader, gate, has_begun, done = LoaderThreads(2, stuck_s=600), *(threading.Event() for _ in range(3))
    loader.submit(lambda: cast(None, (has_begun.set(), gate.wait(60))), "acme")
    assert has_begun.wait(60)
    refuse_threads(monkeypatch)
    loader.submit(done.set, "beta")
    assert not done.is_set()
    gate.set()
    assert done.wait(60)
    loader.close()
    assert not loader._threads


def test_without_any_thread_a_job_waits_until_there_is_one() -> None:
    """One that had not started counted as idle: the jobs of all tenants waited for it."""
    loader, done, other = LoaderThreads(1, stuck_s=0.02), threading.Event(), threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        refuse_threads(patch)
        loader.submit(done.set, "acme")
        assert not loader._threads
    loader.submit(other.set, "beta")
    assert done.wait(60)
    assert other.wait(60)
    loader.close()
    assert not loader._threads
