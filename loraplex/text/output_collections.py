"""What outputs hold of long answers, without a copy of it at each step and without an object for each candidate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

from loraplex.core import CompletionOutput, Logprob, TokenLogprobs

Item = TypeVar("Item", covariant=True)


class PackedLogprobs(TokenLogprobs):
    """The candidates of one position, as a mapping that makes a Logprob when it is asked for.

    An answer may have a quarter of a million candidates. As objects of their own they would take twice the memory, and
    each full collection of garbage would look at all of them, which holds up a server for 100 ms; tuples of numbers it
    passes over.
    """

    __slots__ = ("_logprobs", "_ranks", "_texts", "_token_ids")

    def __init__(self, candidates: TokenLogprobs, text_of: Callable[[int], str | None]) -> None:
        self._token_ids = tuple(candidates)
        self._logprobs = tuple(each.logprob for each in candidates.values())
        self._ranks = tuple(each.rank for each in candidates.values())
        self._texts = tuple(map(text_of, candidates))

    def __getitem__(self, token_id: int) -> Logprob:
        if token_id not in self._token_ids:
            raise KeyError(token_id)
        index = self._token_ids.index(token_id)
        return Logprob(self._logprobs[index], self._ranks[index], self._texts[index])

    def __iter__(self) -> Iterator[int]:
        return iter(self._token_ids)

    def __len__(self) -> int:
        return len(self._token_ids)

    def __repr__(self) -> str:
        return repr(dict(self))


class Prefix(Sequence[Item]):
    """The first items of a list that only grows, as a tuple of them would be. A copy at each step of 256 long answers
    would take longer than the step.
    """

    __slots__ = ("_items", "_length")

    def __init__(self, items: list[Item]) -> None:
        self._items = items
        self._length = len(items)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Item, ...]: ...
    def __getitem__(self, index: int | slice) -> Item | tuple[Item, ...]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            return tuple(self._items[start:stop:step]) if step > 0 else tuple(self)[index]
        return self._items[range(self._length)[index]]

    def __len__(self) -> int:
        return self._length

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Prefix | tuple | list) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


class TextPieces:
    """A text that grows. Small pieces become one now and then; lists that were given away stay as they are."""

    __slots__ = ("_num_small", "num_chars", "pieces")

    SMALL = 64

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.num_chars = 0
        self._num_small = 0

    def append(self, piece: str) -> None:
        if not piece:
            return
        if self._num_small == self.SMALL:
            self.pieces = [*self.pieces[: -self.SMALL], "".join(self.pieces[-self.SMALL :])]
            self._num_small = 0
        self.pieces.append(piece)
        self.num_chars += len(piece)
        self._num_small += 1


class GrowingCompletion(CompletionOutput):
    """A completion as it was at one step. Its text is put together when it is read: at each step of many long answers
    that would take longer than the step."""

    __slots__ = ("_num_chars", "_num_pieces", "_pieces")
    _num_chars: int
    _num_pieces: int
    _pieces: list[str]

    def __init__(self, grown: TextPieces, **fields: Any) -> None:
        object.__setattr__(self, "_pieces", grown.pieces)
        object.__setattr__(self, "_num_pieces", len(grown.pieces))
        object.__setattr__(self, "_num_chars", grown.num_chars)
        super().__init__(text="", **fields)

    @property
    def text(self) -> str:
        return "".join(self._pieces[: self._num_pieces])

    @text.setter
    def text(self, _: str) -> None:
        """What CompletionOutput sets first."""

    @property
    def num_chars(self) -> int:
        return self._num_chars

    def text_from(self, begin: int) -> str:
        """`text[begin:]`, in the time that this part takes."""
        first, left = self._num_pieces, self._num_chars
        while left > begin:
            first -= 1
            left -= len(self._pieces[first])
        return "".join(self._pieces[first : self._num_pieces])[begin - left :]
