"""What the benchmark of replicas on Ray counts, and the adapters that it writes."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

import httpx
import pytest

from benchmarks import ray_serve
from benchmarks.ray_serve import Result, ask_all, counts, table_of, write_adapters
from loraplex.serve.exchange import REPLICA_HEADER

PAGE = """# HELP loraplex:adapter_hits_total Requests that found their adapter resident.
# TYPE loraplex:adapter_hits_total counter
loraplex:adapter_hits_total{model_name="demo",engine="0"} 1.5e+01
loraplex:adapter_misses_total{model_name="demo",engine="0"} 5.0
"""


def test_no_two_adapters_are_equal(tmp_path: Path) -> None:
    modules = write_adapters(tmp_path, 30)
    files = [(tmp_path / f"a{number:04d}" / "adapter_model.safetensors").read_bytes() for number in range(30)]
    assert len(set(files)) == 30
    assert modules[3] == f"a0003={tmp_path / 'a0003'}"


async def test_requests_and_hits_are_counted_by_replica() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(200, text=PAGE)
        asked.append(request.read().decode())
        return httpx.Response(200, headers={REPLICA_HEADER: f"r{len(asked) % 2}"})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://front") as client:
        assert await ask_all(client, ["a0001"] * 6, 3) == {"r0": 3, "r1": 3}
        assert await counts(client, ["r0", "r1"]) == {"hits": 30, "misses": 10}
    result = Result(2, 20, 30, 10, (3, 3))
    assert result.hit_rate == 0.75
    assert table_of([result], "of").row_count == 1


def test_a_figure_below_the_target_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([Result(3, 20, 50, 50, (1,)), Result(1, 60, 90, 10, (1,))])

    async def measure(*arguments: object) -> Result:
        return next(rates)

    monkeypatch.setattr(ray_serve, "served", lambda *arguments: contextlib.nullcontext("http://front"))
    monkeypatch.setattr(ray_serve, "measure", measure)
    monkeypatch.setattr("sys.argv", ["ray_serve", "--adapters", "2"])
    with pytest.raises(SystemExit) as end:
        ray_serve.main()
    assert end.value.code == 1


async def test_loads_go_to_the_replicas_in_turn_and_are_asked_of_all() -> None:
    loads: list[str] = []
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        replica = request.headers.get(REPLICA_HEADER, f"r{len(asked) % 2}")
        (loads if request.url.path == "/v1/adapters" else asked).append(replica)
        return httpx.Response(200, headers={REPLICA_HEADER: replica})

    transport = httpx.MockTransport(answer)
    client = functools.partial(httpx.AsyncClient, transport=transport)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_serve.httpx, "AsyncClient", client)
        times = await ray_serve.measure_loads("http://front", ["a=/a", "b=/b", "c=/c"], 2)
    assert loads == ["r0", "r1", "r0"]
    assert asked[-6:] == ["r0", "r1"] * 3
    assert all(0 < answered_s < all_s for answered_s, all_s in times)


def test_loads_need_a_registry(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["ray_serve", "--loads", "2"])
    with pytest.raises(SystemExit):
        ray_serve.main()
    assert "go together" in capsys.readouterr().err
