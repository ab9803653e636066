"""GGUF files of the architectures llama (Llama, Mistral), qwen2 and qwen3: a config.json of their metadata, and their
tensors under the names of Hugging Face.

Files of llama have the rows of q and k in the order in which ggml turns pairs of neighbours:
    row (head, i, half) of the file = row (head, half, i) of the checkpoint, which is what comes out here
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loraplex.errors import ModelConfigError, ModelWeightError, shown
from loraplex.kernels.quantized_weights import Int4Weight, Int8GroupWeight, QuantizedSpecification
from loraplex.models.checkpoints.gguf_blocks import BLOCK_TYPES, FLOAT_TYPES, half
from loraplex.models.checkpoints.gguf_file import GgufHeader, GgufTensor
from loraplex.models.checkpoints.stored import KeptForm

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""general.architecture -> model_type."""

PERMUTED = ("llama",)
"""Architectures whose q and k are in ggml's order."""

ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
NEUTRAL = {"rope.scale_linear": (0, 1), "attention.scale": (0,), "attention.sliding_window": (0,)}
"""Keys that would change the mathematics, with the values under which they do not."""

_LAYER = re.compile(r"blk\.(\d{1,4})\.([a-z_]{1,32})\.(weight|bias)")

LLAMA3_ROPE: Mapping[str, Any] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What Llama 3.1 and later have; a file says only what comes of it, which is compared."""


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A weight [out, in] of blocks. raw: uint8 [out, bytes of a row]; order: row n's place in the file, or None."""

    shape: tuple[int, int]
    raw: Tensor
    type_id: int
    order: Tensor | None

    @property
    def kept(self) -> KeptForm | None:
        kind = BLOCK_TYPES[self.type_id]
        return KeptForm(f"int{kind.bits}", kind.size) if kind.bits else None

    def rows(self, first: int, last: int) -> Tensor:
        return BLOCK_TYPES[self.type_id].numbers(self._blocks(first, last)).view(last - first, self.shape[1])

    def integers(self) -> QuantizedSpecification:
        kind, blocks = BLOCK_TYPES[self.type_id], self._blocks(0, self.shape[0])
        assert kind.bits, kind.name
        q, scale = kind.of(blocks).reshape(self.shape), half(blocks, 0).view(self.shape[0], -1)
        if kind.bits == 8:
            return Int8GroupWeight.kept(q.contiguous(), scale, None, kind.size)
        return Int4Weight.kept((q + 8).to(torch.uint8), scale, None, kind.size)

    def _blocks(self, first: int, last: int) -> Tensor:
        """uint8 [blocks, bytes]"""
        rows = self.raw[first:last] if self.order is None else self.raw[self.order[first:last]]
        return rows.reshape(-1, BLOCK_TYPES[self.type_id].num_bytes)


