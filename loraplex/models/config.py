"""What a model is: families as data, read from a Hugging Face `config.json`.

A setting that changes the mathematics is honoured or refused by name (`ModelConfigError`). What a file leaves out has
the default of the family's class in transformers. Keys that change nothing in inference (dropout, initialisation, cache
flags) are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.config import DTYPES
from loraplex.core import LongContexts
from loraplex.errors import ModelConfigError
from loraplex.layers.common import ROPE_RULES, RopeParameters
from loraplex.models.checkpoints.forms import form_of
from loraplex.models.checkpoints.gguf import GgufFile
from loraplex.models.checkpoints.stored import Form

DEFAULT_ROPE_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class Family:
    """What tells one family from another. A flag that is a string is the key of config.json that has its value.

    `window_rule`: "none" (no sliding window), "all" (one window for all layers), "upper" (Qwen: `use_sliding_window`,
    and then the layers from `max_window_layers` on, or those that `layer_types` names). `defaults`: for keys that
    config.json leaves out.
    """

    architecture: str
    qkv_bias: bool | str
    o_bias: bool | str
    mlp_bias: bool | str
    qk_norm: bool
    window_rule: str
    defaults: Mapping[str, Any]


_QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        qk_norm=False,
        window_rule="none",
        defaults={"max_position_embeddings": 2048},
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        window_rule="all",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        window_rule="upper",
        defaults=_QWEN_DEFAULTS,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias=False,
        qk_norm=True,
        window_rule="upper",
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
    ),
}
"""By `model_type`."""

COMMON_DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}

NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (None, 1, 1.0),
    "text_config": (None,),
    "vision_config": (None,),
    "add_cross_attention": (None, False),
    "is_encoder_decoder": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "use_mrope": (None, False),
    "use_dual_chunk_attention": (None, False),
    "dual_chunk_attention_config": (None, {}),
}
"""Keys that would change the mathematics, with the values under which they do not; any other value is refused."""


@dataclass(frozen=True, slots=True)
class RopeKeys:
    """Keys of `rope_parameters` that one rule reads: numbers that it needs, numbers that have a default, switches."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()

    @property
    def known(self) -> set[str]:
        return {*self.required, *self.optional, *self.switches, *_ROPE_KEYS_OF_ALL}


# the pretraining context stands beside rules that do not use it, `finetuned` has no effect anywhere
_ROPE_KEYS_OF_ALL = (
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "finetuned"
)  # fmt: skip

