"""Adapters on experts and routers: both forms of files become an A and a B for each expert; all else is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from loraplex.adapters import validation
from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.own import OwnParts
from loraplex.adapters.weights import CheckedReader, LoRAModel
from loraplex.config import LoRAConfig
from loraplex.core import LoraTarget
from loraplex.errors import AdapterBaseMismatchError, AdapterValidationError
from loraplex.kernels.ops import get_backend
from loraplex.models.config import ModelConfig
from loraplex.models.decoder import Decoder

HIDDEN, INNER, NUM_EXPERTS, RANK = 32, 24, 3, 4
EXPERTS = "model.layers.0.mlp.experts"
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
Tensors = dict[str, torch.Tensor]


def targets_of(model_type: str, **options: Any) -> tuple[LoraTarget, ...]:
    sizes = {"vocab_size": 64, "hidden_size": HIDDEN, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"num_hidden_layers": 2, "intermediate_size": INNER, "num_experts": NUM_EXPERTS, "num_experts_per_tok": 2}
    if model_type == "mixtral":
        sizes["num_local_experts"] = sizes.pop("num_experts")
    if model_type == "llama":
        sizes = {key: value for key, value in sizes.items() if "experts" not in key}
    config = ModelConfig.from_dict({"model_type": model_type, **sizes, **options})
    meta = torch.device("meta")
    return Decoder(config, get_backend("torch", meta), torch.float32, meta, True).lora_targets()


QWEN = {"moe_intermediate_size": INNER, "shared_expert_intermediate_size": 40}
FAMILIES = {"mixtral": {}, "olmoe": {"num_key_value_heads": 2}, "qwen2_moe": QWEN, "qwen3_moe": QWEN, "gpt_oss": {}}
LLAMA4 = {"num_local_experts": NUM_EXPERTS, "head_dim": 16, "intermediate_size_mlp": 40}


def pair(module: str, num_in: int, num_out: int, rank: int = RANK, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    name = f"base_model.model.{module}"
    return {
        f"{name}.lora_A.weight": torch.randn(rank, num_in, generator=generator),
        f"{name}.lora_B.weight": torch.randn(num_out, rank, generator=generator),
    }


def stacks(layers: Sequence[int] = (0, 1), rank: int = RANK) -> Tensors:
    """As peft saves both parameters: gate_up_proj was wrapped first."""
    found: Tensors = {}
    for layer in layers:
        name = f"model.layers.{layer}.mlp.experts"
        found |= pair(f"{name}.base_layer", HIDDEN, 2 * INNER, rank * NUM_EXPERTS, seed=layer)
        found |= pair(name, INNER, HIDDEN, rank * NUM_EXPERTS, seed=10 + layer)
    return found


def modules(block: str, names: Sequence[str]) -> Tensors:
    """As older versions saved experts: each a module."""
    found: Tensors = {}
    for layer in range(2):
        for expert in range(NUM_EXPERTS):
            for name in names:
                sizes = (INNER, HIDDEN) if name in ("down_proj", "w2") else (HIDDEN, INNER)
                found |= pair(f"model.layers.{layer}.{block}.experts.{expert}.{name}", *sizes, seed=expert)
    return found


def read(path: Path, tensors: Tensors, model_type: str = "qwen3_moe", **fields: Any) -> LoRAModel:
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": [], **fields}
    (path / "adapter_config.json").write_text(json.dumps(config))
    options: Mapping[str, Any] = LLAMA4 if model_type == "llama4_text" else FAMILIES.get(model_type, {})
    reader = CheckedReader(targets_of(model_type, **options), LoRAConfig())
    return reader.read(path, PEFTHelper.from_local_dir(path))


def refused(path: Path, tensors: Tensors, model_type: str = "qwen3_moe", **fields: Any) -> str:
    with pytest.raises((AdapterValidationError, AdapterBaseMismatchError)) as caught:
        read(path, tensors, model_type, **fields)
    return str(caught.value)


def delta(model: LoRAModel, module: str) -> torch.Tensor:
    layer = model.get_lora(module)
    assert layer is not None
    assert layer.lora_a is not None
    assert layer.lora_b is not None
    return layer.scaling * layer.lora_b @ layer.lora_a


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stack_is_what_peft_makes_of_it(tmp_path: Path, family: str) -> None:
    """The sum that peft's ParamWrapper writes as an einsum over experts, rank, in and out."""
    tensors = stacks()
    model = read(tmp_path, tensors, family, target_parameters=BOTH)
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    block = "block_sparse_moe" if family == "mixtral" else "mlp"
    for layer in range(2):
        for inner, leaves in ((".base_layer", names[:2]), ("", names[2:])):
            name = f"base_model.model.model.layers.{layer}.mlp.experts{inner}"
            a, b = (tensors[f"{name}.lora_{part}.weight"] for part in "AB")
            a, b = a.reshape(NUM_EXPERTS, -1, a.shape[1]), b.reshape(len(b), -1, NUM_EXPERTS)
            wanted = torch.einsum("o r e, e r i -> e o i", b, a) * 2
            for expert in range(NUM_EXPERTS):
                parts = [delta(model, f"model.layers.{layer}.{block}.experts.{expert}.{leaf}") for leaf in leaves]
                both = torch.stack(parts, dim=1).flatten(0, 1) if family == "gpt_oss" else torch.cat(parts)
                torch.testing.assert_close(both, wanted[expert])  # of gpt-oss, gate and up take turns
    assert {layer.rank for layer in model} == {RANK}
    assert len(model.layers) == 2 * NUM_EXPERTS * 3


