"""An engine process that holds requests, so that a test acts while one runs, however slow the machine is.

python -m tests.frontend.holding_process ADDRESS        started by Supervision(module=...)

Orders come as aborts of requests that are not there: HOLD_ID and LET_GO_ID. In between, a request with `ignore_eos`
gets NUM_FREE_TOKENS and no more; it keeps its KV blocks and its adapter, and all others run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

from loraplex.core import TokenOutput
from loraplex.engine import build as engine_build
from loraplex.engine.build import build_engine
from loraplex.engine.engine import EngineCore
from loraplex.engine.schedule_plan import RequestState
from loraplex.frontend import process

MODULE = "tests.frontend.holding_process"
HOLD_ID, LET_GO_ID = "order: hold", "order: let go"
NUM_FREE_TOKENS = 4


class Holding:
    """Stands between an engine and its scheduler's choice of running requests."""

    def __init__(self, engine: EngineCore) -> None:
        self._is_on = False
        self._abort, self._next_tokens = engine.abort, engine._scheduler._next_tokens
        engine.abort = self._abort_or_obey  # type: ignore[method-assign]
        engine._scheduler._next_tokens = self._free_tokens  # type: ignore[method-assign]

    def _abort_or_obey(self, request_ids: Iterable[str]) -> list[TokenOutput]:
        request_ids = tuple(request_ids)
        if request_ids in ((HOLD_ID,), (LET_GO_ID,)):
            self._is_on = request_ids == (HOLD_ID,)
            return []
        return self._abort(request_ids)

    def _free_tokens(self) -> Iterator[tuple[RequestState, int]]:
        return ((state, num_tokens) for state, num_tokens in self._next_tokens() if not self._is_held(state))

    def _is_held(self, state: RequestState) -> bool:
        return self._is_on and state.request.sampling_params.ignore_eos and state.num_output_tokens >= NUM_FREE_TOKENS


def build(*arguments: Any, **options: Any) -> EngineCore:
    engine = build_engine(*arguments, **options)
    Holding(engine)
    return engine


def main(address: str) -> int:
    with mock.patch.object(engine_build, "build_engine", build):
        return process.main(address)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
