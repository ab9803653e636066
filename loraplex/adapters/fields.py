"""The fields of adapter_config.json: each is honoured, ignored (training only) or refused when set, and read here.

The names are those of `peft.LoraConfig` in versions 0.1 to 0.21 and of vLLM's additions; each other kind has a table of
its own. A test fails when the installed peft has a field that is in none of them.
"""

from __future__ import annotations

import enum
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from loraplex.adapters.kinds import AS_LORA, MERGE, PEFT_TYPES, Kind, TypeVerdict
from loraplex.adapters.patterns import BlockDiagonal, PatternError, check_patterns
from loraplex.config import MAX_CONTEXT, MAX_CONTEXT_FACTOR
from loraplex.errors import MAX_SHOWN_CHARS, shown

MAX_PATTERN_KEYS = 2**13
"""Of rank_pattern, alpha_pattern and target_parameters each: nine for every linear of a model of 126 layers."""

MAX_FIELDS = 512

MAX_BLOCK_NAMES = 128
"""For A and for B of use_bdlora: each is looked for in the name of each module, which may be thousands."""

MAX_RANK = 2**16
"""Beyond any linear; keeps numbers from a file from overflowing."""

MAX_FACTOR = 2**31
"""Of decompose_factor: beyond any linear, too."""

MAX_TOKEN_ID = 2**31
"""Beyond any vocabulary; ids are kept as int64."""

MAX_INVOCATION_TOKENS = 1024
"""Of aLoRA: far beyond the header of a message."""

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.]+")
_MASK_KEY = re.compile(r"(?P<module>.+)\.lora_E(?:\.default)?")
"""Keys of AdaLoRA's rank_pattern."""


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
HONOURED |= {"fan_in_fan_out", "bias", "lora_bias", "use_dora", "use_bdlora", "alora_invocation_tokens"}
HONOURED |= {"modules_to_save", "trainable_token_indices", "ensure_weight_tying"}
HONOURED |= {"context_length", "vllm_max_position_embeddings", "vllm_long_context_scaling_factor"}
HONOURED |= {"vllm_lora_scaling_factor", "target_parameters"}

IGNORED_OF_ALL = {
    "task_type": "names the training task",
    "auto_mapping": "names the base model's class",
    "peft_version": "names the version that saved the adapter",
    "base_model_name_or_path": "names the base model; its dimensions are what is checked",
    "revision": "names the revision of the base model",
    "inference_mode": "only freezes the weights",
}

IGNORED = {
    **IGNORED_OF_ALL,
    "lora_dropout": "acts in training only",
    "megatron_config": "chooses layers of the training framework",
    "megatron_core": "chooses the training framework",
    "runtime_config": "peft ignores it in files, too",
    "eva_config": "configures an initialisation; the resulting ranks are in rank_pattern",
    "loftq_config": "peft ignores it unless init_lora_weights is 'loftq'",
    "corda_config": "peft ignores it unless init_lora_weights is 'corda'",
    "lora_ga_config": "configures an initialisation; init_lora_weights 'lora_ga' is refused",
    "qalora_group_size": "counts only with use_qalora, which is refused",
    "merge_weights": "peft 0.1 merged for speed; the result is the same",
}

_PLAIN = "train a plain LoRA"
_CONTEXT = "say how far the context reaches with context_length"
CONTEXT_FIELDS = ("context_length", "vllm_max_position_embeddings", "vllm_long_context_scaling_factor")
_NO_CONTEXT = dict.fromkeys((*CONTEXT_FIELDS, "vllm_lora_scaling_factor"), "only a plain LoRA has it here")

