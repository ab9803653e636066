"""Every config.json is read as transformers reads it, or refused by name."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from loraplex.errors import ModelConfigError
from loraplex.kernels.experts import ClampedGate
from loraplex.models.config import ModelConfig
from loraplex.models.families import FAMILIES

SIZES = {
    "hidden_size": 512,
    "num_attention_heads": 32,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "vocab_size": 128,
}


def read(family: str = "llama", **keys: Any) -> ModelConfig:
    return ModelConfig.from_dict({"model_type": family, **SIZES, **keys})


def transformers_config(family: str, keys: Mapping[str, Any]) -> Any:
    import transformers

    return transformers.AutoConfig.for_model(family, **{**SIZES, **keys})


def transformers_windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if getattr(config, "layer_types", None) is None:
        return (window,) * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)


LINEAR = {"rope_type": "linear", "factor": 8.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}

CASES: list[tuple[str, Mapping[str, Any]]] = [
    *((family, {}) for family in sorted(FAMILIES)),
    ("llama", {"head_dim": 32, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 256, "num_key_value_heads": 4, "rope_theta": 1000042, "rms_norm_eps": 1e-6}),  # Falcon 3
    ("llama", {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 128, "num_key_value_heads": 4, "head_dim": 48}),
    ("qwen2", {"sliding_window": 32768, "use_sliding_window": False}),
    ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3}),
    ("qwen3", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}),
    ("qwen3", {"attention_bias": True, "head_dim": 16, "max_position_embeddings": 40960}),
    (
        "qwen3",
        {"sliding_window": 16, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    ("cohere2", {"sliding_window_pattern": 2, "logit_scale": 0.25, "layer_norm_eps": 1e-6, "attention_bias": True}),
    ("gemma2", {"query_pre_attn_scalar": 144, "attn_logit_softcapping": None, "final_logit_softcapping": 5.0}),
    ("gemma2", {"layer_types": ["full_attention", "sliding_attention"] * 2, "hidden_activation": "gelu"}),
    ("gemma3_text", {"sliding_window_pattern": 3, "sliding_window": 512, "final_logit_softcapping": 30.0}),
    ("gemma3_text", {"rope_theta": 5e5, "rope_local_base_freq": 5e3, "rope_scaling": LINEAR}),
    ("glm4", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}),
    ("granite", {"attention_multiplier": 0.015, "residual_multiplier": 0.22, "embedding_multiplier": 12.0}),
    ("granite", {"logits_scaling": 8.0, "mlp_bias": True, "attention_bias": True}),
    ("olmo2", {"attention_bias": True, "num_key_value_heads": 8, "rope_theta": 5e5}),
    ("phi3", {"sliding_window": 2047, "num_key_value_heads": 8, "hidden_act": "gelu_new"}),
    ("phi3", {"partial_rotary_factor": 0.75, "rope_scaling": LONGROPE, "max_position_embeddings": 16384}),
    ("smollm3", {"no_rope_layers": [1, 0, 0, 1, 0], "rope_theta": 5e6, "mlp_bias": True}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 64, "no_rope_layer_interval": 2}),
    ("starcoder2", {"use_bias": False, "sliding_window": 4096, "norm_epsilon": 1e-6, "rope_theta": 1e6}),
    ("gpt_oss", {"num_local_experts": 32, "rope_theta": 1e5, "rope_scaling": {**LINEAR, "rope_type": "yarn"}}),
    ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 64, "head_dim": 32}),
]


@pytest.mark.parametrize("is_saved", [False, True])
@pytest.mark.parametrize(("family", "keys"), CASES)
def test_values_are_those_of_transformers(family: str, keys: Mapping[str, Any], is_saved: bool, tmp_path: Path) -> None:
    """For the keys alone (defaults of the family) and for the whole file that transformers writes."""
    want = transformers_config(family, keys)
    if is_saved:
        want.architectures = [FAMILIES[family].architecture]
        want.save_pretrained(tmp_path)
        got = ModelConfig.from_dir(tmp_path)
    else:
        got = read(family, **keys)
    same = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    same += ("num_key_value_heads", "max_position_embeddings", "tie_word_embeddings")
    for name in same:
        theirs = FAMILIES[family].renamed.get(name, name)
        assert getattr(got, name) == getattr(want, theirs), name
    assert got.rms_norm_eps == getattr(want, FAMILIES[family].renamed.get("rms_norm_eps", "rms_norm_eps"))
    assert got.head_dim == (getattr(want, "head_dim", None) or want.hidden_size // want.num_attention_heads)
    assert got.sliding_windows == transformers_windows(want)
    has_bias = getattr(want, "use_bias", False)
    assert got.qkv_bias == (family in ("qwen2", "qwen2_moe") or has_bias or getattr(want, "attention_bias", False))
    assert got.o_bias == (
        family not in ("qwen2", "qwen2_moe", "glm4") and (has_bias or getattr(want, "attention_bias", False))
    )
    assert got.mlp_bias == (has_bias or getattr(want, "mlp_bias", False))
    ropes = [
        want.rope_parameters[kind] for kind in ("full_attention", "sliding_attention") if kind in want.rope_parameters
    ]
    for rope, expected in zip(got.ropes, ropes or [want.rope_parameters], strict=True):
        assert (rope.rope_theta, rope.rope_type) == (expected["rope_theta"], expected["rope_type"])
        assert got.rotary_dim == int(got.head_dim * (expected.get("partial_rotary_factor") or 1))
    assert_numbers_are_those_of(want, got)


GEMMA3_FILES: Mapping[str, Mapping[str, Any]] = {
    "empty": {},
    "4b": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
    "12b": {
        **{"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48},
        **{"num_attention_heads": 16, "num_key_value_heads": 8},
    },
    "27b": {
        **{"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "head_dim": 128},
        **{"num_attention_heads": 32, "num_key_value_heads": 16, "query_pre_attn_scalar": 168},
    },
}
"""What the files of Gemma 3 say of their text part beside the window and the rotary embedding: no size that is the
default of its class."""


@pytest.mark.parametrize("size", GEMMA3_FILES)
def test_sizes_that_a_text_part_leaves_out_are_those_of_transformers(size: str) -> None:
    import transformers

    window = {"sliding_window": 1024, "rope_scaling": LINEAR} if size != "empty" else {}
    text = {**GEMMA3_FILES[size], **window}
    got = ModelConfig.from_dict({"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text})
    want = transformers.Gemma3Config(text_config=dict(text)).text_config
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")
    assert {name: getattr(got, name) for name in names} == {name: getattr(want, name) for name in names}
    assert got.sliding_windows == transformers_windows(want)
    for rope, kind in zip(got.ropes, ("full_attention", "sliding_attention"), strict=True):
        expected = want.rope_parameters[kind]
        assert (rope.rope_theta, rope.rope_type) == (expected["rope_theta"], expected["rope_type"])
    assert_numbers_are_those_of(want, got)


def assert_numbers_are_those_of(want: Any, got: ModelConfig) -> None:
    """Scales and soft caps, which are there only in some families."""
    scalar = getattr(want, "query_pre_attn_scalar", got.head_dim)
    assert got.attention_scale == pytest.approx(getattr(want, "attention_multiplier", scalar**-0.5))
    assert got.attention_softcap == getattr(want, "attn_logit_softcapping", None)
    assert got.logit_softcap == getattr(want, "final_logit_softcapping", None)
    assert got.logit_scale == pytest.approx(getattr(want, "logit_scale", 1) / getattr(want, "logits_scaling", 1))
    assert got.residual_scale == getattr(want, "residual_multiplier", 1)
    root = want.hidden_size**0.5 if "gemma" in want.model_type else 1
    assert got.embedding_scale == pytest.approx(getattr(want, "embedding_multiplier", root))
    if want.model_type in ("smollm3", "llama4_text"):
        assert got.layer_ropes == tuple(0 if flag else None for flag in want.no_rope_layers[: want.num_hidden_layers])
    activation = getattr(want, "hidden_activation", None) or want.hidden_act
    assert got.activation == {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}.get(activation, activation)


def test_gates_of_gpt_oss_are_clamped_as_its_file_says() -> None:
    got, want = read("gpt_oss", swiglu_limit=5.0).experts, transformers_config("gpt_oss", {"swiglu_limit": 5.0})
    for sizes in got:
        assert sizes is not None
        assert sizes.has_bias
        assert sizes.clamp == ClampedGate(limit=want.swiglu_limit, alpha=want.swiglu_alpha) == ClampedGate(5.0, 1.702)
    rope = read("gpt_oss").rope
    assert (rope.rope_type, rope.rope_theta, rope.factor, rope.truncate) == ("yarn", 150000.0, 32.0, False)


LLAMA4: list[Mapping[str, Any]] = [
    {},
    {"interleave_moe_layer_step": 2, "num_local_experts": 128, "use_qk_norm": False},
    {"moe_layers": [0, 3], "num_experts_per_tok": 2, "no_rope_layer_interval": 2},
    {"moe_layers": [], "no_rope_layers": []},
]


@pytest.mark.parametrize("keys", LLAMA4)
def test_layers_of_llama_4_are_those_of_transformers(keys: Mapping[str, Any]) -> None:
    got, want = read("llama4_text", **keys), transformers_config("llama4_text", keys)
    assert [layer for layer, sizes in enumerate(got.experts) if sizes is not None] == want.moe_layers
    for sizes in filter(None, got.experts):
        assert (sizes.num_experts, sizes.top_k) == (want.num_local_experts, want.num_experts_per_tok)
        assert sizes.inner_size == sizes.shared_size == want.intermediate_size
        assert sizes.scales_inputs
    assert got.qk_norm == ("unit" if want.use_qk_norm else "")


def test_old_and_new_rope_keys_mean_the_same() -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 2048}
    old = read("qwen2", rope_theta=1e6, rope_scaling={"type": "yarn", **yarn})
    new = read("qwen2", rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, **yarn})
    assert old == new
    assert old.rope.factor == 4.0


def test_an_outer_pretraining_context_wins() -> None:
    """As in transformers, which lets Phi-3's way of writing it win."""
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}
    assert read(rope_parameters=rope, original_max_position_embeddings=512).rope.original_max_position_embeddings == 512
    assert read(rope_parameters=rope).rope.original_max_position_embeddings == 1024


