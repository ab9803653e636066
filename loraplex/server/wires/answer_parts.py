"""An answer as parts, one after the other: thoughts, texts and calls. Wires make items or blocks of them, and events.

A part ends where one of another kind begins, and where the answer ends. What it says is encoded once, as it comes: the
whole of it, which some events say again, is those bytes together.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec

from loraplex.core import CompletionOutput, RequestOutput
from loraplex.server.chat_completions import WORK_OF_PARSERS, new_call_id, work_of
from loraplex.server.engine_surface import tokenizer_of
from loraplex.server.generation import Cursor, Delta, Generation
from loraplex.server.responses import AnswerRoom, UsageCounter, written_text
from loraplex.server.schemas import ChatCompletionRequest
from loraplex.server.streaming import in_pieces
from loraplex.text.tools.answer import Thought
from loraplex.text.tools.json_calls import CallDelta
from loraplex.text.tools.wanted import AnswerReading


class PartKind(enum.Enum):
    THOUGHTS = enum.auto()
    TEXT = enum.auto()
    CALL = enum.auto()


@dataclass(eq=False, slots=True)
class Part:
    """The index-th of an answer. name: of the function that a call is of. key: its own in all answers."""

    index: int
    kind: PartKind
    name: str = ""
    key: str = field(default_factory=lambda: new_call_id(""))
    is_over: bool = False
    _pieces: list[bytes] = field(default_factory=list)

    def write(self, text: str, room: AnswerRoom) -> str:
        """The text, encoded."""
        piece = written_text(text, room)
        self._pieces.append(bytes(cast("msgspec.Raw", piece))[1:-1])
        return piece

    @property
    def encoded(self) -> bytes:
        """All of it, as a JSON string."""
        return b'"%s"' % b"".join(self._pieces)

    @property
    def whole(self) -> str:
        """The same in the place of a text in an answer."""
        return cast("str", msgspec.Raw(self.encoded))


class StepKind(enum.Enum):
    BEGIN = enum.auto()
    PIECE = enum.auto()
    END = enum.auto()


@dataclass(frozen=True, slots=True)
class Step:
    """What happens to a part. text: of a piece, encoded."""

    kind: StepKind
    part: Part
    text: str = ""


class AnswerParts:
    """Of one answer. Raises InvalidRequestError where they are too long together."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._room = AnswerRoom()
        self._last_call = -1

    def feed(self, said: Thought | CallDelta | str) -> Iterator[Step]:
        if isinstance(said, Thought):
            yield from self._write(PartKind.THOUGHTS, said.text)
        elif isinstance(said, CallDelta):
            is_new, self._last_call = said.index != self._last_call, said.index
            yield from self._write(PartKind.CALL, said.arguments, said.name or "", is_new=is_new)
        elif said:
            yield from self._write(PartKind.TEXT, said)

    def end(self) -> Iterator[Step]:
        """Of the answer. One that says nothing has a text that is empty."""
        if not self.parts:
            yield from self._write(PartKind.TEXT, "")
        yield from self._end_last()

    def _write(self, kind: PartKind, text: str, name: str = "", *, is_new: bool = False) -> Iterator[Step]:
        if is_new or not self.parts or self.parts[-1].kind is not kind:
            yield from self._end_last()
            self.parts.append(Part(len(self.parts), kind, name))
            yield Step(StepKind.BEGIN, self.parts[-1])
        if text:
            yield Step(StepKind.PIECE, self.parts[-1], self.parts[-1].write(text, self._room))

    def _end_last(self) -> Iterator[Step]:
        if self.parts and not self.parts[-1].is_over:
            self.parts[-1].is_over = True
            yield Step(StepKind.END, self.parts[-1])


class PartsRenderer(ABC):
    """One request's answer, of one completion, in the form that a subclass gives to its parts.

    num_thought_tokens: where thoughts and the rest come together, those of the thoughts' text.
    """

    work_at_end, end = 0, b""

    def __init__(self, request: ChatCompletionRequest, generation: Generation, reading: AnswerReading) -> None:
        self.request, self.generation = request, generation
        self.parts = AnswerParts()
        self.usage = UsageCounter(shows_cached=generation.shows_cached_tokens)
        self.has_calls = False
        self._parser = reading.new_parser()
        self._cursor = Cursor()
        self.num_thought_tokens = 0

    @property
    def work_a_token(self) -> int:
        return max(WORK_OF_PARSERS, work_of(self._parser))

    @abstractmethod
    def opening(self) -> Iterator[bytes]:
        """Events before those of the first part."""

    @abstractmethod
    def step(self, step: Step) -> Iterator[bytes]:
        """Its events."""

    @abstractmethod
    def closing(self, completion: CompletionOutput) -> Iterator[bytes]:
        """Events after those of the last part."""

    @abstractmethod
    def whole(self, completion: CompletionOutput) -> bytes:
        """The answer that is no stream."""

    @abstractmethod
    def failure(self, error: Exception) -> bytes:
        """What a stream says of an error."""

    def response(self, outputs: Sequence[RequestOutput]) -> bytes:
        self.usage.add(0, outputs[0])
        (completion,) = outputs[0].outputs
        delta = self._cursor.advance(completion)
        for _ in self.steps(completion, delta):
            pass
        return self.whole(completion)

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[bytes]:
        self.usage.add(prompt_index, output)
        return in_pieces(self._events(output.outputs[0]))

    def last_chunk(self) -> bytes:
        return b""

    def _num_tokens(self, text: str) -> int:
        return len(tokenizer_of(self.generation.items[0].target.text).encode(text, False))

    def _events(self, completion: CompletionOutput) -> Iterator[bytes]:
        cursor = self._cursor
        if not cursor.has_started:
            yield from self.opening()
        is_last = completion.finish_reason is not None
        if cursor.has_finished or not (cursor.is_behind(completion) or is_last or not cursor.has_started):
            return
        cursor.has_finished = is_last
        delta = cursor.advance(completion)
        for step in self.steps(completion, delta):
            yield from self.step(step)
        if is_last:
            yield from self.closing(completion)

    def steps(self, completion: CompletionOutput, delta: Delta) -> Iterator[Step]:
        """What becomes of a delta."""
        is_last = completion.finish_reason is not None
        thoughts: list[str] = []
        is_only_thoughts = True
        for said in [delta.text] if self._parser is None else self._parser.read(delta.text, is_last):
            if isinstance(said, Thought):
                thoughts.append(said.text)
            else:
                is_only_thoughts &= not said
                self.has_calls |= isinstance(said, CallDelta)
            yield from self.parts.feed(said)
        if thoughts:
            self.num_thought_tokens += len(delta.token_ids) if is_only_thoughts else self._num_tokens("".join(thoughts))
        if is_last:
            yield from self.parts.end()
