"""Checkpoints of gpt-oss: stacks of experts [experts, in, out], and the same in MXFP4, as its files have them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from loraplex.errors import ModelWeightError
from loraplex.kernels.ops import get_backend
from loraplex.kernels.quantized_weights import Int8GroupWeight
from loraplex.models import packed_cache
from loraplex.models.checkpoints.files import open_files
from loraplex.models.checkpoints.mxfp4 import Mxfp4Weight
from loraplex.models.config import ModelConfig
from loraplex.models.families import FAMILIES
from loraplex.models.inspect import inspect_model
from loraplex.models.loader import Checkpoint, load_model
from loraplex.models.packed_cache import PackedCache
from tests.fixtures import ModelZoo
from tests.models.checkpoints.forms import Made, change_config, mxfp4, randint
from tests.models.checkpoints.test_forms import BACKENDS, HAS_NATIVE, TOKENS, decoder_of, logits_of
from tests.models.paged_runner import CPU
from tests.ranks.engines import LORA, check, driver_of, load

STACK = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")
SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
FORMS = ("native",) if HAS_NATIVE else ("reference",)


def make_mxfp4(base: Path, to: Path) -> Made:
    """`base` with its experts drawn anew in the form; the plain one has their numbers."""
    generator = torch.Generator().manual_seed(5)
    given = load_file(base / "model.safetensors")
    stored, numbers = dict(given), dict(given)
    for name, weight in given.items():
        if STACK.fullmatch(name):
            del stored[name]
            drawn = [mxfp4(expert.t(), generator) for expert in weight]
            blocks = torch.stack([tensors["weight_packed"] for tensors, _ in drawn])
            stored[f"{name}_blocks"] = blocks.unflatten(-1, (-1, 16))
            stored[f"{name}_scales"] = torch.stack([tensors["weight_scale"] for tensors, _ in drawn])
            numbers[name] = torch.stack([exact.float().t() for _, exact in drawn])
    made = Made(to / "quantized", to / "plain")
    for path, tensors in ((made.quantized, stored), (made.plain, numbers)):
        shutil.copytree(base, path)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    change_config(made.quantized, quantization_config=SETTINGS)
    return made


@pytest.fixture(scope="module")
def made(zoo: ModelZoo, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_mxfp4(zoo.base("gpt_oss"), tmp_path_factory.mktemp("mxfp4"))


def test_outputs_of_gate_and_up_take_turns(zoo: ModelZoo) -> None:
    base = zoo.base("gpt_oss")
    tensors, block = load_file(base / "model.safetensors"), "model.layers.1.mlp.experts"
    with open_files(base, None, FAMILIES["gpt_oss"]) as files:
        assert not any(STACK.match(name) for name in files.names)
        for expert in range(5):
            stack, bias = tensors[f"{block}.gate_up_proj"][expert], tensors[f"{block}.gate_up_proj_bias"][expert]
            for turn, leaf in enumerate(("gate_proj", "up_proj")):
                assert torch.equal(files.tensor(f"{block}.{expert}.{leaf}.weight"), stack[:, turn::2].t())
                assert torch.equal(files.tensor(f"{block}.{expert}.{leaf}.bias"), bias[turn::2])
            down, bias = tensors[f"{block}.down_proj"][expert], tensors[f"{block}.down_proj_bias"][expert]
            assert torch.equal(files.tensor(f"{block}.{expert}.down_proj.weight"), down.t())
            assert torch.equal(files.tensor(f"{block}.{expert}.down_proj.bias"), bias)


def test_the_bits_are_transformers_numbers(made: Made) -> None:
    """Its own way of making floats of them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, config = load_file(made.quantized / "model.safetensors"), ModelConfig.from_dir(made.quantized)
    block = "model.layers.0.mlp.experts"
    parts = (tensors[f"{block}.down_proj_{part}"] for part in ("blocks", "scales"))
    wanted = convert_moe_packed_tensors(*parts, dtype=torch.float32)
    with open_files(made.quantized, config.form, config.family) as files:
        for expert in range(5):
            stored = files.stored(f"{block}.{expert}.down_proj.weight", (64, 160))
            assert stored is not None
            assert torch.equal(stored.rows(0, 64), wanted[expert].t())


def test_int8_in_groups_has_every_number_exactly() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = Mxfp4Weight(
        randint(generator, 0, 256, 40, 48).to(torch.uint8), randint(generator, 1, 255, 40, 3).to(torch.uint8)
    )
    kept = weight.integers()
    assert isinstance(kept, Int8GroupWeight)
    assert torch.equal(kept.rows(0, 40), weight.rows(0, 40))
    assert torch.equal(kept.rows(7, 19), weight.rows(7, 19))


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_are_those_of_the_numbers(zoo: ModelZoo, made: Made, backend: str) -> None:
    decoder = decoder_of(made.quantized, backend)
    want = zoo.oracle(made.plain).logits(TOKENS)
    assert (logits_of(decoder) - want).abs().max() <= 1e-4 * want.abs().max()
    assert decoder.weights_form == "MXFP4 checkpoint, kept as 39 linears in float32"


