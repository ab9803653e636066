"""OpenTelemetry: a span for each request, with vLLM's attributes of generation. Off without an endpoint.

    client's traceparent -> span of the router -> its traceparent -> span of the server

Spans are made at the begin and the end of a request, and nothing is done at a token. Finished ones wait in the bounded
queue of the SDK, whose thread exports them; where it is full they are dropped, and an exporter that fails costs them
and a line of the log. Sampling, the queue, headers and certificates of the exporter are the SDK's own variables:
OTEL_TRACES_SAMPLER, OTEL_BSP_*, OTEL_EXPORTER_OTLP_*.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.errors import ConfigError, LoraplexError
from loraplex.logs import request_context
from loraplex.sampling_params import SamplingParams
from loraplex.server.auth import OPEN_PATHS
from loraplex.server.config import ServerSettings
from loraplex.tenants.usage import Tab

MAX_VALUE_CHARS = 512
"""Of an attribute."""

MAX_PARENT_CHARS = 512
"""Of each header of W3C's trace context; a longer one is not read."""

DEFAULT_PATH = "/v1/traces"
"""Of an endpoint without one, as collectors have it."""

CREDENTIAL_PROVIDERS = (
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER",
)
"""Variables of the SDK that name a session of the operator's."""

CLOSE_S = 5.0
"""For the last spans, when the server ends."""

LOOKS = frozenset({"GET", "HEAD", "OPTIONS"})
"""A router, a dashboard and a scraper send them every second."""

SPAN_OF_GENERATION = "llm_request"
"""As vLLM calls it."""

Attributes = dict[str, str | int | float | bool]


class AnswerName(Protocol):
    """Of a generation: the answer's id and the model that it names."""

    @property
    def response_id(self) -> str: ...
    @property
    def model(self) -> str: ...


@dataclass(slots=True)
class RequestTrace:
    """What a request's span is to say. Of several prompts: tokens and completions added up, the first token of any, the
    longest time in the queue."""

    attributes: Attributes = field(default_factory=dict)
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_sequences: int = 0
    first_token_s: float | None = None
    queue_s: float | None = None

    def see(self, answer: AnswerName, params: SamplingParams, tab: Tab, error: LoraplexError | None) -> None:
        """The end of a prompt. error: what it ended in."""
        if error is not None:
            self.attributes["error.type"] = type(error).__name__
        output = tab.output
        self.num_prompt_tokens += tab.num_prompt_tokens
        self.num_sequences += params.n
        self.attributes |= {
            "gen_ai.request.id": answer.response_id,
            "gen_ai.response.model": answer.model,
            "gen_ai.request.n": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            **({} if params.max_tokens is None else {"gen_ai.request.max_tokens": params.max_tokens}),
        }
        if output is None:
            return
        self.num_completion_tokens += sum(len(each.token_ids) for each in output.outputs)
        if tab.first_s is not None:
            waited_s = tab.first_s - tab.began_s
            self.first_token_s = waited_s if self.first_token_s is None else min(waited_s, self.first_token_s)
        times = output.metrics
        if times is not None and times.first_scheduled_time is not None:
            waited_s = max(0.0, times.first_scheduled_time - times.arrival_time)
            self.queue_s = max(waited_s, self.queue_s or 0.0)

    def all_attributes(self, seconds: float) -> Attributes:
        """With those of the usage, once a prompt has ended."""
        if not self.num_sequences:
            return self.attributes
        latencies = {
            "gen_ai.latency.time_to_first_token": self.first_token_s,
            "gen_ai.latency.time_in_queue": self.queue_s,
            "gen_ai.latency.e2e": seconds,
        }
        return {
            **self.attributes,
            "gen_ai.usage.prompt_tokens": self.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": self.num_completion_tokens,
            "gen_ai.usage.num_sequences": self.num_sequences,
            **{name: value for name, value in latencies.items() if value is not None},
        }


def check_tracing(config: ServerSettings) -> None:
    """Raises ConfigError where spans are to be exported and `loraplex[otel]` is not installed."""
    if config.otlp_traces_endpoint is None:
        return
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"otlp_traces_endpoint needs `pip install loraplex[otel]`: {error}") from error


