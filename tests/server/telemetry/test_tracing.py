"""Spans of requests: what they say, whose children they are, and that nothing of them harms a request."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from loraplex.core import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams
from loraplex.errors import ConfigError
from loraplex.router.settings import RouteSettings
from loraplex.server import ServerConfig, create_app
from loraplex.server.app import add_middleware
from loraplex.server.generation import Generation
from loraplex.server.telemetry import tracing as tracing_module
from loraplex.server.telemetry.tracing import RequestTrace, Tracing, check_tracing
from loraplex.tenants.usage import Tab
from loraplex.testing import FakeAsyncEngine
from tests.router.parts import completion, replicas, router
from tests.security.tenancy import Tenancy
from tests.server.asgi_call import AsgiCall
from tests.server.conftest import client_of

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="loraplex[otel] is not installed")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="loraplex[otel] is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, TraceIdRatioBased  # noqa: E402

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = (f"00-{TRACE}-{PARENT}-{flag}" for flag in ("01", "00"))
BODY = {"model": "sql", "prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True, "temperature": 0.0}


class Spans:
    """An application whose spans stay in this process."""

    def __init__(self, engine: FakeAsyncEngine, sampler: Any = None) -> None:
        self.exporter = InMemorySpanExporter()
        provider = sdk.TracerProvider(sampler=sampler, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.app = create_app(engine, ServerConfig())
        self.app.user_middleware.clear()
        add_middleware(self.app, ServerConfig(), self.app.state.context.keys, Tracing(provider))

    def one(self) -> Any:
        (span,) = self.exporter.get_finished_spans()
        return span


@pytest.fixture
def spans(engine: FakeAsyncEngine) -> Spans:
    return Spans(engine)


@pytest.fixture
async def traced(spans: Spans) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(spans.app) as client:
        yield client


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_span_says_what_vllms_says(traced: httpx.AsyncClient, spans: Spans, is_stream: bool) -> None:
    headers = {"x-request-id": "mine", "traceparent": SAMPLED}
    answer = await traced.post("/v1/completions", json={**BODY, "n": 2, "stream": is_stream}, headers=headers)
    assert answer.status_code == 200
    span = spans.one()
    assert span.name == "llm_request"
    assert span.kind.name == "SERVER"
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    found = dict(span.attributes)
    times = {name: found.pop(name) for name in list(found) if name.startswith("gen_ai.latency.")}
    assert times.keys() >= {"gen_ai.latency.time_to_first_token", "gen_ai.latency.e2e"}
    assert all(seconds >= 0 for seconds in times.values())
    assert found == {
        "gen_ai.request.id": "cmpl-mine",
        "gen_ai.response.model": "sql",
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 10,
        "gen_ai.usage.num_sequences": 2,
        "loraplex.request_id": "mine",
        "loraplex.adapter": "sql",
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
    }


async def test_several_prompts_are_one_span(traced: httpx.AsyncClient, spans: Spans) -> None:
    await traced.post("/v1/completions", json={**BODY, "prompt": [[1, 2], [3]], "max_tokens": 4})
    found = spans.one().attributes
    assert found["gen_ai.usage.prompt_tokens"] == 3
    assert found["gen_ai.usage.completion_tokens"] == 8
    assert found["gen_ai.usage.num_sequences"] == 2


def test_times_of_several_prompts_are_those_of_the_first_token_and_of_the_longest_wait() -> None:
    trace = RequestTrace()
    for began_s, first_s, scheduled_s in ((0.0, 3.0, 102.0), (0.0, 2.0, 100.5), (0.0, None, None)):
        tab = Tab("", "", "sql", 3, began_s, first_s=first_s)
        times = RequestMetrics(arrival_time=100.0, first_scheduled_time=scheduled_s)
        tab.output = RequestOutput("r", None, (1,), (CompletionOutput(0, "", (1, 2)),), False, metrics=times)
        trace.see(Generation("cmpl-1", 0, "sql", ()), SamplingParams(), tab, None)
    found = trace.all_attributes(9.0)
    assert found["gen_ai.latency.time_to_first_token"] == 2.0
    assert found["gen_ai.latency.time_in_queue"] == 2.0
    assert found["gen_ai.latency.e2e"] == 9.0
    assert found["gen_ai.usage.completion_tokens"] == 6


async def test_refusals_and_verbs_have_spans_and_looks_have_none(traced: httpx.AsyncClient, spans: Spans) -> None:
    for path in ("/health", "/metrics", "/v1/models", "/v1/adapters", "/v1/memory"):
        assert (await traced.get(path)).status_code == 200
    assert (await traced.post("/ping")).status_code == 200
    assert spans.exporter.get_finished_spans() == ()
    await traced.post("/v1/completions", json={**BODY, "model": "unknown"})
    await traced.post("/v1/adapters/sql/pin")
    await traced.post("/no/such/path")
    seen = [(span.name, span.attributes["http.response.status_code"]) for span in spans.exporter.get_finished_spans()]
    assert seen == [("POST /v1/completions", 404), ("POST /v1/adapters/{name:path}/pin", 200), ("POST", 404)]


async def test_a_stream_that_breaks_off_is_an_error(spans: Spans, engine: FakeAsyncEngine) -> None:
    engine.hold(after_tokens=1)
    call = AsgiCall(spans.app, "/v1/completions", {**BODY, "stream": True})
    await call.start()
    await spans.app.state.context.in_flight.abort_all()
    await call.rest()
    span = spans.one()
    assert span.attributes["error.type"] == "EngineShutdownError"
    assert span.status.status_code.name == "ERROR"
    assert span.attributes["http.response.status_code"] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": "00-zz-zz-01"},
        {"traceparent": "00-" + "0" * 32 + f"-{PARENT}-01"},
        {"traceparent": SAMPLED + "-" + "x" * 600},
        {"traceparent": "x" * 8000, "tracestate": "y=" + "z" * 8000},
    ],
)
async def test_what_is_no_trace_context_begins_a_trace(
    traced: httpx.AsyncClient, spans: Spans, headers: Mapping[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    assert (await traced.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
    assert spans.one().parent is None
    assert caplog.text.count("exceeded") == 0, "a client would fill the log"


async def test_a_long_tracestate_is_left_out(traced: httpx.AsyncClient, spans: Spans) -> None:
    headers = [("traceparent", SAMPLED), *(("tracestate", f"k{index}=v") for index in range(100))]
    assert (await traced.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
    span = spans.one()
    assert f"{span.context.trace_id:032x}" == TRACE
    assert len(span.context.trace_state) == 0


async def test_what_is_not_sampled_costs_no_attributes(engine: FakeAsyncEngine) -> None:
    spans = Spans(engine, ParentBased(TraceIdRatioBased(1.0), remote_parent_sampled=ALWAYS_OFF))
    async with client_of(spans.app) as client:
        for parent in (SAMPLED, NOT_SAMPLED):
            answer = await client.post("/v1/completions", json=BODY, headers={"traceparent": parent})
            assert answer.status_code == 200
        assert spans.exporter.get_finished_spans() == ()
        await client.post("/v1/completions", json=BODY)
    assert spans.one().name == "llm_request"


async def test_values_are_cut(spans: Spans, engine: FakeAsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with Collector() as collector:
        tracing = Tracing.of(ServerConfig(otlp_traces_endpoint=collector.url))
        assert tracing is not None
        span, _ = tracing.begin({"type": "http", "method": "POST", "headers": []})
        span.set_attribute("loraplex.adapter", "x" * 10_000)
        span.end()
        tracing.close()
    assert len(collector.spans[0].attributes[0].value.string_value) == tracing_module.MAX_VALUE_CHARS


async def test_the_tenant_is_named(server: Tenancy) -> None:
    exporter = InMemorySpanExporter()
    provider = sdk.TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    server.app.user_middleware.clear()
    add_middleware(server.app, server.context.config, server.context.keys, Tracing(provider))
    async with client_of(server.app) as client:
        answer = await client.post("/v1/completions", json=BODY, headers=server.headers("acme"))
    assert answer.status_code == 200
    (span,) = exporter.get_finished_spans()
    assert span.attributes["loraplex.tenant"] == "acme"
    assert span.attributes["loraplex.adapter"] == "acme/sql"
    assert server.keys["acme"] not in span.to_json()


# ------------------------------------------------------------------------------------------------------- the exporter


class Collector:
    """OTLP over HTTP on a loopback port; status: what it answers."""

    def __init__(self, status: int = 200) -> None:
        self.spans: list[Any] = []
        self.resources: list[Any] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                request = ExportTraceServiceRequest.FromString(body)
                outer.paths.append(self.path)
                for of_resource in request.resource_spans:
                    outer.resources.append(of_resource.resource)
                    for of_scope in of_resource.scope_spans:
                        outer.spans += of_scope.spans
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                """Not into the test's output."""

        self.paths: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Collector:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


