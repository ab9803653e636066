"""OpenAI's POST /v1/responses over the chat path. Nothing is stored: clients send the items of earlier turns again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from loraplex.core import CompletionOutput, FinishReason
from loraplex.server.access import Access, StrictRoute, requires
from loraplex.server.api_error import ApiError, error_body, in_words_of, status_of
from loraplex.server.context import ServerContext
from loraplex.server.engine_surface import tokenizer_of
from loraplex.server.generation import Delta, Generation
from loraplex.server.logprobs import TokenTexts, chat_logprobs
from loraplex.server.openai_api import ChatAnswer, OpenAIRoutes
from loraplex.server.openapi import OF_GENERATION, operation
from loraplex.server.responses import AnswerRoom, TokenLogprob, encode
from loraplex.server.schemas import ChatCompletionRequest
from loraplex.server.streaming import EVENT_STREAM
from loraplex.server.wires.answer_parts import Part, PartKind, PartsRenderer, Step, StepKind
from loraplex.server.wires.openai_responses_input import NAMES, ResponsesRequest
from loraplex.text.tools.wanted import AnswerReading


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)
    annotations: list[str] = msgspec.field(default_factory=list)


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class MessageOutput(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class ReasoningOutput(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    id: str
    status: str
    content: list[ReasoningText]
    summary: list[str] = msgspec.field(default_factory=list)
    encrypted_content: None = None


class FunctionCallOutput(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str


OutputItem = MessageOutput | ReasoningOutput | FunctionCallOutput


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """input_tokens_details: null where a cached token may be another client's."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputTokensDetails | None
    output_tokens_details: OutputTokensDetails


