"""Which adapters a replica has, and which its next process is to have again. Pure: `watching` reads, `restoring` acts.

    held    what its list said last, and what verbs changed since; None: it was not read yet
    to_do   what it is to be made: a card to load, or None for a name to unload

A process that starts again gets what the one before it had, and what verbs changed while it was away. A name that the
new process has by itself (its command line, its journal) stays as it is there. A name that vanishes from a process that
runs on was unloaded at the replica itself, and stays away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from loraplex.adapters.sources.named import ORIGIN
from loraplex.routing.known import MAX_KNOWN_ADAPTERS, Known

Meaning = tuple[str, str | None]


class Card(msgspec.Struct, frozen=True, gc=False):
    """Of GET /v1/adapters, as an admin sees it: what another process needs to have the same. alias_of: what answers for
    the name since a switch; origin: where it came from, if from no load; text_digest: None where it is not known."""

    name: str
    path: str
    digest: str = ""
    alias_of: str | None = None
    is_pinned: bool = False
    lora_int_id: int | None = None
    origin: str = ""
    text_digest: str | None = None

    @property
    def is_by_need(self) -> bool:
        """Whether a replica has it since a request named it: another one gets it in the same way, and asks for no
        load."""
        return self.origin.startswith(ORIGIN)

    @property
    def meaning(self) -> Meaning:
        """What answers for the name."""
        return "" if self.alias_of else self.digest, self.alias_of

    @property
    def state(self) -> tuple[Meaning, bool]:
        """What a verb changes."""
        return self.meaning, self.is_pinned


class Names:
    """Of one replica. `version` grows with every change of `held`."""

    def __init__(self) -> None:
        self.held: dict[str, Card] | None = None
        self.to_do: dict[str, Card | None] = {}
        self.is_doubtful = True
        self.version = 0
        self._instance = ""
        self._owed: Known[str, Card | None] = Known(MAX_KNOWN_ADAPTERS)

    def has(self, name: str) -> bool:
        return self.held is not None and name in self.held and name not in self.to_do

    def lacks(self, name: str) -> bool:
        """False, too, where it is not known."""
        return self.held is not None and not self.has(name)

    def is_promised(self, name: str) -> bool:
        """Whether the replica had it, and its process may not have it now."""
        is_there = self.held is not None and name in self.held
        return self.to_do.get(name) is not None or (self.is_doubtful and is_there)

    @property
    def instance(self) -> str:
        """The process whose list was read; "": none was."""
        return self._instance

    @property
    def is_new(self) -> bool:
        """Whether no list was read yet."""
        return not self._instance

    def learn(self, instance: str, listed: dict[str, Card]) -> tuple[bool, set[str]]:
        """A whole list, of the process `instance`.

        Whether another process was there before; where it was the same one, what was unloaded there since.
        """
        gone = set() if self.held is None else self.held.keys() - listed.keys()
        is_new = self._instance not in ("", instance)
        before = self.held if is_new and self.held is not None else {}
        lost: dict[str, Card | None] = {name: card for name, card in before.items() if name not in listed}
        wanted = {**lost, **self.to_do, **self._owed}
        self.to_do = {name: card for name, card in wanted.items() if not _is_done(card, listed.get(name))}
        self._owed.clear()
        self._instance, self.held, self.is_doubtful = instance, listed, False
        self.version += 1
        return is_new, set() if is_new else gone

    def change(self, name: str, card: Card | None) -> None:
        """A verb was done here: its name means this now, or (None) nothing."""
        self.to_do.pop(name, None)
        self.version += 1
        if self.held is None:
            return
        if card is None:
            self.held.pop(name, None)
        else:
            self.held[name] = card

    def owe(self, name: str, card: Card | None) -> None:
        """A verb was done at all others while this replica was away."""
        self.to_do.pop(name, None)
        self._owed.put(name, card)

    def in_order(self) -> list[tuple[str, Card | None]]:
        """Of `to_do`: aliases come last, since what they stand for has to be there."""
        return sorted(self.to_do.items(), key=lambda each: each[1] is not None and each[1].alias_of is not None)


def common(all_names: Sequence[Mapping[str, Card]]) -> Iterator[Card]:
    """What means the same in all of several lists."""
    first, *others = all_names or ({},)
    for name, card in first.items():
        if all(name in each and each[name].meaning == card.meaning for each in others):
            yield card


def _is_done(card: Card | None, now: Card | None) -> bool:
    if card is None or now is None:
        return card is now
    return card.state == now.state


def differing(all_names: Sequence[Mapping[str, Card]]) -> Iterator[str | None]:
    """Names that do not mean the same in all; None: it goes on with the next one (for the event loop's turns)."""
    seen: set[str] = set()
    for number, names in enumerate(all_names):
        for name, card in names.items():
            if number and name in seen:
                continue
            seen.add(name)
            others = (each.get(name) for each in all_names)
            is_same = all(other is not None and other.meaning == card.meaning for other in others)
            yield None if is_same else name