@pytest.mark.parametrize("backend", FORMS)
def test_in_16_bits_experts_are_kept_in_int8(made: Made, backend: str) -> None:
    decoder, plain = decoder_of(made.quantized, backend, dtype=torch.bfloat16), decoder_of(made.plain, "reference")
    words = "kept as 30 linears in int8 in groups of 32 (the same numbers), 9 linears in bfloat16"
    assert decoder.weights_form == f"MXFP4 checkpoint, {words}"
    kept = 0
    for linear, exact in zip(decoder.linears, plain.linears, strict=True):
        if linear.is_kept:
            got = linear.ops.linear(torch.eye(linear.target.in_features), linear.weight)
            torch.testing.assert_close(got, exact.weight.t(), rtol=1e-6, atol=1e-9)
            kept += 1
    assert kept == 30


@pytest.mark.slow
def test_greedy_tokens_with_and_without_adapters(zoo: ModelZoo, made: Made) -> None:
    parameters = ["mlp.router.weight", "experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"], target_parameters=parameters, task_type="CAUSAL_LM"
    )
    adapters = {"LoRA": zoo.adapter(made.plain, config)}
    cases = [(name, zoo.fit_case(made.plain, adapters.get(name or ""))) for name in (None, *adapters)]
    driver = driver_of(made.quantized, 1, LORA, dtype="float32")
    try:
        load(driver, adapters)
        check(driver, cases)
        assert "MXFP4 checkpoint, kept as " in driver.engine.info.form
    finally:
        driver.close()


@pytest.mark.skipif(not HAS_NATIVE, reason="no native kernels are built")
@pytest.mark.parametrize("is_quantized", [False, True])
def test_a_second_start_maps_what_the_first_packed(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_quantized: bool
) -> None:
    monkeypatch.setattr(packed_cache, "MIN_BYTES", 0)
    path = made.quantized if is_quantized else made.plain
    config, ops = ModelConfig.from_dir(path), get_backend("native", CPU)
    cache = PackedCache(tmp_path / "cache", path, ("bfloat16", "panels16.1"))
    first = load_model(path, config, torch.bfloat16, CPU, "auto", 0, ops, False)
    thread = cache.save_soon(first.weighted_layers())
    assert thread is not None
    thread.join()
    monkeypatch.setattr(Checkpoint, "load_into", None)  # the checkpoint is not read again
    again = load_model(path, config, torch.bfloat16, CPU, "auto", 0, ops, False, packed_cache=cache)
    assert torch.equal(logits_of(again), logits_of(first))


@pytest.mark.skipif(not HAS_NATIVE, reason="no native kernels are built")
@pytest.mark.parametrize("quantization", ["int8", "int4", "int4-a16"])
def test_every_linear_of_experts_is_quantised_here(made: Made, quantization: str) -> None:
    """Of the plain checkpoint, within the error of the bits; the router is exact."""
    exact, model = decoder_of(made.plain, "reference"), decoder_of(made.plain, "native", quantization=quantization)
    assert logits_of(model).isfinite().all()
    for linear, plain in zip(model.linears, exact.linears, strict=True):
        got = linear.ops.linear(torch.eye(linear.target.in_features), linear.weight).t()
        error = (got - plain.weight).norm() / plain.weight.norm()
        assert error < (1e-6 if linear.name.endswith("router") else 0.01 if quantization == "int8" else 0.13)


def test_inspect_says_how_it_would_be_kept(made: Made) -> None:
    change_config(made.quantized, dtype="bfloat16")
    report = inspect_model(str(made.quantized))
    assert report.is_served, report.reasons
    model = decoder_of(made.quantized, "auto", dtype=torch.bfloat16)
    first = report.forms[0]
    assert model.weights_form == f"{report.checkpoint_form} checkpoint, kept as {first.kept}"
    kept = sum(tensor.nbytes for layer in model.weighted_layers() for tensor in layer.prepared().values())
    assert first.weight_bytes == pytest.approx(kept, rel=0.1)
    assert {target.name for target in report.targets} >= {"q_proj", "router", "gate_proj", "up_proj", "down_proj"}
    change_config(made.quantized, dtype="float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name, t: t[:, :, :-1] if name.endswith("_blocks") else t, "has to have"),
        (lambda name, t: t.float() if name.endswith("_scales") else t, "scales is float32 and has to be uint8"),
        (lambda name, t: None if name.endswith("down_proj_scales") else t, "scales is missing beside"),
        (lambda name, t: None if name.endswith("down_proj_blocks") else t, "blocks is missing beside"),
        (lambda name, t: None if name.endswith("sinks") else t, "3 missing: model.layers.0.self_attn.sinks"),
        (lambda name, t: t[:, :-1] if name.endswith("gate_up_proj_bias") else t, "gate_up_proj_bias"),
    ],
)
def test_files_that_are_not_of_the_form_are_refused(made: Made, tmp_path: Path, change: object, message: str) -> None:
    assert callable(change)
    path = tmp_path / "changed"
    shutil.copytree(made.quantized, path)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        changed = change(name, tensor)
        if changed is not None:
            tensors[name] = changed.contiguous()
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelWeightError, match=re.escape(message)):
        decoder_of(path, "torch")
