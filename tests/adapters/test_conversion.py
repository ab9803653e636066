"""Other kinds than LoRA against peft: what is read of a saved adapter computes what peft computes, in float64."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.tuners.adalora.layer import SVDLinear
from peft.tuners.loha.layer import Linear as LoHaLinear
from peft.tuners.lokr.layer import Linear as LoKrLinear
from peft.tuners.lokr.layer import factorization

from loraplex.adapters import conversion
from loraplex.adapters.conversion import converter_of, cost_of, factor_pair, file_widths, part_shapes
from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.kinds import PARTS, Kind
from loraplex.adapters.tensors import ALIGNMENT
from loraplex.adapters.weights import LoRALayerWeights
from loraplex.config import LoRAConfig
from tests.adapters.peft_oracle import (
    LINEARS,
    header_nbytes,
    load,
    make_adapter,
    new_base,
    peft_reads,
    read_tensors,
    save_kind,
    targets_of,
    tuned_layers,
)

CLOSE = 1e-6
"""Of the largest number of a delta: what one rounding of each factor to float32 costs."""


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, what: object = "") -> None:
    assert ours.shape == theirs.shape
    error = (ours - theirs).abs().max().item()
    assert error <= CLOSE * theirs.abs().max().item(), f"{what}: off by {error}"


def delta(layer: LoRALayerWeights) -> torch.Tensor:
    assert layer.lora_a is not None
    assert layer.lora_b is not None
    return layer.scaling * (layer.lora_b.double() @ layer.lora_a.double())


# ------------------------------------------------------------------------------------------------------ what peft saves

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
Q0 = "model.layers.0.self_attn.q_proj"
CONVERTED: list[tuple[str, dict[str, Any]]] = [
    ("LoHa", {"target_modules": ["q_proj", "down_proj"], "r": 3, "alpha": 5}),
    ("LoHa", {"target_modules": ATTENTION, "r": 7, "rank_pattern": {"k_proj": 2}, "alpha_pattern": {"v_proj": 3}}),
    ("LoHa", {"target_modules": ".*(gate|up)_proj", "r": 1}),
    ("LoHa", {"target_modules": ["q_proj"], "r": 4, "layers_to_transform": [0, 2], "exclude_modules": ["o_proj"]}),
    ("LoKr", {"target_modules": list(LINEARS), "r": 2, "alpha": 3}),
    ("LoKr", {"target_modules": list(LINEARS), "r": 2, "decompose_both": True}),
    ("LoKr", {"target_modules": ["q_proj", "down_proj"], "r": 64}),
    ("LoKr", {"target_modules": ["q_proj", "down_proj"], "r": 1, "decompose_both": True, "decompose_factor": 2}),
    ("LoKr", {"target_modules": "all-linear", "r": 3, "decompose_factor": 16, "rank_pattern": {"mlp.*": 2}}),
    (
        "LoKr",
        {"target_modules": ["v_proj", "gate_proj"], "r": 2, "decompose_factor": 5, "alpha_pattern": {"v_proj": 1}},
    ),
    ("Vera", {"target_modules": ["q_proj"], "r": 5}),
    ("Vera", {"target_modules": ["k_proj", "down_proj", "up_proj"], "r": 9, "layers_to_transform": [0, 2]}),
    ("Vera", {"target_modules": "all-linear", "r": 2, "projection_prng_key": 7}),
    ("AdaLora", {"target_modules": ATTENTION, "init_r": 6, "lora_alpha": 9, "total_step": 10}),
    ("AdaLora", {"target_modules": ["q_proj"], "init_r": 1, "total_step": 10, "layers_to_transform": [1]}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "fields"), CONVERTED, ids=str)
def test_every_delta_is_that_of_peft(name: str, fields: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    config = getattr(peft, f"{name}Config")(**fields, task_type="CAUSAL_LM")
    targets = save_kind(tmp_path / "a", config, dtype=dtype)
    model, theirs = load(tmp_path / "a", targets), tuned_layers(peft_reads(tmp_path / "a"))
    assert model.layers.keys() == theirs.keys() != set()
    for module, layer in theirs.items():
        ours = model.layers[module]
        with torch.no_grad():
            assert_close(delta(ours), layer.get_delta_weight("default"), module)
        assert ours.lora_a is not None
        assert ours.lora_a.dtype == ours.lora_b.dtype == torch.float32
        assert ours.rank == len(ours.lora_a)
        assert ours.rank == torch.linalg.matrix_rank(delta(ours)), "the least rank that is exact"
        assert all(t.is_contiguous() and t.data_ptr() % ALIGNMENT == 0 for t in ours.tensors.values())
    assert model.rank == max(layer.rank for layer in model)
    assert model.nbytes == sum(4 * layer.rank * sum(delta(layer).shape) for layer in model)


def test_adalora_with_a_rank_pattern(tmp_path: Path) -> None:
    """peft saves the rows that were kept, and divides by init_r all the same; one module has no rank left."""
    config = peft.AdaLoraConfig(init_r=4, target_modules=["q_proj"], total_step=10, task_type="CAUSAL_LM")
    pattern = {
        f"model.layers.{layer}.self_attn.q_proj.lora_E": mask
        for layer, mask in enumerate(([True, False, True, True], [True] * 4, [False] * 4))
    }
    targets = save_kind(tmp_path / "a", config, rank_pattern=pattern)
    assert [tuple(t.shape) for name, t in read_tensors(tmp_path / "a").items() if name.endswith("lora_E")] == [
        (3, 1),
        (4, 1),
        (0, 1),
    ]
    model, theirs = load(tmp_path / "a", targets), tuned_layers(peft_reads(tmp_path / "a"))
    assert [layer.rank for layer in model] == [3, 4]
    for layer in model:
        assert_close(delta(layer), theirs[layer.module_name].get_delta_weight("default").detach())
    gone = theirs["model.layers.2.self_attn.q_proj"].get_delta_weight("default")
    assert not gone.any()
    assert model.get_lora("model.layers.2.self_attn.q_proj") is None


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_adalora_replaces_biases_as_lora_does(bias: str, tmp_path: Path) -> None:
    config = peft.AdaLoraConfig(init_r=3, target_modules=["q_proj"], total_step=10, bias=bias, task_type="CAUSAL_LM")
    targets = save_kind(tmp_path / "a", config, "qwen2")
    model, theirs = load(tmp_path / "a", targets), peft_reads(tmp_path / "a", "qwen2")
    expected = {"q_proj"} if bias == "lora_only" else {"q_proj", "k_proj", "v_proj"}
    assert {layer.module_name.rpartition(".")[2] for layer in model if layer.bias is not None} == expected
    for layer in model:
        linear = theirs.get_submodule(f"base_model.model.{layer.module_name}")
        x = torch.randn(5, linear.in_features, dtype=torch.float64)
        y = x @ getattr(linear, "base_layer", linear).weight.T + layer.bias.double()
        if layer.lora_a is not None:
            y = y + x @ delta(layer).T
        assert_close(y.detach(), linear(x).detach(), layer.module_name)


@pytest.mark.parametrize("family", ["llama", "qwen2", "llama_bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
        {"target_modules": list(LINEARS), "feedforward_modules": ["o_proj", "down_proj"]},
        {"target_modules": ".*(q|down)_proj", "feedforward_modules": r".*\.down_proj"},
        {"target_modules": ["gate_proj"], "feedforward_modules": []},
    ],
    ids=str,
)
def test_every_gain_is_that_of_peft(family: str, dtype: torch.dtype, fields: dict[str, Any], tmp_path: Path) -> None:
    """The base's bias is multiplied, too, by a gain on the outputs; merged weights and answers."""
    targets = save_kind(tmp_path / "a", peft.IA3Config(**fields, task_type="CAUSAL_LM"), family, dtype)
    model, base, theirs = load(tmp_path / "a", targets), new_base(family).double(), peft_reads(tmp_path / "a", family)
    layers = tuned_layers(theirs)
    assert model.layers.keys() == layers.keys()
    outputs = {}
    for name, layer in model.layers.items():
        assert (layer.rank, layer.lora_a, layer.lora_b, layer.scaling) == (0, None, None, 1.0)
        (gain,) = layer.tensors.values()
        assert gain.dtype == torch.float32
        assert gain.dim() == 1
        assert (layer.input_gain is not None) == layers[name].is_feedforward
        linear = base.get_submodule(name)
        x = torch.randn(5, linear.in_features, dtype=torch.float64)
        with torch.no_grad():
            y = linear(x * gain) if layer.input_gain is not None else linear(x) * gain
            assert_close(y, layers[name](x), name)
        outputs[name] = (
            linear.weight * gain if layer.input_gain is not None else linear.weight * gain[:, None]
        ).detach()
    merged = theirs.merge_and_unload()
    for name, weight in outputs.items():
        assert_close(weight, merged.get_submodule(name).weight.detach(), name)
    assert (model.rank, model.nbytes) == (0, 4 * sum(t.numel() for t in read_tensors(tmp_path / "a").values()))


