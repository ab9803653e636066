"""A server as a process and the command line beside it: keys that come and go while it runs, and usage after a kill."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.tenants.limits import Limits
from loraplex.tenants.records import Role, TenantTable
from loraplex.tenants.store import TenantStore, open_store
from loraplex.tenants.usage import UsageQuery
from tests.server.test_shared_registry import Program, until

BODY = {"model": "demo", "prompt": "banana bread=", "max_tokens": 12, "temperature": 0}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Program]]:
    started: list[Program] = []

    def one() -> Program:
        started.append(Program(None, tmp_path / f"{len(started)}.log", "--state-dir", str(tmp_path / "state")))
        started[-1].wait_until_ready()
        return started[-1]

    yield one
    for program in started:
        program.kill()


def drawn(store: TenantStore) -> int:
    return sum(row["generated_tokens"] for row in store.usage(UsageQuery(tenant="acme"), 100))


def test_a_running_server_hears_of_keys_and_its_end_loses_no_second_more(
    start: Callable[[], Program], tmp_path: Path
) -> None:
    program = start()

    def status(secret: str | None, model: str = "demo") -> int:
        headers = {} if secret is None else {"authorization": f"Bearer {secret}"}
        return program.client.post("/v1/completions", json={**BODY, "model": model}, headers=headers).status_code

    assert program.load("upper", "upper").status_code == 200
    assert status(None, "upper") == 200, "without tenants it is open, as ever"
    with closing(open_store(tmp_path / "state", None)) as store:
        store.create_tenant("acme", limits=Limits(concurrency=4))
        _, secret = store.create_key(Role.TENANT, "acme")
        until(lambda: status(None) == 401)
        until(lambda: status(secret) == 200)
        assert status(secret, "upper") == 404
        store.share("upper", [TenantTable.ALL])
        until(lambda: status(secret, "upper") == 200)
        other, other_secret = store.create_key(Role.TENANT, "acme")
        until(lambda: status(other_secret) == 200)
        store.revoke_key(other.key_id)
        until(lambda: status(other_secret) == 401)

        headers = {"authorization": f"Bearer {secret}"}
        until(lambda: drawn(store) > 0)
        answers = program.client.get("/v1/usage", headers=headers).json()["data"]  # it writes what is left first
        before = drawn(store)
        assert sum(row["generated_tokens"] for row in answers) <= before
        long = {**BODY, "prompt": [1], "max_tokens": 240, "ignore_eos": True, "stream": True}
        received = 0
        at_write = 0
        with (
            contextlib.suppress(httpx.HTTPError),
            program.client.stream("POST", "/v1/completions", json=long, headers=headers) as stream,
        ):
            assert stream.status_code == 200, stream.read()
            for line in stream.iter_lines():
                received += line.startswith("data: {")
                if line and received == 20:
                    program.client.get("/v1/usage", headers=headers)  # it writes, while the request runs
                    at_write = drawn(store)
                    program.kill()
        assert program.process.poll() is not None, "it was killed while the request ran"
        at_kill = drawn(store)
        assert before + 20 <= at_write <= at_kill <= before + 240
        program = start()
        assert drawn(store) == at_kill, "no second time"
        assert status(secret) == 200
        assert status(other_secret) == 401
        until(lambda: drawn(store) > at_kill)


def test_a_limit_in_memory_reaches_the_engine_while_it_runs(start: Callable[[], Program], tmp_path: Path) -> None:
    program = start()
    with closing(open_store(tmp_path / "state", None)) as store:
        store.create_tenant("acme")
        _, secret = store.create_key(Role.TENANT, "acme")
        _, admin = store.create_key(Role.ADMIN)
        until(lambda: program.client.get("/v1/models").status_code == 401)
        program.client.headers["authorization"] = f"Bearer {admin}"
        for name in ("upper", "reverse"):
            assert program.load(f"acme/{name}", name).status_code == 200

        def cards() -> list[dict[str, Any]]:
            found = program.client.get("/v1/adapters").json()["data"]
            return [card for card in found if card["tier"] == "device"]

        def say(name: str) -> str:
            answer = program.client.post(
                "/v1/completions", json={**BODY, "model": name}, headers={"authorization": f"Bearer {secret}"}
            )
            return str(answer.json()["choices"][0]["text"]) if answer.is_success else answer.json()["error"]["code"]

        said = {name: say(name) for name in ("upper", "reverse")}
        assert len(cards()) == 2
        store.change_tenant("acme", limits=Limits(device_bytes=max(card["bytes"] for card in cards())))
        until(lambda: len(cards()) == 1)
        for name in ("upper", "reverse") * 3:
            assert say(name) == said[name]
            assert [card["name"] for card in cards()] == [f"acme/{name}"]
        store.change_tenant("acme", limits=Limits(device_bytes=1))
        until(lambda: not cards())
        assert say("upper") == "adapter_beyond_quota"
        program.kill()
        program = start()  # it reads the limit from the database
        program.client.headers["authorization"] = f"Bearer {admin}"
        until(lambda: say("upper") == "adapter_beyond_quota")
        store.change_tenant("acme", limits=Limits())
        until(lambda: say("upper") == said["upper"])
