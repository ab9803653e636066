"""Requests whose grammar is not compiled: they join the queue when it is, so no step looks at each of them.

A step takes MAX_A_STEP at most, and ends its look after NUM_LOOKS that are not ready. One whose grammar is compiled
joins as if it came at that moment, so none of another client waits for it; one whose grammar cannot be compiled ends
with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from loraplex.engine.schedule_plan import RequestState
from loraplex.errors import InvalidRequestError

MAX_A_STEP = 256
NUM_LOOKS = 64
"""At grammars that are not compiled, in a step. The next looks at others: those of clients are compiled in turn."""


class CompilingRequests:
    """As they came."""

    def __init__(self) -> None:
        self._states: dict[RequestState, None] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states)

    def add(self, state: RequestState) -> None:
        assert state.grammar is not None, "a request for any text waits for no grammar"
        self._states[state] = None

    def discard(self, state: RequestState) -> bool:
        """Whether it was here. Its grammar is not compiled then, unless that has begun."""
        was_here = self._states.pop(state, state) is None
        if was_here and state.grammar is not None:
            state.grammar.cancel()
        return was_here

    def take(self) -> Iterator[tuple[RequestState, InvalidRequestError | None]]:
        """Those whose grammar is there, which leave, and those whose grammar cannot be, which stay, with the reason."""
        num_looks = 0
        for state in list(islice(self._states, MAX_A_STEP)):
            assert state.grammar is not None
            try:
                is_ready = state.grammar.is_ready()
            except InvalidRequestError as error:
                yield state, error
                continue
            del self._states[state]
            if is_ready:
                yield state, None
                continue
            self._states[state] = None
            if (num_looks := num_looks + 1) == NUM_LOOKS:
                return
