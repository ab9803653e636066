"""What of the registry outlives the process: one record a name, and the journal that keeps them (adapters/journal/)."""

from __future__ import annotations

import enum
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

Answer = int | str
"""What a name answers with: a version of its own, by number, or what answers for the name it was switched to."""


_PARTS = {
    "tokenizer": ("added_tokens", "special_tokens"),
    "chat_template": ("chat_templates",),
    "generation_config": ("generation_config",),
    "invocation_tokens": ("invocation_tokens",),
}


@dataclass(frozen=True, slots=True, weakref_slot=True)
class AdapterText:
    """What the directory of a version says about the text of its requests, as JSON (text/adapter_text.py reads it).

    It stays with the version: files that change, or go, change nothing of what is loaded. brings: what of its own the
    version has: `tokenizer`, `chat_template`, `generation_config`, `invocation_tokens`. rope_factor: what it stretches
    the base's positions by, and max_model_len: the longest prompt plus output in tokens then; None where it has the
    base's positions. invocation_tokens: of an aLoRA.
    """

    json: bytes = field(compare=False)
    digest: str
    brings: tuple[str, ...] = field(compare=False)
    rope_factor: float | None = field(compare=False)
    max_model_len: int | None = field(compare=False)
    invocation_tokens: tuple[int, ...] = field(compare=False)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        text = json.dumps(document, sort_keys=True).encode()
        return cls(
            text,
            hashlib.sha256(text).hexdigest(),
            tuple(part for part, names in _PARTS.items() if document.keys() & set(names)),
            document.get("rope_factor"),
            document.get("max_model_len"),
            tuple(document.get("invocation_tokens", ())),
        )

    @classmethod
    def activated(cls, text: AdapterText | None, invocation_tokens: Sequence[int]) -> Self:
        """`text`, of an aLoRA."""
        document = {} if text is None else text.document
        return cls.of({**document, "invocation_tokens": list(invocation_tokens)})

    @property
    def document(self) -> dict[str, Any]:
        """Parsed at each call: a version keeps its text as long as it is registered, and is rarely asked for it."""
        found: dict[str, Any] = json.loads(self.json)
        return found


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """One registered version. `path`: its local directory; `lora_path`: the source as its owner named it; Unix time."""

    adapter_id: int
    number: int
    digest: str
    path: str
    lora_path: str
    origin: str
    nbytes: int
    max_rank: int
    is_pinned: bool
    loaded_time: float
    text: AdapterText | None = None


@dataclass(frozen=True, slots=True)
class NameUsage:
    """Counters of a name, all versions together. `last_used_time` is 0 before the first request."""

    name: str
    num_loads: int = 0
    num_requests: int = 0
    last_used_time: float = 0.0


@dataclass(frozen=True, slots=True)
class NameRecord:
    """One name with all that belongs to it. versions: the current one, then the kept ones, the last to answer first.

    last_number: of the newest version ever, so that no number is used twice while the name is loaded.
    history: what the name answered with before what does now (AnswerHistory).
    """

    lora_int_id: int | None
    alias_of: str | None
    last_number: int
    versions: tuple[VersionRecord, ...]
    usage: NameUsage
    history: tuple[Answer, ...] = ()


@dataclass(frozen=True, slots=True)
class NameChange:
    """What a verb did to a name: its new record; None: it is not loaded."""

    name: str
    record: NameRecord | None


class Journal(Protocol):
    """Keeps the records where they outlive the process."""

    def record(self, changes: Sequence[NameChange]) -> Future[None]:
        """Called under the registry's lock, in the order of the changes, so it never waits.

        The future is done when the changes are safe. It raises JournalError when they could not be written; they are
        then written with the next ones. Without changes it is done when those before are safe.
        """
        ...

    def count(self, take_usage: Callable[[], Sequence[NameUsage]]) -> None:
        """From now on ask `take_usage` every few seconds, and at the end, for the counters that changed; keep them."""
        ...


class DatabaseState(enum.StrEnum):
    """`down`: it refuses connections, to every server alike, so no name changes. `silent`: it does not answer this
    server, and may answer others."""

    CONNECTED = "connected"
    DOWN = "down"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class DatabaseHealth:
    """away_s: seconds since it was last heard."""

    state: DatabaseState
    away_s: float


Apply = Callable[[Sequence[NameChange]], Collection[str]]
"""Makes names what another server made them. The names that cannot be what the journal says: they mean nothing."""

Expect = Callable[[Sequence[NameChange], float], None]
"""Told of changes before they are applied: waits so many seconds at most for files that are not here yet."""

Write = Callable[[Sequence[NameChange]], None]


class SharedJournal(ABC):
    """A journal that several servers write. Each has a registry of the same names, which follows it.

    A verb changes names in a turn. Among all servers there is one turn at a time, and in it the registry has what all
    turns before it wrote; so a second verb sees the first. Its methods raise DatabaseUnavailableError.
    """

    @abstractmethod
    def follow(self, apply: Apply, expect: Expect) -> None:
        """From now on tell `apply` of what other servers write, and most of it `expect` before, while verbs go on. Each
        is called by one thread at a time."""

    @abstractmethod
    def turn(self) -> AbstractContextManager[Write]:
        """Yields what writes the changes of this turn. They are safe when it returns.

        Where it raises JournalError, they may have been written or not: the names are refused until that is known.
        """

    @abstractmethod
    def alone_on(self, name: str) -> AbstractContextManager[None]:
        """No other server has a slow verb on `name`. Those of this server exclude each other by themselves."""

    @abstractmethod
    def take_adapter_id(self) -> int:
        """One that no server has used."""

    @abstractmethod
    def check_known(self, *names: str) -> None:
        """Raises AdapterUnavailableError for a name that may mean something else at another server by now."""

    @abstractmethod
    def count(self, take_usage: Callable[[], Sequence[NameUsage]]) -> None:
        """As `Journal.count`. Counters of all servers add up."""

    @abstractmethod
    def health(self) -> DatabaseHealth: ...