ROPE_KEYS: Mapping[str, RopeKeys] = {
    "default": RopeKeys(),
    "linear": RopeKeys(required=("factor",)),
    "llama3": RopeKeys(required=("factor", "low_freq_factor", "high_freq_factor")),
    "yarn": RopeKeys(
        optional=("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        switches=("truncate",),
    ),
}
"""By `rope_type`, the keys of `layers.common.ROPE_RULES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model, under Hugging Face's names. `sliding_windows[i]`: layer i's window in tokens, None for all.

    `dtype` is the checkpoint's, "" when config.json does not say. `form`: of its weights; None: plain floats.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeParameters
    sliding_windows: tuple[int | None, ...]
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str = ""
    form: Form | None = None

    @property
    def max_model_len(self) -> int:
        """The longest sequence in tokens that the rotary embedding is made for.

        yarn and linear scaling stretch the context of the pretraining by `factor`; llama3's `max_position_embeddings`
        is stretched already.
        """
        if self.rope.rope_type == "linear":
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.rope_type == "yarn":
            stretched = int(self.rope.original_max_position_embeddings * self.rope.factor)
            return max(self.max_position_embeddings, stretched)
        return self.max_position_embeddings

    def long_contexts(self, scaling_factors: tuple[float, ...]) -> LongContexts:
        """What adapters with these factors may make of its positions."""
        return LongContexts(self.rope.rope_type, self.max_position_embeddings, self._own_factor, scaling_factors)

    @property
    def _own_factor(self) -> float:
        return self.rope.factor if self.rope.rope_type == "linear" else 1.0

    def effective_dtype(self, requested: str) -> str:
        """`requested`, or under "auto" the checkpoint's dtype (float32 when config.json does not say)."""
        if requested != "auto":
            return requested
        dtype = self.dtype or "float32"
        if dtype not in DTYPES:
            raise ModelConfigError(
                f"config.json: dtype {dtype!r} is not one of {', '.join(DTYPES)}; ask for one of them with --dtype"
            )
        return dtype

    @classmethod
    def from_dir(cls, path: str | Path) -> ModelConfig:
        """Read `path`/config.json, or the metadata where `path` is a GGUF file. Raises ModelConfigError when it is
        missing, no JSON, or not honoured."""
        if Path(path).is_file():
            return cls.from_dict(GgufFile(Path(path)).config(), source=str(path))
        file = Path(path) / "config.json"
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except OSError as e:
            raise ModelConfigError(f"{file}: cannot be read ({e.strerror}); a model directory has a config.json") from e
        except ValueError as e:
            raise ModelConfigError(f"{file}: is not JSON ({e})") from e
        if not isinstance(raw, dict):
            raise ModelConfigError(f"{file}: holds {type(raw).__name__}, not a JSON object")
        return cls.from_dict(raw, source=str(file))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        return _Reader(raw, source).config()


class _Reader:
    """One reading of a config.json: values with defaults, and errors that name the file."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.source = source
        self.model_type = self._model_type(raw)
        self.family = FAMILIES[self.model_type]
        self.values = {**COMMON_DEFAULTS, **self.family.defaults, **raw}

    def config(self) -> ModelConfig:
        self._refuse_what_is_not_honoured()
        num_heads, hidden_size = self.size("num_attention_heads"), self.size("hidden_size")
        num_layers = self.size("num_hidden_layers")
        max_position_embeddings = self.size("max_position_embeddings")
        num_kv_heads = self.size("num_key_value_heads", num_heads)
        head_dim = self.size("head_dim", hidden_size // num_heads)
        self._check_heads(num_heads, num_kv_heads, head_dim)
        return ModelConfig(
            model_type=self.model_type,
            vocab_size=self.size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self.size("intermediate_size"),
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=self.number(self.values, "rms_norm_eps"),
            max_position_embeddings=max_position_embeddings,
            rope=self._rope(max_position_embeddings),
            sliding_windows=self._sliding_windows(num_layers),
            tie_word_embeddings=self.flag("tie_word_embeddings"),
            qkv_bias=self.flag(self.family.qkv_bias),
            o_bias=self.flag(self.family.o_bias),
            mlp_bias=self.flag(self.family.mlp_bias),
            qk_norm=self.family.qk_norm,
            dtype=str(self.values.get("dtype") or self.values.get("torch_dtype") or ""),
            form=self._form(),
        )

    def _form(self) -> Form | None:
        try:
            return form_of(self.values.get("quantization_config") or self.values.get("compression_config"))
        except ValueError as e:
            raise self.refuse(str(e)) from e

    def refuse(self, what: str) -> ModelConfigError:
        return ModelConfigError(f"{self.source}: {what}")

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number >= 1; a key that is absent or null has the default."""
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise self.refuse(f"has no {key}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refuse(f"{key} must be a whole number >= 1, got {value!r}")
        return value

    def number(self, values: Mapping[str, Any], key: str) -> float:
        value = values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.refuse(f"{key} must be a number > 0, got {value!r}")
        return float(value)

    def flag(self, key: bool | str) -> bool:
        if isinstance(key, bool):
            return key
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(f"{key} must be true or false, got {value!r}")
        return bool(value)

    def _model_type(self, raw: Mapping[str, Any]) -> str:
        known = {family.architecture: model_type for model_type, family in FAMILIES.items()}
        architectures = raw.get("architectures") or ()
        model_type = raw.get("model_type") or (known.get(architectures[0]) if architectures else None)
        if model_type not in FAMILIES:
            raise self.refuse(f"model_type {model_type!r} is not supported; supported are {', '.join(FAMILIES)}")
        for architecture in architectures:
            if known.get(architecture) != model_type:
                raise self.refuse(
                    f"architecture {architecture!r} is not supported for model_type {model_type!r}; "
                    f"it has to be {FAMILIES[model_type].architecture}"
                )
        return str(model_type)

    def _refuse_what_is_not_honoured(self) -> None:
        for key, neutral in NEUTRAL_VALUES.items():
            value = self.values.get(key, neutral[0])
            if value not in neutral:
                raise self.refuse(f"{key}={value!r} is not supported; only {' or '.join(map(repr, neutral))}")
        honoured_flags = (self.family.qkv_bias, self.family.o_bias, self.family.mlp_bias)
        for key in ("attention_bias", "mlp_bias"):
            is_implied = key == "attention_bias" and self.family.qkv_bias is True
            if self.flag(key) and key not in honoured_flags and not is_implied:
                raise self.refuse(f"{key}=True is not supported for model_type {self.model_type!r}")

    def _check_heads(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        if num_heads % num_kv_heads:
            raise self.refuse(
                f"num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads ({num_kv_heads})"
            )
        if head_dim % 2:
            raise self.refuse(f"head_dim must be even for the rotary embedding, got {head_dim}")

    # ------------------------------------------------------------------------------------------------ sliding window

    def _sliding_windows(self, num_layers: int) -> tuple[int | None, ...]:
        """Layer by layer: None, or the number of last tokens (itself included) that a token sees."""
        rule = self.family.window_rule
        is_used = rule == "all" or (rule == "upper" and self.flag("use_sliding_window"))
        window = self.size("sliding_window") if is_used and self.values.get("sliding_window") is not None else None
        by_default = self._default_layer_types(rule, window, num_layers)
        layer_types = self._layer_types(rule, by_default)
        if window is None and "sliding_attention" in layer_types:
            raise self.refuse(
                "layer_types has sliding_attention but no sliding window is set (sliding_window, use_sliding_window)"
            )
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types)

    def _default_layer_types(self, rule: str, window: int | None, num_layers: int) -> tuple[str, ...]:
        first = 0 if rule == "all" or window is None else int(self.values["max_window_layers"])
        is_sliding = [window is not None and i >= first for i in range(num_layers)]
        return tuple("sliding_attention" if sliding else "full_attention" for sliding in is_sliding)

    def _layer_types(self, rule: str, by_default: tuple[str, ...]) -> tuple[str, ...]:
        """`layer_types` of the file where its family honours it; elsewhere it may only say what holds anyway."""
        given = self.values.get("layer_types")
        if given is None:
            return by_default
        if len(given) != len(by_default):
            raise self.refuse(f"layer_types has {len(given)} entries for {len(by_default)} layers")
        if unknown := sorted({str(kind) for kind in given} - {"full_attention", "sliding_attention"}):
            raise self.refuse(f"layer_types {unknown} are not supported; only full_attention and sliding_attention")
        if rule != "upper" and tuple(given) != by_default:
            raise self.refuse(f"layer_types is not supported for model_type {self.model_type!r}; remove it")
        return tuple(given)

    # ------------------------------------------------------------------------------------------------ rotary embedding

    def _rope(self, max_position_embeddings: int) -> RopeParameters:
        """From `rope_parameters` (transformers 5), or `rope_scaling` with `rope_theta` beside it (before)."""
        given = self._rope_dict()
        rope_type = self._rope_type(given)
        keys = ROPE_KEYS[rope_type]
        theta = given.get("rope_theta") or self.values.get("rope_theta") or DEFAULT_ROPE_THETA
        rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": self.number({"rope_theta": theta}, "rope_theta")}
        optional = [key for key in keys.optional if given.get(key) is not None]
        rope |= {key: self.number(given, key) for key in (*keys.required, *optional)}
        rope |= {key: given[key] is not False for key in keys.switches if key in given}
        if rope_type in ("llama3", "yarn"):
            context = given.get("original_max_position_embeddings") or max_position_embeddings
            rope["original_max_position_embeddings"] = self.size("original_max_position_embeddings", context)
        if rope_type == "yarn":
            rope.setdefault("factor", max_position_embeddings / rope["original_max_position_embeddings"])
        return RopeParameters(**rope)

    def _rope_dict(self) -> Mapping[str, Any]:
        given = self.values.get("rope_scaling") or self.values.get("rope_parameters") or {}
        if not isinstance(given, Mapping):
            raise self.refuse(f"rope_parameters must be an object, got {given!r}")
        if nested := [key for key, value in given.items() if isinstance(value, Mapping)]:
            raise self.refuse(f"rope_parameters per layer type ({', '.join(nested)}) are not supported")
        return given

    def _rope_type(self, given: Mapping[str, Any]) -> str:
        rope_type = str(given.get("rope_type") or given.get("type") or "default")
        if rope_type not in ROPE_RULES:
            raise self.refuse(f"rope_type {rope_type!r} is not supported; supported are {', '.join(ROPE_RULES)}")
        if (partial := given.get("partial_rotary_factor")) not in (None, 1, 1.0):
            raise self.refuse(f"partial_rotary_factor={partial!r} is not supported; only 1")
        for key, value in given.items():
            if key not in ROPE_KEYS[rope_type].known and value is not None:
                raise self.refuse(f"rope_parameters: {key}={value!r} is not supported for rope_type {rope_type!r}")
        return rope_type
