"""One adapter merged into the base weights answers as it does unmerged, and nothing is served beside it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import httpx
import pytest
from peft import LoraConfig

from loraplex import LLM, LoRARequest, SamplingParams
from loraplex.config import EngineConfig
from loraplex.errors import ConfigError, LoraDisabledError
from loraplex.frontend.async_engine import AsyncEngine
from loraplex.models import packed_cache
from loraplex.models.packed_cache import wait_until_saved
from loraplex.server import ServerConfig, create_app
from tests.fixtures import TARGET_MODULES, ModelZoo
from tests.server.conftest import client_of

PROMPTS = ["def step(self, plan):", "one two three", "import"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def base(zoo: ModelZoo) -> Path:
    return zoo.base("llama")


def adapter(zoo: ModelZoo, base: Path, seed: int, **fields: object) -> str:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(TARGET_MODULES), task_type="CAUSAL_LM", **fields)
    return str(zoo.adapter(base, config, seed=seed))


def tokens_of(llm: LLM, lora_request: LoRARequest | None = None) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, lora_request=lora_request)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def unmerged(zoo: ModelZoo, base: Path) -> dict[str, list[list[int]]]:
    with LLM(str(base), max_model_len=64) as llm:
        paths = {"lora": adapter(zoo, base, 60), "dora": adapter(zoo, base, 61, use_dora=True)}
        found = {name: tokens_of(llm, LoRARequest(name, 1 + at, paths[name])) for at, name in enumerate(paths)}
        return {**found, "base": tokens_of(llm)}


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_tokens_are_those_of_the_adapter_unmerged(
    zoo: ModelZoo, base: Path, unmerged: dict[str, list[list[int]]], kind: str
) -> None:
    path = adapter(zoo, base, 60) if kind == "lora" else adapter(zoo, base, 61, use_dora=True)
    with LLM(str(base), enable_lora=False, merge_adapter=path, max_model_len=64) as llm:
        assert tokens_of(llm) == unmerged[kind] != unmerged["base"]
        with pytest.raises(LoraDisabledError, match="merge_adapter"):
            tokens_of(llm, LoRARequest("other", 1, path))


def test_packed_weights_are_kept_by_what_is_merged_into_them(
    zoo: ModelZoo, base: Path, unmerged: dict[str, list[list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_cache, "MIN_BYTES", 0)
    paths = {"lora": adapter(zoo, base, 60), "dora": adapter(zoo, base, 61, use_dora=True)}
    for kind in ("base", "lora", "lora", "dora", "base", "dora", "lora"):
        merge = {} if kind == "base" else {"merge_adapter": paths[kind]}
        with LLM(str(base), enable_lora=False, packed_cache_dir=str(tmp_path), max_model_len=64, **merge) as llm:
            assert tokens_of(llm) == unmerged[kind], kind
        wait_until_saved()
        files = [path.name for path in tmp_path.glob("*.safetensors")]
        assert len([name for name in files if "-merged-" in name]) == (kind != "base" or len(files) == 2), files
        assert len(files) <= 2, "the base's, and that of one merge"


def test_its_template_and_defaults_are_the_servers(zoo: ModelZoo, base: Path, tmp_path: Path) -> None:
    """As of its requests unmerged."""
    path = Path(shutil.copytree(adapter(zoo, base, 60), tmp_path / "sql"))
    (path / "chat_template.jinja").write_text("{% for message in messages %}<{{ message['content'] }}>{% endfor %}")
    (path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.5, "top_k": 3}')
    messages = [{"role": "user", "content": "two"}]
    with LLM(str(base), max_model_len=64) as llm:
        request = LoRARequest("sql", 1, str(path))
        (expected,) = llm.chat(messages, GREEDY, lora_request=request)
        wanted = llm.get_tokenizer(request)
        assert wanted is not None
    with LLM(str(base), enable_lora=False, merge_adapter=str(path), max_model_len=64) as llm:
        (found,) = llm.chat(messages, GREEDY)
        assert found.prompt_token_ids == expected.prompt_token_ids
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        assert llm.tokenizer is not None
        assert llm.tokenizer.chat_templates == wanted.chat_templates
        assert llm._front.text_of(None).defaults == {"temperature": 0.5, "top_k": 3}


def test_settings_that_exclude_each_other(zoo: ModelZoo, base: Path) -> None:
    path = adapter(zoo, base, 60)
    with pytest.raises(ConfigError, match="enable_lora=False"):
        EngineConfig(model=str(base), merge_adapter=path)
    with pytest.raises(ConfigError, match="load_format dummy"):
        EngineConfig(model=str(base), lora=None, merge_adapter=path, load_format="dummy")
    with pytest.raises(ConfigError, match="merge_adapter is empty"):
        EngineConfig(model=str(base), lora=None, merge_adapter="")


async def test_a_server_answers_for_the_adapter_alone(
    zoo: ModelZoo, base: Path, unmerged: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(adapter(zoo, base, 60), tmp_path / "sql"))
    config = EngineConfig(model=str(base), lora=None, merge_adapter=str(path), max_model_len=64)
    engine = await AsyncEngine.start(config, served_model_name="sql")
    try:
        app = create_app(engine, ServerConfig(served_model_names=("sql",), merged_into=("base",)))
        async with client_of(app) as client:
            body = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 24, "ignore_eos": True}
            answer = await client.post("/v1/completions", json={**body, "model": "sql", "logprobs": 0})
            assert answer.status_code == 200, answer.text
            with_ids = [output async for output in engine.generate(PROMPTS[0], GREEDY, "r")][-1]
            assert list(with_ids.outputs[0].token_ids) == unmerged["lora"][0]
            assert answer.json()["choices"][0]["text"] == with_ids.outputs[0].text
            await check_refusals(client, body)
        assert engine.config.merge_adapter_digest is not None, "a process that starts again merges this content alone"
    finally:
        await asyncio.wait_for(engine.shutdown(), 30)


async def check_refusals(client: httpx.AsyncClient, body: dict[str, object]) -> None:
    names = [card["id"] for card in (await client.get("/v1/models")).json()["data"]]
    assert names == ["sql"]
    for model, what in (("base", "is the base model"), ("chat", "is not served"), ("sql:chat", "is not served")):
        answer = await client.post("/v1/completions", json={**body, "model": model})
        assert answer.status_code == 404
        assert what in answer.text
        assert "--merge-adapter" in answer.text
    answer = await client.post("/v1/completions", json={**body, "model": "sql", "lora_path": "chat"})
    assert answer.status_code == 404
    for path, load in (("/v1/adapters", {"name": "x", "path": "/x"}), ("/v1/adapters/sql/clone", {"name": "x"})):
        answer = await client.post(path, json=load)
        assert answer.status_code == 400
        assert "--merge-adapter" in answer.text
