"""What packing asks of the base's weights: norms of rows in every form of a weight, against torch and peft."""

from __future__ import annotations

import copy
import os
import shutil
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from loraplex.adapters.weights import LoRALayerWeights, LoRAModel
from loraplex.kernels.ops import KernelBackend, get_backend
from loraplex.kernels.slices import SliceWeights
from loraplex.memory.weights.packing import Packer
from loraplex.models.config import ModelConfig
from loraplex.models.decoder import Decoder
from loraplex.models.loader import load_model
from tests.fixtures import HIDDEN_SIZE, TARGET_MODULES, VOCAB_SIZE, ModelZoo
from tests.kernels.cases import BACKENDS
from tests.memory.gains import applied
from tests.models.paged_runner import CPU, PagedRunner, load_decoder

RANK, SCALING = 5, 0.75
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)


def modules_of(decoder: Decoder) -> dict[str, tuple[int, int]]:
    """Name of each linear that an adapter may act on -> (inputs, outputs)."""
    targets = [target for target in decoder.lora_targets() if target.is_linear]
    return {s.module_name: (t.in_features, s.out_features) for t in targets for s in t.slices}


def draw(in_features: int, out_features: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(in_features + out_features)
    a, b = torch.randn(RANK, in_features, generator=generator), torch.randn(out_features, RANK, generator=generator)
    return a / in_features**0.5, b


def norms_of(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (weight.double() + SCALING * b.double() @ a.double()).norm(dim=1)


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_row_norms_are_those_of_the_checkpoints_weights(
    zoo: ModelZoo, backend: KernelBackend, dtype: torch.dtype
) -> None:
    """Of each module of the fused linears, too."""
    base = zoo.base("qwen3")
    decoder, weights = load_decoder(base, backend=backend.name, dtype=dtype), load_file(base / "model.safetensors")
    modules = modules_of(decoder)
    assert len(modules) == 2 * len(TARGET_MODULES)
    for name, shape in modules.items():
        a, b = draw(*shape)
        got = decoder.row_norms(name, a.to(dtype), b.to(dtype), SCALING)
        assert got.dtype == torch.float32
        want = norms_of(weights[f"{name}.weight"].to(dtype), a.to(dtype), b.to(dtype))
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0)
    with pytest.raises(KeyError, match="embed_tokens"):
        decoder.row_norms("model.embed_tokens", a, b, SCALING)
    a, b = draw(HIDDEN_SIZE, VOCAB_SIZE)  # of the head, which is tied here
    want = norms_of(weights["model.embed_tokens.weight"].to(dtype), a.to(dtype), b.to(dtype))
    torch.testing.assert_close(
        decoder.row_norms("lm_head", a.to(dtype), b.to(dtype), SCALING).double(), want, rtol=1e-5, atol=0
    )


@each_backend
def test_norms_are_computed_beside_steps(zoo: ModelZoo, backend: KernelBackend) -> None:
    """By several threads: neither they nor the logits change by a bit."""
    decoder = load_decoder(zoo.base("qwen2"), backend=backend.name)
    name, tokens = "model.layers.0.mlp.down_proj", list(range(3, 60))
    a, b = draw(*modules_of(decoder)[name])

    def logits() -> Tensor:
        return PagedRunner(decoder, block_size=16).step([("a", tokens)])[0]

    want_norms, want_logits = decoder.row_norms(name, a, b, SCALING), logits()
    is_done, norms = threading.Event(), []

    def work() -> None:
        while not is_done.is_set():
            norms.append(torch.equal(decoder.row_norms(name, a, b, SCALING), want_norms))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        same = [torch.equal(logits(), want_logits) for _ in range(10)]
    finally:
        is_done.set()
        for thread in threads:
            thread.join()
    assert all(same)
    assert norms
    assert all(norms)


def test_on_a_gpu_norms_wait_for_no_step(zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """All on one stream, which is not the steps'."""
    decoder, streams = load_decoder(zoo.base("qwen2")), []

    @contextmanager
    def stream(given: object) -> Iterator[None]:
        streams.append(given)
        yield

    monkeypatch.setattr(decoder, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(torch.cuda, "stream", stream)
    for _ in range(2):
        decoder.row_norms("model.layers.0.mlp.down_proj", *draw(160, 64), SCALING)
    assert len(streams) == 2
    assert streams[0] is streams[1]


def test_a_name_is_of_these_weights_in_this_form(zoo: ModelZoo, tmp_path: Path) -> None:
    base = Path(shutil.copytree(zoo.base("qwen2"), tmp_path / "base"))
    config = ModelConfig.from_dir(base)

    def name(
        load_format: str = "auto", seed: int = 0, dtype: torch.dtype = torch.float32, quantization: str | None = None
    ) -> str:
        ops = get_backend("reference", CPU)
        return load_model(base, config, dtype, CPU, load_format, seed, ops, True, None, quantization).weights_name

    names = [name(), name(dtype=torch.bfloat16), name(quantization="int8"), name("dummy"), name("dummy", 1)]
    assert name() == names[0] == name(seed=1)
    os.utime(base / "model.safetensors", (0, 0))
    names.append(name())
    assert len(set(names)) == len(names)


# ----------------------------------------------------------------------------------------------------------------- peft


def packed(decoder: Decoder, layers: Mapping[str, LoRALayerWeights]) -> dict[str, SliceWeights]:
    packer = Packer(decoder.lora_targets(), BACKENDS[0], torch.float32, decoder)
    model = LoRAModel("digest", RANK, layers)
    layout = packer.lay_out(model)
    views = [torch.empty(size, dtype=torch.uint8) for size in layout.sizes]
    packer.write(model, layout, views)
    slices: dict[str, SliceWeights] = {}
    targets = {target.name: target for target in decoder.lora_targets()}
    for block in layout.blocks:
        unpacked = packer.unpack(block, views[block.extent_index])
        names = [s.module_name for s in targets[block.target_name].slices]
        slices |= {name: each for name, each in zip(names, unpacked, strict=True) if each is not None}
    return slices


def wrapped_by_peft(zoo: ModelZoo, base: Path, config: Any) -> torch.nn.Module:
    """With every parameter of the adapter drawn again."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: torch.nn.Module = peft.get_peft_model(copy.deepcopy(zoo.oracle(base).model), config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(parameter * (1 + 0.3 * noise) + 0.1 * noise * ("magnitude" not in name))
    return model


@torch.no_grad()
def assert_modules_are_pefts(
    zoo: ModelZoo, base: Path, model: torch.nn.Module, layers: Mapping[str, LoRALayerWeights]
) -> None:
    decoder = load_decoder(base)
    slices = packed(decoder, layers)
    assert slices.keys() == layers.keys()
    for name in layers:
        module, original = model.get_submodule(f"base_model.model.{name}"), zoo.oracle(base).model.get_submodule(name)
        x = torch.randn(3, original.in_features, generator=torch.Generator().manual_seed(1))
        got = applied(slices[name], x, original.weight, original.bias)
        torch.testing.assert_close(got.float(), module(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", ["none", "all", "lora_only"])
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"target_modules": ["q_proj", "o_proj"]}], ids=str)
def test_dora_is_pefts(zoo: ModelZoo, bias: str, options: Mapping[str, Any]) -> None:
    """Module by module, with biases of the base and without; trained biases replace those."""
    from peft import LoraConfig

    base = zoo.base("qwen2")
    arguments = {"r": RANK, "lora_alpha": 7, "target_modules": list(TARGET_MODULES), **options}
    model = wrapped_by_peft(zoo, base, LoraConfig(use_dora=True, bias=bias, **arguments))
    layers = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            short, trained = name.removeprefix("base_model.model."), module.get_base_layer().bias
            layers[short] = LoRALayerWeights(
                short,
                RANK,
                7.0,
                module.lora_A["default"].weight.detach(),
                module.lora_B["default"].weight.detach(),
                bias=trained.detach() if bias != "none" and trained is not None else None,
                scaling=module.scaling["default"],
                magnitude=module.lora_magnitude_vector["default"].weight.detach(),
            )
    assert_modules_are_pefts(zoo, base, model, layers)


def test_peft_has_no_dora_with_a_lora_bias() -> None:
    """When it has, its place beside the gain is to be compared here."""
    from peft import LoraConfig

    with pytest.raises(ValueError, match="lora_bias=True is not supported for DoRA"):
        LoraConfig(use_dora=True, lora_bias=True)


def test_ia3_is_pefts(zoo: ModelZoo) -> None:
    from peft import IA3Config

    base, inputs = zoo.base("qwen2"), ["down_proj", "o_proj"]
    model = wrapped_by_peft(
        zoo, base, IA3Config(target_modules=["k_proj", "v_proj", "up_proj", *inputs], feedforward_modules=inputs)
    )
    layers = {}
    for name, module in model.named_modules():
        if hasattr(module, "ia3_l") and "default" in module.ia3_l:
            short, gain = name.removeprefix("base_model.model."), module.ia3_l["default"].detach().flatten()
            field = {"input_gain" if module.is_feedforward else "gain": gain}
            layers[short] = LoRALayerWeights(short, 0, 0.0, None, None, **field)
    assert {layer.input_gain is None for layer in layers.values()} == {True, False}
    assert_modules_are_pefts(zoo, base, model, layers)