def test_factors_of_llama_4_are_those_of_the_transpose(tmp_path: Path) -> None:
    """peft takes its [experts, in, out] for [experts, out, in]."""
    tensors: Tensors = {}
    for layer in range(2):
        name = f"model.layers.{layer}.feed_forward.experts"
        tensors |= pair(f"{name}.base_layer", 2 * INNER, HIDDEN, RANK * NUM_EXPERTS, seed=layer)
        tensors |= pair(name, HIDDEN, INNER, RANK * NUM_EXPERTS, seed=10 + layer)
    model = read(tmp_path, tensors, "llama4_text", target_parameters=BOTH)
    for layer in range(2):
        for inner, leaves in ((".base_layer", ("gate_proj", "up_proj")), ("", ("down_proj",))):
            name = f"base_model.model.model.layers.{layer}.feed_forward.experts{inner}"
            a, b = (tensors[f"{name}.lora_{part}.weight"] for part in "AB")
            a, b = a.reshape(NUM_EXPERTS, -1, a.shape[1]), b.reshape(len(b), -1, NUM_EXPERTS)
            wanted = torch.einsum("o r e, e r i -> e o i", b, a) * 2
            for expert in range(NUM_EXPERTS):
                block = f"model.layers.{layer}.feed_forward.experts.{expert}"
                both = torch.cat([delta(model, f"{block}.{leaf}") for leaf in leaves])
                torch.testing.assert_close(both, wanted[expert].t())
    wrong = {name: tensor.t().contiguous() for name, tensor in tensors.items()}
    assert "has shape" in refused(tmp_path / "wrong", wrong, "llama4_text", target_parameters=BOTH)


def test_one_parameter_alone_is_not_wrapped(tmp_path: Path) -> None:
    for parameter, sizes, leaves in ((BOTH[0], (HIDDEN, 2 * INNER), 2), (BOTH[1], (INNER, HIDDEN), 1)):
        tensors: Tensors = {}
        for layer in range(2):
            tensors |= pair(f"model.layers.{layer}.mlp.experts", *sizes, RANK * NUM_EXPERTS)
        model = read(tmp_path / parameter, tensors, target_parameters=[parameter])
        assert len(model.layers) == 2 * NUM_EXPERTS * leaves


