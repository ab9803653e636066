"""Verbs through the router that wait for requests (`deadline_s`): which ones do, and that none keeps others waiting."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.router import exchange, verbs
from tests.router.parts import replicas, router
from tests.router.test_verbs import HEADER


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the router waits for each answer; 0: as long as for any verb."""
    found: list[float] = []
    send = verbs.send

    async def sent(*arguments: Any, timeout_s: float = 0.0) -> exchange.Outcome:
        found.append(timeout_s)
        return await send(*arguments, timeout_s or 20.0)

    monkeypatch.setattr(verbs, "send", sent)
    return found


@pytest.mark.parametrize(("path", "status"), [("/v1/adapters/sql/evict", 200), ("/v1/adapters/switch", 400)])
async def test_a_verb_that_names_nothing_is_not_looked_for(path: str, status: int) -> None:
    """It was a 500, and went on at the first replica alone when its turn was over."""
    async with replicas(2) as (a, b), router([a.name, b.name]) as front:
        await front.until(lambda: front.fleet.num_open == 2)
        answer = await front.client.post(path, json={"deadline_s": 5})
        assert answer.status_code == status, answer.text
        assert answer.headers[HEADER] == (f"{a.name}, {b.name}" if status == 200 else a.name)


@pytest.mark.parametrize(
    ("method", "path", "content_type"),
    [
        ("PUT", "/v1/adapters/sql/tensors", "application/octet-stream"),
        ("PUT", "/v1/adapters/sql", "application/json"),
        ("POST", "/v1/adapters/sql/pin", "application/json"),
    ],
)
async def test_of_a_verb_that_does_not_wait_no_deadline_is_read(
    method: str, path: str, content_type: str, patience: list[float]
) -> None:
    """64 MiB of tensors were decoded in the event loop, to look for one."""
    async with replicas(1) as (a,), router([a.name]) as front:
        headers = {"content-type": content_type}
        await front.client.request(method, path, content=b'{"deadline_s": 400}', headers=headers)
        assert max(patience) == 300.0


async def test_a_deadline_that_the_replica_refuses_is_its_refusal(patience: list[float]) -> None:
    async with replicas(1) as (a,), router([a.name]) as front:
        for deadline_s in ("nan", "-1", "1e9", "soon"):
            answer = await front.client.delete("/v1/adapters/sql", params={"deadline_s": deadline_s})
            assert answer.status_code == 400, answer.text
        assert max(patience) == 300.0
