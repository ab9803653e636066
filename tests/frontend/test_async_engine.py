"""The engine for servers, with a real engine process that runs the demo's model: streams, verbs, aborts.

One process serves all tests here; after each of them nothing runs and every reference has returned. Deaths, overload
and the end of processes are in test_engine_process.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import pytest_asyncio

from loraplex import LLM, LoRARequest, SamplingParams
from loraplex.adapters.source import AdapterSource
from loraplex.core import AdapterMix, RequestOutput, Tier
from loraplex.demo.tasks import TASKS, adapter_path, phrases, prompt_of
from loraplex.errors import (
    AdapterConflictError,
    AdapterNotFoundError,
    AdapterPathNotFoundError,
    AdapterTruncatedError,
    InvalidRequestError,
    LoraplexError,
    PromptTooLongError,
    RequestAbortedError,
    UnknownMessageError,
)
from loraplex.events import EventKind
from loraplex.frontend import async_engine
from loraplex.frontend import messages as msg
from loraplex.frontend.async_engine import AsyncEngine
from loraplex.frontend.supervisor import Supervision
from loraplex.performance.requests import ServiceTargets
from tests.frontend import holding_process
from tests.frontend.processes import MAX_MODEL_LEN, Client, demo_config, first, rest, stretched_base, until, within

pytestmark = pytest.mark.asyncio(loop_scope="module")

LOADED = ("upper", "reverse", "sort")
MODELS = (None, *LOADED)
APPLY = {None: str, **{task.name: task.apply for task in TASKS}}
PHRASES = tuple(phrases("held_out", 8, seed=3))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stretched_base(tmp_path_factory.mktemp("model") / "base")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(base: str) -> AsyncIterator[AsyncEngine]:
    starting = AsyncEngine.start(
        demo_config(model=base), served_model_name="base", supervision=Supervision(module=holding_process.MODULE)
    )
    with patch.object(async_engine.logger, "info") as logged:
        engine = await within(starting)
    assert [call.args[1] for call in logged.call_args_list] == list(engine.info.choices), "a line each"
    for name in LOADED:
        await within(engine.load_adapter(name, str(adapter_path(name))))
    yield engine
    await within(engine.shutdown())


@pytest_asyncio.fixture(loop_scope="module")
async def client(engine: AsyncEngine) -> AsyncIterator[Client]:
    """At the end nothing runs, every reference has returned, and the adapters are those that were there before."""
    yield Client(engine)
    assert engine.registry is not None
    assert engine.num_unfinished == 0
    assert engine.registry.num_references == 0
    stats = await within(engine.stats())
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    await within(engine.check_integrity())
    assert sorted(engine.registry.names()) == sorted(LOADED)
    assert engine.health().is_alive


@pytest.fixture(scope="module")
def llm(base: str) -> Iterator[LLM]:
    with LLM.from_config(demo_config(model=base)) as llm:
        yield llm


def offline(llm: LLM, prompt: str, model: str | None, **params: Any) -> RequestOutput:
    request = None if model is None else LoRARequest(model, LOADED.index(model) + 1, str(adapter_path(model)))
    chosen = SamplingParams(**{"temperature": 0, "max_tokens": 64, **params})
    return llm.generate(prompt, chosen, lora_request=request)[0]


def said(output: RequestOutput) -> list[tuple[Any, ...]]:
    """All of an answer but its times."""
    return [(each.index, each.text, each.token_ids, each.finish_reason, each.stop_reason) for each in output.outputs]


# -------------------------------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize("model", MODELS)
async def test_a_stream_ends_with_what_the_offline_engine_says(client: Client, llm: LLM, model: str | None) -> None:
    prompt = prompt_of(PHRASES[0])
    outputs = await client.outputs(prompt, model, max_tokens=40, ignore_eos=True)
    expected = offline(llm, prompt, model, max_tokens=40, ignore_eos=True)
    assert said(outputs[-1]) == said(expected)
    assert outputs[-1].prompt == prompt
    assert outputs[-1].prompt_token_ids == expected.prompt_token_ids


async def test_outputs_are_cumulative_and_only_the_last_is_finished(client: Client) -> None:
    outputs = await client.outputs(prompt_of(PHRASES[0]), "upper")
    completions = [output.outputs[0] for output in outputs]
    for shorter, longer in itertools.pairwise(completions):
        assert longer.text.startswith(shorter.text)
        assert longer.token_ids[: len(shorter.token_ids)] == shorter.token_ids
        assert len(longer.token_ids) > len(shorter.token_ids)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert completions[-1].text == PHRASES[0].upper()
    assert completions[-1].finish_reason == "stop"


async def test_a_mix_by_name_or_with_its_adapters_is_the_offline_engines(client: Client, llm: LLM) -> None:
    prompt, params = prompt_of(PHRASES[1]), {"max_tokens": 30, "ignore_eos": True}
    requests = [LoRARequest(name, LOADED.index(name) + 1, str(adapter_path(name))) for name in ("upper", "sort")]
    mix = tuple(zip(requests, (0.6, 0.5), strict=True))
    (expected,) = llm.generate(prompt, SamplingParams(temperature=0, **params), lora_request=mix)
    by_name = AdapterMix((("upper", 0.6), ("sort", 0.5)))
    answers = await asyncio.gather(client.outputs(prompt, by_name, **params), client.outputs(prompt, "sort", **params))
    assert said(answers[0][-1]) == said(expected) != said(answers[1][-1])
    brought = (await client.outputs(prompt, lora_request=mix, **params))[-1]
    assert said(brought) == said(expected)
    assert brought.lora_request == mix
    with pytest.raises(AdapterNotFoundError):
        await client.outputs(prompt, AdapterMix((("upper", 0.6), ("nope", 0.5))), **params)


async def test_a_forced_unload_of_one_adapter_ends_its_mixes(client: Client) -> None:
    await within(client.engine.load_adapter("mine", str(adapter_path("double"))))
    with client.holding():
        stream = client.long(AdapterMix((("upper", 1.0), ("mine", 0.5))))
        await first(stream)
        result = await within(client.engine.unload_adapter("mine", force=True))
    assert result.num_aborted == 1
    assert (await rest(stream))[-1].outputs[0].finish_reason == "abort"


async def test_requests_of_all_adapters_at_once_answer_as_alone(client: Client) -> None:
    asked = [(phrase, model) for phrase in PHRASES for model in MODELS]
    answers = await asyncio.gather(*(client.ask(prompt_of(phrase), model) for phrase, model in asked))
    assert answers == [APPLY[model](phrase) for phrase, model in asked]


@pytest.mark.parametrize("params", [{"seed": 5}, {"seed": 5, "logprobs": 2}, {"temperature": 0}])
async def test_several_completions_of_one_prompt(client: Client, llm: LLM, params: dict[str, Any]) -> None:
    params = {"n": 3, "temperature": 2.0, "max_tokens": 12, "ignore_eos": True, **params}
    outputs = await client.outputs("banana=", "upper", **params)
    expected = offline(llm, "banana=", "upper", **params)
    assert said(outputs[-1]) == said(expected)
    assert len({each.token_ids for each in outputs[-1].outputs}) == (1 if params["temperature"] == 0 else 3)
    assert all([each.index for each in output.outputs] == [0, 1, 2] for output in outputs)


async def test_a_stop_string_ends_the_request_in_the_engine(client: Client) -> None:
    outputs = await client.outputs("banana=", stop=["nan"], ignore_eos=True, max_tokens=None)
    assert said(outputs[-1])[0][1:] == ("ba", outputs[-1].outputs[0].token_ids, "stop", "nan")


async def test_token_ids_are_a_prompt(client: Client) -> None:
    tokenizer = client.engine.tokenizer
    assert tokenizer is not None
    assert await client.ask(tokenizer.encode("banana="), "upper") == "BANANA"


async def test_what_the_engine_is(client: Client, base: str) -> None:
    info = client.engine.model_info
    assert (info.served_model_name, info.root, info.max_model_len) == ("base", base, MAX_MODEL_LEN)
    assert client.engine.info.vocab_size == info.vocab_size
    device, length = client.engine.info.choices
    assert device.startswith("device: cpu (")
    assert length == f"max_model_len: {MAX_MODEL_LEN} tokens (as far as the model's positions go)"
    await client.ask("banana=")
    stats = await within(client.engine.stats())
    assert stats.num_generated_tokens > 0
    assert stats.memory.num_adapters == len(LOADED)


# -------------------------------------------------------------------------------------------------- ends before the end


async def test_abort_frees_what_the_request_held(client: Client) -> None:
    engine = client.engine
    stream = client.long("upper", request_id="a")
    await first(stream)
    assert engine.registry is not None
    assert engine.registry.num_references == 1
    await engine.abort("a")
    assert engine.registry.num_references == 0
    await within(engine.check_integrity())  # the engine reads messages in order: it has heard of the abort
    assert (await within(engine.stats())).num_running == 0
    with pytest.raises(RequestAbortedError, match="request 'a' was aborted"):
        await rest(stream)


async def test_abort_of_one_completion_of_many_ends_all(client: Client) -> None:
    stream = client.long("upper", request_id="a", n=4)
    await first(stream)
    await client.engine.abort("a")
    assert (await within(client.engine.stats())).num_running == 0
    with pytest.raises(RequestAbortedError):
        await rest(stream)


async def test_abort_of_an_unknown_request_is_passed_over(client: Client) -> None:
    await client.engine.abort("unknown")
    outputs = await client.outputs("banana=", request_id="a")
    await client.engine.abort("a")
    assert outputs[-1].outputs[0].text == "banana"


async def test_closing_the_stream_aborts(client: Client) -> None:
    stream = client.long("upper")
    await first(stream)
    await stream.aclose()
    assert client.engine.num_unfinished == 0
    assert (await within(client.engine.stats())).num_running == 0


async def test_closing_a_stream_that_never_began_is_nothing(client: Client) -> None:
    await client.long("upper").aclose()
    assert client.engine.num_unfinished == 0


async def test_a_cancelled_reader_aborts(client: Client) -> None:
    seen = asyncio.Event()

    async def read() -> None:
        async for _ in client.long("upper"):
            seen.set()

    reader = asyncio.create_task(read())
    await within(seen.wait())
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert client.engine.num_unfinished == 0
    assert (await within(client.engine.stats())).num_running == 0


async def test_a_reader_that_is_cancelled_before_its_first_token(client: Client) -> None:
    reader = asyncio.create_task(client.outputs("banana=", "upper", max_tokens=None, ignore_eos=True))
    await until(lambda: client.engine.num_unfinished == 1)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert client.engine.num_unfinished == 0


async def test_a_slow_reader_gets_the_latest(client: Client) -> None:
    """It skips what it had no time for; what the request held is back before it reads on."""
    engine = client.engine
    stream = client.long("upper", max_tokens=50)
    with client.holding():
        await first(stream)
    await until(lambda: engine.num_unfinished == 0)
    assert engine.registry is not None
    assert engine.registry.num_references == 0
    outputs = await rest(stream)
    assert [output.finished for output in outputs] == [True]
    assert len(outputs[0].outputs[0].token_ids) == 50


async def test_what_a_reader_leaves_unread_is_told_when_it_comes(client: Client) -> None:
    seen: list[RequestOutput] = []
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    stream = client.engine.generate("banana=", params, "unread", model="upper", on_output=seen.append)
    await first(stream)
    await until(lambda: client.engine.num_unfinished == 0)
    await stream.aclose()
    assert len(seen[-1].outputs[0].token_ids) == 50


# ---------------------------------------------------------------------------------------------------------- request ids


async def test_an_id_in_use_is_refused_and_its_owner_goes_on(client: Client) -> None:
    stream = client.long("upper", request_id="a")
    before = await first(stream)
    with pytest.raises(InvalidRequestError, match="request id 'a' is in use"):
        await client.ask("tiger=", "reverse", request_id="a")
    after = await first(stream)
    assert len(after.outputs[0].token_ids) > len(before.outputs[0].token_ids)
    await client.engine.abort("a")


async def test_an_id_is_free_after_an_abort(client: Client) -> None:
    """Nothing that the first one still says is taken for the second one's."""
    for _ in range(5):
        stream = client.long("reverse", request_id="a")
        await first(stream)
        await client.engine.abort("a")
        assert await client.ask("banana=", "upper", request_id="a") == "BANANA"
        with pytest.raises(RequestAbortedError):
            await rest(stream)


