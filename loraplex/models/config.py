"""What a model is, read from a Hugging Face `config.json`; families are data (models/families.py).

A setting that changes the mathematics is honoured or refused by name (`ModelConfigError`). What a file leaves out has
the default of the family's class in transformers. Keys that change nothing in inference (dropout, initialisation, cache
flags) are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.config import DTYPES
from loraplex.core import LongContexts
from loraplex.errors import ModelConfigError
from loraplex.kernels.experts import ClampedGate
from loraplex.layers.common import ROPE_RULES, RopeParameters, rope_attention_factor
from loraplex.layers.moe import ExpertSizes
from loraplex.models.checkpoints.expert_stacks import MAX_EXPERTS
from loraplex.models.checkpoints.forms import form_of
from loraplex.models.checkpoints.gguf import GgufFile
from loraplex.models.checkpoints.stored import Form
from loraplex.models.families import FAMILIES, NOT_SERVED, Family

MAX_NUMBER = 1e300
"""NaN, infinity and what no float64 holds are no numbers."""

DEFAULT_ROPE_THETA = 10000.0
GLOBAL_ROPE_THETA = 1000000.0
"""Of layers without a window, where those with one have a base of their own."""


COMMON_DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}

ACTIVATIONS: Mapping[str, str] = {
    **{"silu": "silu", "swish": "silu", "gelu": "gelu"},
    **{"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"},
}
"""`hidden_act` of config.json -> what the MLP has."""

NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (None, 1, 1.0),
    "text_config": (None,),
    "vision_config": (None,),
    "add_cross_attention": (None, False),
    "is_encoder_decoder": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (None, False),
    "clip_qkv": (None,),
    "swiglu_limit": (None,),
    "swiglu_alpha": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "use_mrope": (None, False),
    "use_dual_chunk_attention": (None, False),
    "dual_chunk_attention_config": (None, {}),
}
"""Keys that would change the mathematics, with the values under which they do not; any other value is refused."""


@dataclass(frozen=True, slots=True)
class RopeKeys:
    """Keys of `rope_parameters` that one rule reads: numbers that it needs, numbers that have a default, switches,
    lists of a number for each pair of dimensions."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()

    @property
    def known(self) -> set[str]:
        return {*self.required, *self.optional, *self.switches, *self.lists, *_ROPE_KEYS_OF_ALL}


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
    "longrope": RopeKeys(optional=("factor", "attention_factor"), lists=("short_factor", "long_factor")),
}
"""By `rope_type`, the keys of `layers.common.ROPE_RULES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model, under Hugging Face's names. `sliding_windows[i]`: layer i's window in tokens, None for all.

    ropes: the rotary embeddings, all of the first `rotary_dim` dimensions of a head; layer_ropes[i]: layer i's of them,
    None for no positions. activation: "silu", "gelu" or "gelu_tanh". Scores of attention are multiplied by
    `attention_scale`, logits by `logit_scale`; then a soft cap c makes c tanh(s / c) of them, None for none. What a
    block adds to the residual is multiplied by `residual_scale`, rows of the embedding by `embedding_scale`.
    experts[i]: of layer i, None where it has an MLP; () for a family without. qk_norm: as the family's. span: where
    sequences end for another reason than positions, in tokens; None: there is none.
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
    rotary_dim: int
    ropes: tuple[RopeParameters, ...]
    layer_ropes: tuple[int | None, ...]
    attention_scale: float
    sliding_windows: tuple[int | None, ...]
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    activation: str = "silu"
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    logit_scale: float = 1.0
    residual_scale: float = 1.0
    embedding_scale: float = 1.0
    experts: tuple[ExpertSizes | None, ...] = ()
    qk_norm: str = ""
    span: int | None = None
    dtype: str = ""
    form: Form | None = None

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def rope(self) -> RopeParameters:
        """Of the layers without a window, where those with one have another."""
        return self.ropes[0]

    @property
    def max_model_len(self) -> int:
        """The longest sequence in tokens that the rotary embedding is made for, within `span`.

        yarn and linear scaling stretch the context of the pretraining by `factor`; llama3's `max_position_embeddings`
        is stretched already, and so is that of a family with two rotary embeddings. longrope has other frequencies
        beyond the pretraining's context, for all of a sequence (docs/models.md): it ends there.
        """
        return self._num_positions if self.span is None else min(self.span, self._num_positions)

    @property
    def _num_positions(self) -> int:
        if self.rope.rope_type == "longrope":
            return min(self.max_position_embeddings, self.rope.original_max_position_embeddings)
        if len(self.ropes) > 1:
            return self.max_position_embeddings
        if self.rope.rope_type == "linear":
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.rope_type == "yarn":
            stretched = int(self.rope.original_max_position_embeddings * self.rope.factor)
            return max(self.max_position_embeddings, stretched)
        return self.max_position_embeddings

    def long_contexts(self, scaling_factors: tuple[float, ...]) -> LongContexts:
        """What adapters with these factors may make of its positions."""
        rope_type = self.rope.rope_type if len(self.ropes) == 1 else "two bases"
        rope_type = rope_type if self.span is None else "beside attention in chunks"
        return LongContexts(rope_type, self.max_position_embeddings, self._own_factor, scaling_factors)

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
        except (ValueError, RecursionError) as e:
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
        raw = self._text_part(raw)
        self.model_type = self._model_type(raw)
        self.family = FAMILIES[self.model_type]
        self.given = raw
        self.values = {**COMMON_DEFAULTS, **self.family.defaults, **raw}
        self.values |= {ours: self.values.get(theirs) for ours, theirs in self.family.renamed.items()}

    def config(self) -> ModelConfig:
        self._refuse_what_is_not_honoured()
        num_heads, hidden_size = self.size("num_attention_heads"), self.size("hidden_size")
        num_layers = self.size("num_hidden_layers")
        max_position_embeddings = self.size("max_position_embeddings")
        num_kv_heads = self.size("num_key_value_heads", num_heads)
        head_dim = self.size("head_dim", hidden_size // num_heads)
        rotary_dim = int(head_dim * self._partial_rotary_factor())
        self._check_heads(num_heads, num_kv_heads, rotary_dim)
        layer_types = self._layer_types(num_layers)
        ropes = tuple(self._rope(given, rotary_dim, max_position_embeddings) for given in self._rope_dicts())
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
            rotary_dim=rotary_dim,
            ropes=ropes,
            layer_ropes=self._layer_ropes(layer_types),
            attention_scale=self._attention_scale(head_dim),
            sliding_windows=self._sliding_windows(layer_types),
            tie_word_embeddings=self.flag("tie_word_embeddings"),
            qkv_bias=self.flag(self.family.qkv_bias),
            o_bias=self.flag(self.family.o_bias),
            mlp_bias=self.flag(self.family.mlp_bias),
            activation=self._activation(),
            attention_softcap=self._softcap("attn_logit_softcapping"),
            logit_softcap=self._softcap("final_logit_softcapping"),
            logit_scale=self._multiplier("logit_scale") / self._multiplier("logits_scaling"),
            residual_scale=self._multiplier("residual_multiplier"),
            embedding_scale=self._embedding_scale(hidden_size),
            experts=self._experts(num_layers),
            qk_norm=self._qk_norm(ropes),
            span=self._span(),
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
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MAX_NUMBER:
            raise self.refuse(f"{key} must be a number > 0, got {value!r}")
        return float(value)

    def flag(self, key: bool | str) -> bool:
        if isinstance(key, bool):
            return key
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(f"{key} must be true or false, got {value!r}")
        return bool(value)

    def _text_part(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Of a model that is a family of here beside other parts: what its config.json says of that."""
        text_of = {family.text_of: model_type for model_type, family in FAMILIES.items() if family.text_of}
        model_type = text_of.get(str(raw.get("model_type")))
        if model_type is None:
            return raw
        text = raw.get("text_config") or {}
        if not isinstance(text, Mapping):
            raise self.refuse(f"text_config must be an object, got {text!r}")
        shared = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
        outer = {key: raw[key] for key in shared if key in raw}
        return {**outer, **text, "architectures": None, "model_type": model_type}

    def _model_type(self, raw: Mapping[str, Any]) -> str:
        known = {family.architecture: model_type for model_type, family in FAMILIES.items()}
        architectures = raw.get("architectures") or ()
        if not isinstance(architectures, list | tuple) or not all(isinstance(each, str) for each in architectures):
            raise self.refuse(f"architectures must be a list of names, got {architectures!r}")
        model_type = raw.get("model_type") or (known.get(architectures[0]) if architectures else None)
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            missing = NOT_SERVED.get(str(model_type).removesuffix("_text"))
            because = f" ({missing})" if missing else ""
            supported = ", ".join(sorted([*FAMILIES, *(each.text_of for each in FAMILIES.values() if each.text_of)]))
            raise self.refuse(f"model_type {model_type!r} is not supported{because}; supported are {supported}")
        for architecture in architectures:
            if known.get(architecture) != model_type:
                raise self.refuse(
                    f"architecture {architecture!r} is not supported for model_type {model_type!r}; "
                    f"it has to be {FAMILIES[model_type].architecture}"
                )
        return model_type

    def _refuse_what_is_not_honoured(self) -> None:
        for key, neutral in NEUTRAL_VALUES.items():
            if key in self.family.honoured:
                continue
            value = self.values.get(key, neutral[0])
            if value not in neutral:
                raise self.refuse(f"{key}={value!r} is not supported; only {' or '.join(map(repr, neutral))}")
        honoured_flags = (self.family.qkv_bias, self.family.o_bias, self.family.mlp_bias)
        for key in ("attention_bias", "mlp_bias"):
            is_implied = key == "attention_bias" and self.family.qkv_bias is True
            if self.flag(key) and key not in honoured_flags and not is_implied:
                raise self.refuse(f"{key}=True is not supported for model_type {self.model_type!r}")

    def _multiplier(self, key: str) -> float:
        return self.number(self.values, key) if key in self.family.honoured else 1.0

    def _embedding_scale(self, hidden_size: int) -> float:
        return float(hidden_size**0.5) if self.family.scales_embedding else self._multiplier("embedding_multiplier")

    def _softcap(self, key: str) -> float | None:
        is_capped = key in self.family.honoured and self.values.get(key) is not None
        return self.number(self.values, key) if is_capped else None

    def _attention_scale(self, head_dim: int) -> float:
        if "query_pre_attn_scalar" in self.family.honoured:
            return float(self.number(self.values, "query_pre_attn_scalar") ** -0.5)
        if "attention_multiplier" in self.family.honoured:
            return self.number(self.values, "attention_multiplier")
        return float(head_dim**-0.5)

    def _activation(self) -> str:
        name = self.values["hidden_act"]
        if (
            not isinstance(name, str)
            or name not in ACTIVATIONS
            or not (self.family.is_gated or ACTIVATIONS[name].startswith("gelu"))
        ):
            key = self.family.renamed.get("hidden_act", "hidden_act")
            raise self.refuse(f"{key}={name!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def _experts(self, num_layers: int) -> tuple[ExpertSizes | None, ...]:
        """Layer by layer; files name the number of experts either way, whatever their family's code does."""
        keys = self.family.experts
        if keys is None:
            return ()
        if self.values.get("use_sliding_window"):
            raise self.refuse(f"use_sliding_window=True is not supported for model_type {self.model_type!r}")
        default = self.family.defaults.get("num_experts") or self.family.defaults["num_local_experts"]
        given = [self.given.get(each) for each in ("num_experts", "num_local_experts")]
        num_experts = self.size("num_experts" if given[0] is not None else "num_local_experts", default)
        if num_experts > MAX_EXPERTS:
            raise self.refuse(f"it has {num_experts} experts in a layer; at most {MAX_EXPERTS} are served")
        top_k = self.size("num_experts_per_tok")
        if top_k > num_experts:
            raise self.refuse(f"num_experts_per_tok ({top_k}) is more than there are experts ({num_experts})")
        if self._activation() != "silu":
            raise self.refuse(f"hidden_act={self.values['hidden_act']!r} is not supported for experts; only silu")
        shared = self.size(keys.shared_size) if keys.shared_size else 0
        clamp = ClampedGate(*(self.number(self.values, key) for key in keys.clamp)) if keys.clamp else None
        sizes = ExpertSizes(
            *(num_experts, top_k, self.size(keys.inner_size), self.flag(keys.normalizes), shared),
            *(keys.has_bias, clamp, keys.scales_inputs),
        )
        flags = self._expert_flags(keys.layers, num_layers) if keys.layers else [True] * num_layers
        return tuple(sizes if has_experts else None for has_experts in flags)

    def _expert_flags(self, key: str, num_layers: int) -> list[bool]:
        """Which layers have experts, by `ExpertKeys.layers`."""
        listed, is_without = self.values[key], key == "mlp_only_layers"
        if listed is not None and not isinstance(listed, list | tuple):
            raise self.refuse(f"{key} must be a list of layers, got {listed!r}")
        if listed is not None and not is_without:
            return [layer in listed for layer in range(num_layers)]
        every = self.size("decoder_sparse_step" if is_without else "interleave_moe_layer_step")
        return [(layer + 1) % every == 0 and layer not in (listed or ()) for layer in range(num_layers)]

    def _qk_norm(self, ropes: Sequence[RopeParameters]) -> str:
        kind = self.family.qk_norm
        if kind != "unit":
            return kind
        if not self.flag("use_qk_norm"):
            return ""
        for rope in ropes:  # the norm is behind the rotation, whose factor it would undo; here it is before
            if rope_attention_factor(rope) != 1:
                text = f"rope_type {rope.rope_type!r} with a factor of cos and sin is not supported beside use_qk_norm"
                raise self.refuse(text)
        return kind

    def _span(self) -> int | None:
        """Up to it Llama 4's attention is causal in all layers: a chunk ends there, or the factor of queries of layers
        without positions, 1 + attn_scale log(1 + floor((position + 1) / floor_scale)), becomes more than 1."""
        if self.family.layer_rule != "chunks":
            return None
        is_tuned = bool(self.values["attn_temperature_tuning"])  # older files have a number
        chunk = self.size("attention_chunk_size")
        return min(chunk, self.size("floor_scale")) if is_tuned else chunk

    def _check_heads(self, num_heads: int, num_kv_heads: int, rotary_dim: int) -> None:
        if num_heads % num_kv_heads:
            raise self.refuse(
                f"num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads ({num_kv_heads})"
            )
        if rotary_dim % 2 or rotary_dim == 0:
            raise self.refuse(f"head_dim must be even for the rotary embedding, got {rotary_dim}")

    # ------------------------------------------------------------------------------------------------ layer by layer

    def _sliding_windows(self, layer_types: tuple[str, ...]) -> tuple[int | None, ...]:
        """Layer by layer: None, or the number of last tokens (itself included) that a token sees."""
        window = self._window()
        if window is None and "sliding_attention" in layer_types:
            raise self.refuse(
                "layer_types has sliding_attention but no sliding window is set (sliding_window, use_sliding_window)"
            )
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types)

    def _window(self) -> int | None:
        rule = self.family.layer_rule
        is_used = rule in ("all", "pattern") or (rule in ("upper", "no_rope") and self.flag("use_sliding_window"))
        return self.size("sliding_window") if is_used and self.values.get("sliding_window") is not None else None

    def _layer_types(self, num_layers: int) -> tuple[str, ...]:
        """`layer_types` of the file where its family honours it; elsewhere it may only say what holds anyway."""
        by_default = tuple(
            "sliding_attention" if is_sliding else "full_attention" for is_sliding in self._default_slides(num_layers)
        )
        given = self.values.get("layer_types")
        if given is None:
            return by_default
        if not isinstance(given, list | tuple):
            raise self.refuse(f"layer_types must be a list, got {given!r}")
        if self.family.layer_rule == "chunks":
            given = ["full_attention" if kind == "chunked_attention" else kind for kind in given]
        if len(given) != len(by_default):
            raise self.refuse(f"layer_types has {len(given)} entries for {len(by_default)} layers")
        if unknown := sorted({str(kind) for kind in given} - {"full_attention", "sliding_attention"}):
            raise self.refuse(f"layer_types {unknown} are not supported; only full_attention and sliding_attention")
        if self.family.layer_rule in ("none", "all", "chunks") and tuple(given) != by_default:
            raise self.refuse(f"layer_types is not supported for model_type {self.model_type!r}; remove it")
        return tuple(given)

    def _default_slides(self, num_layers: int) -> list[bool]:
        """Which layers have the window where the file does not name them."""
        rule, has_window = self.family.layer_rule, self._window() is not None
        if rule == "pattern":
            pattern = self.size("sliding_window_pattern")
            return [(layer + 1) % pattern != 0 for layer in range(num_layers)]
        if rule == "no_rope":
            return [has_window and not has_rope for has_rope in self._rope_flags(num_layers)]
        first = self.values["max_window_layers"] if rule == "upper" and has_window else 0
        if type(first) is not int:
            raise self.refuse(f"max_window_layers must be a whole number, got {first!r}")
        return [has_window and layer >= first for layer in range(num_layers)]

    def _rope_flags(self, num_layers: int) -> list[bool]:
        """`no_rope_layers`, which has a 1 where there are positions."""
        given = self.values.get("no_rope_layers")
        if given is None or given == []:
            interval = self.size("no_rope_layer_interval")
            return [(layer + 1) % interval != 0 for layer in range(num_layers)]
        if not isinstance(given, list) or len(given) < num_layers or not {*given} <= {0, 1}:
            raise self.refuse(f"no_rope_layers must have a 0 or a 1 for each of {num_layers} layers, got {given!r}")
        return [flag == 1 for flag in given[:num_layers]]

    def _layer_ropes(self, layer_types: tuple[str, ...]) -> tuple[int | None, ...]:
        rule, is_sliding = self.family.rope_rule, [kind == "sliding_attention" for kind in layer_types]
        if rule == "types":
            return tuple(map(int, is_sliding))
        flags = self._rope_flags(len(layer_types)) if rule == "no_rope" else is_sliding
        return tuple(0 if has_rope or rule == "all" else None for has_rope in flags)

    # ------------------------------------------------------------------------------------------------ rotary embedding

    def _rope(self, given: Mapping[str, Any], rotary_dim: int, max_position_embeddings: int) -> RopeParameters:
        rope_type = self._rope_type(given)
        keys = ROPE_KEYS[rope_type]
        theta = given.get("rope_theta") or self.values.get("rope_theta") or DEFAULT_ROPE_THETA
        rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": self.number({"rope_theta": theta}, "rope_theta")}
        optional = [key for key in keys.optional if given.get(key) is not None]
        rope |= {key: self.number(given, key) for key in (*keys.required, *optional)}
        rope |= {key: given[key] is not False for key in keys.switches if key in given}
        rope |= {key: self._numbers(given, key, rotary_dim // 2) for key in keys.lists}
        if rope_type in ("llama3", "yarn", "longrope"):
            context = given.get("original_max_position_embeddings") or max_position_embeddings
            rope["original_max_position_embeddings"] = self.size("original_max_position_embeddings", context)
        if rope_type in ("yarn", "longrope"):
            rope.setdefault("factor", max_position_embeddings / rope["original_max_position_embeddings"])
        return RopeParameters(**rope)

    def _numbers(self, given: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
        values = given.get(key)
        if not isinstance(values, list) or len(values) != count:
            raise self.refuse(f"rope_parameters: {key} must be a list of {count} numbers, got {values!r}")
        return tuple(self.number({key: value}, key) for value in values)

    def _rope_dicts(self) -> tuple[Mapping[str, Any], ...]:
        """`rope_parameters` (transformers 5), or `rope_scaling` with `rope_theta` beside it (before): one for each of
        the model's rotary embeddings."""
        given = self.values.get("rope_scaling") or self.values.get("rope_parameters") or {}
        if not isinstance(given, Mapping):
            raise self.refuse(f"rope_parameters must be an object, got {given!r}")
        nested = [key for key, value in given.items() if isinstance(value, Mapping)]
        if self.family.rope_rule != "types":
            if nested:
                raise self.refuse(f"rope_parameters per layer type ({', '.join(nested)}) are not supported")
            return (given,)
        if unknown := {*given} - {"full_attention", "sliding_attention"} if nested else set():
            raise self.refuse(f"rope_parameters of {', '.join(sorted(unknown))} are not supported")
        full, sliding = (
            (given.get(f"{each}_attention") or {} for each in ("full", "sliding")) if nested else (given, {})
        )
        full_theta, sliding_theta = self.values.get("rope_theta"), self.values.get("rope_local_base_freq")
        return (
            {"rope_theta": full_theta or GLOBAL_ROPE_THETA, **full},
            {"rope_theta": sliding_theta or DEFAULT_ROPE_THETA, **sliding},
        )

    def _partial_rotary_factor(self) -> float:
        """Of a head's dimensions, the part that has positions."""
        given = self.values.get("rope_scaling") or self.values.get("rope_parameters") or {}
        inner = given.get("partial_rotary_factor") if isinstance(given, Mapping) else None
        factor = self.values.get("partial_rotary_factor") if inner is None else inner
        if "partial_rotary_factor" not in self.family.honoured or factor is None:
            return 1.0
        if (factor := self.number({"partial_rotary_factor": factor}, "partial_rotary_factor")) > 1:
            raise self.refuse(f"partial_rotary_factor must be at most 1, got {factor!r}")
        return factor

    def _rope_type(self, given: Mapping[str, Any]) -> str:
        rope_type = str(given.get("rope_type") or given.get("type") or "default")
        rope_type = self.family.rope_names.get(rope_type, rope_type)
        if rope_type not in ROPE_RULES:
            raise self.refuse(f"rope_type {rope_type!r} is not supported; supported are {', '.join(ROPE_RULES)}")
        partial = given.get("partial_rotary_factor")
        if "partial_rotary_factor" not in self.family.honoured and partial not in (None, 1, 1.0):
            raise self.refuse(f"partial_rotary_factor={partial!r} is not supported; only 1")
        for key, value in given.items():
            if key not in ROPE_KEYS[rope_type].known and value is not None:
                raise self.refuse(f"rope_parameters: {key}={value!r} is not supported for rope_type {rope_type!r}")
        return rope_type