@pytest.mark.parametrize("family", ["llama", "llama_bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"use_rslora": True, "rank_pattern": {"v_proj": 2}},
        {"bias": "all"},
        {"target_modules": "all-linear", "r": 3},
    ],
    ids=str,
)
def test_magnitudes_bring_rows_to_the_norms_of_peft(
    family: str, dtype: torch.dtype, fields: dict[str, Any], tmp_path: Path
) -> None:
    """W' = magnitude / ||W + scaling B A||_row * (W + scaling B A)."""
    made = make_adapter(tmp_path / "a", family, dtype, use_dora=True, **fields)
    model, base = load(made.path, made.targets), new_base(family).double()
    theirs = peft_reads(made.path, family)
    layers = tuned_layers(theirs)
    assert {layer.module_name for layer in model if layer.lora_a is not None} == layers.keys()
    merged = theirs.merge_and_unload()
    for name in layers:
        layer = model.layers[name]
        assert layer.magnitude is not None
        assert (layer.magnitude.dtype, layer.lora_a.dtype) == (torch.float32, dtype)
        weight = base.get_submodule(name).weight.detach() + delta(layer)
        weight = weight * (layer.magnitude.double() / weight.norm(dim=1))[:, None]
        assert_close(weight, merged.get_submodule(name).weight.detach(), name)
    widen = sum(2 * layer.magnitude.numel() for layer in model if layer.magnitude is not None)
    assert model.nbytes == header_nbytes(made.path) + (widen if dtype.itemsize == 2 else 0)


