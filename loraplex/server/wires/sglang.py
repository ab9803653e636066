"""Answers of SGLang's POST /generate: whole, as a list for a batch, and as a stream whose events say all again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from loraplex.core import CompletionOutput, FinishReason, RequestOutput, TokenLogprobs
from loraplex.server.api_error import error_reply
from loraplex.server.engine_surface import TokenizerSurface, tokenizer_of
from loraplex.server.generation import Generation
from loraplex.server.logprobs import LOWEST_LOGPROB
from loraplex.server.request_id import checked_id
from loraplex.server.responses import AnswerRoom, encode, written, written_text
from loraplex.server.streaming import DONE, in_pieces, sse
from loraplex.server.wires.sglang_fields import SGLangGenerateRequest

MAX_TIMES_AGAIN = 256
"""How often a stream says a completion again, on average over its tokens: longer ones get fewer events."""

MAX_TIMES_BYTES_AGAIN, FREE_BYTES_AGAIN = 64, 2**22
"""The same over bytes of log probabilities, once there are as many as that."""

EVENTS_A_ROOM = 8
"""An event says all log probabilities of a completion in one piece, so they have an eighth of an answer's room."""

Entry = tuple[float | None, int, str | None]
"""Of one token: its log probability, its id, its text where that was asked for."""


class FinishReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """matched: the token or the string that ended it; length: how many tokens it has."""

    type: str
    matched: int | str | None = None
    length: int | None = None


class MetaInfo(msgspec.Struct, frozen=True):
    """weight_version: always `default`; an adapter's version is in GET /v1/adapters. e2e_latency: seconds, at the end.

    cached_tokens is left out where a cached token may be another client's.
    """

    id: str
    finish_reason: FinishReply | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | UnsetType = UNSET
    weight_version: str = "default"
    e2e_latency: float | UnsetType = UNSET
    input_token_logprobs: list[Entry] | UnsetType = UNSET
    output_token_logprobs: list[Entry] | UnsetType = UNSET
    output_token_logprobs_length: int | UnsetType = UNSET
    input_top_logprobs: list[list[Entry] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[Entry] | None] | UnsetType = UNSET


