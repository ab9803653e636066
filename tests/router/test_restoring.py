"""A replica that starts again behind the router, and a router that is killed in the middle of a verb: what was answered
stays, and what differs is said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.adapters.registry import DatabaseHealth, DatabaseState
from loraplex.errors import AdapterPathNotFoundError
from loraplex.router import exchange, fleet, restoring, watching
from loraplex.router.names import Card
from loraplex.router.replica import Replica
from loraplex.router.settings import RouteSettings
from loraplex.testing.fake_engine import FakeHealth
from tests.router.parts import SETTINGS, FakeReplica, Router, completion, replicas, router
from tests.router.test_verbs import HEADER, NEW, cards, with_other

ADMIN, CLIENT = "a" * 32, "k" * 32
NO_PATH = AdapterPathNotFoundError("no such path: /adapters/sql")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring, "RETRY_S", 0.05)
    monkeypatch.setattr(fleet, "COMPARE_EVERY_S", 0.02)


async def health(front: Router) -> dict[str, Any]:
    answer: dict[str, Any] = (await front.client.get("/health")).json()
    return answer


async def until_health(front: Router, **fields: int) -> None:
    while not fields.items() <= {"restoring": 0, "differing": 0, **await health(front)}.items():
        await asyncio.sleep(0.01)


async def test_a_replica_that_starts_again_empty_gets_what_it_had() -> None:
    """Loaded, pinned, switched and numbered through the router, or there from the start."""
    async with replicas(2) as (a, b), router([a.name, b.name]) as front:
        await front.client.post("/v1/adapters", json={**NEW, "lora_int_id": 7})
        await front.client.post("/v1/adapters/sql/pin")
        for old in ("best", "chat"):  # a name alone, and one with weights of its own
            await front.client.post("/v1/adapters/switch", json={"old": old, "new": "sql"})
        before = await cards(a)
        assert (before["chat"][1], before["sql"][2]) == ("sql", True)
        await a.kill()
        await front.until(lambda: front.fleet.num_open == 1)
        await a.start_empty()
        await until_health(front, available=2, restoring=0)
        assert await cards(a) == before
        async with httpx.AsyncClient(base_url=f"http://{a.name}", trust_env=False) as client:
            assert (await client.get("/v1/adapters/new")).json()["lora_int_id"] == 7
            answer = await client.post("/v1/completions", json=completion("chat"))
            assert answer.json()["choices"][0]["text"] == "[sql] "
        await until_health(front, differing=0)


async def test_a_start_that_no_poll_saw_is_one_too() -> None:
    """The breaker stays closed: the number of its adapters is another one."""
    async with replicas(1) as (a,), router([a.name], poll_interval_s=60.0) as front:
        await a.kill()
        await a.start_empty()
        answer = await front.client.post("/v1/completions", json=completion())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica"), "it was promised"
        assert "adapter 'sql'" in answer.json()["error"]["message"]
        await front.fleet._watchers[0].poll()
        await until_health(front, restoring=0)
        assert (await front.client.post("/v1/completions", json=completion())).status_code == 200


async def test_meanwhile_requests_go_to_those_that_have_the_adapter() -> None:
    async with replicas(2) as (a, b), router([a.name, b.name], policy="spread") as front:
        await a.kill()
        await front.until(lambda: front.fleet.num_open == 1)
        await a.start_empty()
        held = asyncio.Event()
        a.engine.errors_by_path["/adapters/sql"] = _Once(held)  # type: ignore[assignment]
        await until_health(front, available=2)
        answers = [await front.client.post("/v1/completions", json=completion()) for _ in range(6)]
        assert {answer.status_code for answer in answers} == {200}
        assert len(b.engine.requests) == 6
        verb = await front.client.post("/v1/adapters/sql/pin")
        assert (verb.status_code, verb.json()["error"]["code"]) == (503, "replica_unavailable")
        assert "yet to load" in verb.json()["error"]["message"]
        del a.engine.errors_by_path["/adapters/sql"]
        await until_health(front, restoring=0)
        assert await cards(a) == await cards(b)


class _Once(Exception):
    """An error of a file system that passes."""

    def __init__(self, held: asyncio.Event) -> None:
        super().__init__("the file system is away")


async def test_what_cannot_be_loaded_again_is_said_and_given_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "loraplex.router")
    async with replicas(2) as (a, b), router([a.name, b.name]) as front:
        await a.kill()
        await front.until(lambda: front.fleet.num_open == 1)
        await _with_error(a, NO_PATH)()
        await until_health(front, available=2, restoring=0, differing=1)
        assert set(await cards(a)) == {"chat"}
        assert f"adapter 'sql' could not be loaded again at replica {a.name}" in caplog.text
        assert "1 adapters are not the same at all replicas, such as 'sql'" in caplog.text
        assert "loraplex:router_adapters_differing 1.0" in (await front.client.get("/metrics")).text
        for _ in range(3):
            assert (await front.client.post("/v1/completions", json=completion())).status_code == 200
        assert len(b.engine.requests) == 3
        assert (await front.client.delete("/v1/adapters/sql")).status_code == 200, "where it is"
        assert "sql" not in await cards(b)
        await until_health(front, differing=0)


async def with_alias(a: FakeReplica, front: Router, start: Any) -> None:
    """`chat` means `sql`, and the first replica begins again."""
    await front.client.post("/v1/adapters/switch", json={"old": "chat", "new": "sql"})
    await a.kill()
    await front.until(lambda: front.fleet.num_open == 1)
    await start()


async def test_a_switched_name_waits_for_what_answers_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was loaded with its weights from before the switch, and served with them when the switch found no target."""
    sent: list[str] = []
    load_again = restoring.load_again

    async def load(replica: Any, name: str, *rest: Any) -> Any:
        sent.append(name)
        return await load_again(replica, name, *rest)

    monkeypatch.setattr(restoring, "load_again", load)
    async with replicas(2) as (a, b), router([a.name, b.name]) as front:
        await with_alias(a, front, _with_error(a, _Once(asyncio.Event())))
        await front.until(lambda: sent.count("sql") > 1)
        assert not await cards(a)
        assert (await health(front))["restoring"] == 2
        a.engine.errors_by_path.clear()
        await until_health(front, restoring=0)
        assert await cards(a) == await cards(b)


