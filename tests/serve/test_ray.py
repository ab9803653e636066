"""The demo's model on a real local Ray: replicas with one registry, under load, killed and replaced."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest

from loraplex.core import LoRARequest, SamplingParams
from loraplex.demo.tasks import adapter_path
from loraplex.serve.exchange import REPLICA_HEADER
from loraplex.tenants.records import Role
from loraplex.tenants.store import open_store
from tests import postgres
from tests.serve.cluster import BASE, Cluster, modules, proxied, served, until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install loraplex[ray]"
    ),
]

PROMPT = "banana bread="
ADAPTERS = ("upper", "reverse")
KEY = "a-key-of-sixteen"
BEARER = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    running = Cluster()
    try:
        yield running
    finally:
        running.end()


@pytest.fixture(scope="module")
def alone() -> dict[str, str]:
    """What one offline engine answers, by model."""
    from loraplex.frontend.llm import LLM

    requests = [LoRARequest(name, number, str(adapter_path(name))) for number, name in enumerate(ADAPTERS, 1)]
    with LLM(BASE, num_threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        outputs = llm.generate([PROMPT] * 3, params, lora_request=[None, *requests])
    return {name: each.outputs[0].text for name, each in zip(("demo", *ADAPTERS), outputs, strict=True)}


def completion(model: str, max_tokens: int = 12, **fields: Any) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": max_tokens > 12,
        **fields,
    }


def text_of(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["text"])


def replicas_of(client: httpx.Client, count: int) -> list[str]:
    """Their names: one after the other answers, where the shortest queue is chosen."""
    found: set[str] = set()

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=client.base_url, headers=client.headers, timeout=60) as many:
            calls = [many.post("/v1/completions", json=completion("demo", 64)) for _ in range(4 * count)]
            found.update(answer.headers[REPLICA_HEADER] for answer in await asyncio.gather(*calls))

    def is_whole() -> bool:
        asyncio.run(ask())
        return len(found) == count

    until(is_whole)
    return sorted(found)


def test_three_replicas_answer_as_one_engine_and_share_their_names(
    cluster: Cluster, alone: dict[str, str], postgres_cluster: postgres.Cluster
) -> None:
    options = ["--lora-modules", *modules(ADAPTERS), "--ray-min-replicas", "3", "--ray-policy", "spread"]
    options += ["--ray-replica-requests", "6"]
    variables = {"LORAPLEX_DATABASE_URL": postgres_cluster.new_schema(), "LORAPLEX_API_KEY": KEY}
    with (
        served(cluster, *options, **variables) as url,
        httpx.Client(base_url=url, timeout=60, headers=BEARER, trust_env=False) as client,
    ):
        assert httpx.post(f"{url}/v1/completions", json=completion("demo")).status_code == 401
        names = replicas_of(client, 3)
        for name in names:
            for model, text in alone.items():
                answer = client.post("/v1/completions", json=completion(model), headers={REPLICA_HEADER: name})
                assert (answer.headers[REPLICA_HEADER], text_of(answer)) == (name, text)
        _check_stream(client, alone["upper"])
        _check_disconnect(client, names[0])
        _check_names(client, names, alone["reverse"])
        asyncio.run(_check_named(url, names[0]))
        asyncio.run(_check_kill(cluster, url, alone))
        until(lambda: client.get("/health").json()["available"] == 3)
        for name in replicas_of(client, 3):
            mine = client.post("/v1/completions", json=completion("mine"), headers={REPLICA_HEADER: name})
            assert text_of(mine) == alone["reverse"], "a new replica has what was loaded before it was there"


def _check_stream(client: httpx.Client, text: str) -> None:
    with client.stream("POST", "/v1/completions", json=completion("upper", stream=True)) as stream:
        events = [line for line in stream.iter_lines() if line]
    assert events[-1] == "data: [DONE]"
    assert len(events) > 3
    parts = [httpx.Response(200, content=line.removeprefix("data: ")) for line in events[:-1]]
    assert "".join(map(text_of, parts)) == text


def _check_disconnect(client: httpx.Client, name: str) -> None:
    def num_running() -> float:
        page = client.get("/metrics", headers={REPLICA_HEADER: name}).text.splitlines()
        return sum(float(line.split()[-1]) for line in page if line.startswith("vllm:num_requests_running{"))

    body = completion("demo", 200, stream=True, n=4)
    with client.stream("POST", "/v1/completions", json=body, headers={REPLICA_HEADER: name}) as stream:
        next(stream.iter_lines())
        assert (stream.status_code, stream.headers[REPLICA_HEADER]) == (200, name)
    until(lambda: num_running() == 0, 30)


def _check_names(client: httpx.Client, names: list[str], text: str) -> None:
    """A load at one is answered when all have it."""
    body = {"name": "mine", "path": str(adapter_path("reverse"))}
    assert client.post("/v1/adapters", json=body, headers={REPLICA_HEADER: names[1]}).status_code == 200
    for name in names:
        answer = client.post("/v1/completions", json=completion("mine"), headers={REPLICA_HEADER: name})
        assert text_of(answer) == text


async def _check_named(url: str, name: str) -> None:
    """What names a replica that has no place does not wait in the queue of all: it would keep others from it."""
    headers = {**BEARER, REPLICA_HEADER: name}
    async with httpx.AsyncClient(base_url=url, timeout=120, headers=headers, trust_env=False) as client:
        calls = [client.post("/v1/completions", json=completion("demo", 200)) for _ in range(18)]
        statuses = [answer.status_code for answer in await asyncio.gather(*calls)]
    assert set(statuses) == {200, 404}


async def _check_kill(cluster: Cluster, url: str, alone: dict[str, str]) -> None:
    """As `kill -9` of one replica under load: only what ran there fails, the rest goes on."""
    async with httpx.AsyncClient(base_url=url, timeout=120, headers=BEARER, trust_env=False) as client:
        processes = cluster.replica_processes("loraplex")
        assert len(processes) == 3
        victim = processes[0]
        engines = victim.children(recursive=True)
        assert engines
        running: set[asyncio.Task[httpx.Response]] = set()
        while not running:  # all may have ended when this process, on a busy machine, has its turn
            calls = [
                asyncio.create_task(client.post("/v1/completions", json=completion(model, 200)))
                for model in ("upper", "reverse", "demo") * 8
            ]
            _, running = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        victim.kill()
        answers = await asyncio.gather(*calls)
        failed = [answer for answer in answers if answer.status_code != 200]
        assert {(answer.status_code, answer.json()["error"]["code"]) for answer in failed} <= {(502, "replica_lost")}
        assert len(failed) <= 8 + 1
        for model, text in alone.items():
            assert text_of(await client.post("/v1/completions", json=completion(model))) == text
        await asyncio.to_thread(until, lambda: not any(process.is_running() for process in engines), 30)


def test_replicas_behind_proxies_are_replaced_without_an_error(
    cluster: Cluster, alone: dict[str, str], postgres_cluster: postgres.Cluster
) -> None:
    """And their ingresses know the keys of tenants, which are made while they run."""
    database_url = postgres_cluster.new_schema()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = {
        "model": BASE,
        "served_model_names": ["demo"],
        "lora_modules": modules(ADAPTERS),
        "engine": {"num_threads": 1},
        "server": {"standby_engine": False, "disable_dynamic_loading": True, "database_url": database_url},
        "keys": {"api_key": [KEY]},
        "ray": {"ray_min_replicas": 2, "ray_num_cpus": 0.01},
    }
    url = f"http://127.0.0.1:{port}"
    with proxied(cluster, port, config) as program:
        # each of two ingresses asks once a second whether a replica runs
        until(lambda: all(httpx.get(f"{url}/health").status_code == 200 for _ in range(16)))
        asyncio.run(_check_replacement(url, program, alone))
        with closing(open_store(None, database_url)) as store:
            store.create_tenant("acme")
            _, secret = store.create_key(Role.TENANT, "acme")
        headers = {"Authorization": f"Bearer {secret}"}
        until(lambda: httpx.get(f"{url}/v1/models", headers=headers).status_code == 200, 30)
        assert httpx.get(f"{url}/metrics").status_code == 401


async def _check_replacement(url: str, program: Any, alone: dict[str, str]) -> None:
    is_over = False
    seen: set[str] = set()
    num_answers = 0

    async def load(client: httpx.AsyncClient) -> None:
        nonlocal num_answers
        models = list(alone)
        while not is_over:
            model = models[num_answers % len(models)]
            num_answers += 1
            answer = await client.post("/v1/completions", json=completion(model))
            assert (answer.status_code, text_of(answer)) == (200, alone[model])
            seen.add(answer.headers[REPLICA_HEADER])

    async with httpx.AsyncClient(base_url=url, timeout=120, headers=BEARER, trust_env=False) as client:
        assert (
            await client.post("/v1/completions", json=completion("demo"), headers={"Authorization": "x"})
        ).status_code == 401
        refused = await client.post("/v1/adapters", json={"name": "late", "path": "x"})
        assert refused.status_code == 403
        loads = [asyncio.ensure_future(load(client)) for _ in range(4)]
        while len(seen) < 2:
            await asyncio.sleep(0.05)
        first = set(seen)
        program.tell()
        assert await asyncio.to_thread(program.line) == "ready"
        while len(seen - first) < 2:
            await asyncio.sleep(0.05)
        is_over = True
        await asyncio.gather(*loads)
        assert (await client.get("/health")).status_code == 200


def test_a_replica_that_is_not_needed_is_drained_without_an_error(cluster: Cluster, alone: dict[str, str]) -> None:
    """Serve adds one while many requests run at once, and takes it away while some still do."""
    bounds = ["--ray-min-replicas", "1", "--ray-max-replicas", "2", "--ray-target-requests", "2"]
    delays = ["--ray-upscale-delay-s", "1", "--ray-downscale-delay-s", "3", "--disable-dynamic-loading"]
    with served(cluster, "--lora-modules", *modules(ADAPTERS), *bounds, *delays) as url:
        asyncio.run(_check_scaling(url, alone))


async def _check_scaling(url: str, alone: dict[str, str]) -> None:
    most = 8
    seen: set[str] = set()

    async def load(number: int) -> None:
        model = list(alone)[number % len(alone)]
        while number < most:
            answer = await client.post("/v1/completions", json=completion(model, 12))
            assert (answer.status_code, text_of(answer)) == (200, alone[model])
            seen.add(answer.headers[REPLICA_HEADER])

    async def are(count: int) -> None:
        while (await client.get("/health")).json()["available"] != count:
            await asyncio.sleep(0.1)

    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client, asyncio.timeout(240):
        await are(1)
        loads = [asyncio.ensure_future(load(number)) for number in range(most)]
        await are(2)
        while len(seen) < 2:
            await asyncio.sleep(0.05)
        most = 2
        await are(1)
        seen.clear()
        while not seen:
            await asyncio.sleep(0.05)
        most = 0
        await asyncio.gather(*loads)
        assert len(seen) == 1
