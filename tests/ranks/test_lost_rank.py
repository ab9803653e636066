"""A server's engine of two ranks: one is killed under load, and all of it comes back by itself."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import psutil
import pytest

from loraplex.config import EngineConfig, LoRAConfig
from loraplex.core import RequestOutput
from loraplex.errors import LoraplexError
from loraplex.frontend.async_engine import AsyncEngine
from loraplex.frontend.supervisor import Supervision
from tests.fixtures import ModelZoo
from tests.frontend.processes import Client, first, rest, until, within
from tests.ranks.engines import adapter_of

PROMPT = [7, 300, 41, 2000]


def followers(pid: int | None) -> list[psutil.Process]:
    return [each for each in psutil.Process(pid).children() if "loraplex.ranks.start" in each.cmdline()]


@pytest.mark.ranks
@pytest.mark.parametrize("is_full", [False, True])
async def test_a_killed_rank_costs_the_running_requests_alone(zoo: ModelZoo, is_full: bool) -> None:
    """Fully sharded, ranks wait for each other within a linear, too."""
    base = zoo.base("qwen2")
    lora = LoRAConfig(adapter_memory_bytes=1 << 24, host_memory_bytes=1 << 24, disk_memory_bytes=0)
    config = EngineConfig(
        model=str(base),
        lora=replace(lora, fully_sharded_loras=is_full),
        num_threads=1,
        kv_cache_memory_bytes=1 << 24,
        tensor_parallel_size=2,
    )
    engine = await within(AsyncEngine.start(config, served_model_name="base"))
    try:
        client = Client(engine)
        await within(engine.load_adapter("sql", str(adapter_of(zoo, base, "all linears"))))
        before = [(await client.outputs(PROMPT, name))[-1].outputs for name in (None, "sql")]
        streams = [client.stream(PROMPT, name, max_tokens=400, ignore_eos=True) for name in (None, "sql")]
        await asyncio.gather(*map(first, streams))
        pid = engine.engine_pid
        (follower,) = followers(pid)
        follower.kill()
        ended = await asyncio.gather(*(within(rest(each)) for each in streams), return_exceptions=True)
        assert all(isinstance(each, LoraplexError) or _is_whole(each) for each in ended)
        assert any(isinstance(each, LoraplexError) for each in ended)
        await until(lambda: engine.health().is_alive and engine.engine_pid != pid)
        assert [(await client.outputs(PROMPT, name))[-1].outputs for name in (None, "sql")] == before
        await within(engine.check_integrity())
        (follower,) = followers(engine.engine_pid)
    finally:
        await within(engine.shutdown())
    psutil.wait_procs([follower], timeout=10)
    assert not follower.is_running()


def _is_whole(outputs: BaseException | list[RequestOutput]) -> bool:
    return isinstance(outputs, list) and outputs[-1].finished


async def test_kills_of_a_rank_use_up_no_lives_of_the_engine(zoo: ModelZoo) -> None:
    """The first kill is of a rank that serves, the others of ranks that start; no restart is allowed after a
    failure."""
    config = EngineConfig(
        model=str(zoo.base("qwen2")), num_threads=1, kv_cache_memory_bytes=1 << 24, tensor_parallel_size=2
    )
    engine = await within(AsyncEngine.start(config, served_model_name="base", supervision=Supervision(max_restarts=0)))
    try:
        for _ in range(3):
            pid = engine.engine_pid
            await until(lambda pid=pid: bool(followers(pid)))
            followers(pid)[0].kill()
            await until(lambda pid=pid: engine.engine_pid not in (None, pid))
        await until(lambda: engine.health().is_alive)
        assert len((await Client(engine).outputs(PROMPT))[-1].outputs[0].token_ids) == 64
    finally:
        await within(engine.shutdown())
