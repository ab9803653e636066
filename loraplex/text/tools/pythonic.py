"""Calls as Python writes them: `[f(a="x", n=3), g()]` as the whole answer (Llama 3.2 and 4, ToolACE).

Arguments become JSON, a call at a time. Values are literals: texts, numbers, True, False, None, lists and dicts.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from loraplex.text.tools.json_calls import CallDelta, Part, escape_halves

MAX_NESTING = 32
MAX_CALL_CHARS = 2**15
MAX_CALL_MARKS = 2**13
"""Words and signs outside of texts. Python's parser takes 0.02 s for the worst ones, and far longer for an f-string,
which it does not get."""

_BEGIN = re.compile(r"\s*\[\s*([A-Za-z_][\w.]*)\s*\(")
_NEXT = re.compile(r"[\"'\\()\[\]{}]")
_TEXTS = re.compile(
    r"""
      (?P<f_string> [fFtT][rR]?["'] )
    | \#[^\r\n]*
    | (?P<quote> "{3} | '{3} | ["'] ) (?: \\. | (?!(?P=quote))[^\\] )* (?: (?P=quote) | \Z )
    """,
    re.VERBOSE | re.DOTALL,
)
"""Comments and texts as Python reads them. One without an end goes to the end of all, so no place is read twice."""
_MARK = re.compile(r"\w+|[^\w\s]")
_PAIR = {")": "(", "]": "[", "}": "{"}


class PythonicCalls:
    """names: of the request's tools. An answer that does not begin with a call of one of them is content, whole."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._num_calls = 0
        self._text: list[str] = []  # of the call that is being read, and what stands before it
        self._num_chars = 0
        self._open: list[str] = []
        self._quote = ""
        self._is_escaped = self._has_begun = self._is_content = self._is_over = False

    @property
    def num_held(self) -> int:
        """Characters of a call that is parsed, all at once, when its last one is there."""
        return 0 if self._is_content or self._is_over else self._num_chars

    def feed(self, text: str, is_last: bool) -> Iterator[Part]:
        at = 0
        while at < len(text) and not self._is_content:
            end = self._scan(text, at)
            self._text.append(text[at:end])
            self._num_chars += end - at
            at = end
            if self._is_over:
                self._text.clear()
            elif self._has_begun and len(self._open) == 1 and text[end - 1] == ")":
                yield from self._finish()
            elif self._is_hopeless():
                self._is_content = True
        if self._is_content or is_last:
            yield "".join(self._text) * (not self._is_over)
            self._text.clear()
            yield text[at:]

    def _scan(self, text: str, at: int) -> int:
        """To behind the next character that opens, closes, quotes or escapes."""
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        found = _NEXT.search(text, at)
        if found is None:
            return len(text)
        character = found[0]
        if self._quote:
            self._is_escaped = character == "\\"
            self._quote = "" if character == self._quote else self._quote
        elif character in "\"'":
            self._quote = character
        elif character in "([{":
            self._open.append(character)
            self._has_begun |= character == "("
        elif character in _PAIR:
            if not self._open or self._open.pop() != _PAIR[character]:
                self._is_content = not self._num_calls
                self._is_over = not self._is_content
            elif not self._open:
                self._is_over = self._num_calls > 0
        return found.end()

    def _is_hopeless(self) -> bool:
        """Whether what there is cannot become a call."""
        if self._is_over or len(self._open) > MAX_NESTING or self._num_chars > MAX_CALL_CHARS:
            return not self._is_over
        if self._open:
            return self._open[0] != "[" or (len(self._open) > 1 and not self._has_begun)
        return bool("".join(self._text).strip()) if len(self._text) < 2 else bool(self._text[-1].strip())

    def _finish(self) -> Iterator[Part]:
        """Of a call whose last parenthesis is there."""
        call = "".join(self._text)
        found = _call_of(call.lstrip(" \t\r\n,[") if self._num_calls else call.lstrip().removeprefix("["))
        self._text.clear()
        self._num_chars, self._has_begun = 0, False
        if found is None or found[0] not in self._names:
            self._is_content = True
            yield call
            return
        yield CallDelta(self._num_calls, *found)
        self._num_calls += 1


def _call_of(text: str) -> tuple[str, str] | None:
    """The name and the arguments as JSON; None for what is no call with literals."""
    texts = list(_TEXTS.finditer(text))
    num_marks = len(texts) + len(_MARK.findall(_TEXTS.sub(" ", text)))
    if num_marks > MAX_CALL_MARKS or any(found["f_string"] for found in texts):
        return None
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if not isinstance(node, ast.Call) or node.args:
            return None
        arguments = {_name_of(each): _plain(each.value) for each in node.keywords}
        return _dotted(node.func), escape_halves(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except (SyntaxError, ValueError, RecursionError, MemoryError, UnicodeError):
        return None


def _name_of(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise ValueError("**")
    return keyword.arg


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError("no name")


def _plain(node: ast.expr) -> Any:
    """JSON's value of a literal; true, false and null are taken as JSON has them."""
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, str | int | float):
            return value
        case ast.Name(id="true" | "false" | "null"):
            return {"true": True, "false": False, "null": None}[node.id]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List() | ast.Tuple():
            return [_plain(each) for each in node.elts]
        case ast.Dict():
            return {_key(key): _plain(value) for key, value in zip(node.keys, node.values, strict=True)}
    raise ValueError("no literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("no text as a key")
