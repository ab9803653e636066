"""The engine for servers: async generators over engine processes, with adapters by name.

Names, versions, references, fetching and checking of adapters live here, in front of the engine, so that a bad file
never reaches it. There is one process, or several (frontend/runners/). When one dies, the requests in flight there end
with an error, it is started again, and knows its adapters again under the same ids: they are loaded by need."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

from loraplex.adapter_store import AdapterStore, MemoryQuota
from loraplex.adapters.registry import (
    DatabaseHealth,
    HeldAdapters,
    LoRARef,
    LoRARegistry,
    SharedJournal,
    start_thread,
)
from loraplex.adapters.remote.fetched import MAX_FETCHED_BYTES
from loraplex.adapters.sources.by_need import LoadsByNeed
from loraplex.adapters.sources.uploads import DEFAULT_LIMITS, UploadLimits
from loraplex.config import EngineConfig, RegistryDatabase
from loraplex.core import AdapterChoice, EngineInfo, LoRAMix, LoRARequest, RequestOutput, SamplingParams, TokenOutput
from loraplex.errors import (
    EngineDeadError,
    EngineOverloadedError,
    EngineShutdownError,
    LoraplexError,
    RequestAbortedError,
)
from loraplex.events import Detail, EngineEvent, EventKind
from loraplex.frontend import messages as msg
from loraplex.frontend.adapter_updates import AdapterUpdates
from loraplex.frontend.adapter_verbs import AdapterVerbs, logged_load
from loraplex.frontend.client import EngineClient, ProgressCallback
from loraplex.frontend.event_hub import EventHub
from loraplex.frontend.frontend import (
    Front,
    KeptFiles,
    adapter_ref,
    choice_of,
    in_daemon_thread,
    lora_requests_of,
    make_front,
    open_journal,
)
from loraplex.frontend.lora_profiling import address_of, check_not_profiling, check_profiling, footprints_of, kernels_of
from loraplex.frontend.runners.runner import Runner
from loraplex.frontend.runners.runners import Runners
from loraplex.frontend.runners.settings import RunnerSettings
from loraplex.frontend.runners.streams import Mover, OutputStream
from loraplex.frontend.store import RemoteStore
from loraplex.frontend.supervisor import Supervision
from loraplex.metrics import EngineStats, MemoryReport, RunnerReport
from loraplex.models.source import resolve_model
from loraplex.performance.profile import LoraProfile
from loraplex.performance.report import LoraPerformanceReport
from loraplex.performance.requests import ServiceTargets
from loraplex.performance.steps import StepProfile
from loraplex.sampling_params import NO_CLAIM, Claim
from loraplex.structured.params import StructuredOutputsParams
from loraplex.tenants.fair_limit import FairLimit
from loraplex.text.processor import PreparedRequest
from loraplex.text.request_text import RequestText
from loraplex.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import sqlalchemy as sa

    from loraplex.adapters.journal import SqliteJournal
    from loraplex.adapters.journal.postgres_journal import PostgresJournal

logger = logging.getLogger(__name__)

NUM_VERB_THREADS = 160  # made when needed; nearly all of them wait, for a fetch or for one another
NUM_VIEW_THREADS = 2
VIEWS = frozenset({LoRARegistry.describe, LoRARegistry.list_adapters})

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The base model as clients see it. backend: which kernels run, in words; form: as EngineInfo's. longest_len: the
    longest sequence in tokens, of the base or of an adapter with a longer context."""

    served_model_name: str
    root: str
    max_model_len: int
    vocab_size: int
    dtype: str
    backend: str
    longest_len: int
    form: str


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Whether requests can be served, and if not, why. num_released: of the runners, those that the load does not
    need; starting: names of those that are wanted and take no requests. database: of names that several servers
    share."""

    is_alive: bool
    message: str = ""
    num_serving: int = 1
    num_released: int = 0
    starting: tuple[str, ...] = ()
    database: DatabaseHealth | None = None


class AsyncEngine(AdapterVerbs):
    """Serves any mix of adapters from engine processes. Make one with `await AsyncEngine.start(config)`.

    generate: an async iterator of cumulative `RequestOutput`s; leaving it early, or `abort`, ends the request in the
    engine. Adapter verbs (docs/http.md) never hold up a request, and their errors are the caller's alone."""

    def __init__(
        self,
        config: EngineConfig,
        served_model_name: str | None,
        on_progress: ProgressCallback | None,
        journal: SqliteJournal | PostgresJournal | None = None,
        supervision: Supervision | None = None,
        runners: RunnerSettings | None = None,
    ) -> None:
        self.config = config
        self._journal = journal
        self._served_model_name = served_model_name or config.model
        self._runners = Runners(
            config,
            runners or RunnerSettings(),
            self._on_outputs,
            self._on_death,
            self._restore,
            on_progress,
            self.record_event,
            supervision,
        )
        self.events = EventHub(first_id=int(time.time() * 1000))
        self._profile: LoraProfile | None = None
        self._is_shut_down = False
        self._streams: dict[str, OutputStream] = {}
        self._mover = Mover(
            self._streams,
            self._runners.place_at,
            lambda request_id: self._front.outputs.unfinished(request_id),
            lambda stream: self._front.is_forced_out(ref.adapter_id for ref in stream.refs),
            self._fail_stream,
        )
        self._places = FairLimit(config.max_waiting_requests + config.max_num_seqs)  # of completions
        self._store = RemoteStore(self._runners.call_store, asyncio.get_running_loop())
        self._verbs = ThreadPoolExecutor(NUM_VERB_THREADS, thread_name_prefix="adapter-verb")
        self._views = ThreadPoolExecutor(NUM_VIEW_THREADS, thread_name_prefix="adapter-view")
        self._restores = ThreadPoolExecutor(1, thread_name_prefix="adapter-restore")  # never behind verbs that wait
        self._at_end = ExitStack()
        # Set by start(), once the model is known.
        self.model_info: ModelInfo
        self._front: Front

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._front.tokenizer

    def text_of(self, ref: LoRARef | None) -> RequestText:
        """What reads and writes the requests of an adapter's version; None: of the base model."""
        return self._front.text_of(ref)

    def known_text(self, ref: LoRARef | None) -> RequestText | None:
        """`text_of` at once; None for what has to be made first."""
        return self._front.texts.known(None if ref is None else ref.text)

    def hold_adapters(self, choice: AdapterChoice, num_prompts: int = 1) -> HeldAdapters:
        """The adapters of a request whose prompts are yet to be encoded. Raises as `generate` does."""
        return self._front.hold_adapters(choice, num_prompts)

    def check_known_grammar(self, wanted: StructuredOutputsParams, client: str = "") -> bool:
        """`check_grammar` at once; False where it would take time."""
        return self._front.forms.check_known(wanted, client)

    def check_grammar(self, wanted: StructuredOutputsParams, client: str = "") -> None:
        """Raises InvalidRequestError for a form that outputs cannot have. It may take seconds: in a thread."""
        self._front.forms.check(wanted, client)

    @property
    def registry(self) -> LoRARegistry | None:
        return self._front.registry

    @property
    def updates(self) -> AdapterUpdates:
        return self._front.updates_or_refuse()

    @property
    def by_need(self) -> LoadsByNeed:
        return self._front.by_need_or_refuse()

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        served_model_name: str | None = None,
        base_names: Iterable[str] = (),
        on_progress: ProgressCallback | None = None,
        state_dir: str | Path | None = None,
        database: RegistryDatabase | None = None,
        supervision: Supervision | None = None,
        runners: RunnerSettings | None = None,
        upload_limits: UploadLimits = DEFAULT_LIMITS,
        max_fetched_bytes: int = MAX_FETCHED_BYTES,
    ) -> AsyncEngine:
        """Start the engine processes and wait until their model is ready.

        state_dir: where the names and all that belongs to them outlive the process; those that are there resolve when
        this returns. database: the same, shared with other servers. supervision: how a process is watched. runners: how
        many there are, and where (None: one). upload_limits: of what clients send. max_fetched_bytes: of what requests
        have fetched. Raises ConfigError when state directory or database cannot be used."""
        fetched = await _with_fetched_model(config.with_real_roots())
        if fetched.merge_adapter is not None:
            fetched = await in_daemon_thread(
                "fetch adapter", partial(_with_fetched_adapter, fetched, fetched.merge_adapter)
            )
        journal = await asyncio.to_thread(open_journal, config, state_dir, database)
        engine = cls(fetched, served_model_name or config.model, on_progress, journal, supervision, runners)
        files = KeptFiles.of(state_dir, upload_limits, max_fetched_bytes)
        try:
            await engine._runners.start()
            engine._make_front(base_names, files)
            await asyncio.to_thread(engine._front.forms.prepare)
            if journal is not None:
                await asyncio.to_thread(engine._front.resume, journal)
            engine._runners.consolidate(engine._streams, engine._mover, lambda: engine._profile is not None)
        except BaseException:
            await engine.shutdown()
            raise
        return engine

    def _make_front(self, base_names: Iterable[str], files: KeptFiles) -> None:
        info = self.info
        for choice in info.choices:  # the engine process logs warnings alone
            logger.info("%s", choice)
        self.model_info = ModelInfo(
            self._served_model_name,
            info.model_path,
            info.max_model_len,
            info.vocab_size,
            info.dtype,
            info.backend_description,
            max(info.max_model_len, 0 if info.long_contexts is None else info.long_contexts.longest),
            info.form,
        )
        self._front = make_front(
            self.config,
            info,
            cast(AdapterStore, self._store),
            start_thread,
            served_model_name=self._served_model_name,
            base_names=base_names,
            journal=self._journal,
            on_change=self._on_registry_change,
            files=files,
        )
        self._at_end.callback(self._front.close)

    def _on_registry_change(self, kind: EventKind, name: str, text: str, details: Mapping[str, Detail]) -> None:
        """A verb's thread tells what it did."""
        self.record_event(EngineEvent(kind, time.time(), text, adapter_name=name, details=details))

    async def on_registry(
        self, verb: Callable[Concatenate[LoRARegistry, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """In a thread, since a verb may wait for a fetch, a load or another verb. Not while the engine is being
        restarted: it would meet its adapters half restored."""
        run: Callable[..., Any] = logged_load if verb is LoRARegistry.load else verb
        work = partial(copy_context().run, run, self._front.registry_or_refuse(), *args, **kwargs)
        self.check_can_serve()
        threads = self._views if verb in VIEWS else self._verbs
        result: T = await asyncio.get_running_loop().run_in_executor(threads, work)
        return result

    # --------------------------------------------------------------------------------------------------------- requests

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
    ) -> AsyncIterator[RequestOutput]:
        """Cumulative outputs of one prompt; `model` names an adapter or a mix, None the base.

        held: what `hold_adapters(model)` gave before the prompt was encoded. on_output: is given each output when it
        comes, also those that a slow reader never sees. Raises any LoraplexError."""
        self.check_can_serve()
        if lora_request is not None:
            model = choice_of(lora_request)
            for each in lora_requests_of(lora_request):
                await self._load_requested(each)
        refs = self._front.acquire(model) if held is None else held.take()
        try:
            prepared = self._front.inputs.prepare(
                request_id,
                prompt,
                params,
                adapter=adapter_ref(refs, model),
                lora_request=lora_request,
                cache_salt=cache_salt,
                claim=claim,
                add_special_tokens=add_special_tokens,
                text=await self._text_for(refs, held),
            )
            stream = self._submit(prepared, refs, on_output)
        except BaseException:
            self._front.release(refs)
            raise
        try:
            async for output in stream:
                yield output
        finally:
            if self._streams.get(request_id) is stream:  # else it has ended, and the id may be another request's
                await self.abort(request_id)

    async def _text_for(self, refs: tuple[LoRARef, ...], held: HeldAdapters | None) -> RequestText:
        """An adapter's own may have to be made first, which takes milliseconds: in a thread."""
        if held is not None and isinstance(held.text, RequestText):
            return held.text
        ref = refs[0] if len(refs) == 1 else None
        return await asyncio.to_thread(self.text_of, ref) if (known := self.known_text(ref)) is None else known

    def _submit(
        self,
        prepared: PreparedRequest,
        refs: tuple[LoRARef, ...],
        on_output: Callable[[RequestOutput], None] | None,
    ) -> OutputStream:
        if refs and self._front.is_forced_out(ref.adapter_id for ref in refs):
            names = ", ".join(repr(ref.adapter_name) for ref in refs)
            raise RequestAbortedError(f"adapter {names} was unloaded by force before this request began")
        message = msg.AddRequests.of(prepared.children)
        tenant, num_completions = prepared.children[0].claim.tenant, len(prepared.children)
        self._front.outputs.add(prepared)
        placement, has_places = None, False
        try:
            has_places = self._places.take(tenant, num_completions)
            if not has_places:
                raise EngineOverloadedError(
                    f"{self._places.total} requests are running or waiting, each completion counted, and "
                    f"{self._places.limit} are the limit; try again later (--max-waiting-requests)"
                )
            placement = self._runners.place(message, max((ref.max_rank for ref in refs), default=0))
            placement.runner.client.send(message)
        except BaseException:
            if placement is not None:
                placement.end()
            if has_places:
                self._places.give_back(tenant, num_completions)
            self._front.outputs.remove(prepared.request_id)
            raise
        on_end = partial(self._end_stream, refs, tenant, num_completions)
        stream = OutputStream(prepared.request_id, refs, placement, on_end, on_output)
        self._streams[prepared.request_id] = stream
        return stream

    async def _load_requested(self, request: LoRARequest) -> None:
        """Load an adapter that a request brings with it, unless it is there."""
        self._front.check_lora_request(request)
        path, is_reload = self._front.source_of(request), request.load_inplace
        await self.load_adapter(request.lora_name, path, lora_int_id=request.lora_int_id, load_inplace=is_reload)

    async def abort(self, request_id: str) -> None:
        """End a request; unknown and finished ones are passed over. Its iterator ends, with an output or an error."""
        stream = self._streams.pop(request_id, None)
        running = self._front.outputs.remove(request_id)
        if stream is not None:
            stream.placement.runner.abort(running)
            stream.fail(RequestAbortedError(f"request {request_id!r} was aborted"))

    def _end_stream(self, refs: tuple[LoRARef, ...], tenant: str, num_completions: int, runner: Runner | None) -> None:
        give_back = partial(self._places.give_back, tenant, num_completions)
        give_back() if runner is None else runner.client.when_read(give_back)
        self._front.release(refs)

    def _fail_stream(self, stream: OutputStream, error: LoraplexError) -> None:
        self._front.outputs.remove(stream.request_id)
        self._streams.pop(stream.request_id).fail(error)

    def _on_outputs(self, runner: Runner, outputs: tuple[TokenOutput, ...]) -> None:
        for processed in self._front.outputs.process_step(outputs):
            runner.abort(processed.abort_ids)
            stream = self._streams.get(processed.request_id)
            if processed.is_last:
                self._streams.pop(processed.request_id, None)
            if stream is not None and processed.error is not None:
                stream.fail(processed.error)
            elif stream is not None and processed.output is not None:
                stream.put(processed.output)

    @property
    def num_unfinished(self) -> int:
        return len(self._streams)

    # ------------------------------------------------------------------------------------------------- life and death

    @property
    def _engine(self) -> EngineClient:
        return self._runners.first.client

    @property
    def info(self) -> EngineInfo:
        return self._runners.info

    async def call(self, message_type: type, *values: Any) -> Any:
        """Call the first engine process; raises what it answers with."""
        return await self._runners.first.call(message_type, *values)

    @property
    def num_runners(self) -> int:
        return len(self._runners)

    @property
    def devices(self) -> tuple[str, ...]:
        """Of each runner, as torch names it."""
        return tuple(runner.supervisor.info.device for runner in self._runners.all)

    def health(self) -> EngineHealth:
        if self._is_shut_down:
            return EngineHealth(False, "shutting down")
        runners, journal, death = self._runners, self._journal, self._runners.death
        database = journal.health() if isinstance(journal, SharedJournal) else None
        reason = "" if death is None else str(death)
        return EngineHealth(
            death is None, reason, runners.num_serving, runners.num_released, runners.starting, database
        )

    @property
    def engine_pid(self) -> int | None:
        return self._engine.pid

    @property
    def engine_pids(self) -> tuple[int | None, ...]:
        """Of all runners."""
        return tuple(runner.client.pid for runner in self._runners.all)

    async def stats(self) -> EngineStats:
        """Of all runners together."""
        return await self._runners.stats()

    async def runner_reports(self) -> Sequence[RunnerReport]:
        """What each runner is and does; one that does not answer has no figures."""
        return await self._runners.reports()

    async def memory_report(self) -> MemoryReport:
        return (await self.stats()).memory

    def record_event(self, event: EngineEvent) -> None:
        """Add an event of the server's own to those of the engine process. Any thread may."""
        self.events.add(event)
        if self._profile is not None:
            self._profile.see(event)

    def limit_tenants(self, quotas: Mapping[str, MemoryQuota]) -> None:
        self._runners.limit_tenants(quotas)

    @property
    def is_behind(self) -> bool:
        return self._runners.are_behind

    @property
    def max_waiting_requests(self) -> int:
        return self.config.max_waiting_requests

    @property
    def is_profiling(self) -> bool:
        """Whether every request that begins now is recorded."""
        return self._front.outputs.recorder is not None

    async def start_lora_profiling(self, targets: ServiceTargets | None = None) -> None:
        """Record requests, steps, events until `generate_lora_performance_report`. InvalidRequestError: one runs."""
        check_not_profiling(self._profile)
        profile = self._profile = LoraProfile(partial(address_of, self.registry), targets)
        try:
            profile.begin(await self.stats())
            await self._runners.call(msg.StartProfile)
        except BaseException:
            self._profile = None
            raise
        self._front.outputs.recorder = profile.requests

    async def generate_lora_performance_report(self) -> LoraPerformanceReport:
        """End the profile and say what it found. InvalidRequestError when none runs. When the engine does not answer,
        it goes on."""
        profile = check_profiling(self._profile)
        adapters = await self.list_adapters()
        stats = await self.stats()
        steps = StepProfile.of_all(await self._runners.call(msg.StopProfile))
        self._profile = self._front.outputs.recorder = None
        report = partial(profile.report, stats, steps, kernels_of(self.info), footprints_of(adapters))
        return await asyncio.get_running_loop().run_in_executor(self._views, report)

    async def check_integrity(self) -> None:
        """AssertionError or EngineError when names, references or memory are inconsistent. For tests, the doctor."""
        if self.registry is not None:
            self.registry.check_integrity()
        await self._runners.call(msg.CheckIntegrity)

    def check_can_serve(self) -> None:
        if self._is_shut_down:
            raise EngineShutdownError("the server is shutting down; send the request to another one")
        if self._runners.death is not None:
            raise _again(self._runners.death)

    async def wait_until_given_up(self) -> None:
        """Return when every engine process failed too often and is not restarted any more."""
        await self._runners.wait_until_given_up()

    def _on_death(self, runner: Runner, error: EngineDeadError) -> None:
        self._end_streams(partial(_again, error), runner)

    def _end_streams(self, make_error: Callable[[], LoraplexError], runner: Runner | None = None) -> None:
        """Of one runner; None: of all."""
        for stream in list(self._streams.values()):
            if runner is None or stream.placement.runner is runner:
                self._fail_stream(stream, make_error())

    async def _restore(self, runner: Runner) -> None:
        """Give a new process its adapters again; a profile goes on."""
        if self._profile is not None:
            await runner.call(msg.StartProfile)
        if self.registry is None:
            return
        if len(self._runners) > 1:
            await self._runners.join(runner)
        else:
            await asyncio.get_running_loop().run_in_executor(self._restores, self.registry.restore)

    def open_state(self) -> sa.Engine | None:
        """A further way into the journal's database, for what is kept beside names; None: there is no journal."""
        return None if self._journal is None else self._journal.open_state()

    async def shutdown(self) -> None:
        """End requests with an error, then the engine process."""
        self._is_shut_down = True
        self.events.close()
        self._store.close()
        self._end_streams(partial(EngineShutdownError, "the server is shutting down"))
        await self._runners.stop()
        for threads in (self._verbs, self._views, self._restores):
            threads.shutdown(wait=False, cancel_futures=True)
        self._at_end.close()
        if self._journal is not None:
            await asyncio.to_thread(self._journal.close)


async def _with_fetched_model(config: EngineConfig) -> EngineConfig:
    """The model as a local directory. The hub is asked by this process: the engine's has no token, and starts again
    without the hub."""
    if Path(config.model).expanduser().is_dir():
        return config
    path = await in_daemon_thread("fetch model", partial(resolve_model, config.model, config.revision))
    return replace(config, model=str(path))


def _with_fetched_adapter(config: EngineConfig, path_or_id: str) -> EngineConfig:
    """What is merged as a local directory, with its digest: an engine that starts again merges the same."""
    from loraplex.adapters.merging.base import fetched

    directory, digest = fetched(path_or_id)
    return replace(config, merge_adapter=directory, merge_adapter_digest=digest)


def _again(error: EngineDeadError) -> EngineDeadError:
    """An error of its own for each request that meets it."""
    return EngineDeadError(str(error), error.retry_after_s)
