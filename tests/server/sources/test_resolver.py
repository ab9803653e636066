"""Adapters by need over HTTP: single flight, whose name it is, bounds, and what a client is told."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Message

from loraplex.adapters.registry import OpenedAdapter
from loraplex.core import AdapterMix
from loraplex.errors import AdapterPathNotFoundError, AdapterValidationError, LoraplexError
from loraplex.server import ServerConfig, create_app
from loraplex.server.api_error import ApiError
from loraplex.server.auth import KEYLESS
from loraplex.server.sources.room import JUST_USED_S
from loraplex.tenants.limits import Limits
from loraplex.testing import FakeAsyncEngine
from tests.security.tenancy import Tenancy, tenancy
from tests.server.conftest import client_of


class Opener:
    """Notes what is opened; waits for `gate`, or that of `gates` for the path; fails for paths of `errors`."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.errors: dict[str, LoraplexError] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.gates: dict[str, threading.Event] = {}
        self.nbytes = 1024

    def __call__(self, path: str) -> OpenedAdapter:
        self.paths.append(path)
        assert self.gates.get(path, self.gate).wait(30)
        if path in self.errors:
            raise self.errors[path]
        return OpenedAdapter(path, hashlib.sha256(path.encode()).hexdigest(), self.nbytes, 8)


@pytest.fixture
def opener() -> Opener:
    return Opener()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("sql", "chat", "code", "bad"):
        (tmp_path / "root" / name).mkdir(parents=True)
        (tmp_path / "root" / name / "adapter_config.json").write_text("{}")
    return tmp_path / "root"


@asynccontextmanager
async def serving(
    opener: Opener, *sources: str, adapters: dict[str, str] | None = None, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, FakeAsyncEngine]]:
    engine = FakeAsyncEngine(adapters or {}, open_adapter=opener)
    opener.paths.clear()
    async with client_of(create_app(engine, ServerConfig(adapter_sources=sources, **settings))) as client:
        yield client, engine
    assert engine.registry is not None
    assert engine.registry.num_references == 0
    engine.registry.check_integrity()


