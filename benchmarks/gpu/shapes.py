"""The models whose shapes the GPU scripts use: their linears, what an adapter weighs, their config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from loraplex.core import LoraSlice, LoraTarget


@dataclass(frozen=True)
class Shape:
    """A decoder. `others`: what config.json says besides."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int
    is_tied: bool
    family: str = "llama"
    others: dict[str, Any] = field(default_factory=dict)

    def linears(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """(in, outs of the slices) of one layer's linears, as the decoder fuses them."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (self.hidden, (q, kv, kv)),
            "o": (q, (self.hidden,)),
            "gate_up": (self.hidden, (self.inner, self.inner)),
            "down": (self.inner, (self.hidden,)),
        }

    def target(self, linear: str, layer: int = 0) -> LoraTarget:
        num_in, outs = self.linears()[linear]
        return make_target(f"layers.{layer}.{linear}", num_in, outs, layer)

    def adapter_numbers(self, rank: int) -> int:
        """Numbers of an adapter on every linear."""
        return self.layers * sum(rank * (num_in + out) for num_in, outs in self.linears().values() for out in outs)

    def weight_numbers(self) -> int:
        """Numbers that a decode step reads of the base model: every linear and the head, hardly any embedding."""
        linears = sum(num_in * sum(outs) for num_in, outs in self.linears().values())
        return self.layers * linears + self.vocab * self.hidden

    def kv_numbers(self) -> int:
        """Numbers of one token in the KV cache."""
        return self.layers * 2 * self.kv_heads * self.head_dim

    def config(self) -> dict[str, Any]:
        """As Hugging Face's config.json."""
        architecture = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[self.family]
        return {
            "architectures": [architecture], "model_type": self.family, "torch_dtype": "bfloat16", "hidden_act": "silu",
            "hidden_size": self.hidden, "intermediate_size": self.inner, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
            "vocab_size": self.vocab, "tie_word_embeddings": self.is_tied, "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 1,
        } | self.others  # fmt: skip

    def write(self, folder: Path) -> Path:
        """A model folder without weights, for `load_format=dummy`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config()))
        return folder


def make_target(name: str, num_in: int, outs: Sequence[int], layer: int = 0) -> LoraTarget:
    offsets = np.cumsum([0, *outs]).tolist()
    slices = tuple(LoraSlice(f"{name}.{i}", offsets[i], out, out) for i, out in enumerate(outs))
    return LoraTarget(name, layer, num_in, num_in, slices)


LLAMA_8B = Shape("Llama-3-8B", 4096, 14336, 32, 8, 128, 32, 128256, False, others={"rope_theta": 500000.0})
LLAMA_1B = Shape("Llama-3.2-1B", 2048, 8192, 32, 8, 64, 16, 128256, True, others={"rope_theta": 500000.0})
QWEN = Shape("Qwen2.5-0.5B", 896, 4864, 14, 2, 64, 24, 151936, True, "qwen2", {"rope_theta": 1000000.0})
TINY = Shape("tiny", 64, 96, 2, 1, 32, 2, 256, True)
"""For the interpreter."""


@dataclass(frozen=True)
class ExpertShape:
    """One layer's mixture of experts."""

    name: str
    hidden: int
    inner: int
    num_experts: int
    top_k: int

    def targets(self) -> list[LoraTarget]:
        """Gate and up, then down, of each expert."""
        found = []
        for index in range(self.num_experts):
            found.append(make_target(f"experts.{index}.gate_up", self.hidden, (self.inner, self.inner)))
            found.append(make_target(f"experts.{index}.down", self.inner, (self.hidden,)))
        return found


MIXTRAL = ExpertShape("Mixtral-8x7B", 4096, 14336, 8, 2)
QWEN_MOE = ExpertShape("Qwen3-30B-A3B", 2048, 768, 128, 8)
OLMOE = ExpertShape("OLMoE-1B-7B", 2048, 1024, 64, 8)
TINY_EXPERTS = ExpertShape("tiny", 40, 24, 3, 2)
"""For the interpreter."""

SHAPES = {shape.name: shape for shape in (LLAMA_8B, LLAMA_1B, QWEN, TINY)}


def lora_bytes(target: LoraTarget, rank: int, itemsize: float) -> int:
    """Of one adapter's weights on one linear."""
    return math.ceil(sum(rank * (target.in_features + s.out_features) for s in target.slices) * itemsize)
