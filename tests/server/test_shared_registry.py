"""Two servers of the demo's model, as processes, with one registry in PostgreSQL."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.demo.tasks import TASKS, adapter_path, assets_path
from tests import postgres

BASE = str(assets_path() / "base")
READY_S = 120.0
NEWS_S = 1.0
SORTED = next(task for task in TASKS if task.name == "sort").apply("banana bread")
SECRET = "SECRET-of-the-database"


class Program:
    """`loraplex serve` in a session of its own, so that its engine's process is killed with it. url: of a database."""

    def __init__(self, url: str | None, log: Path, *arguments: str) -> None:
        self.log = log
        database = {} if url is None else {"LORAPLEX_DATABASE_URL": url}
        options = ["--served-model-name", "demo", "--no-standby-engine", "--num-threads", "1", "--log-level", "debug"]
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "loraplex", "serve", BASE, "--port", "0", *options, *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **database},
            )
        self.client = httpx.Client(timeout=60, trust_env=False)

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        line = next((line for line in self.process.stdout if line.startswith("Loraplex")), None)
        assert line is not None, self.log.read_text()
        address = next(word for word in line.split() if word.startswith("http://"))
        self.client.base_url = address

    def kill(self) -> None:
        """As `kill -9` of all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.client.close()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def ask(self, model: str) -> Any:
        body = {"model": model, "prompt": "banana bread=", "max_tokens": 12, "temperature": 0}
        answer = self.client.post("/v1/completions", json=body)
        return answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.json()["error"]["message"]

    def post(self, url: str, /, **body: Any) -> httpx.Response:
        return self.client.post(url, json=body or None)

    def load(self, name: str, adapter: str, **wishes: Any) -> httpx.Response:
        return self.post("/v1/adapters", name=name, path=str(adapter_path(adapter)), **wishes)


@pytest.fixture
def start(postgres_cluster: postgres.Cluster, tmp_path: Path) -> Iterator[Callable[..., Program]]:
    started: list[Program] = []
    url = postgres_cluster.new_schema().replace("loraplex@", f"loraplex:{SECRET}@")

    def one() -> Program:
        started.append(Program(url, tmp_path / f"{len(started)}.log"))
        return started[-1]

    yield one
    for program in started:
        program.kill()


def until(is_so: Callable[[], bool], within_s: float = 30.0) -> None:
    began_s = time.monotonic()
    while not is_so():
        assert time.monotonic() - began_s < within_s, "it did not come to be in time"
        time.sleep(0.01)


def test_what_one_server_did_the_other_answers_with(
    start: Callable[..., Program], postgres_cluster: postgres.Cluster
) -> None:
    one, other = start(), start()
    for program in (one, other):
        program.wait_until_ready()

    def says(program: Program, model: str, text: str) -> None:
        def is_said() -> bool:
            return program.ask(model).startswith(text)

        until(is_said, NEWS_S)

    def state_of(program: Program) -> tuple[str, str | None]:
        health = (program.client.get("/health")).json()
        return health["status"], health.get("database")

    assert state_of(one) == ("ok", "connected")
    assert one.load("mine", "upper").status_code == 200
    says(other, "mine", "BANANA BREAD")
    assert (other.load("mine", "reverse", load_inplace=True)).json()["version"] == 2
    says(one, "mine", "daerb ananab")
    assert one.post("/v1/adapters/mine/rollback").status_code == 200
    says(other, "mine", "BANANA BREAD")
    assert other.post("/v1/adapters/mine/pin").status_code == 200
    until(lambda: _is_pinned(one, "mine"), NEWS_S)

    postgres_cluster.stop()
    try:

        def is_down() -> bool:
            return [state_of(one), state_of(other)] == [("degraded", "down")] * 2

        until(is_down)
        for program in (one, other):
            assert program.ask("mine").startswith("BANANA BREAD")
        refused = [
            one.load("late", "sort"),
            one.post("/v1/adapters/mine/unpin"),
            one.client.delete("/v1/adapters/mine"),
            other.post("/v1/unload_lora_adapter", lora_name="mine"),
        ]
        assert [answer.status_code for answer in refused] == [503] * 4
        assert "nothing was changed" in refused[0].json()["error"]["message"]
        assert len((one.client.get("/v1/adapters")).json()["data"]) == 1
    finally:
        postgres_cluster.start()
    until(lambda: one.load("late", "sort").status_code == 200)
    one.kill()  # at once: what was acknowledged is there
    says(other, "late", SORTED)
    assert other.client.delete("/v1/adapters/mine").status_code == 200
    again = start()
    again.wait_until_ready()
    assert [card["name"] for card in (again.client.get("/v1/adapters")).json()["data"]] == ["late"]
    assert again.ask("late") == other.ask("late")
    again.process.send_signal(signal.SIGTERM)
    assert again.process.wait(READY_S) == 0
    for program in (one, other, again):
        assert SECRET not in program.log.read_text()
    assert "is away" in other.log.read_text()
    assert SECRET not in Path(f"/proc/{other.process.pid}/cmdline").read_text()
    children = Path(f"/proc/{other.process.pid}/task/{other.process.pid}/children").read_text().split()
    assert children
    for child in children:
        assert SECRET not in Path(f"/proc/{child}/environ").read_text()


def _is_pinned(program: Program, name: str) -> bool:
    return bool((program.client.get(f"/v1/adapters/{name}")).json()["is_pinned"])
