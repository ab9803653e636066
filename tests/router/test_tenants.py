"""What tenants may not see is, through the router, as if it did not exist."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from loraplex.adapters.journal.tables import JournalTables
from loraplex.tenants.records import Role
from loraplex.tenants.store import open_store
from loraplex.testing import FakeAsyncEngine
from tests.router.parts import ADAPTERS, FakeReplica, Router, completion, router

ADMIN = "a" * 32
HIDDEN, NOWHERE = "sql", "nil"
"""Names of the operator's; `sql` is one of ADAPTERS. Equally long, since answers repeat them."""

OWN = "acme/own"


@dataclass
class Front:
    """`other` has no adapters, and the same tenants."""

    replica: FakeReplica
    other: FakeReplica
    router: Router
    tenant: dict[str, str]

    async def seen(self, name: str, headers: dict[str, str] | None = None) -> list[tuple[int, str]]:
        """What a tenant is answered about a name, which stands as NAME."""
        client, headers = self.router.client, self.tenant if headers is None else headers
        answers = [
            await client.post("/v1/completions", json=completion(name), headers=headers),
            await client.post("/tokenize", json={"model": name, "prompt": "hi"}, headers=headers),
            await client.get(f"/v1/models/{name}", headers=headers),
            await client.get(f"/v1/adapters/{name}", headers=headers),
        ]
        return [(answer.status_code, answer.text.replace(name, "NAME")) for answer in answers]


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    async with _front(tmp_path, has_other=False) as made:
        yield made


@pytest.fixture
async def fronts(tmp_path: Path) -> AsyncIterator[Front]:
    async with _front(tmp_path, has_other=True) as made:
        yield made


@asynccontextmanager
async def _front(folder: Path, has_other: bool, **settings: Any) -> AsyncIterator[Front]:
    file = folder / "journal.sqlite"
    JournalTables(file, "base").close()
    with closing(open_store(folder, None)) as store:
        store.create_tenant("acme")
        _, secret = store.create_key(Role.TENANT, "acme")
    adapters = {**ADAPTERS, OWN: "/adapters/own"}
    replicas = [FakeReplica(admin_api_keys=(ADMIN,)) for _ in range(1 + has_other)]
    for replica, held in zip(replicas, (adapters, {}), strict=False):
        replica.engine = FakeAsyncEngine(held)
        replica.engine.state = sa.create_engine(sa.URL.create("sqlite", database=str(file)))
        await replica.start()
    try:
        async with router([each.name for each in replicas], key=ADMIN, **settings) as routed:
            names = routed.replica(replicas[0].name).names
            await routed.until(lambda: names.held is not None and names.held.keys() == adapters.keys())
            yield Front(replicas[0], replicas[-1], routed, {"Authorization": f"Bearer {secret}"})
    finally:
        for each in replicas:
            await each.stop()


async def test_a_hidden_name_is_answered_as_one_that_does_not_exist(front: Front) -> None:
    """It was 503: the router knew the name, and promised it."""
    hidden = await front.seen(HIDDEN)
    assert hidden == await front.seen(NOWHERE)
    assert {status for status, _ in hidden} == {404}
    names = front.router.replica(front.replica.name).names
    assert not names.is_doubtful, "nor does it make the router read the whole list again"


async def test_so_it_is_after_a_connection_that_did_not_come_about(front: Front) -> None:
    names = front.router.replica(front.replica.name).names
    names.is_doubtful = True
    (status, _), *_ = await front.seen(HIDDEN)
    assert status == 404


async def test_so_it_is_while_the_replica_is_away(front: Front) -> None:
    await front.replica.kill()
    await front.router.until(lambda: front.router.fleet.num_open == 0)
    hidden = await front.seen(HIDDEN)
    assert hidden == await front.seen(NOWHERE)
    assert {status for status, _ in hidden} == {503}
    front.replica.engine.state = None
    await front.replica.start()


async def test_so_it_is_while_the_replica_is_away_and_another_one_answers(fronts: Front) -> None:
    """Without a key, too. It was 503 for what the replica had, and 404 or 401 for what none has."""
    await fronts.replica.kill()
    await fronts.router.until(lambda: fronts.router.fleet.num_open == 1)
    for headers, status in ((None, 404), ({}, 401)):
        hidden = await fronts.seen(HIDDEN, headers)
        assert hidden == await fronts.seen(NOWHERE, headers)
        assert {found for found, _ in hidden} == {status}
    fronts.replica.engine.state = None
    await fronts.replica.start()


