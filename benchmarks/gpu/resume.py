"""What an earlier call of a script left in its JSON, for `--resume`: results of the same card, torch and Triton."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.place import Place, circumstances

SAME = ("card", "torch", "triton")


@dataclass(frozen=True)
class Earlier:
    """figures: of the JSON, empty where there is none to go on from. commits: other ones than today's that it is of."""

    figures: Mapping[str, Any] = field(default_factory=dict)
    commits: Sequence[str] = ()


def find_earlier(path: Path | None, place: Place, is_wanted: bool) -> Earlier:
    """Says in a line why a file is not gone on from."""
    if not is_wanted or path is None or not path.exists():
        return Earlier()
    try:
        figures = json.loads(path.read_text())
        then = {"card": figures["title"].partition(",")[0], **figures["machine"]}
    except (ValueError, KeyError, TypeError):
        print(f"{path} is not whole: all of it is run")
        return Earlier()
    now = circumstances(place)
    other = [f"{name} {then.get(name)}" for name in SAME if then.get(name) != now[name]]
    if other:
        print(f"{path} is of {', '.join(other)}: all of it is run")
        return Earlier()
    commits = {*then.get("earlier_commits", ()), then.get("commit", "")} - {now["commit"], ""}
    return Earlier(figures, sorted(commits))
