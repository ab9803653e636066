"""A few seconds of the soak of usage, and that it would find what it looks for."""

from __future__ import annotations

import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.soak.usage import Book, Entry, rows_of, soak

WHOLE = Counter(requests=1, prompt_tokens=10, cached_tokens=4, generated_tokens=7)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.slow
def test_a_short_soak_finds_nothing(tmp_path: Path) -> None:
    """The engine is killed, or the server ends or is killed, on the way."""
    book = soak(tmp_path, seconds=14, seed=1, port=free_port(), num_clients=3, every_s=3)
    assert not book.findings(rows_of(tmp_path))
    assert sum(book.outcomes[what] for what in ("engine killed", "server killed", "server ended")) > 0
    assert book.outcomes["200"] > 0
    assert book.outcomes["200 stream"] > 0


def row(**changes: int) -> dict[str, Any]:
    return {"key_id": "aaaaaaaa", "adapter": "sql", **WHOLE, **changes}


def book_of(least: Counter[str], most: Counter[str], kill_s: float | None = None) -> Book:
    book = Book(kills_s=[] if kill_s is None else [kill_s])
    book.add(Entry("aaaaaaaa", "sql", 10.0, 11.0, least, most), "200")
    return book


@pytest.mark.parametrize("name", list(WHOLE))
@pytest.mark.parametrize("change", [-1, 1])
def test_one_token_too_few_or_too_many_of_a_whole_answer_is_found(name: str, change: int) -> None:
    assert not book_of(WHOLE, WHOLE).findings([row()])
    (finding,) = book_of(WHOLE, WHOLE).findings([row(**{name: WHOLE[name] + change})])
    assert name in finding


def test_a_lost_row_and_a_row_too_many_are_found() -> None:
    assert len(book_of(WHOLE, WHOLE).findings([])) == len(WHOLE)
    assert len(Book().findings([row()])) == len(WHOLE)


def test_of_a_cut_answer_what_came_is_the_least() -> None:
    book = book_of(Counter(generated_tokens=3), WHOLE)
    assert not book.findings([row(generated_tokens=3)])
    assert len(book.findings([])) == 1
    assert book.findings([row(generated_tokens=2)])
    assert book.findings([row(generated_tokens=8)])


def test_what_ended_just_before_a_kill_may_be_lost_and_not_be_there_twice() -> None:
    for kill_s, num_lost in ((9.0, 4), (10.5, 0), (12.0, 0), (20.0, 4)):
        assert len(book_of(WHOLE, WHOLE, kill_s).findings([])) == num_lost
    assert book_of(WHOLE, WHOLE, 12.0).findings([row(generated_tokens=14)])