async def test_the_end_of_a_reader_is_not_the_end_of_the_next_request_of_that_id(client: Client) -> None:
    done = client.stream("banana=", "upper", request_id="a")
    while not (await first(done)).finished:
        pass
    successor = client.long("reverse", request_id="a", max_tokens=100)
    with client.holding():
        await first(successor)
        assert await rest(done) == []
    outputs = await rest(successor)
    assert len(outputs[-1].outputs[0].token_ids) == 100


async def test_an_id_that_looks_like_a_childs(client: Client) -> None:
    several = client.long("upper", request_id="a", n=2, max_tokens=60)
    with client.holding():
        await first(several)
        assert await client.ask("banana=", "upper", request_id="a#0") == "BANANA"
        assert await client.ask("banana=", "upper", request_id="a#1") == "BANANA"
    assert all(len(each.token_ids) == 60 for each in (await rest(several))[-1].outputs)


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("prompt", "model", "kind"),
    [
        ("banana=", "unknown", AdapterNotFoundError),
        ([], "upper", InvalidRequestError),
        ([5] * MAX_MODEL_LEN, "upper", PromptTooLongError),
        ("x" * MAX_MODEL_LEN, "upper", PromptTooLongError),
        ([10**6], "upper", InvalidRequestError),
    ],
)
async def test_a_request_that_is_refused_holds_nothing(
    client: Client, prompt: Any, model: str, kind: type[LoraplexError]
) -> None:
    with pytest.raises(kind):
        await client.ask(prompt, model)


