"""What a server over several runners says of them, over an engine without weights."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from loraplex.metrics import EngineStats, RunnerReport
from loraplex.server.app import create_app
from loraplex.server.config import ServerConfig
from loraplex.server.listener import bind
from loraplex.server.run import serve
from loraplex.testing import FakeAsyncEngine

UP = RunnerReport("0", "cpu", stats=EngineStats(num_running=3, num_generated_tokens=7))
DOWN = RunnerReport("1", "cpu", "it is being restarted")
RELEASED = RunnerReport("1", "cpu", "the load does not need it", is_released=True, num_moved=5)


DEGRADED = {"status": "degraded", "runners": 2, "serving": 1}


def client_of(*reports: RunnerReport) -> TestClient:
    engine = FakeAsyncEngine()
    engine.reports = reports
    return TestClient(create_app(engine, ServerConfig(served_model_names=("base",))), base_url="http://localhost")


def test_one_runner_is_not_mentioned() -> None:
    client = client_of()
    assert client.get("/health").json() == {"status": "ok"}
    assert set(client.get("/version").json()) == {"version", "backend", "model", "instance"}
    assert "loraplex:runner" not in client.get("/metrics").text


@pytest.mark.parametrize(
    ("reports", "end"),
    [((), "(0 adapters)\n"), ((UP, replace(UP, name="1", device="cpu:1")), "(0 adapters, 2 runners: cpu, cpu:1)\n")],
)
async def test_the_start_line_names_several_runners_and_their_devices(
    reports: tuple[RunnerReport, ...], end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, config = FakeAsyncEngine(), ServerConfig(port=0, access_log=False, shutdown_grace_s=0.0)
    engine.reports = reports
    serving = asyncio.ensure_future(serve(engine, config, bind(config)))
    out = ""
    while not out.endswith("\n"):
        await asyncio.sleep(0.01)
        out += capsys.readouterr().out
    engine.give_up()
    await serving
    assert out.endswith(end)


def test_a_runner_that_is_away_makes_the_server_degraded() -> None:
    client = client_of(UP, DOWN)
    answer = client.get("/health")
    assert (answer.status_code, answer.json()) == (200, {**DEGRADED, "starting": ["1"]})
    version = client.get("/version").json()
    assert (version["runners"], version["devices"]) == (2, ["cpu", "cpu"])
    assert client_of(UP, UP).get("/health").json() == {"status": "ok", "runners": 2, "serving": 2}


def test_a_runner_that_the_load_does_not_need_is_no_fault() -> None:
    health = {"status": "ok", "runners": 2, "serving": 1, "released": 1}
    assert client_of(UP, RELEASED).get("/health").json() == health
    degraded = {**health, "status": "degraded", "runners": 3, "starting": ["1"]}
    assert client_of(UP, RELEASED, DOWN).get("/health").json() == degraded
    page = client_of(UP, RELEASED).get("/metrics").text
    labels = 'engine="0",model_name="base"'
    assert f'loraplex:runner_released{{{labels},runner="0"}} 0.0' in page
    assert f'loraplex:runner_released{{{labels},runner="1"}} 1.0' in page
    assert f'loraplex:runner_requests_moved_total{{{labels},runner="1"}} 5.0' in page
    card = client_of(UP, RELEASED).get("/v1/memory").json()["runners"][1]
    assert card["message"] == "the load does not need it"


def test_metrics_have_each_runner() -> None:
    page = client_of(UP, DOWN).get("/metrics").text
    labels = 'engine="0",model_name="base"'
    assert f'loraplex:runner_up{{{labels},runner="0"}} 1.0' in page
    assert f'loraplex:runner_up{{{labels},runner="1"}} 0.0' in page
    assert f'loraplex:runner_requests_running{{{labels},runner="0"}} 3.0' in page
    assert f'loraplex:runner_generation_tokens_total{{{labels},runner="0"}} 7.0' in page
    assert 'loraplex:runner_requests_running{engine="0",model_name="base",runner="1"}' not in page


def test_memory_has_each_runner() -> None:
    assert "runners" not in client_of().get("/v1/memory").json()
    up, down = client_of(UP, DOWN).get("/v1/memory").json()["runners"]
    assert (up["runner"], up["device"], up["running"], up["mode"], up["message"]) == ("0", "cpu", 3, "normal", "")
    assert (down["runner"], down["message"], down["kv"]) == ("1", "it is being restarted", None)