current_trace: ContextVar[RequestTrace | None] = ContextVar("current_trace", default=None)
"""Of the request that a task works on; None where it is not traced."""


class Tracing:
    """Makes and exports the spans of one server or router."""

    def __init__(self, provider: Any) -> None:
        """provider: a TracerProvider of the SDK, which `close` shuts down."""
        from opentelemetry.trace import propagation
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("loraplex")
        self._propagator = TraceContextTextMapPropagator()
        self._with_span = propagation.set_span_in_context

    @classmethod
    def of(cls, config: ServerSettings) -> Tracing | None:
        """Spans go to its endpoint by OTLP over HTTP; None without one. Raises ConfigError as `check_tracing` does."""
        check_tracing(config)
        if config.otlp_traces_endpoint is None:
            return None
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from loraplex.server.telemetry.collector import CollectorSession

        url = urlsplit(config.otlp_traces_endpoint)
        endpoint = url._replace(path=url.path if url.path.strip("/") else DEFAULT_PATH).geturl()
        provider = TracerProvider(
            resource=Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "loraplex")}),
            shutdown_on_exit=False,
            span_limits=SpanLimits(max_attribute_length=MAX_VALUE_CHARS),
        )
        has_own = any(name in os.environ for name in CREDENTIAL_PROVIDERS)
        exporter = OTLPSpanExporter(endpoint=endpoint, session=None if has_own else CollectorSession())
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    def begin(self, scope: Scope) -> tuple[Any, tuple[tuple[bytes, bytes], ...]]:
        """The span of a request, and the headers that make it the parent of what comes of it."""
        from opentelemetry.trace import SpanKind

        parent = self._propagator.extract(_parent_of(Headers(scope=scope)))
        span = self._tracer.start_span(f"{scope['method'][:MAX_VALUE_CHARS]}", parent, SpanKind.SERVER)
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._with_span(span, parent))
        return span, tuple((name.encode(), value.encode("latin-1", "replace")) for name, value in carrier.items())

    def end(self, span: Any, scope: Scope, status: int, attributes: Mapping[str, Any]) -> None:
        from opentelemetry.trace import StatusCode

        if span.is_recording():
            route = getattr(scope.get("route"), "path", "")
            is_generation = "gen_ai.request.id" in attributes
            span.update_name(SPAN_OF_GENERATION if is_generation else f"{scope['method']} {route}".strip())
            span.set_attributes({**attributes, "http.request.method": scope["method"], "http.route": route})
            if status:
                span.set_attribute("http.response.status_code", status)
            if status >= 500 or "error.type" in attributes:
                span.set_status(StatusCode.ERROR)
        span.end()

    def close(self) -> None:
        """Export what waits, for at most CLOSE_S."""
        closing = threading.Thread(target=self._provider.shutdown, name="otel-shutdown", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


class TraceMiddleware:
    """A span for each request that does something, from its head to the end of its answer; looks have none.

    What the application sends on in a request's name has the span as its parent: its headers are replaced.
    """

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in LOOKS or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        trace, began_s, status = RequestTrace(), time.monotonic(), 0
        span, headers = self._tracing.begin(scope)
        scope = {**scope, "headers": [*(each for each in scope["headers"] if each[0] not in _OF_CONTEXT), *headers]}
        outside = current_trace.set(trace if span.is_recording() else None)

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        finally:
            current_trace.reset(outside)
            if (context := request_context.get()) is not None:
                of_request = {"request_id": context.request_id, "tenant": context.tenant, "adapter": context.adapter}
                trace.attributes |= {f"loraplex.{name}": value for name, value in of_request.items() if value}
            self._tracing.end(span, scope, status, trace.all_attributes(time.monotonic() - began_s))


_OF_CONTEXT = (b"traceparent", b"tracestate")


def _parent_of(headers: Headers) -> dict[str, str]:
    """What W3C's trace context has of a request, if it is not too long."""
    found = {name.decode(): ",".join(headers.getlist(name.decode())) for name in _OF_CONTEXT}
    return {name: value for name, value in found.items() if 0 < len(value) <= MAX_PARENT_CHARS}