async def ask(client: httpx.AsyncClient, model: str, key: str = "", **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {"model": model, "prompt": "x", "max_tokens": 2, **fields}
    return await client.post("/v1/completions", json=body, headers=headers)


async def listed(client: httpx.AsyncClient, key: str = "") -> list[str]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return [each["name"] for each in (await client.get("/v1/adapters", headers=headers)).json()["data"]]


async def test_the_first_request_loads_it(opener: Opener, root: Path) -> None:
    """Under the name that the client wrote, once; every route that takes a model does."""
    async with serving(opener, f"dir={root}") as (client, _):
        first = await ask(client, "sql")
        assert (first.status_code, first.json()["model"]) == (200, "sql")
        assert (await ask(client, "sql")).status_code == 200
        assert opener.paths == [str(root / "sql")]
        messages = [{"role": "user", "content": "x"}]
        chat = await client.post("/v1/chat/completions", json={"model": "base:chat", "messages": messages})
        assert chat.status_code == 200
        assert (await client.post("/tokenize", json={"model": "dir/code", "prompt": "x"})).status_code == 200
        body = {"model": "dir/chat", "messages": messages}
        assert (await client.post("/v1/messages/count_tokens", json=body)).status_code == 200
        mix = await ask(client, "base", merged_adapters={"ids": ["code", "sql"], "weights": [1, 1]})
        assert mix.status_code == 200, mix.text
        assert await listed(client) == ["sql", "chat", "dir/code", "dir/chat", "code"]
        card = (await client.get("/v1/adapters/sql")).json()
        assert (card["origin"], card["path"]) == ("source:dir", str(root / "sql"))


async def test_loraxs_adapter_source_names_it(opener: Opener, root: Path) -> None:
    """By its name or its kind; what SGLang's `lora_path` says is a name as in `model`."""
    async with serving(opener, f"other={root / 'chat'}", f"dir={root}") as (client, _):
        for source, adapter, path in (("dir", "sql", "/generate"), ("dir", "code", "/generate_stream")):
            body = {"inputs": "x", "parameters": {"adapter_id": adapter, "adapter_source": source, "max_new_tokens": 2}}
            assert (await client.post(path, json=body)).status_code == 200
        body = {"text": "x", "lora_path": "dir/chat", "sampling_params": {"max_new_tokens": 2}}
        assert (await client.post("/generate", json=body)).status_code == 200
        assert await listed(client) == ["dir/sql", "dir/code", "dir/chat"]
        body = {"inputs": "x", "parameters": {"adapter_id": "sql", "adapter_source": "s3"}}
        assert (await client.post("/generate", json=body)).status_code == 400


@pytest.mark.parametrize("name", ["missing", "../sql", "/etc", "dir/../sql", "other/sql", "sql@2", "sql/", "ﬁ"])
async def test_what_no_source_has_is_404_and_registers_nothing(opener: Opener, root: Path, name: str) -> None:
    async with serving(opener, f"dir={root}") as (client, _):
        answer = await ask(client, name)
        assert answer.status_code == 404, answer.text
        assert answer.json()["error"]["code"] == "model_not_found"
        assert str(root) not in answer.text
        assert (await listed(client), opener.paths) == ([], [])


async def test_without_a_source_nothing_is_loaded(opener: Opener, root: Path) -> None:
    async with serving(opener) as (client, _):
        assert (await ask(client, str(root / "sql"))).status_code == 404
        assert opener.paths == []


async def test_a_registered_name_is_never_looked_up(opener: Opener, root: Path) -> None:
    async with serving(opener, f"dir={root}", adapters={"sql": "/elsewhere"}) as (client, engine):
        assert (await ask(client, "sql")).status_code == 200
        assert opener.paths == []
        assert (await ask(client, "dir/sql")).status_code == 200
        assert engine.registry is not None
        assert engine.registry.spec_of(engine.registry.resolve("sql")).path == "/elsewhere"
        assert engine.registry.spec_of(engine.registry.resolve("dir/sql")).path == str(root / "sql")


async def test_requests_for_one_name_are_one_load(opener: Opener, root: Path) -> None:
    """Also when the first of them leaves before it is done."""
    async with serving(opener, f"dir={root}") as (client, _):
        opener.gate.clear()
        asking = [asyncio.ensure_future(ask(client, "sql")) for _ in range(20)]
        while not opener.paths:
            await asyncio.sleep(0.001)
        asking[0].cancel()
        await asyncio.sleep(0)
        opener.gate.set()
        answers = await asyncio.gather(*asking[1:])
        assert {answer.status_code for answer in answers} == {200}
        assert opener.paths == [str(root / "sql")]


async def test_a_bad_adapter_is_read_once_in_a_while(opener: Opener, root: Path) -> None:
    """Its error goes to each of those that ask."""
    path = str(root / "bad")
    async with serving(opener, f"dir={root}") as (client, _):
        opener.errors[path] = AdapterValidationError("adapter 'bad': not usable", ["a reason"])
        answers = [await ask(client, "bad") for _ in range(3)]
        assert {answer.status_code for answer in answers} == {400}
        assert opener.paths == [path]
        assert "adapter 'bad': not usable" in answers[0].text
        assert answers[0].text == answers[2].text
        assert (await ask(client, "sql")).status_code == 200


async def test_what_the_hub_has_not_is_asked_once_in_a_while(opener: Opener) -> None:
    async with serving(opener, "hub=hf://org") as (client, _):
        opener.errors["hf://org/none"] = AdapterPathNotFoundError("adapter 'org/none': the hub has no such repository")
        answers = [await ask(client, name) for name in ("none", "none", "none")]
        assert [answer.json()["error"]["code"] for answer in answers] == ["model_not_found"] * 3
        assert opener.paths == ["hf://org/none"]


async def test_a_new_directory_is_found_at_once(opener: Opener, root: Path) -> None:
    async with serving(opener, f"dir={root}") as (client, _):
        assert (await ask(client, "new")).status_code == 404
        (root / "new").mkdir()
        (root / "new/adapter_config.json").write_text("{}")
        assert (await ask(client, "new")).status_code == 200


async def test_the_least_recently_used_name_is_unloaded(
    opener: Opener, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that came by need, with neither request nor pin; it is back with its next request."""
    monkeypatch.setattr("loraplex.server.sources.room.JUST_USED_S", 0.0)
    async with serving(opener, f"dir={root}", adapters={"own": "/own"}, max_sourced_adapters=2) as (client, _):
        for name in ("sql", "chat", "sql", "code"):
            assert (await ask(client, name)).status_code == 200
        assert await listed(client) == ["own", "sql", "code"]
        assert (await client.post("/v1/adapters/sql/pin")).status_code == 200
        assert (await ask(client, "chat")).status_code == 200
        assert await listed(client) == ["own", "sql", "chat"]
        assert (await client.post("/v1/adapters/chat/pin")).status_code == 200
        full = await ask(client, "code")
        assert (full.status_code, "try again later" in full.text) == (503, True)


async def test_max_loaded_loras_is_room_for_names_by_need_too(
    opener: Opener, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.server.sources.room.JUST_USED_S", 0.0)
    async with serving(opener, f"dir={root}", adapters={"own": "/own"}) as (client, engine):
        assert engine.registry is not None
        monkeypatch.setattr(engine.registry, "max_loaded_loras", 2)
        assert [(await ask(client, name)).status_code for name in ("sql", "chat")] == [200, 200]
        assert await listed(client) == ["own", "chat"]


async def test_loads_by_need_at_a_time_are_bounded(opener: Opener, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.server.sources.resolver.MAX_LOADS_OF_A_CLIENT", 1)
    monkeypatch.setattr("loraplex.server.verb_turns.PATIENCE_S", 0.05)
    async with serving(opener, f"dir={root}") as (client, _):
        opener.gate.clear()
        first = asyncio.ensure_future(ask(client, "sql"))
        while not opener.paths:
            await asyncio.sleep(0.001)
        second = await ask(client, "chat")
        assert (second.status_code, second.json()["error"]["code"]) == (429, "too_many_verbs")
        opener.gate.set()
        assert (await first).status_code == 200


@asynccontextmanager
async def two_clients(
    tmp_path: Path, opener: Opener, root: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[[str, int], asyncio.Future[httpx.Response]]]:
    """Each has one place, for which it waits for an hour. Gives what asks for a name, of the first or the second."""
    monkeypatch.setattr("loraplex.server.sources.resolver.MAX_LOADS_OF_A_CLIENT", 1)
    monkeypatch.setattr("loraplex.server.verb_turns.PATIENCE_S", 3600.0)
    async with tenants(tmp_path, opener, f"dir={root}") as (client, made):
        keys = made.keys["inference"], made.keys["admin"]
        async with asyncio.timeout(60):
            yield lambda name, number: asyncio.ensure_future(ask(client, name, keys[number]))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def test_a_client_with_a_place_waits_for_no_place_of_another(
    tmp_path: Path, opener: Opener, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shared the load of a client that had asked first, and that waited for one of its own places."""
    async with two_clients(tmp_path, opener, root, monkeypatch) as asking:
        opener.gate.clear()
        answers = [asking("chat", 0)]
        await until(lambda: len(opener.paths) == 1)
        answers += [asking("sql", 0), asking("sql", 0)]
        await asyncio.sleep(0.02)
        answers += [asking("sql", 1), asking("sql", 1)]
        await until(lambda: len(opener.paths) == 2)
        answers.append(asking("sql", 0))
        opener.gate.set()
        assert [(await each).status_code for each in answers] == [200] * 6
        assert opener.paths == [str(root / name) for name in ("chat", "sql")]


async def test_the_first_client_that_has_a_place_loads_a_name_for_all(
    tmp_path: Path, opener: Opener, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opener.gates = {str(root / name): threading.Event() for name in ("chat", "code", "sql")}
    async with two_clients(tmp_path, opener, root, monkeypatch) as asking:
        answers = []
        for number, name in enumerate(("chat", "code")):
            answers.append(asking(name, number))
            await until(lambda: len(opener.paths) == len(answers))
        answers += [asking("sql", 0), asking("sql", 1)]
        await asyncio.sleep(0.02)
        opener.gates[str(root / "code")].set()
        await until(lambda: len(opener.paths) == 3)
        opener.gates[str(root / "sql")].set()
        assert [(await each).status_code for each in answers[1:]] == [200] * 3
        opener.gates[str(root / "chat")].set()
        assert (await answers[0]).status_code == 200
        assert opener.paths == [str(root / name) for name in ("chat", "code", "sql")]


async def test_disable_dynamic_loading_leaves_the_operators_sources(opener: Opener, root: Path) -> None:
    async with serving(opener, f"dir={root}", disable_dynamic_loading=True) as (client, _):
        assert (await ask(client, "sql")).status_code == 200
        assert (await client.delete("/v1/adapters/sql")).status_code == 403


async def test_pages_of_what_a_source_has(opener: Opener, root: Path) -> None:
    """Registered or not; a name of a page is what a request says."""
    async with serving(opener, f"dir={root}", "hub=hf://org") as (client, _):
        whole = (await client.get("/v1/adapters", params={"source": "dir"})).json()
        assert [each["name"] for each in whole["data"]] == ["dir/bad", "dir/chat", "dir/code", "dir/sql"]
        assert whole["has_more"] is False
        seen, after = [], ""
        while after is not None:
            page = (await client.get("/v1/adapters", params={"source": "dir", "limit": 3, "after": after})).json()
            seen += [each["name"] for each in page["data"]]
            after = page["last_id"] if page["has_more"] else None
        assert seen == [each["name"] for each in whole["data"]]
        assert (await ask(client, seen[-1])).status_code == 200
        some = (await client.get("/v1/adapters", params={"source": "dir", "prefix": "dir/c", "contains": "od"})).json()
        assert [each["name"] for each in some["data"]] == ["dir/code"]
        queries = [{"source": "hub"}, {"source": "none"}, {"source": "dir", "pinned": "true"}]
        answers = [await client.get("/v1/adapters", params=query) for query in queries]
        assert [each.status_code for each in answers] == [400, 404, 400]


# ------------------------------------------------------------------------------------------------------------ tenants


@asynccontextmanager
async def tenants(
    tmp_path: Path, opener: Opener, *sources: str, limits: Limits | None = None, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Tenancy]]:
    with tenancy(tmp_path, {}, limits, open_adapter=opener, adapter_sources=sources, **settings) as made:
        async with client_of(made.app) as client:
            yield client, made


async def test_a_name_is_registered_in_its_tenants_space(tmp_path: Path, root: Path, opener: Opener) -> None:
    async with tenants(tmp_path, opener, f"dir={root}", f"beta/own={root}") as (client, made):
        acme, beta = made.keys["acme"], made.keys["beta"]
        assert (await ask(client, "sql", acme)).json()["model"] == "sql"
        assert (await ask(client, "acme/chat", acme)).status_code == 200
        assert await listed(client, acme) == ["sql", "chat"]
        assert await listed(client, beta) == []
        assert (await ask(client, "own/sql", beta)).status_code == 200
        assert (await ask(client, "own/sql", acme)).status_code == 404
        assert (await ask(client, "acme/sql", beta)).status_code == 404
        assert await listed(client, made.keys["admin"]) == ["acme/sql", "acme/chat", "beta/own/sql"]


async def test_an_operator_loads_nothing_into_a_tenants_space(tmp_path: Path, root: Path, opener: Opener) -> None:
    async with tenants(tmp_path, opener, "hub=hf://", f"acme={root}") as (client, made):
        assert (await ask(client, "acme/sql", made.keys["admin"])).status_code == 404
        assert opener.paths == []


async def test_a_tenants_source_is_as_if_it_were_not_there(tmp_path: Path, root: Path, opener: Opener) -> None:
    """The answer about another's adapter is that about one which nothing has."""
    async with tenants(tmp_path, opener, f"beta/own={root}") as (client, made):
        answers = [await ask(client, name, made.keys["acme"]) for name in ("own/sql", "own/nil", "sql")]
        headers = {"authorization": f"Bearer {made.keys['acme']}"}
        lists = [await client.get("/v1/adapters", params={"source": each}, headers=headers) for each in ("own", "nil")]
        assert [each.status_code for each in lists] == [404, 404]
        assert lists[0].text.replace("own", "nil") == lists[1].text
        texts = {each.text.replace(name, "") for each, name in zip(answers, ("own/sql", "own/nil", "sql"), strict=True)}
        assert len(texts) == 1
        assert opener.paths == []


async def test_a_tenants_quota_counts_and_its_own_names_leave_for_it(
    tmp_path: Path, root: Path, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.server.sources.room.JUST_USED_S", 0.0)
    async with tenants(tmp_path, opener, f"dir={root}", limits=Limits(adapters=2)) as (client, made):
        acme, beta = made.keys["acme"], made.keys["beta"]
        assert (await ask(client, "bad", beta)).status_code == 200
        for name in ("sql", "chat", "code"):
            assert (await ask(client, name, acme)).status_code == 200
        assert await listed(client, acme) == ["chat", "code"]
        assert await listed(client, beta) == ["bad"]
        body = {"name": "acme/loaded", "path": "/srv/acme/loaded"}
        admin = {"authorization": f"Bearer {made.keys['admin']}"}
        for name in ("chat", "code"):
            assert (await client.delete(f"/v1/adapters/acme/{name}", headers=admin)).status_code == 200
        for name in ("one", "two"):
            body = {"name": f"acme/{name}", "path": f"/srv/acme/{name}"}
            assert (await client.post("/v1/adapters", json=body, headers=admin)).status_code == 200
        refused = await ask(client, "sql", acme)
        assert (refused.status_code, "may have 2" in refused.text) == (429, True)


@pytest.mark.parametrize("limits", [Limits(adapters=1), Limits(adapter_bytes=1024), Limits(adapter_bytes=1025)])
async def test_a_name_that_a_request_is_about_to_take_makes_no_room(
    tmp_path: Path, root: Path, opener: Opener, monkeypatch: pytest.MonkeyPatch, limits: Limits
) -> None:
    """The parts of a mix unloaded one another, and it was 404. Now it is 429, and worth another try soon."""
    monkeypatch.setattr("loraplex.server.sources.room.JUST_USED_S", 30.0)
    async with tenants(tmp_path, opener, f"dir={root}", limits=limits) as (client, made):
        acme = made.keys["acme"]
        for _ in range(2):
            mix = await ask(client, "base", acme, merged_adapters={"ids": ["sql", "chat"], "weights": [1, 1]})
            assert (mix.status_code, mix.json()["error"]["code"]) == (429, "tenant_limit"), mix.text
            assert mix.headers["Retry-After"] == "30"
        assert await listed(client, acme) == ["sql"]


async def test_bytes_of_a_tenant(tmp_path: Path, root: Path, opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.server.sources.room.JUST_USED_S", 0.0)
    async with tenants(tmp_path, opener, f"dir={root}", limits=Limits(adapter_bytes=2048)) as (client, made):
        acme = made.keys["acme"]
        for name in ("sql", "chat", "code"):
            assert (await ask(client, name, acme)).status_code == 200
        assert await listed(client, acme) == ["chat", "code"]
        opener.nbytes = 4096
        refused = await ask(client, "bad", acme)
        assert (refused.status_code, "adapter_bytes" in refused.text or "bytes" in refused.text) == (429, True)


async def test_what_can_never_fit_unloads_nothing_and_is_opened_once(
    tmp_path: Path, root: Path, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One such request emptied the tenant's names, and each one opened the files again."""
    monkeypatch.setattr("loraplex.server.sources.room.JUST_USED_S", 0.0)
    async with tenants(tmp_path, opener, f"dir={root}", limits=Limits(adapter_bytes=3000)) as (client, made):
        acme = made.keys["acme"]
        for name in ("sql", "chat"):
            assert (await ask(client, name, acme)).status_code == 200
        opener.nbytes = 3001
        answers = [await ask(client, "code", acme) for _ in range(3)]
        assert [(each.status_code, each.headers["Retry-After"]) for each in answers] == [(429, "60")] * 3
        assert len({each.text for each in answers}) == 1
        assert await listed(client, acme) == ["sql", "chat"]
        assert opener.paths.count(str(root / "code")) == 1
        opener.nbytes = 3000
        assert (await ask(client, "bad", acme)).status_code == 200
        assert await listed(client, acme) == ["bad"]


async def test_the_tenant_with_most_names_loses_one(
    tmp_path: Path, root: Path, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.server.sources.room.JUST_USED_S", 0.0)
    async with tenants(tmp_path, opener, f"dir={root}", max_sourced_adapters=4) as (client, made):
        acme, beta = made.keys["acme"], made.keys["beta"]
        assert (await ask(client, "sql", beta)).status_code == 200
        for name in ("sql", "chat", "code", "dir/sql", "dir/chat"):
            assert (await ask(client, name, acme)).status_code == 200
        assert await listed(client, beta) == ["sql"]
        assert len(await listed(client, acme)) == 3


async def test_a_name_whose_switch_leads_nowhere_is_looked_up_in_no_source(
    tmp_path: Path, root: Path, opener: Opener
) -> None:
    """The load's error named the operator's adapter that it had been switched to."""
    async with tenants(tmp_path, opener, f"dir={root}") as (client, made):
        acme, registry = made.keys["acme"], made.app.state.context.engine.registry
        assert (await ask(client, "sql", acme)).status_code == 200
        registry.load("secret-project", "/srv/secret")
        registry.switch("acme/sql", "secret-project")
        registry.unload("secret-project")
        opener.paths.clear()
        answer = await ask(client, "sql", acme)
        assert (answer.status_code, "secret" in answer.text) == (404, False), answer.text
        assert opener.paths == []


@pytest.mark.parametrize("is_by_limit", [False, True])
async def test_a_name_that_was_to_make_room_is_gone_or_pinned_meanwhile(
    tmp_path: Path, root: Path, opener: Opener, monkeypatch: pytest.MonkeyPatch, is_by_limit: bool
) -> None:
    """Its absence was another client's 404, with its name in it."""
    monkeypatch.setattr("loraplex.server.sources.room.JUST_USED_S", 0.0)
    settings: dict[str, Any] = {"limits": Limits(adapters=1)} if is_by_limit else {"max_sourced_adapters": 1}
    async with tenants(tmp_path, opener, f"dir={root}", **settings) as (client, made):
        owner, registry = "acme" if is_by_limit else "beta", made.app.state.context.engine.registry
        look, after_looks = registry.loaded_from, list[Callable[[], Any]]()

        def look_early(origin: str) -> Any:
            found = look(origin)
            if after_looks:
                after_looks.pop(0)()
            return found

        monkeypatch.setattr(registry, "loaded_from", look_early)
        assert (await ask(client, "chat", made.keys[owner])).status_code == 200
        for verb, status in ((registry.pin, 429 if is_by_limit else 503), (registry.unload, 200)):
            after_looks.append(partial(verb, f"{owner}/chat"))
            answer = await ask(client, "sql", made.keys["acme"])
            assert (answer.status_code, "chat" in answer.text) == (status, False), answer.text
            if verb == registry.pin:
                assert registry.unpin(f"{owner}/chat")


async def test_loads_that_make_room_at_the_same_time(tmp_path: Path, root: Path, opener: Opener) -> None:
    async with tenants(tmp_path, opener, f"dir={root}", max_sourced_adapters=4) as (client, made):
        keys = [made.keys["acme"], made.keys["beta"]]
        for name in ("bad", "dir/bad"):
            assert [(await ask(client, name, key)).status_code for key in keys] == [200, 200]
        await asyncio.sleep(JUST_USED_S + 0.05)  # they may leave now, and none of those that come next
        opener.gate.clear()
        asking = [asyncio.ensure_future(ask(client, name, key)) for name in ("sql", "chat") for key in keys]
        while len(opener.paths) < 8:
            await asyncio.sleep(0.001)
        opener.gate.set()
        assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}


@pytest.mark.parametrize("is_by_limit", [False, True])
async def test_nothing_leaves_for_an_adapter_that_is_refused(
    tmp_path: Path, root: Path, opener: Opener, monkeypatch: pytest.MonkeyPatch, is_by_limit: bool
) -> None:
    """One that is not good, or too large for its tenant however much leaves, took an idle one's place in vain."""
    monkeypatch.setattr("loraplex.server.sources.room.JUST_USED_S", 0.0)
    limits = Limits(adapters=1) if is_by_limit else Limits()
    settings: dict[str, Any] = {} if is_by_limit else {"max_sourced_adapters": 1}
    async with tenants(tmp_path, opener, f"dir={root}", limits=limits, **settings) as (client, made):
        acme = made.keys["acme"]
        assert (await ask(client, "chat", acme)).status_code == 200
        opener.errors[str(root / "bad")] = AdapterValidationError("its weights are cut off")
        assert (await ask(client, "bad", acme)).status_code == 400
        assert await listed(client, acme) == ["chat"]
        assert (await ask(client, "sql", acme)).status_code == 200
        assert await listed(client, acme) == ["sql"]


async def test_a_read_only_key_loads_nothing(tmp_path: Path, root: Path, opener: Opener) -> None:
    async with tenants(tmp_path, opener, f"dir={root}") as (client, made):
        assert (await ask(client, "sql", made.keys["acme read-only"])).status_code == 403
        headers = {"authorization": f"Bearer {made.keys['acme read-only']}"}
        assert (await client.get("/v1/models/sql", headers=headers)).status_code == 404
        assert opener.paths == []


async def test_a_source_by_its_name_or_kind(opener: Opener, root: Path) -> None:
    """What the wires of other servers say beside a name: it is the source's, also where that name is registered."""
    sources = ("hub=hf://org", f"dir={root}")
    engine = FakeAsyncEngine({"sql": "/own"}, open_adapter=opener)
    names = create_app(engine, ServerConfig(adapter_sources=sources)).state.context.names
    request = Request({"type": "http", "state": {"caller": KEYLESS}, "client": None, "headers": []}, receive=_never)
    assert await names.resolve(request, "base", "sql", source="") == "sql"
    assert await names.resolve(request, "base", "sql", source="dir") == "dir/sql"
    assert await names.resolve(request, "chat", source="local") == "dir/chat"
    mix = AdapterMix((("a", 0.5), ("b", 0.5)))
    assert await names.resolve(request, None, None, mix, "hub") == AdapterMix((("hub/a", 0.5), ("hub/b", 0.5)))
    with pytest.raises(ApiError, match="'s3' is not one of this server") as refused:
        await names.resolve(request, "base", "sql", source="s3")
    assert refused.value.param == "adapter_source"


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError
