"""Calls as JSON: `{"name": ..., "arguments": {...}}`, between tags, in a list, or as the whole answer.

    hermes, qwen3   <tool_call>{"name": "f", "arguments": {...}}</tool_call>, any number, text around them
    mistral         [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...], or [TOOL_CALLS]f{...} for each
    llama3_json     {"name": "f", "parameters": {...}}; ... as the whole answer, <|python_tag|> before it or not

Arguments are passed on as the model writes them. What cannot be a call is content, whole; a call whose arguments have
begun stays one, however it ends.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

MAX_NAME_CHARS = 256
_ARGUMENTS = ("arguments", "parameters")
_END_OF_STRING = re.compile(r'["\\]')


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What is new of the index-th call: its name once, then pieces of its arguments."""

    index: int
    name: str | None
    arguments: str


Part = str | CallDelta
"""Content, or a piece of a call."""


class CallParser(Protocol):
    """Of one answer. `feed` is called with each piece of its text, the last one with `is_last`."""

    def feed(self, text: str, is_last: bool) -> Iterator[Part]: ...


class _At(enum.Enum):
    OPEN = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    INSIDE = enum.auto()
    AFTER = enum.auto()
    DONE = enum.auto()
    BROKEN = enum.auto()


class CallScanner:
    """One call. `feed` takes text until the call is over; `take` gives the arguments so far, once it is known for one.

    names: other names are no calls; None: any name is. name: it is known already, and what comes is its arguments.
    """

    def __init__(self, names: Collection[str] | None = None, name: str | None = None) -> None:
        self._names = names
        self._at = _At.OPEN if name is None else _At.VALUE
        self._key, self.name = ("" if name is None else _ARGUMENTS[0]), name
        self._is_bare = name is not None
        self._has_arguments = self._is_string = self._in_string = self._is_escaped = False
        self._nesting = 0
        self._raw: list[str] = []
        self._word: list[str] = []
        self._arguments: list[str] = []

    @property
    def is_over(self) -> bool:
        return self._at in (_At.DONE, _At.BROKEN)

    @property
    def is_whole(self) -> bool:
        return self._at is _At.DONE

    @property
    def is_call(self) -> bool:
        """Whether it is certain to be one: both name and arguments are there."""
        return self.name is not None and self._has_arguments

    @property
    def raw(self) -> str:
        """All that was taken; only while it is not certain to be a call."""
        return "".join(self._raw)

    def take(self) -> str:
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def feed(self, text: str, begin: int) -> int:
        """Goes on at text[begin]; returns the place behind what it took."""
        at = begin
        while at < len(text) and not self.is_over:
            if self._is_escaped:
                self._write(text[at])
                self._is_escaped, at = False, at + 1
            elif self._in_string:
                end = _END_OF_STRING.search(text, at)
                stop = len(text) if end is None else end.start()
                self._write(text[at:stop])
                if end is not None:
                    self._write(end[0])
                    self._is_escaped = end[0] == "\\"
                    if not self._is_escaped:
                        self._in_string = False
                        self._end_string()
                at = stop + (end is not None)
            else:
                self._step(text[at])
                at += 1
        if not self.is_call:
            self._raw.append(text[begin:at])
        return at

    def _write(self, piece: str) -> None:
        if self._at in (_At.KEY, _At.VALUE) or (self._key == "name" and not self._nesting):
            self._word.append(piece)
            if sum(map(len, self._word)) > MAX_NAME_CHARS:
                self._at = _At.BROKEN
        elif self._key in _ARGUMENTS:
            self._arguments.append(piece)

    def _end_string(self) -> None:
        if self._at is _At.KEY:
            self._key, self._at = self._take_word(), _At.COLON
        elif not self._nesting:
            self._end_value()

    def _take_word(self) -> str:
        word = "".join(self._word)
        self._word.clear()
        return _text_of(word)

    def _end_value(self) -> None:
        self._at = _At.DONE if self._is_bare else _At.AFTER
        if self._key == "name":
            self.name = self._take_word()
            if not self.name or (self._names is not None and self.name not in self._names):
                self._at = _At.BROKEN
        elif self._key in _ARGUMENTS and self._is_string:  # arguments as a text that holds JSON
            self._arguments = [_text_of("".join(self._arguments))]
            self._has_arguments = True

    def _step(self, character: str) -> None:
        if self._at is _At.INSIDE:
            self._step_inside(character)
        elif character.isspace():
            pass
        elif self._at is _At.OPEN:
            self._at = _At.KEY if character == "{" else _At.BROKEN
        elif self._at is _At.KEY and character == '"':
            self._in_string = True
            self._word.append(character)
        elif self._at is _At.COLON and character == ":":
            self._at = _At.VALUE
        elif self._at is _At.VALUE:
            self._begin_value(character)
        elif self._at is _At.AFTER and character == ",":
            self._at = _At.KEY
        elif self._at in (_At.AFTER, _At.KEY) and character == "}":
            self._at = _At.DONE
        else:
            self._at = _At.BROKEN

    def _begin_value(self, character: str) -> None:
        is_arguments, self._is_string = self._key in _ARGUMENTS, character == '"'
        if (self._key == "name" and not self._is_string) or (is_arguments and self._has_arguments):
            self._at = _At.BROKEN
            return
        self._at = _At.INSIDE
        self._nesting = int(character in "{[")
        self._in_string = self._is_string
        self._has_arguments |= is_arguments and not self._is_string
        self._write(character)

    def _step_inside(self, character: str) -> None:
        if not self._nesting and character in ",}] \n\r\t":  # behind a number or a word
            self._end_value()
            if not self.is_over:
                self._step(character)
            return
        self._in_string = character == '"'
        self._nesting += (character in "{[") - (character in "}]")
        self._write(character)
        if not self._nesting and character in "}]":
            self._end_value()