@pytest.mark.parametrize("params", [{"max_tokens": 5.5}, {"top_k": 10**30}, {"min_tokens": 2.0}])
async def test_parameters_that_no_message_carries_are_answered(client: Client, params: dict[str, Any]) -> None:
    """Whatever a program puts into SamplingParams: an error, not a stream that never ends."""
    with pytest.raises((LoraplexError, TypeError)):
        await client.ask("banana=", "upper", **params)
    with pytest.raises((LoraplexError, TypeError)):
        await client.ask("banana=", "upper", n=3, **params)
    assert await client.ask("banana=", "upper") == "BANANA"


@pytest.mark.parametrize(("prompt", "kind"), [([5.0], "float"), ([True, 5], "bool")])
async def test_a_prompt_that_no_message_carries_is_answered(client: Client, prompt: Any, kind: str) -> None:
    with pytest.raises(
        UnknownMessageError, match=f"a prompt cannot be sent: token ids are integers, and some are {kind}"
    ):
        await client.ask(prompt, "upper")


class UncheckedCall(msg.CallStore, tag="CallStore", frozen=True):
    def __post_init__(self) -> None:
        """What a front would not send is sent."""


async def test_a_call_that_the_engine_does_not_understand_is_answered(client: Client) -> None:
    with pytest.raises(UnknownMessageError, match="is not understood"):
        await within(client.engine.call(UncheckedCall, "promote_adapter", ("seven",)))
    with pytest.raises(AdapterNotFoundError, match="adapter id 4711 is unknown"):
        await within(client.engine.call(msg.CallStore, "promote_adapter", (4711,)))
    assert await client.ask("banana=", "upper") == "BANANA"