REFUSED = {
    "layer_replication": f"a base model with repeated layers is another model; {_PLAIN} on the base as it is",
    "use_qalora": f"QALoRA pools the inputs and is not supported; {_PLAIN}",
    "arrow_config": "Arrow routing between adapters is not supported; serve the adapters by name",
    "kasa_config": f"KaSA truncates the base weights; {_PLAIN}",
    "monteclora_config": f"Monte Carlo LoRA is not supported; {_PLAIN}",
    "velora_config": "the file has training buffers; VeLoRA infers as plain LoRA: "
    "set it to null and drop the lora_velora_embed tensors",
    "enable_lora": "LoRA on parts of a fused layer (peft 0.2) is not supported; save the adapter with a newer peft",
    "vllm_long_context_scaling_factors": _CONTEXT,
    "long_lora_scaling_factors": _CONTEXT,
    "long_lora_max_len": _CONTEXT,
    "max_position_embeddings": _CONTEXT,
    "added_tokens_config": "tokens are added by the tokenizer's files and by rows of embed_tokens and lm_head in the "
    "adapter's weights; save it with save_embedding_layers=True",
}


@dataclass(frozen=True, slots=True)
class FieldTable:
    """The fields of one kind. What is ignored or refused says why."""

    honoured: frozenset[str]
    ignored: Mapping[str, str]
    refused: Mapping[str, str]


_TARGETS = {"peft_type", "target_modules", "exclude_modules", "modules_to_save"}
_LAYERS = {"layers_to_transform", "layers_pattern"}
_START = "says where training began"
_ALLOCATION = "allots ranks in training"
_BY_ADALORA = "peft's AdaLoRA does not read it"
_LYCORIS = FieldTable(
    frozenset({*_TARGETS, *_LAYERS, "r", "alpha", "rank_pattern", "alpha_pattern"}),
    {
        **IGNORED_OF_ALL,
        "init_weights": _START,
        "rank_dropout": "acts in training only",
        "module_dropout": "acts in training only",
        "use_effective_conv2d": "is about convolutions; the base's layers are nn.Linear",
    },
    {},
)

TABLES: dict[Kind, FieldTable] = {
    Kind.LORA: FieldTable(frozenset(HONOURED), IGNORED, REFUSED),
    Kind.ADALORA: FieldTable(
        frozenset({*_TARGETS, *_LAYERS, "init_r", "lora_alpha", "rank_pattern", "fan_in_fan_out", "bias"})
        | {"ensure_weight_tying"},
        {
            **{name: reason for name, reason in IGNORED.items() if name != "loftq_config"},
            **dict.fromkeys(("target_r", "tinit", "tfinal", "deltaT", "beta1", "beta2", "total_step"), _ALLOCATION),
            "orth_reg_weight": "weighs a loss of training",
            "r": "the rank is init_r, or what rank_pattern leaves of it",
            **dict.fromkeys(("alpha_pattern", "use_rslora", "lora_bias"), _BY_ADALORA),
            "init_lora_weights": "peft's AdaLoRA begins in one way only",
        },
        {
            **REFUSED,
            **_NO_CONTEXT,
            "target_parameters": "peft's AdaLoRA does not read it; set it to null",
            "trainable_token_indices": "trained tokens are served of LoRA and TRAINABLE_TOKENS; train one of them",
            "use_dora": "peft has no AdaLoRA with DoRA; set it to false",
            "use_bdlora": "peft has no block-diagonal AdaLoRA; set it to null",
            "alora_invocation_tokens": "peft has no activated AdaLoRA; set it to null",
            "loftq_config": "peft has no AdaLoRA with LoftQ; set it to null",
        },
    ),
    Kind.IA3: FieldTable(
        frozenset({*_TARGETS, "feedforward_modules", "fan_in_fan_out"}),
        {**IGNORED_OF_ALL, "init_ia3_weights": _START},
        {},
    ),
    Kind.LOHA: _LYCORIS,
    Kind.LOKR: FieldTable(
        _LYCORIS.honoured | {"decompose_both", "decompose_factor"},
        {**_LYCORIS.ignored, "rank_dropout_scale": "acts in training only"},
        _LYCORIS.refused,
    ),
    Kind.VERA: FieldTable(
        frozenset({"peft_type", "target_modules", "modules_to_save", *_LAYERS, "r", "save_projection", "bias"})
        | {"fan_in_fan_out"},
        {
            **IGNORED_OF_ALL,
            "init_weights": _START,
            "d_initial": _START,
            "vera_dropout": "acts in training only",
            "projection_prng_key": "made vera_A and vera_B, which are in the file",
        },
        {},
    ),
    Kind.LN_TUNING: FieldTable(frozenset(_TARGETS), IGNORED_OF_ALL, {}),
    Kind.TRAINABLE_TOKENS: FieldTable(
        frozenset({"peft_type", "target_modules", "token_indices"}), {**IGNORED_OF_ALL, "init_weights": _START}, {}
    ),
}