# ------------------------------------------------------------------------------------------------ any shape and factor


def helper(**fields: Any) -> PEFTHelper:
    found = PEFTHelper.from_dict({"target_modules": ["q_proj"], **fields})
    assert found.problems == ()
    return found


def parts_of(layer: torch.nn.Module, kind: Kind) -> dict[str, torch.Tensor]:
    """Short name -> peft's parameter, filled with random numbers."""
    torch.manual_seed(2)
    found = {}
    for short, part in PARTS[kind].items():
        parameters = getattr(layer, part, {})
        if part != "bias" and "default" in parameters:
            found[short] = torch.nn.init.normal_(parameters["default"]).detach()
    return found


def assert_converts(given: PEFTHelper, layer: Any, rank: int) -> None:
    """Shapes, cost and delta of one of peft's layers."""
    kind, (out_features, in_features) = given.kind, layer.base_layer.weight.shape
    parts = parts_of(layer, kind)
    shapes = {PARTS[kind][short]: tuple(part.shape) for short, part in parts.items()}
    assert part_shapes(given, rank, in_features, out_features) == shapes
    assert file_widths(kind, shapes) == (in_features, out_features)
    convert = converter_of(given)
    assert convert is not None
    made = convert(parts)
    cost = cost_of(given, rank, in_features, out_features)
    assert made.keys() == {"lora_a", "lora_b"}
    assert cost.rank == made["lora_a"].shape[0] == made["lora_b"].shape[1]
    assert cost.nbytes == made["lora_a"].nbytes + made["lora_b"].nbytes
    product = given.scaling_of("q_proj") * made["lora_b"].double() @ made["lora_a"].double()
    with torch.no_grad():
        assert_close(product, layer.double().get_delta_weight("default"))


SIZES = st.integers(1, 40)
FACTORS = st.one_of(st.integers(-2, 45), st.just(10**6))


@settings(deadline=None, max_examples=150)
@given(SIZES, SIZES, st.integers(1, 12), st.booleans(), FACTORS, st.integers(1, 9))
def test_any_lokr(in_features: int, out_features: int, rank: int, both: bool, factor: int, alpha: int) -> None:
    fields = {"r": rank, "alpha": alpha, "decompose_both": both, "decompose_factor": factor}
    base = torch.nn.Linear(in_features, out_features)
    layer = LoKrLinear(base, "default", peft.LoKrConfig(**fields), r=rank, alpha=alpha)
    assert_converts(helper(peft_type="LOKR", **fields), layer, rank)


@settings(deadline=None, max_examples=100)
@given(SIZES, SIZES, st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 7, 2**20]))
def test_any_loha(in_features: int, out_features: int, rank: int, alpha: int, piece: int) -> None:
    """Also in pieces of one row."""
    base = torch.nn.Linear(in_features, out_features)
    layer = LoHaLinear(base, "default", peft.LoHaConfig(), r=rank, alpha=alpha)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "PIECE_NUMBERS", piece)
        assert_converts(helper(peft_type="LOHA", r=rank, alpha=alpha), layer, rank)


@settings(deadline=None, max_examples=50)
@given(SIZES, SIZES, st.integers(1, 50))
def test_any_adalora(in_features: int, out_features: int, rank: int) -> None:
    config = peft.AdaLoraConfig(total_step=1, init_lora_weights=False)
    layer = SVDLinear(torch.nn.Linear(in_features, out_features), "default", config, r=rank, lora_alpha=3)
    assert_converts(helper(peft_type="ADALORA", init_r=rank, lora_alpha=3), layer, rank)