# -------------------------------------------------------------------------------------------------------- adapter verbs


@pytest_asyncio.fixture(loop_scope="module")
async def copied(client: Client, tmp_path: Path) -> AsyncIterator[Path]:
    """The adapter `mine`, loaded from a directory of its own, which the test may change."""
    path = Path(shutil.copytree(adapter_path("upper"), tmp_path / "mine"))
    await within(client.engine.load_adapter("mine", str(path)))
    yield path
    with contextlib.suppress(AdapterNotFoundError):
        await within(client.engine.unload_adapter("mine", 10.0))


def become(path: Path, task_name: str) -> None:
    shutil.rmtree(path)
    shutil.copytree(adapter_path(task_name), path)


async def test_loading_again_is_a_no_op_that_says_so(client: Client, copied: Path) -> None:
    result = await within(client.engine.load_adapter("mine", str(copied)))
    assert result.status == "already_loaded"
    with pytest.raises(AdapterConflictError, match="is loaded from"):
        await within(client.engine.load_adapter("mine", str(adapter_path("sort"))))


async def test_reload_while_a_request_of_the_old_version_runs(client: Client, copied: Path) -> None:
    """The old one ends as it began; the new one answers from the new weights."""
    undisturbed = (await rest(client.long("mine", max_tokens=120)))[-1]
    stream = client.long("mine", max_tokens=120)
    with client.holding():
        await first(stream)
        become(copied, "reverse")
        result = await within(client.engine.load_adapter("mine", str(copied), load_inplace=True))
        assert result.status == "reloaded"
        assert await client.ask("banana=", "mine") == "ananab"
    assert said((await rest(stream))[-1]) == said(undisturbed)


