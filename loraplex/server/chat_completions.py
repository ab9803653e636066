"""Answers of /v1/chat/completions: the whole one, and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import UNSET, UnsetType

from loraplex.core import CompletionOutput, RequestOutput
from loraplex.server.engine_surface import tokenizer_of
from loraplex.server.generation import Cursor, Delta, Generation
from loraplex.server.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from loraplex.server.responses import (
    AnswerRoom,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessageReply,
    Usage,
    UsageCounter,
    encode,
    written_text,
)
from loraplex.server.schemas import ChatCompletionRequest
from loraplex.server.streaming import in_pieces, sse


class ChatRenderer:
    """One request's answer: one prompt, `n` choices."""

    def __init__(self, request: ChatCompletionRequest, generation: Generation) -> None:
        self._request = request
        self._generation = generation
        self._texts = TokenTexts(tokenizer_of(generation.items[0].target.text), request.return_tokens_as_token_ids)
        self._cursors = [Cursor() for _ in range(request.n)]
        self._usage = UsageCounter(shows_cached=generation.shows_cached_tokens)

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
                yield self._chunk([self._chunk_choice(each, cursor.advance(each), AnswerRoom())])

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
            usage or self._chunk_usage(),
            prompt_token_ids=list(prompt_token_ids)
            if prompt_token_ids is not None and self._request.return_token_ids
            else UNSET,
        )
        return sse(encode(chunk))

    def _chunk_usage(self) -> Usage | UnsetType | None:
        options = self._request.usage_options
        if options.continuous_usage_stats and options.include_usage:
            return self._usage.usage()
        return None if options.include_usage else UNSET

    def _choice(self, completion: CompletionOutput, room: AnswerRoom) -> ChatChoice:
        delta = Cursor().advance(completion)
        return ChatChoice(
            index=completion.index,
            message=ChatMessageReply(written_text(delta.text, room)),
            logprobs=self._logprobs(delta, room),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            token_ids=list(delta.token_ids) if self._request.return_token_ids else UNSET,
        )

    def _chunk_choice(self, completion: CompletionOutput, delta: Delta, room: AnswerRoom) -> ChatChunkChoice:
        is_finished = completion.finish_reason is not None
        return ChatChunkChoice(
            index=completion.index,
            delta=ChatDelta(content=written_text(delta.text, room)),
            logprobs=self._logprobs(delta, room),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason if is_finished else UNSET,
            token_ids=list(delta.token_ids) if self._request.return_token_ids else UNSET,
        )

    def _logprobs(self, delta: Delta, room: AnswerRoom) -> ChatLogprobs | None:
        if not self._request.logprobs or delta.logprobs is None:
            return None
        known = [candidates for candidates in delta.logprobs if candidates is not None]
        return chat_logprobs(delta.token_ids, known, self._request.top_logprobs, self._texts, room)
