"""Mutants of a valid adapter: each is served, or refused by an error that a client sees as 4xx, in bounded memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from loraplex.demo.tasks import TASKS, adapter_path
from tests.security.adapter_mutator import AdapterMutator, LoadPath

NUM_MUTANTS = 300
MAX_PEAK_BYTES = 96 * 2**20


def contents(path: Path) -> list[tuple[str, bytes]]:
    return sorted((file.name, file.read_bytes()) for file in path.iterdir() if file.is_file())


def test_every_mutant_is_served_or_refused(tmp_path: Path) -> None:
    mutator, path = AdapterMutator(adapter_path(TASKS[0].name), seed=20), LoadPath(tmp_path)
    tracemalloc.start()
    try:
        for number in range(NUM_MUTANTS):
            changes = mutator.write(number, tmp_path / "mutant")
            tracemalloc.reset_peak()
            try:
                path.judge(tmp_path / "mutant")
            except Exception as error:
                pytest.fail(f"mutant {number} ({'; '.join(changes)}): {error!r}")
            assert tracemalloc.get_traced_memory()[1] < MAX_PEAK_BYTES, (number, changes)
    finally:
        tracemalloc.stop()
    assert path.counts["served"] >= 10, "most mutants are beyond recognition"
    assert len(path.counts) >= 6, path.counts


def test_a_mutant_is_the_same_each_time(tmp_path: Path) -> None:
    mutator = AdapterMutator(adapter_path(TASKS[1].name), seed=3)
    for number in (5, 11):
        changes = mutator.write(number, tmp_path / "a")
        assert mutator.write(number, tmp_path / "b") == changes
        assert contents(tmp_path / "a") == contents(tmp_path / "b")
        assert AdapterMutator(mutator.source, seed=4).write(number, tmp_path / "b") != changes


def test_the_original_is_served(tmp_path: Path) -> None:
    assert LoadPath(adapter_path(TASKS[0].name).parent).judge(adapter_path(TASKS[0].name)) == "served"
