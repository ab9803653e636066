"""What is asked of the registry's verbs, what they answer, and a slow one while it runs.

Times are seconds; names in `evicted` lost a tier to make room.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from loraplex.adapters.registry.version import ContentDigests, LoRARef, OpenedAdapter
from loraplex.core import AdapterSpec


class LoadTurn:
    """The place of a load in a list of loads that run side by side: its id and its name come after those of `before`.

    The owner of the list calls `end` when the load is over, however it ended; until then the later ones wait. Loads are
    begun in the list's order.
    """

    def __init__(self, before: LoadTurn | None = None) -> None:
        self._before = before
        self._has_id = threading.Event()
        self._is_over = threading.Event()

    def wait_for_id(self) -> None:
        """Until the loads before it have their ids, or are over."""
        if self._before is not None:
            self._before._has_id.wait()

    def took_id(self) -> None:
        self._has_id.set()

    def wait_for_name(self) -> None:
        """Until the loads before it are over."""
        if self._before is not None:
            self._before._is_over.wait()
            self._before = None  # else the last of a thousand would keep them all

    def end(self) -> None:
        self._has_id.set()
        self._is_over.set()


NO_TURN = LoadTurn()

OpenReceived = Callable[[LoRARef | None, AdapterSpec | None], OpenedAdapter]
"""Opens what a client sent, given the version that is loaded under the name (None: there is none), which no other verb
changes meanwhile. What it raises refuses the load."""


CheckAnswer = Callable[[str], None]
"""Is told what answers for a name, and raises where its caller may not change that; no other verb runs meanwhile."""


def any_answer(name: str) -> None:
    """Whatever answers may be changed."""


@dataclass(frozen=True, slots=True)
class LoadWish:
    """What one caller of `load` asks for. keeps_equal: a reload from the same path with the same content is none.

    content: what is there is known, and is not opened: a clone. received: opens it instead of the path, of which it is
    no file. check_size: is told the bytes of the files before anything is changed, and raises where they are too many.
    open_adapter: opens the path, instead of what opens others, for a request, which then loads the weights.
    check_answer: is told the adapter that answers for the name, before that is pinned. digests: that the content has
    to have. alias_of: what answers for the name as soon as it is there, as after a switch: its own weights never do.
    Where that is not loaded, nothing is.
    """

    name: str
    path: str
    lora_int_id: int | None = None
    load_inplace: bool = False
    is_pinned: bool = False
    origin: str = ""
    keeps_equal: bool = False
    turn: LoadTurn = NO_TURN
    content: OpenedAdapter | None = None
    received: OpenReceived | None = None
    check_size: Callable[[int], None] | None = None
    open_adapter: Callable[[], OpenedAdapter] | None = None
    check_answer: CheckAnswer = any_answer
    digests: ContentDigests | None = None
    alias_of: str | None = None


@dataclass(eq=False, slots=True)
class Verb:
    """A slow verb that runs on a name: the next one waits for `done`. Equal loads are one verb.

    wish: set for a load; brought_number: the name has its number from that load.
    """

    wish: LoadWish | None = None
    brought_number: bool = False
    done: Future[LoadResult | None] = field(default_factory=Future)

    def has_outcome_of(self, wish: LoadWish) -> bool:
        """Whether what comes of this verb, good or bad, is what would come of `wish`."""
        mine = self.wish
        return mine is not None and _kind(mine) == _kind(wish)


def _kind(wish: LoadWish) -> tuple[object, ...]:
    what = wish.path, wish.content, wish.digests, wish.alias_of
    return *what, wish.is_pinned, wish.keeps_equal, wish.check_size is None


class LoadStatus(enum.StrEnum):
    LOADED = "loaded"
    ALREADY_LOADED = "already_loaded"
    LOADED_WITH_EVICTION = "loaded_with_eviction"
    RELOADED = "reloaded"
    MOVED = "moved"


@dataclass(frozen=True, slots=True)
class LoadResult:
    """`ref` is the version that answers for the name now: after a switch, that of the adapter it was switched to.

    moved: what answered earlier answers again. previous_version: the name's own one before a reload or a move;
    None when nothing changed, or another adapter answered until a move.
    """

    status: LoadStatus
    ref: LoRARef
    evicted: tuple[str, ...] = ()
    load_s: float = 0.0
    previous_version: int | None = None


@dataclass(frozen=True, slots=True)
class UnloadResult:
    """The name no longer resolves.

    is_drained: every tier is freed already; else that follows the last of `num_references`.
    `ref` is None when the name was being loaded for the first time: that load is called off, its callers get an error.
    """

    adapter_name: str
    ref: LoRARef | None
    is_drained: bool
    num_references: int = 0
    num_aborted: int = 0


@dataclass(frozen=True, slots=True)
class SwitchResult:
    """`ref` is on the device, and new requests for `old` go to it.

    is_old_loaded: `old` was loaded; if not, nothing was switched, and it resolves to nothing as before.
    is_old_active: the old adapter was on the device or in use, so there was something to evict;
    load_s: until the new adapter was loaded (0 if it was); promote_s: from there until it answered for both names;
    evict_s: from there until the old one was evicted, None while requests still run on it.
    """

    old: str
    ref: LoRARef
    is_old_loaded: bool
    is_old_active: bool
    load_s: float
    promote_s: float
    evict_s: float | None
    evicted: tuple[str, ...] = ()
    num_references: int = 0
    num_aborted: int = 0
