"""Answers of /v1/chat/completions: the whole one, and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from msgspec import UNSET, UnsetType

from loraplex.core import CompletionOutput, RequestOutput
from loraplex.server.api_error import error_reply
from loraplex.server.engine_surface import tokenizer_of
from loraplex.server.generation import Cursor, Delta, Generation
from loraplex.server.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from loraplex.server.request_id import new_request_id
from loraplex.server.responses import (
    AnswerRoom,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessageReply,
    FunctionReply,
    ToolCallDelta,
    ToolCallReply,
    Usage,
    UsageCounter,
    encode,
    written_text,
)
from loraplex.server.schemas import ChatCompletionRequest
from loraplex.server.streaming import DONE, in_pieces, sse
from loraplex.text.tools.answer import AnswerDelta, AnswerParser
from loraplex.text.tools.json_calls import CallDelta
from loraplex.text.tools.wanted import AnswerReading

WORK_OF_PARSERS, WORK_OF_HELD = 4, 2
"""Of a token whose text is read for calls or thoughts; and more for each character that it may have parsed at once."""


class ChatRenderer:
    """One request's answer: one prompt, `n` choices."""

    end = DONE

    def __init__(self, request: ChatCompletionRequest, generation: Generation, reading: AnswerReading) -> None:
        self._request = request
        self._generation = generation
        self._texts = TokenTexts(tokenizer_of(generation.items[0].target.text), request.return_tokens_as_token_ids)
        self._cursors = [Cursor() for _ in range(request.n)]
        self._thoughts: list[list[str]] = [[] for _ in range(request.n)]  # held without stream_reasoning
        self._parsers = [reading.new_parser() for _ in range(request.n)]
        self._usage = UsageCounter(shows_cached=generation.shows_cached_tokens)

    @property
    def work_a_token(self) -> int:
        return max(map(work_of, self._parsers))

    @property
    def work_at_end(self) -> int:
        return int(not self._request.stream_reasoning)

    def response(self, outputs: Sequence[RequestOutput]) -> bytes:
        """`outputs` has the last output of the one prompt."""
        output, request, generation = outputs[0], self._request, self._generation
        self._usage.add(0, output)
        room = AnswerRoom()
        wants_prompt_logprobs = request.prompt_logprobs is not None and output.prompt_logprobs is not None
        reply = ChatCompletion(
            generation.response_id,
            generation.created,
            generation.model,
            [self._choice(each, room) for each in output.outputs],
            self._usage.usage(),
            prompt_token_ids=list(output.prompt_token_ids) if request.return_token_ids else UNSET,
            prompt_logprobs=prompt_logprobs(output.prompt_logprobs or (), room) if wants_prompt_logprobs else UNSET,
        )
        return encode(reply)

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[bytes]:
        """Events for what is new, in pieces that are made one at a time. The first event of a choice has the role and
        no text."""
        self._usage.add(prompt_index, output)
        return in_pieces(self._events(output))

    def _events(self, output: RequestOutput) -> Iterator[bytes]:
        for each in output.outputs:
            cursor = self._cursors[each.index]
            if not cursor.has_started:
                cursor.has_started = True
                opening = ChatChunkChoice(each.index, ChatDelta("assistant", ""))
                yield self._chunk([opening], output.prompt_token_ids)
            if cursor.is_behind(each) or (each.finish_reason is not None and not cursor.has_finished):
                cursor.has_finished = each.finish_reason is not None
                choice = self._chunk_choice(each, cursor.advance(each), AnswerRoom())
                if choice is not None:
                    yield self._chunk([choice])

    def failure(self, error: Exception) -> bytes:
        return sse(error_reply(error))

    def last_chunk(self) -> bytes:
        """The usage chunk, if it was asked for."""
        if not self._request.usage_options.include_usage:
            return b""
        return self._chunk([], usage=self._usage.usage())

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        prompt_token_ids: Sequence[int] | None = None,
        usage: Usage | UnsetType | None = None,
    ) -> bytes:
        generation = self._generation
        chunk = ChatChunk(
            generation.response_id,
            generation.created,
            generation.model,
            choices,
            usage or self._usage.in_chunk(self._request.usage_options),
            prompt_token_ids=list(prompt_token_ids)
            if prompt_token_ids is not None and self._request.return_token_ids
            else UNSET,
        )
        return sse(encode(chunk))

    def _choice(self, completion: CompletionOutput, room: AnswerRoom) -> ChatChoice:
        delta = Cursor().advance(completion)
        said = self._said(completion, delta)
        calls = [
            ToolCallReply(new_call_id("call_"), FunctionReply(written_text(each.arguments, room), each.name or ""))
            for each in said.calls
        ]
        message = ChatMessageReply(
            written_text(said.content, room) if said.content or not calls else None,
            reasoning_content=written_text(said.reasoning, room) if said.reasoning else UNSET,
            tool_calls=calls or UNSET,
        )
        return ChatChoice(
            index=completion.index,
            message=message,
            logprobs=self._logprobs(delta, room),
            finish_reason=self._finish_reason(completion),
            stop_reason=completion.stop_reason,
            token_ids=list(delta.token_ids) if self._request.return_token_ids else UNSET,
        )

    def _said(self, completion: CompletionOutput, delta: Delta) -> AnswerDelta:
        parser = self._parsers[completion.index]
        if parser is None:
            return AnswerDelta(delta.text)
        return parser.feed(delta.text, completion.finish_reason is not None)

    def _finish_reason(self, completion: CompletionOutput) -> str | None:
        parser = self._parsers[completion.index]
        has_calls = parser is not None and parser.num_calls > 0
        return "tool_calls" if has_calls and completion.finish_reason == "stop" else completion.finish_reason

    def _chunk_choice(self, completion: CompletionOutput, delta: Delta, room: AnswerRoom) -> ChatChunkChoice | None:
        """None while a parser holds all of it back: it may be part of a call."""
        is_finished = completion.finish_reason is not None
        said = self._with_whole_thoughts(completion.index, self._said(completion, delta), is_finished)
        if not (said or is_finished or self._request.logprobs or self._request.return_token_ids) and self._is_parsed:
            return None
        has_content = bool(said.content) or not (said.calls or said.reasoning)
        return ChatChunkChoice(
            index=completion.index,
            delta=ChatDelta(
                content=written_text(said.content, room) if has_content else UNSET,
                reasoning_content=written_text(said.reasoning, room) if said.reasoning else UNSET,
                tool_calls=[_call_delta(each, room) for each in said.calls] or UNSET,
            ),
            logprobs=self._logprobs(delta, room),
            finish_reason=self._finish_reason(completion),
            stop_reason=completion.stop_reason if is_finished else UNSET,
            token_ids=list(delta.token_ids) if self._request.return_token_ids else UNSET,
        )

    def _with_whole_thoughts(self, index: int, said: AnswerDelta, is_finished: bool) -> AnswerDelta:
        """With `stream_reasoning=false`, thoughts come in one piece: when something else comes, or the end."""
        if self._request.stream_reasoning:
            return said
        held = self._thoughts[index]
        held.append(said.reasoning)
        if not (is_finished or said.content or said.calls):
            return replace(said, reasoning="")
        thoughts = "".join(held)
        held.clear()
        return replace(said, reasoning=thoughts)

    @property
    def _is_parsed(self) -> bool:
        return self._parsers[0] is not None

    def _logprobs(self, delta: Delta, room: AnswerRoom) -> ChatLogprobs | None:
        if not self._request.logprobs or delta.logprobs is None:
            return None
        known = [candidates for candidates in delta.logprobs if candidates is not None]
        return chat_logprobs(delta.token_ids, known, self._request.top_logprobs, self._texts, room)


def work_of(parser: AnswerParser | None) -> int:
    return 1 if parser is None else WORK_OF_PARSERS + WORK_OF_HELD * parser.num_held


def _call_delta(call: CallDelta, room: AnswerRoom) -> ToolCallDelta:
    arguments = written_text(call.arguments, room)
    if call.name is None:
        return ToolCallDelta(call.index, FunctionReply(arguments))
    return ToolCallDelta(call.index, FunctionReply(arguments, call.name), new_call_id("call_"), "function")


def new_call_id(prefix: str) -> str:
    return prefix + new_request_id()[:24]
