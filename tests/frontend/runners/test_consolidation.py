"""Two engine processes of which the load needs one: requests move without a changed token, one ends, and comes back."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from loraplex import LLM
from loraplex.core import AdapterMix, Logprob, RequestOutput, SamplingParams
from loraplex.demo.tasks import adapter_path
from loraplex.errors import AdapterUnavailableError, EngineDeadError, EngineError, RequestAbortedError
from loraplex.events import EventKind
from loraplex.frontend import messages as msg
from loraplex.frontend.async_engine import AsyncEngine
from loraplex.frontend.runners.runner import Runner
from loraplex.frontend.runners.settings import RunnerSettings
from loraplex.routing import Rules, RunnerState
from tests.frontend.processes import Client, demo_config, first, rest, until, within
from tests.frontend.runners.parts import ADAPTERS, NUMBERED, PROMPT, end_of, said

pytestmark = pytest.mark.asyncio(loop_scope="module")

IDLE_S = 1.0
PLACES = 8
LONG = 500


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def moving(base: str) -> AsyncIterator[Client]:
    """Its runners stay; tests move requests by hand."""
    async with asyncio.timeout(120):
        settings = RunnerSettings(data_parallel_size=2, placement="spread")
        engine = await AsyncEngine.start(
            demo_config(model=base, device="cpu"), served_model_name="base", runners=settings
        )
        for name in ADAPTERS:
            await engine.load_adapter(name, str(adapter_path(name)))
    yield Client(engine)
    await within(engine.check_integrity())
    await within(engine.shutdown())


def runner_of(client: Client, request_id: str) -> Runner:
    return client.engine._streams[request_id].placement.runner


def other_of(client: Client, request_id: str) -> Runner:
    runners = client.engine._runners.all
    return runners[1 - runner_of(client, request_id).number]


async def move(client: Client, request_id: str) -> bool:
    stream = client.engine._streams.get(request_id)
    return stream is not None and await client.engine._mover.move(stream, other_of(client, request_id))


async def keep_moving(
    client: Client, request_id: str, stream: AsyncIterator[RequestOutput]
) -> tuple[RequestOutput, int]:
    """Move it to and fro until it ends; its last output, and how often it moved."""
    reading = asyncio.create_task(rest(stream))
    num_moves = 0
    await until(lambda: request_id in client.engine._streams or reading.done())
    while not reading.done():
        num_moves += await move(client, request_id)
        await asyncio.sleep(0.002)
    return (await reading)[-1], num_moves


def everything_of(output: RequestOutput) -> list[Any]:
    """All that a client sees of an answer but its times."""
    return [
        output.prompt_token_ids,
        logprobs_of(output.prompt_logprobs),
        *(
            (each.index, each.text, each.token_ids, each.finish_reason, each.stop_reason, logprobs_of(each.logprobs))
            for each in output.outputs
        ),
    ]


def logprobs_of(all_logprobs: Any) -> Any:
    return all_logprobs and [each and {token: shown(each[token]) for token in each} for each in all_logprobs]


def shown(logprob: Logprob) -> tuple[Any, ...]:
    return logprob.logprob, logprob.rank, logprob.decoded_token


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "base": (None, {"max_tokens": LONG, "ignore_eos": True}),
    "adapter": ("upper", {"max_tokens": LONG, "ignore_eos": True}),
    "seeded": ("sort", {"max_tokens": LONG, "ignore_eos": True, "temperature": 1.5, "seed": 7, "top_p": 0.9}),
    "log probabilities": ("upper", {"max_tokens": LONG, "ignore_eos": True, "logprobs": 3, "prompt_logprobs": 2}),
    "penalties": (
        "sort",
        {"max_tokens": LONG, "ignore_eos": True, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "min_tokens": 50},
    ),
    "several": ("upper", {"n": 3, "max_tokens": LONG, "ignore_eos": True, "temperature": 2.0, "seed": 5}),
    "stop string": ("upper", {"max_tokens": LONG, "ignore_eos": True, "temperature": 1.2, "seed": 3, "stop": ["E"]}),
    "mix": (AdapterMix((("upper", 0.6), ("sort", 0.5))), {"max_tokens": LONG, "ignore_eos": True}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
async def test_a_request_that_moves_says_what_it_would_have_said(moving: Client, llm: LLM, case: Any) -> None:
    model, params = case
    still = await moving.outputs(PROMPT, model, request_id="still", **params)
    before = await within(moving.engine.stats())
    stream = moving.stream(PROMPT, model, request_id="moved", **params)
    output, num_moves = await within(keep_moving(moving, "moved", stream))
    after = await within(moving.engine.stats())
    assert everything_of(output) == everything_of(still[-1])
    if model is None or isinstance(model, str):
        request = None if model is None else NUMBERED[model]
        alone = llm.generate(PROMPT, SamplingParams(**{"temperature": 0, **params}), lora_request=request)[0]
        assert said(output) == said(alone)
    if case is not CASES["stop string"]:
        assert num_moves >= 1
        num_tokens = sum(len(each.token_ids) for each in output.outputs)
        assert after.num_generated_tokens - before.num_generated_tokens == num_tokens, "each is drawn once"
        num_completions = params.get("n", 1)
        num_prompt_tokens = num_completions * len(output.prompt_token_ids)
        assert after.num_prompt_tokens - before.num_prompt_tokens == num_prompt_tokens, "each prompt counts once"
        assert sum(after.num_finished.values()) - sum(before.num_finished.values()) == num_completions
    assert [runner.num_requests for runner in moving.engine._runners.all] == [0, 0]


async def test_a_target_that_cannot_have_the_adapter_leaves_the_request_where_it_is(
    moving: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = moving.long("upper", request_id="stays", max_tokens=LONG)
    await first(stream)
    source, target = runner_of(moving, "stays"), other_of(moving, "stays")
    call = target.call

    async def refuse(message_type: type, *values: Any) -> Any:
        if values[:1] == ("promote_adapter",):
            raise AdapterUnavailableError("its source is gone")
        return await call(message_type, *values)

    async def quarantine(message_type: type, *values: Any) -> Any:
        answer = await call(message_type, *values)
        return [replace(each, error="quarantined") for each in answer] if values[:1] == ("list_adapters",) else answer

    for each in (refuse, quarantine):
        monkeypatch.setattr(target, "call", each)
        assert not await move(moving, "stays")
        held = moving.engine._streams["stays"].held(time.monotonic())
        assert (runner_of(moving, "stays"), held.can_move, held.target) == (source, False, None)
        moving.engine._streams["stays"].stays_until_s = 0.0
        monkeypatch.undo()
    assert await move(moving, "stays")
    assert len((await rest(stream))[-1].outputs[0].token_ids) == LONG


async def test_ends_and_verbs_that_come_in_the_middle_of_a_move(
    moving: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the source's reply and what the target is sent: the client leaves, or its adapter is forced out."""
    engine = moving.engine
    await within(engine.load_adapter("passing", str(adapter_path("upper"))))
    unloads: list[asyncio.Task[Any]] = []
    for number, act in enumerate(("abort", "unload")):
        request_id = f"middle{number}"
        stream = moving.long("passing", request_id=request_id)
        await first(stream)
        source = runner_of(moving, request_id)
        call = source.call

        async def then_act(
            message_type: type, *values: Any, call: Any = call, act: str = act, request_id: str = request_id
        ) -> Any:
            answer = await call(message_type, *values)
            if message_type is msg.WithdrawRequests and act == "abort":
                await engine.abort(request_id)
            elif message_type is msg.WithdrawRequests:
                unloading = asyncio.create_task(engine.unload_adapter("passing", force=True))
                await until(lambda: engine._mover._is_forced_out(engine._streams[request_id]))
                unloads.append(unloading)
            return answer

        monkeypatch.setattr(source, "call", then_act)
        assert not await within(move(moving, request_id))
        monkeypatch.undo()
        end = await end_of(stream)
        assert isinstance(end, RequestAbortedError), end
    await within(asyncio.gather(*unloads))
    assert not engine.has_adapter("passing")
    assert [runner.num_requests for runner in engine._runners.all] == [0, 0]


