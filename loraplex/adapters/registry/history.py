"""What each name answered with before what answers now, so that a rollback knows the way back. No locks, no versions, no store."""

from __future__ import annotations

from collections.abc import Iterable, KeysView

Answer = int | str
"""What a name answers with: a version of its own, by number, or what answers for another name that it was switched to."""

MAX_OTHERS = 8
"""Other adapters remembered for one name: somebody may switch it to a new one every hour."""


class AnswerHistory:
    """Answers of a name, the last to answer last, each once, without the one that it has now.

    v1, v2, rollback             v1 answers   earlier: v2
    switch to `other`            `other`      earlier: v2, v1
    rollback                     v1           earlier: v2, `other`
    """

    def __init__(self) -> None:
        self._earlier: dict[str, tuple[Answer, ...]] = {}

    @property
    def names(self) -> KeysView[str]:
        return self._earlier.keys()

    def of(self, name: str) -> tuple[Answer, ...]:
        return self._earlier.get(name, ())

    def note(self, name: str, before: Answer | None, now: Answer) -> None:
        """`name` answered with `before` (None: it was not there) and answers with `now`."""
        if before is not None and before != now:
            self.put(name, [*(each for each in self.of(name) if each not in (before, now)), before])

    def put(self, name: str, earlier: Iterable[Answer]) -> None:
        answers = tuple(earlier)
        others = [each for each in answers if isinstance(each, str)]
        dropped = others[: max(0, len(others) - MAX_OTHERS)]
        self._earlier[name] = tuple(each for each in answers if each not in dropped)

    def drop_version(self, name: str, number: int) -> None:
        """The name cannot go back to that version any more."""
        self.put(name, (each for each in self.of(name) if each != number))

    def forget(self, name: str) -> None:
        self._earlier.pop(name, None)

    def numbers(self, name: str) -> list[int]:
        """Versions of its own among the earlier answers."""
        return [each for each in self.of(name) if isinstance(each, int)]
