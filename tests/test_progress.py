"""The bars of a start: one for each thing that is waited for."""

from __future__ import annotations

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
