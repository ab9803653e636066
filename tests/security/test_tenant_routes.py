"""Every route and every role: what is allowed stands in RIGHTS by what the route declares, and in ROUTES by its path.

A new route without a line in ROUTES fails, and so does one whose declaration is another one than its line.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loraplex.server import ServerConfig, create_app
from loraplex.server.access import Access, declared_access
from loraplex.tenants.records import Role
from loraplex.testing import FakeAsyncEngine
from tests.security.routes import FoundRoute, is_open, routes_of
from tests.security.tenancy import Tenancy, bearer, tenancy
from tests.server.conftest import client_of

ROUTES = {
    "POST /v1/completions": Access.KEY,
    "POST /v1/chat/completions": Access.KEY,
    "POST /generate": Access.KEY,
    "POST /generate_stream": Access.KEY,
    "POST /": Access.KEY,
    "POST /load_lora_adapter": Access.OWN_LOADING,
    "POST /unload_lora_adapter": Access.OWN_LOADING,
    "GET /model_info": Access.READ,
    "GET /get_model_info": Access.READ,
    "GET /server_info": Access.READ,
    "GET /get_server_info": Access.READ,
    "GET /info": Access.READ,
    "POST /v1/responses": Access.KEY,
    "POST /v1/messages": Access.KEY,
    "POST /v1/messages/count_tokens": Access.KEY,
    "GET /v1/models": Access.READ,
    "GET /v1/models/{model:path}": Access.READ,
    "POST /tokenize": Access.KEY,
    "POST /detokenize": Access.KEY,
    "POST /v1/load_lora_adapter": Access.OWN_LOADING,
    "POST /v1/unload_lora_adapter": Access.OWN_LOADING,
    "POST /v1/adapters": Access.OWN_LOADING,
    "POST /v1/adapters/switch": Access.OWN_LOADING,
    "POST /v1/adapters/merge": Access.LOADING,
    "GET /v1/merges": Access.ADMIN,
    "GET /v1/merges/{merge_id}": Access.ADMIN,
    "DELETE /v1/merges/{merge_id}": Access.LOADING,
    "POST /v1/adapters/{name:path}/clone": Access.OWN_LOADING,
    "POST /v1/adapters/{name:path}/export": Access.VERB,
    "POST /v1/adapters/{name:path}/pin": Access.OWN_VERB,
    "POST /v1/adapters/{name:path}/unpin": Access.OWN_VERB,
    "POST /v1/adapters/{name:path}/evict": Access.OWN_VERB,
    "POST /v1/adapters/{name:path}/preload": Access.OWN_VERB,
    "POST /v1/adapters/{name:path}/rollback": Access.OWN_LOADING,
    "PUT /v1/adapters/{name:path}/tensors": Access.OWN_LOADING,
    "PUT /v1/adapters/{name:path}": Access.OWN_LOADING,
    "GET /v1/adapters": Access.READ,
    "GET /v1/adapters/{name:path}": Access.READ,
    "DELETE /v1/adapters/{name:path}": Access.OWN_LOADING,
    "GET /v1/memory": Access.ADMIN,
    "GET /v1/events": Access.ADMIN,
    "GET /v1/profile": Access.ADMIN,
    "POST /v1/profile/start": Access.VERB,
    "POST /v1/profile/stop": Access.VERB,
    "GET /v1/tenants": Access.MANAGE,
    "POST /v1/tenants": Access.MANAGE_VERB,
    "GET /v1/tenants/{tenant}": Access.MANAGE,
    "PUT /v1/tenants/{tenant}": Access.MANAGE_VERB,
    "DELETE /v1/tenants/{tenant}": Access.MANAGE_VERB,
    "GET /v1/key": Access.READ,
    "GET /v1/keys": Access.MANAGE,
    "POST /v1/keys": Access.MANAGE_VERB,
    "DELETE /v1/keys/{key_id}": Access.MANAGE_VERB,
    "GET /v1/shares": Access.MANAGE,
    "PUT /v1/shares": Access.MANAGE_VERB,
    "GET /v1/usage": Access.READ,
}
"""Beside what is open to all: probes and pages."""

EVERYTHING = frozenset(Access)
USING = frozenset({Access.READ, Access.KEY})
RIGHTS = {
    "flag admin": EVERYTHING,
    "admin": EVERYTHING,
    "operator": EVERYTHING - {Access.MANAGE, Access.MANAGE_VERB},
    "read-only": frozenset({Access.READ, Access.ADMIN}),
    "inference": USING,
    "acme": USING | {Access.OWN_LOADING, Access.OWN_VERB},
    "acme read-only": frozenset({Access.READ}),
}
FOUND = [
    (method, route)
    for route in routes_of(create_app(FakeAsyncEngine(), ServerConfig()))
    for method in sorted(route.methods)
    if not is_open(route)
]


def ids(value: object) -> str:
    return value.path if isinstance(value, FoundRoute) else str(value)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenancy]:
    with tenancy(tmp_path_factory.mktemp("state")) as made:
        yield made


def test_every_route_has_a_rule() -> None:
    assert {f"{method} {route.path}" for method, route in FOUND} == set(ROUTES)
    for method, route in FOUND:
        assert declared_access(route.endpoint) is ROUTES[f"{method} {route.path}"], route.path


def test_every_route_of_openapi_has_a_rule() -> None:
    """What clients are told of is what is asked below, and what is open."""
    app = create_app(FakeAsyncEngine(), ServerConfig())
    operations = {f"{method.upper()} {path}" for path, each in app.openapi()["paths"].items() for method in each}
    opened = {f"{method} {route.path}" for route in routes_of(app) if is_open(route) for method in route.methods}
    assert operations - opened == {rule.replace(":path", "") for rule in ROUTES} - opened


def test_every_role_is_asked() -> None:
    assert {*map(str, Role)} - {"tenant"} <= set(RIGHTS)


@pytest.mark.parametrize("role", RIGHTS)
@pytest.mark.parametrize(("method", "route"), FOUND, ids=ids)
async def test_a_role_has_its_rights(server: Tenancy, method: str, route: FoundRoute, role: str) -> None:
    is_allowed = ROUTES[f"{method} {route.path}"] in RIGHTS[role]
    async with client_of(server.app) as client:
        if route.path == "/v1/events" and is_allowed:
            answer = await client.request(method, route.url, headers=server.headers(role), params={"stream": "false"})
        else:
            url = route.url.replace("sql", "no-such-one")
            answer = await client.request(method, url, headers=server.headers(role))
    assert answer.status_code != 401
    assert (answer.status_code == 403) is not is_allowed, answer.text


@pytest.mark.parametrize(("method", "route"), FOUND, ids=ids)
async def test_no_route_answers_without_a_key(server: Tenancy, method: str, route: FoundRoute) -> None:
    async with client_of(server.app) as client:
        for headers in ({}, bearer("lp-wrong"), bearer(server.keys["acme"][:-1])):
            assert (await client.request(method, route.url, headers=headers)).status_code == 401


@pytest.mark.parametrize("role", [None, *RIGHTS])
async def test_metrics_are_for_those_that_see_all(server: Tenancy, role: str | None) -> None:
    """They name adapters, and count what all tenants do."""
    headers = {} if role is None else server.headers(role)
    async with client_of(server.app) as client:
        answer = await client.get("/metrics", headers=headers)
        others = [(await client.get(path, headers=headers)).status_code for path in ("/health", "/ping", "/version")]
    is_allowed = role is not None and Access.ADMIN in RIGHTS[role]
    assert answer.status_code == (200 if is_allowed else 401 if role is None else 403)
    assert others == [200, 200, 200]


async def test_the_front_page_names_no_model_to_strangers(server: Tenancy) -> None:
    async with client_of(server.app) as client:
        assert (await client.get("/")).json()["models"] is None
