"""Anthropic's POST /v1/messages over the chat path, and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict

from loraplex.core import CompletionOutput, FinishReason
from loraplex.server.access import Access, StrictRoute, requires
from loraplex.server.api_error import in_words_of
from loraplex.server.context import ServerContext
from loraplex.server.openai_api import ChatAnswer, OpenAIRoutes
from loraplex.server.openapi import OF_GENERATION, operation
from loraplex.server.responses import encode
from loraplex.server.schemas import ChatCompletionRequest
from loraplex.server.streaming import EVENT_STREAM
from loraplex.server.wires.answer_parts import Part, PartKind, PartsRenderer, Step, StepKind
from loraplex.server.wires.anthropic_errors import anthropic_event
from loraplex.server.wires.anthropic_messages_input import NAMES, CountTokensRequest, MessagesRequest


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """The signature is empty: thoughts are taken back as they are."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, frozen=True):
    """input_tokens: of the prompt, without those that were cached."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int | None


class MessageReply(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    model: str
    content: list[Block]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    role: str = "assistant"


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


class BetaQuery(BaseModel):
    """What Anthropic's clients add where they ask for what is new. Fields and headers say what that is."""

    model_config = ConfigDict(extra="forbid")
    beta: bool = False


class MessagesRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._chats = OpenAIRoutes(context)

    def router(self) -> APIRouter:
        router = APIRouter(tags=["Anthropic"], route_class=StrictRoute)
        extra = operation(MessagesRequest, replies=(MessageReply,), text_type=EVENT_STREAM, errors=OF_GENERATION)
        router.add_api_route("/v1/messages", self.respond, methods=["POST"], openapi_extra=extra)
        extra = operation(CountTokensRequest, replies=(TokenCount,), errors=(404,))
        router.add_api_route("/v1/messages/count_tokens", self.count, methods=["POST"], openapi_extra=extra)
        return router

    @requires(Access.KEY)
    async def respond(self, request: Request, query: Annotated[BetaQuery, Query()]) -> Response:
        """Answer a conversation of blocks."""
        with in_words_of(NAMES):
            return await self._chats.answer_chat(request, MessagesRequest, _converse, "msg_")

    @requires(Access.KEY)
    async def count(self, request: Request, query: Annotated[BetaQuery, Query()]) -> Response:
        """How many tokens the prompt of a conversation has."""
        context = self._context
        with in_words_of(NAMES):
            chat = (await context.bodies.read(request, CountTokensRequest)).chat
            adapter = await context.names.resolve(request, chat.model, chat.lora_path, chat.mix)
            held = context.engine.hold_adapters(adapter)
            held.close()  # the text stays, and no version answers
            text = await context.text_of(held.refs, request)
            prompt = await context.prompts.from_chat(chat, text, request, context.prompts.max_counted_ids(text))
        return Response(encode(TokenCount(len(prompt.token_ids))), media_type="application/json")


def _converse(body: MessagesRequest) -> tuple[ChatCompletionRequest, ChatAnswer]:
    return body.chat, MessageRenderer


class MessageRenderer(PartsRenderer):
    """Each part of an answer is a block of its content."""

    def opening(self) -> Iterator[bytes]:
        yield _event("message_start", message=self._reply([], None, None))
        yield _event("ping")

    def step(self, step: Step) -> Iterator[bytes]:
        part = step.part
        match step.kind:
            case StepKind.BEGIN:
                yield _event("content_block_start", index=part.index, content_block=_begun(part))
            case StepKind.PIECE:
                yield _event("content_block_delta", index=part.index, delta=_delta(part, step.text))
            case StepKind.END:
                yield _event("content_block_stop", index=part.index)

    def closing(self, completion: CompletionOutput) -> Iterator[bytes]:
        stop_reason, stop_sequence = self._stop(completion, has_calls=self.has_calls)
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        yield _event("message_delta", delta=delta, usage=self._usage())
        yield _event("message_stop")

    def whole(self, completion: CompletionOutput) -> bytes:
        content = [_block(each) for each in self.parts.parts]
        has_calls = any(isinstance(each, ToolUseBlock) for each in content)
        return encode(self._reply(content, *self._stop(completion, has_calls=has_calls)))

    def failure(self, error: Exception) -> bytes:
        return anthropic_event(error)

    def _reply(self, content: list[Block], stop_reason: str | None, stop_sequence: str | None) -> MessageReply:
        generation = self.generation
        return MessageReply(
            generation.response_id, generation.model, content, stop_reason, stop_sequence, self._usage()
        )

    def _stop(self, completion: CompletionOutput, *, has_calls: bool) -> tuple[str, str | None]:
        """The reason, and the text of `stop_sequences` that was met."""
        if completion.finish_reason == FinishReason.LENGTH:
            return "max_tokens", None
        if isinstance(completion.stop_reason, str):
            return "stop_sequence", completion.stop_reason
        return ("tool_use" if has_calls else "end_turn"), None

    def _usage(self) -> MessageUsage:
        usage = self.usage.usage()
        details = usage.prompt_tokens_details
        num_cached = None if details is None else details.cached_tokens
        return MessageUsage(usage.prompt_tokens - (num_cached or 0), usage.completion_tokens, num_cached)


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), encode({"type": kind, **fields}))


def _begun(part: Part) -> Block:
    match part.kind:
        case PartKind.THOUGHTS:
            return ThinkingBlock("")
        case PartKind.TEXT:
            return TextBlock("")
        case PartKind.CALL:
            return ToolUseBlock(f"toolu_{part.key}", part.name, {})


def _delta(part: Part, text: str) -> dict[str, str]:
    match part.kind:
        case PartKind.THOUGHTS:
            return {"type": "thinking_delta", "thinking": text}
        case PartKind.TEXT:
            return {"type": "text_delta", "text": text}
        case PartKind.CALL:
            return {"type": "input_json_delta", "partial_json": text}


def _block(part: Part) -> Block:
    """A call whose arguments are no JSON object, as one that was cut, is a text: no tool could be called with it.

    No value is made of them to see it: of 16 MiB of long numbers that takes seconds, in one call.
    """
    if part.kind is not PartKind.CALL:
        return ThinkingBlock(part.whole) if part.kind is PartKind.THOUGHTS else TextBlock(part.whole)
    arguments: str = msgspec.json.decode(part.encoded)
    try:
        checked = msgspec.json.decode(arguments, type=msgspec.Raw)
    except (msgspec.MsgspecError, RecursionError):
        checked = msgspec.Raw()
    if bytes(memoryview(checked)[:1]) != b"{":
        return TextBlock(f"{part.name}({arguments})")
    return msgspec.structs.replace(_begun(part), input=checked)
