"""The soak of moves, short: requests that move say what those that stay say, and one that does not is counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.consolidation import stretched_base, two_runners, wrong_moves
from loraplex.core import Request

pytestmark = pytest.mark.slow


async def test_what_moves_is_right_and_what_is_wrong_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_runners(stretched_base(tmp_path / "base")) as engine:
        num_moved, num_moves, num_wrong = await wrong_moves(engine, 12)
        assert num_moves >= num_moved >= 12
        assert num_wrong == 0
        unfinished = engine._mover._unfinished

        def forgetful(request_id: str) -> Sequence[Request]:
            """A token of each is lost on its way."""
            return [replace(each, output_token_ids=each.output_token_ids[:-1]) for each in unfinished(request_id)]

        monkeypatch.setattr(engine._mover, "_unfinished", forgetful)
        assert (await wrong_moves(engine, 6))[2] > 0
