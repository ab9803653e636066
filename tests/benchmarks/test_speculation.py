"""The benchmark of drafts runs as its page says, without options but for how often."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import speculation


@pytest.mark.slow
def test_each_suite_is_answered_alike_and_repeats_take_fewer_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "speculation.json"
    monkeypatch.setattr(
        "sys.argv", ["speculation", "--rounds", "1", "--phrases", "2", "--batch", "1", "--json", str(out)]
    )
    speculation.main()
    found = {each["suite"]: each for each in json.loads(out.read_text())["results"]}
    assert set(found) == {"copy", "repeat", "random"}
    assert found["repeat"]["fewer_steps"] > 2
    assert found["repeat"]["accepted_share"] > 0.9
    assert found["random"]["fewer_steps"] == 1
