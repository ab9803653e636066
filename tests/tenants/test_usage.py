"""Usage is exact: across flushes, failures of the database, closes, and requests that are cut off."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest

from loraplex.core import CompletionOutput, FinishReason, RequestOutput
from loraplex.errors import JournalError
from loraplex.tenants import usage
from loraplex.tenants.store import TenantStore, open_store
from loraplex.tenants.usage import Counts, Tab, UsageBook, UsageKey, UsageQuery, as_csv
from tests.tenants.conftest import until

NOON = 1_795_435_200.0


def output(num_tokens: int, num_cached: int = 0, finished: bool = False) -> RequestOutput:
    completion = CompletionOutput(0, "", tuple(range(num_tokens)), FinishReason.STOP if finished else None)
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=(1,),
        outputs=(completion,),
        finished=finished,
        num_cached_tokens=num_cached,
    )


def tab(adapter: str = "sql", key_id: str = "aaaaaaaa", tenant: str = "acme", num_prompt: int = 10) -> Tab:
    return Tab(key_id, tenant, adapter, num_prompt, began_s=100.0)


def total(store: TenantStore) -> Counts:
    counts = Counts()
    for row in store.usage(UsageQuery(), 1000):
        counts.add(Counts(**{name: row[name] for name in Counts.__dataclass_fields__}))
    return counts


def spend(book: UsageBook, one: Tab) -> None:
    """A request from its admission to its end."""
    book.open(one)
    one.first_s, one.output = one.began_s, output(1, finished=True)
    book.end(one)


@pytest.fixture
def opened(state_dir: Path) -> TenantStore:
    return open_store(state_dir, None)


def test_a_request_is_counted_once_however_often_it_is_looked_at(opened: TenantStore) -> None:
    drawn: list[tuple[str, int]] = []
    with closing(opened), closing(UsageBook(opened, lambda *each: drawn.append(each), interval_s=1e6)) as book:
        one = tab()
        book.open(one)
        book.flush()
        assert total(opened) == Counts(), "a prompt that is not computed costs nothing"
        one.first_s = 100.5
        for num_tokens in (1, 3, 7):
            one.output = output(num_tokens, 4)
            book.flush()
            book.flush()
        one.output = output(9, 4, finished=True)
        book.end(one)
        book.end(one)
        book.flush()
        assert total(opened) == Counts(1, 0, 10, 4, 9, 0.5)
    assert sum(num_tokens for _, num_tokens in drawn) == 9


def test_a_tenant_has_rows_for_so_many_names_a_day(opened: TenantStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may load and unload one adapter under new names all day: each had a row that is kept for 400 days."""
    monkeypatch.setattr(usage, "MAX_ADAPTERS_A_DAY", 3)
    now = [NOON]
    with closing(opened), closing(UsageBook(opened, clock=lambda: now[0], interval_s=1e6)) as book:
        for tenant in ("acme", "beta", ""):
            for name in ("a", "b", "c", "d", "b", "e"):
                spend(book, tab(name, key_id=tenant or "operator", tenant=tenant))
        now[0] += 86_400
        spend(book, tab("e", key_id="acme"))
        book.flush()
        rows = [(row["key_id"], row["adapter"], row["requests"]) for row in opened.usage(UsageQuery(), 100)]
    bounded = ("//rest", 2), ("a", 1), ("b", 2), ("c", 1)
    assert rows == [
        *(("acme", *each) for each in bounded),
        *(("beta", *each) for each in bounded),
        *(("operator", name, 2 if name == "b" else 1) for name in "abcde"),
        ("acme", "e", 1),
    ]


def test_what_ended_in_an_error_is_one(opened: TenantStore) -> None:
    with closing(opened), closing(UsageBook(opened, interval_s=1e6)) as book:
        one = tab()
        book.open(one)
        one.output = output(2)
        one.has_failed = True
        book.end(one)
        book.flush()
        assert total(opened) == Counts(requests=1, errors=1, prompt_tokens=10, generated_tokens=2)


def test_the_end_of_a_server_loses_nothing(opened: TenantStore) -> None:
    """Also of requests that are still open."""
    with closing(opened):
        book = UsageBook(opened, interval_s=1e6)
        one = tab()
        book.open(one)
        one.output = output(5)
        book.close()
        assert total(opened).generated_tokens == 5


