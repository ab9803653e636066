"""`loraplex route` as a process: what is set before its event loop runs."""

from __future__ import annotations

import pytest

from loraplex.router import run
from loraplex.router.settings import RouteSettings


def test_collections_of_garbage_hold_up_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own thresholds, and all that is there at the start: 0.3 s under a thousand streams."""
    done: list[str] = []

    async def route(*arguments: object) -> None:
        done.append("route")

    monkeypatch.setattr(run, "route", route)
    monkeypatch.setattr(run, "tune_interpreter", lambda: done.append("tune"))
    monkeypatch.setattr(run, "raise_descriptor_limit", lambda: None)
    monkeypatch.setattr(run.logs, "configure", lambda *arguments, **named: None)
    assert run.run_router(["127.0.0.1:1"], RouteSettings(port=0)) == 0
    assert done == ["tune", "route"]
