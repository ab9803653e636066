"""The families of models as data, by `model_type` of config.json: what tells one from another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loraplex.layers.moe import ExpertNames


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """Names of a decoder layer's norms, "" where there is none: before and after the attention and the MLP.

    Norms after a block are of its output, before that is added to the residual.
    """

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """Of a mixture of experts in place of MLPs: names in the checkpoint, and the keys of config.json.

    normalizes: the key of whether the chosen experts' factors are divided by their sum, or that they are. shared_size:
    the key of the shared expert's; "" where there is none. layers: the key that names layers, "" where all have them.
    "mlp_only_layers" have an MLP, and so have those that `decoder_sparse_step` leaves out; "moe_layers" are those with
    experts, each `interleave_moe_layer_step`-th where it is null. has_bias: router and experts have biases. clamp: the
    keys of limit and alpha of a clamped gate, () where it is SiLU's. scales_inputs: as ExpertSizes has it.
    """

    names: ExpertNames = field(default_factory=ExpertNames)
    inner_size: str = "moe_intermediate_size"
    normalizes: bool | str = "norm_topk_prob"
    shared_size: str = ""
    layers: str = "mlp_only_layers"
    has_bias: bool = False
    clamp: tuple[str, str] | tuple[()] = ()
    scales_inputs: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """A flag that is a string is the key of config.json that has its value.

    defaults: for keys that config.json leaves out. renamed: our name of a key -> the family's. honoured: keys that
    change the mathematics here, and are refused where a family does not have them (`config.NEUTRAL_VALUES`).

    norm: "rms" or "layer" (of x - mean(x), with a bias where `norm_bias` says so); norm_offset: what a norm's weight is
    stored less. qk_norm: "" (none), "head" (over each head), "width" (over all heads at once), or "unit" (over each
    head without a weight, in layers with positions, where `use_qk_norm` says so).

    layer_rule: which layers have the sliding window. "none"; "all"; "upper" (Qwen: `use_sliding_window`, the layers
    from `max_window_layers` on); "pattern" (all but each `sliding_window_pattern`-th); "no_rope" (SmolLM3:
    `use_sliding_window`, the layers without positions). From "upper" on, `layer_types` of the file is honoured.
    "chunks" (Llama 4): none, and sequences end where chunks of attention, or a temperature, would make a difference.

    rope_rule: which layers have rotary positions. "all"; "types" (Gemma 3: layers with a window and those without have
    a base each); "sliding" (those with a window); "no_rope" (those that `no_rope_layers` has a 1 for). rope_names:
    the family's names of rope types -> those of here.

    text_of: the model_type of a model that is this family beside other parts, whose `text_config` is this family's
    config.json; text_prefixes: what its text weights' names begin with, and with what they begin here;
    other_weights: what the others' begin with.
    """

    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    honoured: tuple[str, ...] = ()
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    norms: LayerNorms = LayerNorms()
    norm: str = "rms"
    norm_bias: bool = False
    norm_offset: float = 0.0
    qk_norm: str = ""
    is_qkv_fused: bool = False
    is_gate_up_fused: bool = False
    mlp_modules: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of gate, up and down; "" for the gate: the MLP has none."""
    is_parallel: bool = False
    """Attention and MLP read the same norm of the residual."""
    scales_embedding: bool = False
    """By sqrt(hidden_size), rounded to the dtype of the weights."""
    layer_rule: str = "none"
    rope_rule: str = "all"
    rope_names: Mapping[str, str] = field(default_factory=dict)
    is_rope_interleaved: bool = False
    has_sinks: bool = False
    """Each head has a score of no key, in the sum of its softmax alone."""
    experts: ExpertKeys | None = None
    text_of: str = ""
    text_prefixes: Mapping[str, str] = field(default_factory=dict)
    other_weights: tuple[str, ...] = ()

    @property
    def is_gated(self) -> bool:
        return bool(self.mlp_modules[0])

    @property
    def traits(self) -> tuple[str, str, str, str]:
        """What it has of its own, in words: norms, attention, positions, the rest (docs/models.md)."""
        norms = self.norms
        said = (
            {
                "layer": self.norm == "layer",
                "less one": self.norm_offset == 1,
                "around blocks": bool(norms.before_attention and norms.after_attention),
                "after blocks": not norms.before_attention,
                "one a layer": self.is_parallel,
                "q and k": self.qk_norm == "head",
                "all q, all k": self.qk_norm == "width",
                "unit q, k": self.qk_norm == "unit",
            },
            {
                "window": self.layer_rule in ("all", "upper"),
                "windows": self.layer_rule in ("pattern", "no_rope"),
                "chunk": self.layer_rule == "chunks",
                "soft cap": "attn_logit_softcapping" in self.honoured,
                "sinks": self.has_sinks,
                "scale": not {"query_pre_attn_scalar", "attention_multiplier"}.isdisjoint(self.honoured),
            },
            {
                "two bases": self.rope_rule == "types",
                "not in all layers": self.rope_rule in ("sliding", "no_rope"),
                "neighbours": self.is_rope_interleaved,
                "partial": "partial_rotary_factor" in self.honoured,
                "longrope": "longrope" in self.rope_names.values(),
            },
            {
                "blocks side by side": self.is_parallel,
                "no gate": not self.is_gated,
                "experts": self.experts is not None and not self.experts.clamp,
                "clamped experts": self.experts is not None and bool(self.experts.clamp),
                "shared expert": self.experts is not None and bool(self.experts.shared_size),
                "scaled inputs": self.experts is not None and self.experts.scales_inputs,
                "scaled embedding": self.scales_embedding or "embedding_multiplier" in self.honoured,
                "scaled residual": "residual_multiplier" in self.honoured,
                "scaled logits": not {"logit_scale", "logits_scaling"}.isdisjoint(self.honoured),
            },
        )
        norm, attention, positions, rest = (
            ", ".join(trait for trait, has_it in column.items() if has_it) for column in said
        )
        return norm, attention, positions, rest

    @property
    def linear_modules(self) -> tuple[str, ...]:
        """Names of a layer's linears, as adapters have them."""
        attention = ("qkv_proj",) if self.is_qkv_fused else ("q_proj", "k_proj", "v_proj")
        gate, up, down = self.mlp_modules
        if self.experts is not None:
            return (*attention, "o_proj", self.experts.names.router, *self.experts.names.modules)
        first = ("gate_up_proj",) if self.is_gate_up_fused else (gate, up)
        return tuple(name for name in (*attention, "o_proj", *first, down) if name)


_QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

_EXPERT_COUNTS = ("num_experts", "num_local_experts")
_QWEN_EXPERTS = {"norm_topk_prob": False, "mlp_only_layers": (), "decoder_sparse_step": 1, "use_sliding_window": False}

_GEMMA_DEFAULTS = {
    **{"num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096},
    **{"query_pre_attn_scalar": 256, "tie_word_embeddings": True},
}
_GEMMA_NORMS = LayerNorms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
_GEMMA_KEYS = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")

FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults={"max_position_embeddings": 2048},
    ),
    "llama4_text": Family(
        architecture="Llama4ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="unit",
        layer_rule="chunks",
        rope_rule="no_rope",
        is_rope_interleaved=True,
        experts=ExpertKeys(
            names=ExpertNames(
                "feed_forward",
                router="router",
                parameters="feed_forward",
                is_transposed=True,
                swaps_factors=True,
                shared_gate="",
            ),
            normalizes=True,
            shared_size="moe_intermediate_size",
            layers="moe_layers",
            scales_inputs=True,
        ),
        renamed={"intermediate_size": "intermediate_size_mlp", "moe_intermediate_size": "intermediate_size"},
        honoured=_EXPERT_COUNTS,
        defaults={
            **{"vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384},
            **{"num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128},
            **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "use_qk_norm": True},
            **{"num_local_experts": 16, "num_experts_per_tok": 1, "moe_layers": None, "interleave_moe_layer_step": 1},
            **{"no_rope_layer_interval": 4, "attention_chunk_size": 8192, "floor_scale": 8192},
            "attn_temperature_tuning": True,
        },
        text_of="llama4",
        text_prefixes={"language_model.": ""},
        other_weights=("vision_model.", "multi_modal_projector."),
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        layer_rule="all",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "qwen2": Family(architecture="Qwen2ForCausalLM", qkv_bias=True, layer_rule="upper", defaults=_QWEN_DEFAULTS),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="head",
        layer_rule="upper",
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norms=_GEMMA_NORMS,
        norm_offset=1.0,
        scales_embedding=True,
        layer_rule="pattern",
        renamed={"hidden_act": "hidden_activation"},
        honoured=_GEMMA_KEYS,
        defaults={
            **_GEMMA_DEFAULTS,
            **{"max_position_embeddings": 8192, "sliding_window_pattern": 2},
            **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        },
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norms=_GEMMA_NORMS,
        norm_offset=1.0,
        qk_norm="head",
        scales_embedding=True,
        layer_rule="pattern",
        rope_rule="types",
        renamed={"hidden_act": "hidden_activation"},
        honoured=_GEMMA_KEYS,
        defaults={
            **{**_GEMMA_DEFAULTS, "max_position_embeddings": 131072, "sliding_window_pattern": 6},
            **{"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216},
            **{"num_hidden_layers": 26, "num_attention_heads": 8},
        },
        text_of="gemma3",
        text_prefixes={"language_model.model.": "model.", "model.language_model.": "model.", "language_model.": ""},
        other_weights=(
            "vision_tower.",
            "multi_modal_projector.",
            "model.vision_tower.",
            "model.multi_modal_projector.",
        ),
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        is_qkv_fused=True,
        is_gate_up_fused=True,
        layer_rule="all",
        rope_names={"su": "longrope", "yarn": "longrope"},
        honoured=("partial_rotary_factor",),
        defaults={
            **{"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
            "sliding_window": None,
        },
    ),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norms=LayerNorms("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
        qk_norm="width",
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    ),
    "granite": Family(
        architecture="GraniteForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        honoured=("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
        defaults={
            **{"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0},
            **{"logits_scaling": 1.0, "max_position_embeddings": 2048},
        },
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        layer_rule="no_rope",
        rope_rule="no_rope",
        defaults={
            **{"num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2000000.0},
            **{"use_sliding_window": False, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
        },
    ),
    "glm4": Family(
        architecture="Glm4ForCausalLM",
        qkv_bias="attention_bias",
        is_gate_up_fused=True,
        norms=LayerNorms(
            "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
        ),
        is_rope_interleaved=True,
        honoured=("partial_rotary_factor",),
        defaults={
            **{"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5},
            **{"max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7},
        },
    ),
    "cohere2": Family(
        architecture="Cohere2ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norms=LayerNorms(before_mlp=""),
        norm="layer",
        is_parallel=True,
        layer_rule="pattern",
        rope_rule="sliding",
        is_rope_interleaved=True,
        renamed={"rms_norm_eps": "layer_norm_eps"},
        honoured=("logit_scale",),
        defaults={
            **{"layer_norm_eps": 1e-5, "max_position_embeddings": 8192, "logit_scale": 0.0625},
            **{"sliding_window": 4096, "sliding_window_pattern": 4, "tie_word_embeddings": True},
        },
    ),
    "starcoder2": Family(
        architecture="Starcoder2ForCausalLM",
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        norm="layer",
        norm_bias=True,
        mlp_modules=("", "c_fc", "c_proj"),
        layer_rule="all",
        renamed={"rms_norm_eps": "norm_epsilon"},
        defaults={
            **{"num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 4096},
            **{"norm_epsilon": 1e-5, "use_bias": True, "tie_word_embeddings": True, "sliding_window": None},
        },
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        layer_rule="all",
        experts=ExpertKeys(
            names=ExpertNames("block_sparse_moe", ("w1", "w3", "w2")),
            inner_size="intermediate_size",
            normalizes=True,
            layers="",
        ),
        honoured=_EXPERT_COUNTS,
        defaults={
            **{"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
            **{"sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1000000.0},
        },
    ),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM",
        qkv_bias="qkv_bias",
        experts=ExpertKeys(shared_size="shared_expert_intermediate_size"),
        honoured=_EXPERT_COUNTS,
        defaults={
            **{**_QWEN_EXPERTS, "num_key_value_heads": 16, "max_position_embeddings": 32768, "qkv_bias": True},
            **{"num_experts": 60, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 5632},
            "moe_intermediate_size": 1408,
        },
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="head",
        experts=ExpertKeys(),
        honoured=_EXPERT_COUNTS,
        defaults={
            **{**_QWEN_EXPERTS, "num_key_value_heads": 4, "max_position_embeddings": 32768},
            **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        },
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="width",
        experts=ExpertKeys(inner_size="intermediate_size", layers=""),
        honoured=_EXPERT_COUNTS,
        defaults={
            **{"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "norm_topk_prob": False},
            **{"num_experts": 64, "num_experts_per_tok": 8},
        },
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        layer_rule="pattern",
        has_sinks=True,
        experts=ExpertKeys(
            names=ExpertNames(router="router", is_transposed=True, takes_turns=True),
            inner_size="intermediate_size",
            normalizes=True,
            layers="",
            has_bias=True,
            clamp=("swiglu_limit", "swiglu_alpha"),
        ),
        honoured=(*_EXPERT_COUNTS, "swiglu_limit", "swiglu_alpha"),
        defaults={
            **{"num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
            **{"attention_bias": True, "sliding_window": 128, "sliding_window_pattern": 2, "rope_theta": 150000.0},
            **{"num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
            "rope_parameters": {
                **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
                "original_max_position_embeddings": 4096,
            },
        },
    ),
}
"""By `model_type`."""

NOT_SERVED: Mapping[str, str] = {
    "gemma": "its activation depends on the version that wrote it; Gemma 2 and 3 are served",
    "cohere": "its norms of q and k have a weight for each head; Cohere 2 is served",
}
"""What is missing for a family that is close to one of these, by `model_type` (with `_text`, too)."""
