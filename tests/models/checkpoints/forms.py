"""Quantised checkpoints that tests make by hand, number by number from the specification of each form, and beside each
the same model in plain floats: what the numbers are, in float64, is said here and not read from the product.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
Drawn = tuple[dict[str, Tensor], Tensor]
"""(tensors of one module by what stands behind its name, its weight [out, in] in float64)"""


@dataclass(frozen=True)
class FormCase:
    """draw(weight, generator): a module of about these numbers in the form. kept: the form of its integers in words,
    for kernels that read them."""

    name: str
    settings: Mapping[str, Any]
    draw: Callable[[Tensor, torch.Generator], Drawn]
    kept: str | None = None


def randint(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=generator)


def scales_of(weight: Tensor, groups: int, bits: int, dtype: torch.dtype) -> Tensor:
    """[out, groups]: such that numbers of so many bits are about as large as the weight's."""
    out = len(weight)
    spread = weight.std().item() / (0.29 * 2**bits)
    return (spread * (1 + 0.3 * torch.arange(out * groups).sin())).view(out, groups).to(dtype)


def packed(q: Tensor, bits: int) -> Tensor:
    """Unsigned numbers [..., n] -> int32 [..., ceil(n bits / 32)], lowest bits first."""
    per_word, width = 32 // bits, q.shape[-1]
    words = np.zeros((*q.shape[:-1], math.ceil(width / per_word)), dtype=np.uint32)
    for i in range(width):
        words[..., i // per_word] |= q[..., i].numpy().astype(np.uint32) << np.uint32(bits * (i % per_word))
    return torch.from_numpy(words.view(np.int32))


# ------------------------------------------------------------------------------------------------- compressed-tensors


def ct_int8(strategy: str) -> Callable[[Tensor, torch.Generator], Drawn]:
    def draw(weight: Tensor, generator: torch.Generator) -> Drawn:
        out, depth = weight.shape
        q = randint(generator, -128, 128, out, depth)
        scale = scales_of(weight, 1, 8, torch.bfloat16)
        if strategy == "tensor":
            scale = scale[:1, 0]
        tensors = {"weight": q.to(torch.int8), "weight_scale": scale}
        return tensors, q.double() * scale.double()

    return draw


def ct_asymmetric(weight: Tensor, generator: torch.Generator) -> Drawn:
    q = randint(generator, -128, 128, *weight.shape)
    scale, zero = scales_of(weight, 1, 8, torch.float32), randint(generator, -20, 20, len(weight), 1)
    tensors = {"weight": q.to(torch.int8), "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    return tensors, (q - zero).double() * scale.double()


def ct_packed(bits: int, is_symmetric: bool, is_ordered: bool = False, channel: bool = False) -> Any:
    def draw(weight: Tensor, generator: torch.Generator) -> Drawn:
        out, depth = weight.shape
        groups, centre = 1 if channel else depth // GROUP, 1 << bits - 1
        q = randint(generator, -centre, centre, out, depth)
        scale = scales_of(weight, groups, bits, torch.float16)
        zero = torch.zeros(out, groups, dtype=torch.int64)
        tensors = {
            "weight_packed": packed(q + centre, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor([out, depth]),
        }
        if not is_symmetric:
            zero = randint(generator, -3, 4, out, groups)
            tensors["weight_zero_point"] = packed((zero + centre).t(), bits).t().contiguous()
        group_of = torch.arange(depth) // (depth if channel else GROUP)
        if is_ordered:
            group_of = group_of[torch.randperm(depth, generator=generator)]
            tensors["weight_g_idx"] = group_of.to(torch.int32)
        return tensors, (q - zero[:, group_of]).double() * scale.double()[:, group_of]

    return draw


def ct_settings(form: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*o_proj"],
        "quantization_status": "compressed",
    }


def int_weights(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": True, **more}


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def mxfp4(weight: Tensor, generator: torch.Generator) -> Drawn:
    out, depth = weight.shape
    q, power = randint(generator, 0, 16, out, depth), round(math.log2(weight.std().item() / 3))
    exponents = 127 + power + randint(generator, -1, 2, out, depth // 32)
    tensors = {
        "weight_packed": (q[:, ::2] + 16 * q[:, 1::2]).to(torch.uint8),
        "weight_scale": exponents.to(torch.uint8),
    }
    numbers = torch.where(q < 8, 1.0, -1.0) * E2M1[q % 8]
    return tensors, numbers * 2.0 ** (exponents - 127).repeat_interleave(32, dim=1)


# ----------------------------------------------------------------------------------------------------------------- fp8


def e4m3(code: int) -> float:
    """float8 e4m3fn (arXiv 2209.05433): bias 7, no infinities."""
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = torch.tensor([e4m3(code) if code & 127 != 127 else math.nan for code in range(256)], dtype=torch.float64)
BLOCK = (24, 64)


def fp8(strategy: str, name: str) -> Callable[[Tensor, torch.Generator], Drawn]:
    def draw(weight: Tensor, generator: torch.Generator) -> Drawn:
        out, depth = weight.shape
        codes = randint(generator, 0, 127, out, depth) + 128 * randint(generator, 0, 2, out, depth)
        shape = {"tensor": (1,), "channel": (out, 1), "block": (math.ceil(out / BLOCK[0]), math.ceil(depth / BLOCK[1]))}
        spread = weight.std().item() / E4M3[codes].std().item()
        scale = spread * (1 + torch.rand(shape[strategy], generator=generator))
        tensors = {"weight": codes.to(torch.uint8).view(torch.float8_e4m3fn), name: scale}
        wide = scale.double()
        if strategy == "block":
            wide = torch.tensor([[wide[n // BLOCK[0], k // BLOCK[1]] for k in range(depth)] for n in range(out)])
        return tensors, E4M3[codes] * wide

    return draw


def fp8_static(weight: Tensor, generator: torch.Generator) -> Drawn:
    tensors, numbers = fp8("tensor", "weight_scale")(weight, generator)
    return {**tensors, "weight_scale": tensors["weight_scale"][0], "input_scale": torch.tensor(0.05)}, numbers


# -------------------------------------------------------------------------------------------------------- GPTQ and AWQ


def gptq(bits: int, group: int, *, is_v1: bool = True, is_symmetric: bool = True, is_ordered: bool = False) -> Any:
    def draw(weight: Tensor, generator: torch.Generator) -> Drawn:
        out, depth = weight.shape
        size = depth if group == -1 else group
        groups, centre = depth // size, 1 << bits - 1
        q = randint(generator, 0, 2 * centre, depth, out)
        scales = scales_of(weight, groups, bits, torch.float16).t().contiguous()
        zero = torch.full((groups, out), centre) if is_symmetric else randint(generator, 1, 2 * centre, groups, out)
        g_idx = torch.arange(depth) // size
        if is_ordered:
            g_idx = g_idx[torch.randperm(depth, generator=generator)]
        tensors = {
            "qweight": packed(q.t(), bits).t().contiguous(),
            "qzeros": packed(zero - 1 if is_v1 else zero, bits),
            "scales": scales,
            "g_idx": g_idx.to(torch.int32),
        }
        numbers = [[scales[g_idx[k]].double() * (q[k] - zero[g_idx[k]]).double()] for k in range(depth)]
        return tensors, torch.stack([row[0] for row in numbers], dim=1)

    return draw


def gptq_settings(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True, **more}


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(weight: Tensor, generator: torch.Generator) -> Drawn:
    out, depth = weight.shape
    groups = depth // GROUP
    q, zero = randint(generator, 0, 16, depth, out), randint(generator, 4, 12, groups, out)
    scales = scales_of(weight, groups, 4, torch.float16).t().contiguous()

    def words(numbers: Tensor) -> Tensor:
        columns = [8 * word + AWQ_ORDER[i] for word in range(out // 8) for i in range(8)]
        return packed(numbers[:, columns], 4)

    tensors = {"qweight": words(q), "qzeros": words(zero), "scales": scales}
    group_of = torch.arange(depth) // GROUP
    return tensors, ((q - zero[group_of]).double() * scales.double()[group_of]).t()


# -------------------------------------------------------------------------------------------------------- bitsandbytes


def bnb_int8(weight: Tensor, generator: torch.Generator) -> Drawn:
    q = randint(generator, -127, 128, *weight.shape)
    scb = scales_of(weight, 1, 8, torch.float32)[:, 0] * 127
    tensors = {"weight": q.to(torch.int8), "SCB": scb, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, q.double() * scb.double()[:, None] / 127


def nf4(is_nested: bool) -> Callable[[Tensor, torch.Generator], Drawn]:
    def draw(weight: Tensor, generator: torch.Generator) -> Drawn:
        size, block, nested_block = weight.numel(), 64, 256
        table = torch.cat((torch.linspace(-1, 0, 8)[:-1], torch.linspace(0, 1, 9)))
        q = randint(generator, 0, 16, size)
        num_blocks = math.ceil(size / block)
        spread = weight.std().item() / 0.6
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "float32"}
        state["shape"] = list(weight.shape)
        tensors = {"weight": (q[::2] * 16 + q[1::2]).to(torch.uint8)[:, None], "weight.quant_map": table}
        if is_nested:
            outer = spread * (0.2 + 0.1 * torch.rand(math.ceil(num_blocks / nested_block), generator=generator))
            nested_table, code = torch.linspace(-1, 1, 256), randint(generator, 0, 256, num_blocks)
            absmax = nested_table[code].double() * outer.double()[torch.arange(num_blocks) // nested_block] + spread
            tensors |= {"weight.absmax": code.to(torch.uint8), "weight.nested_absmax": outer}
            tensors["weight.nested_quant_map"] = nested_table
            state |= {"nested_blocksize": nested_block, "nested_dtype": "float32", "nested_offset": spread}
        else:
            tensors["weight.absmax"] = spread * (1 + torch.rand(num_blocks, generator=generator))
            absmax = tensors["weight.absmax"].double()
        text = json.dumps(state).encode()
        tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
        numbers = table[q].double() * absmax[torch.arange(size) // block]
        return tensors, numbers.view(weight.shape)

    return draw


BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT4, OF_ROWS = f"int4 in groups of {GROUP}", "int8 in groups of 128"
FP8_SETTINGS = {"quant_method": "fp8", "activation_scheme": "dynamic"}

CASES = {
    case.name: case
    for case in (
        FormCase("W8A8", ct_settings("int-quantized", int_weights(8, "channel")), ct_int8("channel"), "int8"),
        FormCase("W8A8 tensor", ct_settings("int-quantized", int_weights(8, "tensor")), ct_int8("tensor"), "int8"),
        FormCase(
            "W8A8 zeros",
            ct_settings("int-quantized", int_weights(8, "channel")),
            ct_asymmetric,
            f"{OF_ROWS} with zero points",
        ),
        FormCase(
            "W8A16", ct_settings("pack-quantized", int_weights(8, "channel")), ct_packed(8, True, channel=True), "int8"
        ),
        FormCase(
            "W4A16", ct_settings("pack-quantized", int_weights(4, "group", group_size=GROUP)), ct_packed(4, True), INT4
        ),
        FormCase(
            "W4A16 zeros",
            ct_settings("pack-quantized", int_weights(4, "group", group_size=GROUP)),
            ct_packed(4, False),
            f"{INT4} with zero points",
        ),
        FormCase(
            "W4A16 ordered",
            ct_settings("pack-quantized", int_weights(4, "group", group_size=GROUP, actorder="group")),
            ct_packed(4, True, is_ordered=True),
        ),
        FormCase(
            "MXFP4",
            ct_settings("mxfp4-pack-quantized", {**int_weights(4, "group", group_size=32), "type": "float"}),
            mxfp4,
            "int8 in groups of 32",
        ),
        FormCase(
            "CT FP8",
            ct_settings("float-quantized", {**int_weights(8, "channel"), "type": "float"}),
            fp8("channel", "weight_scale"),
            "fp8",
        ),
        FormCase(
            "CT FP8 block",
            ct_settings(
                "float-quantized", {**int_weights(8, "block"), "type": "float", "block_structure": list(BLOCK)}
            ),
            fp8("block", "weight_scale"),
        ),
        FormCase("FP8 block", {**FP8_SETTINGS, "weight_block_size": list(BLOCK)}, fp8("block", "weight_scale_inv")),
        FormCase("FP8 static", {**FP8_SETTINGS, "activation_scheme": "static"}, fp8_static, "fp8"),
        FormCase("GPTQ", gptq_settings(4, GROUP), gptq(4, GROUP), INT4),
        FormCase("GPTQ zeros", gptq_settings(4, GROUP), gptq(4, GROUP, is_symmetric=False), f"{INT4} with zero points"),
        FormCase("GPTQ act-order", gptq_settings(4, GROUP, desc_act=True), gptq(4, GROUP, is_ordered=True)),
        FormCase(
            "GPTQ v2",
            gptq_settings(4, GROUP, checkpoint_format="gptq_v2"),
            gptq(4, GROUP, is_v1=False, is_symmetric=False),
            f"{INT4} with zero points",
        ),
        FormCase("GPTQ 8 bits", gptq_settings(8, GROUP), gptq(8, GROUP), f"int8 in groups of {GROUP}"),
        FormCase("GPTQ 8 bits, one group", gptq_settings(8, -1), gptq(8, -1), "int8"),
        FormCase(
            "AWQ",
            {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
            awq,
            f"{INT4} with zero points",
        ),
        FormCase("NF4", BNB, nf4(False)),
        FormCase("NF4 nested", BNB, nf4(True)),
        FormCase("LLM.int8()", {"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb_int8, "int8"),
    )
}


@dataclass(frozen=True)
class Made:
    """A quantised checkpoint, and the plain one of the same numbers."""

    quantized: Path
    plain: Path


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def make(base: Path, to: Path, case: FormCase, is_plain: Callable[[str], bool] = lambda name: "o_proj" in name) -> Made:
    """`base` with its linears drawn anew in the form; those of `is_plain` as they are."""
    generator = torch.Generator().manual_seed(5)
    given = load_file(base / "model.safetensors")
    stored, numbers = dict(given), dict(given)
    for name, weight in given.items():
        if is_linear(name) and not is_plain(name):
            del stored[name]
            tensors, exact = case.draw(weight, generator)
            module = name.removesuffix(".weight")
            stored |= {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}
            numbers[name] = exact.float()
    made = Made(to / "quantized", to / "plain")
    for path, tensors in ((made.quantized, stored), (made.plain, numbers)):
        shutil.copytree(base, path)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    change_config(made.quantized, quantization_config=dict(case.settings))
    return made


def change_config(path: Path, **values: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **values}))


# ---------------------------------------------------------------------------------------------------------------- GGUF


def gguf_text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def gguf_value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<Ii", 5, value) if value < 0 else struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_text(value)
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(gguf_text(each) for each in value)


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, tuple[int, ...], bytes]]
) -> Path:
    """tensors: name -> (ggml type, shape, bytes)"""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(gguf_text(key) + gguf_value(value) for key, value in metadata.items())
    body = b""
    for name, (type_id, shape, data) in tensors.items():
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += gguf_text(name) + dims + struct.pack("<IQ", type_id, len(body))
        body += data + b"\0" * (-len(data) % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + body)
    return path