def names_of(spans: list[Any]) -> list[str]:
    return [span.name for span in spans]


async def test_a_router_is_between_a_client_and_a_server(collector: Collector) -> None:
    endpoint = collector.url
    async with (
        replicas(1, otlp_traces_endpoint=endpoint) as (replica,),
        router([replica.name], otlp_traces_endpoint=endpoint) as front,
    ):
        headers = {"traceparent": SAMPLED, "tracestate": "vendor=1", "x-request-id": "mine"}
        answer = await front.client.post("/v1/completions", json=completion(), headers=headers)
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] == "mine"
    by_name = {span.name: span for span in collector.spans}
    of_router, of_server = by_name["POST /v1/completions"], by_name["llm_request"]
    assert {span.trace_id.hex() for span in by_name.values()} == {TRACE}
    assert of_router.parent_span_id.hex() == PARENT
    assert of_server.parent_span_id == of_router.span_id
    assert of_server.trace_state == "vendor=1"
    values = {each.key: each.value.string_value for each in of_router.attributes}
    assert values["loraplex.replica"] == replica.name
    assert values["loraplex.request_id"] == "mine"
    assert values["loraplex.adapter"] == "sql"
    assert set(collector.paths) == {"/v1/traces"}
    (name,) = {each.value.string_value for each in collector.resources[0].attributes if each.key == "service.name"}
    assert name == "loraplex"


