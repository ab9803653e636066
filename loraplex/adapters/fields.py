"""What Loraplex does with each field of adapter_config.json: honoured, ignored (training only) or refused when set.

The names are those of `peft.LoraConfig` in versions 0.1 to 0.21 and of vLLM's additions; a test fails when the
installed peft has a field that is not here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class Verdict(enum.StrEnum):
    HONOURED = "honoured"
    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class FieldVerdict:
    """One field of one adapter: what is done with it and, unless it is honoured, why."""

    name: str
    value: Any
    verdict: Verdict
    reason: str = ""


HONOURED = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"}
HONOURED |= {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}
HONOURED |= {"fan_in_fan_out", "bias", "lora_bias"}

IGNORED = {
    "task_type": "names the training task",
    "auto_mapping": "names the base model's class",
    "peft_version": "names the version that saved the adapter",
    "base_model_name_or_path": "names the base model; its dimensions are what is checked",
    "revision": "names the revision of the base model",
    "inference_mode": "only freezes the weights",
    "lora_dropout": "acts in training only",
    "megatron_config": "chooses layers of the training framework",
    "megatron_core": "chooses the training framework",
    "runtime_config": "peft ignores it in files, too",
    "eva_config": "configures an initialisation; the resulting ranks are in rank_pattern",
    "loftq_config": "peft ignores it unless init_lora_weights is 'loftq'",
    "corda_config": "peft ignores it unless init_lora_weights is 'corda'",
    "lora_ga_config": "configures an initialisation; init_lora_weights 'lora_ga' is refused",
    "qalora_group_size": "counts only with use_qalora, which is refused",
    "ensure_weight_tying": "ties adapters of embeddings, which are refused",
    "merge_weights": "peft 0.1 merged for speed; the result is the same",
}

_PLAIN = "train a plain LoRA"
_CONTEXT = "context extension by adapter is not supported; use an adapter of the base's context"
_WITHOUT = "train without them"
_CONVERT = "merge the adapter into the base, or extract a plain LoRA from the merged weights"

REFUSED = {
    "use_dora": f"DoRA is not supported yet; {_CONVERT}",
    "modules_to_save": f"fully trained modules are not supported yet; {_WITHOUT}, or merge them into the base model",
    "trainable_token_indices": f"trained token embeddings are not supported yet; {_WITHOUT}",
    "alora_invocation_tokens": f"activated LoRA is not supported yet; {_PLAIN}",
    "target_parameters": "adapters on nn.Parameter (experts) are not supported yet; use target_modules",
    "layer_replication": f"a base model with repeated layers is another model; {_PLAIN} on the base as it is",
    "use_qalora": f"QALoRA pools the inputs and is not supported; {_PLAIN}",
    "arrow_config": "Arrow routing between adapters is not supported; serve the adapters by name",
    "use_bdlora": f"block-diagonal LoRA is not supported; {_PLAIN}",
    "kasa_config": f"KaSA truncates the base weights; {_PLAIN}",
    "monteclora_config": f"Monte Carlo LoRA is not supported; {_PLAIN}",
    "velora_config": "the file has training buffers; VeLoRA infers as plain LoRA: "
    "set it to null and drop the lora_velora_embed tensors",
    "enable_lora": "LoRA on parts of a fused layer (peft 0.2) is not supported; save the adapter with a newer peft",
    "vllm_lora_scaling_factor": "a scaling given beside alpha and r is not supported; put it into lora_alpha",
    "vllm_max_position_embeddings": _CONTEXT,
    "vllm_long_context_scaling_factor": _CONTEXT,
    "vllm_long_context_scaling_factors": _CONTEXT,
    "context_length": _CONTEXT,
    "added_tokens_config": f"added tokens are not supported yet; {_WITHOUT}",
}

INIT_THAT_KEEPS_BASE = ("gaussian", "eva", "orthogonal", "mica")
"""Strings of init_lora_weights that only choose where training starts."""

INIT_THAT_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of init_lora_weights that subtract the start from the base weights: the file is no delta to the base."""


def is_set(value: Any) -> bool:
    """Whether a field says something: null, false, 0 and empty values do not."""
    return value is not None and value is not False and value != 0 and value not in ("", [], {}, ())
