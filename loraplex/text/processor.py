"""What stands between a client's prompt and the engine's token ids, on the way in and on the way out.

In: a prompt becomes token ids, is checked against the model's limits, and `n` completions become `n` requests. Out:
token ids become text, stop strings end a request, and the completions of one prompt come together in a `RequestOutput`.
No torch.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from loraplex.core import (
    CompletionOutput,
    FinishReason,
    LoRAMix,
    LoRARequest,
    MixPart,
    Request,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)
from loraplex.errors import EngineError, InvalidRequestError, LoraplexError, PromptTooLongError, error_from_payload
from loraplex.performance.requests import RequestRecorder
from loraplex.sampling_params import NO_CLAIM, Claim
from loraplex.text.detokenizer import IncrementalDetokenizer, prompt_context
from loraplex.text.output_collections import GrowingCompletion, PackedLogprobs, Prefix, TextPieces
from loraplex.text.request_text import RequestText
from loraplex.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_TEXT_CHARS = 2**24
"""Of all completions of a prompt. Only with long tokens it is reached: an adapter may have some of 256 characters."""

NEVER_ACTIVE = 2**63 - 1
"""`Request.adapter_from` of an aLoRA whose invocation the prompt does not have."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request is checked against. `max_model_len` counts prompt and output tokens together, and is that of
    requests whose adapter has none of its own."""

    vocab_size: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """The version of an adapter that a request goes through; of a mix as `core.Request` has it.

    invocation_tokens: of an aLoRA.
    """

    adapter_id: int
    adapter_digest: str
    mix: tuple[MixPart, ...] = ()
    invocation_tokens: tuple[int, ...] = ()

    def begins_in(self, token_ids: Sequence[int]) -> int:
        """`Request.adapter_from` of a prompt. What is generated does not move it, as in peft."""
        if not self.invocation_tokens:
            return 0
        start = last_occurrence(self.invocation_tokens, token_ids)
        return NEVER_ACTIVE if start is None else start


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One prompt, ready for the engine: its token ids and one `Request` per completion.

    The children's ids are never used again: a late output of an aborted request cannot be taken for one of its
    successor's.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    children: tuple[Request, ...]
    arrival_s: float
    lora_request: LoRARequest | LoRAMix | None = None
    text: RequestText | None = None

    def failed(self, error: LoraplexError | None) -> RequestOutput:
        """The last output of one that an error ended."""
        assert error is not None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=(),
            finished=True,
            lora_request=self.lora_request,
            metrics=RequestMetrics(self.arrival_s, finished_time=time.time()),
            error=error,
        )


class InputProcessor:
    """Checks prompts and makes requests of them. Raises InvalidRequestError with the value and the limit."""

    def __init__(self, tokenizer: Tokenizer | None, limits: ModelLimits, eos_token_ids: Sequence[int] = ()) -> None:
        self._base = RequestText(tokenizer, limits.vocab_size, tuple(eos_token_ids))
        self._limits = limits
        self._serials = itertools.count()

    def prepare(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        adapter: AdapterRef | None = None,
        lora_request: LoRARequest | LoRAMix | None = None,
        cache_salt: str = "",
        claim: Claim = NO_CLAIM,
        add_special_tokens: bool = True,
        text: RequestText | None = None,
    ) -> PreparedRequest:
        """text: of the version of an adapter that the request goes through; None: the base's."""
        side = text or self._base
        limit = _limit_of(lora_request, side.max_model_len or self._limits.max_model_len)
        token_ids = self._token_ids(prompt, add_special_tokens, side, limit)
        self._check(token_ids, params, side, limit)
        seed = params.seed
        if seed is None:
            seed = Request.random_seed() >> 8  # room for `seed + index` of the children
        params_with_seed = replace(params, seed=seed)
        arrival_s = time.time()
        room = limit - len(token_ids)
        adapter_from = 0 if adapter is None else adapter.begins_in(token_ids)
        children = []
        for index in range(params.n):
            child = params_with_seed.child(index)
            assert child.seed is not None
            children.append(
                Request(
                    request_id=f"{request_id}#{next(self._serials)}",
                    prompt_token_ids=token_ids,
                    sampling_params=child,
                    max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                    seed=child.seed,
                    eos_token_ids=side.eos_token_ids,
                    adapter_id=None if adapter is None else adapter.adapter_id,
                    adapter_digest="" if adapter is None else adapter.adapter_digest,
                    cache_salt=cache_salt,
                    arrival_s=arrival_s,
                    mix=() if adapter is None else adapter.mix,
                    adapter_from=adapter_from,
                    max_model_len=side.max_model_len or 0,
                    claim=claim,
                )
            )
        words = prompt if isinstance(prompt, str) else None
        return PreparedRequest(request_id, words, token_ids, params, tuple(children), arrival_s, lora_request, text)

    def _token_ids(
        self, prompt: str | Sequence[int], add_special_tokens: bool, side: RequestText, limit: int
    ) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return tuple(prompt)
        if side.tokenizer is None:
            raise InvalidRequestError("this model has no tokenizer: give the prompt as token ids", param="prompt")
        # A character is at most a few tokens and a token is seldom longer than 64 characters: refuse before the work.
        longest = 256 * limit
        if len(prompt) > longest:
            raise PromptTooLongError(
                f"the prompt has {len(prompt)} characters, more than {longest}; shorten it", param="prompt"
            )
        return tuple(side.tokenizer.encode(prompt, add_special_tokens=add_special_tokens))

    def _check(self, token_ids: tuple[int, ...], params: SamplingParams, side: RequestText, max_model_len: int) -> None:
        vocab_size = side.vocab_size
        if not token_ids:
            raise InvalidRequestError("the prompt is empty: it must have at least one token", param="prompt")
        if len(token_ids) >= max_model_len:
            raise PromptTooLongError(
                f"the prompt has {len(token_ids)} tokens and the model's length is {max_model_len}, prompt and output "
                f"together; shorten the prompt to at most {max_model_len - 1} tokens",
                param="prompt",
            )
        params.check_prompt_logprobs(len(token_ids))
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:  # of 131,000, a loop over them takes 5 ms
            odd = next(token for token in token_ids if not 0 <= token < vocab_size)
            raise InvalidRequestError(f"token id {odd} is not in the vocabulary, 0..{vocab_size - 1}", param="prompt")
        for name, listed in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            wrong = next((token for token in listed if not 0 <= token < vocab_size), None)
            if wrong is not None:
                raise InvalidRequestError(
                    f"token id {wrong} in {name} is not in the vocabulary, 0..{vocab_size - 1}", param=name
                )
        if params.stop and side.tokenizer is None:
            raise InvalidRequestError(
                "stop strings need a tokenizer, and this model has none; use stop_token_ids", param="stop"
            )


