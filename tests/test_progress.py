"""The bars of a start: one for each thing that is waited for."""

from __future__ import annotations

import logging

import pytest

from loraplex.progress import StartProgress


def test_a_bar_for_each_thing_in_words() -> None:
    with StartProgress() as progress:
        for what, done, total in (
            ("weights", 5, 10),
            ("weights", 10, 10),
            ("kernels", 2, 9),
            ("graphs", 1, 22),
            ("adapters", 1, 1),
        ):
            progress.update(what, done, total)
        tasks = progress._progress.tasks
    assert [task.description for task in tasks] == [
        "loading weights",
        "compiling kernels",
        "capturing graphs",
        "loading adapters",
    ]
    assert [(task.completed, task.total) for task in tasks] == [(10, 10), (2, 9), (1, 22), (1, 1)]


def test_without_a_terminal_each_quarter_is_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with StartProgress() as progress:
        for done in range(101):
            progress.update("weights", done * 1000, 100_000)
        for done in (1, 2):
            progress.update("adapters", done, 2)
    assert caplog.messages == [
        "starting the engine",
        "loading weights: 0 % (0 bytes of 100.0 kB)",
        *(f"loading weights: {percent} % ({percent}.0 kB of 100.0 kB)" for percent in (25, 50, 75, 100)),
        "loading adapters: 50 % (1 of 2)",
        "loading adapters: 100 % (2 of 2)",
    ]