class GenerateReply(msgspec.Struct, frozen=True):
    """index: of a batch's stream, as in its list."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    prompt_token_ids: list[int] | UnsetType = UNSET
    index: int | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class SGLangWish:
    """What an answer has, once the prompt is not needed any more. rids: of each prompt, if the client named them."""

    n: int
    is_batch: bool
    is_empty: bool
    num_top: int | None
    logprob_start_len: int
    has_texts: bool
    has_prompt_ids: bool
    rids: tuple[str, ...]

    @classmethod
    def of(cls, body: SGLangGenerateRequest) -> SGLangWish:
        return cls(
            n=body.sampling_params.n,
            is_batch=body.is_batch,
            is_empty=body.sampling_params.max_new_tokens == 0,
            num_top=body.top_logprobs_num if body.return_logprob else None,
            logprob_start_len=body.logprob_start_len,
            has_texts=body.return_text_in_logprobs,
            has_prompt_ids=body.return_prompt_token_ids,
            rids=tuple(checked_id(rid, "rid") for rid in body.rid if rid) if isinstance(body.rid, list) else (),
        )


@dataclass(slots=True)
class _Said:
    """Of one completion in a stream. tokens, tops: entries as JSON, made once and counted in `room`. num_again,
    num_bytes_again: tokens, and bytes of entries, of all events."""

    num_tokens: int = 0
    num_chars: int = 0
    num_again: int = 0
    num_events: int = 0
    is_finished: bool = False
    tokens: list[Entry] = field(default_factory=list)
    tops: list[list[Entry] | None] = field(default_factory=list)
    room: AnswerRoom = field(default_factory=partial(AnswerRoom, EVENTS_A_ROOM))
    num_bytes_again: int = 0

    def is_due(self, completion: CompletionOutput) -> bool:
        """Whether there is something new, and room for an event; the last one always has it."""
        num_tokens, is_finished = len(completion.token_ids), completion.finish_reason is not None
        if is_finished:
            return not self.is_finished
        has_news = num_tokens > self.num_tokens or completion.num_chars > self.num_chars
        nbytes = self.room.num_taken
        most_again = max(FREE_BYTES_AGAIN, MAX_TIMES_BYTES_AGAIN * nbytes)
        has_room = self.num_again + num_tokens <= MAX_TIMES_AGAIN * num_tokens
        return has_news and has_room and self.num_bytes_again + nbytes <= most_again

    def note(self, completion: CompletionOutput) -> None:
        self.num_tokens, self.num_chars = len(completion.token_ids), completion.num_chars
        self.num_again += self.num_tokens
        self.num_bytes_again += self.room.num_taken
        self.num_events += 1
        self.is_finished = completion.finish_reason is not None


class SGLangRenderer:
    """One request's answer. Completion i of prompt p has index p * n + i."""

    work_at_end, end = 1, DONE

    def __init__(self, wish: SGLangWish, generation: Generation) -> None:
        self.work_a_token = 1
        self._wish = wish
        self._generation = generation
        self._said: dict[int, _Said] = {}
        self._kept = AnswerRoom()  # all that a stream says again

    def response(self, outputs: Sequence[RequestOutput]) -> bytes:
        room = AnswerRoom()
        replies = [
            self._reply(index, output, each, _Said(room=room), room, is_first=True)
            for index, output in enumerate(outputs)
            for each in output.outputs
        ]
        return encode(replies if self._wish.is_batch else replies[0])

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[bytes]:
        """The text of an event is all that there is so far: the work of one grows with it."""
        self.work_a_token = max(1, *(len(each.token_ids) for each in output.outputs))
        return in_pieces(self._events(prompt_index, output))

    def _events(self, prompt_index: int, output: RequestOutput) -> Iterator[bytes]:
        for each in output.outputs:
            index = prompt_index * self._wish.n + each.index
            said = self._said.setdefault(index, _Said())
            if said.is_due(each):
                is_first, before = not said.num_events, said.room.num_taken
                said.note(each)
                reply = self._reply(prompt_index, output, each, said, AnswerRoom(), is_first)
                self._kept.take(said.room.num_taken - before, "logprobs")
                yield sse(encode(msgspec.structs.replace(reply, index=index) if self._wish.is_batch else reply))

    def last_chunk(self) -> bytes:
        return b""

    def failure(self, error: Exception) -> bytes:
        return sse(error_reply(error))

    def _reply(
        self,
        prompt_index: int,
        output: RequestOutput,
        completion: CompletionOutput,
        said: _Said,
        room: AnswerRoom,
        is_first: bool,
    ) -> GenerateReply:
        """room: of texts. is_first: of its completion. The prompt's ids are in no later event."""
        wish = self._wish
        token_ids = [] if wish.is_empty else list(completion.token_ids)
        return GenerateReply(
            text="" if wish.is_empty else written_text(completion.text_from(0), room),
            output_ids=token_ids,
            meta_info=self._meta_info(prompt_index, output, completion, said),
            prompt_token_ids=list(output.prompt_token_ids) if wish.has_prompt_ids and is_first else UNSET,
        )

    def _meta_info(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput, said: _Said
    ) -> MetaInfo:
        wish, metrics = self._wish, output.metrics
        is_finished = completion.finish_reason is not None
        latency_s = None if metrics is None or metrics.finished_time is None else metrics.finished_time
        num_tokens = 0 if wish.is_empty else len(completion.token_ids)
        return MetaInfo(
            id=self._id(prompt_index, completion.index),
            finish_reason=self._finish(completion) if is_finished else None,
            prompt_tokens=len(output.prompt_token_ids),
            completion_tokens=num_tokens,
            cached_tokens=output.num_cached_tokens if self._generation.shows_cached_tokens else UNSET,
            e2e_latency=UNSET if latency_s is None or metrics is None else latency_s - metrics.arrival_time,
            **({} if wish.num_top is None else self._logprobs(prompt_index, output, completion, said)),
        )

    def _id(self, prompt_index: int, index: int) -> str:
        rids, whole = self._wish.rids, self._generation.response_id
        own = rids[prompt_index] if rids else f"{whole}_{prompt_index}" if self._wish.is_batch else whole
        return f"{own}_{index}" if self._wish.n > 1 else own

    def _finish(self, completion: CompletionOutput) -> FinishReply:
        if self._wish.is_empty:
            return FinishReply("length", length=0)
        if completion.finish_reason == FinishReason.STOP.value:
            last = completion.token_ids[-1] if completion.token_ids else None
            return FinishReply("stop", matched=last if completion.stop_reason is None else completion.stop_reason)
        return FinishReply(completion.finish_reason or "", length=len(completion.token_ids))

    def _logprobs(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput, said: _Said
    ) -> dict[str, Any]:
        tokenizer = tokenizer_of(self._generation.items[prompt_index].target.text)
        entries = _Entries(tokenizer if self._wish.has_texts else None, self._wish.num_top or 0, said.room)
        if not self._wish.is_empty:
            begin = len(said.tokens)
            new_ids, new_logprobs = completion.token_ids[begin:], (completion.logprobs or ())[begin:]
            for token_id, logprobs in zip(new_ids, new_logprobs, strict=True):
                said.tokens.append(entries.chosen(token_id, logprobs))
                said.tops.append(entries.top(logprobs))
        told: dict[str, Any] = {
            "input_token_logprobs": [],
            "output_token_logprobs": said.tokens,
            "output_token_logprobs_length": len(said.tokens),
        }
        start, prompt_tops = self._wish.logprob_start_len, []
        if start >= 0 and output.prompt_logprobs is not None:  # not of a stream
            ids, scored = output.prompt_token_ids[start:], output.prompt_logprobs[start:]
            # as SGLang has it: of the first that it was asked for there is none
            scored = (None, *scored[1:]) if scored else ()
            told["input_token_logprobs"] = [entries.chosen(*each) for each in zip(ids, scored, strict=True)]
            prompt_tops = [None if each is None else entries.top(each) for each in scored]
        if self._wish.num_top:
            told |= {"input_top_logprobs": prompt_tops, "output_top_logprobs": said.tops}
        return told


class _Entries:
    """Log probabilities of positions, encoded one by one."""

    def __init__(self, tokenizer: TokenizerSurface | None, num_top: int, room: AnswerRoom) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._room = room

    def chosen(self, token_id: int, logprobs: TokenLogprobs | None) -> Entry:
        found = None if logprobs is None else logprobs.get(token_id)
        return written(self._entry(None if found is None else found.logprob, token_id), self._room)

    def top(self, logprobs: TokenLogprobs | None) -> list[Entry] | None:
        ranked = sorted((logprobs or {}).items(), key=lambda each: -each[1].logprob)[: self._num_top]
        return written([self._entry(each.logprob, token_id) for token_id, each in ranked], self._room)

    def _entry(self, logprob: float | None, token_id: int) -> Entry:
        text = None if self._tokenizer is None else self._tokenizer.token_text(token_id)
        return (None if logprob is None else max(logprob, LOWEST_LOGPROB), token_id, text)
