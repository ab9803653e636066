"""Names that were switched to another, and for each of those the names that go to it.

The other way round is kept, too, and not worked out where a card is made: that is done under the lock that requests
take.
"""

from __future__ import annotations

from collections.abc import Iterator

from loraplex.errors import AdapterConflictError

MAX_ALIASES = 1024
"""Of one adapter: a switch of it writes them all."""


class Aliases:
    """A name goes to one other. Belongs to the table of names, and to its lock."""

    def __init__(self) -> None:
        self._targets: dict[str, str] = {}
        self._names: dict[str, dict[str, None]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._targets

    def __getitem__(self, name: str) -> str:
        return self._targets[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __setitem__(self, name: str, target: str) -> None:
        self.pop(name)
        self._targets[name] = target
        self._names.setdefault(target, {})[name] = None

    def get(self, name: str) -> str | None:
        """Where the name goes to."""
        return self._targets.get(name)

    def resolve(self, name: str) -> str:
        """What answers for the name; itself, where it was not switched."""
        return self._targets.get(name, name)

    def pop(self, name: str) -> str | None:
        """Where the name went to; it goes nowhere now."""
        target = self._targets.pop(name, None)
        if target is not None:
            names = self._names[target]
            del names[name]
            if not names:
                del self._names[target]
        return target

    def copy(self) -> dict[str, str]:
        return self._targets.copy()

    def of(self, target: str) -> tuple[str, ...]:
        """The names that go to it, in the order of their switches."""
        return tuple(self._names.get(target, ()))

    def is_target(self, name: str) -> bool:
        return name in self._names

    def check_room(self, old: str, new: str) -> None:
        """Raises AdapterConflictError when `new` would have too many names, with `old` and those that go there."""
        names = self._names.get(new, {}).keys() | self._names.get(old, {}).keys() | {old}
        if len(names - {new}) > MAX_ALIASES:
            raise AdapterConflictError(
                f"{old!r} cannot be switched to {new!r}: {len(names - {new})} names would go to that adapter, at most "
                f"{MAX_ALIASES} may; unload names that are not used any more"
            )

    def check_integrity(self) -> None:
        """Raises AssertionError unless both directions are of the same switches."""
        found = {name: target for target, names in self._names.items() for name in names}
        assert found == self._targets, f"{found} are the names of targets, {self._targets} the targets of names"
        assert all(self._names.values()), "a target without names"
