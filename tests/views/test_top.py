"""`loraplex top` against a server over the fake engine: one frame, waiting, restarts, and drawing."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from rich.console import Console, RenderableType

from loraplex.errors import ConfigError, LoraplexError
from loraplex.events import EngineEvent, EventKind
from loraplex.server import ServerConfig
from loraplex.testing import FakeAsyncEngine
from loraplex.views import top
from loraplex.views.remote import RemoteServer
from loraplex.views.top import Look, Watcher, bar, chunk_strip, read_samples, run_top, shown, size, view
from tests.server.live_server import LiveServer
from tests.server.test_memory import REPORT

QUIET = {"port": 0, "access_log": False, "log_level": "error", "shutdown_grace_s": 0.0}


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    monkeypatch.delenv("LORAPLEX_API_KEY", raising=False)
    engine = FakeAsyncEngine({"sql": "/adapters/sql"})
    engine.memory = REPORT
    with LiveServer(engine, ServerConfig(**QUIET)) as server:  # type: ignore[arg-type]
        yield server


def drawn(what: RenderableType) -> str:
    console = Console(width=120, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
    console.print(what)
    console.file.close()
    return console.export_text()


def test_one_frame(live: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    live.engine.record_event(EngineEvent(EventKind.FAULT, time.time(), "the engine [red]died\x1b[2J\nnow"))
    assert run_top(live.url, 1.0, is_once=True) == 0
    out = capsys.readouterr().out
    for text in ("mode low_memory", "device", "50 %", "kv 3", "adapters 3", "fragmentation 12 %", "sql", "- tokens/s"):
        assert text in out
    assert "fault        the engine [red]died?[2J?now" in out
    assert "\x1b[2J" not in out


def test_rates_are_between_two_looks(live: LiveServer) -> None:
    body = {"model": "sql", "prompt": "hi", "max_tokens": 5}
    watcher = Watcher(RemoteServer(live.url))
    first = watcher.look()
    assert first.rate("vllm:request_success_total") is None
    assert first.quantile("vllm:time_to_first_token_seconds", 0.5) is None
    httpx.post(live.url + "/v1/completions", json=body)
    second = watcher.look()
    assert second.quantile("vllm:e2e_request_latency_seconds", 0.5) is not None
    assert second.seconds > 0


def test_counters_that_start_again_have_no_rate() -> None:
    look = Look("u", {"n": {"": 5.0}}, {"n": {"": 9.0}}, 2.0, {}, ())
    assert look.rate("n") is None
    assert Look("u", {"n": {"": 9.0}}, {"n": {"": 5.0}}, 2.0, {}, ()).rate("n") == 2.0


def test_quantiles_are_of_what_is_new() -> None:
    before = {"h_bucket": {"0.1": 10.0, "1.0": 10.0, "+Inf": 10.0}}
    now = {"h_bucket": {"0.1": 10.0, "1.0": 14.0, "+Inf": 14.0}}
    assert Look("u", now, before, 1.0, {}, ()).quantile("h", 0.5) == 1.0
    assert Look("u", now, {}, 1.0, {}, ()).quantile("h", 0.5) == 0.1
    assert Look("u", before, before, 1.0, {}, ()).quantile("h", 0.5) == 0.1


def test_events_are_read_once_and_those_of_a_new_server_anew(live: LiveServer) -> None:
    watcher = Watcher(RemoteServer(live.url))
    for number in range(12):
        live.engine.record_event(EngineEvent(EventKind.LOAD, 1.0, str(number)))
    assert [event["text"] for event in watcher.look().events] == [str(number) for number in range(4, 12)]
    assert len(watcher.look().events) == 8
    with LiveServer(FakeAsyncEngine(), ServerConfig(**QUIET)) as other:  # type: ignore[arg-type]
        other.engine.record_event(EngineEvent(EventKind.RESTART, 1.0, "new"))
        watcher._server = RemoteServer(other.url)
        assert [event["text"] for event in watcher.look().events] == ["new"]


def test_a_server_that_is_away_is_waited_for() -> None:
    with LiveServer(FakeAsyncEngine(), ServerConfig(**QUIET)) as server:  # type: ignore[arg-type]
        watcher = Watcher(RemoteServer(server.url))
        assert "mode normal" in drawn(view(watcher))
        server.engine.die("killed")
        assert "waiting for" in drawn(view(watcher))
        assert "killed" in drawn(view(watcher))
    assert "waiting for" in drawn(view(watcher))
    with pytest.raises(LoraplexError, match="does not answer"):
        run_top(server.url, 1.0, is_once=True)


def test_ctrl_c_ends_it(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(top.time, "sleep", sleep)
    assert run_top(live.url, 0.5, is_once=False) == 0
    assert slept == [0.5, 0.5]


def test_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServerConfig(**QUIET, api_keys=("k1",))  # type: ignore[arg-type]
    with LiveServer(FakeAsyncEngine(), config) as server:
        monkeypatch.delenv("LORAPLEX_API_KEY", raising=False)
        with pytest.raises(LoraplexError, match="401: no valid API key"):
            run_top(server.url, 1.0, is_once=True)
        monkeypatch.setenv("LORAPLEX_API_KEY", "k1,k2")
        assert run_top(server.url, 1.0, is_once=True) == 0


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "file:///etc/passwd"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ConfigError, match="url must be like"):
        run_top(url, 1.0, is_once=True)


@pytest.mark.parametrize("interval_s", [0.0, -1.0, float("nan"), 1e9])
def test_what_is_no_interval(interval_s: float) -> None:
    with pytest.raises(ConfigError, match="interval must be"):
        run_top("http://127.0.0.1:1", interval_s, is_once=True)


def test_samples_are_told_apart_by_their_own_label() -> None:
    text = '# TYPE a gauge\na{model_name="m",engine="0",tier="host"} 1.0\n# TYPE b gauge\nb{model_name="m",engine="0"} 2.0\n'
    assert read_samples(text) == {"a": {"host": 1.0}, "b": {"": 2.0}}


def test_a_strip_shows_each_owner_at_its_place() -> None:
    runs = [{"owner": "kv", "chunks": 2}, {"owner": "free", "chunks": 2}]
    strip = chunk_strip(runs, num_cells=4)
    assert strip.plain == "██░░"
    assert [str(span.style) for span in strip.spans] == ["blue", "blue", "bright_black", "bright_black"]
    assert chunk_strip(runs, num_cells=100).plain == "██░░"
    assert chunk_strip([{"owner": "kv", "chunks": 1000}, {"owner": "free", "chunks": 1000}], 10).plain == "█████░░░░░"
    assert chunk_strip([]).plain == ""


def test_pieces() -> None:
    assert (bar(0.5).plain.count("█"), bar(7.0).plain.count("░"), bar(-1.0).plain.count("█")) == (15, 0, 0)
    assert [size(count) for count in (5, 2048, 3 * 2**20, 5 * 2**30)] == ["5 B", "2 KiB", "3 MiB", "5.0 GiB"]
    assert shown("a\tb\x9b") == "a?b?"


def test_a_redirect_is_an_error_and_the_key_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append((self.path, self.headers["Authorization"]))
            self.send_response(302)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(LoraplexError, match="302"):
            RemoteServer(f"http://127.0.0.1:{server.server_port}/", api_key="k").get("/v1/memory")
        thread.join()
    assert seen == [("/v1/memory", "Bearer k")]
