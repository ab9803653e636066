"""Kinds of adapters: what is done with each `peft_type`, and the names of the tensors of those that are served.

    [base_model.model.]<module>.lora_A[.default].weight            part lora_A.weight          [rank, in]
    [base_model.model.]<module>.lora_B[.default].weight            part lora_B.weight          [out, rank]
    [base_model.model.]<module>.lora_B[.default].bias              part lora_B.bias            [out]  (lora_bias)
    [base_model.model.]<module>.lora_magnitude_vector[.default]    part lora_magnitude_vector  [out]  (use_dora)
    [base_model.model.]<module>[.base_layer].bias                  part bias                   [out]  (bias: all or
                                                                                               lora_only)
    [base_model.model.]<module>.lora_embedding_A[.default]         part lora_embedding_A       [rank, vocabulary]
    [base_model.model.]<module>.lora_embedding_B[.default]         part lora_embedding_B       [hidden, rank]

What an adapter of any kind may have of its own (own.py says what it means):

    <module>.weight                                                part weight                 as the module's
    <module>.base_layer.weight, .original_module.weight            part base_layer.weight      [vocabulary, hidden]
    <module>.modules_to_save.weight                                part modules_to_save.weight [vocabulary, hidden]
    <module>.token_adapter.trainable_tokens_delta                  part trainable_tokens_delta [tokens, hidden]

Parts of other kinds are parameters, without `.weight`: lora_A, lora_B, lora_E (AdaLoRA), ia3_l (IA3), hada_w1_a ...
(LoHa), lokr_w1 ... (LoKr), vera_lambda_b ... (VeRA), each with or without `.default`. The canonical name is
`<module>.<part>`: the same adapter saved either way has the same digest.

A test holds PEFT_TYPES against the registry of the installed peft, and each remedy against what its layers can do.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Kind(enum.StrEnum):
    """The values of `peft_type` that are served or converted."""

    LORA = "LORA"
    ADALORA = "ADALORA"
    IA3 = "IA3"
    LOHA = "LOHA"
    LOKR = "LOKR"
    VERA = "VERA"
    LN_TUNING = "LN_TUNING"
    TRAINABLE_TOKENS = "TRAINABLE_TOKENS"


class TypeVerdict(enum.StrEnum):
    SERVED = "served"
    CONVERTED = "converted"
    NOT_YET = "refused, not yet"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class PeftType:
    """One `peft_type`: what is done with it, what it computes, and what a user can do instead when it is refused."""

    verdict: TypeVerdict
    mathematics: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.mathematics}; {self.remedy}" if self.remedy else self.mathematics


AS_LORA = "convert it with peft.save_as_lora(path, model, rank)"
MERGE = "merge it with merge_and_unload() and serve the merged model"
BY_NAME = "serve the LoRAs by their names"
TRAIN = "no weights express it; train a LoRA"


def _converted(mathematics: str) -> PeftType:
    return PeftType(TypeVerdict.CONVERTED, mathematics)


def _refused(mathematics: str, remedy: str) -> PeftType:
    return PeftType(TypeVerdict.REFUSED, mathematics, remedy)


PEFT_TYPES: dict[str, PeftType] = {
    Kind.LORA: PeftType(
        TypeVerdict.SERVED,
        "adds scaling * B A; with use_dora, rows are brought to trained norms; with alora_invocation_tokens, it begins "
        "at an invocation in the prompt",
    ),
    Kind.IA3: PeftType(TypeVerdict.SERVED, "multiplies a module's outputs, or its inputs, by a trained vector"),
    Kind.LN_TUNING: PeftType(TypeVerdict.SERVED, "trains the weights of the norms"),
    Kind.TRAINABLE_TOKENS: PeftType(TypeVerdict.SERVED, "trains rows of the token embeddings"),
    Kind.ADALORA: _converted("adds scaling * B diag(E) A; A and E become one matrix"),
    Kind.LOHA: _converted("adds scaling * (w1_a w1_b) o (w2_a w2_b), elementwise: a LoRA of rank r * r at most"),
    Kind.LOKR: _converted("adds scaling * kron(w1, w2): a LoRA of the product of the ranks of both"),
    Kind.VERA: _converted("scales one pair of random matrices that all modules share by trained vectors"),
    "XLORA": _refused("mixes LoRAs by a gate that reads the hidden states", BY_NAME),
    "POLY": _refused("mixes LoRAs by a router that reads the task", TRAIN),
    "LILY": _refused("mixes several B that layers share by a router that reads the input", TRAIN),
    "SHADOW": _refused("runs a small network beside the model and adds its state to the hidden states", TRAIN),
    "PROMPT_TUNING": _refused("puts trained embeddings before the prompt", TRAIN),
    "MULTITASK_PROMPT_TUNING": _refused("puts embeddings trained for a task before the prompt", TRAIN),
    "P_TUNING": _refused("puts embeddings that an encoder makes before the prompt", TRAIN),
    "CPT": _refused("puts trained embeddings of examples before the prompt", TRAIN),
    "PREFIX_TUNING": _refused("puts trained keys and values before those of the prompt", TRAIN),
    "CARTRIDGE": _refused("puts trained keys and values before those of the prompt", TRAIN),
    "ADAPTION_PROMPT": _refused("adds gated attention to trained prompts in the upper layers", TRAIN),
    "C3A": _refused("adds a block-circulant matrix of full rank", AS_LORA),
    "DELORA": _refused("adds a low-rank matrix whose norm is bounded by the base weight's", AS_LORA),
    "FOURIERFT": _refused("adds the inverse Fourier transform of a sparse spectrum", AS_LORA),
    "GRALORA": _refused("adds a low-rank matrix for each block of the weight", AS_LORA),
    "MISS": _refused("adds one small matrix, repeated over the blocks of the inputs", AS_LORA),
    "PSOFT": _refused("turns the main singular directions of the base weight", AS_LORA),
    "RANDLORA": _refused("adds a sum of random low-rank matrices with trained scales", AS_LORA),
    "TINYLORA": _refused("mixes random matrices between singular vectors of the base weight", AS_LORA),
    "UNILORA": _refused("takes all entries of A and B from one trained vector", AS_LORA),
    "VBLORA": _refused("makes A and B of vectors from a bank that all modules share", AS_LORA),
    "WAVEFT": _refused("adds the inverse wavelet transform of sparse coefficients", AS_LORA),
    "ADAMSS": _refused("adds low-rank updates in clusters of the base weight's singular directions", MERGE),
    "BEFT": _refused("adds a trained bias where the base model has one", MERGE),
    "BOFT": _refused("multiplies the weight by an orthogonal matrix of butterfly factors", MERGE),
    "DEFT": _refused("takes a projection out of the base weight and adds a low-rank matrix", MERGE),
    "FROD": _refused("replaces the weight in a basis that modules share", MERGE),
    "GLORA": _refused("multiplies the weight by one low-rank matrix and adds another", MERGE),
    "HIRA": _refused("multiplies the weight elementwise by 1 + B A", MERGE),
    "HRA": _refused("multiplies the weight by a chain of reflections", MERGE),
    "OFT": _refused("multiplies the weight by a block-diagonal orthogonal matrix", MERGE),
    "OSF": _refused("trains the lower singular directions of the base weight", MERGE),
    "PEANUT": _refused("adds what a small network makes of the base weight", MERGE),
    "PVERA": _refused("is VeRA with vectors drawn from a trained distribution", MERGE),
    "ROAD": _refused("turns and scales pairs of a module's outputs", MERGE),
    "SHIRA": _refused("adds a sparse matrix", MERGE),
    "SUPERTUNING": _refused("adds a sparse matrix, and a LoRA with r", MERGE),
}

# ----------------------------------------------------------------------------------------------------- names of tensors

PREFIX = "base_model.model."
TEXT_PREFIXES = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.": ""}
"""Of modules of an adapter that was trained on a model with a text model beside other parts -> of that alone."""

PARTS: dict[Kind, dict[str, str]] = {
    Kind.LORA: {
        "lora_a": "lora_A.weight",
        "lora_b": "lora_B.weight",
        "lora_bias": "lora_B.bias",
        "bias": "bias",
        "magnitude": "lora_magnitude_vector",
        "embedding_a": "lora_embedding_A",
        "embedding_b": "lora_embedding_B",
    },
    Kind.ADALORA: {"lora_a": "lora_A", "lora_b": "lora_B", "lora_e": "lora_E", "bias": "bias"},
    Kind.IA3: {"ia3_l": "ia3_l"},
    Kind.LOHA: {part: part for part in ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")},
    Kind.LOKR: {part: part for part in ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")},
    Kind.VERA: {"lambda_b": "vera_lambda_b", "lambda_d": "vera_lambda_d", "vera_a": "vera_A", "vera_b": "vera_B"},
    Kind.LN_TUNING: {},
    Kind.TRAINABLE_TOKENS: {},
}
"""Short names -> parts of a module. Of a LoRA, the short names are the fields of a layer, but for embeddings."""

WEIGHT, BASE_WEIGHT, COPY, TOKENS = "weight", "base_layer.weight", "modules_to_save.weight", "trainable_tokens_delta"
BIAS_COPY, BASE_BIAS = "modules_to_save.bias", "original_module.bias"
"""What peft writes beside the bias of a saved linear when `bias` is "all": it once more, and the one before."""

OWN_PARTS = (WEIGHT, BASE_WEIGHT, COPY, TOKENS, BIAS_COPY, BASE_BIAS)

SHARED = {f"base_model.{part}{end}": part for part in ("vera_A", "vera_B") for end in ("", ".default")}
"""Names of tensors that all modules of an adapter share -> parts; their module is "" (VeRA)."""

MAX_PARTS = 4
"""That one module has at a time; an embedding and a head may have two more."""

_LORA = re.compile(r"(?P<module>.+)\.(?P<part>lora_[AB])(?:\.default)?\.(?P<kind>weight|bias)")
_MAGNITUDE = re.compile(r"(?P<module>.+)\.(?P<part>lora_magnitude_vector)(?:\.default)?(?:\.weight)?")
_EMBEDDING = re.compile(r"(?P<module>.+)\.(?P<part>lora_embedding_[AB])(?:\.default)?")
_PARAMETERS = {
    kind: re.compile(rf"(?P<module>.+)\.(?P<part>{'|'.join(part for part in parts if part != 'bias')})(?:\.default)?")
    for kind, parts in (
        (kind, PARTS[kind].values()) for kind in (Kind.ADALORA, Kind.IA3, Kind.LOHA, Kind.LOKR, Kind.VERA)
    )
}
_OWN_NAMES = (
    (".token_adapter.base_layer.weight", BASE_WEIGHT, None),
    (".base_layer.weight", BASE_WEIGHT, None),
    (".original_module.weight", BASE_WEIGHT, None),
    (".modules_to_save.weight", COPY, None),
    (".modules_to_save.bias", BIAS_COPY, None),
    (".original_module.bias", BASE_BIAS, None),
    (".token_adapter.trainable_tokens_delta", TOKENS, None),
    (".trainable_tokens_delta", TOKENS, Kind.TRAINABLE_TOKENS),
    (".ln_tuning_layers.weight", WEIGHT, Kind.LN_TUNING),
    (".ln_tuning_layers.bias", "bias", Kind.LN_TUNING),
    (".weight", WEIGHT, None),
)
"""Ends of names, the longer before those that they end in; parts; the kind that alone has them."""
_NAMES = {
    Kind.LORA: "a LoRA",
    Kind.ADALORA: "an AdaLoRA",
    Kind.IA3: "an IA3",
    Kind.LOHA: "a LoHa",
    Kind.LOKR: "a LoKr",
    Kind.VERA: "a VeRA",
    Kind.LN_TUNING: "an LN tuning",
    Kind.TRAINABLE_TOKENS: "trained tokens",
}
_EMBEDDINGS = "adapters on embeddings are not supported yet; train without embed_tokens and lm_head in target_modules"
_REFUSED = (
    ("lora_embedding_", _EMBEDDINGS),
    ("modules_to_save", "modules_to_save does not name it, or the base model does not have it"),
    ("trainable_tokens", "trainable_token_indices does not name it, or the base model does not have it"),
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


def text_name(name: str) -> str:
    """Of a module or tensor, without what stands before it where the text model is beside other parts."""
    prefix = next(filter(name.startswith, TEXT_PREFIXES), "")
    return TEXT_PREFIXES.get(prefix, "") + name.removeprefix(prefix)


def parse_tensor_name(name: str, kind: Kind = Kind.LORA) -> TensorName | None:
    """None for a name that is no part of an adapter of this kind."""
    bare = name.removeprefix(PREFIX)
    bare = text_name(bare)
    if kind is Kind.LORA:
        match = _LORA.fullmatch(bare)
        if match is not None:
            part = f"{match['part']}.{match['kind']}"
            return TensorName(match["module"], part) if part in PARTS[kind].values() else None
        match = _MAGNITUDE.fullmatch(bare) or _EMBEDDING.fullmatch(bare)
    elif kind is Kind.VERA and bare in SHARED:
        return TensorName("", SHARED[bare])
    elif kind in _PARAMETERS:
        match = _PARAMETERS[kind].fullmatch(bare)
    else:
        match = None
    if match is not None:
        return TensorName(match["module"], match["part"])
    return None if ".lora_" in f".{bare}" else _own_name(bare, kind)


def _own_name(bare: str, kind: Kind) -> TensorName | None:
    for end, part, only in _OWN_NAMES:
        if only in (None, kind) and len(bare) > len(end) and bare.endswith(end):
            return TensorName(bare.removesuffix(end), part)
    if bare.endswith(".bias"):
        return TensorName(bare.removesuffix(".bias").removesuffix(".base_layer"), "bias")
    return None


def why_unknown(name: str, kind: Kind = Kind.LORA) -> str:
    """What to say about a name that `parse_tensor_name` does not know."""
    return next((reason for part, reason in _REFUSED if part in name), no_part(kind))


def no_part(kind: Kind) -> str:
    parts = ", ".join(part for part in PARTS[kind].values() if not part.startswith("lora_embedding"))
    return f"it is no part of {_NAMES[kind]}{f' ({parts})' if parts else ''}; is this a PEFT adapter?"


def unused_reasons(names: Iterable[str], kind: Kind = Kind.LORA) -> list[str]:
    """A reason for each sort of names that `parse_tensor_name` does not know: KaSA has one in every module."""
    sorts: dict[str, list[str]] = {}
    for name in names:
        sorts.setdefault(why_unknown(name, kind), []).append(name)
    return [f"{_counted(found)} not used: {why}" for why, found in sorts.items()]


def _counted(names: list[str]) -> str:
    return f"{len(names)} tensors such as {names[0]!r} are" if names[1:] else f"tensor {names[0]!r} is"
