"""Engine processes in tests: starting, watching and asking them, always within generous bounds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from loraplex.config import EngineConfig, LoRAConfig
from loraplex.core import AdapterChoice, RequestOutput
from loraplex.demo.tasks import assets_path
from loraplex.frontend import messages as msg
from loraplex.frontend.async_engine import AsyncEngine
from loraplex.sampling_params import NO_CLAIM, Claim, SamplingParams
from tests.frontend.holding_process import HOLD_ID, LET_GO_ID

PATIENCE_S = 120.0
BASE = str(assets_path() / "base")
MAX_MODEL_LEN = 4096


def stretched_base(path: Path) -> str:
    """The demo's base model with room for MAX_MODEL_LEN tokens: a stream that lasts while a test acts on it."""
    shutil.copytree(BASE, path)
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": MAX_MODEL_LEN}))
    return str(path)


def demo_config(lora: LoRAConfig | None = None, *, is_lora_on: bool = True, **settings: Any) -> EngineConfig:
    """The demo's base model in little memory."""
    lora = lora or LoRAConfig(adapter_memory_bytes=1 << 26, host_memory_bytes=1 << 26)
    return EngineConfig(
        **{"model": BASE, "num_threads": 1, "kv_cache_memory_bytes": 1 << 26, **settings},
        lora=lora if is_lora_on else None,
    )


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """Where `tempfile` makes its folders meanwhile."""
    before, tempfile.tempdir = tempfile.tempdir, str(path)
    try:
        yield path
    finally:
        tempfile.tempdir = before


class Client:
    """Asks an engine; every answer is waited for at most PATIENCE_S. Greedy unless the parameters say otherwise."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self._num_requests = 0

    def stream(
        self,
        prompt: Any,
        model: AdapterChoice = None,
        *,
        request_id: str | None = None,
        lora_request: Any = None,
        claim: Claim = NO_CLAIM,
        **params: Any,
    ) -> AsyncIterator[RequestOutput]:
        self._num_requests += 1
        chosen = SamplingParams(**{"temperature": 0, "max_tokens": 64, **params})
        request_id = request_id or f"r{self._num_requests}"
        return self.engine.generate(prompt, chosen, request_id, model=model, lora_request=lora_request, claim=claim)

    async def outputs(self, prompt: Any, model: AdapterChoice = None, **options: Any) -> list[RequestOutput]:
        async with asyncio.timeout(PATIENCE_S):
            return [output async for output in self.stream(prompt, model, **options)]

    async def ask(self, prompt: Any, model: str | None = None, **options: Any) -> str:
        return (await self.outputs(prompt, model, **options))[-1].outputs[0].text

    def long(self, model: AdapterChoice = None, **options: Any) -> AsyncIterator[RequestOutput]:
        """A stream that is far from its end when its first outputs come; `holding` says when it may end."""
        return self.stream("banana=", model, **{"max_tokens": None, "ignore_eos": True, **options})

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """In this block no `long` stream of a `holding_process` ends: its request has first tokens and waits for the
        rest."""
        self.engine._engine.send(msg.AbortRequests((HOLD_ID,)))
        try:
            yield
        finally:
            self.engine._engine.send(msg.AbortRequests((LET_GO_ID,)))


async def first(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return await within(anext(stream))


async def rest(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    async with asyncio.timeout(PATIENCE_S):
        return [output async for output in stream]


async def within(work: Awaitable[Any]) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        return await work
