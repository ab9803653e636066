"""Requests whose grammar is not compiled: they are not in the queue yet, so no step looks at each of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from loraplex.engine.schedule_plan import RequestState
from loraplex.errors import InvalidRequestError

MAX_A_STEP = 256
NUM_LOOKS = 8
"""At grammars that are not compiled, in a step: threads take them in order, a few at a time."""


class CompilingRequests:
    """In the order in which they came."""

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
        """Whether it was here."""
        return self._states.pop(state, state) is None

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
            if is_ready:
                del self._states[state]
                yield state, None
            elif (num_looks := num_looks + 1) == NUM_LOOKS:
                return
