"""What POST /v1/messages takes: Anthropic's blocks and fields, and the conversation that they make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from loraplex.sampling_params import MAX_STOP_STRINGS
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
    StopText,
)
from loraplex.server.wires.chat_fields import PassedFields, TargetFields, chat_request, only_kinds, tag_of, turn

NAMES = {
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config",
    "stop": "stop_sequences",
    "user": "metadata",
}
"""Of the chat route's fields, what they are called here."""

FAILED = "Error: "
"""Before the result of a tool that has failed: chat templates have no other place for it."""


class Block(RequestModel):
    """cache_control: prefixes are kept by themselves, whatever it says."""

    cache_control: SmallObject | None = None


class TextBlock(Block):
    type: Literal["text"]
    text: str

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"citations": ([],)}

    _only_text = only_kinds("messages", "blocks", ("text",), "those of type text")


Texts = Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)]


_TEXT_OR_BLOCKS = one_or_list("<text>", "<blocks>", "content_type", "must be a string or a list of blocks")
TextOrTexts = Annotated[Annotated[str, Tag("<text>")] | Annotated[Texts, Tag("<blocks>")], _TEXT_OR_BLOCKS]


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: Label
    name: Label
    input: FreeObject

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"caller": ({"type": "direct"},)}


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: Label
    content: TextOrTexts = ""
    is_error: bool = False


class ThinkingBlock(Block):
    """As an answer here has it. The signature is none of this server's: it is not read."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


KINDS = ("text", "tool_use", "tool_result", "thinking")


def _kind_of(block: Any) -> str | None:
    return tag_of(block, "messages", "blocks", KINDS)


Blocks = Annotated[
    list[
        Annotated[
            Annotated[TextBlock, Tag("<text>")]
            | Annotated[ToolUseBlock, Tag("<tool_use>")]
            | Annotated[ToolResultBlock, Tag("<tool_result>")]
            | Annotated[ThinkingBlock, Tag("<thinking>")],
            Discriminator(_kind_of, custom_error_type="block_type", custom_error_message="must be an object: a block"),
        ]
    ],
    Field(max_length=MAX_PARTS, fail_fast=True),
]


class Message(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Annotated[str, Tag("<text>")] | Annotated[Blocks, Tag("<blocks>")], _TEXT_OR_BLOCKS]


class Tool(RequestModel):
    """A tool that the client runs. `strict` changes nothing: see tool_choice."""

    type: Literal["custom"] = "custom"
    name: Label
    description: str | None = None
    input_schema: FreeObject
    strict: bool | None = None
    cache_control: SmallObject | None = None
    eager_input_streaming: bool | None = None

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
        "input_examples": ([],),
    }

    _only_own = only_kinds("tools", "tools", ("custom",), "those that the client describes and runs")


class ToolChoice(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: Label | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check_name(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ApiError("tool_choice has a name with type tool, and with no other", param="tool_choice")
        return self

    def as_chat(self) -> Any:
        match self.type:
            case "any":
                return "required"
            case "tool":
                return {"type": "function", "function": {"name": self.name}}
        return self.type


class Thinking(RequestModel):
    """What a chat template is told as `enable_thinking`. How long the thoughts may be has no bound here."""

    type: Literal["adaptive", "disabled"]

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"display": ("summarized",)}

    @model_validator(mode="before")
    @classmethod
    def _without_budget(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("type") == "enabled":
            text = "a budget of thoughts is not supported: max_tokens bounds them with the answer; send"
            raise unsupported("thinking", f'thinking: {text} {{"type": "adaptive"}} or {{"type": "disabled"}}')
        return data


class JsonFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: Annotated[FreeObject, Field(alias="schema")]

    @classmethod
    def _is_neutral(cls, name: str, value: Any) -> bool:
        return name != "schema" and super()._is_neutral(name, value)


class OutputConfig(RequestModel):
    format: JsonFormat | None = None

    place: ClassVar[str] = "output_config."
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"effort": ()}


class Metadata(RequestModel):
    user_id: Label | None = None


class CountTokensRequest(TargetFields):
    """`POST /v1/messages/count_tokens`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: TextOrTexts | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: SmallObject | None = None

    hints: ClassVar[frozenset[str]] = frozenset({"cache_control"})
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "container": (),
        "context_management": (),
        "diagnostics": (),
        "inference_geo": (),
        "mcp_servers": ([],),
        "output_format": (),
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
    }

    @model_validator(mode="after")
    def _check_request(self) -> CountTokensRequest:
        assert self.chat.messages, "made here, where the body is checked: a conversation may be long"
        return self

    @classmethod
    def refuse_hints(cls, fields: Mapping[str, Any]) -> None:
        super().refuse_hints(fields)
        for part in _parts_of(fields):
            super().refuse_hints({"cache_control": part.get("cache_control")})

    def own_fields(self) -> dict[str, Any]:
        """Of the chat route, beside those of the conversation."""
        return {}

    @cached_property
    def chat(self) -> ChatCompletionRequest:
        """The same for the chat route. Raises ApiError."""
        messages = [] if self.system is None else [turn("system", _texts(self.system))]
        for message in self.messages:
            messages += turns_of(message)
        choice, config = self.tool_choice, self.output_config
        form = None if config is None or config.format is None else {"schema": config.format.schema_}
        kwargs = self.chat_template_kwargs or {}
        if self.thinking is not None:
            kwargs = {**kwargs, "enable_thinking": self.thinking.type == "adaptive"}
        fields = {
            **self.passed(),
            "messages": messages,
            "tools": [_as_chat_tool(each) for each in self.tools] or None,
            "tool_choice": None if choice is None else choice.as_chat(),
            "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
            "response_format": None if form is None else {"type": "json_schema", "json_schema": form},
            "chat_template_kwargs": kwargs or None,
            "continue_final_message": _is_begun(messages[-1]) or None,
            **self.own_fields(),
        }
        return chat_request(fields, NAMES)


