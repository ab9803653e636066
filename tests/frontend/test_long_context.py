"""A server of an adapter with a longer context: its length, its cards, and what a restart keeps of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from peft import LoraConfig

from loraplex.config import LoRAConfig
from loraplex.frontend.async_engine import AsyncEngine
from loraplex.server import ServerConfig, create_app
from tests.engine.test_long_context import POSITIONS, SHORT, stretched, with_fields
from tests.fixtures import GreedyCase, ModelZoo
from tests.frontend.processes import demo_config, within
from tests.server.conftest import client_of

NUM_TOKENS = 16
LENGTH = 150


@pytest.fixture(scope="module")
def base(zoo: ModelZoo) -> Path:
    return zoo.base("llama", options=SHORT)


@pytest.fixture(scope="module")
def written(zoo: ModelZoo, base: Path) -> Path:
    return zoo.adapter(base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]), seed=90)


@pytest.fixture(scope="module")
def case(zoo: ModelZoo, written: Path) -> GreedyCase:
    return zoo.fit_case(zoo.base("llama", options=stretched(4.0)), written, length=LENGTH, num_tokens=NUM_TOKENS)


async def started(base: Path, state: Path, factors: tuple[float, ...] = (4.0,)) -> AsyncEngine:
    lora = LoRAConfig(adapter_memory_bytes=1 << 26, host_memory_bytes=1 << 26, long_lora_scaling_factors=factors)
    config = demo_config(lora, model=str(base))
    return await within(AsyncEngine.start(config, served_model_name="base", state_dir=state))


def body_of(model: str, length: int, **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": [5] * length, "temperature": 0, "ignore_eos": True, **fields}


async def test_a_server_and_its_next_life(base: Path, written: Path, case: GreedyCase, tmp_path: Path) -> None:
    """The current version, a clone of it, and the one before it, which a rollback brings back."""
    path, state = with_fields(written, tmp_path / "long", {"context_length": 200}), tmp_path / "state"
    engine = await started(base, state)
    try:
        async with client_of(create_app(engine, ServerConfig())) as client:
            await load(client, written)
            await load(client, path, load_inplace=True)
            assert (await client.post("/v1/adapters/sql/clone", json={"name": "copy"})).status_code == 200
            await check(engine, client, case)
    finally:
        await within(engine.shutdown())
    shutil.rmtree(path)
    with_fields(written, path, {"context_length": 200})
    engine = await started(base, state)
    try:
        async with client_of(create_app(engine, ServerConfig())) as client:
            await check(engine, client, case)
            assert (await client.put("/v1/adapters/sql", json={"version": 1})).status_code == 200
            card = (await client.get("/v1/adapters/sql")).json()
            assert (card["max_model_len"], card["rope_factor"]) == (None, None)
            assert (await client.post("/v1/completions", json=body_of("sql", 70, max_tokens=1))).status_code == 400
    finally:
        await within(engine.shutdown())
    engine = await started(base, state, ())
    try:
        async with client_of(create_app(engine, ServerConfig())) as client:
            answer = await client.post("/v1/completions", json=body_of("copy", 10, max_tokens=1))
            assert answer.status_code == 400
            assert "stretches the base's positions by 4, which long_lora_scaling_factors does not allow" in answer.text
            assert (await client.post("/v1/completions", json=body_of("sql", 10, max_tokens=1))).status_code == 200
    finally:
        await within(engine.shutdown())


async def load(client: httpx.AsyncClient, path: Path, **fields: bool) -> None:
    answer = await client.post("/v1/adapters", json={"name": "sql", "path": str(path), **fields})
    assert answer.status_code in (200, 201), answer.text


async def check(engine: AsyncEngine, client: httpx.AsyncClient, case: GreedyCase) -> None:
    cards = {card["id"]: card["max_model_len"] for card in (await client.get("/v1/models")).json()["data"]}
    assert cards == {"base": POSITIONS, "sql": 200, "copy": 200}
    prompt = {"prompt": list(case.prompt_token_ids)}
    texts = []
    for name in ("sql", "copy"):
        card = (await client.get(f"/v1/adapters/{name}")).json()
        assert (card["max_model_len"], card["rope_factor"]) == (200, 4.0)
        answer = await client.post("/v1/completions", json=body_of(name, 1, max_tokens=NUM_TOKENS, **prompt))
        assert answer.status_code == 200, answer.text
        texts.append(answer.json()["choices"][0]["text"])
        full = await client.post("/v1/completions", json=body_of(name, 190, max_tokens=10))
        assert full.json()["usage"]["completion_tokens"] == 10
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    assert texts == [tokenizer.decode(list(case.output_token_ids))] * 2
    for name, length, limit in (
        ("sql", 200, 200),
        ("copy", 200, 200),
        ("base", 64, POSITIONS),
        ("sql@1", 64, POSITIONS),
    ):
        answer = await client.post("/v1/completions", json=body_of(name, length, max_tokens=1))
        error = json.loads(answer.text)["error"]
        assert error["code"] == "context_length_exceeded", name
        assert f"maximum context length is {limit} tokens" in error["message"]
    told = (await client.post("/tokenize", json={"model": "sql", "prompt": "one two"})).json()
    assert told["max_model_len"] == 200