@pytest.mark.parametrize("where", ["withdraw", "go on"])
async def test_a_move_that_fails_in_the_middle_ends_its_request(
    moving: Client, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    stream = moving.long("upper", request_id="torn")
    await first(stream)
    source = runner_of(moving, "torn")
    call = source.call

    async def fail(message_type: type, *values: Any) -> Any:
        if message_type is msg.WithdrawRequests:
            raise EngineError("a bug of the engine")
        return await call(message_type, *values)

    if where == "withdraw":
        monkeypatch.setattr(source, "call", fail)
    else:
        monkeypatch.setattr(moving.engine._mover, "_place", lambda *_: 1 / 0)
    assert not await within(move(moving, "torn"))
    monkeypatch.undo()
    end = await end_of(stream)
    assert isinstance(end, EngineError)
    assert re.search("a bug of the engine|a move failed: ZeroDivisionError", str(end))
    assert [runner.num_requests for runner in moving.engine._runners.all] == [0, 0]
    async with asyncio.timeout(60):
        while (await moving.engine.stats()).num_running:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("whose", ["source", "target"])
async def test_a_runner_that_dies_in_the_middle_of_a_move(moving: Client, whose: str) -> None:
    """The source's requests end with it. Where the target has ended the request goes on in the source."""
    stream = moving.long("upper", request_id=whose, max_tokens=LONG)
    await first(stream)
    source, target = runner_of(moving, whose), other_of(moving, whose)
    dying = source if whose == "source" else target
    pid = dying.client.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    going = asyncio.create_task(move(moving, whose))
    await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    assert not await within(going)
    end = await end_of(stream)
    if whose == "source":
        assert isinstance(end, EngineDeadError)
    else:
        assert isinstance(end, RequestOutput)
        assert len(end.outputs[0].token_ids) == LONG
    await until(lambda: moving.engine.health().num_serving == 2)


# ------------------------------------------------------------------------------------------------- as the load is


@pytest_asyncio.fixture(loop_scope="module")
async def consolidating(base: str) -> AsyncIterator[Client]:
    settings = RunnerSettings(data_parallel_size=2, placement="spread", min_runners=1, idle_s=IDLE_S)
    config = demo_config(model=base, max_num_seqs=PLACES, device="cpu")
    engine = await within(AsyncEngine.start(config, served_model_name="base", runners=settings))
    for name in ADAPTERS:
        await within(engine.load_adapter(name, str(adapter_path(name)), is_pinned=name == "sort"))
    yield Client(engine)
    await within(engine.check_integrity())
    await within(engine.shutdown())


def states(client: Client) -> list[RunnerState]:
    return sorted(runner.state for runner in client.engine._runners.all)


ONE_RELEASED = sorted((RunnerState.OPEN, RunnerState.RELEASED))


async def test_a_load_that_falls_ends_on_one_runner_and_comes_back_with_what_was_done_meanwhile(
    consolidating: Client, llm: LLM
) -> None:
    client, engine = consolidating, consolidating.engine
    models = [ADAPTERS[number % len(ADAPTERS)] for number in range(2 * PLACES)]
    streams = [client.long(model, request_id=f"l{number}") for number, model in enumerate(models)]
    await asyncio.gather(*map(first, streams))
    assert [runner.num_requests for runner in engine._runners.all] == [PLACES, PLACES]
    kept = [f"l{number}" for number in range(4)]
    for number in range(4, 2 * PLACES):
        await engine.abort(f"l{number}")
    fell_s = time.monotonic()
    assert len({runner_of(client, request_id).name for request_id in kept}) == 2, "both have some of the rest"
    at_least = (await within(engine.stats())).num_generated_tokens
    await until(lambda: states(client) == ONE_RELEASED)
    assert time.monotonic() - fell_s < IDLE_S + 2.0
    assert (await within(engine.stats())).num_generated_tokens > at_least, "counters only grow"
    assert engine.health().is_alive
    assert (engine.health().num_serving, engine.health().num_released) == (1, 1)
    reports = await within(engine.runner_reports())
    assert [report.is_released for report in reports] == [not report.is_serving for report in reports]
    assert sum(report.num_moved for report in reports) == 2
    assert {EventKind.RELEASE, EventKind.MOVE} <= set(engine.events.counts)
    # What is done now reaches the one that comes back.
    await within(engine.load_adapter("meanwhile", str(adapter_path("upper")), is_pinned=True))
    await within(engine.unpin_adapter("sort"))
    await within(engine.unload_adapter("reverse"))
    away = next(runner for runner in engine._runners.all if runner.state is RunnerState.RELEASED)
    more_s = time.monotonic()
    more = [client.long("meanwhile", request_id=f"m{number}") for number in range(PLACES)]
    firsts = asyncio.gather(*map(first, more))
    await until(lambda: states(client) == [RunnerState.OPEN] * 2)
    assert engine._runners._consolidator is not None
    assert engine._runners._consolidator._empty_since_s.get(away, more_s) >= more_s, "its time away is not idle"
    assert engine.events.counts[EventKind.RESUME] == 1
    assert EventKind.RESTART not in engine.events.counts, "nothing died"
    await within(firsts)
    assert await client.ask(PROMPT, "meanwhile") == "BANANA BREAD"
    found = [
        {each.adapter_id for each in await within(runner.call(msg.CallStore, "list_adapters", (None,)))}
        for runner in engine._runners.all
    ]
    assert found[0] == found[1]
    for request_id in [*kept, *(f"m{number}" for number in range(PLACES))]:
        await engine.abort(request_id)
    ends = await asyncio.gather(*map(end_of, [*streams, *more]))
    assert all(isinstance(end, RequestAbortedError | RequestOutput) for end in ends)


async def test_a_request_that_only_a_draining_runner_has_room_for_opens_it(consolidating: Client) -> None:
    client, engine = consolidating, consolidating.engine
    await until(lambda: RunnerState.DRAINING in states(client))
    streams = [client.long(None, request_id=f"d{number}") for number in range(PLACES + 1)]
    await asyncio.gather(*map(first, streams))
    assert states(client) == [RunnerState.OPEN] * 2
    for number in range(PLACES + 1):
        await engine.abort(f"d{number}")
    await asyncio.gather(*map(end_of, streams))


async def test_one_that_drains_takes_requests_at_once_when_the_other_dies(consolidating: Client) -> None:
    engine = consolidating.engine
    consolidator = engine._runners._consolidator
    assert consolidator is not None
    consolidator._rules = Rules(min_runners=1, idle_s=600.0)
    await until(lambda: states(consolidating) == sorted((RunnerState.DRAINING, RunnerState.OPEN)))
    dying = next(runner for runner in engine._runners.all if runner.state is RunnerState.OPEN)
    assert dying.client.pid is not None
    os.kill(dying.client.pid, signal.SIGKILL)
    await until(lambda: not dying.is_serving)
    assert await consolidating.ask(PROMPT, "upper") == "BANANA BREAD"
    await until(lambda: dying.is_serving)


async def test_a_runner_that_does_not_come_back_counts_no_more(
    consolidating: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = consolidating.engine
    await until(lambda: states(consolidating) == ONE_RELEASED)
    gone = next(runner for runner in engine._runners.all if runner.state is RunnerState.RELEASED)
    gone.supervisor.has_given_up.set()
    monkeypatch.setattr(gone.supervisor, "resume", lambda: None)
    streams = [consolidating.long(None, request_id=f"g{number}") for number in range(PLACES)]
    await asyncio.gather(*map(first, streams))
    await until(lambda: gone.state is RunnerState.STARTING)
    await until(lambda: gone.state is RunnerState.OPEN)
    assert not gone.is_serving
    for number in range(PLACES):
        await engine.abort(f"g{number}")
    await asyncio.gather(*map(end_of, streams))


async def test_no_process_ends_while_a_profile_runs(consolidating: Client) -> None:
    engine = consolidating.engine
    await within(engine.start_lora_profiling())
    await until(lambda: RunnerState.DRAINING in states(consolidating))
    await asyncio.sleep(IDLE_S + 0.6)
    assert RunnerState.RELEASED not in states(consolidating)
    report = await within(engine.generate_lora_performance_report())
    assert report is not None
    await until(lambda: states(consolidating) == ONE_RELEASED)


async def test_the_last_one_that_is_killed_brings_the_other_back(consolidating: Client) -> None:
    engine = consolidating.engine
    await until(lambda: states(consolidating) == ONE_RELEASED)
    last = next(runner for runner in engine._runners.all if runner.state is RunnerState.OPEN)
    other = next(runner for runner in engine._runners.all if runner is not last)
    assert last.client.pid is not None
    os.kill(last.client.pid, signal.SIGKILL)
    await until(lambda: not last.is_serving)
    with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
        await consolidating.ask(PROMPT, "upper")
    await until(lambda: other.state is not RunnerState.RELEASED)
    await until(lambda: engine.health().is_alive)
    assert await consolidating.ask(PROMPT, "upper") == "BANANA BREAD"


async def test_rules_are_those_of_the_settings() -> None:
    assert RunnerSettings(data_parallel_size=3).rules == Rules(min_runners=3)
    assert RunnerSettings(data_parallel_size=3, min_runners=1, idle_s=5).rules == Rules(1, 5)
