"""What a checkpoint says wrongly of itself is refused with the tensor, what it is and what it has to be."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from loraplex.errors import ModelConfigError, ModelWeightError
from loraplex.models.checkpoints.mxfp4 import dequantized
from loraplex.models.config import ModelConfig
from tests.fixtures import ModelZoo
from tests.models.checkpoints.forms import CASES, GROUP, change_config, make
from tests.models.checkpoints.test_forms import decoder_of

UP = "model.layers.1.mlp.up_proj"
Change = Callable[[dict[str, Tensor]], Any]


def drop(suffix: str) -> Change:
    return lambda tensors: tensors.pop(f"{UP}.{suffix}")


def put(suffix: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors.update({f"{UP}.{suffix}": change(tensors[f"{UP}.{suffix}"]).contiguous()})


def state(**values: Any) -> Change:
    suffix = "weight.quant_state.bitsandbytes__nf4"

    def changed(given: Tensor) -> Tensor:
        text = json.dumps({**json.loads(bytes(given.tolist())), **values})
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    return put(suffix, changed)


def with_index(value: int) -> Callable[[Tensor], Tensor]:
    return lambda index: torch.cat((index[:-1], torch.tensor([value], dtype=index.dtype)))


WRONG = [
    ("W8A8", drop("weight_scale"), "up_proj.weight_scale is missing beside model.layers.1.mlp.up_proj.weight"),
    ("W8A8", put("weight_scale", lambda t: t[:-1]), "weight_scale has shape (159, 1) and has to have"),
    ("W8A8", put("weight", lambda t: t[:, :-1]), "up_proj.weight has shape (160, 63) and has to have (160, 64)"),
    ("W8A8", put("weight", lambda t: t.to(torch.int16)), "up_proj.weight is int16 and has to be int8 or float8_e4m3fn"),
    (
        "W4A16",
        put("weight_packed", lambda t: t[:, :-1]),
        "weight_packed has shape (160, 7) and has to have (160, 8) for 4",
    ),
    ("W4A16", put("weight_shape", lambda t: t + 1), "up_proj.weight_shape is [161, 65], the model's config.json asks"),
    ("W4A16", put("weight_scale", lambda t: t[:, :1].repeat(1, 3)), "has to have groups of (32,) for 64 inputs"),
    (
        "W4A16 zeros",
        put("weight_zero_point", lambda t: t[:-1]),
        "weight_zero_point has shape (19, 2) and has to have (20",
    ),
    (
        "W4A16 ordered",
        put("weight_g_idx", with_index(2)),
        "weight_g_idx names groups 0 to 2, and there are groups 0 to 1",
    ),
    (
        "FP8 block",
        put("weight_scale_inv", lambda t: t[:-1]),
        "weight_scale_inv has shape (6, 1) and has to have (7, 1)",
    ),
    (
        "FP8 block",
        put("weight", lambda t: t.to(torch.bfloat16)),
        "up_proj.weight is bfloat16 and has to be float8_e4m3fn",
    ),
    ("GPTQ", drop("scales"), "up_proj.scales is missing"),
    ("GPTQ", put("qweight", lambda t: t[:-1]), "qweight has shape (7, 160) and has to have (8, 160) for 4 bits"),
    ("GPTQ", put("qzeros", lambda t: t[:, :-1]), "qzeros has shape (2, 19) and has to have (2, 20)"),
    ("GPTQ act-order", put("g_idx", with_index(-2)), "up_proj.g_idx names groups -2 to 1, and there are groups 0 to 1"),
    ("GPTQ act-order", put("g_idx", lambda t: t[:-1]), "up_proj.g_idx has shape (63,) and has to have (64,)"),
    ("AWQ", put("qweight", lambda t: t[:, :-1]), "qweight has shape (64, 19) and has to have (64, 160 / 8)"),
    ("AWQ", put("scales", lambda t: t.to(torch.int32)), "up_proj.scales is int32 and has to be float32 or float16"),
    ("NF4", drop("weight.absmax"), "up_proj.weight.absmax is missing"),
    ("NF4", put("weight", lambda t: t[:-1]), "up_proj.weight has shape (5119, 1) and has to have (5120, 1)"),
    ("NF4", state(blocksize=0), "its state has blocksize 0, not a whole number >= 1"),
    ("NF4", state(shape=[64, 160]), "has shape [64, 160] in its state, the model's config.json asks for (160, 64)"),
    ("NF4", state(dtype="int8"), "its state has dtype 'int8', not a float type"),
    ("NF4 nested", state(nested_offset="1"), "its state has nested_offset '1', not a number"),
    ("LLM.int8()", put("SCB", lambda t: t[1:]), "up_proj.SCB has shape (159,) and has to have (160,)"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wrong")


@pytest.mark.parametrize(("form", "change", "message"), WRONG, ids=[f"{each[0]}-{each[2][:30]}" for each in WRONG])
def test_a_wrong_tensor_is_named(zoo: ModelZoo, folder: Path, form: str, change: Change, message: str) -> None:
    path = folder / form
    if not path.exists():
        make(zoo.base("qwen2"), path, CASES[form])
    changed = Path(shutil.copytree(path / "quantized", folder / "changed", dirs_exist_ok=True))
    tensors = load_file(path / "quantized" / "model.safetensors")
    change(tensors)
    save_file(tensors, changed / "model.safetensors")
    with pytest.raises(ModelWeightError, match=re.escape(message)):
        decoder_of(changed, "torch")


def test_tensors_beside_a_weight_that_are_not_of_its_form_are_named(zoo: ModelZoo, tmp_path: Path) -> None:
    """Biases of zeros, which old files have, and scales of activations and of the KV cache are left aside."""
    path = make(zoo.base("llama"), tmp_path, CASES["GPTQ"]).quantized
    file = path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, f"{UP}.bias": torch.zeros(160)}, file)
    decoder_of(path, "torch")
    save_file({**tensors, f"{UP}.bias": torch.ones(160)}, file)
    with pytest.raises(ModelWeightError, match=r"1 not used by the model: model\.layers\.1\.mlp\.up_proj\.bias$"):
        decoder_of(path, "torch")
    save_file({**tensors, f"{UP}.lut": torch.ones(160)}, file)
    with pytest.raises(ModelWeightError, match=r"1 not used by the model: model\.layers\.1\.mlp\.up_proj\.lut$"):
        decoder_of(path, "torch")
    for name in ("qweight", "qzeros", "scales", "g_idx"):
        tensors.pop(f"{UP}.{name}")
    save_file(tensors, file)
    with pytest.raises(ModelWeightError, match=r"1 missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        decoder_of(path, "torch")


def test_quantised_tensors_without_a_word_in_the_config_are_refused(zoo: ModelZoo, tmp_path: Path) -> None:
    path = make(zoo.base("llama"), tmp_path, CASES["LLM.int8()"]).quantized
    change_config(path, quantization_config=None)
    with pytest.raises(ModelWeightError, match=r"not used by the model: .*\.SCB"):
        decoder_of(path, "torch")


GROUPED = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            "'nvfp4-pack-quantized' is not suppor",
        ),
        ({"quant_method": "compressed-tensors", "transform_config": {"R1": {}}}, "transform_config is not supported"),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "marlin-24"}}, "sparsity_config is not"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 3}}}},
            "config_groups.a: 3 bits of int are not supported; int4, int8 and float8 are",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"strategy": "tensor_group"}}}},
            "strategy 'tensor_group' is not supported",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": [GROUPED]}, "config_groups must be an object"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"group_size": "x"}}}},
            "group_size must be a whole number >= 1, or -1, got 'x'",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128]},
            "the block size must be two whole numbers >= 1, got [128]",
        ),
        ({"quant_method": "fp8", "activation_scheme": "none"}, "activation_scheme 'none' is not supported"),
        ({"quant_method": "gptq", "bits": 3}, "bits=3 is not supported; only 4 and 8"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv' is not supported; only gemm"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point=false is not supported; only true"),
        (
            {"quant_method": "bitsandbytes", "bnb_4bit_quant_storage": "bfloat16"},
            "'bfloat16' is not supported; only uint8",
        ),
    ],
)
def test_settings_that_are_not_honoured_are_refused(
    zoo: ModelZoo, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    path = Path(shutil.copytree(zoo.base("llama"), tmp_path / "m"))
    change_config(path, quantization_config=settings)
    with pytest.raises(ModelConfigError, match=re.escape(message)):
        ModelConfig.from_dir(path)


# --------------------------------------------------------------------------------------------------------------- mxfp4


def test_mxfp4_is_its_specification() -> None:
    """E2M1 with bias 1, times a power of two for 32 numbers."""
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (2, 3, 4, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 140, (2, 3, 4), dtype=torch.uint8, generator=generator)
    got = dequantized(blocks, scales)
    assert got.shape == (2, 3, 128)

    def number(code: int) -> float:
        exponent, mantissa = code >> 1 & 3, code & 1
        value = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        return -value if code & 8 else value

    for expert, row, column in ((0, 0, 0), (1, 2, 127), (0, 1, 33), (1, 0, 64)):
        block, i = divmod(column, 32)
        code = int(blocks[expert, row, block, i // 2]) >> 4 * (i % 2) & 15
        assert got[expert, row, column] == number(code) * 2.0 ** (int(scales[expert, row, block]) - 127)
    with pytest.raises(ValueError, match="blocks have 16 more"):
        dequantized(blocks, scales[:, :, :3])
    with pytest.raises(ValueError, match="have to be uint8"):
        dequantized(blocks.float(), scales)
