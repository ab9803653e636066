"""Mutants of a valid adapter: each is served, or refused by an error that a client sees as 4xx, in bounded memory."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from loraplex.demo.tasks import TASKS, adapter_path
from tests.security.adapter_mutator import AdapterMutator, LoadPath

NUM_MUTANTS = 80
"""`fuzz_adapters.py` makes more of them, for minutes."""
MAX_GROWTH_BYTES = 192 * 2**20


def contents(path: Path) -> list[tuple[str, bytes]]:
    return sorted((file.name, file.read_bytes()) for file in path.iterdir() if file.is_file())


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_every_mutant_is_served_or_refused(tmp_path: Path) -> None:
    mutator, path = AdapterMutator(adapter_path(TASKS[0].name), seed=20), LoadPath(tmp_path)
    path.judge(mutator.source)
    before = peak_bytes()
    for number in range(NUM_MUTANTS):
        changes = mutator.write(number, tmp_path / "mutant")
        try:
            path.judge(tmp_path / "mutant", inspects=number % 4 == 0)
        except Exception as error:
            pytest.fail(f"mutant {number} ({'; '.join(changes)}): {error!r}")
        assert peak_bytes() - before < MAX_GROWTH_BYTES, (number, changes)
    assert path.counts["served"] >= 5, "most mutants are beyond recognition"
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
