"""An adapter that does not fit its configuration or the base model is refused, with every reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.adapters.inspect import inspect_adapter
from loraplex.config import LoRAConfig
from loraplex.errors import (
    AdapterBaseMismatchError,
    AdapterError,
)
from tests.adapters.peft_oracle import (
    PeftAdapter,
    edit_config,
    load,
    make_adapter,
    read_tensors,
    refused,
    write_tensors,
)

# ------------------------------------------------------------------------------------------------------------- refusals

Q = "base_model.model.model.layers.0.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]


def drop(*names: str) -> Callable[[Tensors], None]:
    return lambda tensors: [tensors.pop(name) for name in names] and None


def put(name: str, value: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop(f"{Q}.lora_B.weight"), ["layers.0.self_attn.q_proj: the file has no lora_B.weight"]),
        (drop(f"{Q}.lora_A.weight"), ["layers.0.self_attn.q_proj: the file has no lora_A.weight"]),
        (drop(f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"), ["layers.0.self_attn.q_proj", "no tensors for it"]),
        (put(f"{Q}.lora_A.weight", torch.ones(5, 32)), ["[5, 32]", "[4, 32]"]),
        (put(f"{Q}.lora_A.weight", torch.ones(32, 4)), ["[32, 4]", "[4, 32]"]),
        (put(f"{Q}.lora_A.weight", torch.ones(4)), ["[4]", "[4, 32]"]),
        (put(f"{Q}.lora_A.weight", torch.ones(0)), ["[0]", "gathered"]),
        (put(f"{Q}.lora_B.weight", torch.ones(32, 0)), ["[32, 0]", "gathered"]),
        (put(f"{Q}.lora_A.weight", torch.full((4, 32), float("nan"))), [f"{Q}.lora_A.weight", "NaN"]),
        (put(f"{Q}.lora_B.weight", torch.full((32, 4), float("inf"))), [f"{Q}.lora_B.weight", "Inf"]),
        (put(f"{Q}.lora_B.weight", torch.full((32, 4), -float("inf")).half()), [f"{Q}.lora_B.weight", "Inf"]),
        (put(f"{Q}.lora_B.weight", torch.full((32, 4), float("nan")).bfloat16()), [f"{Q}.lora_B.weight", "NaN"]),
        (put(f"{Q}.lora_A.weight", torch.ones(4, 32).double()), ["dtype F64", "F32, F16, BF16"]),
        (put(f"{Q}.lora_A.weight", torch.ones(4, 32).to(torch.float8_e4m3fn)), ["float8 dtype F8_E4M3"]),
        (put(f"{Q}.lora_A.weight", torch.ones(4, 32, dtype=torch.int8)), ["dtype I8"]),
        (put(Q.replace("q_proj", "k_proj.lora_A.weight"), torch.ones(4, 32)), ["k_proj", "does not name"]),
        (put(Q.replace("q_proj", "x_proj.lora_A.weight"), torch.ones(4, 32)), ["x_proj", "no linear"]),
        (
            put("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(4, 64)),
            ["embed_tokens", "embeddings"],
        ),
        (
            put("base_model.model.model.embed_tokens.weight", torch.ones(64, 32)),
            ["embed_tokens", "save_embedding_layers"],
        ),
        (put("base_model.model.lm_head.lora_A.weight", torch.ones(4, 32)), ["lm_head", "not supported yet"]),
        (put("base_model.model.lm_head.modules_to_save.weight", torch.ones(64, 32)), ["modules_to_save"]),
        (put(f"{Q}.lora_magnitude_vector", torch.ones(32)), ["DoRA", "use_dora is not set"]),
        (put(f"{Q}.lora_velora_embed", torch.ones(32)), ["VeLoRA"]),
        (put(f"{Q}.lora_A.other.weight", torch.ones(4, 32)), ["lora_A.other.weight", "no part of a LoRA"]),
        (put(f"{Q}.lora_B.bias", torch.ones(32)), ["lora_B.bias", "lora_bias is not set"]),
        (put(f"{Q}.lora_A.bias", torch.ones(4)), ["lora_A.bias", "no part of a LoRA"]),
        (put(f"{Q}.base_layer.bias", torch.ones(32)), ["bias is 'none'"]),
        (put(f"{Q}.weight", torch.ones(32, 32)), ["no part of a LoRA"]),
        (put(f"{Q}.lora_A.default.weight", torch.ones(4, 32)), ["the same part"]),
        (put(Q.removeprefix("base_model.model.") + ".lora_A.weight", torch.ones(4, 32)), ["the same part"]),
        (lambda tensors: tensors.clear(), ["no tensors for it"]),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(
    adapter: PeftAdapter, change: Callable[[Tensors], None], words: list[str]
) -> None:
    tensors = read_tensors(adapter.path)
    change(tensors)
    write_tensors(adapter.path, tensors)
    reasons = refused(adapter)
    assert any(all(word in reason for word in words) for reason in reasons), reasons


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"target_modules": ["nothing"]}, ["names no module of the base model"]),
        ({"target_modules": ["q_proj", "v_proj", "down_proj", "nothing"]}, ["'nothing' names no module"]),
        ({"target_modules": "nothing.*"}, ["names no module of the base model"]),
        ({"target_modules": ["q_proj", "v_proj", "down_proj", "lm_head"]}, ["lm_head", "not supported yet"]),
        (
            {"target_modules": ["q_proj", "v_proj", "down_proj", "embed_tokens"]},
            ["model.embed_tokens", "not supported yet"],
        ),
        ({"target_modules": ["q_proj", "v_proj", "down_proj", "k_proj"]}, ["k_proj", "no tensors for it"]),
        ({"target_modules": ["q_proj"]}, ["v_proj", "does not name"]),
        ({"target_modules": "all-linear"}, ["o_proj", "no tensors for it"]),
        ({"layers_to_transform": [0, 1]}, ["layers.2.self_attn.q_proj", "does not name"]),
        ({"exclude_modules": ["down_proj"]}, ["down_proj", "does not name"]),
        ({"r": 8}, ["[4, 32]", "[8, 32]"]),
        ({"rank_pattern": {"down_proj": 2}}, ["down_proj", "[4, 48]", "[2, 48]"]),
        ({"lora_bias": True}, ["the file has no lora_B.bias"]),
    ],
)
def test_a_config_that_does_not_fit_the_file_is_refused(
    adapter: PeftAdapter, fields: dict[str, Any], words: list[str]
) -> None:
    edit_config(adapter.path, **fields)
    reasons = refused(adapter)
    assert any(all(word in reason for word in words) for reason in reasons), reasons


@pytest.mark.parametrize(
    ("fields", "formula"),
    [
        ({"lora_alpha": 1e308}, "lora_alpha / r is 2.5e+307 with lora_alpha 1e+308 and r 4"),
        ({"lora_alpha": 1.4e39}, "is 3.5e+38 with"),
        ({"lora_alpha": 1e39, "use_rslora": True}, "lora_alpha / sqrt(r) is 5e+38 with"),
        ({"lora_alpha": 1e-300}, "is 2.5e-301 with"),
        (
            {"alpha_pattern": {"layers.0.self_attn.q_proj": 1e200}},
            "layers.0.self_attn.q_proj: the scaling lora_alpha / r is 2.5e+199",
        ),
    ],
)
def test_a_scaling_that_float32_cannot_hold_is_refused(
    adapter: PeftAdapter, fields: dict[str, Any], formula: str
) -> None:
    """Every answer would be NaN, or that of the base."""
    edit_config(adapter.path, **fields)
    (reason,) = refused(adapter)
    assert formula in reason
    assert "must be within 1.2e-38 and 3.4e+38" in reason
    assert inspect_adapter(adapter.path).reasons == (reason,)


@pytest.mark.parametrize("alpha", [1e38, 1.3e39, 1e-36])
def test_a_scaling_that_float32_can_hold_is_not(adapter: PeftAdapter, alpha: float) -> None:
    edit_config(adapter.path, lora_alpha=alpha)
    assert {layer.scaling for layer in load(adapter.path, adapter.targets)} == {alpha / 4}


def test_biases_must_be_there_and_have_a_place(tmp_path: Path) -> None:
    made = make_adapter(tmp_path / "sql", "qwen2", target_modules=["q_proj"], bias="all")
    tensors = read_tensors(made.path)
    k_bias = "base_model.model.model.layers.1.self_attn.k_proj.bias"
    write_tensors(made.path, {name: tensor for name, tensor in tensors.items() if name != k_bias})
    assert "layers.1.self_attn.k_proj: bias is 'all', but the file has no bias" in refused(made)[0]
    write_tensors(made.path, {**tensors, k_bias: torch.ones(15)})
    with pytest.raises(AdapterError, match=r"\[15\], expected \[16\]"):
        load(made.path, made.targets)
    write_tensors(made.path, {**tensors, "base_model.model.model.layers.1.self_attn.o_proj.bias": torch.ones(32)})
    assert "no linear 'model.layers.1.self_attn.o_proj' with a bias" in refused(made)[0]
    write_tensors(made.path, tensors)
    edit_config(made.path, bias="lora_only")
    assert any("bias is 'lora_only' and" in reason for reason in refused(made))
    assert "bias_enabled" in " ".join(refused(made, LoRAConfig(bias_enabled=False)))


def test_all_reasons_of_config_and_file_come_at_once(adapter: PeftAdapter) -> None:
    tensors = read_tensors(adapter.path)
    del tensors[f"{Q}.lora_B.weight"]
    tensors[f"{Q}.lora_A.weight"][0, 0] = float("nan")
    tensors["junk"] = torch.ones(1)
    write_tensors(adapter.path, tensors)
    edit_config(adapter.path, use_qalora=True)
    reasons = "\n".join(refused(adapter, LoRAConfig(max_lora_rank=2)))
    for word in ("use_qalora", "max_lora_rank 2", "lora_B.weight", "NaN", "junk"):
        assert word in reasons


def test_many_reasons_are_counted(adapter: PeftAdapter) -> None:
    tensors = read_tensors(adapter.path)
    tensors.update({f"junk.{index}.lora_A.weight": torch.ones(1) for index in range(500)})
    write_tensors(adapter.path, tensors)
    reasons = refused(adapter)
    assert len(reasons) == 21
    assert reasons[-1] == "... and 480 more"


def test_what_is_in_every_module_is_said_once_with_a_count(adapter: PeftAdapter) -> None:
    tensors = read_tensors(adapter.path)
    modules = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    tensors.update({f"{module}.lora_diag": torch.ones(4) for module in modules})
    write_tensors(adapter.path, tensors)
    (reason,) = refused(adapter)
    assert reason.startswith(f"{len(modules)} tensors such as 'base_model.model.")
    assert reason.endswith("are not used: KaSA is not supported; train a plain LoRA")


# --------------------------------------------------------------------------------------------------------- another base


def resize(tensors: Tensors, sizes: Mapping[int, int]) -> Tensors:
    return {name: torch.ones([sizes.get(size, size) for size in tensor.shape]) for name, tensor in tensors.items()}


def test_another_hidden_size_is_another_base(adapter: PeftAdapter) -> None:
    write_tensors(adapter.path, resize(read_tensors(adapter.path), {32: 4096, 48: 11008}))
    edit_config(adapter.path, base_model_name_or_path="org/llama-7b")
    with pytest.raises(AdapterBaseMismatchError) as caught:
        load(adapter.path, adapter.targets)
    for word in ("'sql'", "hidden size 4096 against 32", "intermediate size 11008 against 48", "org/llama-7b"):
        assert word in caught.value.message


def test_more_or_fewer_layers_are_another_base(adapter: PeftAdapter) -> None:
    tensors = read_tensors(adapter.path)
    deeper = {
        name.replace("layers.2", f"layers.{layer}"): tensor.clone()
        for layer in range(2, 6)
        for name, tensor in tensors.items()
    }
    write_tensors(adapter.path, deeper)
    with pytest.raises(AdapterBaseMismatchError, match="number of layers 6 against 3"):
        load(adapter.path, adapter.targets)
    write_tensors(adapter.path, {name: tensor for name, tensor in tensors.items() if "layers.2" not in name})
    assert (
        "layers.2.mlp.down_proj: adapter_config.json names it, but the file has no tensors for it"
        in refused(adapter)[0]
    )
    fewer = {name: tensor for name, tensor in resize(tensors, {32: 16}).items() if "layers.2" not in name}
    write_tensors(adapter.path, fewer)
    with pytest.raises(AdapterBaseMismatchError, match="hidden size 16 against 32, number of layers 2 against 3"):
        load(adapter.path, adapter.targets)


def test_an_architecture_that_is_not_there_is_another_base(adapter: PeftAdapter) -> None:
    tensors = read_tensors(adapter.path)
    write_tensors(
        adapter.path, {name.replace("model.layers", "transformer.h"): tensor for name, tensor in tensors.items()}
    )
    with pytest.raises(
        AdapterBaseMismatchError,
        match=r"none of its 9 modules is there, not 'transformer\.h\.0\.mlp\.down_proj'",
    ):
        load(adapter.path, adapter.targets)
    edit_config(adapter.path, use_qalora=True)
    assert any("none of its 9 modules" in reason for reason in refused(adapter))


def test_one_odd_tensor_is_not_another_base(adapter: PeftAdapter) -> None:
    tensors = read_tensors(adapter.path)
    tensors[f"{Q}.lora_A.weight"] = torch.ones(4, 33)
    write_tensors(adapter.path, tensors)
    assert refused(adapter) == (f"tensor '{Q}.lora_A.weight' has shape [4, 33], expected [4, 32]",)
    odd = {
        name: torch.ones(4, 33 + index) if "lora_A" in name else t for index, (name, t) in enumerate(tensors.items())
    }
    write_tensors(adapter.path, odd)
    assert len(refused(adapter)) == 9


def test_biases_of_another_base(tmp_path: Path) -> None:
    made = make_adapter(tmp_path / "sql", "qwen2", target_modules=["q_proj"], bias="all")
    tensors = read_tensors(made.path)
    deeper = {name.replace("layers.2", "layers.5"): tensor.clone() for name, tensor in tensors.items()}
    write_tensors(made.path, {**deeper, **tensors})
    with pytest.raises(AdapterBaseMismatchError, match="number of layers 6 against 3"):
        load(made.path, made.targets)
