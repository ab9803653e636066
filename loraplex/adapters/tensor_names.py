"""Tensor names of adapter files: which module, which part.

    [base_model.model.]<module>.lora_A[.default].weight            part lora_A.weight          [rank, in]
    [base_model.model.]<module>.lora_B[.default].weight            part lora_B.weight          [out, rank]
    [base_model.model.]<module>.lora_B[.default].bias              part lora_B.bias            [out]  (lora_bias)
    [base_model.model.]<module>.lora_magnitude_vector[.default]    part lora_magnitude_vector  [out]  (use_dora)
    [base_model.model.]<module>[.base_layer].bias                  part bias                   [out]  (bias: all or
                                                                                               lora_only)

Parts of other kinds are parameters, without `.weight`: lora_A, lora_B, lora_E (AdaLoRA), ia3_l (IA3), hada_w1_a ...
(LoHa), lokr_w1 ... (LoKr), each with or without `.default`.

The canonical name is `<module>.<part>`: the same adapter saved either way has the same digest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from loraplex.adapters.kinds import Kind

PREFIX = "base_model.model."

PARTS: dict[Kind, dict[str, str]] = {
    Kind.LORA: {
        "lora_a": "lora_A.weight",
        "lora_b": "lora_B.weight",
        "lora_bias": "lora_B.bias",
        "bias": "bias",
        "magnitude": "lora_magnitude_vector",
    },
    Kind.ADALORA: {"lora_a": "lora_A", "lora_b": "lora_B", "lora_e": "lora_E", "bias": "bias"},
    Kind.IA3: {"ia3_l": "ia3_l"},
    Kind.LOHA: {part: part for part in ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")},
    Kind.LOKR: {part: part for part in ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")},
}
"""Short names -> parts of a module. Of a LoRA, the short names are the fields of a layer."""

MAX_PARTS = 4
"""That one module has at a time."""

_LORA = re.compile(r"(?P<module>.+)\.(?P<part>lora_[AB])(?:\.default)?\.(?P<kind>weight|bias)")
_MAGNITUDE = re.compile(r"(?P<module>.+)\.(?P<part>lora_magnitude_vector)(?:\.default)?(?:\.weight)?")
_PARAMETERS = {
    kind: re.compile(rf"(?P<module>.+)\.(?P<part>{'|'.join(part for part in parts if part != 'bias')})(?:\.default)?")
    for kind, parts in ((kind, PARTS[kind].values()) for kind in Kind if kind is not Kind.LORA)
}
_NAMES = {Kind.LORA: "a LoRA", Kind.ADALORA: "an AdaLoRA", Kind.IA3: "an IA3", Kind.LOHA: "a LoHa", Kind.LOKR: "a LoKr"}
_EMBEDDINGS = "adapters on embeddings are not supported yet; train without embed_tokens and lm_head in target_modules"
_REFUSED = (
    ("lora_embedding_", _EMBEDDINGS),
    ("modules_to_save", "fully trained modules are not supported yet; train without modules_to_save"),
    ("trainable_tokens", "trained token embeddings are not supported yet; train without trainable_token_indices"),
    ("lora_velora", "VeLoRA's training buffers are not wanted at inference; drop them"),
    ("lora_diag", "KaSA is not supported; train a plain LoRA"),
    ("hada_t", "convolutions are not supported; train on linears"),
    ("lokr_t2", "convolutions are not supported; train on linears"),
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


def parse_tensor_name(name: str, kind: Kind = Kind.LORA) -> TensorName | None:
    """None for a name that is no part of an adapter of this kind."""
    bare = name.removeprefix(PREFIX)
    if kind is Kind.LORA:
        match = _LORA.fullmatch(bare)
        if match is not None:
            part = f"{match['part']}.{match['kind']}"
            return TensorName(match["module"], part) if part in PARTS[kind].values() else None
        match = _MAGNITUDE.fullmatch(bare)
    else:
        match = _PARAMETERS[kind].fullmatch(bare)
    if match is not None:
        return TensorName(match["module"], match["part"])
    if "bias" in PARTS[kind] and bare.endswith(".bias") and ".lora_" not in bare:
        return TensorName(bare.removesuffix(".bias").removesuffix(".base_layer"), "bias")
    return None


def why_unknown(name: str, kind: Kind = Kind.LORA) -> str:
    """What to say about a name that `parse_tensor_name` does not know."""
    parts = ", ".join(PARTS[kind].values())
    unknown = f"it is no part of {_NAMES[kind]} ({parts}); is this a PEFT adapter?"
    return next((reason for part, reason in _REFUSED if part in name), unknown)


def unused_reasons(names: Iterable[str], kind: Kind = Kind.LORA) -> list[str]:
    """A reason for each sort of names that `parse_tensor_name` does not know: KaSA has one in every module."""
    sorts: dict[str, list[str]] = {}
    for name in names:
        sorts.setdefault(why_unknown(name, kind), []).append(name)
    return [f"{_counted(found)} not used: {why}" for why, found in sorts.items()]


def _counted(names: list[str]) -> str:
    return f"{len(names)} tensors such as {names[0]!r} are" if names[1:] else f"tensor {names[0]!r} is"
