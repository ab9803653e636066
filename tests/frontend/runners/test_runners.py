"""Two engine processes behind one front, with the demo's model: answers of one engine, verbs that reach both or none,
and a death that ends the requests of one alone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from loraplex import LLM, SamplingParams
from loraplex.core import AdapterMix
from loraplex.demo.tasks import TASKS, adapter_path
from loraplex.errors import AdapterNotFoundError, ConfigError, EngineDeadError, InvalidRequestError, LoraplexError
from loraplex.frontend import messages as msg
from loraplex.frontend.async_engine import AsyncEngine
from loraplex.frontend.runners.settings import RunnerSettings, shared_threads
from tests.frontend.processes import Client, demo_config, first, until, within
from tests.frontend.runners.parts import ADAPTERS, NUMBERED, PROMPT, end_of, said

pytestmark = pytest.mark.asyncio(loop_scope="module")

PINNED = "sort"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(base: str) -> AsyncIterator[Client]:
    settings = RunnerSettings(devices="cpu:0,cpu:1", placement="spread")
    engine = await within(AsyncEngine.start(demo_config(model=base), served_model_name="base", runners=settings))
    for name in ADAPTERS:
        await within(engine.load_adapter(name, str(adapter_path(name)), is_pinned=name == PINNED))
    yield Client(engine)
    await within(engine.check_integrity())
    await within(engine.shutdown())


async def residents(engine: AsyncEngine, number: int) -> dict[int, bool]:
    """The adapters of one runner, and whether they are pinned there."""
    found = await within(engine._runners.all[number].call(msg.CallStore, "list_adapters", (None,)))
    return {each.adapter_id: each.is_pinned for each in found}


async def test_answers_are_those_of_one_engine_whichever_runner_gives_them(client: Client, llm: LLM) -> None:
    models = [None, *ADAPTERS] * 2
    params = SamplingParams(temperature=0, max_tokens=24)
    expected = llm.generate([PROMPT] * len(models), params, lora_request=[NUMBERED.get(name or "") for name in models])
    before = [stats.num_generated_tokens for stats in await tokens(client.engine)]
    answers = await asyncio.gather(*(client.outputs(PROMPT, name, max_tokens=24) for name in models))
    assert [said(answer[-1]) for answer in answers] == [said(each) for each in expected]
    after = [stats.num_generated_tokens for stats in await tokens(client.engine)]
    assert all(now > then for now, then in zip(after, before, strict=True)), "both runners answered"


async def tokens(engine: AsyncEngine) -> list[Any]:
    return [report.stats for report in await within(engine.runner_reports())]


async def test_mixes_and_several_completions_of_one_seed(client: Client, llm: LLM) -> None:
    chosen = {"n": 3, "temperature": 2.0, "seed": 5, "max_tokens": 12, "ignore_eos": True}
    mix = ((NUMBERED["upper"], 0.6), (NUMBERED["sort"], 0.5))
    with_mix = llm.generate(PROMPT, SamplingParams(**chosen), lora_request=mix)[0]
    by_name = AdapterMix((("upper", 0.6), ("sort", 0.5)))
    answers = await asyncio.gather(*(client.outputs(PROMPT, by_name, **chosen) for _ in range(4)))
    assert [said(answer[-1]) for answer in answers] == [said(with_mix)] * 4


async def test_what_ends_early_is_counted_nowhere(client: Client) -> None:
    engine = client.engine
    streams = [client.long("upper", request_id=f"long{number}") for number in range(4)]
    await asyncio.gather(*map(first, streams))
    assert [runner.snapshot(0.0).num_requests for runner in engine._runners.all] == [2, 2]
    busy = [runner.snapshot(0.0) for runner in engine._runners.all]
    assert [sum(each.num_by_adapter.values()) for each in busy] == [2, 2]
    assert all(0 < each.adapter_room < 1 for each in busy), "an adapter is in use"
    for number in range(4):
        await within(engine.abort(f"long{number}"))
    await asyncio.gather(*map(end_of, streams))
    assert [runner.snapshot(0.0).num_requests for runner in engine._runners.all] == [0, 0]
    free, all_blocks = zip(
        *((each.snapshot(0.0).num_free_kv_blocks, each.supervisor.info.num_kv_blocks) for each in engine._runners.all),
        strict=True,
    )
    assert free == all_blocks
    assert [runner.snapshot(0.0).adapter_room for runner in engine._runners.all] == [1.0, 1.0]
    assert not any(runner.snapshot(0.0).num_by_adapter for runner in engine._runners.all)


async def test_a_load_reaches_both_and_one_that_fails_on_one_is_undone_on_the_other(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = client.engine
    second = engine._runners.all[1]
    call, before = second.call, [await residents(engine, number) for number in (0, 1)]

    async def refuse(message_type: type, *values: Any) -> Any:
        if values[:1] in (("add_adapter",), ("pin_adapter",)):
            raise InvalidRequestError("not here")
        return await call(message_type, *values)

    monkeypatch.setattr(second, "call", refuse)
    with pytest.raises(InvalidRequestError, match="not here"):
        await within(engine.load_adapter("new", str(adapter_path("upper"))))
    with pytest.raises(InvalidRequestError, match="not here"):
        await within(engine.pin_adapter("upper"))
    monkeypatch.undo()
    assert engine.registry is not None
    assert "new" not in engine.registry.names()
    assert [await residents(engine, number) for number in (0, 1)] == before
    await within(engine.load_adapter("new", str(adapter_path("upper"))))
    assert len(await residents(engine, 0)) == len(await residents(engine, 1)) == len(ADAPTERS) + 1
    answers = await asyncio.gather(*(client.ask(PROMPT, "new") for _ in range(4)))
    assert answers == ["BANANA BREAD"] * 4
    await within(engine.unload_adapter("new"))
    assert [await residents(engine, number) for number in (0, 1)] == before
    with pytest.raises(AdapterNotFoundError):
        await client.ask(PROMPT, "new")


async def test_a_killed_runner_ends_its_own_requests_and_comes_back_with_its_adapters(client: Client) -> None:
    engine = client.engine
    streams = [client.long(name) for name in ADAPTERS[:6]]
    await asyncio.gather(*map(first, streams))
    pid = engine.engine_pids[1]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    ends = await asyncio.gather(*map(end_of, streams))
    lost = [end for end in ends if isinstance(end, LoraplexError)]
    assert len(lost) == 3
    assert all(isinstance(end, EngineDeadError) and "killed by SIGKILL" in str(end) for end in lost)
    assert engine.health().is_alive
    assert await client.ask(PROMPT, "upper") == "BANANA BREAD"
    if engine.health().num_serving == 1:
        await within(engine.load_adapter("meanwhile", str(adapter_path("upper"))))
    await until(lambda: engine.health().num_serving == 2)
    assert engine.engine_pids[1] != pid
    first_has = await residents(engine, 0)
    assert (await residents(engine, 1)).keys() == first_has.keys()
    await until_pinned_alike(engine)
    answers = await asyncio.gather(*(client.ask(PROMPT, task.name) for task in TASKS for _ in range(2)))
    assert answers == [task.apply("banana bread") for task in TASKS for _ in range(2)]
    if client.engine.has_adapter("meanwhile"):
        await within(engine.unload_adapter("meanwhile"))


async def until_pinned_alike(engine: AsyncEngine) -> None:
    async with asyncio.timeout(60):
        while await residents(engine, 1) != await residents(engine, 0):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("settings", "engine", "text"),
    [
        ({"placement": "best"}, {}, "placement must be one of"),
        ({"data_parallel_size": 0}, {}, "data_parallel_size must be 1"),
        ({"devices": "cpu:0,tpu:1"}, {}, "devices must be such as"),
        ({"devices": "cuda:0,cuda:0"}, {}, "with cuda:0 twice"),
        ({"devices": "cpu:0,cuda:0"}, {}, "all CPUs or all GPUs"),
        ({"devices": "cpu:0,cpu:1", "data_parallel_size": 3}, {}, "as many as devices"),
        ({"devices": "cpu:0,cpu:1"}, {"device": "cpu"}, "are one setting"),
        ({"data_parallel_size": 2, "min_runners": 3}, {}, "min_runners must be 1..2"),
        ({"min_runners": 0}, {}, "min_runners must be 1..1"),
        ({"data_parallel_size": 2, "idle_s": -1}, {}, "runner_idle_s must be >= 0"),
        ({"data_parallel_size": 2}, {"device": "cuda:1"}, "name each one in devices"),
        ({"data_parallel_size": 2}, {"device_memory": "40%"}, "device_memory must be bytes with 2 runners"),
    ],
)
async def test_what_contradicts_itself_is_refused(settings: Any, engine: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        RunnerSettings(**settings).configs(demo_config(**engine))


async def test_each_runner_has_its_device_and_its_share_of_the_threads() -> None:
    one = demo_config(num_threads=None)
    assert RunnerSettings().configs(one) == (one,)
    two = RunnerSettings(data_parallel_size=2)
    assert [each.device for each in two.configs(one)] == ["auto:0", "auto:1"]
    assert [each.num_threads for each in two.configs(one)] == shared_threads(2)
    gpus = RunnerSettings(devices="cuda:0, cuda:2").configs(one)
    assert [(each.device, each.num_threads) for each in gpus] == [("cuda:0", None), ("cuda:2", None)]
    cpus = RunnerSettings(devices="cpu:0,cpu:1").configs(demo_config(num_threads=3))
    assert [(each.device, each.num_threads) for each in cpus] == [("cpu", 3), ("cpu", 3)]