def test_a_silent_database_holds_no_end_up_and_what_it_did_not_take_is_said(
    opened: TenantStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_asked, is_answered = threading.Event(), threading.Event()

    def stands_still(used: Mapping[UsageKey, Counts]) -> None:
        is_asked.set()
        is_answered.wait(60)

    monkeypatch.setattr(opened, "add_usage", stands_still)
    with closing(opened):
        book = UsageBook(opened, interval_s=0.001)
        one, late = tab(), tab()
        book.open(one)
        one.output = output(5)
        assert is_asked.wait(60)
        book.open(late)
        late.output = output(2)
        book.end(late)
        book.close(patience_s=0.01)
        assert "27 tokens of 2 requests are in no row of usage" in caplog.text
        is_answered.set()
        until(lambda: not book.is_writing)


def test_a_database_that_is_away_loses_nothing(opened: TenantStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(used: Mapping[UsageKey, Counts]) -> None:
        raise JournalError("the disk is full")

    with closing(opened), closing(UsageBook(opened, interval_s=1e6)) as book:
        one = tab()
        book.open(one)
        with monkeypatch.context() as away:
            away.setattr(opened, "add_usage", refuse)
            for num_tokens in (1, 2, 3):
                one.output = output(num_tokens)
                with pytest.raises(JournalError):
                    book.flush()
        one.output = output(4)
        book.flush()
        assert total(opened) == Counts(requests=1, prompt_tokens=10, generated_tokens=4)


def test_the_writer_goes_on_after_any_error(opened: TenantStore, monkeypatch: pytest.MonkeyPatch) -> None:
    add_usage, num_errors = opened.add_usage, 0

    def fails_at_first(used: Mapping[UsageKey, Counts]) -> None:
        nonlocal num_errors
        if num_errors < 2:
            num_errors += 1
            raise ValueError("of a driver")
        add_usage(used)

    monkeypatch.setattr(opened, "add_usage", fails_at_first)
    with closing(opened), closing(UsageBook(opened, interval_s=0.001)) as book:
        one = tab()
        one.output = output(1)
        book.open(one)
        until(lambda: total(opened).requests == 1)
        assert num_errors == 2


def test_a_day_ends_at_midnight(opened: TenantStore) -> None:
    now = [NOON]
    with closing(opened), closing(UsageBook(opened, clock=lambda: now[0], interval_s=1e6)) as book:
        one = tab()
        book.open(one)
        one.output = output(5)
        book.flush()
        now[0] += 86400
        one.output = output(8)
        book.end(one)
        book.flush()
        rows = opened.usage(UsageQuery(), 10)
        assert [(row["day"], row["generated_tokens"], row["requests"]) for row in rows] == [
            ("2026-11-23", 5, 1),
            ("2026-11-24", 3, 0),
        ]


@pytest.mark.parametrize("seed", range(5))
def test_sums_of_many_are_exact(opened: TenantStore, seed: int) -> None:
    """Random requests of several keys and adapters, written at random moments by several books, one after another."""
    rng = random.Random(seed)
    expected: defaultdict[tuple[str, str], Counts] = defaultdict(Counts)
    with closing(opened):
        for _ in range(3):
            with closing(UsageBook(opened, clock=lambda: NOON, interval_s=1e6)) as book:
                running: list[tuple[Tab, int]] = []
                for _ in range(200):
                    if rng.random() < 0.4:
                        key_id, adapter = rng.choice(["aaaaaaaa", "bbbbbbbb"]), rng.choice(["", "sql", "chat"])
                        one = tab(adapter, key_id)
                        book.open(one)
                        running.append((one, 0))
                    elif running:
                        index = rng.randrange(len(running))
                        one, num_tokens = running[index]
                        more = rng.randrange(1, 5)
                        counts = expected[one.key_id, one.adapter]
                        counts.requests += one.output is None
                        counts.prompt_tokens += 10 if one.output is None else 0
                        counts.generated_tokens += more
                        one.output = output(num_tokens + more)
                        running[index] = one, num_tokens + more
                        if rng.random() < 0.3:
                            book.end(one)
                            del running[index]
                    if rng.random() < 0.1:
                        book.flush()
        found = {
            (row["key_id"], row["adapter"]): Counts(**{name: row[name] for name in asdict(Counts())})
            for row in opened.usage(UsageQuery(), 1000)
        }
    assert found == expected


def test_csv_is_quoted_and_starts_no_formula() -> None:
    rows = [{"a": '=1+"x"', "n": -1}, {"a": "x,y", "n": None}, {"a": "plain", "n": 2}]
    assert as_csv(rows, ["a", "n"]) == 'a,n\r\n"\'=1+""x""",-1\r\n"x,y",\r\nplain,2\r\n'
