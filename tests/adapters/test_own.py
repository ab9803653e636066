"""What an adapter has of its own, read as peft reads it: rows of tokens, whole weights, LoRA of embedding and head."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from loraplex.adapters.weights import LoRAModel
from tests.adapters.peft_oracle import all_targets_of, load
from tests.fixtures import OWN_OPTIONS, VOCAB_SIZE, ModelZoo, Oracle

OPTIONS = {"hidden_size": 32, "intermediate_size": 48}
PROMPT = [5, 4005, 7995, 4000, 37, 8, 8000, 1203]


@torch.no_grad()
def applied(model: Any, adapter: LoRAModel) -> Any:
    """The base model with what the adapter says put into its weights: LoRALayerWeights, spelled out."""
    model = copy.deepcopy(model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    if adapter.vocab_size is not None:
        model.config.tie_word_embeddings = False
        model.resize_token_embeddings(adapter.vocab_size, mean_resizing=False)
        for end in (model.get_input_embeddings(), model.get_output_embeddings()):
            end.weight[VOCAB_SIZE:].fill_(float("nan"))
    for name, layer in adapter.layers.items():
        module = model.get_submodule(name)
        if layer.weight is not None and layer.row_ids is not None:
            module.weight[layer.row_ids] = layer.weight.float()
        elif layer.weight is not None:
            module.weight.copy_(layer.weight.float())
        if layer.lora_a is not None and layer.lora_b is not None:
            delta = layer.scaling * layer.lora_b.float() @ layer.lora_a.float()
            module.weight += delta.T if name.endswith("embed_tokens") else delta
        if layer.bias is not None:
            module.bias.copy_(layer.bias.float())
        if layer.gain is not None:
            module.weight *= layer.gain[:, None]
            if module.bias is not None:
                module.bias *= layer.gain
    return model


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("name", OWN_OPTIONS)
def test_what_is_read_computes_what_peft_computes(zoo: ModelZoo, name: str, family: str, is_tied: bool) -> None:
    base = zoo.base(family, options={**OPTIONS, "tie_word_embeddings": is_tied})
    path = zoo.own_adapter(base, name)
    model: Any = zoo.oracle(base).model
    adapter = load(path, all_targets_of(model))
    expected = zoo.oracle(base, path).logits(PROMPT)
    assert expected.shape[1] == (adapter.vocab_size or model.config.vocab_size)
    found = Oracle(applied(model, adapter)).logits(PROMPT)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected[:, :8000], zoo.oracle(base).logits(PROMPT)[:, :8000], atol=0.1)
