"""A backtracking matcher that counts: what Python's engine would do at most, without its shortcuts."""

from __future__ import annotations

import re
from collections.abc import Callable
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

Then = Callable[[int], bool]
"""What follows: whether the rest matches from there."""


class TooManySteps(Exception):
    """The count is above the limit."""


class StepCounter:
    """`steps`: of all `matches` of one regex, without flags, lookarounds and references."""

    def __init__(self, regex: str, limit: int) -> None:
        self.steps, self._limit = 0, limit
        self._tree = parser.parse(regex)

    def matches(self, mode: str, name: str) -> bool:
        return self._run(self._tree, name, 0, lambda at: mode == "match" or at == len(name))

    def _step(self, count: int = 1) -> None:
        self.steps += count
        if self.steps > self._limit:
            raise TooManySteps

    def _run(self, nodes: Any, name: str, at: int, then: Then, first: int = 0) -> bool:
        if first == len(nodes):
            self._step()
            return then(at)
        kind, value = nodes[first]

        def rest(position: int) -> bool:
            return self._run(nodes, name, position, then, first + 1)

        if kind is op.SUBPATTERN:
            self._step()
            return self._run(value[-1], name, at, rest)
        if kind is op.BRANCH:
            return any(self._run(branch, name, at, rest) for branch in self._counted(value[1]))
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            return self._repeat(kind, value, name, at, rest)
        self._step()
        width = 0 if kind is op.AT else 1
        return _accepts(nodes[first], name, at) and rest(at + width)

    def _counted(self, branches: Any) -> Any:
        for branch in branches:
            self._step()
            yield branch

    def _repeat(self, kind: Any, value: Any, name: str, at: int, rest: Then) -> bool:
        least, most, body = value
        if body[0][0] is op.SUBPATTERN or len(body) > 1:  # only the optional group that our own prefix is
            assert (least, most) == (0, 1)
            self._step()
            return self._run(body, name, at, rest) or rest(at)
        found = 0
        while found < most and found < len(name) - at and _accepts(body[0], name, at + found):
            found += 1
        self._step(found + 1)
        counts = range(least, found + 1)
        return any(rest(at + count) for count in (counts if kind is op.MIN_REPEAT else reversed(counts)))


def _accepts(item: Any, name: str, at: int, known: dict[str, Any] = {}) -> bool:  # noqa: B006
    """Whether one item matches there, asked of the engine itself."""
    key = str(item)
    if key not in known:
        tree = parser.SubPattern(parser.State(), [item])
        tree.state.str = ""
        known[key] = re._compiler.compile(tree)  # type: ignore[attr-defined]
    return bool(known[key].match(name, at))
