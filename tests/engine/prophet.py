"""Drafts of a known quality, in place of those that are found in a text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

import pytest

from loraplex.engine.speculation import Drafting


class Prophet:
    """Proposes what plain decoding said, for every request that it knows the text of: what is seldom found in a text is
    drafted all the same.

    errors: the share of drafts with a wrong token somewhere; is_brief: of any length up to the depth, not all of it.
    """

    def __init__(
        self, texts: Iterable[Sequence[int]], seed: int, *, errors: float = 0.4, is_brief: bool = True
    ) -> None:
        self._texts = [tuple(text) for text in texts]
        self._random = Random(seed)
        self._errors = errors
        self._is_brief = is_brief

    def propose(self, token_ids: Sequence[int], depth: int) -> tuple[int, ...]:
        known = tuple(token_ids)
        texts = [text for text in self._texts if text[: len(known)] == known] or [()]
        length = self._random.randint(0, depth) if self._is_brief else depth
        draft = list(self._random.choice(texts)[len(known) :][:length])
        if draft and self._random.random() < self._errors:
            draft[self._random.randrange(len(draft))] = self._random.randrange(200)
        return tuple(draft)

    def drafts_for_all(self, patch: pytest.MonkeyPatch) -> None:
        """From now on, and none of them rests."""
        patch.setattr(Drafting, "propose", lambda _, token_ids, depth: self.propose(token_ids, depth))
        patch.setattr(Drafting, "depth_at", lambda drafting, num_tokens: drafting._most)
