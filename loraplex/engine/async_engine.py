"""The engine for servers: async generators over engine processes, with adapters by name.

Names, versions, references, fetching and checking of adapters live here, in front of the engine, so that a bad file never reaches it.
Engines are addressed through a list (one today). When a process dies, the requests in flight end with an error, it is started again,
and its adapters are loaded again under the same ids.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from loraplex.adapters.registry import (
    AdapterInfo,
    LoadResult,
    LoRARef,
    LoRARegistry,
    SwitchResult,
    UnloadResult,
    start_thread,
)
from loraplex.config import EngineConfig
from loraplex.core import (
    AdapterResidency,
    AdapterSpec,
    AddOutcome,
    EngineInfo,
    LoRARequest,
    RequestOutput,
    SamplingParams,
    TokenOutput,
)
from loraplex.engine import messages as msg
from loraplex.engine.client import EngineClient, ProgressCallback
from loraplex.engine.front import Front, adapter_ref, make_front
from loraplex.engine.processor import PreparedRequest
from loraplex.engine.tokenizer import Tokenizer
from loraplex.errors import (
    EngineDeadError,
    EngineOverloadedError,
    EngineShutdownError,
    LoraplexError,
    RequestAbortedError,
)
from loraplex.metrics import EngineStats

logger = logging.getLogger(__name__)

NUM_VERB_THREADS = 16
MAX_DEATHS = 3
DEATHS_WINDOW_S = 60.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The base model as clients see it."""

    served_model_name: str
    root: str
    max_model_len: int
    vocab_size: int
    dtype: str
    backend: str


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Whether requests can be served, and if not, why."""

    is_alive: bool
    message: str = ""


class _Stream:
    """The latest output of one request. Outputs are cumulative, so a slow reader skips some and memory stays bounded."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._latest: RequestOutput | None = None
        self._error: LoraplexError | None = None
        self._has_news = asyncio.Event()
        self._on_end: Callable[[], None] | None = on_end

    def put(self, output: RequestOutput) -> None:
        self._latest = output
        self._has_news.set()
        if output.finished:
            self.end()

    def fail(self, error: LoraplexError) -> None:
        self._error = error
        self._has_news.set()
        self.end()

    def end(self) -> None:
        """Return what the request held, once."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        is_finished = False
        while not is_finished:
            await self._has_news.wait()
            self._has_news.clear()
            if self._latest is not None:
                output, self._latest = self._latest, None
                is_finished = output.finished
                yield output
            if self._error is not None and not is_finished:
                raise self._error


class _RemoteStore:
    """`AdapterStore` over an engine process, for the registry's worker threads. Never called on the event loop."""

    def __init__(self, engine: AsyncEngine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop

    def _call(self, message_type: type, *values: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(self._engine.call(message_type, *values), self._loop).result()

    def add_adapter(self, spec: AdapterSpec) -> AddOutcome:
        outcome: AddOutcome = self._call(msg.AddAdapter, spec)
        return outcome

    def drop_adapter(self, adapter_id: int) -> None:
        try:
            self._call(msg.DropAdapter, adapter_id)
        except EngineDeadError:
            logger.info("adapter %d went with the engine process", adapter_id)

    def promote_adapter(self, adapter_id: int) -> AddOutcome:
        outcome: AddOutcome = self._call(msg.PromoteAdapter, adapter_id)
        return outcome

    def evict_adapter(self, adapter_id: int) -> bool:
        return bool(self._call(msg.EvictAdapter, adapter_id))

    def pin_adapter(self, adapter_id: int) -> bool:
        return bool(self._call(msg.PinAdapter, adapter_id))

    def unpin_adapter(self, adapter_id: int) -> bool:
        return bool(self._call(msg.UnpinAdapter, adapter_id))

    def abort_adapter(self, adapter_id: int) -> int:
        return int(self._call(msg.AbortAdapter, adapter_id))

    def list_adapters(self) -> Sequence[AdapterResidency]:
        residencies: tuple[AdapterResidency, ...] = self._call(msg.ListAdapters)
        return residencies


class AsyncEngine:
    """Serves any mix of adapters from engine processes. Make one with `await AsyncEngine.start(config)`.

    generate: an async iterator of cumulative `RequestOutput`s; leaving it early, or `abort`, ends the request in the engine.
    Adapter verbs are those of SEMANTICS: they never hold up a request, and their errors are the caller's alone.
    """

    def __init__(
        self, config: EngineConfig, served_model_name: str | None, on_progress: ProgressCallback | None
    ) -> None:
        self.config = config
        self._served_model_name = served_model_name or config.model
        self._on_progress = on_progress
        self._engines: list[EngineClient] = []
        self._deaths: list[float] = []
        self._death: EngineDeadError | None = None
        self._restart: asyncio.Task[None] | None = None
        self._is_shut_down = False
        self._streams: dict[str, _Stream] = {}
        self._verbs = ThreadPoolExecutor(NUM_VERB_THREADS, thread_name_prefix="adapter-verb")
        # Set by start(), once the model is known.
        self.info: EngineInfo
        self.model_info: ModelInfo
        self._front: Front

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._front.tokenizer

    @property
    def registry(self) -> LoRARegistry | None:
        return self._front.registry

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        served_model_name: str | None = None,
        base_names: Iterable[str] = (),
        adapter_roots: Sequence[str | Path] | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> AsyncEngine:
        """Start the engine process and wait until its model is ready. `adapter_roots` None: adapters may be anywhere."""
        engine = cls(config, served_model_name, on_progress)
        try:
            await engine._start_process()
            engine._make_front(base_names, adapter_roots)
        except BaseException:
            await engine.shutdown()
            raise
        return engine

    async def _start_process(self) -> None:
        client = EngineClient(self.config, self._on_outputs, self._on_death, self._on_progress)
        self._engines = [client]
        self.info = await client.start()

    def _make_front(self, base_names: Iterable[str], adapter_roots: Sequence[str | Path] | None) -> None:
        info = self.info
        self.model_info = ModelInfo(
            self._served_model_name, info.model_path, info.max_model_len, info.vocab_size, info.dtype, info.backend
        )
        self._front = make_front(
            self.config,
            info,
            _RemoteStore(self, asyncio.get_running_loop()),
            start_thread,
            served_model_name=self._served_model_name,
            base_names=base_names,
            adapter_roots=adapter_roots,
        )

    # --------------------------------------------------------------------------------------------------------- requests

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str,
        *,
        model: str | None = None,
        lora_request: LoRARequest | None = None,
        cache_salt: str = "",
        add_special_tokens: bool = True,
    ) -> AsyncIterator[RequestOutput]:
        """Cumulative outputs of one prompt; `model` names an adapter, None the base. Raises LoraplexError of any kind."""
        self._check_can_serve()
        if lora_request is not None:
            model = await self._load_requested(lora_request)
        ref = None if model is None else self._front.registry_or_refuse().acquire(model)
        try:
            prepared = self._front.inputs.prepare(
                request_id,
                prompt,
                params,
                adapter=adapter_ref(ref),
                lora_request=lora_request,
                cache_salt=cache_salt,
                add_special_tokens=add_special_tokens,
            )
            stream = self._submit(prepared, ref)
        except BaseException:
            self._release(ref)
            raise
        try:
            async for output in stream:
                yield output
        finally:
            await self.abort(request_id)

    def _submit(self, prepared: PreparedRequest, ref: LoRARef | None) -> _Stream:
        if len(self._streams) >= self.config.max_waiting_requests + self.config.max_num_seqs:
            raise EngineOverloadedError(
                f"{len(self._streams)} requests are running or waiting, the limit; try again later (--max-waiting-requests)"
            )
        self._front.outputs.add(prepared)
        stream = _Stream(partial(self._release, ref))
        self._streams[prepared.request_id] = stream
        try:
            for request in prepared.children:
                self._engine.send(msg.AddRequest(request))
        except LoraplexError:
            self._forget(prepared.request_id)
            raise
        return stream

    async def _load_requested(self, request: LoRARequest) -> str:
        """Load the adapter that a request brings with it, unless it is there; returns its name."""
        self._front.check_lora_request(request)
        await self.load_adapter(
            request.lora_name, request.lora_path, lora_int_id=request.lora_int_id, load_inplace=request.load_inplace
        )
        return request.lora_name

    async def abort(self, request_id: str) -> None:
        """End a request; unknown and finished ones are passed over. Its iterator ends with its last output or an error."""
        stream = self._streams.pop(request_id, None)
        running = self._front.outputs.remove(request_id)
        if running and self._engine.is_alive:
            self._engine.send(msg.AbortRequests(running))
        if stream is not None:
            stream.fail(RequestAbortedError(f"request {request_id!r} was aborted"))

    def _forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        self._front.outputs.remove(request_id)

    def _release(self, ref: LoRARef | None) -> None:
        if ref is not None and self.registry is not None:
            self.registry.release(ref)

    def _on_outputs(self, outputs: tuple[TokenOutput, ...]) -> None:
        for token_output in outputs:
            processed = self._front.outputs.process(token_output)
            if processed is None:
                continue
            if processed.abort_ids and self._engine.is_alive:
                self._engine.send(msg.AbortRequests(processed.abort_ids))
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

    # --------------------------------------------------------------------------------------------------------- adapters

    def has_adapter(self, name: str) -> bool:
        return self.registry is not None and name in self.registry.names()

    async def load_adapter(
        self,
        name: str,
        path: str,
        *,
        lora_int_id: int | None = None,
        load_inplace: bool = False,
        is_pinned: bool = False,
    ) -> LoadResult:
        load = partial(
            self._front.registry_or_refuse().load,
            name,
            path,
            lora_int_id=lora_int_id,
            load_inplace=load_inplace,
            is_pinned=is_pinned,
        )
        return await self._in_verb_thread(load)

    async def unload_adapter(self, name: str, deadline_s: float | None = None, force: bool = False) -> UnloadResult:
        registry = self._front.registry_or_refuse()
        return await self._in_verb_thread(partial(registry.unload, name, deadline_s=deadline_s, force=force))

    async def switch_adapter(
        self,
        old: str,
        new: str,
        new_path: str | None = None,
        deadline_s: float | None = None,
        force: bool = False,
    ) -> SwitchResult:
        registry = self._front.registry_or_refuse()
        switch = partial(registry.switch, old, new, new_path=new_path, deadline_s=deadline_s, force=force)
        return await self._in_verb_thread(switch)

    async def pin_adapter(self, name: str) -> bool:
        return await self._in_verb_thread(partial(self._front.registry_or_refuse().pin, name))

    async def unpin_adapter(self, name: str) -> bool:
        return await self._in_verb_thread(partial(self._front.registry_or_refuse().unpin, name))

    async def evict_adapter(self, name: str) -> bool:
        return await self._in_verb_thread(partial(self._front.registry_or_refuse().evict, name))

    async def preload_adapter(self, name: str) -> AddOutcome:
        return await self._in_verb_thread(partial(self._front.registry_or_refuse().preload, name))

    async def describe_adapter(self, name: str) -> AdapterInfo:
        return await self._in_verb_thread(partial(self._front.registry_or_refuse().describe, name))

    async def list_adapters(self) -> list[AdapterInfo]:
        return [] if self.registry is None else await self._in_verb_thread(self.registry.list_adapters)

    async def _in_verb_thread(self, verb: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._verbs, verb)

    # ------------------------------------------------------------------------------------------------- life and death

    @property
    def _engine(self) -> EngineClient:
        return self._engines[0]

    async def call(self, message_type: type, *values: Any) -> Any:
        """Call the engine; raises what it answers with."""
        return await self._engine.call(message_type, *values)

    def health(self) -> EngineHealth:
        if self._is_shut_down:
            return EngineHealth(False, "shutting down")
        return EngineHealth(self._death is None, "" if self._death is None else str(self._death))

    @property
    def engine_pid(self) -> int | None:
        return self._engine.pid

    async def stats(self) -> EngineStats:
        stats: EngineStats = await self.call(msg.GetStats)
        return stats

    async def check_integrity(self) -> None:
        """Raise AssertionError or EngineError when names, references or memory do not add up. For tests and `loraplex doctor`."""
        if self.registry is not None:
            self.registry.check_integrity()
        await self.call(msg.CheckIntegrity)

    def _check_can_serve(self) -> None:
        if self._is_shut_down:
            raise EngineShutdownError("the server is shutting down; send the request to another one")
        if self._death is not None:
            raise self._death

    def _on_death(self, error: EngineDeadError) -> None:
        now = time.monotonic()
        self._deaths = [death for death in self._deaths if now - death < DEATHS_WINDOW_S] + [now]
        is_hopeless = len(self._deaths) >= MAX_DEATHS
        outlook = (
            f"it died {MAX_DEATHS} times in {DEATHS_WINDOW_S:.0f} s and stays down"
            if is_hopeless
            else "it is being restarted"
        )
        self._death = EngineDeadError(f"{error}; {outlook}")
        logger.error("%s", self._death)
        for request_id in list(self._streams):
            stream = self._streams.pop(request_id)
            self._front.outputs.remove(request_id)
            stream.fail(self._death)
        if not is_hopeless and not self._is_shut_down:
            self._restart = asyncio.get_running_loop().create_task(self._start_again())

    async def _start_again(self) -> None:
        dead = self._engines[0]
        try:
            await dead.stop()
            await self._start_process()
            if self.registry is not None:
                failed = await self._in_verb_thread(self.registry.restore)
                for name, error in failed.items():
                    logger.error("adapter %r could not be loaded again: %s", name, error)
        except LoraplexError as error:
            self._death = EngineDeadError(f"the engine process could not be restarted: {error}")
            logger.error("%s", self._death)
            return
        self._death = None
        logger.warning(
            "the engine process is back, with %d adapters", 0 if self.registry is None else len(self.registry.names())
        )

    async def shutdown(self) -> None:
        """End requests with an error, then the engine process."""
        self._is_shut_down = True
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.gather(self._restart, return_exceptions=True)
        for request_id in list(self._streams):
            self._streams.pop(request_id).fail(EngineShutdownError("the server is shutting down"))
        for engine in self._engines:
            await engine.stop()
        self._verbs.shutdown(wait=False, cancel_futures=True)
