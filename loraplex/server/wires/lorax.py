"""Answers of LoRAX's POST /generate, /generate_stream and /: texts, details of tokens, one event a token, errors.

A token's text is its own in a whole answer. In a stream the texts of tokens that are not special make the text when
they are put together, even where a character has several tokens: the last of them has it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
from fastapi import Request, Response
from msgspec import UNSET, UnsetType

from loraplex.adapters.sources.named import kind_of
from loraplex.core import AdapterMix, CompletionOutput, FinishReason, RequestOutput, TokenLogprobs
from loraplex.errors import LoraplexError
from loraplex.server.access import clean_error
from loraplex.server.api_error import error_response
from loraplex.server.engine_surface import tokenizer_of
from loraplex.server.generation import Cursor, Generation
from loraplex.server.logprobs import LOWEST_LOGPROB
from loraplex.server.responses import AnswerRoom, encode, written, written_text
from loraplex.server.streaming import in_pieces, sse
from loraplex.server.wires.lorax_fields import LoraxGenerateRequest
from loraplex.server.wires.native_forms import lorax_refusal
from loraplex.tenants.records import EVERYTHING, Scope


class PrefillToken(msgspec.Struct, frozen=True):
    id: int
    text: str
    logprob: float | None


class AlternativeToken(msgspec.Struct, frozen=True):
    id: int
    text: str
    logprob: float


class LoraxToken(msgspec.Struct, frozen=True):
    id: int
    text: str
    logprob: float | None
    special: bool
    alternative_tokens: list[AlternativeToken] | UnsetType = UNSET
    skipped: bool = False


class StreamDetails(msgspec.Struct, frozen=True):
    finish_reason: str
    prompt_tokens: int
    generated_tokens: int
    seed: int | None


class LoraxDetails(msgspec.Struct, frozen=True):
    finish_reason: str
    prompt_tokens: int
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[LoraxToken]
    skipped_tokens: int = 0


class LoraxReply(msgspec.Struct, frozen=True):
    generated_text: str
    details: LoraxDetails | None


class LoraxEvent(msgspec.Struct, frozen=True):
    """`generated_text` and `details` are of the last one."""

    token: LoraxToken
    generated_text: str | None = None
    details: StreamDetails | None = None


def lorax_error(error: LoraplexError, request: Request) -> Response:
    clean_error(error, request)
    return error_response(error, body=lorax_refusal(error))


@dataclass(slots=True)
class LoraxAnswer:
    """What becomes of one prompt's output. `headers`: of an answer, once there is one; of a stream before its tokens.

    prompt_text: in front of the text, where that was asked for.
    """

    arrived_s: float
    base_name: str
    compute_type: str
    is_list: bool
    has_details: bool
    has_prefill: bool
    has_alternatives: bool
    is_stream_detailed: bool
    seed: int | None
    num_chars: int
    prompt_text: str
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, body: LoraxGenerateRequest, arrived_s: float, base_name: str, compute_type: str, is_list: bool
    ) -> LoraxAnswer:
        wanted = body.parameters
        return cls(
            arrived_s=arrived_s,
            base_name=base_name,
            compute_type=compute_type,
            is_list=is_list,
            has_details=wanted.details or wanted.decoder_input_details,
            has_prefill=wanted.decoder_input_details,
            has_alternatives=wanted.return_k_alternatives is not None,
            is_stream_detailed=wanted.details,
            seed=wanted.seed,
            num_chars=len(body.inputs),
            prompt_text=body.inputs if wanted.return_full_text else "",
        )

    def of_generation(self, generation: Generation, scope: Scope = EVERYTHING) -> LoraxRenderer:
        """scope: of the names that the headers say."""
        adapter, target = generation.items[0].adapter, generation.items[0].target
        if isinstance(adapter, AdapterMix):
            names = [name for name, _ in adapter.parts]
        else:
            names = [] if adapter is None else [adapter]
        self.headers |= {
            "x-compute-type": self.compute_type,
            "x-compute-characters": str(self.num_chars),
            "x-model-id": _header(self.base_name),
        }
        seen = [ref for ref in target.held.refs if scope.may_see(ref.adapter_name)]
        if names:
            self.headers["x-adapter-id"] = _header(",".join(map(scope.shown, names)))
        if seen:
            self.headers["x-adapter-source"] = ",".join(dict.fromkeys(kind_of(ref.lora_path) for ref in seen))
        return LoraxRenderer(self, generation)

    def note(self, output: RequestOutput) -> None:
        """Into the headers, what it took."""
        num_prompt, num_tokens = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
        total_ms = 1e3 * (time.monotonic() - self.arrived_s)
        told: dict[str, float] = {
            "x-prompt-tokens": num_prompt,
            "x-generated-tokens": num_tokens,
            "x-skipped-tokens": 0,
            "x-total-tokens": num_prompt + num_tokens,
            "x-compute-time": total_ms,
            "x-total-time": total_ms,
        }
        metrics = output.metrics
        if metrics is not None and metrics.finished_time is not None and metrics.first_token_time is not None:
            run_ms = 1e3 * (metrics.finished_time - metrics.arrival_time)
            first_ms = 1e3 * (metrics.first_token_time - metrics.arrival_time)
            told |= {
                "x-validation-time": max(0.0, total_ms - run_ms),
                "x-inference-time": run_ms,
                "x-time-per-token": run_ms / max(1, num_tokens),
                "x-time-to-first-token": first_ms,
                "x-time-per-output-token": (run_ms - first_ms) / max(1, num_tokens - 1),
            }
        self.headers |= {name: str(int(value)) for name, value in told.items()}


class LoraxRenderer:
    """One prompt, one completion."""

    work_a_token, work_at_end, end = 1, 1, b""

    def __init__(self, answer: LoraxAnswer, generation: Generation) -> None:
        self._answer = answer
        self._tokenizer = tokenizer_of(generation.items[0].target.text)
        self._cursor = Cursor()
        self._held = ""

    def response(self, outputs: Sequence[RequestOutput]) -> bytes:
        output, room = outputs[0], AnswerRoom()
        completion = output.outputs[0]
        self._answer.note(output)
        reply = LoraxReply(
            written_text(self._answer.prompt_text + completion.text, room),
            self._details(output, completion, room) if self._answer.has_details else None,
        )
        return encode([reply] if self._answer.is_list else reply)

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[bytes]:
        return in_pieces(self._events(output))

    def _events(self, output: RequestOutput) -> Iterator[bytes]:
        completion, room = output.outputs[0], AnswerRoom()
        is_finished = completion.finish_reason is not None
        if not self._cursor.is_behind(completion) and not (is_finished and not self._cursor.has_finished):
            return
        delta = self._cursor.advance(completion)
        self._cursor.has_finished = is_finished
        if not delta.token_ids and not is_finished:
            self._held += delta.text  # of a stop string that was none: the next token has it
            return
        text, self._held = self._held + delta.text, ""
        token_ids = delta.token_ids or tuple(completion.token_ids[-1:])  # the last event has a token, too
        logprobs = (delta.logprobs or ()) if delta.token_ids else (completion.logprobs or ())[-1:]
        texts = self._texts(token_ids, text)
        for place, (token_id, words) in enumerate(zip(token_ids, texts, strict=True), 1):
            candidates = logprobs[place - 1] if place <= len(logprobs) else None
            token = self._token(token_id, candidates, *words, room)
            is_last = is_finished and place == len(token_ids)
            yield sse(encode(self._last_event(token, output, completion, room) if is_last else LoraxEvent(token)))

    def _last_event(
        self, token: LoraxToken, output: RequestOutput, completion: CompletionOutput, room: AnswerRoom
    ) -> LoraxEvent:
        details = None
        if self._answer.is_stream_detailed:
            num_prompt, num_tokens = len(output.prompt_token_ids), len(completion.token_ids)
            details = StreamDetails(_finish_reason(completion), num_prompt, num_tokens, self._answer.seed)
        return LoraxEvent(token, written_text(self._answer.prompt_text + completion.text, room), details)

    def last_chunk(self) -> bytes:
        return b""

    def failure(self, error: Exception) -> bytes:
        return sse(lorax_refusal(error))

    def _texts(self, token_ids: Sequence[int], text: str) -> list[tuple[str, bool]]:
        """Of tokens that came together, and which are special: the others' are `text`, when put together. Where all are
        special, and there is text that was held back, the last one has it and counts as none."""
        special_ids = self._tokenizer.special_ids
        own = [(self._tokenizer.token_text(each), each in special_ids) for each in token_ids]
        if "".join(words for words, is_special in own if not is_special) == text:
            return own
        plain = [place for place, (_, is_special) in enumerate(own) if not is_special]
        for place in plain:
            own[place] = ("", False)
        own[plain[-1] if plain else -1] = (text, False)
        return own

    def _details(self, output: RequestOutput, completion: CompletionOutput, room: AnswerRoom) -> LoraxDetails:
        prefill: list[PrefillToken] = []
        if self._answer.has_prefill:
            scored = output.prompt_logprobs or (None,) * len(output.prompt_token_ids)
            for token_id, candidates in zip(output.prompt_token_ids, scored, strict=True):
                logprob = None if candidates is None else _logprob(candidates, token_id)
                prefill.append(written(PrefillToken(token_id, self._tokenizer.token_text(token_id), logprob), room))
        tokens = [
            self._token(
                token_id,
                candidates,
                self._tokenizer.token_text(token_id),
                token_id in self._tokenizer.special_ids,
                room,
            )
            for token_id, candidates in zip(completion.token_ids, completion.logprobs or (), strict=True)
        ]
        return LoraxDetails(
            finish_reason=_finish_reason(completion),
            prompt_tokens=len(output.prompt_token_ids),
            generated_tokens=len(completion.token_ids),
            seed=self._answer.seed,
            prefill=prefill,
            tokens=tokens,
        )

    def _token(
        self, token_id: int, candidates: TokenLogprobs | None, text: str, is_special: bool, room: AnswerRoom
    ) -> LoraxToken:
        others: list[AlternativeToken] | UnsetType = UNSET
        if self._answer.has_alternatives and candidates is not None:
            ranked = sorted(candidates.items(), key=lambda each: -each[1].logprob)
            others = [
                AlternativeToken(each, self._tokenizer.token_text(each), max(found.logprob, LOWEST_LOGPROB))
                for each, found in ranked
            ]
        logprob = None if candidates is None else _logprob(candidates, token_id)
        return written(LoraxToken(token_id, text, logprob, is_special, others), room)


def _logprob(candidates: TokenLogprobs, token_id: int) -> float | None:
    found = candidates.get(token_id)
    return None if found is None else max(found.logprob, LOWEST_LOGPROB)


def _finish_reason(completion: CompletionOutput) -> str:
    if completion.finish_reason != FinishReason.STOP.value:
        return completion.finish_reason or ""
    return "eos_token" if completion.stop_reason is None else "stop_sequence"


def _header(text: str) -> str:
    """What a header may say."""
    return text.encode("latin-1", "replace").decode("latin-1").replace("\r", " ").replace("\n", " ")
