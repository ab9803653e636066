"""What befalls one of two runners under load, and what of both outlives the server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from loraplex.core import RequestOutput, Tier
from loraplex.demo.tasks import adapter_path
from loraplex.errors import AdapterNotFoundError, EngineDeadError, LoraplexError
from loraplex.frontend import messages as msg
from loraplex.frontend.async_engine import AsyncEngine
from loraplex.frontend.runners.settings import RunnerSettings
from loraplex.frontend.supervisor import Supervision
from loraplex.routing import HotAdapters, HotRules
from tests.frontend.processes import Client, demo_config, first, rest, until, within
from tests.frontend.runners.parts import PROMPT, end_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINE_TIMEOUT_S = 1.5
PLACES = 4
SAID = {"upper": "BANANA BREAD", "reverse": "daerb ananab"}


async def started(base: str, state_dir: Path | None = None, placement: str = "spread") -> AsyncEngine:
    return await within(
        AsyncEngine.start(
            demo_config(model=base, device="cpu", max_num_seqs=PLACES),
            served_model_name="base",
            state_dir=state_dir,
            supervision=Supervision(engine_timeout_s=ENGINE_TIMEOUT_S),
            runners=RunnerSettings(data_parallel_size=2, placement=placement),
        )
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(base: str) -> AsyncIterator[Client]:
    engine = await started(base)
    for name in SAID:
        await within(engine.load_adapter(name, str(adapter_path(name))))
    yield Client(engine)
    await within(engine.check_integrity())
    await within(engine.shutdown())


async def both_say(client: Client, name: str, text: str) -> None:
    """Each runner has one of two requests that run together."""
    assert await asyncio.gather(*(client.ask(PROMPT, name) for _ in range(2))) == [text] * 2


async def test_one_that_is_stopped_is_ended_and_started_again_and_the_other_goes_on(client: Client) -> None:
    engine = client.engine
    streams = [client.long("upper", request_id=f"s{number}", max_tokens=2000) for number in range(4)]
    await asyncio.gather(*map(first, streams))
    stopped = engine._runners.all[1]
    own = {number for number in range(4) if engine._streams[f"s{number}"].placement.runner is stopped}
    pid = stopped.client.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    ends = await within(asyncio.gather(*(end_of(stream) for stream in streams)))
    for number, end in enumerate(ends):
        if number in own:
            assert isinstance(end, EngineDeadError)
            assert "no longer responds" in str(end)
            assert "--engine-timeout-s" in str(end)
        else:
            assert isinstance(end, RequestOutput)
            assert end.outputs[0].finish_reason == "length"
    assert len(own) == 2
    await until(lambda: engine.health().num_serving == 2)
    assert stopped.client.pid != pid
    await both_say(client, "upper", SAID["upper"])


async def test_kill_under_load_ends_its_own_requests_alone_and_loses_no_verb(client: Client) -> None:
    engine = client.engine
    killed = engine._runners.all[0]
    failed: dict[str, LoraplexError] = {}
    answered = 0
    is_over = asyncio.Event()

    async def ask(number: int) -> None:
        nonlocal answered
        count = 0
        while not is_over.is_set():
            count, name = count + 1, ("upper", "reverse")[(number + count) % 2]
            request_id = f"k{number}.{count}"
            try:
                assert await client.ask(PROMPT, name, request_id=request_id) == SAID[name]
                answered += 1
            except LoraplexError as error:
                failed[request_id] = error

    async def change() -> dict[str, bool]:
        """Loads, pins and unloads; what was acknowledged: whether each name is there."""
        done: dict[str, bool] = {}
        for number in range(12):
            name = f"new{number}"
            await engine.load_adapter(name, str(adapter_path("upper")), is_pinned=number % 3 == 0)
            done[name] = True
            if number % 3 == 1:
                await engine.unload_adapter(name)
                done[name] = False
            if number == 4:
                await kill()
        return done

    hit: set[str] = set()

    async def kill() -> None:
        await until(lambda: killed.num_requests > 0)
        hit.update(key for key, stream in engine._streams.items() if stream.placement.runner is killed)
        assert killed.client.pid is not None
        os.kill(killed.client.pid, signal.SIGKILL)

    async with asyncio.TaskGroup() as asking:
        for number in range(6):
            asking.create_task(ask(number))
        done = await within(change())
        await until(lambda: engine.health().num_serving == 2)
        before = answered
        await until(lambda: answered > before + 10)
        is_over.set()
    assert failed
    for request_id, error in failed.items():
        assert isinstance(error, EngineDeadError), (request_id, error)
        assert "killed by SIGKILL" in str(error)
    # Between the signal and its notice a request may still have been placed there, or answered.
    assert len(failed) <= len(hit) + 6
    found = [
        {each.adapter_id for each in await within(runner.call(msg.CallStore, "list_adapters", (None,)))}
        for runner in engine._runners.all
    ]
    assert found[0] == found[1]
    for name, is_there in done.items():
        if is_there:
            await both_say(client, name, SAID["upper"])
            await within(engine.unload_adapter(name))
        else:
            with pytest.raises(AdapterNotFoundError):
                await client.ask(PROMPT, name)


async def test_a_reload_and_a_switch_reach_both_while_old_requests_end_as_they_began(client: Client) -> None:
    engine = client.engine
    await within(engine.load_adapter("task", str(adapter_path("upper"))))
    whole = (await client.outputs("banana=", "task", max_tokens=300, ignore_eos=True))[-1].outputs[0].token_ids
    old = [client.stream("banana=", "task", max_tokens=300, ignore_eos=True) for _ in range(2)]
    await asyncio.gather(*map(first, old))
    assert [runner.num_requests for runner in engine._runners.all] == [1, 1]
    await within(engine.load_adapter("task", str(adapter_path("reverse")), load_inplace=True))
    await both_say(client, "task", SAID["reverse"])
    await within(engine.switch_adapter("task", "upper"))
    await both_say(client, "task", SAID["upper"])
    ends = await asyncio.gather(*map(rest, old))
    assert [end[-1].outputs[0].token_ids for end in ends] == [whole] * 2
    await within(engine.unload_adapter("task"))


async def test_a_profile_is_of_both_runners(client: Client) -> None:
    engine = client.engine
    await within(engine.start_lora_profiling())
    answers = await asyncio.gather(
        *(client.outputs(PROMPT, name, max_tokens=20, ignore_eos=True) for name in (*SAID, *SAID))
    )
    report = await within(engine.generate_lora_performance_report())
    assert report.requests.num_finished == 4
    assert {each.name: each.num_requests for each in report.adapters} == dict.fromkeys(SAID, 2)
    num_tokens = sum(len(answer[-1].outputs[0].token_ids) for answer in answers)
    assert report.requests.num_tokens == num_tokens == 80
    # A step of each runner draws for the two requests that it has; a first token may have a step of its own.
    assert num_tokens / 2 <= report.num_steps <= num_tokens
    assert report.part_seconds["forward"] > 0


async def test_names_versions_and_pins_outlive_the_server_in_both(base: str, tmp_path: Path) -> None:
    engine = await started(base, tmp_path)
    await within(engine.load_adapter("kept", str(adapter_path("upper"))))
    await within(engine.load_adapter("kept", str(adapter_path("reverse")), load_inplace=True, is_pinned=True))
    await within(engine.load_adapter("gone", str(adapter_path("upper"))))
    await within(engine.unload_adapter("gone"))
    await within(engine.shutdown())
    engine = await started(base, tmp_path)
    try:
        again = Client(engine)
        await both_say(again, "kept", SAID["reverse"])
        assert not engine.has_adapter("gone")
        for runner in engine._runners.all:
            found = await within(runner.call(msg.CallStore, "list_adapters", (None,)))
            assert [each.is_pinned for each in found if each.tier is Tier.DEVICE] == [True]
    finally:
        await within(engine.shutdown())


async def test_an_adapter_with_a_queue_is_brought_to_the_other_runner_and_taken_back(base: str) -> None:
    engine = await started(base, placement="pack")
    client = Client(engine)
    try:
        await within(engine.load_adapter("upper", str(adapter_path("upper"))))
        consolidator = engine._runners._consolidator
        assert consolidator is not None
        consolidator._hot = HotAdapters(HotRules(hold_s=1.0))
        streams = [client.long("upper", request_id=f"h{number}") for number in range(PLACES - 1)]
        await asyncio.gather(*map(first, streams))
        (other,) = (runner for runner in engine._runners.all if not runner.num_requests)

        async def tier() -> Tier:
            found = await within(other.call(msg.CallStore, "list_adapters", (None,)))
            return next(each.tier for each in found)

        async def until_on(wanted: Tier) -> None:
            async with asyncio.timeout(60):
                while await tier() is not wanted:
                    await asyncio.sleep(0.02)

        await until_on(Tier.DEVICE)  # from host memory, where a load leaves it
        assert not other.num_requests, "before a request needs it there"
        for number in range(PLACES - 1):
            await engine.abort(f"h{number}")
        await asyncio.gather(*map(end_of, streams))
        await until_on(Tier.HOST)
    finally:
        await within(engine.shutdown())
