"""Answers of /v1/completions: the whole one, and the chunks of a stream. A whole answer is one delta from nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import UNSET, UnsetType

from loraplex.core import CompletionOutput, FinishReason, RequestOutput
from loraplex.server.api_error import error_reply
from loraplex.server.engine_surface import TokenizerSurface, tokenizer_of
from loraplex.server.generation import Cursor, Delta, Generation
from loraplex.server.logprobs import TokenTexts, completion_logprobs, prompt_logprobs
from loraplex.server.responses import (
    AnswerRoom,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprobs,
    Usage,
    UsageCounter,
    decoded,
    encode,
    written_text,
)
from loraplex.server.schemas import CompletionRequest
from loraplex.server.streaming import DONE, in_pieces, sse


class CompletionRenderer:
    """One request's answer. Choice i of prompt p has index p * n + i."""

    work_a_token, work_at_end, end = 1, 0, DONE

    def __init__(self, request: CompletionRequest, generation: Generation) -> None:
        self._request = request
        self._generation = generation
        self._cursors: dict[int, Cursor] = {}
        self._decoded: dict[int, str] = {}
        self._usage = UsageCounter(request.is_echo_only, shows_cached=generation.shows_cached_tokens)

    def response(self, outputs: Sequence[RequestOutput]) -> bytes:
        """`outputs`: the last one of each prompt."""
        choices, room = [], AnswerRoom()
        for prompt_index, output in enumerate(outputs):
            self._usage.add(prompt_index, output)
            choices += [self._choice(prompt_index, output, each, room) for each in output.outputs]
        return encode(self._completion(choices, self._usage.usage()))

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[bytes]:
        """Events for what is new, in pieces that are made one at a time."""
        self._usage.add(prompt_index, output)
        return in_pieces(self._events(prompt_index, output))

    def _events(self, prompt_index: int, output: RequestOutput) -> Iterator[bytes]:
        for each in output.outputs:
            cursor = self._cursor(prompt_index, each)
            if self._has_news(cursor, each):
                cursor.has_finished = each.finish_reason is not None
                choice = self._choice(prompt_index, output, each, AnswerRoom())
                yield sse(encode(self._completion([choice], self._usage.in_chunk(self._request.usage_options))))

    def failure(self, error: Exception) -> bytes:
        return sse(error_reply(error))

    def last_chunk(self) -> bytes:
        """The usage chunk, if it was asked for."""
        if not self._request.usage_options.include_usage:
            return b""
        return sse(encode(self._completion([], self._usage.usage())))

    def _has_news(self, cursor: Cursor, output: CompletionOutput) -> bool:
        is_finished = output.finish_reason is not None and not cursor.has_finished
        return is_finished or (not self._request.is_echo_only and cursor.is_behind(output))

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        generation = self._generation
        return Completion(generation.response_id, generation.created, generation.model, choices, usage)

    def _cursor(self, prompt_index: int, output: CompletionOutput) -> Cursor:
        return self._cursors.setdefault(self._index(prompt_index, output), Cursor())

    def _index(self, prompt_index: int, output: CompletionOutput) -> int:
        return prompt_index * self._request.n + output.index

    def _choice(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput, room: AnswerRoom
    ) -> CompletionChoice:
        request, cursor = self._request, self._cursor(prompt_index, completion)
        delta = self._delta(prompt_index, output, completion, cursor, room)
        wants_ids, is_first = request.return_token_ids, delta.is_first
        logprobs = self._logprobs(prompt_index, delta, cursor, room)
        if logprobs is not None and logprobs.tokens:
            cursor.text_offset = logprobs.text_offset[-1] + len(logprobs.tokens[-1])
        return CompletionChoice(
            index=self._index(prompt_index, completion),
            text=written_text(delta.text, room),
            logprobs=logprobs,
            finish_reason=_finish_reason(completion, request.is_echo_only),
            stop_reason=None if request.is_echo_only else completion.stop_reason,
            token_ids=list(delta.token_ids) if wants_ids else UNSET,
            prompt_token_ids=list(output.prompt_token_ids) if wants_ids and is_first else UNSET,
            prompt_logprobs=self._prompt_logprobs(output, room),
        )

    def _delta(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput, cursor: Cursor, room: AnswerRoom
    ) -> Delta:
        """What is new, behind the prompt when that is to be echoed and was not yet."""
        delta = cursor.advance(completion)
        if not (self._request.echo and delta.is_first):
            return delta
        prompt = self._generation.items[prompt_index].prompt
        text = prompt.text
        if text is None:
            text = self._decoded.get(prompt_index)
        if text is None:  # once for all choices
            text = self._decoded[prompt_index] = decoded(prompt.token_ids, self._tokenizer(prompt_index), room)
        echoed = Delta(text, prompt.token_ids, output.prompt_logprobs, is_first=True)
        return echoed if self._request.is_echo_only else echoed.followed_by(delta)

    def _tokenizer(self, prompt_index: int) -> TokenizerSurface:
        return tokenizer_of(self._generation.items[prompt_index].target.text)

    def _logprobs(self, prompt_index: int, delta: Delta, cursor: Cursor, room: AnswerRoom) -> CompletionLogprobs | None:
        if self._request.logprobs is None or delta.logprobs is None:
            return None
        texts = TokenTexts(self._tokenizer(prompt_index), self._request.return_tokens_as_token_ids)
        return completion_logprobs(delta.token_ids, delta.logprobs, texts, cursor.text_offset, room)

    def _prompt_logprobs(self, output: RequestOutput, room: AnswerRoom) -> PromptLogprobs | UnsetType:
        if self._request.prompt_logprobs is None or output.prompt_logprobs is None:
            return UNSET
        return prompt_logprobs(output.prompt_logprobs, room)


def _finish_reason(completion: CompletionOutput, is_echo_only: bool) -> str | None:
    """With `max_tokens=0` the length is what ended it, whatever the one token was that the engine drew."""
    return FinishReason.LENGTH.value if is_echo_only else completion.finish_reason
