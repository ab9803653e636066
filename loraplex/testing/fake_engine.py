"""An engine without weights, with the surface of `engine.AsyncEngine`."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from loraplex.adapter_store import MemoryQuota
from loraplex.adapters.files import SAFETENSORS_NAME
from loraplex.adapters.registry import AdapterText, DatabaseHealth, HeldAdapters, LoRARef, LoRARegistry, OpenedAdapter
from loraplex.adapters.remote.fetched import FetchedFiles, MakeRoom
from loraplex.adapters.source import AdapterSource
from loraplex.adapters.sources.by_need import LoadsByNeed
from loraplex.adapters.sources.uploads import UploadStore
from loraplex.core import AdapterChoice, AdapterMix, AdapterSpec, LoRAMix, LoRARequest, RequestOutput, SamplingParams
from loraplex.errors import (
    EngineDeadError,
    EngineShutdownError,
    InvalidRequestError,
    LoraDisabledError,
    LoraplexError,
    RequestAbortedError,
)
from loraplex.events import EngineEvent
from loraplex.frontend.adapter_updates import AdapterUpdates
from loraplex.frontend.adapter_verbs import AdapterVerbs
from loraplex.frontend.event_hub import EventHub
from loraplex.frontend.frontend import choice_of, lora_requests_of
from loraplex.frontend.lora_profiling import address_of, check_not_profiling, check_profiling, footprints_of
from loraplex.metrics import EngineStats, MemoryReport, RunnerReport, StepTimes
from loraplex.performance.profile import Kernels, LoraProfile
from loraplex.performance.report import LoraPerformanceReport
from loraplex.performance.requests import ServiceTargets
from loraplex.performance.steps import StepProfile
from loraplex.sampling_params import NO_CLAIM, Claim
from loraplex.structured.grammars import GrammarCompiler
from loraplex.structured.params import StructuredOutputsParams
from loraplex.testing.fake_adapter_store import FAKE_RANK, FakeAdapterStore
from loraplex.testing.fake_completion import FakeCompletion, fake_logprobs
from loraplex.testing.fake_tokenizer import FakeTokenizer

if TYPE_CHECKING:
    import sqlalchemy as sa

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FakeModelInfo:
    served_model_name: str = "base"
    root: str = "/models/base"
    max_model_len: int = 512
    vocab_size: int = FakeTokenizer.vocab_size
    dtype: str = "float32"
    backend: str = "fake"
    longest_len: int = 0
    form: str = "llama; weights: float32; KV cache: float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "longest_len", max(self.longest_len, self.max_model_len))


@dataclass(frozen=True, slots=True)
class FakeText:
    """What reads and writes requests; `texts` of an engine has those of adapters with one of their own, by name."""

    tokenizer: FakeTokenizer | None
    vocab_size: int = FakeTokenizer.vocab_size
    defaults: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""
    renders_apart: bool = False
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class FakeHealth:
    is_alive: bool
    message: str = ""
    num_serving: int = 1
    num_released: int = 0
    starting: tuple[str, ...] = ()
    database: DatabaseHealth | None = None


@dataclass(frozen=True, slots=True)
class FakeRequest:
    """One call of `generate`, as it came. adapter_ids: the versions that answer it."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    model: AdapterChoice
    cache_salt: str
    adapter_ids: tuple[int, ...] = ()
    claim: Claim = NO_CLAIM


@dataclass(eq=False, slots=True)
class _Run:
    """A running request. adapter_ids: () for the base model.

    `wake` is set when there is something to look at: an end of the hold, or `error`.
    """

    adapter_ids: tuple[int, ...]
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    error: LoraplexError | None = None


class FakeReceivedOpener:
    """The content of a file is its bytes."""

    def config_of(self, spec: AdapterSpec) -> bytes:
        return b"{}"

    def open_uploaded(self, directory: str, adapter_name: str) -> OpenedAdapter:
        return self.open_received(directory, adapter_name, None)

    def open_received(self, directory: str, adapter_name: str, loaded: AdapterText | None) -> OpenedAdapter:
        data = (Path(directory) / SAFETENSORS_NAME).read_bytes()
        return OpenedAdapter(directory, hashlib.blake2b(data).hexdigest()[:64], len(data), FAKE_RANK, loaded)