def _limit_of(lora_request: LoRARequest | LoRAMix | None, limit: int) -> int:
    """`limit`, or the long_lora_max_len of an adapter within it. Raises InvalidRequestError for one beyond it."""
    requests = () if lora_request is None else lora_request if isinstance(lora_request, tuple) else ((lora_request, 1),)
    for request, _ in requests:
        if request.long_lora_max_len is not None:
            if request.long_lora_max_len > limit:
                text = f"long_lora_max_len={request.long_lora_max_len} is more than the {limit} tokens"
                raise InvalidRequestError(
                    f"LoRARequest {request.lora_name!r}: {text} that its requests may have; lower it"
                )
            limit = request.long_lora_max_len
    return limit


@dataclass(slots=True)
class _Completion:
    """One completion while it grows."""

    request: Request
    index: int
    detokenizer: IncrementalDetokenizer | None
    token_ids: list[int] = field(default_factory=list)
    text: TextPieces = field(default_factory=TextPieces)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    finished: CompletionOutput | None = None

    def add(self, output: TokenOutput) -> bool:
        """Take over new tokens; True when a stop string ended the completion before the engine did."""
        self.token_ids += output.token_ids
        if output.logprobs is not None:
            self.logprobs = [] if self.logprobs is None else self.logprobs
            self.logprobs += output.logprobs
            chosen = zip(output.logprobs, output.token_ids, strict=True)
            self.cumulative_logprob += sum(logprobs[token].logprob for logprobs, token in chosen)
        is_stopped = self._add_text(output)
        if is_stopped:
            self.finish_reason = FinishReason.STOP.value
        elif output.finish_reason is not None:
            self.finish_reason = output.finish_reason.value
            self.stop_reason = output.stop_token_id
        return is_stopped and output.finish_reason is None

    def _add_text(self, output: TokenOutput) -> bool:
        if self.detokenizer is None:
            return False
        tokens = output.token_ids
        params = self.request.sampling_params
        if output.finish_reason is FinishReason.STOP and not params.include_stop_str_in_output:
            is_end = tokens[-1] in self.request.eos_token_ids or tokens[-1] in params.stop_token_ids
            tokens = tokens[:-1] if is_end else tokens  # an end token is no text; the last one of a grammar is
        self.text.append(self.detokenizer.update(tokens))
        if self.detokenizer.stop_reason is None and output.finish_reason is not None:
            self.text.append(self.detokenizer.finish())
        self.stop_reason = self.detokenizer.stop_reason
        return self.detokenizer.stop_reason is not None

    def going_on(self) -> Request:
        """What another engine needs to go on with it. Log probabilities of its prompt came with its first token."""
        request, params = self.request, self.request.sampling_params
        if self.token_ids and params.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)
        return replace(request, sampling_params=params, output_token_ids=tuple(self.token_ids))

    def to_output(self, lora_request: LoRARequest | LoRAMix | None) -> CompletionOutput:
        if self.finished is not None:
            return self.finished
        is_finished = self.finish_reason is not None
        so_far: Callable[[list[Any]], Sequence[Any]] = tuple if is_finished else Prefix
        output = GrowingCompletion(
            self.text,
            index=self.index,
            token_ids=so_far(self.token_ids),
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            logprobs=None if self.logprobs is None else so_far(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            lora_request=lora_request,
        )
        if not is_finished:
            return output
        self.finished = CompletionOutput(**{each.name: getattr(output, each.name) for each in fields(CompletionOutput)})
        return self.finished


@dataclass(slots=True)
class _Generation:
    """All completions of one prompt."""

    prepared: PreparedRequest
    completions: tuple[_Completion, ...]
    scheduled_s: float | None = None
    first_token_s: float | None = None
    scored: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0
    num_chars: int = 0

    def add(self, completion: _Completion, output: TokenOutput) -> bool:
        """What `completion.add` does. Raises InvalidRequestError when all texts together have become too long."""
        before = completion.text.num_chars
        is_stopped = completion.add(output)
        self.num_chars += completion.text.num_chars - before
        if self.num_chars > MAX_TEXT_CHARS:
            raise InvalidRequestError(
                f"the answer to this prompt has more than {MAX_TEXT_CHARS} characters: ask for fewer tokens, or for "
                "fewer completions"
            )
        return is_stopped

    @property
    def is_finished(self) -> bool:
        return all(completion.finish_reason is not None for completion in self.completions)

    def to_output(self) -> RequestOutput:
        prepared, is_finished = self.prepared, self.is_finished
        return RequestOutput(
            request_id=prepared.request_id,
            prompt=prepared.prompt,
            prompt_token_ids=prepared.prompt_token_ids,
            outputs=tuple(completion.to_output(prepared.lora_request) for completion in self.completions),
            finished=is_finished,
            lora_request=prepared.lora_request,
            metrics=RequestMetrics(
                prepared.arrival_s, self.scheduled_s, self.first_token_s, time.time() if is_finished else None
            ),
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
        )


@dataclass(frozen=True, slots=True)
class ProcessedOutput:
    """What a token output led to: `output` for the client, `error` instead, and requests for the engine to end."""

    request_id: str
    output: RequestOutput | None = None
    error: LoraplexError | None = None
    abort_ids: tuple[str, ...] = ()

    @property
    def is_last(self) -> bool:
        return self.error is not None or (self.output is not None and self.output.finished)


class OutputProcessor:
    """Follows every request from its first token to its last. Unknown request ids (ended meanwhile) are passed over."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._generations: dict[str, _Generation] = {}
        self._owner_of: dict[str, tuple[_Generation, _Completion]] = {}
        self.recorder: RequestRecorder | None = None  # while a profile runs

    def __len__(self) -> int:
        return len(self._generations)

    def add(self, prepared: PreparedRequest) -> None:
        if prepared.request_id in self._generations:
            raise InvalidRequestError(
                f"request id {prepared.request_id!r} is in use; give each request an id of its own"
            )
        generation = _Generation(prepared, tuple(self._completions(prepared)))
        self._generations[prepared.request_id] = generation
        for completion in generation.completions:
            self._owner_of[completion.request.request_id] = (generation, completion)
            if self.recorder is not None:
                self.recorder.begin(completion.request)

    def _tokenizer_of(self, prepared: PreparedRequest) -> Tokenizer | None:
        return self._tokenizer if prepared.text is None else prepared.text.tokenizer

    def _completions(self, prepared: PreparedRequest) -> Iterator[_Completion]:
        """What their texts follow is found once for all of them."""
        params, tokenizer = prepared.sampling_params, self._tokenizer_of(prepared)
        if tokenizer is None or not params.detokenize:
            yield from (_Completion(request, index, None) for index, request in enumerate(prepared.children))
            return
        context = prompt_context(tokenizer, prepared.prompt_token_ids, params.skip_special_tokens)
        for index, request in enumerate(prepared.children):
            detokenizer = IncrementalDetokenizer(tokenizer, context, request.sampling_params)
            yield _Completion(request, index, detokenizer)

    def process(self, token_output: TokenOutput, *, is_final_only: bool = False) -> ProcessedOutput | None:
        """Take over one token output; None when there is nothing for the client yet."""
        taken = self._take(token_output)
        return None if taken is None else self._told(taken, is_final_only)

    def process_step(self, token_outputs: Iterable[TokenOutput]) -> list[ProcessedOutput]:
        """`process` of what one step added, with one output for each prompt: its n completions are written once."""
        latest: dict[str, ProcessedOutput] = {}
        for token_output in token_outputs:
            taken = self._take(token_output)
            if taken is not None:
                before = latest.get(taken.request_id)
                abort_ids = taken.abort_ids if before is None else (*before.abort_ids, *taken.abort_ids)
                latest[taken.request_id] = replace(taken, abort_ids=abort_ids)
        return [told for taken in latest.values() if (told := self._told(taken, is_final_only=False)) is not None]

    def _take(self, token_output: TokenOutput) -> ProcessedOutput | None:
        """Add it to its completion: an error, or that there is news."""
        generation, completion = self._owner_of.get(token_output.request_id, (None, None))
        if generation is None or completion is None or completion.finish_reason is not None:
            return None
        request_id = generation.prepared.request_id
        if self.recorder is not None:
            self.recorder.see(token_output)
        if token_output.finish_reason is FinishReason.ERROR:
            assert token_output.error is not None
            return self._failed(request_id, error_from_payload(token_output.error))
        try:
            self._note_first(generation, token_output)
            is_stopped = generation.add(
                completion, self._with_text(token_output, self._tokenizer_of(generation.prepared))
            )
        except InvalidRequestError as error:
            return self._failed(request_id, error)
        except Exception as error:  # a tokenizer that fails on one request's tokens must not stop the others
            logger.exception("the output of a request cannot be read", extra={"request_id": request_id})
            reason = f"the output of this request cannot be read: {type(error).__name__}: {error}"
            return self._failed(request_id, EngineError(reason))
        if not token_output.token_ids and token_output.finish_reason is None:
            return None  # a part of its prompt's logprobs
        if is_stopped and self.recorder is not None:
            self.recorder.stop(token_output.request_id)
        return ProcessedOutput(request_id, abort_ids=(token_output.request_id,) if is_stopped else ())

    def _told(self, taken: ProcessedOutput, is_final_only: bool) -> ProcessedOutput | None:
        """With the output of its prompt as it is now; None when there is nothing for the client yet."""
        generation = self._generations.get(taken.request_id)
        if taken.error is not None or generation is None:
            return taken
        if generation.is_finished:
            self.remove(taken.request_id)
        elif is_final_only:
            return taken if taken.abort_ids else None
        return replace(taken, output=generation.to_output())

    def _failed(self, request_id: str, error: LoraplexError) -> ProcessedOutput:
        return ProcessedOutput(request_id, error=error, abort_ids=self.remove(request_id))

    def _note_first(self, generation: _Generation, output: TokenOutput) -> None:
        if output.prompt_logprobs is not None:
            tokenizer = self._tokenizer_of(generation.prepared)
            generation.scored += (_named(logprobs, tokenizer) for logprobs in output.prompt_logprobs)
            if output.token_ids:
                generation.prompt_logprobs = tuple(generation.scored)
        if generation.first_token_s is None and output.token_ids:
            generation.first_token_s = time.time()
            generation.num_cached_tokens = output.num_cached_tokens
            generation.scheduled_s = output.scheduled_s or None

    @staticmethod
    def _with_text(output: TokenOutput, tokenizer: Tokenizer | None) -> TokenOutput:
        if output.logprobs is None:
            return output
        return replace(output, logprobs=tuple(_named(logprobs, tokenizer) for logprobs in output.logprobs))

    def unfinished(self, request_id: str) -> tuple[Request, ...]:
        """The requests of a prompt that have not ended, each with its output so far, for another engine to go on with.

        () for an unknown prompt.
        """
        generation = self._generations.get(request_id)
        completions = () if generation is None else generation.completions
        return tuple(each.going_on() for each in completions if each.finish_reason is None)

    def remove(self, request_id: str) -> tuple[str, ...]:
        """Forget a prompt; returns the ids of its requests that the engine may still run."""
        generation = self._generations.pop(request_id, None)
        if generation is None:
            return ()
        for completion in generation.completions:
            del self._owner_of[completion.request.request_id]
            if self.recorder is not None:
                self.recorder.forget(completion.request.request_id)
        return tuple(
            completion.request.request_id for completion in generation.completions if completion.finish_reason is None
        )


def _named(logprobs: TokenLogprobs, tokenizer: Tokenizer | None) -> TokenLogprobs:
    return logprobs if tokenizer is None else PackedLogprobs(logprobs, tokenizer.token_text)


def last_occurrence(sought: Sequence[int], token_ids: Sequence[int]) -> int | None:
    """Where `sought`, which is not empty, begins in `token_ids` for the last time; None: nowhere.

    A character stands for each token that is sought, another for all the rest, so that Python's search of strings does
    the work. From the end, since only `find` is linear whatever a client repeats: 10 ms of 131,000 tokens.
    """
    chars = {token_id: chr(index) for index, token_id in enumerate(dict.fromkeys(sought), 1)}
    text = "".join(map(chars.get, reversed(token_ids), itertools.repeat("\0")))
    distance = text.find("".join(map(chars.__getitem__, reversed(sought))))
    return None if distance < 0 else len(token_ids) - distance - len(sought)
