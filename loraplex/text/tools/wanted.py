"""What a request says of tools, checked; and how its answer is read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from loraplex.errors import InvalidRequestError, shown
from loraplex.structured.params import StructuredOutputsParams, as_field
from loraplex.text.tools.answer import AnswerParser, Thoughts, call_parser, forced_parser

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
TOOL_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": rf"^{_NAME.pattern}$"},
                "parameters": {"type": ["object", "null"]},
            },
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
"""JSON schema of what `functions_of` takes."""


@dataclass(frozen=True, slots=True)
class WantedTools:
    """Tools that an answer may, or must, call. forced_name: the one that it must call; form: of an answer that must
    call one. allows_several: calls after the first are passed over otherwise."""

    names: tuple[str, ...]
    allows_several: bool = True
    forced_name: str | None = None
    form: StructuredOutputsParams | None = None

    @classmethod
    def of(
        cls, tools: Sequence[Mapping[str, Any]], tool_choice: Any, parallel_tool_calls: bool | None
    ) -> WantedTools | None:
        """None where no call is to be told. Raises InvalidRequestError, which names the field."""
        if tool_choice == "none" or (not tools and tool_choice in (None, "auto")):
            return None
        if not tools:
            _refuse("tool_choice", f"tool_choice={shown(tool_choice)} needs tools: send them, or leave it out")
        if len(tools) > MAX_TOOLS:
            _refuse("tools", f"there are {len(tools)} tools, at most {MAX_TOOLS} may be called")
        schemas = {name: {"type": "object", **parameters} for name, parameters in functions_of(tools)}
        if len(schemas) < len(tools):
            _refuse("tools", "two tools have one name")
        names, several = tuple(schemas), parallel_tool_calls is not False
        if tool_choice in (None, "auto"):
            return cls(names, several)
        with as_field("tools"):
            if tool_choice == "required":
                return cls(names, several, form=StructuredOutputsParams(calls=schemas, is_one_call=not several))
            name = _named(tool_choice)
            if name not in schemas:
                _refuse("tool_choice", f"tool_choice names {shown(name)}, and no tool has this name")
            return cls(names, several, name, StructuredOutputsParams(json=schemas[name]))


def functions_of(tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Names, and schemas of parameters. Raises InvalidRequestError for what is none of TOOL_SCHEMA."""
    return [_function_of(each) for each in tools]


def _function_of(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping):
        _refuse("tools", 'a tool must be {"type": "function", "function": {"name": ..., "parameters": {...}}}')
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        _refuse("tools", "the name of a function has 1 to 64 letters, digits, underscores, dots and hyphens")
    if parameters is not None and not isinstance(parameters, Mapping):
        _refuse("tools", f"parameters of function {shown(name)} must be a JSON schema: an object")
    return name, parameters or {"properties": {}, "additionalProperties": False}


def _named(tool_choice: Any) -> str:
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or tool_choice.get("type") != "function":
        _refuse(
            "tool_choice",
            f"tool_choice={shown(tool_choice)} is not supported: send none, auto, required, or "
            '{"type": "function", "function": {"name": ...}}',
        )
    return name


def _refuse(param: str, text: str) -> NoReturn:
    raise InvalidRequestError(text, param=param)


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """How the answers of a request are read. parser: of calls that the model makes as it likes, by name. is_thinking:
    the prompt has opened its thoughts; has_thoughts: they are told from the rest."""

    tools: WantedTools | None = None
    parser: str | None = None
    has_thoughts: bool = False
    is_thinking: bool = False

    def new_parser(self) -> AnswerParser | None:
        """Of one answer; None where all of it is content."""
        thoughts = Thoughts(self.is_thinking) if self.has_thoughts and not self._is_forced else None
        if self.tools is None:
            return None if thoughts is None else AnswerParser(thoughts, None)
        calls = forced_parser(self.tools.forced_name) if self._is_forced else None
        if calls is None and self.parser is not None:
            calls = call_parser(self.parser, self.tools.names)
        return AnswerParser(thoughts, calls, self.tools.allows_several)

    @property
    def _is_forced(self) -> bool:
        return self.tools is not None and self.tools.form is not None