def test_patterns_name_parameters(tmp_path: Path) -> None:
    tensors = stacks([0], 6) | stacks([1], RANK)
    fields = {"rank_pattern": {"0.mlp.experts.gate_up_proj": 6, "0.mlp.experts.down_proj": 6}}
    model = read(tmp_path, tensors, target_parameters=BOTH, alpha_pattern={"experts.down_proj": 40}, **fields)
    layers = {layer.module_name: layer for layer in model}
    assert layers[f"{EXPERTS}.1.gate_proj"].rank == 6
    assert layers[f"{EXPERTS}.1.down_proj"].scaling == 40 / 6
    assert layers["model.layers.1.mlp.experts.1.up_proj"].scaling == 8 / RANK


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_that_are_modules(tmp_path: Path, family: str) -> None:
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    block = "block_sparse_moe" if family == "mixtral" else "mlp"
    tensors = modules(block, names)
    if family == "qwen2_moe":  # its shared expert's linears have the same names
        for layer in range(2):
            for name in names:
                sizes = (40, HIDDEN) if name == "down_proj" else (HIDDEN, 40)
                tensors |= pair(f"model.layers.{layer}.mlp.shared_expert.{name}", *sizes)
    model = read(tmp_path, tensors, family, target_modules=list(names))
    assert len(model.layers) == len(tensors) // 2
    name = f"model.layers.1.{block}.experts.2.{names[0]}"
    a, b = (tensors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    torch.testing.assert_close(delta(model, name), 2 * b @ a)


@pytest.mark.parametrize("block", ["mlp", "block_sparse_moe"])
def test_a_router_by_either_name(tmp_path: Path, block: str) -> None:
    tensors: Tensors = {}
    for layer in range(2):
        tensors |= pair(f"model.layers.{layer}.{block}.gate", HIDDEN, NUM_EXPERTS)
    fields = {"target_parameters": ["mlp.gate.weight"]} if block == "mlp" else {"target_modules": ["gate"]}
    model = read(tmp_path, tensors, "mixtral", **fields)
    assert sorted(model.layers) == [f"model.layers.{layer}.block_sparse_moe.gate" for layer in range(2)]


def test_the_router_of_gpt_oss(tmp_path: Path) -> None:
    tensors: Tensors = {}
    for layer in range(2):
        tensors |= pair(f"model.layers.{layer}.mlp.router", HIDDEN, NUM_EXPERTS)
    model = read(tmp_path, tensors, "gpt_oss", target_parameters=["mlp.router.weight"])
    assert sorted(model.layers) == [f"model.layers.{layer}.mlp.router" for layer in range(2)]


def test_biases_of_all_experts_in_one_tensor_are_refused_by_name(tmp_path: Path) -> None:
    """peft saves them with `bias="all"`, as their names have a bias in them."""
    tensors: Tensors = {}
    for layer in range(2):
        tensors |= pair(f"model.layers.{layer}.self_attn.q_proj", HIDDEN, 128)
        name = f"base_model.model.model.layers.{layer}.mlp.experts"
        tensors |= {f"{name}.gate_up_proj_bias": torch.ones(NUM_EXPERTS, 2 * INNER)}
        tensors |= {f"{name}.down_proj_bias": torch.ones(NUM_EXPERTS, HIDDEN)}
    message = refused(tmp_path, tensors, "gpt_oss", target_modules=["q_proj"], bias="all")
    assert "4 tensors such as 'base_model.model.model.layers.0.mlp.experts.down_proj_bias'" in message
    assert "down_proj: bias is 'all', but the file has no bias for it" in message


def test_a_list_that_names_linears_and_the_file_has_no_experts(tmp_path: Path) -> None:
    """Since experts are no linears in transformers, peft wraps those of the shared expert alone."""
    tensors: Tensors = {}
    for layer in range(2):
        tensors |= pair(f"model.layers.{layer}.mlp.shared_expert.down_proj", 40, HIDDEN)
    model = read(tmp_path, tensors, "qwen2_moe", target_modules=["down_proj"])
    assert sorted(model.layers) == [f"model.layers.{layer}.mlp.shared_expert.down_proj" for layer in range(2)]


def test_the_gate_of_the_shared_expert_is_a_linear(tmp_path: Path) -> None:
    """In transformers, beside a router that is a parameter: peft wraps it alone where a pattern names both."""
    tensors: Tensors = {}
    for layer in range(2):
        tensors |= pair(f"model.layers.{layer}.mlp.shared_expert_gate", HIDDEN, 1)
    fields = {"target_modules": r".*\.mlp\.(shared_expert_)?gate"}
    model = read(tmp_path, tensors, "qwen2_moe", **fields)
    names = [f"model.layers.{layer}.mlp.shared_expert_gate" for layer in range(2)]
    assert sorted(model.layers) == names
    routers: Tensors = {}
    for layer in range(2):
        routers |= pair(f"model.layers.{layer}.mlp.gate", HIDDEN, NUM_EXPERTS)
    assert f"{names[0]}: adapter_config.json names it" in refused(tmp_path, routers, "qwen2_moe", **fields)


def test_a_check_does_not_go_through_all_modules_for_each_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model has tens of thousands of experts' linears, and a file a tensor or two of each."""
    rounds = [0]

    class Counted(frozenset[str]):
        def __iter__(self) -> Iterator[str]:
            rounds[0] += 1
            return super().__iter__()

    class CountedParts(OwnParts):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.targeted = Counted(self.targeted)

    monkeypatch.setattr(validation, "OwnParts", CountedParts)
    tensors = modules("mlp", ["gate_proj", "up_proj", "down_proj"])
    model = read(tmp_path, tensors, target_modules=["gate_proj", "up_proj", "down_proj"])
    assert len(model.layers) == len(tensors) // 2
    assert 0 < rounds[0] < len(model.layers)


def test_what_does_not_fit_a_stack_is_refused(tmp_path: Path) -> None:
    good, name = stacks(), f"base_model.model.{EXPERTS}"
    two = {"target_parameters": BOTH}
    missing = {key: tensor for key, tensor in good.items() if key != f"{name}.lora_B.weight"}
    assert f"{EXPERTS}.down_proj: the file has no lora_B.weight" in refused(tmp_path, missing, **two)
    odd = good | {f"{name}.lora_A.weight": torch.ones(RANK, INNER)}
    assert "[4, 24], expected [12, 24]" in refused(tmp_path, odd, **two)
    assert "rank 4" not in refused(tmp_path, stacks(rank=5), **two)
    assert "expected [12, 32]" in refused(tmp_path, stacks(rank=5), **two)
    for number in ("nan", "inf"):
        assert "NaN or Inf" in refused(
            tmp_path, good | {f"{name}.lora_A.weight": torch.full((12, 24), float(number))}, **two
        )
    text = refused(tmp_path, good, target_parameters=[*BOTH, "experts.other"])
    assert "'experts.other' names no weight of a linear or of experts" in text
    assert "target_parameters names 'model.embed_tokens.weight'" not in text
    ends = refused(tmp_path, good, target_parameters=[*BOTH, "embed_tokens.weight"])
    assert "target_parameters names model.embed_tokens.weight, which is no linear's" in ends
    twice = good | modules("mlp", ["down_proj"])
    text = refused(tmp_path, twice, target_modules=["down_proj"], **two)
    assert f"target_parameters names '{EXPERTS}.down_proj' and target_modules" in text
    for fields in ({"target_modules": ["q_proj"]}, {"target_parameters": BOTH[:1]}):
        assert "of a parameter of experts that target_parameters does not name" in refused(tmp_path, good, **fields)


@pytest.mark.parametrize("part", ["lora_B.bias", "lora_magnitude_vector", "bias"])
def test_other_parts_of_a_stack_are_refused(tmp_path: Path, part: str) -> None:
    for module in (EXPERTS, f"{EXPERTS}.base_layer"):
        extra = {f"base_model.model.{module}.{part}": torch.ones(HIDDEN)}
        said = refused(tmp_path, stacks() | extra, target_parameters=BOTH)
        assert said.count(f"tensor 'base_model.model.{module}.{part}' is not used") == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"target_parameters": "experts.down_proj"}, "must be a list of at most"),
        ({"target_parameters": [""]}, "must be a list of at most"),
        ({"target_parameters": ["a"] * (2**13 + 1)}, "must be a list of at most"),
        ({"target_parameters": BOTH, "use_dora": True}, "use_dora=True with target_parameters"),
        ({"target_parameters": BOTH, "lora_bias": True}, "lora_bias=True with target_parameters"),
    ],
)
def test_fields_that_do_not_go_with_it(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    assert words in refused(tmp_path, stacks(), **fields)


@pytest.mark.parametrize(
    ("kind", "part", "fields"),
    [
        ("LORA", "lora_A.weight", {"use_dora": True}),
        ("IA3", "ia3_l", {"feedforward_modules": []}),
        ("LOHA", "hada_w1_a", {"alpha": 8}),
        ("LOKR", "lokr_w1", {"alpha": 8}),
        ("VERA", "vera_lambda_b", {}),
        ("ADALORA", "lora_A", {"init_r": 4}),
    ],
)
def test_other_kinds_on_experts_and_routers_are_refused_by_name(
    tmp_path: Path, kind: str, part: str, fields: dict[str, Any]
) -> None:
    named = [f"{EXPERTS}.0.down_proj", "model.layers.0.mlp.gate"]
    tensors = {f"base_model.model.{name}.{part}": torch.ones(RANK, INNER) for name in named}
    said = refused(tmp_path, tensors, peft_type=kind, target_modules=["down_proj", "gate"], **fields)
    name = "use_dora" if kind == "LORA" else kind
    for module in named:
        assert f"{module}: {name} of experts and routers is not supported; train a LoRA of them" in said


def test_own_weights_of_experts_are_refused(tmp_path: Path) -> None:
    tensors = {f"base_model.model.model.layers.{i}.mlp.gate.weight": torch.ones(NUM_EXPERTS, HIDDEN) for i in range(2)}
    said = refused(tmp_path, tensors, target_modules=["q_proj"], modules_to_save=["gate"])
    assert "modules_to_save names 'model.layers.0.mlp.gate': weights of experts are served by LoRA alone" in said


def test_a_base_without_experts(tmp_path: Path) -> None:
    said = refused(tmp_path, stacks(), "llama", target_parameters=BOTH)
    assert "none of its 4 modules is there" in said


def test_the_form_of_a_file_is_in_what_a_recipe_is_known_by() -> None:
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": []}
    first, second = (PEFTHelper.from_dict({**fields, "target_parameters": names}) for names in (BOTH, BOTH[:1]))
    assert first.naming() != second.naming()
