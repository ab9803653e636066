"""What the forms' own libraries make of the same tensors: the numbers are theirs, bit for bit."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from loraplex.models.checkpoints.bitsandbytes import Bitsandbytes
from loraplex.models.checkpoints.compressed_tensors import CompressedTensors
from loraplex.models.checkpoints.gguf_blocks import BLOCK_TYPES
from tests.models.checkpoints.forms import ct_settings, int_weights

SHAPE = (24, 512)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", [kind.name for kind in BLOCK_TYPES.values()])
def test_blocks_of_gguf_are_the_librarys(name: str) -> None:
    """Of random bytes; the scales, which are random floats of 16 bits, are finite."""
    gguf = pytest.importorskip("gguf")
    kind = next(kind for kind in BLOCK_TYPES.values() if kind.name == name)
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (40, kind.num_bytes), dtype=torch.uint8, generator=generator)
    raw[:, 1::2] &= 0xBF  # no float16 of largest exponent
    want = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[name])
    got = kind.numbers(raw)
    assert got.dtype == torch.float32
    np.testing.assert_array_equal(got.numpy().reshape(want.shape), want)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q5_0", "Q5_1", "Q4_1"])
def test_what_gguf_quantises_comes_back(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    kind = next(kind for kind in BLOCK_TYPES.values() if kind.name == name)
    weight = drawn(*SHAPE)
    raw = torch.from_numpy(gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[name]))
    got = kind.numbers(raw.reshape(-1, kind.num_bytes)).view(SHAPE)
    assert (got - weight).square().mean().sqrt() < (0.01 if name == "Q8_0" else 0.12)


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group", "block"])
@pytest.mark.parametrize("kind", ["int4", "int8", "float8"])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_compressed_tensors_are_the_librarys(strategy: str, kind: str, is_symmetric: bool) -> None:
    """Quantised, compressed and decompressed by it."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationType
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    if kind == "float8" and (strategy == "group" or not is_symmetric):
        pytest.skip("llm-compressor does not write it")
    if strategy == "block" and (kind != "float8"):
        pytest.skip("llm-compressor does not write it")
    bits, kind_of = (8, "float") if kind == "float8" else (int(kind[3:]), "int")
    more: dict[str, Any] = {"group": {"group_size": 128}, "block": {"block_structure": [8, 128]}}.get(strategy, {})
    arguments = QuantizationArgs(
        num_bits=bits, type=QuantizationType(kind_of), strategy=strategy, symmetric=is_symmetric, **more
    )
    weight = drawn(*SHAPE)
    low, high = _bounds(weight, strategy)
    scale, zero = calculate_qparams(low, high, arguments)
    q = quantize(weight, scale, zero, arguments, dtype=torch.int8 if kind_of == "int" else torch.float8_e4m3fn)
    want = dequantize(q, scale, zero, arguments, dtype=torch.float32)
    form = ct_settings("naive-quantized", {**int_weights(bits, strategy), "type": kind_of, **more})
    tensors = {"weight": q, "weight_scale": scale, "weight_zero_point": zero}
    if kind == "int4" and strategy != "tensor":
        form["format"] = "pack-quantized"
        tensors = _packed(q, scale, None if is_symmetric else zero, arguments)
    read = CompressedTensors.of(form).weight("m", SHAPE, tensors)
    torch.testing.assert_close(read.rows(0, SHAPE[0]), want, rtol=0, atol=0)


def _bounds(weight: torch.Tensor, strategy: str) -> tuple[torch.Tensor, torch.Tensor]:
    out, depth = weight.shape
    views = {
        "tensor": weight.view(1, -1),
        "channel": weight.view(out, 1, depth),
        "group": weight.view(out, -1, 128),
        "block": weight.view(out // 8, 8, depth // 128, 128).transpose(1, 2).flatten(2),
    }
    view = views[strategy]
    return view.amin(-1), view.amax(-1)


def _packed(q: torch.Tensor, scale: torch.Tensor, zero: Any, arguments: Any) -> dict[str, torch.Tensor]:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    tensors = {"weight_packed": pack_to_int32(q, arguments.num_bits), "weight_scale": scale}
    if zero is not None:
        words = pack_to_int32(zero.to(torch.int8), arguments.num_bits, packed_dim=0)
        tensors["weight_zero_point"] = words.contiguous()
    return tensors | {"weight_shape": torch.tensor(q.shape)}


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_four_bits_of_bitsandbytes_are_the_librarys(kind: str, is_nested: bool, dtype: torch.dtype) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    functional = bitsandbytes.functional
    weight = drawn(*SHAPE).to(dtype)
    q, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=is_nested)
    want = functional.dequantize_4bit(q, state).float()
    tensors = {"weight": q} | {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    read = Bitsandbytes().weight("m", SHAPE, tensors)
    torch.testing.assert_close(read.rows(0, SHAPE[0]), want, rtol=0, atol=0)
    assert json.loads(bytes(tensors[f"weight.quant_state.bitsandbytes__{kind}"].tolist()))["quant_type"] == kind
