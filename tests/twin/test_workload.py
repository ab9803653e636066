"""Arrivals are what their settings say; a trace is read as it was written, or refused with its line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.errors import ConfigError
from loraplex.twin.workload import Arrival, Arrivals, Workload, lengths


def test_arrivals_have_their_rate_popularity_and_lengths() -> None:
    workload = Workload(adapters=50, zipf=1.0, rate=20, cv=2.0, requests=40_000, prompt_tokens="10-30", base_share=0.25)
    drawn = workload.arrivals()
    gaps = np.diff([0.0, *drawn.at_s])
    assert drawn.at_s[-1] == pytest.approx(40_000 / 20)
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.1)
    assert (drawn.adapters < 0).mean() == pytest.approx(0.25, abs=0.02)
    counts = np.bincount(drawn.adapters[drawn.adapters >= 0], minlength=50)
    assert counts / counts.sum() == pytest.approx(workload.popularity(), abs=0.01)
    assert (drawn.prompts.min(), drawn.prompts.max()) == (10, 30)
    assert drawn.prompts.mean() == pytest.approx(20, abs=0.2)
    assert set(drawn.outputs.tolist()) == {64}


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(1, 60), st.integers(0, 5))
def test_arrivals_are_seeded_and_in_order(adapters: int, requests: int, seed: int) -> None:
    workload = Workload(adapters=adapters, requests=requests, seed=seed, base_share=0.1, output_tokens="1-9")
    first, second = list(workload.arrivals()), list(workload.arrivals())
    assert first == second == [workload.arrivals()[index] for index in range(requests)]
    assert [each.at_s for each in first] == sorted(each.at_s for each in first)
    assert all(each.adapter is None or 0 <= each.adapter < adapters for each in first)
    assert all(each.adapter is None for each in first) or adapters


def test_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [(2.5, "sql", 9, 3), (0.5, None, 5, 1), (1.0, "chat", 7, 2), (3.0, "chat", 8, 4)]
    keys = "at_s", "adapter", "prompt_tokens", "output_tokens"
    path.write_text("\n".join(json.dumps(dict(zip(keys, row, strict=True))) for row in rows) + "\n\n")
    found = Workload(trace=str(path)).arrivals()
    assert found.names == ["sql", "chat"]
    assert found.num_adapters == 2
    assert list(found) == [
        Arrival(0.5, None, 5, 1), Arrival(1.0, 1, 7, 2), Arrival(2.5, 0, 9, 3), Arrival(3.0, 1, 8, 4)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 1: JSONDecodeError"),
        ("[1]", "line 1: TypeError"),
        ('{"at_s": 1, "adapter": "a", "prompt_tokens": 3}', "line 1: KeyError: 'output_tokens'"),
        ('{"at_s": NaN, "adapter": "a", "prompt_tokens": 3, "output_tokens": 3}', "at_s must be >= 0"),
        ('{"at_s": 1, "adapter": 7, "prompt_tokens": 3, "output_tokens": 3}', "adapter a name or null"),
        ('{"at_s": 1, "adapter": "a", "prompt_tokens": 0, "output_tokens": 3}', "tokens 1.."),
        ('{"at_s": 0, "adapter": null, "prompt_tokens": 1e999, "output_tokens": 3}', "line 1: OverflowError"),
        (f'{{"at_s": {"9" * 400}, "adapter": null, "prompt_tokens": 1, "output_tokens": 3}}', "line 1: OverflowError"),
        ("[" * 200_000, "line 1: RecursionError"),
        ("", "has no requests"),
    ],
)
def test_what_is_no_trace_is_refused_by_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=message):
        Arrivals.read(path)


def test_a_trace_has_its_own_rate(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rate is the trace's: leave it out"):
        Workload(trace=str(tmp_path / "t"), rate=9)
    with pytest.raises(ConfigError, match="cannot be read"):
        Workload(trace=str(tmp_path / "t")).arrivals()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adapters": -1}, "adapters must be 0..100000000, got -1"),
        ({"adapters": 10**12}, "adapters must be 0..100000000, got 1000000000000"),
        ({"prompt_tokens": "9" * 5000}, r"LOW-HIGH, 1\.\.1048576, got '9{40}'"),
        ({"zipf": -0.1}, "zipf must be 0..10"),
        ({"base_share": 1.5}, "base_share must be 0..1"),
        ({"rate": 0}, "rate must be > 0"),
        ({"cv": 0}, "cv must be > 0"),
        ({"requests": 0}, "requests must be 1.."),
        ({"prompt_tokens": "9-3"}, "prompt_tokens must be a number or LOW-HIGH, 1..1048576, got '9-3'"),
        ({"output_tokens": "few"}, "output_tokens must be a number"),
        ({"shared_prefix_tokens": 64}, "must be >= 0 and less than prompt_tokens"),
        ({"ranks": ()}, "ranks must be 1..512"),
        ({"ranks": (8, 0)}, "ranks must be 1..512"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Workload(**settings)  # type: ignore[arg-type]


def test_lengths() -> None:
    assert lengths("x", "7") == (7, 7)
    assert lengths("x", "7-9") == (7, 9)
