"""The double is worth something only while it has the surface of the real engine and behaves as that does."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import AsyncGenerator

import pytest

from loraplex.core import LoRARequest, RequestOutput, SamplingParams
from loraplex.errors import (
    AdapterNotFoundError,
    EngineDeadError,
    EngineShutdownError,
    InvalidRequestError,
    LoraDisabledError,
    RequestAbortedError,
)
from loraplex.frontend.async_engine import AsyncEngine, EngineHealth, ModelInfo
from loraplex.server.engine_surface import EngineSurface, TokenizerSurface
from loraplex.testing import FakeAsyncEngine, FakeHealth, FakeModelInfo, FakeTokenizer
from loraplex.text.tokenizer import Tokenizer


def members(protocol: type) -> list[str]:
    return [name for name in vars(protocol) if not name.startswith("_")]


def parameters(owner: type, name: str) -> list[str]:
    return list(inspect.signature(getattr(owner, name)).parameters)


VERBS = [name for name in members(EngineSurface) if callable(vars(EngineSurface)[name])]


@pytest.mark.parametrize("name", VERBS)
def test_verbs_have_the_real_ones_parameters(name: str) -> None:
    fake, real = parameters(FakeAsyncEngine, name), parameters(AsyncEngine, name)
    assert fake == real
    assert set(parameters(EngineSurface, name)) <= set(real)


METHODS = [name for name in members(TokenizerSurface) if callable(getattr(TokenizerSurface, name))]


@pytest.mark.parametrize("name", [name for name in METHODS if name.islower()])
def test_the_tokenizer_has_the_real_ones_parameters(name: str) -> None:
    wanted = parameters(TokenizerSurface, name)
    assert parameters(FakeTokenizer, name)[: len(wanted)] == wanted
    real = parameters(Tokenizer, name)
    assert [parameter for parameter in real if parameter in wanted] == wanted


def test_records_have_the_real_ones_fields() -> None:
    for fake, real in ((FakeModelInfo, ModelInfo), (FakeHealth, EngineHealth)):
        assert list(fake.__dataclass_fields__) == list(real.__dataclass_fields__)


# ----------------------------------------------------------------------------------------------------------- behaviour


async def last_of(stream: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    return [output async for output in stream][-1]


async def text_of(engine: FakeAsyncEngine, prompt: str, model: str | None = None, **params: object) -> str:
    sampling = SamplingParams(**{"max_tokens": None, **params})  # type: ignore[arg-type]
    return (await last_of(engine.generate(prompt, sampling, "r", model=model))).outputs[0].text


async def test_it_names_the_adapter_and_repeats_the_prompt() -> None:
    engine = FakeAsyncEngine({"sql": "/sql"})
    assert await text_of(engine, "hi") == "[base] hi"
    assert await text_of(engine, "hi", "sql") == "[sql] hi"
    assert await text_of(engine, "hi", max_tokens=3) == "[ba"
    assert await text_of(engine, "hi", ignore_eos=True, max_tokens=12) == "[base] hi[ba"
    assert await text_of(engine, "hi", min_tokens=11) == "[base] hi[b"
    assert await text_of(engine, "hi", stop=("e]",)) == "[bas"


async def test_outputs_are_cumulative_and_never_take_back() -> None:
    engine = FakeAsyncEngine()
    outputs = [each async for each in engine.generate("é x", SamplingParams(max_tokens=None, stop=("x!",)), "r")]
    texts = [output.outputs[0].text for output in outputs]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert texts[-1] == "[base] é x"
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert not any("\ufffd" in text for text in texts)


async def test_hold_and_resume() -> None:
    engine = FakeAsyncEngine()
    engine.hold(after_tokens=2)
    task = asyncio.ensure_future(text_of(engine, "hi"))
    while engine.num_running == 0:
        await asyncio.sleep(0)
    engine.resume()
    assert await task == "[base] hi"
    assert engine.aborted == []


async def test_abort_and_leaving_early() -> None:
    engine = FakeAsyncEngine({"sql": "/sql"})
    engine.hold(after_tokens=1)
    stream = engine.generate("hi", SamplingParams(), "a", model="sql")
    await anext(stream)
    await engine.abort("a")
    with pytest.raises(RequestAbortedError):
        await anext(stream)
    stream = engine.generate("hi", SamplingParams(), "b", model="sql")
    await anext(stream)
    await stream.aclose()
    await engine.abort("no such request")
    assert engine.aborted == ["a", "b"]
    assert engine.num_running == 0
    assert engine.registry is not None
    assert engine.registry.num_references == 0


async def test_failures() -> None:
    engine = FakeAsyncEngine({"sql": "/sql"})
    engine.fail_next(EngineDeadError("now"))
    with pytest.raises(EngineDeadError, match="now"):
        await text_of(engine, "hi")
    assert await text_of(engine, "hi") == "[base] hi"
    with pytest.raises(AdapterNotFoundError):
        await text_of(engine, "hi", "nope")
    with pytest.raises(LoraDisabledError):
        await text_of(FakeAsyncEngine(enable_lora=False), "hi", "sql")
    engine.die("gone")
    with pytest.raises(EngineDeadError, match="gone"):
        await text_of(engine, "hi")
    assert engine.health() == FakeHealth(False, "gone")
    await engine.shutdown()
    with pytest.raises(EngineShutdownError):
        await text_of(engine, "hi")
    assert engine.aborted == []


async def test_ids_must_be_unique() -> None:
    engine = FakeAsyncEngine()
    engine.hold(after_tokens=1)
    stream = engine.generate("hi", SamplingParams(), "a")
    await anext(stream)
    with pytest.raises(InvalidRequestError, match="in use"):
        await anext(engine.generate("hi", SamplingParams(), "a"))
    await stream.aclose()


async def test_a_request_may_bring_its_adapter() -> None:
    engine = FakeAsyncEngine()
    stream = engine.generate("hi", SamplingParams(max_tokens=None), "r", lora_request=LoRARequest("new", 4, "/new"))
    assert (await last_of(stream)).outputs[0].text == "[new] hi"
    assert engine.has_adapter("new")
    assert [info.ref.lora_int_id for info in await engine.list_adapters()] == [4]
