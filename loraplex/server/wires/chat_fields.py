"""What wires over the chat path share: fields that mean the same there, and errors in the client's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator
from pydantic.json_schema import JsonSchemaValue

from loraplex.sampling_params import MAX_PRIORITY
from loraplex.server.api_error import ApiError, in_words_of
from loraplex.server.body import check_model
from loraplex.server.request_model import BodyLimits, FreeObject, RequestModel, any_of, has, shown, unsupported
from loraplex.server.schemas import (
    CHAT_LIMITS,
    ID_PATTERN,
    INT32_MAX,
    INT64_MAX,
    INT64_MIN,
    MAX_MESSAGES,
    MAX_SALT_CHARS,
    MAX_TIMEOUT_S,
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    Label,
    MergedAdapters,
    Share,
    documented,
)


class TargetFields(RequestModel):
    """What a conversation is for, under the names of the chat route."""

    model: Label | None = None
    lora_path: Label | None = None
    merged_adapters: MergedAdapters | None = None
    chat_template_kwargs: FreeObject | None = None

    limits: ClassVar[BodyLimits] = CHAT_LIMITS
    aliases: ClassVar[Mapping[str, str]] = {"adapter_id": "lora_path", "adapter": "lora_path", "lora": "lora_path"}
    rules: ClassVar[tuple[JsonSchemaValue, ...]] = (
        any_of(
            has(model={"type": "string"}), has(lora_path={"type": "string"}), has(merged_adapters={"type": "object"})
        ),
    )

    def passed(self) -> dict[str, Any]:
        """What was sent of the fields that the chat route has under the same names."""
        return {name: getattr(self, name) for name in self.model_fields_set & PassedFields.model_fields.keys()}


class PassedFields(TargetFields):
    """How it is answered. Fields that are not sent have the chat route's defaults, or the adapter's."""

    temperature: Annotated[float, documented(minimum=0, maximum=100)] | None = None
    top_p: Annotated[float, documented(exclusiveMinimum=0, maximum=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, documented(minimum=0.001, maximum=10)] | None = None
    seed: Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    ignore_eos: bool = False
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None
    request_id: Annotated[str, Field(pattern=ID_PATTERN)] | None = None
    stream: bool = False


def chat_request(fields: Mapping[str, Any], names: Mapping[str, str]) -> ChatCompletionRequest:
    """The request of the chat route. names: of its fields, what the client calls them. Raises ApiError in its words."""
    given = {name: value for name, value in fields.items() if value is not None}
    with in_words_of(names):
        if len(given["messages"]) > MAX_MESSAGES:
            text = f"messages make {len(given['messages'])} turns of a conversation, at most {MAX_MESSAGES} fit"
            raise ApiError(text, param="messages")
        return check_model(given, ChatCompletionRequest)


def turn(role: str, content: str | list[str], **fields: Any) -> ChatMessage:
    """A message whose values have been checked. Several texts are parts."""
    parts: Any = content
    if not isinstance(content, str):
        parts = [ContentPart(type="text", text=each) for each in content]
    return ChatMessage(role=role, content=parts, **fields)


def unknown_kind(field: str, what: str, kind: object, known: str) -> ApiError:
    return unsupported(field, f"{what} of type {shown(kind)} are not supported by this server: only {known} are")


def only_kinds(field: str, what: str, kinds: Sequence[str], known: str) -> Any:
    """A validator of an object whose `type` is one of these, where it has one. Raises ApiError for another."""

    def check(cls: type, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if kind is not None and kind not in kinds:
            raise unknown_kind(field, what, kind, known)
        return data

    of_class: Any = classmethod(check)
    return model_validator(mode="before")(of_class)


def tag_of(value: Any, field: str, what: str, kinds: Sequence[str], usual: str | None = None) -> str | None:
    """The tag of a block or item in a union, by its `type` (None: `usual`); None for what is no object. Raises ApiError
    for a type that this server does not have."""
    if not isinstance(value, dict):
        return None
    kind = value.get("type") or usual
    if kind not in kinds:
        raise unknown_kind(field, what, kind, f"those of type {', '.join(kinds)}")
    return f"<{kind}>"