@dataclass(frozen=True, slots=True)
class FakeNeedOpener:
    """Fetches nothing."""

    open_path: Callable[[str], OpenedAdapter]
    source: AdapterSource = field(default_factory=AdapterSource)

    def open_needed(self, path: str, called: str, files: FetchedFiles, make_room: MakeRoom) -> OpenedAdapter:
        return self.open_path(path)


class FakeAsyncEngine(AdapterVerbs):
    """The surface of `engine.AsyncEngine`. `adapters`: name to path; `errors_by_path`: what loading a path raises.

    open_adapter: reads paths; by default no path is read. uploads: where tensors that clients send are kept.

    `memory` is what it reports of its memory, `reports` its runners (empty: one), `reply` what it says (None: the
    adapter's name and the prompt); a test may put others there.
    """

    def __init__(
        self,
        adapters: Mapping[str, str] | None = None,
        *,
        model_info: FakeModelInfo | None = None,
        tokenizer: FakeTokenizer | None = None,
        has_tokenizer: bool = True,
        enable_lora: bool = True,
        errors_by_path: Mapping[str, LoraplexError] | None = None,
        max_resident: int | None = None,
        token_delay_s: float = 0.0,
        max_waiting_requests: int = 4096,
        open_adapter: Callable[[str], OpenedAdapter] | None = None,
        uploads: UploadStore | None = None,
        max_loaded_loras: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer or FakeTokenizer()
        self.tokenizer = self._tokenizer if has_tokenizer else None
        self.model_info = model_info or FakeModelInfo()
        self.errors_by_path = dict(errors_by_path or {})
        self._open_source = open_adapter or self._open_unread
        self.token_delay_s = token_delay_s
        self.max_waiting_requests = max_waiting_requests
        self.is_behind = False
        self.texts: dict[str, FakeText] = {}
        self.reply: str | None = None
        self._max_loaded_loras = max_loaded_loras
        self._grammars = GrammarCompiler(lambda: self.tokenizer, self.model_info.vocab_size)
        self.store = FakeAdapterStore(max_resident)
        self.uploads = uploads or UploadStore(None)
        self._updates = AdapterUpdates(self.uploads, FakeReceivedOpener())
        self._by_need = LoadsByNeed(FetchedFiles(), FakeNeedOpener(self._open_adapter))
        self._registry = self._make_registry() if enable_lora else None
        self.requests: list[FakeRequest] = []
        self.aborted: list[str] = []
        self.is_shut_down = False
        self._runs: dict[str, _Run] = {}
        self._num_steps = 0
        self._hold_after: int | None = None
        self.events = EventHub()
        self.memory = MemoryReport()
        self.reports: tuple[RunnerReport, ...] = ()
        self._profile: LoraProfile | None = None
        self._failures: list[tuple[LoraplexError, int]] = []
        self._death: EngineDeadError | None = None
        self._has_given_up = asyncio.Event()
        self.state: sa.Engine | None = None
        for name, path in (adapters or {}).items():
            self._registry_or_refuse().load(name, path)

    def text_of(self, ref: LoRARef | None) -> FakeText:
        own = None if ref is None else self.texts.get(ref.adapter_name)
        return own or FakeText(self.tokenizer, self.model_info.vocab_size)

    def known_text(self, ref: LoRARef | None) -> FakeText | None:
        return None if ref is not None and ref.text is not None else self.text_of(ref)

    def hold_adapters(self, choice: AdapterChoice, num_prompts: int = 1) -> HeldAdapters:
        return HeldAdapters(self._registry, self._refs(choice, LoRARegistry.hold), num_prompts)

    def _refs(self, choice: AdapterChoice, refer: Callable[[LoRARegistry, str], LoRARef]) -> tuple[LoRARef, ...]:
        names = [name for name, _ in choice.parts] if isinstance(choice, AdapterMix) else [choice] if choice else []
        return tuple(refer(self._registry_or_refuse(), name) for name in names)

    @property
    def registry(self) -> LoRARegistry | None:
        return self._registry

    def _make_registry(self) -> LoRARegistry:
        names = [self.model_info.served_model_name]
        on_unused, most = self.uploads.remove, self._max_loaded_loras
        return LoRARegistry(self.store, self._open_adapter, most, names, on_unused=on_unused)

    @property
    def by_need(self) -> LoadsByNeed:
        self._registry_or_refuse()
        return self._by_need

    @property
    def updates(self) -> AdapterUpdates:
        self._registry_or_refuse()
        return self._updates

    def _open_adapter(self, path: str) -> OpenedAdapter:
        if path in self.errors_by_path:
            raise self.errors_by_path[path]
        return self._open_source(path)

    def _open_unread(self, path: str) -> OpenedAdapter:
        content = self.store.open_adapter(path, path)
        return OpenedAdapter(path, content.adapter_digest, content.nbytes, content.rank)

    # ----------------------------------------------------------------------------------------- what a test brings about

    def hold(self, after_tokens: int = 0) -> None:
        """Every request stops after this many tokens, until `resume`."""
        self._hold_after = after_tokens

    def resume(self) -> None:
        self._hold_after = None
        for run in self._runs.values():
            run.wake.set()

    def fail_next(self, error: LoraplexError, after_tokens: int = 0) -> None:
        """The next request (call again for more) raises `error` after this many tokens."""
        self._failures.append((error, after_tokens))

    def die(self, reason: str = "the engine process ended", retry_after_s: float = 1.0) -> None:
        """Running and new requests fail; health says why."""
        self._death = EngineDeadError(reason, retry_after_s)
        for run in self._runs.values():
            self._end(run, self._death)

    def give_up(self) -> None:
        """As an engine that is not restarted any more: a server over it ends."""
        self.die("the engine process ended, and is not restarted")
        self._has_given_up.set()

    @property
    def num_running(self) -> int:
        return len(self._runs)

    @staticmethod
    def _end(run: _Run, error: LoraplexError) -> None:
        run.error = error
        run.wake.set()

    # --------------------------------------------------------------------------------------------- the engine's surface

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str,
        *,
        model: AdapterChoice = None,
        lora_request: LoRARequest | LoRAMix | None = None,
        cache_salt: str = "",
        claim: Claim = NO_CLAIM,
        add_special_tokens: bool = True,
        held: HeldAdapters | None = None,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        self.check_can_serve()
        if request_id in self._runs:
            raise InvalidRequestError(f"request id {request_id!r} is in use")
        for each in lora_requests_of(lora_request):
            await self.load_adapter(each.lora_name, each.lora_path, lora_int_id=each.lora_int_id)
            model = choice_of(lora_request)
        is_text = isinstance(prompt, str)
        token_ids = tuple(self._tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt)
        refs = self._refs(model, LoRARegistry.acquire) if held is None else held.take()
        run = self._runs[request_id] = _Run(tuple(ref.adapter_id for ref in refs))
        self.requests.append(FakeRequest(request_id, token_ids, params, model, cache_salt, run.adapter_ids, claim))
        failure = self._failures.pop(0) if self._failures else None
        is_finished = False
        try:
            said = " + ".join(ref.adapter_name for ref in refs) or "base"
            completions = self._completions(token_ids, params, said, refs[0] if len(refs) == 1 else None)
            for num_tokens in itertools.count():
                await self._pause(run, num_tokens, failure)
                self._num_steps += 1
                for completion in completions:
                    completion.grow()
                is_finished = all(completion.finish_reason is not None for completion in completions)
                output = self._output(request_id, prompt if is_text else None, token_ids, params, completions)
                if on_output is not None:
                    on_output(output)
                yield output
                if is_finished:
                    return
        except LoraplexError as error:
            is_finished = not isinstance(error, RequestAbortedError)
            raise
        finally:
            if not is_finished:
                self.aborted.append(request_id)
            self._runs.pop(request_id, None)
            for ref in refs:
                self._registry_or_refuse().release(ref)

    async def _pause(self, run: _Run, num_tokens: int, failure: tuple[LoraplexError, int] | None) -> None:
        await asyncio.sleep(self.token_delay_s)
        if failure is not None and num_tokens >= failure[1]:
            raise failure[0]
        while run.error is None and self._hold_after is not None and num_tokens >= self._hold_after:
            await run.wake.wait()
            run.wake.clear()
        if run.error is not None:
            raise run.error

    def _completions(
        self, token_ids: tuple[int, ...], params: SamplingParams, name: str, ref: LoRARef | None
    ) -> list[FakeCompletion]:
        """ref: of one adapter, whose text its requests have."""
        room = (self.text_of(ref).max_model_len or self.model_info.max_model_len) - len(token_ids)
        tokenizer = self.text_of(ref).tokenizer or self._tokenizer
        reply = f"[{name}] {tokenizer.decode(token_ids)}" if self.reply is None else self.reply
        max_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        return [
            FakeCompletion(index, reply if index == 0 else f"{reply} #{index}", params, max_tokens, tokenizer)
            for index in range(params.n)
        ]

    @staticmethod
    def _output(
        request_id: str,
        prompt: str | Sequence[int] | None,
        token_ids: tuple[int, ...],
        params: SamplingParams,
        completions: Sequence[FakeCompletion],
    ) -> RequestOutput:
        count = params.prompt_logprobs
        return RequestOutput(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=token_ids,
            outputs=tuple(completion.output() for completion in completions),
            finished=all(completion.finish_reason is not None for completion in completions),
            prompt_logprobs=None if count is None else (None, *(fake_logprobs(each, count) for each in token_ids[1:])),
        )

    async def abort(self, request_id: str) -> None:
        run = self._runs.get(request_id)
        if run is not None:
            self._end(run, RequestAbortedError(f"request {request_id!r} was aborted"))

    def check_known_grammar(self, wanted: StructuredOutputsParams, client: str = "") -> bool:
        return self._grammars.check_known(wanted, client)

    def check_grammar(self, wanted: StructuredOutputsParams, client: str = "") -> None:
        """Compiled for its own vocabulary; what it says has that form only if its reply has."""
        self._grammars.check(wanted, client)

    def check_can_serve(self) -> None:
        if self.is_shut_down:
            raise EngineShutdownError("the engine is shut down")
        if self._death is not None:
            raise self._death

    async def wait_until_given_up(self) -> None:
        await self._has_given_up.wait()

    def _registry_or_refuse(self) -> LoRARegistry:
        if self.registry is None:
            raise LoraDisabledError("LoRA is off here")
        return self.registry

    async def on_registry(
        self, verb: Callable[Concatenate[LoRARegistry, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        registry = self._registry_or_refuse()
        self.check_can_serve()
        return await asyncio.to_thread(partial(verb, registry, *args, **kwargs))

    def health(self) -> FakeHealth:
        if self.is_shut_down:
            return FakeHealth(False, "shutting down")
        num_serving = sum(each.is_serving for each in self.reports) if self.reports else 1
        num_released = sum(each.is_released for each in self.reports)
        message = "" if self._death is None else str(self._death)
        starting = tuple(each.name for each in self.reports if not each.is_serving and not each.is_released)
        return FakeHealth(self._death is None, message, num_serving, num_released, starting)

    @property
    def num_runners(self) -> int:
        return len(self.devices)

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(each.device for each in self.reports) or ("cpu",)

    async def runner_reports(self) -> Sequence[RunnerReport]:
        return self.reports or (RunnerReport("0", "cpu", stats=await self.stats()),)

    async def stats(self) -> EngineStats:
        if self._death is not None:
            raise self._death
        adapter_ids = {adapter_id for run in self._runs.values() for adapter_id in run.adapter_ids}
        return EngineStats(
            num_running=len(self._runs),
            running_adapter_ids=tuple(sorted(adapter_ids)),
            step_times=StepTimes(self._num_steps),
            memory=self.memory,
        )

    def record_event(self, event: EngineEvent) -> None:
        self.events.add(event)
        if self._profile is not None:
            self._profile.see(event)

    @property
    def is_profiling(self) -> bool:
        return self._profile is not None

    async def start_lora_profiling(self, targets: ServiceTargets | None = None) -> None:
        check_not_profiling(self._profile)
        before = await self.stats()
        self._profile = LoraProfile(partial(address_of, self.registry), targets)
        self._profile.begin(before)

    async def generate_lora_performance_report(self) -> LoraPerformanceReport:
        """With what is in memory; requests and steps are not recorded here."""
        profile = check_profiling(self._profile)
        stats = await self.stats()
        adapters = await self.list_adapters()
        self._profile = None
        return profile.report(stats, StepProfile(), Kernels("fake", self.model_info.backend), footprints_of(adapters))

    def limit_tenants(self, quotas: Mapping[str, MemoryQuota]) -> None:
        self.store.set_quotas(quotas)

    def open_state(self) -> sa.Engine | None:
        """A test may put one there."""
        return self.state

    async def shutdown(self) -> None:
        self.is_shut_down = True
        self._grammars.close()
        self._updates.close()
        self.events.close()
        for run in self._runs.values():
            self._end(run, EngineShutdownError("the engine is shut down"))
