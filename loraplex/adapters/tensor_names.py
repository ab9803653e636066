"""Tensor names of adapter files: which module, which part.

    [base_model.model.]<module>.lora_A[.default].weight      part lora_A.weight  [rank, in]
    [base_model.model.]<module>.lora_B[.default].weight      part lora_B.weight  [out, rank]
    [base_model.model.]<module>.lora_B[.default].bias        part lora_B.bias    [out]  (lora_bias)
    [base_model.model.]<module>[.base_layer].bias            part bias           [out]  (bias: all or lora_only)

The canonical name is `<module>.<part>`: the same adapter saved either way has the same digest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

PREFIX = "base_model.model."
PARTS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "lora_bias": "lora_B.bias", "bias": "bias"}
"""Fields of a layer -> parts of a module."""

_LORA = re.compile(r"(?P<module>.+)\.(?P<part>lora_[AB])(?:\.default)?\.(?P<kind>weight|bias)")
_EMBEDDINGS = "adapters on embeddings are not supported yet; train without embed_tokens and lm_head in target_modules"
_REFUSED = (
    ("lora_embedding_", _EMBEDDINGS),
    ("lora_magnitude_vector", "DoRA is not supported yet; train a plain LoRA"),
    ("modules_to_save", "fully trained modules are not supported yet; train without modules_to_save"),
    ("trainable_tokens", "trained token embeddings are not supported yet; train without trainable_token_indices"),
    ("lora_velora", "VeLoRA's training buffers are not wanted at inference; drop them"),
    ("lora_diag", "KaSA is not supported; train a plain LoRA"),
    ("embed_tokens", "saved embeddings are not supported yet; save with save_embedding_layers=False"),
    ("lm_head", "a saved output layer is not supported yet; save with save_embedding_layers=False"),
)


class TensorName(NamedTuple):
    """Where a tensor of an adapter belongs."""

    module: str
    part: str

    @property
    def canonical(self) -> str:
        return f"{self.module}.{self.part}"


def parse_tensor_name(name: str) -> TensorName | None:
    """None for a name that is no part of a LoRA."""
    bare = name.removeprefix(PREFIX)
    match = _LORA.fullmatch(bare)
    if match is not None:
        part = f"{match['part']}.{match['kind']}"
        return TensorName(match["module"], part) if part in PARTS.values() else None
    if bare.endswith(".bias") and ".lora_" not in bare:
        return TensorName(bare.removesuffix(".bias").removesuffix(".base_layer"), "bias")
    return None


def why_unknown(name: str) -> str:
    """What to say about a name that `parse_tensor_name` does not know."""
    unknown = "it is no part of a LoRA (lora_A.weight, lora_B.weight, lora_B.bias, bias); is this a PEFT adapter?"
    return next((reason for part, reason in _REFUSED if part in name), unknown)


def unused_reasons(names: Iterable[str]) -> list[str]:
    """A reason for each kind of names that `parse_tensor_name` does not know: DoRA has one in every module."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(why_unknown(name), []).append(name)
    return [f"{_counted(found)} not used: {why}" for why, found in kinds.items()]


def _counted(names: list[str]) -> str:
    return f"{len(names)} tensors such as {names[0]!r} are" if names[1:] else f"tensor {names[0]!r} is"
