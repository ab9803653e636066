"""LoRAX's client as it is, against a real server."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.clients.conftest import SCRIPTS

pytestmark = pytest.mark.clients


def test_lorax_client(run: Callable[..., str]) -> None:
    assert "all calls answered" in run("lorax", "python", str(SCRIPTS / "lorax_calls.py"))