async def test_a_router_without_traces_passes_the_clients_on(collector: Collector) -> None:
    async with replicas(1, otlp_traces_endpoint=collector.url) as (replica,), router([replica.name]) as front:
        answer = await front.client.post("/v1/completions", json=completion(), headers={"traceparent": SAMPLED})
        assert answer.status_code == 200
    assert [span.parent_span_id.hex() for span in collector.spans] == [PARENT]


@pytest.mark.parametrize("status", [400, 503, None])
async def test_an_exporter_that_fails_harms_no_request(status: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """None: nothing listens there."""
    monkeypatch.setattr(tracing_module, "CLOSE_S", 0.05)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    with Collector(status or 200) as collector:
        url = collector.url
        if status is not None:
            await ask_many(url)
    if status is None:
        await ask_many(url)


async def ask_many(endpoint: str) -> None:
    async with (
        replicas(1, otlp_traces_endpoint=endpoint) as (replica,),
        httpx.AsyncClient(base_url=f"http://{replica.name}", trust_env=False) as client,
    ):
        answers = await asyncio.gather(*(client.post("/v1/completions", json=completion()) for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200}


# -------------------------------------------------------------------------------------------------------- the settings


@pytest.mark.parametrize(
    "endpoint", ["", "collector:4318", "ftp://x/", "http://", "http://user:key@x/", "http://x/?a=b", "http://x/ y"]
)
@pytest.mark.parametrize("settings", [ServerConfig, lambda **given: RouteSettings(**given).server_config])
def test_an_endpoint_is_a_url(endpoint: str, settings: Any) -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as caught:
        settings(otlp_traces_endpoint=endpoint)
    assert "key" not in str(caught.value)


def test_the_package_is_missed_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    check_tracing(ServerConfig())
    with pytest.raises(ConfigError, match=r"pip install loraplex\[otel\]"):
        check_tracing(ServerConfig(otlp_traces_endpoint="http://x:4318"))


def test_without_an_endpoint_nothing_is_imported() -> None:
    """FastAPI itself imports the API, which does nothing, where that is installed."""
    code = """
import sys
from loraplex.server import ServerConfig, create_app
from loraplex.testing import FakeAsyncEngine
import asyncio
async def main():
    app = create_app(FakeAsyncEngine({}), ServerConfig())
    assert app.state.context.tracing is None
asyncio.run(main())
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_application_of_its_own_has_no_middleware_for_it(app: FastAPI) -> None:
    assert "TraceMiddleware" not in [each.cls.__name__ for each in app.user_middleware]  # type: ignore[attr-defined]