class ResponseFailure(msgspec.Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str


class ResponseReply(msgspec.Struct, frozen=True):
    """A whole answer, or what a stream says of it. The second half is what the request has said."""

    id: str
    created_at: int
    model: str
    status: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    temperature: float
    top_p: float
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int | None
    user: str | None
    completed_at: int | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    object: str = "response"
    background: bool = False
    previous_response_id: None = None
    service_tier: str = "default"
    store: bool = False
    truncation: str = "disabled"


TIMES_SAID = 4
"""That the last events of a stream say all log probabilities again: text, part, item, response."""


@dataclass(frozen=True, slots=True)
class _Form:
    """Of a part in an answer: its item's id, its content, and what events call that."""

    prefix: str
    content: str


_FORMS = {
    PartKind.THOUGHTS: _Form("rs_", "reasoning_text"),
    PartKind.TEXT: _Form("msg_", "output_text"),
    PartKind.CALL: _Form("fc_", "function_call_arguments"),
}


class ResponsesRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._chats = OpenAIRoutes(context)

    def router(self) -> APIRouter:
        router = APIRouter(tags=["OpenAI"], route_class=StrictRoute)
        extra = operation(ResponsesRequest, replies=(ResponseReply,), text_type=EVENT_STREAM, errors=OF_GENERATION)
        router.add_api_route("/v1/responses", self.respond, methods=["POST"], openapi_extra=extra)
        return router

    @requires(Access.KEY)
    async def respond(self, request: Request) -> Response:
        """Answer a conversation of items."""
        with in_words_of(NAMES):
            return await self._chats.answer_chat(request, ResponsesRequest, _converse, "resp_")


def _converse(body: ResponsesRequest) -> tuple[ChatCompletionRequest, ChatAnswer]:
    return body.chat, partial(ResponseRenderer, body.said_back)


class ResponseRenderer(PartsRenderer):
    """Each part of an answer is an item of its output."""

    work_at_end = 1

    def __init__(
        self,
        said_back: Mapping[str, Any],
        request: ChatCompletionRequest,
        generation: Generation,
        reading: AnswerReading,
    ) -> None:
        super().__init__(request, generation, reading)
        if request.logprobs and reading.has_thoughts:
            text = "log probabilities are those of a text, and thoughts are told from it (--reasoning-parser): leave"
            raise ApiError(f"{text} it out, or send the request to /v1/chat/completions", param="include")
        self._said_back = said_back
        self._texts = TokenTexts(tokenizer_of(generation.items[0].target.text))
        self._logprobs: list[TokenLogprob] = []
        self._num_sent_logprobs = 0
        self._room = AnswerRoom(TIMES_SAID)
        self._num_events = 0

    def opening(self) -> Iterator[bytes]:
        yield self._event("response.created", response=self._reply("in_progress"))
        yield self._event("response.in_progress", response=self._reply("in_progress"))

    def step(self, step: Step) -> Iterator[bytes]:
        part = step.part
        form = _FORMS[part.kind]
        place = {"item_id": form.prefix + part.key, "output_index": part.index}
        if part.kind is not PartKind.CALL:
            place["content_index"] = 0
        match step.kind:
            case StepKind.BEGIN:
                item = self._item(part, "in_progress", is_begun=True)
                yield self._event("response.output_item.added", output_index=part.index, item=item)
                if part.kind is not PartKind.CALL:
                    yield self._event("response.content_part.added", **place, part=_content(part.kind, ""))
            case StepKind.PIECE:
                more = {"logprobs": self._unsent_logprobs()} if part.kind is PartKind.TEXT else {}
                yield self._event(f"response.{form.content}.delta", **place, delta=step.text, **more)
            case StepKind.END:
                yield from self._ends(part, form, place)

    def _ends(self, part: Part, form: _Form, place: dict[str, Any]) -> Iterator[bytes]:
        said, status = part.whole, "completed"
        if part.kind is PartKind.CALL:
            yield self._event("response.function_call_arguments.done", **place, name=part.name, arguments=said)
        else:
            more = {"logprobs": self._logprobs} if part.kind is PartKind.TEXT else {}
            yield self._event(f"response.{form.content}.done", **place, text=said, **more)
            content = _content(part.kind, said, self._logprobs)
            yield self._event("response.content_part.done", **place, part=content)
        yield self._event("response.output_item.done", output_index=part.index, item=self._item(part, status))

    def closing(self, completion: CompletionOutput) -> Iterator[bytes]:
        status = _status(completion)
        yield self._event(f"response.{status}", response=self._reply(status))

    def whole(self, completion: CompletionOutput) -> bytes:
        return encode(self._reply(_status(completion)))

    def failure(self, error: Exception) -> bytes:
        code = "rate_limit_exceeded" if status_of(error) == 429 else "server_error"
        failure = ResponseFailure(code, error_body(error).message)
        return self._event("response.failed", response=self._reply("failed", failure))

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return b"event: %s\ndata: %s\n\n" % (
            kind.encode(),
            encode({"type": kind, "sequence_number": number, **fields}),
        )

    def _reply(self, status: str, error: ResponseFailure | None = None) -> ResponseReply:
        generation, parts, is_running = self.generation, self.parts.parts, status == "in_progress"
        params = generation.items[0].params
        last = "incomplete" if status in ("incomplete", "failed") else "completed"
        return ResponseReply(
            id=generation.response_id,
            created_at=generation.created,
            model=generation.model,
            status=status,
            output=[self._item(each, "completed" if each is not parts[-1] else last) for each in parts],
            usage=None if is_running else self._usage(),
            temperature=params.temperature,
            top_p=params.top_p,
            completed_at=int(time.time()) if status == "completed" else None,
            error=error,
            incomplete_details=IncompleteDetails("max_output_tokens") if status == "incomplete" else None,
            **self._said_back,
        )

    def _item(self, part: Part, status: str, *, is_begun: bool = False) -> OutputItem:
        """is_begun: without what it says."""
        item_id, said = _FORMS[part.kind].prefix + part.key, "" if is_begun else part.whole
        match part.kind:
            case PartKind.THOUGHTS:
                return ReasoningOutput(item_id, status, [] if is_begun else [ReasoningText(said)])
            case PartKind.TEXT:
                return MessageOutput(item_id, status, [] if is_begun else [OutputText(said, self._logprobs)])
            case PartKind.CALL:
                return FunctionCallOutput(item_id, status, f"call_{part.key}", part.name, said)

    def _usage(self) -> ResponseUsage:
        usage = self.usage.usage()
        details = usage.prompt_tokens_details
        return ResponseUsage(
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.total_tokens,
            None if details is None else InputTokensDetails(details.cached_tokens),
            OutputTokensDetails(self.num_thought_tokens),
        )

    def steps(self, completion: CompletionOutput, delta: Delta) -> Iterator[Step]:
        """Log probabilities are all of a text: `include` goes with no other kind of part."""
        if self.request.logprobs and delta.logprobs is not None:
            known = [candidates for candidates in delta.logprobs if candidates is not None]
            num_top = self.request.top_logprobs
            self._logprobs += chat_logprobs(delta.token_ids, known, num_top, self._texts, self._room).content
        return super().steps(completion, delta)

    def _unsent_logprobs(self) -> list[TokenLogprob]:
        new = self._logprobs[self._num_sent_logprobs :]
        self._num_sent_logprobs = len(self._logprobs)
        return new


def _status(completion: CompletionOutput) -> str:
    return "incomplete" if completion.finish_reason == FinishReason.LENGTH else "completed"


def _content(kind: PartKind, text: str, logprobs: list[TokenLogprob] | None = None) -> OutputText | ReasoningText:
    return ReasoningText(text) if kind is PartKind.THOUGHTS else OutputText(text, logprobs or [])
