"""Limits of tenants in the memory of real engine processes: answers are exact, others stay, and a restart forgets
nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from loraplex.adapter_store import MemoryQuota
from loraplex.core import Tier
from loraplex.demo.tasks import adapter_path
from loraplex.errors import AdapterBeyondQuotaError
from loraplex.frontend.async_engine import AsyncEngine
from loraplex.frontend.runners.settings import RunnerSettings
from tests.frontend.processes import Client, demo_config, first, rest, stretched_base, until, within

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "banana bread="
SAID = {"acme/upper": "BANANA BREAD", "acme/reverse": "daerb ananab"}
ACME = ("acme/upper", "acme/reverse")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stretched_base(tmp_path_factory.mktemp("model") / "base")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[1, 2], ids=["one runner", "two runners"])
async def client(request: pytest.FixtureRequest, base: str) -> AsyncIterator[Client]:
    runners = RunnerSettings(data_parallel_size=request.param, placement="spread") if request.param > 1 else None
    starting = AsyncEngine.start(demo_config(model=base, device="cpu"), served_model_name="base", runners=runners)
    engine = await within(starting)
    for name in (*ACME, "beta/sort"):
        await within(engine.load_adapter(name, str(adapter_path(name.partition("/")[2]))))
    yield Client(engine)
    await within(engine.check_integrity())
    await within(engine.shutdown())


async def tiers(client: Client) -> dict[str, Tier]:
    infos = await within(client.engine.list_adapters())
    return {info.ref.adapter_name: info.tier for info in infos}


async def num_on_device(client: Client) -> int:
    """In the runner that has most."""
    reports = await client.engine.runner_reports()
    return max(each.stats.memory.tier("device").num_adapters for each in reports if each.stats is not None)


async def set_limit(client: Client, **quota: int) -> None:
    client.engine.limit_tenants({"acme": MemoryQuota(**quota)} if quota else {})
    await within(client.engine.stats())  # it is sent after


async def size_of_one(client: Client) -> int:
    infos = await within(client.engine.list_adapters())
    return max(info.nbytes for info in infos if info.ref.adapter_name in ACME)


async def preload_both(client: Client) -> None:
    """In each runner."""
    for name in ACME:
        await within(client.engine.preload_adapter(name))


async def ask_in_turn(client: Client) -> None:
    for name in ACME * 3:
        assert await client.ask(PROMPT, name) == SAID[name]


async def test_a_tenant_with_room_for_one_alternates_between_two(client: Client) -> None:
    await within(client.engine.preload_adapter("beta/sort"))
    await ask_in_turn(client)
    await set_limit(client, device_bytes=await size_of_one(client))
    await ask_in_turn(client)
    answers = await asyncio.gather(*(client.ask(PROMPT, name) for name in ACME * 4))
    assert answers == [SAID[name] for name in ACME * 4], "together they take turns"
    await preload_both(client)
    assert await num_on_device(client) == 2, "with that of the other tenant"
    assert (await tiers(client))["beta/sort"] is Tier.DEVICE
    await set_limit(client)
    await preload_both(client)
    assert await num_on_device(client) == 3


async def test_a_long_request_gives_way_to_another_one_of_its_tenant_alone(client: Client) -> None:
    """It waits as for room: it is paused, and goes on after the other one."""
    await set_limit(client, device_bytes=await size_of_one(client))
    streams = [client.long(name) for name in (ACME[0], ACME[0], "beta/sort", "beta/sort")]
    await asyncio.gather(*map(first, streams))
    assert await asyncio.gather(*(client.ask(PROMPT, ACME[1]) for _ in range(2))) == [SAID[ACME[1]]] * 2
    now = await asyncio.gather(*map(first, streams))
    assert not any(output.finished for output in now), "all were far from their ends"
    ends = await asyncio.gather(*map(rest, streams))
    texts = [each[-1].outputs[0].text for each in ends]
    assert (texts[0], texts[2]) == (texts[1], texts[3])
    await set_limit(client)


async def test_a_limit_that_becomes_smaller_lets_go_and_refuses(client: Client) -> None:
    await ask_in_turn(client)
    await set_limit(client, device_bytes=1)
    assert [(await tiers(client))[name] for name in ACME] == [Tier.HOST] * 2
    with pytest.raises(AdapterBeyondQuotaError, match="device_bytes of tenant acme is 1 bytes"):
        await client.ask(PROMPT, ACME[0])
    assert await client.ask(PROMPT) == await client.ask(PROMPT, None), "the base is nothing of the tenant's"
    await set_limit(client)
    await ask_in_turn(client)


async def test_an_engine_that_starts_again_knows_the_limits(client: Client) -> None:
    engine = client.engine
    await set_limit(client, device_bytes=await size_of_one(client))
    pids = engine.engine_pids
    for pid in pids:
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    await until(lambda: engine.health().num_serving == engine.num_runners and not set(pids) & set(engine.engine_pids))
    await ask_in_turn(client)
    await preload_both(client)
    assert await num_on_device(client) == 1
    await set_limit(client)
