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
from loraplex.metrics import EngineStats, RunnerReport
from loraplex.server import ServerConfig
from loraplex.server.health_api import KEPT_S
from loraplex.testing import FakeAsyncEngine
from loraplex.views import top
from loraplex.views.remote import RemoteServer, checked_url
from loraplex.views.top import Frame, Look, Watcher, bar, chunk_strip, read_samples, run_top, shown, size, view
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


def drawn(what: RenderableType, width: int = 120) -> str:
    console = Console(width=width, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
    console.print(what)
    console.file.close()
    return console.export_text()


def test_one_frame(live: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    live.engine.record_event(EngineEvent(EventKind.FAULT, time.time(), "the engine [red]died\x1b[2J\nnow"))
    assert run_top(live.url, 1.0, is_once=True) == 0
    out = capsys.readouterr().out
    for text in ("mode low_memory", "device", "50 %", "kv 3", "adapters 3", "fragmentation 12 %", "sql", "- tokens/s"):
        assert text in out
    assert "KV 60 %  merged sql\n" in out
    assert "fault        the engine [red]died?[2J?now" in out
    assert "\x1b[2J" not in out


def test_a_frame_has_how_many_of_several_runners_serve(live: LiveServer) -> None:
    assert "runners" not in drawn(view(Watcher(RemoteServer(live.url))))
    released = RunnerReport("1", "cpu:1", "the load does not need it", is_released=True)
    live.engine.reports = (RunnerReport("0", "cpu:0", stats=EngineStats(num_running=2, num_waiting=1)), released)
    time.sleep(KEPT_S)  # a page of metrics is reused for so long
    frame = drawn(view(Watcher(RemoteServer(live.url))))
    assert "quarantined 2  runners 1 of 2" in frame
    assert "runner 0 cpu:0  running 2  waiting 1  KV 0 %" in frame
    assert "runner 1 cpu:1  the load does not need it" in frame


def test_rates_are_between_two_looks(live: LiveServer) -> None:
    body = {"model": "sql", "prompt": "hi", "max_tokens": 5}
    watcher = Watcher(RemoteServer(live.url))
    first = watcher.look()
    assert first.rate("vllm:request_success_total") is None
    assert first.quantile("vllm:time_to_first_token_seconds", 0.5) is None
    httpx.post(live.url + "/v1/completions", json=body)
    time.sleep(KEPT_S)  # a page of metrics is reused for so long
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


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost",
        ":8000",
        "ftp://x",
        "file:///etc/passwd",
        "http://",
        "http://x:99999",
        "http://[::1",
        "a b:1",
        "evil@x:1",
    ],
)
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ConfigError, match="url must be like"):
        run_top(url, 1.0, is_once=True)


@pytest.mark.parametrize("interval_s", [0.0, -1.0, float("nan"), 1e9])
def test_what_is_no_interval(interval_s: float) -> None:
    with pytest.raises(ConfigError, match="interval must be"):
        run_top("http://127.0.0.1:1", interval_s, is_once=True)


def test_samples_are_told_apart_by_their_own_label() -> None:
    text = '# TYPE a gauge\na{model_name="m",engine="0",tier="host"} 1.0\n'
    text += '# TYPE b gauge\nb{model_name="m",engine="0"} 2.0\n'
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


@pytest.mark.parametrize(
    ("url", "full"),
    [
        ("127.0.0.1:8511", "http://127.0.0.1:8511"),
        ("localhost:8000/", "http://localhost:8000"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("https://host/prefix/", "https://host/prefix"),
    ],
)
def test_an_address_needs_no_scheme(url: str, full: str) -> None:
    assert checked_url(url) == full


def test_one_frame_of_an_address(live: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_top(live.url.removeprefix("http://"), 1.0, is_once=True) == 0
    assert "adapters" in capsys.readouterr().out


def busy_look(num_adapters: int = 15, num_events: int = 8) -> Look:
    """A server that has something to say everywhere."""
    tier = {"used_bytes": 5 << 28, "max_bytes": 5 << 30, "adapters": 3, "pressure": 0.5}
    card = {"tier": "device", "bytes": 5 << 20, "rank": 16, "references": 1, "is_pinned": True, "is_loading": False}
    memory = {
        "mode": "normal",
        "quarantined": [],
        "tiers": [{"tier": name, **tier} for name in ("device", "host", "disk")],
        "kv": {"used_bytes": 1, "max_bytes": 1 << 30},
        "chunks_by_owner": {"kv": 512, "adapters": 300},
        "chunks": [{"owner": "kv", "chunks": 512}, {"owner": "adapters", "chunks": 300}],
        "fragmentation": 0.1,
        "top_adapters": [
            {"name": f"tenant/adapter-{index}", "error": None, "last_used_time": 0.0, **card}
            for index in range(num_adapters)
        ],
    }
    events = [{"time": 0.0, "kind": "load", "text": f"event {index} " + "x" * 90} for index in range(num_events)]
    return Look("http://127.0.0.1:8000", {}, {}, 1.0, memory, events)


@pytest.mark.parametrize("width", [60, 72, 80, 120])
@pytest.mark.parametrize("height", [20, 24, 30, 50])
def test_a_frame_fits_and_says_what_it_hides(width: int, height: int) -> None:
    lines = drawn(Frame(busy_look(), height), width).splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    adapters = [line for line in lines if line.startswith("tenant/adapter-")]
    events = [line for line in lines if " load " in line]
    assert len(events) >= 3
    assert events[-1].split()[2:4] == ["event", "7"]
    hidden = "\n".join(lines)
    assert (f"{15 - len(adapters)} more adapters" in hidden) == (len(adapters) < 15)
    assert (f"{8 - len(events)} more events" in hidden) == (len(events) < 8)
    assert ("in a taller window" in hidden) == (len(adapters) < 15 or len(events) < 8)


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_print_has_everything(width: int) -> None:
    """`--once` is not bounded by the height of a terminal."""
    text = drawn(Frame(busy_look()), width)
    assert text.count("tenant/adapter-") == 15
    assert text.count(" load ") == 8
    assert "taller" not in text


@pytest.mark.parametrize(("width", "height"), [(20, 5), (8, 3), (60, 1), (200, 200)])
def test_no_size_is_too_small(width: int, height: int) -> None:
    assert drawn(Frame(busy_look(), height), width)
    assert drawn(Frame(busy_look(0, 0), height), width)


@pytest.mark.parametrize(("columns", "rows"), [(60, 24), (100, 40)])
def test_the_terminal_says_how_much_fits(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int, rows: int
) -> None:
    def end(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(top.time, "sleep", end)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", str(rows))
    live.engine.record_event(EngineEvent(EventKind.LOAD, time.time(), "the newest event"))
    assert run_top(live.url, 1.0, is_once=False) == 0
    assert "the newest event" in capsys.readouterr().out