async def test_a_switched_name_is_given_up_with_what_answers_for_it(caplog: pytest.LogCaptureFixture) -> None:
    async with replicas(2) as (a, b), router([a.name, b.name]) as front:
        await with_alias(a, front, _with_error(a, NO_PATH))
        await until_health(front, available=2, restoring=0, differing=2)
        assert not await cards(a)
        assert f"adapter 'chat' could not be loaded again at replica {a.name}" in caplog.text
        for _ in range(3):
            answer = await front.client.post("/v1/completions", json=completion("chat"))
            assert answer.json()["choices"][0]["text"] == "[sql] "
        assert len(b.engine.requests) == 3


async def test_a_switched_name_never_answers_with_its_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its load and its switch a mix with it did, and for seconds where the switch was put off."""
    send, answered, refusals = restoring.send, set(), [503]

    async def put_off_once(method: str, target: bytes, headers: Any, body: bytes, replica: Any) -> Any:
        is_put_off = b'"sql"' in body and bool(refusals)
        sent = exchange.Outcome(replica, refusals.pop()) if is_put_off else None
        outcome = sent or await send(method, target, headers, body, replica)
        found = a.engine.registry.find("chat")
        answered.add(found and found.adapter_name)
        return outcome

    monkeypatch.setattr(restoring, "send", put_off_once)
    async with replicas(2) as (a, b), router([a.name, b.name]) as front:
        await with_alias(a, front, a.start_empty)
        await until_health(front, available=2, restoring=0, differing=0)
        assert answered == {None, "sql"}
        assert await cards(a) == await cards(b)


async def test_a_switched_name_whose_target_is_unloaded_at_the_last_moment_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send = restoring.send

    async def late(method: str, target: bytes, headers: Any, body: bytes, replica: Any) -> Any:
        if target.endswith(b"/chat"):
            a.engine.registry.unload("sql")
        return await send(method, target, headers, body, replica)

    monkeypatch.setattr(restoring, "send", late)
    async with replicas(2) as (a, b), router([a.name, b.name]) as front:
        await with_alias(a, front, a.start_empty)
        await until_health(front, available=2, restoring=0)
        assert not await cards(a)


Answers = list[Callable[[Replica], tuple[int, bytes]]]


async def restored(monkeypatch: pytest.MonkeyPatch, answers: Answers) -> tuple[Replica, int]:
    """A replica that is to load `sql`, after its answers to that; and how many there were."""
    replica, num_sent = Replica("a", "http://127.0.0.1:1", RouteSettings(**SETTINGS)), 0
    replica.is_ready = True
    replica.names.to_do = {"sql": Card("sql", "/adapters/sql")}

    async def send(*arguments: Any) -> exchange.Outcome:
        nonlocal num_sent
        num_sent += 1
        return exchange.Outcome(replica, *answers.pop(0)(replica))

    monkeypatch.setattr(restoring, "send", send)
    await restoring.restore(replica)
    return replica, num_sent


async def test_a_key_that_is_refused_takes_nothing_from_what_is_to_be_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that was rotated at the replica alone lost all of it, one name after the other, each with a line."""
    of_role = b'{"error": {"message": "no admin", "code": "admin_key_required"}}'
    answers: Answers = [lambda _: (401, b"{}"), lambda _: (403, of_role), lambda _: (200, b"{}")]
    replica, num_sent = await restored(monkeypatch, answers)
    assert (replica.names.to_do, num_sent) == ({}, 3)
    assert caplog.text.count("no longer takes the router's key") == 1
    assert "could not be loaded" not in caplog.text