class MessagesRequest(PassedFields, CountTokensRequest):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)]
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] = Field(
        default_factory=list
    )
    metadata: Metadata | None = None

    hints: ClassVar[frozenset[str]] = CountTokensRequest.hints | {"metadata"}
    aliases: ClassVar[Mapping[str, str]] = {
        **PassedFields.aliases,
        "max_completion_tokens": "max_tokens",
        "max_tokens_to_sample": "max_tokens",
        "prompt": "messages",
        "stop": "stop_sequences",
    }

    def own_fields(self) -> dict[str, Any]:
        user = None if self.metadata is None else self.metadata.user_id
        return {"max_completion_tokens": self.max_tokens, "stop": self.stop_sequences or None, "user": user}


def _parts_of(fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Tools, messages, their blocks, and blocks in these, of a body that was not checked yet."""
    lists = [fields.get(name) for name in ("system", "tools", "messages")]
    for _ in range(3):
        parts = [each for found in lists if isinstance(found, list) for each in found if isinstance(each, dict)]
        yield from parts
        lists = [part.get("content") for part in parts]


def _as_chat_tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def turns_of(message: Message) -> Iterator[ChatMessage]:
    """The messages of the chat route that say the same: each result of a tool is one."""
    if isinstance(message.content, str):
        yield turn(message.role, message.content)
        return
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in message.content:
        if isinstance(block, ToolResultBlock) and message.role == "user":
            if texts:
                yield turn(message.role, texts)
                texts = []
            yield _result(block)
        elif isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolUseBlock) and message.role == "assistant":
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ThinkingBlock) and message.role == "assistant":
            thoughts.append(block.thinking)
        else:
            text = f"a message with role {shown(message.role)} has a block of type {block.type}"
            raise unsupported("messages", f"{text}: it belongs to the other side of the conversation")
    more: dict[str, Any] = {"tool_calls": calls} if calls else {}
    if thoughts:
        more["reasoning_content"] = "\n".join(thoughts)
    if texts or more or not message.content:
        yield turn(message.role, texts[0] if len(texts) == 1 else texts or "", **more)


def _result(block: ToolResultBlock) -> ChatMessage:
    texts = _texts(block.content)
    if block.is_error:
        texts = FAILED + texts if isinstance(texts, str) else [FAILED + (texts[0] if texts else ""), *texts[1:]]
    return turn("tool", texts or "", tool_call_id=block.tool_use_id)


def _texts(content: str | Sequence[TextBlock]) -> str | list[str]:
    if isinstance(content, str):
        return content
    texts = [block.text for block in content]
    return texts[0] if len(texts) == 1 else texts or ""


def _is_begun(message: ChatMessage) -> bool:
    """Whether the answer is to go on with the last message."""
    return message.role == "assistant" and not message.tool_calls and bool(message.content)
