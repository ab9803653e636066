"""What all routes share, made once by `create_app`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

from loraplex.core import AdapterChoice
from loraplex.frontend.making import AdapterMaker
from loraplex.server.audit import Audit
from loraplex.server.auth import KeyRing
from loraplex.server.body import BodyReader
from loraplex.server.config import ServerConfig, output_folder
from loraplex.server.connections import Connections
from loraplex.server.engine_surface import EngineSurface
from loraplex.server.event_streams import EventStreams
from loraplex.server.generation import Generator, InFlight
from loraplex.server.listener import max_connections
from loraplex.server.metrics_page import MetricsPage
from loraplex.server.model_names import ModelNames, Target
from loraplex.server.off_loop import OffLoop
from loraplex.server.pacing import Turns
from loraplex.server.prompts import PromptEncoder

NUM_ANSWER_THREADS = 2
"""For long answers; and as many for lists of adapters, which wait for the engine."""


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
    answers: OffLoop
    answer_turns: Turns
    keys: KeyRing
    maker: AdapterMaker

    async def target_of(self, adapter: AdapterChoice, client: str) -> Target:
        """In a thread where an adapter's tokenizer may have to be made first, which takes tens of milliseconds."""
        if self.names.brings_text(adapter):
            return await self.views.run(client, partial(self.names.target_of, adapter), 0)
        return self.names.target_of(adapter)

    @classmethod
    def create(cls, engine: EngineSurface, config: ServerConfig) -> ServerContext:
        in_flight = InFlight(engine, config.max_waiting_tokens)
        names = ModelNames(engine, config.served_model_names, int(time.time()), config.merged_into)
        connections = Connections(config, max_connections(config))
        metrics_page = MetricsPage(names.served[0], connections)
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
            prompts=PromptEncoder(engine.model_info, off_loop),
            in_flight=in_flight,
            generator=Generator(engine, in_flight, metrics_page.histograms),
            metrics_page=metrics_page,
            event_streams=EventStreams(config.max_event_streams),
            audit=Audit(engine.events),
            connections=connections,
            views=OffLoop(NUM_ANSWER_THREADS),
            answers=OffLoop(NUM_ANSWER_THREADS),
            answer_turns=Turns(),
            keys=KeyRing.of(config),
            maker=AdapterMaker(
                engine.registry,
                engine.on_registry,
                output_folder(config),
                config.max_merge_bytes,
                config.local_adapter_roots,
            ),
        )
