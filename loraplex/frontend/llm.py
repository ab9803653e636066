"""The offline engine: `LLM(model).generate(prompts, params, lora_request)`, in this process, without a server.

It needs torch, numpy, safetensors, tokenizers and jinja2, and nothing else.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar, cast

from loraplex.adapter_store import AddOutcome
from loraplex.adapters.registry import AdapterInfo, LoadResult, LoRARef, SwitchResult
from loraplex.adapters.registry.drain import check_deadline
from loraplex.config import EngineConfig
from loraplex.core import FinishReason, LoRAMix, LoRARequest, Request, RequestOutput, SamplingParams, TokenOutput
from loraplex.engine.build import Progress, build_engine
from loraplex.engine.engine import EngineCore
from loraplex.errors import (
    AdapterNotFoundError,
    EngineShutdownError,
    InvalidRequestError,
    error_from_payload,
)
from loraplex.events import Detail, EngineEvent, EventKind
from loraplex.frontend.adapter_updates import expecting
from loraplex.frontend.event_hub import EventBatch, EventHub
from loraplex.frontend.frontend import adapter_ref, choice_of, lora_requests_of, make_front
from loraplex.frontend.llm_arguments import (
    Asked,
    LoRAInput,
    MakeBar,
    Messages,
    PromptInput,
    adapter_or_mix,
    asked_for,
    config_of,
    listed_prompts,
    progress_bar,
    rendered_chat,
    single_prompt,
)
from loraplex.frontend.lora_profiling import address_of, check_not_profiling, check_profiling, footprints_of, kernels_of
from loraplex.frontend.store import store_of
from loraplex.memory.eviction.custom import PolicySource
from loraplex.metrics import EngineStats, MemoryReport
from loraplex.models.packed_cache import wait_until_saved
from loraplex.performance.profile import LoraProfile
from loraplex.performance.profiler import Profiler
from loraplex.performance.report import LoraPerformanceReport
from loraplex.performance.requests import ServiceTargets
from loraplex.text.processor import PreparedRequest, ProcessedOutput
from loraplex.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

STALLED_WAIT_S = 0.05

P = ParamSpec("P")
T = TypeVar("T")


def in_turn(method: Callable[Concatenate[LLM, P], T]) -> Callable[Concatenate[LLM, P], T]:
    """A method that waits for the call of another thread; raises EngineShutdownError when the LLM is closed."""

    @wraps(method)
    def call(self: LLM, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._turn:
            if self._is_closed:
                raise EngineShutdownError(f"this {type(self).__name__} is closed: make a new one")
            try:
                return method(self, *args, **kwargs)
            finally:
                self._see_events()

    return call


class LLM:
    """A model with its adapters.

    `LLM(model, dtype=..., max_model_len=..., ...)` takes the fields of `EngineConfig` as keywords, and those of
    `LoRAConfig` beside them (`enable_lora=False` turns LoRA off); or make one from a config with `LLM.from_config`.
    `eviction_policy` may also be a class with the methods of `loraplex.memory.eviction.policies.EvictionPolicy`, or an
    object of one. vLLM's `trust_remote_code=False` is accepted, with no other value.
    Raises ConfigError or ModelError.

    Any thread may call it; calls take turns, whole `generate`s too. For requests of many threads in one batch there is
    the server, or one thread that steps what the others `submit`. After `close` every call raises EngineShutdownError.
    """

    def __init__(self, model: str, *, enable_lora: bool = True, **settings: Any) -> None:
        self._start(config_of(model, enable_lora, settings), None, eviction_policy=settings.get("eviction_policy"))

    @classmethod
    def from_config(
        cls, config: EngineConfig, progress: Progress | None = None, profiler: Profiler | None = None
    ) -> Self:
        """With a profiler, each kernel is measured too (loraplex/profile.py)."""
        llm = cls.__new__(cls)
        llm._start(config, progress, profiler)
        return llm

    def _start(
        self,
        config: EngineConfig,
        progress: Progress | None,
        profiler: Profiler | None = None,
        eviction_policy: PolicySource | None = None,
    ) -> None:
        self.config = config = config.with_real_roots()
        self._turn = threading.RLock()  # held by the call that runs; a call inside it by the same thread is part of it
        self._is_closed = False
        self._profiler = profiler or Profiler()
        self.engine: EngineCore = build_engine(config, progress, profiler, eviction_policy)
        self._aborted: list[TokenOutput] = []
        self._front = make_front(
            config,
            self.engine.info,
            None if config.lora is None else store_of(self.engine, self._aborted.extend),
            lambda job: job(),  # the last release of an unloaded adapter drops it on the spot: no other thread waits
            served_model_name=config.model,
            on_change=self._on_registry_change,
            forms=self.engine.grammars,
            abort_grace_s=0,  # what is aborted lets go in the next step, which no other thread runs
        )
        self._request_ids = itertools.count()
        self._submitted: dict[str, tuple[PreparedRequest, list[LoRARef]]] = {}
        self._unread: dict[str, RequestOutput] = {}  # of submitted requests: what `step` is to return
        self._events = EventHub()
        self._lora_profile: LoraProfile | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the loader threads, wait for packed weights on disk; again: nothing. The model's memory goes with the
        object."""
        with self._turn:
            if not self._is_closed:
                self._is_closed = True
                self.engine.close()
                self._front.close()
                wait_until_saved()

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._front.tokenizer

    def get_tokenizer(self, lora_request: LoRARequest | None = None) -> Tokenizer | None:
        """The base model's, or that of an adapter, which is loaded if it is not there."""
        if lora_request is None:
            return self._front.tokenizer
        self.add_lora(lora_request)
        return self._front.text_of(self._front.registry_or_refuse().resolve(lora_request.lora_name)).tokenizer

    # --------------------------------------------------------------------------------------------------------- generate

    @in_turn
    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRAInput | Sequence[LoRAInput] = None,
        cache_salt: str = "",
        use_tqdm: bool | MakeBar = False,
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs are in the order of the prompts.

        prompts: a string, token ids, `{"prompt_token_ids": [...]}` or `{"prompt": "..."}`, or a list of these.
        sampling_params and lora_request: one for all, or one per prompt (None is the base model; a mix of adapters is a
        list of (LoRARequest, weight), and their weighted deltas add up). Raises ValueError (InvalidRequestError) when
        lengths differ or a prompt cannot be served, AdapterError when an adapter cannot; nothing has run then. A
        completion that reaches the model's length ends there, with finish_reason `length`,
        whatever `max_tokens` allows.
        use_tqdm: True shows a progress bar, and `tqdm` (or what is called as it is) makes its own.
        """
        listed = listed_prompts(prompts)
        return self._run(asked_for(listed, sampling_params, lora_request, True), cache_salt, use_tqdm)

    @in_turn
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRAInput | Sequence[LoRAInput] = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool | MakeBar = False,
    ) -> list[RequestOutput]:
        """Answer conversations: one (a list of messages) or several.

        The chat template of each one's adapter makes the prompt, or the model's where the adapter has none.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        variables, ends = dict(chat_template_kwargs or {}), add_generation_prompt
        prompts = [partial(rendered_chat, cast(Messages, each), ends, variables) for each in conversations]
        # The template writes the special tokens itself.
        return self._run(asked_for(prompts, sampling_params, lora_request, False), "", use_tqdm)

    # ----------------------------------------------------------------------------------------------- request by request

    @in_turn
    def submit(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRAInput = None,
        cache_salt: str = "",
        request_id: str | None = None,
    ) -> str:
        """Queue one prompt for `step`; returns its id, a made one if none is given. Raises what `generate` raises.

        With `max_waiting_requests` in the queue it raises EngineOverloadedError. An adapter of an unknown name is
        loaded here and now: `add_lora` it before where no request should wait for that.
        """
        refs: list[LoRARef] = []
        adapter = adapter_or_mix(lora_request)
        self._load_each([adapter])
        try:
            asked = (single_prompt(prompt), sampling_params, adapter, True)
            prepared = self._prepare(asked, refs, cache_salt, request_id)
            self._front.outputs.add(prepared)
            self._queue(prepared)
        except BaseException:
            self._front.release(refs)
            raise
        self._submitted[prepared.request_id] = (prepared, refs)
        return prepared.request_id

    @in_turn
    def step(self, stalled_wait_s: float = STALLED_WAIT_S) -> list[RequestOutput]:
        """Run one step of what was submitted; returns the outputs that it added to, cumulative; the last is `finished`.

        A request that fails ends with `error` set and no completions, and the others go on. Where all of them wait for
        adapters, this waits for the end of a load, at most `stalled_wait_s`. No step is in flight between two calls:
        verbs may wait for its memory.
        """
        self._step_submitted(stalled_wait_s)
        outputs = list(self._unread.values())
        self._unread.clear()
        return outputs

    def _step_submitted(self, stalled_wait_s: float) -> None:
        """One step, of which `_unread` keeps the outputs."""
        _, processed = self._advance(False, stalled_wait_s, is_settled=True)
        for one in processed:
            output = one.output or self._submitted[one.request_id][0].failed(one.error)
            self._unread[one.request_id] = output
            if output.finished:
                self._front.release(self._submitted.pop(one.request_id)[1])

    def _finish_on(self, adapter_name: str, deadline_s: float | None) -> None:
        """Step until no submitted request is on an adapter, at most `deadline_s`: no other call could meanwhile.

        `step` returns what came of it.
        """
        check_deadline(deadline_s)
        end_s = time.monotonic() + (deadline_s or 0)
        while any(ref.adapter_name == adapter_name for _, refs in self._submitted.values() for ref in refs):
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return
            self._step_submitted(min(left_s, STALLED_WAIT_S))

    @in_turn
    def abort(self, request_id: str) -> bool:
        """End a submitted request; False when it has ended already. No output of it comes any more."""
        self._unread.pop(request_id, None)
        _, refs = self._submitted.pop(request_id, (None, None))
        if refs is None:
            return False
        self.engine.abort(self._front.outputs.remove(request_id))
        self._front.release(refs)
        return True

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has an output to come."""
        return bool(self._submitted or self._unread)

    # -------------------------------------------------------------------------------------------------------- the steps

    def _run(self, requests: Sequence[Asked], cache_salt: str, use_tqdm: bool | MakeBar) -> list[RequestOutput]:
        if self._submitted:
            raise InvalidRequestError(
                f"{len(self._submitted)} submitted requests have not ended: step until they have, or abort them, then "
                "generate"
            )
        refs: list[LoRARef] = []
        try:
            with progress_bar(use_tqdm, len(requests)) as note_done:
                self._load_each(lora_request for _, _, lora_request, _ in requests)
                prepared = [self._prepare(asked, refs, cache_salt) for asked in requests]
                finished = self._complete(prepared, note_done)
            return [finished[one.request_id] for one in prepared]
        finally:
            self._front.release(refs)

    def _load_each(self, lora_requests: Iterable[LoRARequest | LoRAMix | None]) -> None:
        """Each once, however many prompts have it: a reload in place would be another version for every prompt."""
        for lora_request in dict.fromkeys(itertools.chain.from_iterable(map(lora_requests_of, lora_requests))):
            self.add_lora(lora_request)

    def _prepare(
        self, asked: Asked, refs: list[LoRARef], cache_salt: str, request_id: str | None = None
    ) -> PreparedRequest:
        prompt, params, lora_request, add_special_tokens = asked
        choice = choice_of(lora_request)
        acquired = self._front.acquire(choice)
        refs += acquired
        text = self._front.text_for(acquired)
        params = params or text.default_params()
        if params.structured_outputs is not None:
            self._front.forms.check(params.structured_outputs)
        return self._front.inputs.prepare(
            f"request-{next(self._request_ids)}" if request_id is None else request_id,
            prompt(text.tokenizer) if callable(prompt) else prompt,
            params,
            adapter=adapter_ref(acquired, choice),
            lora_request=lora_request,
            cache_salt=cache_salt,
            add_special_tokens=add_special_tokens,
            text=text,
        )

    def _queue(self, prepared: PreparedRequest) -> None:
        """All of its requests, or none. Raises EngineOverloadedError."""
        for request in prepared.children:
            for refused in self.engine.add_request(request):
                self.engine.abort(self._front.outputs.remove(prepared.request_id))
                assert refused.error is not None
                raise error_from_payload(refused.error)

    def _complete(
        self, prepared: Sequence[PreparedRequest], note_done: Callable[[int], Any]
    ) -> dict[str, RequestOutput]:
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
                        note_done(1)
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
        """(requests that left the engine, what there is for clients) of one step; `is_settled`: none in flight."""
        num_ended, outputs = 0, []
        for token_output in self._step(is_settled):
            num_ended += token_output.finish_reason is not None
            with self._profiler.part("detokenise"):
                processed = self._front.outputs.process(token_output, is_final_only=is_final_only)
            if processed is not None:
                num_ended += len(self.engine.abort(processed.abort_ids))
                outputs.append(processed)
        if self.engine.is_stalled and self.engine.has_unfinished:
            self.engine.wait_for_change(stalled_wait_s)
        return num_ended, outputs

    def _add(self, request: Request) -> None:
        """Hand a request to the engine; one that is refused, or whose adapter was unloaded by force meanwhile, ends
        with the next step."""
        if self._front.is_forced_out(request.adapter_ids):
            self._aborted.append(TokenOutput(request.request_id, finish_reason=FinishReason.ABORT))
            return
        self._aborted += self.engine.add_request(request)

    def _step(self, is_settled: bool) -> list[TokenOutput]:
        """What a step added, and what was aborted before or during it."""
        outputs = self.engine.step()
        if is_settled:
            outputs += self.engine.settle()
        self._see_events()
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
            self._front.source_of(lora_request),
            lora_int_id=lora_request.lora_int_id,
            load_inplace=lora_request.load_inplace,
        )
        return result.status != "already_loaded"

    @in_turn
    def remove_lora(self, lora_int_id: int, *, deadline_s: float | None = None, force: bool = False) -> bool:
        """Unload an adapter by its number; False when there is none.

        Submitted requests on it finish in later steps, and it is dropped then. With `deadline_s` this call steps until
        they have, at most so long, and the next `step` has the outputs; `force` aborts those that still run.
        """
        try:
            name = self._name_of(lora_int_id)
        except AdapterNotFoundError:
            return False
        self._finish_on(name, deadline_s)
        self._front.registry_or_refuse().unload(name, force=force)
        return True

    @in_turn
    def pin_lora(self, lora_int_id: int) -> bool:
        """Promote an adapter and keep it on the device until it is unpinned or unloaded. Whether something changed.

        This and the verbs below raise AdapterNotFoundError for a number that no adapter has, and what goes to the
        device AdapterMemoryError when there is no room.
        """
        return self._front.registry_or_refuse().pin(self._name_of(lora_int_id))

    @in_turn
    def unpin_lora(self, lora_int_id: int) -> bool:
        """Let an adapter be evicted again. Whether something changed."""
        return self._front.registry_or_refuse().unpin(self._name_of(lora_int_id))

    @in_turn
    def preload_lora(self, lora_int_id: int) -> AddOutcome:
        """Promote an adapter now rather than with its first request. True when something changed; `evicted` has the
        names that made room."""
        return self._front.registry_or_refuse().preload(self._name_of(lora_int_id))

    @in_turn
    def evict_lora(self, lora_int_id: int) -> bool:
        """Move an adapter one tier down, which lifts a pin; requests bring it back. Whether something changed."""
        return self._front.registry_or_refuse().evict(self._name_of(lora_int_id))

    @in_turn
    def clone_lora(self, lora_int_id: int, new_name: str, new_int_id: int) -> LoadResult:
        """Give an adapter's weights a further name and number. Both share memory and KV; each is unloaded by itself."""
        registry = self._front.registry_or_refuse()
        return registry.clone(self._name_of(lora_int_id), new_name, lora_int_id=new_int_id)

    @in_turn
    def rollback_lora(self, lora_int_id: int, version: int | None = None) -> LoadResult:
        """Let what answered before an adapter's last reload or switch answer again, or a kept version of it."""
        return self._front.registry_or_refuse().move(self._name_of(lora_int_id), version)

    @in_turn
    def update_adapter_tensors(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor] | bytes,
        adapter_config: Mapping[str, Any] | None = None,
        *,
        expected_version: int | None = None,
    ) -> LoadResult:
        """As `AsyncEngine.update_adapter_tensors`."""
        registry, updates = self._front.registry_or_refuse(), self._front.updates_or_refuse()
        upload = updates.receive(tensors, adapter_config)
        return updates.update(registry, name, upload, expecting(name, expected_version))

    def _name_of(self, lora_int_id: int) -> str:
        return self._front.registry_or_refuse().name_of(lora_int_id)

    @in_turn
    def list_loras(self) -> set[int]:
        """The numbers of the loaded adapters."""
        return set(self._front.registry_or_refuse().lora_int_ids())

    @in_turn
    def switch_lora(
        self,
        old_id: int | LoRARequest,
        new_id: int | LoRARequest,
        *,
        deadline_s: float | None = None,
        force: bool = False,
    ) -> SwitchResult:
        """Requests for `old_id` go to `new_id` from now on; `old_id` is evicted when no request uses it.

        A LoRARequest as `new_id` is loaded as by `add_lora`, and one as `old_id` need not be loaded: the result says
        whether it was active. deadline_s and force are for requests on `old_id`, as in `remove_lora`. Raises
        AdapterNotFoundError for a number that no adapter has, and AdapterError when the new adapter cannot be loaded or
        promoted; then the old one answers on.
        """
        registry = self._front.registry_or_refuse()
        old, new = (self._name_of(each) if isinstance(each, int) else each.lora_name for each in (old_id, new_id))
        if isinstance(new_id, int):
            switch = partial(registry.switch, old, new)
        else:
            self._front.check_lora_request(new_id)
            number, is_reload = new_id.lora_int_id, new_id.load_inplace
            switch = partial(registry.switch, old, new, new_id.lora_path, lora_int_id=number, load_inplace=is_reload)
        self._finish_on(old, deadline_s)
        return switch(force=force)

    @in_turn
    def adapters(self) -> list[AdapterInfo]:
        """Every loaded adapter with its tier, bytes, rank and references."""
        return self._front.registry_or_refuse().list_adapters()

    @in_turn
    def stats(self) -> EngineStats:
        return self.engine.stats()

    @in_turn
    def memory_report(self) -> MemoryReport:
        """The memory of adapters and KV cache as it is now: tiers, pressure, fragmentation, counters."""
        return self.engine.memory_report()

    @in_turn
    def events(self, last_id: int = 0) -> EventBatch:
        """What happened to adapters and memory after the event of an id, oldest first; the latest 1,000 are kept."""
        self._see_events()
        return self._events.after(last_id)

    @in_turn
    def start_lora_profiling(self, targets: ServiceTargets | None = None) -> None:
        """Record requests, steps, events until `generate_lora_performance_report`. InvalidRequestError: one runs."""
        check_not_profiling(self._lora_profile)
        self._see_events()  # those of before
        self._lora_profile = profile = LoraProfile(partial(address_of, self._front.registry), targets)
        profile.begin(self.engine.stats())
        self.engine.start_profile()
        self._front.outputs.recorder = profile.requests

    @in_turn
    def generate_lora_performance_report(self, measure_kernels: bool = False) -> LoraPerformanceReport:
        """End the profile and say what it found. InvalidRequestError when none runs.

        measure_kernels: each kernel is timed beside its fallback too, which takes about half a second.
        """
        profile = check_profiling(self._lora_profile)
        self._see_events()
        self._lora_profile = self._front.outputs.recorder = None
        stats = self.engine.stats()
        adapters = [] if self._front.registry is None else self.adapters()
        steps, kernels = self.engine.stop_profile(), kernels_of(self.engine.info)
        speedups = self.engine.measure_kernels() if measure_kernels else ()
        return profile.report(stats, steps, kernels, footprints_of(adapters), speedups)

    def _on_registry_change(self, kind: EventKind, name: str, text: str, details: Mapping[str, Detail]) -> None:
        self._see_events()  # what the verb made the engine do came before
        self._see(EngineEvent(kind, time.time(), text, adapter_name=name, details=details))

    def _see_events(self) -> None:
        """Take the engine's events, of which it keeps the latest only."""
        for event in self.engine.take_events():
            self._see(event)

    def _see(self, event: EngineEvent) -> None:
        self._events.add(event)
        if self._lora_profile is not None:
            self._lora_profile.see(event)

    def check_integrity(self) -> None:
        """Assert that names, references and memory are consistent."""
        with self._turn:
            if self._front.registry is not None:
                self._front.registry.check_integrity()
            self.engine.check_integrity()
