"""What an answer is made of: thoughts, content and calls, told from its text as it comes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from loraplex.text.tools.json_calls import (
    BareCalls,
    CallDelta,
    CallParser,
    HermesCalls,
    ListedCalls,
    OneCall,
    Part,
    TextBeforeTags,
)
from loraplex.text.tools.pythonic import PythonicCalls

TOOL_CALL_PARSERS = ("hermes", "llama3_json", "mistral", "pythonic", "qwen3")
REASONING_PARSERS = ("qwen3",)
WITH_SPECIAL_TOKENS = frozenset(("llama3_json", "mistral"))
"""Whose tags are special tokens: the text must have them."""

_MARKS = (
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("func_name1(params_name1", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ("Environment: ipython", "llama3_json"),
)
"""Of chat templates, in this order."""

MAX_CALLS = 128
"""Of an answer. Each is an object in it, with events of its own, however little it says."""

_PIECE_CHARS = 4096
"""Parsed at a time: a parser copies what is left of a piece for each call in it."""


def parser_for(template: str) -> str | None:
    """The parser of what a chat template asks a model to write; None where it does not say."""
    return next((name for mark, name in _MARKS if mark in template), None)


def call_parser(name: str, names: Collection[str]) -> CallParser:
    """names: of the request's tools, which tell a call that has no tags from other JSON."""
    match name:
        case "hermes" | "qwen3":
            return HermesCalls()
        case "mistral":
            return ListedCalls()
        case "llama3_json":
            return BareCalls(names)
        case "pythonic":
            return PythonicCalls(names)
    raise AssertionError(name)


def forced_parser(name: str | None) -> CallParser:
    """Of an answer whose form a grammar has seen to: the arguments of one tool, or a list of calls."""
    return ListedCalls(is_list=True) if name is None else OneCall(name)


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of thoughts."""

    text: str


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What is new of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class Thoughts:
    """Qwen3's: `<think>...</think>` at the beginning, or from the beginning where the prompt has opened it."""

    OPEN, CLOSE = "<think>", "</think>"

    def __init__(self, is_open: bool) -> None:
        self._is_open, self._is_over = is_open, False
        self._head = ""
        self._text = TextBeforeTags(self.CLOSE)
        self._text.is_at_start = is_open

    def feed(self, text: str, is_last: bool) -> tuple[str, str]:
        """(thoughts, what comes after them)."""
        if not self._is_open and not self._is_over:
            text, self._head = self._head + text, ""
            stripped = text.lstrip()
            if stripped.startswith(self.OPEN):
                self._is_open = self._text.is_at_start = True
                text = stripped.removeprefix(self.OPEN)
            elif self.OPEN.startswith(stripped) and len(text) < _PIECE_CHARS and not is_last:
                self._head = text
                return "", ""
            else:
                self._is_over = True
        if self._is_over:
            return "", text
        thoughts, tag, rest = self._text.feed(text)
        if tag is not None:
            self._is_over = True
            return thoughts, rest
        return thoughts + (self._text.rest() if is_last else ""), ""


def opens_thoughts(prompt: str) -> bool:
    """Whether a prompt ends in the middle of thoughts: some templates begin them for the model."""
    return prompt.rstrip().endswith(Thoughts.OPEN)


class AnswerParser:
    """Of one answer, which comes in pieces. thoughts, calls: None where the text is not looked through for them.
    allows_several: calls after the first are passed over otherwise, and those after MAX_CALLS are."""

    def __init__(self, thoughts: Thoughts | None, calls: CallParser | None, allows_several: bool = True) -> None:
        self._thoughts, self._calls = thoughts, calls
        self._max_calls = MAX_CALLS if allows_several else 1
        self._is_behind_thoughts = False
        self.num_calls = 0

    @property
    def num_held(self) -> int:
        """Characters that one more may have parsed at once."""
        return self._calls.num_held if isinstance(self._calls, PythonicCalls) else 0

    def feed(self, text: str, is_last: bool) -> AnswerDelta:
        """What is new, by its kind."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[CallDelta] = []
        for part in self.read(text, is_last):
            if isinstance(part, Thought):
                reasoning.append(part.text)
            elif isinstance(part, CallDelta):
                calls.append(part)
            else:
                content.append(part)
        return AnswerDelta("".join(content), "".join(reasoning), _joined(calls))

    def read(self, text: str, is_last: bool) -> Iterator[Thought | Part]:
        """The same in its order."""
        for piece, is_end in _pieces(text, is_last):
            thought, said = self._split(piece, is_end)
            if thought:
                yield Thought(thought)
            if self._calls is None:
                yield said
                continue
            for part in self._calls.feed(said, is_end):
                if isinstance(part, CallDelta):
                    if part.index >= self._max_calls:
                        continue
                    self.num_calls = part.index + 1
                yield part

    def _split(self, text: str, is_last: bool) -> tuple[str, str]:
        if self._thoughts is None:
            return "", text
        thought, said = self._thoughts.feed(text, is_last)
        if thought:
            self._is_behind_thoughts = True
        if self._is_behind_thoughts and said:  # blanks between thoughts and content are neither
            said = said.lstrip()
            self._is_behind_thoughts = not said
        return thought, said


def _pieces(text: str, is_last: bool) -> Iterator[tuple[str, bool]]:
    for begin in range(0, max(1, len(text)), _PIECE_CHARS):
        yield text[begin : begin + _PIECE_CHARS], is_last and begin + _PIECE_CHARS >= len(text)


def _joined(calls: list[CallDelta]) -> tuple[CallDelta, ...]:
    """Pieces of one call in a row are one."""
    joined: list[CallDelta] = []
    start = 0
    for place in range(1, len(calls) + 1):
        if place == len(calls) or calls[place].index != calls[start].index:
            arguments = "".join(each.arguments for each in calls[start:place])
            joined.append(CallDelta(calls[start].index, calls[start].name, arguments))
            start = place
    return tuple(joined)
