"""What tenants may not see is, through the router, as if it did not exist."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import sqlalchemy as sa

from loraplex.adapters.journal.tables import JournalTables
from loraplex.tenants.records import Role
from loraplex.tenants.store import open_store
from tests.router.parts import ADAPTERS, FakeReplica, Router, completion, router

ADMIN = "a" * 32
HIDDEN, NOWHERE = "sql", "nil"
"""Names of the operator's; `sql` is one of ADAPTERS. Equally long, since answers repeat them."""


@dataclass
class Front:
    replica: FakeReplica
    router: Router
    tenant: dict[str, str]

    async def seen(self, name: str) -> list[tuple[int, str]]:
        """What a tenant is answered about a name, which stands as NAME."""
        client, headers = self.router.client, self.tenant
        answers = [
            await client.post("/v1/completions", json=completion(name), headers=headers),
            await client.post("/tokenize", json={"model": name, "prompt": "hi"}, headers=headers),
            await client.get(f"/v1/models/{name}", headers=headers),
            await client.get(f"/v1/adapters/{name}", headers=headers),
        ]
        return [(answer.status_code, answer.text.replace(name, "NAME")) for answer in answers]


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    async with _front(tmp_path) as made:
        yield made


@asynccontextmanager
async def _front(folder: Path) -> AsyncIterator[Front]:
    file = folder / "journal.sqlite"
    JournalTables(file, "base").close()
    with closing(open_store(folder, None)) as store:
        store.create_tenant("acme")
        _, secret = store.create_key(Role.TENANT, "acme")
    replica = FakeReplica(admin_api_keys=(ADMIN,))
    replica.engine.state = sa.create_engine(sa.URL.create("sqlite", database=str(file)))
    await replica.start()
    try:
        async with router([replica.name], key=ADMIN) as routed:
            held = routed.replica(replica.name).names
            await routed.until(lambda: held.held is not None and held.held.keys() == ADAPTERS.keys())
            yield Front(replica, routed, {"Authorization": f"Bearer {secret}"})
    finally:
        await replica.stop()


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
