"""The fixtures are what parity tests need: fit oracles for every family and PEFT field, and adapters that matter."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.fixtures import ADAPTER_OPTIONS, FAMILIES, MIN_DISTINCT, MIN_GAP, NUM_TOKENS, VOCAB_SIZE, ModelZoo


@pytest.mark.parametrize("family", FAMILIES)
def test_the_base_has_fit_cases(zoo: ModelZoo, family: str) -> None:
    cases = zoo.fit_cases(zoo.base(family), count=3, length=9)
    assert len({case.prompt_token_ids for case in cases}) == 3
    for case in cases:
        assert len(case.prompt_token_ids) == 9
        assert len(case.output_token_ids) == NUM_TOKENS
        assert case.num_distinct >= MIN_DISTINCT
        assert case.min_gap >= MIN_GAP
    assert zoo.fit_cases(zoo.base(family), count=1, length=9) == cases[:1]


@pytest.mark.parametrize("name", ADAPTER_OPTIONS)
def test_every_adapter_has_fit_cases_and_changes_the_answer(zoo: ModelZoo, name: str) -> None:
    from peft import LoraConfig

    base = zoo.base("qwen2")
    config = LoraConfig(**ADAPTER_OPTIONS[name], task_type="CAUSAL_LM")
    adapter = zoo.adapter(base, config)
    assert zoo.adapter(base, config) == adapter
    case = zoo.fit_case(base, adapter)
    assert zoo.oracle(base).greedy(case.prompt_token_ids).output_token_ids != case.output_token_ids
    for key, tensor in load_file(adapter / "adapter_model.safetensors").items():
        assert tensor.abs().min() > 0, key


def test_the_oracle_is_the_same_one_at_a_time_and_in_a_batch(zoo: ModelZoo) -> None:
    base = zoo.base("mistral")
    for case in zoo.fit_cases(base, count=2):
        assert zoo.oracle(base).greedy(case.prompt_token_ids).output_token_ids == case.output_token_ids
        tokens = [*case.prompt_token_ids, *case.output_token_ids]
        greedy = zoo.oracle(base).logits(tokens).argmax(-1)[len(case.prompt_token_ids) - 1 : -1]
        assert tuple(greedy.tolist()) == case.output_token_ids


def test_options_make_another_base(zoo: ModelZoo) -> None:
    assert zoo.base("llama") == zoo.base("llama", options={})
    other = zoo.base("llama", options={"tie_word_embeddings": False}, dtype="bfloat16", seed=8)
    assert json.loads((other / "config.json").read_text())["tie_word_embeddings"] is False
    tensors = load_file(other / "model.safetensors")
    assert tensors["lm_head.weight"].dtype == torch.bfloat16


def test_the_tokenizer_has_as_many_tokens_as_the_model(zoo: ModelZoo) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(zoo.base("llama"))
    assert len(tokenizer) == VOCAB_SIZE
    text = "def step(self): return 1  # ü 漢"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|user|>\nhi\n<|assistant|>\n"
