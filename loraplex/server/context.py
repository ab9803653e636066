"""What all routes share, made once by `create_app`."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from starlette.requests import ClientDisconnect, Request

from loraplex.adapters.registry import LoRARef
from loraplex.adapters.registry.adapter_name import address_text
from loraplex.adapters.sources.named import NamedSources
from loraplex.core import AdapterChoice
from loraplex.errors import InvalidRequestError
from loraplex.frontend.making import AdapterMaker
from loraplex.processes.bounded import NUM_PROCESSES
from loraplex.server.api_error import ApiError
from loraplex.server.audit import Audit
from loraplex.server.auth import KeyRing, caller_of
from loraplex.server.body import BodyReader
from loraplex.server.config import ServerConfig, output_folder
from loraplex.server.connections import Connections
from loraplex.server.engine_surface import EngineSurface, TextSurface
from loraplex.server.event_streams import EventStreams
from loraplex.server.generation import Generator, InFlight
from loraplex.server.listener import max_connections
from loraplex.server.metrics_page import MetricsPage
from loraplex.server.model_names import ModelNames, Target
from loraplex.server.off_loop import OffLoop
from loraplex.server.pacing import Turns
from loraplex.server.prompts import PromptEncoder
from loraplex.server.sources.resolver import AdapterResolver
from loraplex.server.sources.room import NameRoom
from loraplex.server.telemetry.series import RequestSeries
from loraplex.server.telemetry.tracing import Tracing
from loraplex.server.tenants.adapter_quota import AdapterQuota, MemoryQuotas
from loraplex.server.tenants.metering import Accounts
from loraplex.structured.params import StructuredOutputsParams, as_field
from loraplex.tenants.directory import TenantDirectory

NUM_GRAMMAR_THREADS = 2
GRAMMAR_BYTES = 64 * 2**10
"""What each counts in its client's turns: a short one may take as long to compile as a long one."""

MAX_TENANT_SERIES = 100
"""Tenants with series of their own in /metrics."""

NUM_ANSWER_THREADS = 2
"""For long answers; as many for lists of adapters, which wait for the engine; and for tokenizers that are made."""


