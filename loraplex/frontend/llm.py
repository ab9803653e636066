"""The offline engine: `LLM(model).generate(prompts, params, lora_request)`, in this process, without a server.

It needs torch, numpy, safetensors, tokenizers and jinja2, and nothing else.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial, wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

from loraplex.adapters.registry import AdapterInfo, LoRARef, SwitchResult
from loraplex.config import EngineConfig, LoRAConfig
from loraplex.core import FinishReason, LoRARequest, Request, RequestMetrics, RequestOutput, SamplingParams, TokenOutput
from loraplex.engine.build import Progress, build_engine
from loraplex.engine.engine import EngineCore
from loraplex.errors import (
    AdapterNotFoundError,
    ConfigError,
    EngineShutdownError,
    InvalidRequestError,
    LoraplexError,
    error_from_payload,
)
from loraplex.frontend.frontend import adapter_ref, make_front
from loraplex.frontend.lora_profiling import address_of, check_not_profiling, check_profiling, footprints_of, kernels_of
from loraplex.frontend.store import store_of
from loraplex.metrics import EngineStats
from loraplex.models.packed_cache import wait_until_saved
from loraplex.performance.profile import LoraProfile
from loraplex.performance.report import LoraPerformanceReport
from loraplex.performance.requests import ServiceTargets
from loraplex.profiler import Profiler
from loraplex.text.processor import PreparedRequest, ProcessedOutput
from loraplex.text.tokenizer import Tokenizer

STALLED_WAIT_S = 0.05

P = ParamSpec("P")
T = TypeVar("T")

Messages = Sequence[Mapping[str, Any]]
PromptInput = str | Sequence[int] | Mapping[str, Any]
"""A string, token ids, `{"prompt_token_ids": [...]}` or `{"prompt": "..."}`."""

_Asked = tuple[str | Sequence[int], SamplingParams, LoRARequest | None, bool]
"""A prompt, how to sample, its adapter, and whether the tokenizer adds special tokens."""


def in_turn(method: Callable[Concatenate[LLM, P], T]) -> Callable[Concatenate[LLM, P], T]:
    """A method that waits for the call of another thread; raises EngineShutdownError when the LLM is closed."""

    @wraps(method)
    def call(self: LLM, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._turn:
            if self._is_closed:
                raise EngineShutdownError(f"this {type(self).__name__} is closed: make a new one")
            return method(self, *args, **kwargs)

    return call


class LLM:
    """A model with its adapters.

    `LLM(model, dtype=..., max_model_len=..., ...)` takes the fields of `EngineConfig` as keywords, and those of
    `LoRAConfig` beside them (`enable_lora=False` turns LoRA off); or make one from a config with `LLM.from_config`.
    Raises ConfigError or ModelError.

    Any thread may call it; calls take turns, whole `generate`s too. For requests of many threads in one batch there is
    the server, or one thread that steps what the others `submit`. After `close` every call raises EngineShutdownError.
    """

    def __init__(self, model: str, *, enable_lora: bool = True, **settings: Any) -> None:
        self._start(_config_of(model, enable_lora, settings), None)

    @classmethod
    def from_config(
        cls, config: EngineConfig, progress: Progress | None = None, profiler: Profiler | None = None
    ) -> Self:
        """With a profiler, each kernel is measured too (loraplex/profile.py)."""
        llm = cls.__new__(cls)
        llm._start(config, progress, profiler)
        return llm

    def _start(self, config: EngineConfig, progress: Progress | None, profiler: Profiler | None = None) -> None:
        self.config = config = config.with_real_roots()
        self._turn = threading.RLock()  # held by the call that runs; a call inside it by the same thread is part of it
        self._is_closed = False
        self._profiler = profiler or Profiler()
        self.engine: EngineCore = build_engine(config, progress, profiler)
        self._aborted: list[TokenOutput] = []
        self._front = make_front(
            config,
            self.engine.info,
            None if config.lora is None else store_of(self.engine, self._aborted.extend),
            lambda job: job(),  # the last release of an unloaded adapter drops it on the spot: no other thread waits
            served_model_name=config.model,
        )
        self._request_ids = itertools.count()
        self._submitted: dict[str, tuple[PreparedRequest, list[LoRARef]]] = {}
        self._lora_profile: LoraProfile | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the loader threads; wait until packed weights are on disk. The model's memory goes with the object.
        Again: nothing."""
        with self._turn:
            if not self._is_closed:
                self._is_closed = True
                self.engine.close()
                wait_until_saved()

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._front.tokenizer

    def get_tokenizer(self) -> Tokenizer | None:
        return self._front.tokenizer

    # --------------------------------------------------------------------------------------------------------- generate

    @in_turn
    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs are in the order of the prompts.

        prompts: a string, token ids, `{"prompt_token_ids": [...]}` or `{"prompt": "..."}`, or a list of these.
        sampling_params and lora_request: one for all, or one per prompt (None is the base model). Raises ValueError
        (InvalidRequestError) when lengths differ or a prompt cannot be served, AdapterError when an adapter cannot;
        nothing has run then. A completion that reaches the model's length ends there, with finish_reason `length`,
        whatever `max_tokens` allows.
        """
        listed = listed_prompts(prompts)
        params = one_each(sampling_params, len(listed), "sampling_params", SamplingParams)
        adapters = one_each(lora_request, len(listed), "lora_request", LoRARequest)
        requests = zip(listed, params, adapters, strict=True)
        return self._run(
            [(prompt, chosen or SamplingParams(), adapter, True) for prompt, chosen, adapter in requests], cache_salt
        )

    @in_turn
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations: one (a list of messages) or several. The model's chat template makes the prompts."""
        if self.tokenizer is None:
            raise InvalidRequestError("chat needs a tokenizer with a chat template, and this model has none")
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        prompts = [
            self.tokenizer.apply_chat_template(
                cast(Messages, conversation),
                add_generation_prompt=add_generation_prompt,
                template_kwargs=dict(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        params = one_each(sampling_params, len(prompts), "sampling_params", SamplingParams)
        adapters = one_each(lora_request, len(prompts), "lora_request", LoRARequest)
        # The template writes the special tokens itself.
        requests = zip(prompts, params, adapters, strict=True)
        return self._run([(prompt, chosen or SamplingParams(), adapter, False) for prompt, chosen, adapter in requests])

    # ----------------------------------------------------------------------------------------------- request by request

    @in_turn
    def submit(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        cache_salt: str = "",
        request_id: str | None = None,
    ) -> str:
        """Queue one prompt for `step`; returns its id, a made one if none is given. Raises what `generate` raises for
        it.

        With `max_waiting_requests` in the queue it raises EngineOverloadedError. An adapter of an unknown name is
        loaded here and now: `add_lora` it before where no request should wait for that.
        """
        refs: list[LoRARef] = []
        self._load_each([lora_request])
        try:
            chosen = sampling_params or SamplingParams()
            prepared = self._prepare((single_prompt(prompt), chosen, lora_request, True), refs, cache_salt, request_id)
            self._front.outputs.add(prepared)
            self._queue(prepared)
        except BaseException:
            self._release(refs)
            raise
        self._submitted[prepared.request_id] = (prepared, refs)
        return prepared.request_id

    @in_turn
    def step(self, stalled_wait_s: float = STALLED_WAIT_S) -> list[RequestOutput]:
        """Run one step of what was submitted; returns the outputs that it added to, cumulative, `finished` with the
        last one.

        A request that fails ends with `error` set and no completions, and the others go on. Where all of them wait for
        adapters, this waits for the end of a load, at most `stalled_wait_s`. No step is in flight between two calls:
        verbs may wait for its memory.
        """
        _, processed = self._advance(False, stalled_wait_s, is_settled=True)
        outputs = []
        for one in processed:
            output = one.output or _failed(self._submitted[one.request_id][0], one.error)
            outputs.append(output)
            if output.finished:
                self._release(self._submitted.pop(one.request_id)[1])
        return outputs

    @in_turn
    def abort(self, request_id: str) -> bool:
        """End a submitted request; False when it has ended already. No output of it comes any more."""
        _, refs = self._submitted.pop(request_id, (None, None))
        if refs is None:
            return False
        self.engine.abort(self._front.outputs.remove(request_id))
        self._release(refs)
        return True

    @property
    def has_unfinished(self) -> bool:
        """Whether a submitted request has not ended."""
        return bool(self._submitted)

    # -------------------------------------------------------------------------------------------------------- the steps

    def _run(self, requests: Sequence[_Asked], cache_salt: str = "") -> list[RequestOutput]:
        if self._submitted:
            raise InvalidRequestError(
                f"{len(self._submitted)} submitted requests have not ended: step until they have, or abort them, then generate"
            )
        refs: list[LoRARef] = []
        try:
            self._load_each(dict.fromkeys(lora_request for _, _, lora_request, _ in requests))
            prepared = [self._prepare(asked, refs, cache_salt) for asked in requests]
            finished = self._complete(prepared)
            return [finished[one.request_id] for one in prepared]
        finally:
            self._release(refs)

    def _load_each(self, lora_requests: Iterable[LoRARequest | None]) -> None:
        """Each once, however many prompts have it: a reload in place would be another version for every prompt."""
        for lora_request in lora_requests:
            if lora_request is not None:
                self.add_lora(lora_request)

    def _prepare(
        self, asked: _Asked, refs: list[LoRARef], cache_salt: str, request_id: str | None = None
    ) -> PreparedRequest:
        prompt, params, lora_request, add_special_tokens = asked
        return self._front.inputs.prepare(
            f"request-{next(self._request_ids)}" if request_id is None else request_id,
            prompt,
            params,
            adapter=adapter_ref(self._acquire(lora_request, refs)),
            lora_request=lora_request,
            cache_salt=cache_salt,
            add_special_tokens=add_special_tokens,
        )

    def _acquire(self, lora_request: LoRARequest | None, refs: list[LoRARef]) -> LoRARef | None:
        if lora_request is None:
            return None
        ref = self._front.registry_or_refuse().acquire(lora_request.lora_name)
        refs.append(ref)
        return ref

    def _release(self, refs: Iterable[LoRARef]) -> None:
        for ref in refs:
            self._front.registry_or_refuse().release(ref)

    def _queue(self, prepared: PreparedRequest) -> None:
        """All of its requests, or none. Raises EngineOverloadedError."""
        for request in prepared.children:
            for refused in self.engine.add_request(request):
                self.engine.abort(self._front.outputs.remove(prepared.request_id))
                assert refused.error is not None
                raise error_from_payload(refused.error)

    def _complete(self, prepared: Sequence[PreparedRequest]) -> dict[str, RequestOutput]:
        """Step until all are finished. At most `max_waiting_requests` are queued at a time."""
        finished: dict[str, RequestOutput] = {}
        left = [request for one in reversed(prepared) for request in reversed(one.children)]
        in_engine = 0
        try:
            for one in prepared:
                self._front.outputs.add(one)
            while left or in_engine:
                while left and in_engine < self.config.max_waiting_requests:
                    self._add(left.pop())
                    in_engine += 1
                num_ended, outputs = self._advance(True, STALLED_WAIT_S)
                in_engine -= num_ended
                for processed in outputs:
                    if processed.error is not None:
                        raise processed.error
                    if processed.output is not None:
                        finished[processed.request_id] = processed.output
        except BaseException:
            for one in prepared:
                self.engine.abort(self._front.outputs.remove(one.request_id))
            self.engine.settle()
            raise
        self.engine.settle()  # what ran on when a stop string ended the last one
        return finished

    def _advance(
        self, is_final_only: bool, stalled_wait_s: float, is_settled: bool = False
    ) -> tuple[int, list[ProcessedOutput]]:
        """(requests that left the engine, what there is for clients) of one step; `is_settled` leaves none in
        flight."""
        num_ended, outputs = 0, []
        for token_output in self._step(is_settled):
            num_ended += token_output.finish_reason is not None
            with self._profiler.part("detokenise"):
                processed = self._front.outputs.process(token_output, is_final_only=is_final_only)
            if processed is not None:
                num_ended += len(self.engine.abort(processed.abort_ids))
                outputs.append(processed)
        if self.engine.is_stalled and self.engine.has_unfinished:
            self.engine.adapters.wait_for_change(stalled_wait_s)
        return num_ended, outputs

    def _add(self, request: Request) -> None:
        """Hand a request to the engine; one that is refused, or whose adapter was unloaded by force meanwhile, ends
        with the next step."""
        if request.adapter_id is not None and self._front.registry_or_refuse().is_forced_out(request.adapter_id):
            self._aborted.append(TokenOutput(request.request_id, finish_reason=FinishReason.ABORT))
            return
        self._aborted += self.engine.add_request(request)

    def _step(self, is_settled: bool) -> list[TokenOutput]:
        """What a step added, and what was aborted before or during it."""
        outputs = self.engine.step()
        if is_settled:
            outputs += self.engine.settle()
        aborted = self._aborted.copy()
        del self._aborted[: len(aborted)]
        return outputs + aborted

    # --------------------------------------------------------------------------------------------------------- adapters

    @in_turn
    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter. False when the same one is there already. Raises AdapterError, with every reason at once."""
        self._front.check_lora_request(lora_request)
        result = self._front.registry_or_refuse().load(
            lora_request.lora_name,
            lora_request.lora_path,
            lora_int_id=lora_request.lora_int_id,
            load_inplace=lora_request.load_inplace,
        )
        return result.status != "already_loaded"

    @in_turn
    def remove_lora(self, lora_int_id: int) -> bool:
        """Unload an adapter by its number; False when there is none."""
        try:
            name = self._front.registry_or_refuse().name_of(lora_int_id)
        except AdapterNotFoundError:
            return False
        self._front.registry_or_refuse().unload(name)
        return True

    @in_turn
    def pin_lora(self, lora_int_id: int) -> bool:
        """Promote an adapter and keep it on the device until it is unloaded. Raises AdapterNotFoundError,
        AdapterMemoryError."""
        registry = self._front.registry_or_refuse()
        return registry.pin(registry.name_of(lora_int_id))

    @in_turn
    def list_loras(self) -> set[int]:
        """The numbers of the loaded adapters."""
        return set(self._front.registry_or_refuse().lora_int_ids())

    @in_turn
    def switch_lora(self, old_id: int, new_id: int) -> SwitchResult:
        """Requests for `old_id` go to `new_id` from now on; `old_id` is evicted when no request uses it."""
        registry = self._front.registry_or_refuse()
        return registry.switch(registry.name_of(old_id), registry.name_of(new_id))

    @in_turn
    def adapters(self) -> list[AdapterInfo]:
        """Every loaded adapter with its tier, bytes, rank and references."""
        return self._front.registry_or_refuse().list_adapters()

    @in_turn
    def stats(self) -> EngineStats:
        return self.engine.stats()

    @in_turn
    def start_lora_profiling(self, targets: ServiceTargets | None = None) -> None:
        """Record requests, steps and events until `generate_lora_performance_report`. InvalidRequestError when a
        profile runs."""
        check_not_profiling(self._lora_profile)
        self._lora_profile = profile = LoraProfile(partial(address_of, self._front.registry), targets)
        profile.begin(self.engine.stats())
        self.engine.take_events()  # those of before
        self.engine.start_profile()
        self._front.outputs.recorder = profile.requests

    @in_turn
    def generate_lora_performance_report(self, measure_kernels: bool = False) -> LoraPerformanceReport:
        """End the profile and say what it found. InvalidRequestError when none runs.

        measure_kernels: each kernel is timed beside its fallback too, which takes about half a second.
        """
        profile = check_profiling(self._lora_profile)
        self._lora_profile = self._front.outputs.recorder = None
        for event in self.engine.take_events():
            profile.see(event)
        stats = self.engine.stats()
        adapters = [] if self._front.registry is None else self.adapters()
        steps, kernels = self.engine.stop_profile(), kernels_of(self.engine.info)
        speedups = self.engine.measure_kernels() if measure_kernels else ()
        return profile.report(stats, steps, kernels, footprints_of(adapters), speedups)

    def check_integrity(self) -> None:
        """Assert that names, references and memory are consistent."""
        with self._turn:
            if self._front.registry is not None:
                self._front.registry.check_integrity()
            self.engine.check_integrity()


def _failed(prepared: PreparedRequest, error: LoraplexError | None) -> RequestOutput:
    assert error is not None
    return RequestOutput(
        request_id=prepared.request_id,
        prompt=prepared.prompt,
        prompt_token_ids=prepared.prompt_token_ids,
        outputs=(),
        finished=True,
        lora_request=prepared.lora_request,
        metrics=RequestMetrics(prepared.arrival_s, finished_time=time.time()),
        error=error,
    )


def _config_of(model: str, enable_lora: bool, settings: Mapping[str, Any]) -> EngineConfig:
    """Keywords to configs; one that is neither's field is refused by name."""
    engine_names = {field.name for field in fields(EngineConfig)} - {"model", "lora"}
    lora_names = {field.name for field in fields(LoRAConfig)}
    unknown = sorted(set(settings) - engine_names - lora_names)
    if unknown:
        raise ConfigError(
            f"LLM has no setting {', '.join(unknown)}; the settings are the fields of EngineConfig and LoRAConfig"
        )
    lora_settings = {name: value for name, value in settings.items() if name in lora_names}
    if lora_settings and not enable_lora:
        raise ConfigError(f"enable_lora=False, but settings of LoRA are given: {', '.join(sorted(lora_settings))}")
    engine_settings = {name: value for name, value in settings.items() if name in engine_names}
    return EngineConfig(model=model, lora=LoRAConfig(**lora_settings) if enable_lora else None, **engine_settings)


# -------------------------------------------------------------------------------------- prompts and what goes with them


def listed_prompts(prompts: PromptInput | Sequence[PromptInput]) -> list[str | Sequence[int]]:
    if not isinstance(prompts, str | Mapping | Sequence):
        raise InvalidRequestError(f"prompts are strings or token ids, got {type(prompts).__name__}")
    if isinstance(prompts, str | Mapping) or (prompts and all(isinstance(token, int) for token in prompts)):
        return [single_prompt(cast(PromptInput, prompts))]
    return [single_prompt(cast(PromptInput, prompt)) for prompt in prompts]


def single_prompt(prompt: PromptInput) -> str | Sequence[int]:
    """A string, or token ids."""
    if isinstance(prompt, Mapping):
        known = {"prompt", "prompt_token_ids"} & set(prompt)
        if len(prompt) != 1 or not known:
            raise InvalidRequestError(
                f"a prompt has one of prompt and prompt_token_ids, got the keys {sorted(map(str, prompt))}"
            )
        prompt = prompt[known.pop()]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence) and all(type(token) is int for token in prompt):
        return cast(Sequence[int], prompt)
    raise InvalidRequestError(f"a prompt is a string or a list of token ids, got {type(prompt).__name__}")


def one_each(given: T | Sequence[T | None] | None, count: int, name: str, kind: type[T]) -> list[T | None]:
    """One for all, or one per prompt. Raises InvalidRequestError (a ValueError) when the lengths differ."""
    if given is None or isinstance(given, kind):
        return [given] * count
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise InvalidRequestError(f"{name} is a {type(given).__name__}; it takes {kind.__name__}, or a list of them")
    listed: list[T | None] = list(given)
    if len(listed) != count:
        raise InvalidRequestError(f"{name} has {len(listed)} entries for {count} prompts: give one, or one for each")
    wrong = next((one for one in listed if one is not None and not isinstance(one, kind)), None)
    if wrong is not None:
        raise InvalidRequestError(f"{name} has a {type(wrong).__name__}; it takes {kind.__name__}")
    return listed
