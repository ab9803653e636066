"""Chats to text as `transformers.PreTrainedTokenizerBase.apply_chat_template` renders them, with `jinja2` alone.

A template is a program of the model's author: it runs in jinja2's sandbox, over plain JSON data. The sandbox bounds
what it can reach, not how long it runs, so here a server renders templates of the model's directory alone; those of
adapters run in `template_process`. What it makes of a client's data is bounded: a variable that a template writes for
each message may be as long as a body.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loraplex.errors import InvalidRequestError, PromptTooLongError

Json = Any
MAX_RENDERED_CHARS = 2**24
"""Of a chat. More is refused while it is rendered."""

MAX_ARGUMENT_CHARS = 2**16
"""Of all template arguments together: a macro or a filter has its text whole before anything can count it."""

_END_MARK = "<|loraplex: the last message ends here|> "  # a template that trims takes the space at its end


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's part for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Any) -> Any:
        return caller()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(
    value: Json, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike jinja2's own filter it escapes no HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


class _Environment(ImmutableSandboxedEnvironment):
    def handle_exception(self, source: str | None = None) -> NoReturn:
        """jinja2's own writes lines of the template into the traceback, by frames that refer to one another: all of the
        chat would stay until a collection of garbage."""
        error = sys.exception()
        assert error is not None, "jinja2 calls it for what was raised"
        try:
            raise error
        finally:
            del error


@lru_cache(maxsize=32)
def _compile_template(source: str) -> jinja2.Template:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def plain_json(value: Json, name: str) -> Json:
    """A copy made of JSON's own types: no object of ours, no subclass of a plain type is in a template's reach."""
    try:
        return _plain(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} of a chat must be plain JSON data: {error}", param=name) from error


def _plain(value: Json) -> Json:
    """Value by value: one call of a JSON library for all of it would keep the interpreter from other threads."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if type(value) is list:
        return [_plain(each) for each in value]
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: _plain(each) for key, each in value.items()}
    return json.loads(json.dumps(value, ensure_ascii=False))


def check_template(source: str) -> None:
    """Raises InvalidRequestError for what jinja2 cannot compile."""
    try:
        _compile_template(source)
    except jinja2.TemplateSyntaxError as error:
        raise _syntax_error(error) from error
    except Exception as error:  # of nesting too deep, or constants too large, which it folds
        raise InvalidRequestError(f"the chat template cannot be compiled: {type(error).__name__}") from error


def _syntax_error(error: jinja2.TemplateSyntaxError) -> InvalidRequestError:
    text = f"the chat template is wrong at line {error.lineno}: {error.message}"
    return InvalidRequestError(text, param="messages")


def render_chat(source: str, variables: Mapping[str, Json]) -> str:
    """Render a chat template over plain data. Whatever goes wrong inside is an InvalidRequestError with its reason."""
    try:
        return "".join(_bounded(_compile_template(source).generate(**variables)))
    except jinja2.TemplateSyntaxError as error:
        raise _syntax_error(error) from error
    except PromptTooLongError:
        raise
    except Exception as error:  # a template is a program: it can raise anything
        reason = str(error) or type(error).__name__
        raise InvalidRequestError(f"the chat template refuses this chat: {reason}", param="messages") from error


def _bounded(pieces: Iterable[str]) -> Iterator[str]:
    num_chars = 0
    for piece in pieces:
        num_chars += len(piece)
        if num_chars > MAX_RENDERED_CHARS:
            raise PromptTooLongError(
                f"the chat template makes more than {MAX_RENDERED_CHARS} characters of this chat: shorten it",
                param="messages",
            )
        yield piece


def num_chars_of(value: Json) -> int:
    """Of all texts in JSON data, keys included."""
    match value:
        case str():
            return len(value)
        case list():
            return sum(map(num_chars_of, value))
        case dict():
            return sum(len(key) + num_chars_of(each) for key, each in value.items())
        case _:
            return 0


def render_open_chat(source: str, variables: Mapping[str, Json]) -> str:
    """Render up to the end of the last message's text, so that the model continues it."""
    last = variables["messages"][-1]
    content = last.get("content")
    if isinstance(content, str):
        last = {**last, "content": content + _END_MARK}
    elif isinstance(content, list) and (texts := [i for i, part in enumerate(content) if _text_of(part) is not None]):
        parts = list(content)
        content = _text_of(parts[texts[-1]]) or ""
        parts[texts[-1]] = {**parts[texts[-1]], "text": content + _END_MARK}
        last = {**last, "content": parts}
    else:
        raise InvalidRequestError(
            "continue_final_message: the last message has no text content to continue", param="continue_final_message"
        )
    rendered = render_chat(source, {**variables, "messages": [*variables["messages"][:-1], last]})
    before, mark, after = rendered.rpartition(_END_MARK.rstrip())
    if not mark or content.strip() not in before:
        raise InvalidRequestError(
            "continue_final_message: the chat template drops or changes the last message",
            param="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


def _text_of(part: Json) -> str | None:
    text = part.get("text") if isinstance(part, dict) else None
    return text if isinstance(text, str) else None
