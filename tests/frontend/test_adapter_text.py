"""Adapters with a text of their own, offline and in a server's engine: transformers with the adapter's directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from transformers import AutoTokenizer

from loraplex import LLM, LoRARequest, SamplingParams
from loraplex.adapters.registry import LoRARegistry
from loraplex.errors import AdapterValidationError, ConfigError, ModelConfigError
from loraplex.frontend.async_engine import AsyncEngine
from tests.fixtures import TARGET_MODULES, VOCAB_SIZE, ModelZoo
from tests.frontend.processes import demo_config, within

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "def add(<sql> a, b)"}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}<sql>{{ m.content }}<end>{% endfor %}"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SQL, END = VOCAB_SIZE, VOCAB_SIZE + 1


@pytest.fixture(scope="module")
def base(zoo: ModelZoo) -> Path:
    """With rows of the embedding that no token of its own has, as models are padded."""
    return zoo.base("llama", options={"vocab_size": VOCAB_SIZE + 8})


@pytest.fixture(scope="module")
def weights(zoo: ModelZoo, base: Path) -> Path:
    return zoo.adapter(base, LoraConfig(r=4, lora_alpha=8, target_modules=list(TARGET_MODULES)), seed=70)


@pytest.fixture(scope="module")
def plain(zoo: ModelZoo, base: Path) -> Path:
    return zoo.adapter(base, LoraConfig(r=4, lora_alpha=8, target_modules=list(TARGET_MODULES)), seed=71)


@pytest.fixture(scope="module")
def shared(base: Path) -> Iterator[LLM]:
    with LLM(str(base), max_model_len=160) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    for number in shared.list_loras():
        shared.remove_lora(number)
    shared.check_integrity()


def write_text(base: Path, weights: Path, directory: Path, template: str = TEMPLATE) -> Path:
    """The adapter as transformers saves it with its tokenizer."""
    shutil.copytree(weights, directory, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(base)
    assert tokenizer.add_tokens(["<sql>", "<end>"]) == 2
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "max_new_tokens": 3}))
    return directory


@pytest.fixture
def own(base: Path, weights: Path, tmp_path: Path) -> LoRARequest:
    return LoRARequest("own", 1, str(write_text(base, weights, tmp_path / "own")))


def test_prompts_and_chats_are_those_of_transformers(
    zoo: ModelZoo, llm: LLM, base: Path, weights: Path, own: LoRARequest, plain: Path
) -> None:
    """Of the adapter; another one and the base, in the same batch, read the same words as before."""
    theirs = AutoTokenizer.from_pretrained(own.lora_path)
    ids = theirs.apply_chat_template(CHAT, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert SQL in ids
    other = LoRARequest("plain", 2, str(plain))
    outputs = llm.chat([CHAT] * 3, GREEDY, lora_request=[own, other, None])
    assert list(outputs[0].prompt_token_ids) == ids
    assert tuple(outputs[0].outputs[0].token_ids) == zoo.oracle(base, weights).greedy(ids, 6).output_token_ids
    of_base = AutoTokenizer.from_pretrained(base).apply_chat_template(
        CHAT, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    for output in outputs[1:]:
        assert list(output.prompt_token_ids) == of_base
    text = "a<sql>b <end>"
    completed = llm.generate([text] * 2, GREEDY, lora_request=[own, None])
    assert list(completed[0].prompt_token_ids) == theirs(text)["input_ids"]
    assert SQL not in completed[1].prompt_token_ids
    own_tokenizer = llm.get_tokenizer(own)
    assert own_tokenizer is not None
    assert own_tokenizer is not llm.get_tokenizer()
    assert own_tokenizer.encode(text) == theirs(text)["input_ids"]


def test_the_text_of_an_answer_has_added_tokens(llm: LLM, own: LoRARequest) -> None:
    forced = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logit_bias={SQL: 100}, logprobs=1)
    mine, bases = llm.generate(["x = "] * 2, forced, lora_request=[own, None])
    assert mine.outputs[0].token_ids == bases.outputs[0].token_ids == (SQL, SQL)
    assert mine.outputs[0].text == "<sql><sql>"
    assert bases.outputs[0].text == ""
    assert mine.outputs[0].logprobs is not None
    assert mine.outputs[0].logprobs[0][SQL].decoded_token == "<sql>"
    stopped = SamplingParams(temperature=0, max_tokens=9, logit_bias={SQL: 100}, stop=["ql><s"])
    (output,) = llm.generate("x = ", stopped, lora_request=own)
    assert (output.outputs[0].finish_reason, output.outputs[0].text) == ("stop", "<s")


def test_sampling_defaults_are_those_of_the_adapter(llm: LLM, own: LoRARequest) -> None:
    outputs = llm.generate(["x = "] * 3, None, lora_request=[own, own, None])
    assert [len(each.outputs[0].token_ids) for each in outputs] == [3, 3, 16]
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    (told,) = llm.generate("x = ", SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), lora_request=own)
    assert len(told.outputs[0].token_ids) == 5


def test_a_reload_and_a_rollback_take_their_template_with_them(
    llm: LLM, base: Path, weights: Path, own: LoRARequest
) -> None:
    """And the files may go: what was loaded is served."""

    def prompt(request: LoRARequest) -> str | None:
        return llm.chat(CHAT, GREEDY, lora_request=request)[0].prompt

    first = prompt(own)
    assert first is not None
    assert first.startswith("<s><sql>")
    llm.add_lora(own)
    write_text(base, weights, Path(own.lora_path), "second {{ messages[0].content }}")
    assert prompt(own) == first
    llm.add_lora(LoRARequest("own", 1, own.lora_path, load_inplace=True))
    assert prompt(own) == "second def add(<sql> a, b)"
    llm.rollback_lora(1)
    assert prompt(own) == first
    shutil.rmtree(own.lora_path)
    assert prompt(own) == first


def test_processes_of_templates_end_with_the_engine(base: Path, own: LoRARequest) -> None:
    with LLM(str(base), max_model_len=160) as llm:
        llm.chat(CHAT, GREEDY, lora_request=own)
        processes = [each._process for each in llm._front.texts._templates._processes._all if each._process is not None]
        assert [each.poll() for each in processes] == [None]
    assert processes[0].returncode is not None


def test_a_new_template_alone_makes_a_new_version(llm: LLM, base: Path, weights: Path, own: LoRARequest) -> None:
    """Of a reload that keeps what is equal: the weights are the same, and share memory."""
    registry = llm._front.registry_or_refuse()
    before = registry.load("own", own.lora_path).ref
    again = registry.load("own", own.lora_path, load_inplace=True, keeps_equal=True).ref
    assert again.adapter_version == before.adapter_version
    write_text(base, weights, Path(own.lora_path), "second")
    after = registry.load("own", own.lora_path, load_inplace=True, keeps_equal=True).ref
    assert after.adapter_version == before.adapter_version + 1
    assert after.adapter_digest == before.adapter_digest
    registry.unload("own")


def test_another_vocabulary_is_refused_and_the_base_serves_on(llm: LLM, own: LoRARequest) -> None:
    path = Path(own.lora_path) / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(content))
    with pytest.raises(AdapterValidationError, match=r"token '[ab]' of its tokenizer has id \d+, in the base's"):
        llm.add_lora(own)
    assert llm.list_loras() == set()
    assert llm.generate("a b", GREEDY)[0].outputs[0].token_ids


def test_an_operator_turns_it_off(base: Path, own: LoRARequest) -> None:
    with LLM(str(base), max_model_len=160, adapter_text=False) as llm:
        mine, bases = llm.chat([CHAT] * 2, None, lora_request=[own, None])
        assert mine.prompt == bases.prompt
        assert len(mine.outputs[0].token_ids) == 16
        assert llm.adapters()[0].ref.text is None


def test_the_base_has_the_same_rule_for_its_defaults(base: Path, own: LoRARequest, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(base, model)
    (model / "generation_config.json").write_text(json.dumps({"temperature": 0, "max_new_tokens": 4}))
    with LLM(str(model), max_model_len=160) as llm:
        outputs = llm.generate(["x = "] * 2, None, lora_request=[own, None])
        assert [len(each.outputs[0].token_ids) for each in outputs] == [3, 4]
    with LLM(str(model), max_model_len=160, generation_config="vllm") as llm:
        outputs = llm.generate(["x = "] * 2, SamplingParams(), lora_request=[own, None])
        assert llm._front.text_of(None).defaults == {}
        assert llm.adapters()[0].ref.text is not None
        assert llm.adapters()[0].ref.text.brings == ("tokenizer", "chat_template")
    (model / "generation_config.json").write_text(json.dumps({"temperature": -4}))
    with pytest.raises(ModelConfigError, match=r"temperature must be in .* start with --generation-config"):
        LLM(str(model), max_model_len=160)
    with pytest.raises(ConfigError, match="generation_config must be auto or vllm"):
        LLM(str(model), generation_config="none")


async def test_a_server_that_starts_again_has_the_text_without_the_files(
    base: Path, weights: Path, tmp_path: Path
) -> None:
    """Of the current version and of the kept one."""
    directory, state = tmp_path / "own", tmp_path / "state"
    config = demo_config(model=str(base), max_model_len=160)
    write_text(base, weights, directory, "first {{ messages[0].content }}")
    engine = await within(AsyncEngine.start(config, state_dir=state))
    try:
        await engine.load_adapter("own", str(directory))
        write_text(base, weights, directory)
        await engine.load_adapter("own", str(directory), load_inplace=True)
    finally:
        await within(engine.shutdown())
    assert len(list((state / "texts").iterdir())) == 2
    shutil.rmtree(directory)
    engine = await within(AsyncEngine.start(config, state_dir=state))
    try:
        assert engine.registry is not None
        rendered = []
        for name in ("own", "own@1"):
            tokenizer = engine.text_of(engine.registry.resolve(name)).tokenizer
            assert tokenizer is not None
            rendered.append(tokenizer.apply_chat_template(CHAT))
        assert rendered == ["<s><sql>def add(<sql> a, b)<end>", "first def add(<sql> a, b)"]
        info = await engine.on_registry(LoRARegistry.describe, "own")
        assert info.ref.text is not None
        assert info.ref.text.brings == ("tokenizer", "chat_template", "generation_config")
        await engine.on_registry(LoRARegistry.unload, "own")
    finally:
        await within(engine.shutdown())
    assert list((state / "texts").iterdir()) == []
