"""What a request claims of the engine: its key is its tenant, and `priority` is bounded."""

from __future__ import annotations

import pytest

from loraplex.sampling_params import Claim
from loraplex.server.api_keys import fingerprint
from loraplex.server.app import create_app
from loraplex.server.config import ServerConfig
from loraplex.testing.fake_engine import FakeAsyncEngine
from tests.server.conftest import client_of

KEYS = ("secret-one", "secret-two")
BODY = {"model": "base", "prompt": "x", "max_tokens": 1}


async def test_each_key_is_a_tenant() -> None:
    engine = FakeAsyncEngine({})
    async with client_of(create_app(engine, ServerConfig(api_keys=KEYS))) as client:
        for key in KEYS:
            response = await client.post("/v1/completions", json=BODY, headers={"Authorization": f"Bearer {key}"})
            assert response.status_code == 200
    assert [request.claim for request in engine.requests] == [Claim(fingerprint(key)) for key in KEYS]


async def test_without_keys_all_are_of_one_tenant() -> None:
    engine = FakeAsyncEngine({})
    async with client_of(create_app(engine, ServerConfig(max_priority=2))) as client:
        for priority in (-2, 0, 2):
            response = await client.post("/v1/completions", json={**BODY, "priority": priority})
            assert response.status_code == 200
    assert [request.claim for request in engine.requests] == [Claim(priority=each) for each in (-2, 0, 2)]


@pytest.mark.parametrize("priority", [-3, 3, 10**9, "1", 1.5])
async def test_a_priority_beyond_the_setting_is_refused(priority: object) -> None:
    engine = FakeAsyncEngine({})
    async with client_of(create_app(engine, ServerConfig(max_priority=2))) as client:
        response = await client.post("/v1/completions", json={**BODY, "priority": priority})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "priority"
    assert not engine.requests
