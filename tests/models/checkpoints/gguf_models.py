"""GGUF files of random models, written by hand, and the same models in Hugging Face's form."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.checkpoints.forms import Made, is_linear, write_gguf

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

BLOCKS = {"Q4_0": (2, 32, 18), "Q5_0": (6, 32, 22), "Q8_0": (8, 32, 34), "Q4_K": (12, 256, 144), "Q6_K": (14, 256, 210)}
"""ggml's number, numbers and bytes of a block."""

FLOATS = {"F32": (0, torch.float32), "F16": (1, torch.float16), "BF16": (30, torch.bfloat16)}
SCALES_AT = {"Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}
"""Bytes of a block at which float16s are."""


def half(block: np.ndarray[Any, Any], at: int) -> float:
    return float(block[at : at + 2].view(np.float16)[0])


def q4_0(b: np.ndarray[Any, Any]) -> list[float]:
    return [half(b, 0) * ((int(b[2 + i % 16]) >> 4 * (i // 16) & 15) - 8) for i in range(32)]


def q5_0(b: np.ndarray[Any, Any]) -> list[float]:
    bits = int(b[2:6].view(np.uint32)[0])
    return [half(b, 0) * ((int(b[6 + i % 16]) >> 4 * (i // 16) & 15 | (bits >> i & 1) << 4) - 16) for i in range(32)]


def q8_0(b: np.ndarray[Any, Any]) -> list[float]:
    return [half(b, 0) * int(b[2 + i].view(np.int8)) for i in range(32)]


def q4_k(b: np.ndarray[Any, Any]) -> list[float]:
    """ggml-quants.c, dequantize_row_q4_K with get_scale_min_k4."""
    packed, numbers = [int(each) for each in b[4:16]], [0.0] * 256
    for group in range(8):
        if group < 4:
            scale, least = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = packed[group + 4] & 15 | (packed[group - 4] >> 6) << 4
            least = packed[group + 4] >> 4 | (packed[group] >> 6) << 4
        for i in range(32):
            q = int(b[16 + group // 2 * 32 + i]) >> 4 * (group % 2) & 15
            numbers[32 * group + i] = half(b, 0) * scale * q - half(b, 2) * least
    return numbers


def q6_k(b: np.ndarray[Any, Any]) -> list[float]:
    """ggml-quants.c, dequantize_row_q6_K."""
    numbers, scales = [0.0] * 256, b[192:208].view(np.int8)
    for part in range(2):
        for i in range(128):
            low = int(b[64 * part + i % 64]) >> 4 * (i // 64) & 15
            high = int(b[128 + 32 * part + i % 32]) >> 2 * (i // 32) & 3
            numbers[128 * part + i] = half(b, 208) * int(scales[8 * part + i // 16]) * ((low | high << 4) - 32)
    return numbers


NUMBERS: dict[str, Callable[[np.ndarray[Any, Any]], list[float]]] = {
    "Q4_0": q4_0, "Q5_0": q5_0, "Q8_0": q8_0, "Q4_K": q4_k, "Q6_K": q6_k
}  # fmt: skip


def drawn(name: str, weight: Tensor, generator: torch.Generator) -> tuple[bytes, Tensor]:
    """(random blocks whose numbers are about as large as the weight's, these numbers in float64)"""
    _, size, num_bytes = BLOCKS[name]
    num_blocks = weight.numel() // size
    raw = torch.randint(0, 256, (num_blocks, num_bytes), dtype=torch.uint8, generator=generator).numpy()
    for at in SCALES_AT[name]:
        raw[:, at : at + 2] = np.full((num_blocks, 1), 1.0, np.float16).view(np.uint8)
    spread = float(np.std([NUMBERS[name](block) for block in raw[:8]]))
    for at in SCALES_AT[name]:
        scales = weight.std().item() / spread * (1 + 0.3 * np.sin(np.arange(num_blocks)))
        raw[:, at : at + 2] = scales.astype(np.float16)[:, None].view(np.uint8)
    numbers = torch.tensor([NUMBERS[name](block) for block in raw], dtype=torch.float64)
    return raw.tobytes(), numbers.view(weight.shape)


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in NAMES:
        return f"{NAMES[module]}.{kind}"
    layer, _, rest = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[rest]}.{kind}"


def in_ggml_order(rows: Tensor, heads: int) -> Tensor:
    """convert_hf_to_gguf.py, LlamaModel.permute"""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def metadata_of(config: dict[str, Any], arch: str) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    return {
        "general.architecture": arch,
        "general.name": "random",
        "tokenizer.ggml.tokens": ["a", "b"],
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.attention.key_length": config.get("head_dim") or config["hidden_size"] // heads,
        f"{arch}.attention.value_length": config.get("head_dim") or config["hidden_size"] // heads,
        f"{arch}.rope.freq_base": float(rope.get("rope_theta", 10000.0)),
    }


def make_gguf(base: Path, to: Path, arch: str, kinds: tuple[str, ...], more: dict[str, Any] | None = None) -> Made:
    """`base` with its linears and embedding drawn anew, in these types in turn; norms and biases in F32."""
    generator = torch.Generator().manual_seed(5)
    config = json.loads((base / "config.json").read_text())
    given, numbers = load_file(base / "model.safetensors"), {}
    tensors: dict[str, tuple[int, tuple[int, ...], bytes]] = {}
    for index, (name, weight) in enumerate(sorted(given.items())):
        kind = kinds[index % len(kinds)] if is_linear(name) or "embed_tokens" in name else "F32"
        if kind in FLOATS:
            type_id, dtype = FLOATS[kind]
            stored = weight.to(dtype)
            numbers[name], raw = stored.float(), stored
            if arch == "llama" and any(part in name for part in ("q_proj", "k_proj")):
                raw = in_ggml_order(stored, _heads(config, name))
            tensors[gguf_name(name)] = (
                type_id,
                tuple(weight.shape),
                raw.contiguous().view(torch.uint8).numpy().tobytes(),
            )
            continue
        data, exact = drawn(kind, weight, generator)
        if arch == "llama" and any(part in name for part in ("q_proj", "k_proj")):  # what is drawn is in ggml's order
            heads = _heads(config, name)
            exact = exact.reshape(heads, -1, 2, exact.shape[1]).transpose(1, 2).reshape(exact.shape)
        numbers[name] = exact.float()
        tensors[gguf_name(name)] = (BLOCKS[kind][0], tuple(weight.shape), data)
    to.mkdir(parents=True)
    shutil.copytree(base, to / "plain")
    save_file({name: each.contiguous() for name, each in numbers.items()}, to / "plain" / "model.safetensors")
    file = write_gguf(to / "model.gguf", metadata_of(config, arch) | (more or {}), tensors)
    return Made(file, to / "plain")


def _heads(config: dict[str, Any], name: str) -> int:
    return int(config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
