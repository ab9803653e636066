"""What POST /v1/responses takes: OpenAI's items and fields, and the conversation that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Discriminator, Field, Tag, model_validator
from pydantic.json_schema import JsonSchemaValue

from loraplex.sampling_params import MAX_LOGPROBS
from loraplex.server.api_error import ApiError
from loraplex.server.request_model import FreeObject, RequestModel, SmallObject, one_or_list, shown, unsupported
from loraplex.server.schemas import (
    INT32_MAX,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    ChatCompletionRequest,
    ChatMessage,
    Label,
    documented,
)
from loraplex.server.wires.chat_fields import PassedFields, chat_request, only_kinds, tag_of, turn

MAX_SAID_BACK_BYTES = 64 * 2**10
"""Of instructions, tools and the form, each: an answer and two events of a stream say them again."""

LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "logprobs": "include",
}
"""Of the chat route's fields, what they are called here."""


MAX_LOGPROBS_SENT = 2**14
"""Of an answer that a client sends back, which nothing reads."""


class TextPart(RequestModel):
    """A text of a message, of a function's output, or of thoughts."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"annotations": ([],), "prompt_cache_breakpoint": ()}
    logprobs: Annotated[list[FreeObject], Field(max_length=MAX_LOGPROBS_SENT, fail_fast=True)] | None = None

    _only_text = only_kinds(
        "input",
        "content parts",
        ("input_text", "output_text", "text", "summary_text", "reasoning_text"),
        "those of type input_text and output_text",
    )


Parts = Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]
TextOrParts = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Parts, Field(min_length=1), Tag("<parts>")],
    one_or_list("<text>", "<parts>", "content_type", "must be a string or a list of parts"),
]


class Item(RequestModel):
    """What every item may have beside its own. An id names what is not stored here, and changes nothing."""

    id: Label | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrParts

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"phase": ("commentary", "final_answer")}


class FunctionCallItem(Item):
    type: Literal["function_call"]
    call_id: Label
    name: Label
    arguments: str

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"namespace": (), "caller": ()}


class FunctionOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: Label
    output: TextOrParts

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"caller": ()}


class ReasoningItem(Item):
    """As an answer here has it. What another server has encrypted cannot be read."""

    type: Literal["reasoning"]
    summary: Parts = Field(default_factory=list)
    content: Parts = Field(default_factory=list)

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"encrypted_content": ()}


KINDS = ("message", "function_call", "function_call_output", "reasoning")


def _kind_of(item: Any) -> str | None:
    return tag_of(item, "input", "items", KINDS, "message")


Items = Annotated[
    list[
        Annotated[
            Annotated[MessageItem, Tag("<message>")]
            | Annotated[FunctionCallItem, Tag("<function_call>")]
            | Annotated[FunctionOutputItem, Tag("<function_call_output>")]
            | Annotated[ReasoningItem, Tag("<reasoning>")],
            Discriminator(_kind_of, custom_error_type="item_type", custom_error_message="must be an object: an item"),
        ]
    ],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
]


class FunctionTool(RequestModel):
    type: Literal["function"]
    name: Label
    description: str | None = None
    parameters: FreeObject | None = None
    strict: bool | None = None

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
        "output_schema": (),
    }

    _only_functions = only_kinds("tools", "tools", ("function",), "functions, which the client runs,")


class NamedFunction(RequestModel):
    type: Literal["function"]
    name: Label

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("type") != "function":
            text = f"tool_choice={shown(data)} is not supported: send none, auto, required, or"
            raise unsupported("tool_choice", f'{text} {{"type": "function", "name": ...}}')
        return data


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")] | Annotated[NamedFunction, Tag("<function>")],
    Discriminator(lambda value: "<mode>" if value in ("none", "auto", "required") else "<function>"),
]


class TextFormat(RequestModel):
    """`name`, `description` and `strict` of a schema change nothing: it always holds."""

    type: Literal["text", "json_object", "json_schema"]
    name: Label | None = None
    description: str | None = None
    schema_: Annotated[FreeObject | None, Field(alias="schema")] = None
    strict: bool | None = None

    @classmethod
    def _is_neutral(cls, name: str, value: Any) -> bool:
        return name != "schema" and super()._is_neutral(name, value)

    def as_response_format(self) -> dict[str, Any]:
        if self.type == "json_schema":
            return {"type": self.type, "json_schema": {} if self.schema_ is None else {"schema": self.schema_}}
        return {"type": self.type}


class TextField(RequestModel):
    format: TextFormat | None = None

    place: ClassVar[str] = "text."
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"verbosity": ("medium",)}


class StreamOptions(RequestModel):
    place: ClassVar[str] = "stream_options."
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}


class Reasoning(RequestModel):
    """How a model thinks is its chat template's to say (`chat_template_kwargs`); a summary is none of this server's."""

    place: ClassVar[str] = "reasoning."
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"effort": (), "summary": (), "generate_summary": ()}


class ResponsesRequest(PassedFields):
    """`POST /v1/responses`."""

    input: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[Items, Tag("<items>")],
        one_or_list("<text>", "<items>", "input_type", "must be a string or a list of items"),
    ]
    instructions: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextField | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: Annotated[list[str], Field(max_length=len(INCLUDED)), documented(items={"enum": list(INCLUDED)})] = Field(
        default_factory=list
    )
    stream_options: StreamOptions | None = None
    reasoning: Reasoning | None = None
    metadata: SmallObject | None = None
    store: bool | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None

    hints: ClassVar[frozenset[str]] = frozenset(("metadata", "store", "user", "safety_identifier", "prompt_cache_key"))
    aliases: ClassVar[Mapping[str, str]] = {
        **PassedFields.aliases,
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "prompt": "input",
        "response_format": "text",
    }
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "context_management": (),
        "conversation": (),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "service_tier": ("auto", "default"),
        "truncation": ("disabled",),
    }
    rules: ClassVar[tuple[JsonSchemaValue, ...]] = PassedFields.rules

    @model_validator(mode="after")
    def _check_request(self) -> ResponsesRequest:
        unknown = next((each for each in self.include if each not in INCLUDED), None)
        if unknown is not None:
            text = f"include has {shown(unknown)}: this server has {' and '.join(INCLUDED)}"
            raise unsupported("include", text)
        if self.top_logprobs and LOGPROBS not in self.include:
            raise ApiError(f'top_logprobs needs include=["{LOGPROBS}"]', param="top_logprobs")
        if LOGPROBS in self.include and self.tools and self.tool_choice != "none":
            text = "log probabilities are those of a text, and calls of tools are told from it: leave one out"
            raise ApiError(text, param="include")
        assert self.chat.messages, "made here, where the body is checked: a conversation may be long"
        assert self.said_back
        return self

    @cached_property
    def chat(self) -> ChatCompletionRequest:
        """The same for the chat route. Raises ApiError."""
        form = None if self.text is None or self.text.format is None else self.text.format.as_response_format()
        items = [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        choice: Any = self.tool_choice
        if isinstance(choice, NamedFunction):
            choice = {"type": "function", "function": {"name": choice.name}}
        instructions = [] if self.instructions is None else [turn("system", self.instructions)]
        fields = {
            **self.passed(),
            "messages": [*instructions, *conversation_of(items)],
            "tools": [_as_chat_tool(each) for each in self.tools] or None,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": form,
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": LOGPROBS in self.include or None,
            "top_logprobs": self.top_logprobs,
            "user": self.user if self.safety_identifier is None else self.safety_identifier,
        }
        return chat_request(fields, NAMES)

    @cached_property
    def said_back(self) -> dict[str, Any]:
        """What the answer says of the request."""
        form = None if self.text is None else self.text.format
        bare = {"format": {"type": "text" if form is None else form.type}}
        choice = self.tool_choice or "auto"
        return {
            "instructions": _said_back(self.instructions, None),
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "text": _said_back(bare if form is None else self.text, bare),
            "tool_choice": _sent(choice) if isinstance(choice, NamedFunction) else choice,
            "tools": _said_back(self.tools, []),
            "top_logprobs": self.top_logprobs,
            "user": self.user,
        }


def _is_short(value: Any) -> bool:
    """Whether it may be written within MAX_SAID_BACK_BYTES: told by its characters and values, which costs less."""
    left, found = MAX_SAID_BACK_BYTES, [value]
    while found and left >= 0:
        item = found.pop()
        left -= 1
        if isinstance(item, str):
            left -= len(item)
        elif isinstance(item, Mapping | list | tuple):
            left -= len(item)
            if left >= 0:
                found += (*item.keys(), *item.values()) if isinstance(item, Mapping) else item
        elif isinstance(item, RequestModel):
            found += (getattr(item, name) for name in item.model_fields_set)
    return left >= 0


def _sent(model: RequestModel) -> dict[str, Any]:
    return model.model_dump(by_alias=True, exclude_unset=True)


def _said_back(value: Any, otherwise: Any) -> msgspec.Raw:
    if not _is_short(value):
        return msgspec.Raw(msgspec.json.encode(otherwise))
    data = msgspec.json.encode(value, enc_hook=_sent)
    return msgspec.Raw(data if len(data) <= MAX_SAID_BACK_BYTES else msgspec.json.encode(otherwise))


def _as_chat_tool(tool: FunctionTool) -> dict[str, Any]:
    fields = {"name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


def conversation_of(items: Sequence[Item]) -> list[ChatMessage]:
    """Messages of the chat route: thoughts, texts and calls of an assistant in a row are one of them."""
    messages: list[ChatMessage] = []
    own = _AssistantTurn()
    for item in items:
        if isinstance(item, FunctionOutputItem):
            messages += own.take()
            messages.append(turn("tool", _texts(item.output), tool_call_id=item.call_id))
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages += own.take()
            messages.append(turn(item.role, _texts(item.content)))
        else:
            if own.ends_before(item):
                messages += own.take()
            own.add(item)
    return messages + own.take()


class _AssistantTurn:
    """What an assistant has said until the others say something."""

    def __init__(self) -> None:
        self._thoughts: list[str] = []
        self._texts: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def ends_before(self, item: Item) -> bool:
        """Thoughts come first, and texts before calls."""
        if isinstance(item, ReasoningItem):
            return bool(self._texts or self._calls)
        return isinstance(item, MessageItem) and bool(self._calls)

    def add(self, item: Item) -> None:
        if isinstance(item, ReasoningItem):
            self._thoughts += [part.text for part in item.content or item.summary]
        elif isinstance(item, FunctionCallItem):
            function = {"name": item.name, "arguments": item.arguments}
            self._calls.append({"id": item.call_id, "type": "function", "function": function})
        elif isinstance(item, MessageItem):
            texts = _texts(item.content)
            self._texts += [texts] if isinstance(texts, str) else texts

    def take(self) -> list[ChatMessage]:
        thoughts, texts, calls = self._thoughts, self._texts, self._calls
        self._thoughts, self._texts, self._calls = [], [], []
        if not (thoughts or texts or calls):
            return []
        more: dict[str, Any] = {"tool_calls": calls} if calls else {}
        if thoughts:
            more["reasoning_content"] = "\n".join(thoughts)
        return [turn("assistant", texts[0] if len(texts) == 1 else texts or "", **more)]


def _texts(content: str | list[TextPart]) -> str | list[str]:
    return content if isinstance(content, str) else [part.text for part in content]