@given(st.integers(1, 3000), st.one_of(st.integers(-3, 70), st.integers(70, 2**31)))
def test_factors_are_those_of_peft(size: int, factor: int) -> None:
    assert factor_pair(size, factor) == factorization(size, factor)


@given(st.lists(st.floats(width=16, allow_nan=False), min_size=1, max_size=9), st.sampled_from(["bfloat16", "float16"]))
def test_numbers_of_16_bits_are_widened_exactly(numbers: list[float], dtype: str) -> None:
    tensor = torch.tensor(numbers, dtype=getattr(torch, dtype))
    assert torch.equal(conversion._float32(tensor), tensor.float())
    assert np.array_equal(conversion._float64(tensor), tensor.double().numpy())


def test_each_number_is_rounded_once() -> None:
    """lora_B of a LoHa is a product of two numbers of the file: what float64 says, rounded to float32."""
    torch.manual_seed(3)
    given = helper(peft_type="LOHA", r=3, alpha=1)
    parts = {name: torch.randn(*shape) for name, shape in part_shapes(given, 3, 20, 30).items()}
    convert = converter_of(given)
    assert convert is not None
    made = convert(parts)
    exact = (parts["hada_w1_a"].double()[:, :, None] * parts["hada_w2_a"].double()[:, None, :]).reshape(30, 9)
    assert torch.equal(made["lora_b"], exact.float())


# ----------------------------------------------------------------------------------------------------------- lora_dtype


@pytest.mark.parametrize("lora_dtype", ["float16", "bfloat16", "float32"])
def test_lora_dtype_converts_a_and_b_alone(lora_dtype: str, tmp_path: Path) -> None:
    dtype = getattr(torch, lora_dtype)
    made = make_adapter(tmp_path / "dora", use_dora=True)
    targets = save_kind(tmp_path / "ia3", peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    save_kind(tmp_path / "lokr", peft.LoKrConfig(target_modules=["q_proj"], r=2))
    expected: Mapping[str, set[tuple[str, torch.dtype]]] = {
        "dora": {("lora_a", dtype), ("lora_b", dtype), ("magnitude", torch.float32)},
        "ia3": {("gain", torch.float32)},
        "lokr": {("lora_a", dtype), ("lora_b", dtype)},
    }
    assert made.targets == targets
    for name, fields in expected.items():
        model = load(tmp_path / name, targets, LoRAConfig(lora_dtype=lora_dtype))
        assert {(field, tensor.dtype) for layer in model for field, tensor in layer.tensors.items()} == fields
        assert model.adapter_digest == load(tmp_path / name, targets).adapter_digest


# ------------------------------------------------------------------------- initialisations that change the base weights


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_the_call_that_a_refusal_names_makes_a_plain_lora(init: str, tmp_path: Path) -> None:
    """Saved before training and after it, as the message says: the converted file is a delta to the base as it is."""
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=init, task_type="CAUSAL_LM")
    base = new_base("llama")
    weights = {name: parameter.detach().clone().double() for name, parameter in base.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, config)
        model.peft_config["default"].init_lora_weights = True
        model.save_pretrained(tmp_path / "initial")
        model.peft_config["default"].init_lora_weights = init
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(tmp_path / "trained")
        initial = str(tmp_path / "initial")
        model.save_pretrained(tmp_path / "plain", path_initial_model_for_weight_conversion=initial)
    (reason,) = PEFTHelper.from_local_dir(tmp_path / "trained").reasons(LoRAConfig())
    assert "model.save_pretrained(path, path_initial_model_for_weight_conversion=initial)" in reason
    adapter = load(tmp_path / "plain", targets_of(new_base("llama")))
    merged = model.merge_and_unload()
    assert len(adapter.layers) == 6
    for layer in adapter:
        ours = weights[f"{layer.module_name}.weight"] + delta(layer)
        torch.testing.assert_close(
            ours, merged.get_submodule(layer.module_name).weight.detach().double(), rtol=1e-4, atol=1e-5
        )


def test_a_loftq_is_to_be_merged() -> None:
    """Its base was quantised: no delta to the base as it is says that."""
    (reason,) = PEFTHelper.from_dict(
        {"r": 1, "lora_alpha": 1, "target_modules": ["q_proj"], "peft_type": "LORA", "init_lora_weights": "loftq"}
    ).reasons(LoRAConfig())
    assert "merge_and_unload()" in reason
    assert "path_initial_model_for_weight_conversion" not in reason