async def test_what_was_learned_while_a_load_was_refused_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verb took the name out of what is to be done: the restoring ended in a KeyError."""

    def learn(replica: Replica) -> tuple[int, bytes]:
        replica.names.to_do = {"sql": Card("sql", "/adapters/other")}
        return 400, b"{}"

    def owe(replica: Replica) -> tuple[int, bytes]:
        replica.names.owe("sql", None)
        return 400, b"{}"

    replica, num_sent = await restored(monkeypatch, [learn, owe])
    assert (replica.names.to_do, num_sent) == ({}, 2)


@pytest.mark.parametrize("part", ["weights", "text"])
async def test_what_has_other_content_now_is_not_loaded_again(part: str, caplog: pytest.LogCaptureFixture) -> None:
    """The router's key is an operator's: a tenant that put a link to another one's adapter there, or to its chat
    template alone, was given those."""
    caplog.set_level("INFO", "loraplex.router")
    async with replicas(2) as (a, b), router([a.name, b.name]) as front:
        await a.kill()
        await front.until(lambda: front.fleet.num_open == 1)
        a.start_empty = _with_other_content(a, part)  # type: ignore[method-assign]
        await a.start_empty()
        await until_health(front, available=2, restoring=0)
        assert not await cards(a)
        await until_health(front, differing=2)
        assert "'/adapters/sql' has another content" in caplog.text
        for _ in range(3):
            assert (await front.client.post("/v1/completions", json=completion())).status_code == 200
        assert len(b.engine.requests) == 3


def _with_other_content(replica: FakeReplica, part: str) -> Any:
    async def started() -> None:
        replica.engine = type(replica.engine)(open_adapter=with_other(part))
        await replica.start()

    return started


def _with_error(replica: FakeReplica, error: Any) -> Any:
    async def started() -> None:
        replica.engine = type(replica.engine)(errors_by_path={"/adapters/sql": error})
        await replica.start()

    return started


async def test_what_the_others_got_while_one_was_away_it_gets_when_it_is_back() -> None:
    async with replicas(2) as (a, b), router([a.name, b.name]) as front:
        await a.kill()
        await front.until(lambda: front.fleet.num_open == 1)
        others = {HEADER: b.name}
        assert (await front.client.post("/v1/adapters", json=NEW, headers=others)).status_code == 200
        assert (await front.client.delete("/v1/adapters/chat", headers=others)).status_code == 200
        await a.start()
        await until_health(front, available=2, restoring=0)
        assert await cards(a) == await cards(b)
        assert set(await cards(a)) == {"sql", "new"}, "what was unloaded does not come back"


async def test_two_routers_agree_on_what_one_of_them_did_while_a_replica_was_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the other one knows of the replica that was away is older than what the replicas that stayed have."""
    monkeypatch.setattr(watching, "LIST_AGAIN_S", 0.0)
    async with replicas(2) as (a, b), router([a.name, b.name]) as one, router([a.name, b.name]) as two:
        await a.kill()
        await one.until(lambda: one.fleet.num_open == two.fleet.num_open == 1)
        others = {HEADER: b.name}
        other = {"path": "/adapters/other"}
        assert (await one.client.put("/v1/adapters/sql", json=other, headers=others)).status_code == 200
        assert (await one.client.delete("/v1/adapters/chat", headers=others)).status_code == 200
        held = two.replica(b.name).names
        await two.until(lambda: held.held is not None and set(held.held) == {"sql"})
        assert held.held is not None
        assert held.held["sql"].path == "/adapters/other"
        await a.start_empty()
        for front in (one, two):
            await until_health(front, available=2, restoring=0)
        assert await cards(a) == await cards(b)


