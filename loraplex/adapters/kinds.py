"""What is done with each `peft_type` that PEFT knows: served, converted to A and B at load, or refused.

A test holds PEFT_TYPES against the registry of the installed peft, and each remedy against what its layers can do.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.StrEnum):
    """The values of `peft_type` that are served or converted."""

    LORA = "LORA"
    ADALORA = "ADALORA"
    IA3 = "IA3"
    LOHA = "LOHA"
    LOKR = "LOKR"


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


def _not_yet(mathematics: str, remedy: str) -> PeftType:
    return PeftType(TypeVerdict.NOT_YET, mathematics, remedy)


def _refused(mathematics: str, remedy: str) -> PeftType:
    return PeftType(TypeVerdict.REFUSED, mathematics, remedy)


PEFT_TYPES: dict[str, PeftType] = {
    Kind.LORA: PeftType(TypeVerdict.SERVED, "adds scaling * B A; with use_dora, rows are brought to trained norms"),
    Kind.IA3: PeftType(TypeVerdict.SERVED, "multiplies a module's outputs, or its inputs, by a trained vector"),
    Kind.ADALORA: _converted("adds scaling * B diag(E) A; A and E become one matrix"),
    Kind.LOHA: _converted("adds scaling * (w1_a w1_b) o (w2_a w2_b), elementwise: a LoRA of rank r * r at most"),
    Kind.LOKR: _converted("adds scaling * kron(w1, w2): a LoRA of the product of the ranks of both"),
    "VERA": _not_yet("scales one pair of random matrices that all modules share by trained vectors", AS_LORA),
    "LN_TUNING": _not_yet("trains the weights of the norms", MERGE),
    "TRAINABLE_TOKENS": _not_yet("trains rows of the token embeddings", MERGE),
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