class GgufFile:
    """One file, whose tensors are views of its memory map. Raises ModelConfigError for what is not read."""

    def __init__(self, path: Path) -> None:
        self.header = GgufHeader.read(path)
        arch = self.header.metadata.get("general.architecture")
        if not isinstance(arch, str) or arch not in ARCHITECTURES:
            raise ModelConfigError(
                f"{path}: general.architecture {shown(arch)} is not supported; supported are {', '.join(ARCHITECTURES)}"
            )
        self._arch = arch
        self._of: dict[str, GgufTensor] = {}
        for name, tensor in self.header.tensors.items():
            if name != ROPE_FACTORS:
                if (own := _hf_name(name)) in self._of:
                    raise ModelConfigError(f"{path}: {shown(name)} and another tensor are both {own}")
                self._of[own] = tensor
                self._check(tensor)

    @property
    def names(self) -> Sequence[str]:
        """As Hugging Face has them; of a tensor that no model here has, the file's."""
        return tuple(self._of)

    @property
    def tensors(self) -> Mapping[str, GgufTensor]:
        """By `names`."""
        return self._of

    @property
    def title(self) -> str:
        """With the types of its matrices."""
        names = {type_name(tensor.type_id) for tensor in self._of.values() if len(tensor.shape) == 2}
        return f"GGUF ({', '.join(sorted(names))})"

    def tensor(self, name: str) -> Tensor:
        """A tensor of plain floats."""
        tensor = self._of[name]
        if tensor.type_id not in FLOAT_TYPES:
            raise ModelWeightError(f"{tensor.name} is {type_name(tensor.type_id)} and has to be floats")
        values = self._bytes(tensor).view(FLOAT_TYPES[tensor.type_id]).view(tensor.shape)
        order = self._order(name, tensor)
        return values if order is None else values[order]

    def stored(self, name: str, shape: tuple[int, ...]) -> BlockWeight | None:
        """A weight of blocks; None: it is plain floats. ModelWeightError for another shape."""
        tensor = self._of[name]
        if tensor.type_id in FLOAT_TYPES:
            return None
        if tensor.shape != shape or len(shape) != 2:
            raise ModelWeightError(
                f"weight {name} ({tensor.name}) has shape {tensor.shape}, the metadata asks for {tuple(shape)}"
            )
        return BlockWeight(
            (shape[0], shape[1]), self._bytes(tensor).view(shape[0], -1), tensor.type_id, self._order(name, tensor)
        )

    def used(self, names: Collection[str]) -> tuple[set[str], list[str]]:
        """As CheckpointFiles."""
        return set(names), [name for name in names if name not in self._of]

    def _order(self, name: str, tensor: GgufTensor) -> Tensor | None:
        """The row of the file that is row n of the checkpoint."""
        is_q, is_k = ".self_attn.q_proj." in name, ".self_attn.k_proj." in name
        if self._arch not in PERMUTED or not (is_q or is_k):
            return None
        heads = self._number("attention.head_count")
        if is_k:
            heads = self._number("attention.head_count_kv", heads)
        if tensor.shape[0] % (2 * heads):
            raise ModelWeightError(f"{tensor.name} has {tensor.shape[0]} rows, which {heads} heads cannot share evenly")
        return torch.arange(tensor.shape[0]).view(heads, -1, 2).transpose(1, 2).flatten()

    def _check(self, tensor: GgufTensor) -> None:
        path, count = self.header.path, int(np.prod(tensor.shape))
        if tensor.type_id in FLOAT_TYPES:
            num_bytes = count * FLOAT_TYPES[tensor.type_id].itemsize
        elif tensor.type_id in BLOCK_TYPES:
            kind = BLOCK_TYPES[tensor.type_id]
            if tensor.shape[-1] % kind.size:
                what = f"{shown(tensor.name)} has rows of {tensor.shape[-1]}, {kind.name} has blocks of {kind.size}"
                raise ModelConfigError(f"{path}: {what}")
            num_bytes = count // kind.size * kind.num_bytes
        else:
            known = ", ".join(type_name(each) for each in (*FLOAT_TYPES, *BLOCK_TYPES))
            raise ModelConfigError(
                f"{path}: {shown(tensor.name)} has ggml type {tensor.type_id}, which is not supported; supported are "
                f"{known}"
            )
        if (end := tensor.offset + num_bytes) > self.header.num_bytes:
            what = f"{shown(tensor.name)} ends at byte {end} of {self.header.num_bytes}"
            raise ModelConfigError(f"{path}: {what}; the file is truncated")

    def num_bytes(self, tensor: GgufTensor) -> int:
        """What it takes in the file."""
        count = int(np.prod(tensor.shape))
        kind = BLOCK_TYPES.get(tensor.type_id)
        return count * FLOAT_TYPES[tensor.type_id].itemsize if kind is None else count // kind.size * kind.num_bytes

    def _bytes(self, tensor: GgufTensor) -> Tensor:
        return self._data[tensor.offset : tensor.offset + self.num_bytes(tensor)]

    @cached_property
    def _data(self) -> Tensor:
        with self.header.path.open("rb") as file:  # a private map: torch wants memory that may be written
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return torch.frombuffer(data, dtype=torch.uint8)

    # ------------------------------------------------------------------------------------------------------ config

    def config(self) -> dict[str, Any]:
        """As a config.json of Hugging Face would have it."""
        hidden, heads = self._number("embedding_length"), self._number("attention.head_count")
        head_dim = self._number("attention.key_length", hidden // heads)
        if self._number("rope.dimension_count", head_dim) != head_dim:
            raise self._refuse("rope.dimension_count", f"only {head_dim}, the size of a head")
        if self._number("attention.value_length", head_dim) != head_dim:
            raise self._refuse("attention.value_length", f"only {head_dim}, as the keys have")
        if self._given("expert_count"):
            raise self._refuse("expert_count", "only models without experts")
        for key, neutral in NEUTRAL.items():
            if self._given(key, 0) not in neutral:
                raise self._refuse(key, f"only {' or '.join(map(str, neutral))}")
        theta = self._given("rope.freq_base", 10000.0)
        if type(theta) not in (int, float) or not theta > 0:
            raise self._refuse("rope.freq_base", "a number > 0")
        if (num_layers := self._number("block_count")) > len(self._of):
            raise self._refuse("block_count", f"at most {len(self._of)}, the number of tensors")
        embedding = self._of.get("model.embed_tokens.weight")
        if embedding is None:
            raise ModelConfigError(f"{self.header.path}: has no token_embd.weight")
        config: dict[str, Any] = {
            "model_type": ARCHITECTURES[self._arch],
            "vocab_size": embedding.shape[0],
            "hidden_size": hidden,
            "intermediate_size": self._number("feed_forward_length"),
            "num_hidden_layers": num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self._number("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": self._given("attention.layer_norm_rms_epsilon", 1e-6),
            "max_position_embeddings": self._number("context_length"),
            "rope_theta": theta,
            "tie_word_embeddings": "lm_head.weight" not in self._of,
            "dtype": self._dtype(),
        }
        if self._arch != "qwen2":
            config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in self._of
        return config | self._rope(head_dim, float(theta))

    def _rope(self, head_dim: int, theta: float) -> dict[str, Any]:
        kind, factor = self._given("rope.scaling.type", "none"), self._given("rope.scaling.factor", 1.0)
        if (tensor := self.header.tensors.get(ROPE_FACTORS)) is not None:
            return {"rope_scaling": self._llama3_rope(tensor, head_dim, theta)}
        if kind == "none" or factor == 1:
            return {}
        if kind == "linear":
            return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
        if kind == "yarn":
            original = self._given("rope.scaling.original_context_length")
            return {
                "rope_scaling": {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
            }
        raise self._refuse("rope.scaling.type", "only none, linear and yarn")

    def _llama3_rope(self, tensor: GgufTensor, head_dim: int, theta: float) -> dict[str, Any]:
        """The factors by which frequencies are divided are those of Llama 3 with the largest of them, or refused."""
        from loraplex.layers.common import ROPE_RULES, RopeParameters

        self._check(tensor)
        if tensor.type_id != 0 or tensor.shape != (head_dim // 2,):
            raise ModelConfigError(f"{self.header.path}: {ROPE_FACTORS} has to be F32 of shape ({head_dim // 2},)")
        factors = self._bytes(tensor).view(torch.float32)
        rope: dict[str, Any] = {"rope_type": "llama3", "factor": float(factors.max()), **LLAMA3_ROPE}
        if rope["factor"] > 0:
            plain = ROPE_RULES["default"](head_dim, RopeParameters(rope_theta=theta))
            scaled = ROPE_RULES["llama3"](head_dim, RopeParameters(rope_theta=theta, **rope))
            if torch.allclose(plain / factors, scaled, rtol=1e-4, atol=0):
                return rope
        raise ModelConfigError(f"{self.header.path}: the factors of {ROPE_FACTORS} are not those of Llama 3")

    def _dtype(self) -> str:
        """That of plain files; of others bfloat16, in which any weight and any activation has its place."""
        types = {tensor.type_id for name, tensor in self._of.items() if len(tensor.shape) == 2}
        if len(types) == 1 and (only := next(iter(types))) in FLOAT_TYPES:
            return str(FLOAT_TYPES[only]).removeprefix("torch.")
        return "bfloat16"

    def _given(self, key: str, default: Any = None) -> Any:
        """A float32 is the shortest decimal that it is nearest to: 1e-05, as config.json has it."""
        value = self.header.metadata.get(f"{self._arch}.{key}", default)
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def _number(self, key: str, default: int | None = None) -> int:
        value = self._given(key, default)
        if type(value) is not int or value < 1:
            raise self._refuse(key, "a whole number >= 1")
        return value

    def _refuse(self, key: str, wanted: str) -> ModelConfigError:
        return ModelConfigError(
            f"{self.header.path}: {self._arch}.{key}={shown(self._given(key))} is not supported; it has to be {wanted}"
        )


def _hf_name(name: str) -> str:
    if (match := _LAYER.fullmatch(name)) and match[2] in IN_LAYER:
        return f"model.layers.{match[1]}.{IN_LAYER[match[2]]}.{match[3]}"
    module, _, part = name.rpartition(".")
    return f"{ENDS[module]}.{part}" if module in ENDS else name


def type_name(type_id: int) -> str:
    if type_id in BLOCK_TYPES:
        return BLOCK_TYPES[type_id].name
    return {0: "F32", 1: "F16", 30: "BF16"}.get(type_id, f"type {type_id}")