@pytest.mark.parametrize(
    ("keys", "max_model_len"),
    [
        ({}, 2048),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}}, 8192),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}, 2048),
        ({"model_type": "phi3", "rope_scaling": {**LONGROPE, "short_factor": [1] * 8, "long_factor": [2] * 8}}, 4096),
        ({"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 131072),
        ({"model_type": "llama4_text"}, 8192),
        ({"model_type": "llama4_text", "attention_chunk_size": 16384, "attn_temperature_tuning": 4}, 8192),
        ({"model_type": "llama4_text", "attention_chunk_size": 16384, "attn_temperature_tuning": False}, 16384),
        ({"model_type": "llama4_text", "attention_chunk_size": 512}, 512),
        ({"model_type": "llama4_text", "max_position_embeddings": 256}, 256),
    ],
)
def test_max_model_len(keys: Mapping[str, Any], max_model_len: int) -> None:
    assert read(**keys).max_model_len == max_model_len


@pytest.mark.parametrize(
    ("keys", "requested", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "auto", "bfloat16"),
        ({"dtype": "float16"}, "auto", "float16"),
        ({"dtype": "float16"}, "float32", "float32"),
        ({}, "auto", "float32"),
        ({"dtype": "float64"}, "bfloat16", "bfloat16"),
    ],
)
def test_effective_dtype(keys: Mapping[str, Any], requested: str, dtype: str) -> None:
    assert read(**keys).effective_dtype(requested) == dtype


