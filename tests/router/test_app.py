"""The router beside a server: every route is there or said to be the replicas'; browsers, keys and ids are the same."""

from __future__ import annotations

import re
from typing import Any

import pytest

from loraplex.router.app import create_router_app
from loraplex.router.fleet import Fleet
from loraplex.router.keys import Keys
from loraplex.router.run import Routed
from loraplex.router.settings import RouteSettings
from loraplex.server.app import ROUTES, create_app
from loraplex.testing import FakeAsyncEngine
from tests.router.parts import completion, replicas, router

OWN_OF_A_SERVER = re.compile(
    r"/v1/(memory|events|profile|keys?|tenants|shares|usage)|/openapi.json|/docs|/dashboard|/redoc|/$|/favicon"
)
"""docs/guides/several-replicas.md: they are the replicas'."""

KEY = "k" * 32
PAGE = "https://app.example.com"


def routes_of(app: Any) -> set[tuple[str, str]]:
    found = set()
    for route in app.routes:
        path = re.sub(r"\{[^}]*\}", "{}", route.path)
        found |= {(method, path) for method in route.methods or ()}
    return found


def test_every_route_of_a_server_is_one_of_the_router_or_named_as_a_replicas_own() -> None:
    settings = RouteSettings(port=0)
    config = settings.server_config
    fleet = Fleet(["127.0.0.1:1"], settings)
    routed = create_router_app(fleet, settings, config, Routed(config, 100).connections, Keys(fleet, 1.0))
    context = create_app(FakeAsyncEngine()).state.context
    ours = set().union(*(routes_of(routes(context).router()) for routes in ROUTES))
    missing = {each for each in ours - routes_of(routed) if not OWN_OF_A_SERVER.match(each[1])}
    assert not missing
    assert len(ours) > 30


async def test_pages_of_an_allowed_origin_may_call_it_and_no_others() -> None:
    preflight = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    async with replicas(1) as (a,):
        async with router([a.name], cors_allowed_origins=(PAGE,)) as front:
            asked = await front.client.options("/v1/completions", headers=preflight)
            assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, PAGE)
            answer = await front.client.post("/v1/completions", json=completion(), headers={"Origin": PAGE})
            assert answer.status_code == 200
            assert answer.headers.get_list("access-control-allow-origin") == [PAGE]
            exposed = answer.headers["access-control-expose-headers"]
            assert {"X-Request-Id", "X-Loraplex-Replicas"} <= set(exposed.split(", "))
            other = {"Origin": "https://elsewhere.example"}
            assert (await front.client.post("/v1/completions", json=completion(), headers=other)).status_code == 403
        async with router([a.name]) as front:
            refused = await front.client.post("/v1/completions", json=completion(), headers={"Origin": PAGE})
            assert refused.status_code == 403


async def test_metrics_may_need_a_key_that_a_replica_takes() -> None:
    async with replicas(1, api_keys=(KEY,)) as (a,), router([a.name], guard_metrics=True) as front:
        assert (await front.client.get("/metrics")).status_code == 401
        page = await front.client.get("/metrics", headers={"Authorization": f"Bearer {KEY}"})
        assert f'loraplex:router_replica_waiting{{replica="{a.name}"}} 0.0' in page.text
        assert (await front.client.get("/health")).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/v1/adapters/sql/pin", "/nothing"])
async def test_an_answer_has_its_requests_id_once(path: str) -> None:
    async with replicas(1) as (a,), router([a.name]) as front:
        for status in (200, 503):
            headers = {"X-Request-Id": "mine"}
            answer = (
                await front.client.get(path, headers=headers)
                if path in ("/v1/models", "/nothing")
                else await front.client.post(path, json=completion(), headers=headers)
            )
            assert answer.headers.get_list("x-request-id") == ["mine"]
            assert answer.status_code in (status, 404)
            a.engine.die()
            await front.until(lambda: front.fleet.num_open == 0)
