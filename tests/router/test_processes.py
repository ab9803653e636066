"""Two servers of the demo's model and a router, as processes: a server and the router are killed under load and come
back, and what was loaded is there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from loraplex.demo.tasks import adapter_path, assets_path

BASE = str(assets_path() / "base")
READY_S = 120.0


class Program:
    """A `loraplex` command in a session of its own, so that its engine's process is killed with it."""

    def __init__(self, *arguments: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "loraplex", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env=environment,
        )

    def ready_line(self) -> str:
        assert self.process.stdout is not None
        return next(line for line in self.process.stdout if line.startswith("Loraplex"))

    def kill(self) -> None:
        """As `kill -9` of all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in found]


def server(port: int) -> Program:
    adapters = [f"{name}={adapter_path(name)}" for name in ("upper", "reverse")]
    options = ["--served-model-name", "demo", "--no-standby-engine", "--no-access-log", "--num-threads", "1"]
    return Program("serve", BASE, "--port", str(port), *options, "--lora-modules", *adapters)


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    for program in started:
        program.kill()


async def ask(client: httpx.AsyncClient, model: str, max_tokens: int = 12) -> Any:
    body = {"model": model, "prompt": "banana bread=", "max_tokens": max_tokens, "temperature": 0}
    return await client.post("/v1/completions", json={**body, "ignore_eos": max_tokens > 12})


class Load:
    """Sixteen requests at a time, each followed by the next until `stop`: however fast the replicas are, some are under
    way at any moment."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._is_over = False
        self._asking = [asyncio.ensure_future(self._ask(model)) for model in ["upper", "reverse"] * 8]

    async def _ask(self, model: str) -> list[Any]:
        ends: list[Any] = []
        while not self._is_over:
            try:
                ends.append(await ask(self._client, model, 100))
            except httpx.TransportError as error:
                ends.append(error)
                break
        return ends

    async def reaches(self, replica: str) -> None:
        """Until requests are under way at `replica`."""
        async with asyncio.timeout(READY_S):
            some = re.compile(rf'in_flight{{replica="{re.escape(replica)}"}} [1-9]')
            while not some.search((await self._client.get("/metrics")).text):
                await asyncio.sleep(0.01)

    async def stop(self) -> list[Any]:
        """What each request ended with."""
        self._is_over = True
        return [end for ends in await asyncio.gather(*self._asking) for end in ends]


async def test_what_is_killed_under_load_fails_its_own_requests_alone(programs: list[Program]) -> None:
    first, second, front = free_ports(3)
    programs += [server(first), server(second)]
    for program in programs[:2]:
        program.ready_line()
    replicas = [f"127.0.0.1:{first}", f"127.0.0.1:{second}"]
    given = [part for name in replicas for part in ("--replica", name)]
    route = ("route", *given, "--port", str(front), "--policy", "spread", "--poll-interval-s", "0.1")
    programs.append(Program(*route))
    assert programs[2].ready_line() == f"Loraplex routes: http://127.0.0.1:{front} to 2 of 2 replicas\n"
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{front}", timeout=60, trust_env=False) as client:
        alone = {model: (await ask(client, model)).json()["choices"][0]["text"] for model in ("upper", "reverse")}
        assert alone["upper"].startswith("BANANA BREAD")
        loaded = await client.post("/v1/adapters", json={"name": "later", "path": str(adapter_path("sort"))})
        assert loaded.status_code == 200
        alone["later"] = (await ask(client, "later")).json()["choices"][0]["text"]
        load = Load(client)
        await load.reaches(replicas[0])
        programs[0].kill()
        failed = [answer for answer in await load.stop() if answer.status_code != 200]
        assert {answer.json()["error"]["code"] for answer in failed} <= {"replica_lost"}
        assert len(failed) <= 12, "of 16 under way each of those at this replica, about half, at most once"
        for model, text in alone.items():
            assert (await ask(client, model)).json()["choices"][0]["text"] == text
        programs[0] = server(first)
        programs[0].ready_line()
        async with asyncio.timeout(READY_S):
            while (await client.get("/health")).json() != {"status": "ok", "replicas": 2, "available": 2}:
                await asyncio.sleep(0.1)
        async with httpx.AsyncClient(base_url=f"http://{replicas[0]}", timeout=60, trust_env=False) as own:
            text = (await ask(own, "later")).json()["choices"][0]["text"]
            assert text == alone["later"], "its process got what the one before it had"
        # The router, too.
        load = Load(client)
        await load.reaches(replicas[0])
        programs[2].kill()
        ends = await load.stop()
        assert all(isinstance(end, httpx.TransportError) or end.status_code == 200 for end in ends)
        assert any(isinstance(end, httpx.TransportError) for end in ends)
    for replica in replicas:
        async with httpx.AsyncClient(base_url=f"http://{replica}", timeout=60, trust_env=False) as own:
            async with asyncio.timeout(READY_S):
                while not re.search(r"num_requests_running\{.*\} 0\.0", (await own.get("/metrics")).text):
                    await asyncio.sleep(0.1)
    programs[2] = Program(*route)
    programs[2].ready_line()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{front}", timeout=60, trust_env=False) as client:
        for model, text in alone.items():
            assert (await ask(client, model)).json()["choices"][0]["text"] == text