async def test_a_replica_that_comes_later_gets_what_all_others_have() -> None:
    """One of those that a cluster may bring: until it is there, verbs are for the others."""
    late = FakeReplica()
    await late.start()
    await late.stop()
    async with replicas(2) as (a, b), router([a.name, b.name, late.name]) as front:
        loaded = await front.client.post("/v1/adapters", json=NEW)
        assert (loaded.status_code, loaded.headers[HEADER]) == (200, f"{a.name}, {b.name}")
        assert (await front.client.delete("/v1/adapters/chat", headers={HEADER: b.name})).status_code == 200
        await late.start_empty()
        await until_health(front, available=3, restoring=0)
        assert set(await cards(late)) == {"sql", "new"}, "not what one of them has alone"
        await late.stop()


async def test_what_was_loaded_at_one_of_those_that_were_there_stays_its_own() -> None:
    async with replicas(2) as (a, b), router([a.name, b.name]) as front:
        assert (await front.client.post("/v1/adapters", json=NEW, headers={HEADER: b.name})).status_code == 200
        await a.kill()
        await front.until(lambda: front.fleet.num_open == 1)
        await a.start_empty()
        await until_health(front, available=2, restoring=0)
        assert set(await cards(a)) == {"sql", "chat"}
        assert (await front.client.post("/v1/completions", json=completion("new"))).status_code == 200


async def test_what_was_unloaded_at_a_replica_itself_stays_away() -> None:
    async with replicas(1) as (a,), router([a.name]) as front:
        async with httpx.AsyncClient(base_url=f"http://{a.name}", trust_env=False) as client:
            await client.delete("/v1/adapters/sql")
        codes = set()
        for _ in range(2):
            codes.add((await front.client.post("/v1/completions", json=completion())).json()["error"]["code"])
            await front.until(lambda: not front.replica(a.name).names.is_doubtful)
        assert "model_not_found" in codes
        assert "sql" not in await cards(a)


async def test_replicas_with_one_database_are_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with replicas(1) as (a,):
        shared = FakeHealth(True, database=DatabaseHealth(DatabaseState.CONNECTED, 0.0))
        monkeypatch.setattr(type(a.engine), "health", lambda self: shared)
        async with router([a.name]) as front:
            await a.kill()
            await front.until(lambda: front.fleet.num_open == 0)
            await a.start_empty()
            await front.until(lambda: front.fleet.num_open == 1)
            assert front.replica(a.name).names.held is None
            assert await cards(a) == {}