def _text_of(literal: str) -> str:
    """Of a JSON string; one with wrong escapes is taken as it is."""
    try:
        return escape_halves(json.loads(literal, strict=False))
    except ValueError:
        return literal[1:-1]


def escape_halves(text: str) -> str:
    """The text with half a surrogate pair as the escape that JSON has for it: UTF-8 has none."""
    return text.encode(errors="backslashreplace").decode()


class _Calls:
    """What parsers share: the calls so far, and the one that is being read."""

    def __init__(self, names: Collection[str] | None = None) -> None:
        self._names = names
        self._num_calls = 0
        self._scanner: CallScanner | None = None
        self._is_told = False

    def _begin(self, name: str | None = None) -> None:
        self._scanner, self._is_told = CallScanner(self._names, name), False

    def _read(self, text: str, at: int) -> tuple[int, list[CallDelta]]:
        """(the place behind what was read, what is new of the call)."""
        assert self._scanner is not None
        at = self._scanner.feed(text, at)
        return at, self._news()

    def _news(self, is_certain: bool = False) -> list[CallDelta]:
        scanner = self._scanner
        assert scanner is not None
        if not (scanner.is_call or (is_certain and scanner.name is not None)):
            return []
        name = None if self._is_told else scanner.name
        arguments = scanner.take() if scanner.is_call else "{}"
        self._is_told = True
        return [CallDelta(self._num_calls, name, arguments)] if name is not None or arguments else []

    def _end(self) -> None:
        self._num_calls += self._is_told
        self._scanner = None


class TextBeforeTags:
    """Text up to the next of some tags, which may come in pieces. Blanks around a tag are no content."""

    def __init__(self, *tags: str) -> None:
        self._tags = tags
        self._any = re.compile("|".join(map(re.escape, tags)))
        self._blanks: list[str] = []
        self._held = ""
        self.is_at_start = False

    def feed(self, text: str) -> tuple[str, str | None, str]:
        """(content, the tag that follows it, the text behind that tag)."""
        text, self._held = self._held + text, ""
        found = self._any.search(text)
        if found is not None:
            content = self._content(text[: found.start()])
            self._blanks.clear()
            self.is_at_start = True
            return content, found[0], text[found.end() :]
        longest = max(map(len, self._tags)) - 1
        held = next((n for n in range(min(longest, len(text)), 0, -1) if self._may_begin(text[-n:])), 0)
        text, self._held = text[: len(text) - held], text[len(text) - held :]
        return self._content(text), None, ""

    def _may_begin(self, end: str) -> bool:
        return any(tag.startswith(end) for tag in self._tags)

    def _content(self, text: str) -> str:
        """Blanks wait for what follows; those behind a tag are dropped."""
        kept = text.rstrip()
        if not kept:
            if text and not self.is_at_start:
                self._blanks.append(text)
            return ""
        content = "".join(self._blanks) + (kept.lstrip() if self.is_at_start else kept)
        self._blanks = [text[len(kept) :]] if len(kept) < len(text) else []
        self.is_at_start = False
        return content

    def rest(self) -> str:
        """At the end of the text: what was held."""
        held, self._held = self._held, ""
        return "".join((*self._blanks, held)) if not self.is_at_start else held


