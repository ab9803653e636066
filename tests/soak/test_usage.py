"""Bills of a few seconds with kills, an exact one without, and that a wrong bill is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.usage import Asked, Plan, Report, UsageSoak

PATIENT = 10.0
"""Of the slack: how late a write is on a busy machine is no concern of a test."""


def test_no_bill_is_wrong_after_kills(tmp_path: Path) -> None:
    report = UsageSoak(Plan(12.0, kill_engine_s=3.0, kill_server_s=7.0, slack_s=PATIENT), tmp_path).run()
    assert report.findings == []
    assert min(report.num_kills) > 0


def test_without_kills_whole_answers_are_billed_to_the_token(tmp_path: Path) -> None:
    report = UsageSoak(Plan(4.0, kill_engine_s=None, kill_server_s=None), tmp_path).run()
    assert report.findings == []
    reads_all = list(report.rows.values())[::2]
    assert all(least == billed == most for bounds in reads_all for least, billed, most in bounds)
    assert sum(bounds[2][1] for bounds in reads_all) > 0


def test_bounds_are_of_what_was_seen_and_what_may_have_been_drawn() -> None:
    asked = Asked(5, 20, [(1.0, 3), (2.0, 8)])
    assert [asked.least(at_s) for at_s in (0.5, 1.5, 9.0)] == [(0, 0, 0), (1, 5, 3), (1, 5, 8)]
    assert asked.most() == (1, 5, 20)
    asked.is_whole = True
    assert asked.most() == (1, 5, 8)
    assert Asked(5, 20, is_refused=True).most() == (1, 0, 0)


@pytest.mark.parametrize(("billed", "is_found"), [(7, True), (8, False), (9, False), (10, True)])
def test_a_wrong_bill_is_found(billed: int, is_found: bool) -> None:
    report = Report({"a": [(1, 1, 1), (5, 5, 5), (8, billed, 9)]}, (0, 0))
    assert bool(report.findings) is is_found