INIT_THAT_KEEPS_BASE = ("gaussian", "eva", "orthogonal", "mica")
"""Strings of init_lora_weights that only choose where training starts."""

INIT_THAT_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of init_lora_weights that subtract the start from the base weights: the file is no delta to the base."""


_OF_ALL_ROWS = "it acts on the rows before the invocation, too"
_NOT_ACTIVATED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "use_dora": ("peft does not load that", lambda value: value is True),
    "init_lora_weights": ("peft does not load that", lambda value: value == "mica"),
    "bias": (_OF_ALL_ROWS, lambda value: value in ("all", "lora_only")),
    "modules_to_save": (_OF_ALL_ROWS, lambda value: is_set(value)),
    "trainable_token_indices": (_OF_ALL_ROWS, lambda value: is_set(value)),
    **dict.fromkeys(CONTEXT_FIELDS, (_OF_ALL_ROWS, lambda value: is_set(value))),
}
"""Fields that cannot stand beside alora_invocation_tokens: why, and with which values."""


_BDLORA_DEFAULTS = {"target_modules_bd_a": None, "target_modules_bd_b": None, "nblocks": 1, "match_strict": True}
_NOT_BLOCK_DIAGONAL = ("use_dora", "lora_bias", "alora_invocation_tokens")
"""Fields that cannot stand beside use_bdlora."""

_NOT_OF_PARAMETERS = ("use_dora", "lora_bias", "use_bdlora", "fan_in_fan_out", "alora_invocation_tokens")
"""Fields that cannot stand beside target_parameters."""


def is_set(value: Any) -> bool:
    """Whether a field says something: null, false, 0 and empty values do not."""
    return value is not None and value is not False and value != 0 and value not in ("", [], {}, ())


@dataclass(frozen=True, slots=True)
class Number:
    """What a rank or an alpha is: `kind` of a positive number up to `most`. wanted: that in words."""

    kind: type[int] | type[float]
    most: float
    wanted: str

    def is_met_by(self, value: Any) -> bool:
        is_number = isinstance(value, int | self.kind) and not isinstance(value, bool)
        return is_number and 0 < value <= self.most


CONTEXT_LENGTH = Number(int, MAX_CONTEXT, f"a positive whole number, at most {MAX_CONTEXT}")
CONTEXT_FACTOR = Number(float, MAX_CONTEXT_FACTOR, f"a number above 0, at most {MAX_CONTEXT_FACTOR}")
RANK = Number(int, MAX_RANK, f"a positive whole number, at most {MAX_RANK}")
ALPHA = Number(float, sys.float_info.max, "a positive number")


class ConfigReader:
    """Each method reads a field: a value, or its default and a reason to refuse the adapter in `problems`.

    What is odd goes to `warnings`.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self._refused: dict[str, str] = {}
        self.kind = self._kind()
        self._table = TABLES[self.kind]

    def _kind(self) -> Kind:
        """LORA for what is not served, so that the rest can be read."""
        value = self.fields.get("peft_type")
        if isinstance(value, str) and value in Kind.__members__:
            return Kind(value)
        if value is None:
            self.warnings.append("peft_type is missing; the adapter is read as LORA")
        else:
            *first, last = map(repr, map(str, Kind))
            text = f"peft_type must be {', '.join(first)} or {last}, got {shown(value)}"
            if self.is_other_method:
                found = PEFT_TYPES[value]
                yet = " yet" if found.verdict is TypeVerdict.NOT_YET else ""
                self._refuse("peft_type", f"{text}, which is not served{yet}: {found}")
            else:
                self._refuse("peft_type", f"{text}; other methods are not supported")
        return Kind.LORA

    @property
    def is_other_method(self) -> bool:
        """Whether peft_type is one of PEFT's that is not served: no other field means anything here."""
        value = self.fields.get("peft_type")
        return isinstance(value, str) and value in PEFT_TYPES and value not in Kind.__members__

    def _refuse(self, name: str, reason: str) -> None:
        self.problems.append(reason)
        self._refused[name] = reason

    def _refuse_value(self, name: str, wanted: str) -> None:
        self._refuse(name, f"{name} must be {wanted}, got {shown(self.fields.get(name))}")

    # ------------------------------------------------------------------------------------------------ numbers and flags

    def number(self, name: str, number: Number) -> Any:
        value: Any = self.fields.get(name)
        if number.is_met_by(value):
            return number.kind(value)
        if value is None:
            self._refuse(name, f"{name} is missing; adapter_config.json must say it")
        else:
            self._refuse_value(name, number.wanted)
        return number.kind(1)

    def flag(self, name: str) -> bool:
        value = self.fields.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        self._refuse_value(name, "true or false")
        return False

    def text(self, name: str) -> str | None:
        value = self.fields.get(name)
        return value if isinstance(value, str) else None

    def fan_in_fan_out(self) -> bool:
        value = self.flag("fan_in_fan_out")
        if value:
            self.warnings.append("fan_in_fan_out=True is ignored as peft ignores it: the base's layers are nn.Linear")
        return value

    def bias(self) -> str:
        value = self.fields.get("bias", "none")
        if value in ("none", "all", "lora_only"):
            return str(value)
        self._refuse_value("bias", "'none', 'all' or 'lora_only'")
        return "none"

    # -------------------------------------------------------------------------------------------------- names, patterns

    def target_parameters(self) -> tuple[str, ...]:
        value = self.fields.get("target_parameters")
        if not is_set(value):
            return ()
        listed: list[Any] = value if isinstance(value, list) else [None]
        if len(listed) > MAX_PATTERN_KEYS or not all(isinstance(each, str) and each for each in listed):
            self._refuse_value("target_parameters", f"a list of at most {MAX_PATTERN_KEYS} names of parameters")
            return ()
        for name in _NOT_OF_PARAMETERS:
            if is_set(self.fields.get(name)):
                text = f"{name}={shown(self.fields[name])} with target_parameters: peft does not load that"
                self._refuse(name, f"{text}; train without one of them")
        return tuple(sorted(set(listed)))

    def target_modules(self) -> tuple[str, ...] | str:
        has_parameters = is_set(self.fields.get("target_parameters"))
        if self.fields.get("target_modules") is None and not has_parameters:
            self._refuse("target_modules", "target_modules is missing; list the modules that the adapter changes")
            return ()
        found = self.names_or_regex("target_modules")
        if not (found or has_parameters or "target_modules" in self._refused):
            self._refuse("target_modules", "target_modules is empty: the adapter changes nothing")
        return found

    def names_or_regex(self, name: str) -> tuple[str, ...] | str:
        value = self.fields.get(name)
        if value is None:
            return ()
        if isinstance(value, str):
            return value if self._compiles(name, (value,)) else ""
        is_list = isinstance(value, list | tuple | set | frozenset)
        if is_list and all(isinstance(entry, str) and entry for entry in value):
            return tuple(sorted(set(value)))
        self._refuse_value(name, "a list of names or a regular expression")
        return ()

    def _compiles(self, name: str, patterns: tuple[str, ...]) -> bool:
        try:
            check_patterns(patterns)
        except PatternError as error:
            self._refuse(name, f"{name}: {error}")
            return False
        return True

    def layers_to_transform(self) -> tuple[int, ...] | None:
        value = self.fields.get("layers_to_transform")
        if value is None:
            return None
        layers = value if isinstance(value, list) else [value]
        if len(layers) > MAX_PATTERN_KEYS or not all(type(layer) is int and layer >= 0 for layer in layers):
            self._refuse_value("layers_to_transform", f"layer numbers, at most {MAX_PATTERN_KEYS}")
            return None
        if isinstance(self.fields.get("target_modules"), str):
            text = "needs target_modules to be a list, not a regular expression"
            self._refuse("layers_to_transform", f"layers_to_transform {text}")
        return tuple(sorted(set(layers)))

    def layers_pattern(self) -> tuple[str, ...]:
        value = self.fields.get("layers_pattern")
        patterns = (value,) if isinstance(value, str) and value else value or ()
        if not isinstance(patterns, list | tuple) or not all(isinstance(entry, str) for entry in patterns):
            self._refuse_value("layers_pattern", "a name or a list of names")
            return ()
        if patterns and self.fields.get("layers_to_transform") is None:
            self._refuse("layers_pattern", f"layers_pattern={shown(value)} needs layers_to_transform")
        return tuple(patterns) if self._compiles("layers_pattern", tuple(patterns)) else ()

    def pattern(self, name: str, number: Number) -> dict[str, Any]:
        value = self.fields.get(name)
        if not is_set(value):
            return {}
        if not isinstance(value, Mapping):
            self._refuse(name, f"{name} must map module names to numbers, got {shown(value)}")
            return {}
        if len(value) > MAX_PATTERN_KEYS:
            self._refuse(name, f"{name} has {len(value)} keys, at most {MAX_PATTERN_KEYS} are read")
            return {}
        kept = {key: number.kind(given) for key, given in value.items() if number.is_met_by(given)}
        for key, given in value.items():
            if key not in kept:
                self._refuse(name, f"{name}[{shown(key)}] must be {number.wanted}, got {shown(given)}")
        return kept if self._compiles(name, tuple(kept)) else {}

    # ------------------------------------------------------------------------------------------------ kinds of adapters

    def rank_masks(self, init_r: int) -> dict[str, int]:
        """AdaLoRA's rank_pattern: module -> how many of its init_r ranks were kept."""
        value = self.fields.get("rank_pattern")
        if not is_set(value):
            return {}
        if not isinstance(value, Mapping) or len(value) > MAX_PATTERN_KEYS:
            wanted = f"a map of at most {MAX_PATTERN_KEYS} names of lora_E to lists of true and false"
            self._refuse_value("rank_pattern", wanted)
            return {}
        ranks = {}
        for key, mask in value.items():
            named = _MASK_KEY.fullmatch(key)
            is_mask = isinstance(mask, list) and len(mask) == init_r and all(type(kept) is bool for kept in mask)
            if named and is_mask:
                ranks[named["module"]] = sum(mask)
            elif named:
                wanted = f"a list of {init_r} times true or false, as many as init_r"
                self._refuse("rank_pattern", f"rank_pattern[{shown(key)}] must be {wanted}, got {shown(mask)}")
            else:
                self._refuse("rank_pattern", f"rank_pattern: {shown(key)} is not the lora_E of a module")
        return ranks

    def feedforward_modules(self) -> tuple[str, ...] | str:
        if self.fields.get("feedforward_modules") is None:
            text = "list the modules whose inputs it multiplies, or []"
            self._refuse("feedforward_modules", f"feedforward_modules is missing; {text}")
            return ()
        found, targets = self.names_or_regex("feedforward_modules"), self.fields.get("target_modules")
        if isinstance(found, tuple) and isinstance(targets, list):
            known = {entry for entry in targets if isinstance(entry, str)}
            odd = [entry for entry in found if entry not in known]
            if odd:
                self._refuse("feedforward_modules", f"feedforward_modules: {shown(odd[0])} is not in target_modules")
        return found

    def is_projection_saved(self) -> None:
        """peft makes vera_A and vera_B again from projection_prng_key, by a generator that may differ by machine."""
        if self.fields.get("save_projection", True) is not True:
            text = "without vera_A and vera_B in its file it is not exact"
            self._refuse("save_projection", f"save_projection must be true: {text}; {AS_LORA}, or train with it")

    def no_bias(self) -> None:
        if self.fields.get("bias", "none") != "none":
            self._refuse_value("bias", "'none' of a VeRA")

    def modules_to_save(self) -> tuple[str, ...]:
        """Plain names only: peft reads them as text here and as regular expressions there."""
        value = self.fields.get("modules_to_save")
        if not is_set(value):
            return ()
        if isinstance(value, list) and all(isinstance(each, str) and _PLAIN_NAME.fullmatch(each) for each in value):
            return tuple(sorted(set(value)))
        self._refuse_value("modules_to_save", "a list of names, of letters, digits, '_' and '.'")
        return ()

    def trainable_token_indices(self) -> dict[str, tuple[int, ...]]:
        """By the end of a module's name; a list is for the embedding."""
        value = self.fields.get("trainable_token_indices")
        if not is_set(value):
            return {}
        by_name = value if isinstance(value, Mapping) else {"embed_tokens": value}
        if not all(map(_PLAIN_NAME.fullmatch, by_name)):
            self._refuse_value("trainable_token_indices", "a list of token ids, or a map of modules to lists")
            return {}
        return {name: self._token_ids("trainable_token_indices", ids) for name, ids in by_name.items()}

    def token_indices(self) -> dict[str, tuple[int, ...]]:
        """Of every target."""
        return {"": self._token_ids("token_indices", self.fields.get("token_indices"))}

    def _token_ids(self, name: str, ids: Any) -> tuple[int, ...]:
        is_list = isinstance(ids, list) and bool(ids)
        if (
            is_list
            and all(type(each) is int and 0 <= each < MAX_TOKEN_ID for each in ids)
            and len(set(ids)) == len(ids)
        ):
            return tuple(ids)
        self._refuse(name, f"{name} must list token ids, each once and none below 0, got {shown(ids)}")
        return ()

    def decompose_factor(self) -> int:
        value = self.fields.get("decompose_factor", -1)
        if type(value) is int and abs(value) <= MAX_FACTOR:
            return value
        self._refuse_value("decompose_factor", f"a whole number, at most {MAX_FACTOR}")
        return -1

    def use_dora(self) -> bool:
        value = self.flag("use_dora")
        if value and self.fields.get("lora_bias") is True:
            text = "lora_bias=True with use_dora=True: peft does not load that"
            self._refuse("lora_bias", f"{text}; train without one of them")
        return value

    def use_bdlora(self) -> BlockDiagonal | None:
        given = self.fields.get("use_bdlora")
        if not is_set(given):
            return None
        values = {**_BDLORA_DEFAULTS, **given} if isinstance(given, Mapping) else {}
        names = [values.get(name) or [] for name in ("target_modules_bd_a", "target_modules_bd_b")]
        are_names = all(isinstance(each, list) and len(each) <= MAX_BLOCK_NAMES for each in names)
        are_names = are_names and all(isinstance(one, str) and one for each in names for one in each)
        is_known = values.keys() == _BDLORA_DEFAULTS.keys() and type(values["match_strict"]) is bool
        if not (is_known and are_names and RANK.is_met_by(values["nblocks"])):
            self._refuse_value("use_bdlora", f"null or an object of {', '.join(_BDLORA_DEFAULTS)}")
            return None
        for name in _NOT_BLOCK_DIAGONAL:
            if is_set(self.fields.get(name)):
                text = f"{name}={shown(self.fields[name])} with use_bdlora: peft does not load that"
                self._refuse(name, f"{text}; train without one of them")
        return BlockDiagonal(tuple(names[0]), tuple(names[1]), values["nblocks"], values["match_strict"])

    def invocation_tokens(self) -> tuple[int, ...]:
        """Of aLoRA; none: a LoRA of all rows, as in peft."""
        value = self.fields.get("alora_invocation_tokens")
        if not is_set(value):
            return ()
        listed: list[Any] = value if isinstance(value, list) else []
        is_odd = not all(type(each) is int and 0 <= each < MAX_TOKEN_ID for each in listed)
        if is_odd or not 0 < len(listed) <= MAX_INVOCATION_TOKENS:
            self._refuse_value("alora_invocation_tokens", f"a list of at most {MAX_INVOCATION_TOKENS} token ids")
            return ()
        for name, (why, is_refused) in _NOT_ACTIVATED.items():
            if is_refused(self.fields.get(name)):
                text = f"{name}={shown(self.fields[name])} with alora_invocation_tokens: {why}"
                self._refuse(name, f"{text}; train without one of them")
        return tuple(listed)

    def context(self) -> dict[str, Any]:
        """What vLLM reads of a longer context; 0 where it is not said. format.py has its meaning."""
        numbers = zip(CONTEXT_FIELDS, (CONTEXT_LENGTH, CONTEXT_LENGTH, CONTEXT_FACTOR), strict=True)
        return {name: self.number(name, number) if is_set(self.fields.get(name)) else 0 for name, number in numbers}

    def vllm_lora_scaling_factor(self, scaling: float) -> None:
        """vLLM computes it of r and lora_alpha, whatever the file says: what differs was never served."""
        value = self.fields.get("vllm_lora_scaling_factor")
        if is_set(value) and (isinstance(value, bool) or value != scaling):
            text = f"{scaling:g}, as lora_alpha and r have it; put the scaling into lora_alpha"
            self._refuse_value("vllm_lora_scaling_factor", text)

    def init_lora_weights(self) -> None:
        value = self.fields.get("init_lora_weights")
        if value is None or isinstance(value, bool):
            return
        text = f"init_lora_weights={shown(value)}"
        if value in INIT_THAT_KEEPS_BASE:
            if self.fields.get("lora_bias") is True:
                self._refuse("lora_bias", f"lora_bias=True with {text}: peft does not load that; set it to true")
        elif isinstance(value, str) and value.lower().startswith(INIT_THAT_CHANGES_BASE):
            remedy = MERGE
            if self.fields.get("use_dora") is True:
                remedy = f"peft's conversion drops the magnitudes of use_dora, so {MERGE}"
            elif not value.lower().startswith("loftq"):
                call = "model.save_pretrained(path, path_initial_model_for_weight_conversion=initial)"
                remedy = f"convert it with {call}, where initial is the adapter as it was saved before training"
            self._refuse("init_lora_weights", f"{text} changes the base weights; {remedy}")
        else:
            self._refuse("init_lora_weights", f"{text} is not known; set it to true if it keeps the base")

    # ----------------------------------------------------------------------------------------------------- all the rest

    def finish(self) -> tuple[FieldVerdict, ...]:
        """Judge the fields that no method reads; returns one verdict a field, in the order of the file."""
        table = self._table
        for name, value in self.fields.items():
            if self.is_other_method or name in table.honoured or name in table.ignored:
                continue
            if name in table.refused and not is_set(value):
                continue
            is_like_a_name = name.isidentifier() and len(name) <= MAX_SHOWN_CHARS
            text = f"{name if is_like_a_name else shown(name)}={shown(value)} is not "
            if name in table.refused:
                self._refuse(name, f"{text}supported: {table.refused[name]}")
            elif is_set(value):
                self._refuse(name, f"{text}a known field; remove it if it does not change the result")
            else:
                self.warnings.append(f"{text}a known field and is ignored")
        return tuple(self._verdict(name, value) for name, value in self.fields.items())

    def _verdict(self, name: str, value: Any) -> FieldVerdict:
        if name in self._refused:
            return FieldVerdict(name, value, Verdict.REFUSED, self._refused[name])
        if self.is_other_method:
            return FieldVerdict(name, value, Verdict.IGNORED, "is of a kind that is not served")
        if name in self._table.honoured:
            return FieldVerdict(name, value, Verdict.HONOURED)
        return FieldVerdict(name, value, Verdict.IGNORED, self._table.ignored.get(name, "says nothing"))