class HermesCalls(_Calls):
    """Between `<tool_call>` and `</tool_call>`; a missing end is none."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        super().__init__()
        self._text = TextBeforeTags(self.OPEN, self.CLOSE)
        self._is_passing_over = False

    def feed(self, text: str, is_last: bool) -> Iterator[Part]:
        while text:
            if self._scanner is not None:
                at, news = self._read(text, 0)
                yield from news
                text = text[at:]
                if self._scanner.is_over:
                    yield from self._finish()
                continue
            content, tag, text = self._text.feed(text)
            if content and not self._is_passing_over:
                yield content
            if tag is not None:
                self._is_passing_over = False
                if tag == self.OPEN:
                    self._begin()
        if is_last:
            if self._scanner is not None:
                yield from self._finish()
            rest = self._text.rest()
            if rest and not self._is_passing_over:
                yield rest

    def _finish(self) -> Iterator[Part]:
        """Of a call that is over, or at the end of the text."""
        scanner = self._scanner
        assert scanner is not None
        yield from self._news(is_certain=scanner.is_whole)
        if not self._is_told:
            yield self.OPEN + scanner.raw
            self._text.is_at_start = False
        else:
            self._is_passing_over = True
        self._end()


class _In(enum.Enum):
    TEXT = enum.auto()
    BEGIN = enum.auto()
    NAME = enum.auto()
    LIST = enum.auto()
    CALL = enum.auto()
    PASSED = enum.auto()


class ListedCalls(_Calls):
    """mistral's: behind `[TOOL_CALLS]` a list of calls, or name and arguments. With `is_list` the answer is the list.

    What is behind them and is no call is passed over.
    """

    TAG, ARGS = "[TOOL_CALLS]", "[ARGS]"

    def __init__(self, is_list: bool = False) -> None:
        super().__init__()
        self._text = TextBeforeTags(self.TAG)
        self._in, self._is_listed = (_In.LIST if is_list else _In.TEXT), is_list
        self._name: list[str] = []

    def feed(self, text: str, is_last: bool) -> Iterator[Part]:
        while text:
            if self._in is _In.TEXT:
                content, tag, text = self._text.feed(text)
                if content:
                    yield content
                if tag is not None:
                    self._in = _In.BEGIN
            elif self._in is _In.CALL:
                assert self._scanner is not None
                at, news = self._read(text, 0)
                yield from news
                text = text[at:]
                if self._scanner.is_over:
                    yield from self._finish()
            else:
                text = self._go_on(text)
        if is_last:
            if self._scanner is not None:
                yield from self._finish()
            if self._in in (_In.BEGIN, _In.NAME):
                yield self.TAG + "".join(self._name)
            if self._in is _In.TEXT:
                yield self._text.rest()

    def _go_on(self, text: str) -> str:
        """Over what is between calls; returns what is left."""
        if self._in is _In.PASSED:
            _, tag, rest = self._text.feed(text)
            self._in = _In.PASSED if tag is None else _In.BEGIN
            return rest
        if self._in is _In.NAME:
            return self._read_name(text)
        text = text.lstrip(" \t\r\n,[" if self._in is _In.LIST else " \t\r\n")
        if not text:
            return ""
        if self._in is _In.BEGIN:
            self._is_listed = text[0] == "["
            self._in = _In.LIST if self._is_listed else _In.NAME
        elif text[0] == "{":
            self._begin()
            self._in = _In.CALL
        else:
            self._in = _In.PASSED
        return text

    def _read_name(self, text: str) -> str:
        at = text.find("{")
        self._name.append(text if at < 0 else text[:at])
        if at < 0:
            return ""
        name = "".join(self._name).strip().removesuffix(self.ARGS).partition("[")[0].strip()
        self._name.clear()
        self._begin(name[:MAX_NAME_CHARS])
        self._in = _In.CALL
        return text[at:]

    def _finish(self) -> Iterator[Part]:
        scanner = self._scanner
        assert scanner is not None
        yield from self._news(is_certain=scanner.is_whole)
        if not self._is_told:
            yield scanner.raw
        self._in = _In.LIST if self._is_listed and scanner.is_whole else _In.PASSED
        self._end()


class BareCalls(_Calls):
    """llama3_json: the answer is calls from its beginning, of tools that the request has; or it is content."""

    TAG = "<|python_tag|>"

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._head = ""
        self._is_content = False
        self._blanks: list[str] = []

    def feed(self, text: str, is_last: bool) -> Iterator[Part]:
        text, self._head = self._head + text, ""
        while text:
            if self._is_content:
                yield text
                return
            if self._scanner is not None:
                at, news = self._read(text, 0)
                yield from news
                text = text[at:]
                if self._scanner.is_over:
                    yield from self._finish()
            else:
                text = self._go_on(text, is_last)
        if is_last:
            if self._scanner is not None:
                yield from self._finish()
            if not self._num_calls:
                yield "".join(self._blanks)

    def _go_on(self, text: str, is_last: bool) -> str:
        """Over what is between calls; returns what is left."""
        stripped = text.lstrip(" \t\r\n;," if self._num_calls else " \t\r\n")
        self._blanks.append(text[: len(text) - len(stripped)])
        if stripped.startswith("{"):
            self._begin()
        elif stripped.startswith(self.TAG):
            return stripped.removeprefix(self.TAG)
        elif self.TAG.startswith(stripped) and not is_last:
            self._head = stripped
            return ""
        elif stripped:
            self._is_content = True
            stripped = "".join(self._blanks) + stripped
            self._blanks.clear()
        return stripped

    def _finish(self) -> Iterator[Part]:
        scanner = self._scanner
        assert scanner is not None
        if not self._is_told:
            yield "".join(self._blanks) + scanner.raw
        self._blanks.clear()
        self._is_content = not self._is_told or not scanner.is_whole
        self._end()


class OneCall:
    """The whole answer is the arguments of one call: a grammar has seen to that."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, text: str, is_last: bool) -> Iterator[Part]:
        if text or is_last:
            yield CallDelta(0, self._name, text)
            self._name = None