async def test_unload_while_a_request_runs(client: Client, copied: Path) -> None:
    stream = client.long("mine", max_tokens=120)
    with client.holding():
        await first(stream)
        result = await within(client.engine.unload_adapter("mine"))
        assert not client.engine.has_adapter("mine")
        with pytest.raises(AdapterNotFoundError):
            await client.ask("banana=", "mine")
    outputs = await rest(stream)
    assert len(outputs[-1].outputs[0].token_ids) == 120
    assert result.num_references == 1


async def test_forced_unload_ends_what_runs(client: Client, copied: Path) -> None:
    stream = client.long("mine")
    with client.holding():
        await first(stream)
        result = await within(client.engine.unload_adapter("mine", force=True))
        last = (await rest(stream))[-1]
    assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
    assert (result.num_aborted, result.is_drained) == (1, True)


async def test_forced_unload_ends_what_has_a_reference_and_is_not_sent_yet(
    client: Client, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unload comes between a request's reference and its way to the engine, which hears of the abort first."""
    engine, loop = client.engine, asyncio.get_running_loop()
    assert engine.registry is not None
    registry, inputs = engine.registry, engine._front.inputs
    prepare, unloads = inputs.prepare, []

    def prepare_meanwhile(*arguments: Any, **options: Any) -> Any:
        (ref,) = [version for version in registry._table.versions() if version.num_references]
        unloads.append(loop.run_in_executor(None, lambda: registry.unload("mine", force=True)))
        while not registry.is_forced_out(ref.adapter_id):  # this thread is the loop's: the abort cannot be sent before
            time.sleep(0.001)
        return prepare(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(inputs, "prepare", prepare_meanwhile)
        with pytest.raises(RequestAbortedError, match="unloaded by force"):
            await client.ask("banana=", "mine")
    result = await within(unloads[0])
    assert result.is_drained
    assert client.engine.num_unfinished == 0


async def test_a_hundred_switches_while_requests_stream(client: Client, tmp_path: Path) -> None:
    """No answer is lost, cut short or made by two adapters, and nothing stays held."""
    engine = client.engine
    for name in ("x", "y"):
        await within(engine.load_adapter(name, str(adapter_path("upper" if name == "x" else "reverse"))))
    has_ended = False
    answers: list[str] = []

    async def ask_on() -> None:
        while not has_ended:
            answers.append(await client.ask("banana=", "x"))

    streams = [asyncio.ensure_future(ask_on()) for _ in range(6)]
    try:
        for number in range(100):
            old, new = ("x", "y") if number % 2 == 0 else ("y", "x")
            result = await within(engine.switch_adapter(old, new))
            assert result.ref.adapter_name == new
            assert (result.evict_s is None) == (result.num_references > 0)
            if number < 2:  # requests go on between switches
                answer = "ananab" if number == 0 else "BANANA"
                await until(lambda answer=answer: answer in answers)  # type: ignore[misc]
            await asyncio.sleep(0)
    finally:
        has_ended = True
        await within(asyncio.gather(*streams))
    assert set(answers) == {"BANANA", "ananab"}
    for name in ("x", "y"):
        await within(engine.unload_adapter(name, 10.0))


async def test_rollback_while_requests_run(client: Client, copied: Path, tmp_path: Path) -> None:
    engine = client.engine
    undisturbed = (await rest(client.long("mine", max_tokens=120)))[-1]
    await within(engine.load_adapter("mine", str(adapter_path("reverse")), load_inplace=True))
    assert await client.ask("banana=", "mine") == "ananab"
    assert await client.ask("banana=", "mine@1") == "BANANA"
    stream = client.long("mine@1", max_tokens=120)
    with client.holding():
        await first(stream)
        result = await within(engine.move_adapter("mine"))
        assert (result.status, result.ref.adapter_version) == ("moved", 1)
        assert await client.ask("banana=", "mine") == "BANANA"
        assert await client.ask("banana=", "mine@2") == "ananab"
    assert said((await rest(stream))[-1]) == said(undisturbed)


async def test_what_verbs_do_is_told(client: Client, copied: Path) -> None:
    before = client.engine.events.last_id
    await within(client.engine.switch_adapter("mine", "reverse"))
    await within(client.engine.unload_adapter("mine"))

    def told() -> list[str]:
        names = ("switch", "unload")
        events = [numbered.event for numbered in client.engine.events.after(before).events]
        return [e.kind.value for e in events if e.kind.value in names and e.adapter_name == "mine"]

    await until(lambda: len(told()) >= 2)
    assert told() == ["switch", "unload"]


async def test_switch_while_requests_run(client: Client, copied: Path) -> None:
    undisturbed = (await rest(client.long("mine", max_tokens=120)))[-1]
    stream = client.long("mine", max_tokens=120)
    with client.holding():
        await first(stream)
        await within(client.engine.switch_adapter("mine", "reverse"))
        assert await client.ask("banana=", "mine") == "ananab"
    assert said((await rest(stream))[-1]) == said(undisturbed)
    assert (await within(client.engine.describe_adapter("mine"))).alias_of == "reverse"


async def test_pin_evict_and_preload(client: Client, copied: Path) -> None:
    engine = client.engine

    async def tier() -> Tier:
        return (await within(engine.describe_adapter("mine"))).tier

    assert await within(engine.pin_adapter("mine"))
    assert not await within(engine.pin_adapter("mine"))
    assert await tier() is Tier.DEVICE
    assert await within(engine.unpin_adapter("mine"))
    assert await within(engine.evict_adapter("mine"))
    assert await tier() is Tier.HOST
    assert (await within(engine.preload_adapter("mine"))).is_new
    assert await tier() is Tier.DEVICE
    for _ in range(2):
        assert await within(engine.evict_adapter("mine"))
    assert await tier() is Tier.SOURCE
    assert await client.ask("banana=", "mine") == "BANANA"
    assert [info.ref.adapter_name for info in await within(engine.list_adapters())] == [*LOADED, "mine"]


async def test_an_adapter_in_use_is_not_evicted(client: Client, copied: Path) -> None:
    stream = client.long("mine")
    with client.holding():
        await first(stream)
        info = await within(client.engine.describe_adapter("mine"))
        assert (info.num_references, info.tier) == (1, Tier.DEVICE)
        assert not await within(client.engine.evict_adapter("mine"))
        await stream.aclose()


async def test_verbs_on_unknown_names(client: Client) -> None:
    engine = client.engine
    for verb in (engine.unload_adapter, engine.pin_adapter, engine.evict_adapter, engine.describe_adapter):
        with pytest.raises(AdapterNotFoundError):
            await within(verb("unknown"))


async def test_bad_loads_disturb_nobody_and_are_not_sticky(client: Client, tmp_path: Path) -> None:
    undisturbed = (await rest(client.long("upper", max_tokens=150)))[-1]
    stream = client.long("upper", max_tokens=150)
    with client.holding():
        await first(stream)
        path = tmp_path / "mine"
        with pytest.raises(AdapterPathNotFoundError):
            await within(client.engine.load_adapter("mine", str(path)))
        shutil.copytree(adapter_path("sort"), path)
        weights = path / "adapter_model.safetensors"
        whole = weights.read_bytes()
        weights.write_bytes(whole[:-100])
        with pytest.raises(AdapterTruncatedError):
            await within(client.engine.load_adapter("mine", str(path)))
        weights.write_bytes(whole)
        await within(client.engine.load_adapter("mine", str(path)))
        assert await client.ask("banana=", "mine") == "aaabnn"
        await within(client.engine.unload_adapter("mine"))
    assert said((await rest(stream))[-1]) == said(undisturbed)


async def test_ten_loads_at_once_are_one_fetch(
    client: Client, copied: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fetched: list[str] = []
    may_go = threading.Event()
    fetch = AdapterSource.fetch

    def counting(source: AdapterSource, path: str, **options: Any) -> Path:
        fetched.append(path)
        may_go.wait(60)
        return fetch(source, path, **options)

    monkeypatch.setattr(AdapterSource, "fetch", counting)
    loads = [asyncio.create_task(client.engine.load_adapter("new", str(copied))) for _ in range(10)]
    await until(lambda: bool(fetched))
    assert await client.ask("banana=", "upper") == "BANANA"  # meanwhile requests go on
    may_go.set()
    results = await within(asyncio.gather(*loads))
    assert fetched == [str(copied)]
    assert len({result.ref.adapter_id for result in results}) == 1
    assert await client.ask("banana=", "new") == "BANANA"
    await within(client.engine.unload_adapter("new"))


async def test_a_slow_fetch_holds_up_nobody_else(client: Client, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when many wait for it: others load, unload and look meanwhile."""
    engine, fetch = client.engine, AdapterSource.fetch
    may_go, is_fetching = threading.Event(), threading.Event()

    def slow(source: AdapterSource, path: str, **options: Any) -> Path:
        if path == str(copied):
            is_fetching.set()
            may_go.wait(60)
        return fetch(source, path, **options)

    monkeypatch.setattr(AdapterSource, "fetch", slow)
    try:
        loads = [asyncio.create_task(engine.load_adapter("slow", str(copied))) for _ in range(40)]
        await until(is_fetching.is_set)
        assert len(await within(engine.list_adapters())) == len(LOADED) + 1
        await within(engine.load_adapter("quick", str(adapter_path("sort"))))
        assert await client.ask("banana=", "quick") == "aaabnn"
        await within(engine.unload_adapter("quick"))
        assert not any(load.done() for load in loads)
    finally:
        may_go.set()
    await within(asyncio.gather(*loads))
    await within(engine.unload_adapter("slow"))


# ---------------------------------------------------------------------------------------------------------- LoRARequest


async def test_a_request_may_bring_its_adapter(client: Client, tmp_path: Path) -> None:
    request = LoRARequest("brought", 7, str(adapter_path("sort")))
    for _ in range(2):
        outputs = await client.outputs("banana=", lora_request=request)
        assert outputs[-1].outputs[0].text == "aaabnn"
        assert outputs[-1].lora_request == request
    assert client.engine.has_adapter("brought")
    with pytest.raises(AdapterConflictError, match="lora_int_id 7 belongs to adapter 'brought'"):
        await client.ask("banana=", lora_request=LoRARequest("other", 7, str(adapter_path("upper"))))
    with pytest.raises(InvalidRequestError, match="base_model_name is 'llama', this engine serves 'base'"):
        await client.ask("banana=", lora_request=LoRARequest("x", 8, str(tmp_path), base_model_name="llama"))
    await within(client.engine.unload_adapter("brought"))


async def test_an_adapter_that_a_request_brings_may_be_refused(client: Client, tmp_path: Path) -> None:
    path = Path(shutil.copytree(adapter_path("upper"), tmp_path / "bad"))
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(LoraplexError, match="use_dora"):
        await client.ask("banana=", lora_request=LoRARequest("bad", 9, str(path)))
    assert not client.engine.has_adapter("bad")


# -------------------------------------------------------------------------------------------------------------- see it


async def test_events_and_memory_of_the_process(client: Client, engine: AsyncEngine) -> None:
    last_id = engine.events.last_id
    await within(engine.evict_adapter("sort"))
    await within(engine.preload_adapter("sort"))
    await within(engine.load_adapter("other", str(adapter_path("double"))))
    await within(engine.unload_adapter("other"))
    await until(lambda: any(each.event.kind is EventKind.DROP for each in engine.events.after(last_id).events))
    told = [(each.event.kind, each.event.adapter_name) for each in engine.events.after(last_id).events]
    assert (EventKind.LOAD, "other") in told
    report = await within(engine.memory_report())
    assert {tier.tier for tier in report.tiers} >= {"device", "host"}
    assert report.chunks_by_owner["adapters"] >= 1
    assert sum(report.chunks_by_owner.values()) == sum(run.num_chunks for run in report.chunks)


async def test_a_profile_of_a_live_engine(client: Client, engine: AsyncEngine) -> None:
    with pytest.raises(InvalidRequestError, match="no profile runs"):
        await engine.generate_lora_performance_report()
    running = client.long("upper")
    await first(running)
    await within(engine.start_lora_profiling(ServiceTargets(3600.0, 3600.0)))
    assert engine.is_profiling
    with pytest.raises(InvalidRequestError, match="runs already"):
        await engine.start_lora_profiling()
    await asyncio.gather(*(client.ask("banana=", model, max_tokens=8, ignore_eos=True) for model in MODELS * 2))
    await within(engine.abort("never"))
    await running.aclose()  # type: ignore[attr-defined]
    report = await within(engine.generate_lora_performance_report())
    assert not engine.is_profiling
    counted = {each.name: (each.num_requests, each.num_finished, each.num_tokens) for each in report.adapters}
    assert counted == dict.fromkeys(MODELS, (2, 2, 16)), "the request from before is passed over"
    assert {each.tier for each in report.adapters if each.name} == {"device"}
    assert (report.requests.share_in_both, report.num_adapters) == (1.0, 3)
    assert sum(report.admitted.values()) == 8
    assert report.num_tokens >= 8 * 8 - 8
    assert sum(report.timeline.num_tokens) == report.num_tokens
    assert report.part_seconds["forward"] > 0
    assert 0 < report.device_share <= 1
    assert bool(report.operator_seconds) == (report.backend == "native")
    assert report.findings
    after = await within(engine.stats())
    assert set(after.step_times.seconds) == {"schedule", "build", "forward", "sample", "wait", "commit"}


async def test_a_profile_tells_versions_of_a_name_apart(client: Client, engine: AsyncEngine, copied: Path) -> None:
    await within(engine.load_adapter("mine", str(adapter_path("reverse")), load_inplace=True))
    await within(engine.start_lora_profiling())
    for model in ("mine", "mine@1", "mine@2"):
        await client.ask("banana=", model)
    report = await within(engine.generate_lora_performance_report())
    found = {each.name: (each.num_requests, each.tier) for each in report.adapters if each.num_requests}
    assert found == {"mine": (2, "device"), "mine@1": (1, "device")}
    assert report.num_adapters == len(LOADED) + 1
    assert sum(report.served_from.values()) == 3


async def test_answers_are_the_same_while_a_profile_runs(client: Client, engine: AsyncEngine) -> None:
    before = [await client.ask(prompt_of(PHRASES[1]), model) for model in MODELS]
    await within(engine.start_lora_profiling())
    during = [await client.ask(prompt_of(PHRASES[1]), model) for model in MODELS]
    await within(engine.generate_lora_performance_report())
    assert before == during == [APPLY[model](PHRASES[1]) for model in MODELS]
    assert [await client.ask(prompt_of(PHRASES[1]), model) for model in MODELS] == before