def test_a_dtype_that_cannot_be_served_is_refused_when_it_is_asked_for() -> None:
    with pytest.raises(ModelConfigError, match="dtype 'float64' is not one of float32"):
        read(dtype="float64").effective_dtype("auto")


def test_the_architecture_alone_tells_the_family() -> None:
    assert ModelConfig.from_dict({**SIZES, "architectures": ["Qwen3ForCausalLM"]}).model_type == "qwen3"


REFUSED: list[tuple[Mapping[str, Any], str]] = [
    ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported are cohere2, gemma2, gemma3"),
    ({"model_type": "gemma"}, r"'gemma' is not supported \(its activation depends.*\); supported are cohere2"),
    ({"model_type": "cohere_text"}, "its norms of q and k"),
    ({"model_type": "llama4_text", "attention_chunk_size": None}, "has no attention_chunk_size"),
    ({"model_type": "llama4_text", "moe_layers": 2}, "moe_layers must be a list of layers, got 2"),
    ({"model_type": "llama4_text", "layer_types": ["sliding_attention"] * 4}, "layer_types is not supported"),
    ({"model_type": "llama4_text", "layer_types": ["chunked_attention"]}, "1 entries for 4 layers"),
    (
        {"model_type": "llama4_text", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rope_type 'yarn' with a factor of cos and sin is not supported beside use_qk_norm",
    ),
    ({"model_type": None}, "model_type None"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "'LlamaForSequenceClassification' is not supported"),
    ({"architectures": ["MistralForCausalLM"]}, "it has to be LlamaForCausalLM"),
    ({"hidden_act": "relu2"}, "hidden_act='relu2' is not supported; supported are silu, swish, gelu"),
    ({"model_type": "starcoder2", "hidden_act": "silu"}, "hidden_act='silu'"),
    ({"model_type": "gemma2", "hidden_activation": "relu"}, "hidden_activation='relu'"),
    ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ({"model_type": "gemma2", "sliding_window": None}, "no sliding window is set"),
    ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers must have a 0 or a 1 for each of 4 layers"),
    ({"model_type": "gemma3", "text_config": 3}, "text_config must be an object"),
    ({"model_type": "glm4", "partial_rotary_factor": 2}, "partial_rotary_factor must be at most 1"),
    ({"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1.0]}}, "must be a list of 8 numbers"),
    ({"attn_logit_softcapping": 5.0}, "attn_logit_softcapping=5"),
    ({"model_type": "granite", "residual_multiplier": 0}, "residual_multiplier must be a number > 0"),
    ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5"),
    (
        {"quantization_config": {"quant_method": "hqq"}},
        "quant_method 'hqq' is not supported; supported are compressed-",
    ),
    (
        {"quantization_config": {"quant_method": "awq", "bits": 3}},
        "quantization_config of awq: bits=3 is not supported",
    ),
    ({"quantization_config": ["awq"]}, "quantization_config must be an object"),
    ({"text_config": {"hidden_size": 3}}, "text_config="),
    ({"num_local_experts": 8}, "num_local_experts=8"),
    ({"swiglu_limit": 7.0}, r"swiglu_limit=7\.0 is not supported"),
    ({"model_type": "gpt_oss", "swiglu_limit": 0}, "swiglu_limit must be a number > 0"),
    ({"model_type": "gpt_oss", "sliding_window": None}, "no sliding window is set"),
    ({"model_type": "qwen3_moe", "num_experts": 10**9}, "it has 1000000000 experts in a layer; at most 4096"),
    ({"hidden_size": None}, "has no hidden_size"),
    ({"hidden_size": 64.0}, r"hidden_size must be a whole number >= 1, got 64\.0"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number > 0"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ({"num_key_value_heads": 3}, r"num_attention_heads \(32\) is not a multiple of num_key_value_heads \(3\)"),
    ({"head_dim": 15}, "head_dim must be even"),
    (
        {"model_type": "mistral", "attention_bias": True},
        "attention_bias=True is not supported for model_type 'mistral'",
    ),
    ({"model_type": "qwen2", "mlp_bias": True}, "mlp_bias=True"),
    ({"layer_types": ["sliding_attention"] * 4}, "layer_types is not supported for model_type 'llama'"),
    ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries for 4 layers"),
    ({"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
    (
        {"model_type": "mistral", "layer_types": ["full_attention", "sliding_attention"] * 2},
        "layer_types is not supported for model_type 'mistral'",
    ),
    ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 4}, "no sliding window is set"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
    ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "short_factor must be a list of 8 numbers, got None"),
    ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "rope_type 'mrope'"),
    ({"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}}, "mrope_section="),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor must be a number > 0, got None"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}, "high_freq_factor"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "beta_fast": "x"}}, "beta_fast must be a number"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, r"partial_rotary_factor=0\.25"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
    ({"rope_parameters": "default"}, "rope_parameters must be an object"),
    ({"rope_theta": -1.0}, "rope_theta must be a number > 0"),
]


ODD: tuple[Any, ...] = (
    True,
    -1,
    1.5,
    float("nan"),
    float("inf"),
    10**30,
    "x",
    [],
    [1],
    [[]],
    [{}],
    {},
    {"a": 1},
    [None],
)
ODD_KEYS = (
    *("architectures", "model_type", "layer_types", "hidden_act", "hidden_activation", "partial_rotary_factor"),
    *("rope_scaling", "rope_theta", "max_window_layers", "no_rope_layers", "mlp_only_layers", "quantization_config"),
    *("text_config", "dtype", "head_dim", "sliding_window", "num_experts", "rms_norm_eps", "logit_scale"),
)


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen2", "gemma3_text", "glm4", "phi3", "smollm3", "qwen3_moe", "cohere2", "gpt_oss", "llama4_text"],
)
@pytest.mark.parametrize("key", [*ODD_KEYS, "swiglu_limit", "moe_layers", "attention_chunk_size", "floor_scale"])
def test_values_of_odd_types_are_refused_by_name(family: str, key: str) -> None:
    """Or have no effect; no other error comes out."""
    for value in ODD:
        with contextlib.suppress(ModelConfigError):
            ModelConfig.from_dict(
                {"model_type": family, **SIZES, "use_sliding_window": key != "num_experts", key: value}
            )


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize(
    ("method", "key"), [("compressed-tensors", "sparsity_config"), ("gptq", "checkpoint_format"), ("gptq", "bits")]
)
def test_settings_of_a_form_of_odd_types_are_refused_by_name(method: str, key: str, value: Any) -> None:
    with contextlib.suppress(ModelConfigError):
        read(quantization_config={"quant_method": method, key: value})


@pytest.mark.parametrize(("keys", "message"), REFUSED)
def test_what_is_not_honoured_is_refused_by_name(keys: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        ModelConfig.from_dict({"model_type": "llama", **SIZES, **keys})


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("{", "is not JSON"), ("[" * 100_000, "is not JSON"), (json.dumps([1]), "holds list")],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelConfigError, match=rf"config\.json.*{message}"):
        ModelConfig.from_dir(tmp_path)