async def test_without_an_admins_key_nothing_is_loaded_again() -> None:
    keys = {"api_keys": (CLIENT,), "admin_api_keys": (ADMIN,)}
    async with replicas(1, **keys) as (a,):
        for key, is_known in ((CLIENT, False), (ADMIN, True)):
            async with router([a.name], key=key) as front:
                await front.until(lambda: front.fleet.num_open == 1)
                assert (front.replica(a.name).names.held is not None) is is_known
        async with router([a.name], key=ADMIN) as front:
            await a.kill()
            await front.until(lambda: front.fleet.num_open == 0)
            await a.start_empty()
            await until_health(front, available=1, restoring=0)
            answer = await front.client.post(
                "/v1/completions", json=completion(), headers={"Authorization": f"Bearer {CLIENT}"}
            )
            assert answer.status_code == 200


# ------------------------------------------------------------------------------------ a router that is killed in a verb


@pytest.mark.parametrize("verb", ["load", "unload"])
async def test_after_a_verb_that_a_killed_router_left_half_done_the_next_one_says_so_and_a_retry_ends_it(
    verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with replicas(2) as (a, b):
        async with httpx.AsyncClient(base_url=f"http://{a.name}", trust_env=False) as client:
            if verb == "load":  # what the router did at the first one
                await client.post("/v1/adapters", json=NEW)
            else:
                await client.delete("/v1/adapters/sql")
        async with router([a.name, b.name]) as front:
            await until_health(front, differing=1)
            assert "1 adapters are not the same at all replicas" in caplog.text
            for model in ("chat", "new" if verb == "load" else "sql"):
                answers = [await front.client.post("/v1/completions", json=completion(model)) for _ in range(4)]
                assert {answer.status_code for answer in answers} == {200}, "one of them has it"
            again = (
                await front.client.post("/v1/adapters", json=NEW)
                if verb == "load"
                else await front.client.delete("/v1/adapters/sql")
            )
            assert again.status_code == 200
            assert await cards(a) == await cards(b)
            await until_health(front, differing=0)


async def test_what_is_not_the_same_at_all_is_not_rolled_back() -> None:
    async with replicas(2) as (a, b), router([a.name, b.name]) as front:
        other = {"path": "/adapters/other"}
        assert (await front.client.put("/v1/adapters/sql", json=other, headers={HEADER: a.name})).status_code == 200
        before = [await cards(each) for each in (a, b)]
        answer = await front.client.post("/v1/adapters/sql/rollback")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "replicas_disagree")
        assert [await cards(each) for each in (a, b)] == before
        assert (await front.client.put("/v1/adapters/sql", json=other)).status_code == 200
        assert await cards(a) == await cards(b)


async def test_names_that_came_by_need_are_each_replicas_own(tmp_path: Path) -> None:
    """They differ without a fault, are not loaded again, and are found again by their next request."""
    (tmp_path / "need").mkdir()
    (tmp_path / "need/adapter_config.json").write_text("{}")
    async with (
        replicas(2, adapter_sources=(f"dir={tmp_path}",)) as (a, b),
        router([a.name, b.name]) as front,
    ):
        assert (await front.client.post("/v1/completions", json=completion("need"))).status_code == 200
        having = {each.name: "need" in await cards(each) for each in (a, b)}
        assert sorted(having.values()) == [False, True]
        first = a if having[a.name] else b
        for watcher in front.fleet._watchers:
            watcher._list_due_s = 0.0
            await watcher.poll()
        await until_health(front, differing=0, restoring=0)
        await first.kill()
        await front.until(lambda: front.fleet.num_open == 1)
        assert (await front.client.post("/v1/completions", json=completion("need"))).status_code == 200
        await first.start_empty()
        await until_health(front, available=2, restoring=0, differing=0)
        assert set(await cards(first)) == {"sql", "chat"}
        listed = (await front.client.get("/v1/adapters", params={"source": "dir"})).json()
        assert [each["name"] for each in listed["data"]] == ["dir/need"]


async def test_uploads_are_not_routed() -> None:
    async with replicas(1) as (a,), router([a.name]) as front:
        files, headers = {"file": ("adapter_config.json", b"{}")}, {"X-Requested-With": "test"}
        answer = await front.client.post("/v1/adapters", files=files, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_routed")
