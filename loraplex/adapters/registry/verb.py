"""A slow verb while it runs on a name, so that equal loads become one and the others take turns."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from loraplex.adapters.registry.outcome import LoadResult


@dataclass(frozen=True, slots=True)
class LoadWish:
    """What one caller of `load` asks for. keeps_equal: a reload from the same path with the same content is none."""

    name: str
    path: str
    lora_int_id: int | None = None
    load_inplace: bool = False
    is_pinned: bool = False
    origin: str = ""
    keeps_equal: bool = False


@dataclass(eq=False, slots=True)
class Verb:
    """The next verb on this name waits for `done`. `wish` is set for a load; `brought_number` when the name has its number from it."""

    wish: LoadWish | None = None
    brought_number: bool = False
    done: Future[LoadResult | None] = field(default_factory=Future)

    def has_outcome_of(self, wish: LoadWish) -> bool:
        """Whether what comes of this verb, good or bad, is what would come of `wish`."""
        mine = self.wish
        return mine is not None and _kind(mine) == _kind(wish)


def _kind(wish: LoadWish) -> tuple[str, bool, bool]:
    return wish.path, wish.is_pinned, wish.keeps_equal