@dataclass(frozen=True, slots=True)
class ServerContext:
    engine: EngineSurface
    config: ServerConfig
    names: ModelNames
    bodies: BodyReader
    prompts: PromptEncoder
    in_flight: InFlight
    generator: Generator
    metrics_page: MetricsPage
    event_streams: EventStreams
    audit: Audit
    connections: Connections
    views: OffLoop
    texts: OffLoop
    answers: OffLoop
    answer_turns: Turns
    keys: KeyRing
    maker: AdapterMaker
    grammars: OffLoop
    tenants: TenantDirectory | None
    accounts: Accounts | None
    tracing: Tracing | None
    quota: AdapterQuota
    sources: NamedSources

    @property
    def num_endless(self) -> int:
        """Requests that only `close` ends."""
        return self.event_streams.num_open

    @property
    def num_in_flight(self) -> int:
        return len(self.in_flight)

    def close(self) -> None:
        self.event_streams.close()
        self.maker.close()

    async def end_requests(self) -> None:
        await self.in_flight.abort_all()

    async def finish(self) -> None:
        """After the last request."""
        if self.accounts is not None:
            await asyncio.to_thread(self.accounts.book.close)
        if self.tenants is not None:
            await asyncio.to_thread(self.tenants.close)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    @asynccontextmanager
    async def targets(
        self, choices: Sequence[AdapterChoice], request: Request
    ) -> AsyncIterator[Mapping[AdapterChoice, Target]]:
        """Of the prompts of a request, by what they go through. An error in the block lets the adapters go; without one
        they are held until `Generator.run` is over. Raises AdapterNotFoundError, and ClientDisconnect between two."""
        with ExitStack() as stack:
            targets: dict[AdapterChoice, Target] = {}
            for choice, num_prompts in Counter(choices).items():
                if targets and await request.is_disconnected():  # the tokenizers of hundreds take seconds
                    raise ClientDisconnect
                held = self.engine.hold_adapters(choice, num_prompts)
                stack.callback(held.close)
                held.text = text = await self.text_of(held.refs, request)
                is_own = isinstance(choice, str) and bool(text.digest)
                ref = held.refs[0] if is_own else None
                address = choice if ref is None else address_text(ref.adapter_name, ref.adapter_version)
                targets[choice] = Target(choice, address, text, held)
            yield targets
            stack.pop_all()

    async def text_of(self, refs: Sequence[LoRARef], request: Request) -> TextSurface:
        """In a thread where an adapter's tokenizer has to be made first, which takes tens of milliseconds."""
        ref = refs[0] if len(refs) == 1 else None
        known = self.engine.known_text(ref)
        if known is not None:
            return known
        return await self.texts.run_for(request, partial(self.engine.text_of, ref), 0)

    async def check_form(self, form: StructuredOutputsParams | None, field: str, request: Request) -> None:
        """Raises InvalidRequestError, which names the field, for a form that outputs cannot have."""
        if form is not None:
            if form.kind == "grammar":
                self.check_grammars_allowed(field)
            owner = caller_of(request).owner
            with as_field(field):
                if not self.engine.check_known_grammar(form, owner):  # one that is known waits for no other's
                    await self.grammars.run_for(request, partial(self.engine.check_grammar, form, owner), GRAMMAR_BYTES)

    def check_takes_uploads(self) -> None:
        """Raises ApiError where anybody could send an adapter."""
        if not (self.keys.has_keys or self.config.is_loopback):
            text = "this server takes no uploads: it can be reached from other machines, and has no keys"
            raise ApiError(text, status=403, kind="permission_error", code="uploads_need_keys")

    def check_grammars_allowed(self, field: str) -> None:
        """Raises InvalidRequestError, which names the field."""
        if not self.config.allow_grammars:
            text = "grammars are off on this server: send a JSON schema, a regular expression or a choice"
            raise InvalidRequestError(f"{text}, or start it with --allow-grammars", param=field)

    @classmethod
    def create(cls, engine: EngineSurface, config: ServerConfig) -> ServerContext:
        in_flight = InFlight(engine, config.max_waiting_tokens)
        tenants = _tenants_of(engine)
        if tenants is not None and engine.registry is not None:
            tenants.follow(MemoryQuotas(engine).tell)
        keys, sources = KeyRing.of(config, tenants), config.sources
        room = NameRoom(engine, lambda: keys.table, config.max_sourced_adapters)
        quota = AdapterQuota(engine, room, keys)
        resolver = AdapterResolver(engine, quota, sources, room) if sources.sources else None
        names = ModelNames(engine, config.served_model_names, int(time.time()), config.merged_into, resolver)
        connections = Connections(config, max_connections(config))
        series = RequestSeries(config.metrics_top_adapters, MAX_TENANT_SERIES)
        metrics_page = MetricsPage(names.served[0], connections, series=series)
        off_loop = OffLoop()
        return cls(
            engine=engine,
            config=config,
            names=names,
            bodies=BodyReader(
                off_loop,
                config.max_body_bytes,
                engine.model_info.longest_len,
                is_strict=config.strict_fields,
            ),
            prompts=PromptEncoder(engine.model_info, off_loop, OffLoop(NUM_PROCESSES)),
            in_flight=in_flight,
            generator=Generator(engine, in_flight, metrics_page.histograms, series),
            tracing=Tracing.of(config),
            metrics_page=metrics_page,
            event_streams=EventStreams(config.max_event_streams),
            audit=Audit(engine.events),
            connections=connections,
            views=OffLoop(NUM_ANSWER_THREADS),
            texts=OffLoop(NUM_ANSWER_THREADS),
            answers=OffLoop(NUM_ANSWER_THREADS),
            answer_turns=Turns(),
            keys=keys,
            tenants=tenants,
            accounts=None if tenants is None else Accounts(tenants),
            maker=AdapterMaker(
                engine.registry,
                engine.on_registry,
                room.for_new,
                output_folder(config),
                config.max_merge_bytes,
                config.local_adapter_roots,
            ),
            grammars=OffLoop(NUM_GRAMMAR_THREADS),
            quota=quota,
            sources=sources,
        )


def _tenants_of(engine: EngineSurface) -> TenantDirectory | None:
    """None without a journal: then there is nowhere to keep them."""
    state = engine.open_state()
    if state is None:
        return None
    from loraplex.tenants.store import TenantStore  # sqlalchemy: a third of a second

    return TenantDirectory(TenantStore(state))
