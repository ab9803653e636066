"""The lines of history.json, and that the picture of them is the one in the documentation."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import history
from benchmarks.history import Measured
from benchmarks.protocol import Run
from benchmarks.report import EngineResult, Report


def run(rate: float, pattern: str) -> Run:
    return Run(pattern, 0, rate, 0.5, 20.0, None, 0.01)


def a_report(commit: str = "0123abcd") -> Report:
    facts = {
        "date": "2026-11-27 10:00:00",
        "commit": commit,
        "cpu": "a CPU",
        "isa": "avx2",
        "threads": 2,
        "size": "s",
        "fixture": "s-7",
        "dtype": "float32",
        "workload": {"num_requests": 16, "prompt_len": 64, "output_len": 32},
    }
    own = EngineResult(True, runs=[run(200.04, "base"), run(90.0, "distinct")])
    peers = {
        "vllm": EngineResult(False, version="1.2", runs=[run(100.0, "base")]),
        "hf": EngineResult(False, version="5", runs=[run(50.0, "base"), run(30.0, "distinct")]),
        "broken": EngineResult(False, error="it did not start"),
    }
    return Report(facts, {"loraplex": own, **peers})


def test_a_report_becomes_a_line() -> None:
    line = Measured.of(a_report())
    assert (line.date, line.commit, line.workload) == ("2026-11-27", "0123abcd", "s float32, 16 x (64+32)")
    assert line.machine == "a CPU, avx2, 2 threads"
    assert line.rates == {"loraplex": {"base": 200.0, "distinct": 90.0}, "vllm": {"base": 100.0}, "hf": {
        "base": 50.0, "distinct": 30.0}}  # fmt: skip
    assert line.versions == {"vllm": "1.2", "hf": "5"}
    assert (line.over_best_peer("base"), line.over_best_peer("distinct"), line.over_best_peer("skewed")) == (2, 3, None)


@pytest.mark.parametrize("commit", ["0123abcd+", ""])
def test_a_checkout_with_changes_is_no_line(commit: str) -> None:
    with pytest.raises(ValueError, match="measure a commit without changes"):
        Measured.of(a_report(commit))


def test_lines_are_kept_by_date_and_measured_again_in_place(tmp_path: Path) -> None:
    line = Measured.of(a_report())
    older = replace(line, date="2026-11-01", commit="older")
    again = replace(line, rates={"loraplex": {"base": 1.0}})
    history.write(history.added(history.added([line], older), again), path := tmp_path / "history.json")
    assert history.read(path) == [older, again]
    assert len(path.read_text().splitlines()) == 4


def test_curves_have_what_was_timed_beside_a_peer() -> None:
    line = Measured.of(a_report())
    alone = replace(line, date="2026-11-28", rates={"loraplex": {"base": 1.0}})
    assert history.curves([line, alone]) == {
        (line.workload, "base"): [(0, 2.0)],
        (line.workload, "distinct"): [(0, 3.0)],
    }


def test_the_lines_are_shown() -> None:
    text = io.StringIO()
    history.show(Console(file=text, width=200), history.read())
    assert "76401075" in text.getvalue()
    assert "openvino GenAI 2026.4.1" in text.getvalue()


def test_the_picture_is_of_these_lines() -> None:
    assert history.digest() in history.PICTURE.read_text(), "run `python -m benchmarks.history draw`"


def test_a_report_that_cannot_be_added_changes_nothing(tmp_path: Path) -> None:
    before = history.HISTORY.read_text()
    (tmp_path / "report.json").write_text(a_report("0123+").to_json())
    with pytest.raises(SystemExit, match="0123\\+"):
        history.main(["add", str(tmp_path / "report.json")])
    assert history.HISTORY.read_text() == before