async def test_so_it_is_before_the_router_knows_that_the_replica_is_away(fronts: Front) -> None:
    await fronts.seen(NOWHERE)
    await fronts.replica.kill()
    hidden = await fronts.seen(HIDDEN)
    assert hidden == await fronts.seen(NOWHERE)
    assert {found for found, _ in hidden} == {404}
    fronts.replica.engine.state = None
    await fronts.replica.start()


async def test_its_own_name_and_the_operators_are_promised_while_the_replica_is_away(fronts: Front) -> None:
    admin = {"Authorization": f"Bearer {ADMIN}"}
    await fronts.replica.kill()
    await fronts.router.until(lambda: fronts.router.fleet.num_open == 1)
    for name, headers in ((OWN, None), ("own", None), (OWN, admin), (HIDDEN, admin)):
        assert {status for status, _ in await fronts.seen(name, headers)} == {503}
    fronts.replica.engine.state = None
    await fronts.replica.start()


async def test_as_many_replicas_are_asked_for_a_hidden_name_as_for_one_that_does_not_exist(fronts: Front) -> None:
    """The holder alone was: the counts of retries, and half the time, said that there is one."""
    told = {}
    for name in (NOWHERE, HIDDEN):
        before = await _asked(fronts)
        await fronts.seen(name)
        told[name] = [now - then for now, then in zip(await _asked(fronts), before, strict=True)]
    assert told[HIDDEN] == told[NOWHERE]
    assert min(told[HIDDEN]) >= 4


async def _asked(front: Front) -> list[int]:
    """How often each replica was, and how often another one after it."""
    page = (await front.router.client.get("/metrics")).text
    kinds = ("loraplex:router_requests_total", "loraplex:router_retries_total")
    found = {name: [line for line in page.splitlines() if line.startswith(name)] for name in kinds}
    return [sum(round(float(line.rpartition(" ")[2])) for line in found[name]) for name in kinds]


async def test_guarded_metrics_are_not_a_tenants(tmp_path: Path) -> None:
    async with _front(tmp_path, has_other=False, guard_metrics=True) as front:
        client, admin = front.router.client, {"Authorization": f"Bearer {ADMIN}"}
        answers = [await client.get("/metrics", headers=headers) for headers in ({}, front.tenant, admin)]
        assert [each.status_code for each in answers] == [401, 403, 200]
        await front.replica.kill()
        await front.router.until(lambda: front.router.fleet.num_open == 0)
        other = {"Authorization": "Bearer guessed"}
        answers = [await client.get("/metrics", headers=headers) for headers in (other, front.tenant, admin)]
        assert [each.status_code for each in answers] == [503, 403, 200]
        front.replica.engine.state = None
        await front.replica.start()


async def test_a_revoked_key_reads_no_guarded_metrics_and_knows_no_names(tmp_path: Path) -> None:
    """Although the router asks for other requests once in a while alone."""
    async with _front(tmp_path, has_other=False, guard_metrics=True) as front, httpx.AsyncClient() as direct:
        client, replica = front.router.client, front.replica
        with closing(open_store(tmp_path, None)) as store:
            key, secret = store.create_key(Role.READ_ONLY)
            headers = {"Authorization": f"Bearer {secret}"}
            while (await client.get("/metrics", headers=headers)).status_code != 200:
                await asyncio.sleep(0.02)
            store.revoke_key(key.key_id)
        while (await direct.get(f"http://{replica.name}/v1/models", headers=headers)).status_code != 401:
            await asyncio.sleep(0.02)
        assert (await client.get("/metrics", headers=headers)).status_code == 401
        await replica.kill()
        await front.router.until(lambda: front.router.fleet.num_open == 0)
        assert await front.seen(HIDDEN, headers) == await front.seen(NOWHERE, headers)
        assert (await client.get("/metrics", headers=headers)).status_code == 503
        replica.engine.state = None
        await replica.start()


async def test_a_tenants_short_name_goes_to_the_replica_that_has_it(fronts: Front) -> None:
    await fronts.seen(NOWHERE)
    _, before = await _asked(fronts)
    for _ in range(4):
        answer = await fronts.router.client.post("/v1/completions", json=completion("own"), headers=fronts.tenant)
        assert answer.status_code == 200
    assert (await _asked(fronts))[1] == before, "no other one was asked first"
