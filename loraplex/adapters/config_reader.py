"""Reading of adapter_config.json field by field: a value, or a reason why the adapter is refused."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from loraplex.adapters.fields import (
    HONOURED,
    IGNORED,
    INIT_THAT_CHANGES_BASE,
    INIT_THAT_KEEPS_BASE,
    REFUSED,
    FieldVerdict,
    Verdict,
    is_set,
)
from loraplex.adapters.patterns import PatternError, check_patterns
from loraplex.errors import MAX_SHOWN_CHARS, shown

MAX_PATTERN_KEYS = 2**13
"""Of rank_pattern and alpha_pattern each: nine for every linear of a model of 126 layers."""

MAX_FIELDS = 512

MAX_RANK = 2**16
"""Beyond any linear; keeps numbers from a file from overflowing."""
RANK, ALPHA = f"a positive whole number, at most {MAX_RANK}", "a positive number"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _field(name: str) -> str:
    """A name from the file as it stands, if it is like a name."""
    return name if name.isidentifier() and len(name) <= MAX_SHOWN_CHARS else shown(name)


def _is_rank(value: Any) -> bool:
    return _is_int(value) and 0 < value <= MAX_RANK


def _is_alpha(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


class ConfigReader:
    """Each method reads one field; what is wrong goes to `problems`, what is odd to `warnings`."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self._refused: dict[str, str] = {}

    def _refuse(self, name: str, reason: str) -> None:
        self.problems.append(reason)
        self._refused[name] = reason

    def _refuse_value(self, name: str, wanted: str) -> None:
        self._refuse(name, f"{name} must be {wanted}, got {shown(self.fields.get(name))}")

    # ------------------------------------------------------------------------------------------------ numbers and flags

    def rank(self) -> int:
        return int(self._number("r", RANK, _is_rank))

    def alpha(self) -> float:
        return float(self._number("lora_alpha", ALPHA, _is_alpha))

    def _number(self, name: str, wanted: str, is_fine: Any) -> Any:
        value = self.fields.get(name)
        if is_fine(value):
            return value
        if value is None:
            self._refuse(name, f"{name} is missing; adapter_config.json must say it")
        else:
            self._refuse_value(name, wanted)
        return 1

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
            text = "fan_in_fan_out=True is ignored as peft ignores it: the base model's layers are nn.Linear"
            self.warnings.append(text)
        return value

    def bias(self) -> str:
        value = self.fields.get("bias", "none")
        if value in ("none", "all", "lora_only"):
            return str(value)
        self._refuse_value("bias", "'none', 'all' or 'lora_only'")
        return "none"

    # -------------------------------------------------------------------------------------------------- names, patterns

    def target_modules(self) -> tuple[str, ...] | str:
        if self.fields.get("target_modules") is None:
            self._refuse("target_modules", "target_modules is missing; list the modules that the adapter changes")
            return ()
        found = self.names_or_regex("target_modules")
        if not found and "target_modules" not in self._refused:
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
        if not all(_is_int(layer) and layer >= 0 for layer in layers):
            self._refuse_value("layers_to_transform", "layer numbers")
            return None
        if isinstance(self.fields.get("target_modules"), str):
            reason = "layers_to_transform needs target_modules to be a list, not a regular expression"
            self._refuse("layers_to_transform", reason)
        return tuple(layers)

    def layers_pattern(self) -> tuple[str, ...]:
        value = self.fields.get("layers_pattern")
        patterns = (value,) if isinstance(value, str) and value else value or ()
        if not isinstance(patterns, list | tuple) or not all(isinstance(entry, str) for entry in patterns):
            self._refuse_value("layers_pattern", "a name or a list of names")
            return ()
        if patterns and self.fields.get("layers_to_transform") is None:
            self._refuse("layers_pattern", f"layers_pattern={shown(value)} needs layers_to_transform")
        return tuple(patterns) if self._compiles("layers_pattern", tuple(patterns)) else ()

    def rank_pattern(self) -> dict[str, int]:
        return self._pattern("rank_pattern", RANK, _is_rank)

    def alpha_pattern(self) -> dict[str, float]:
        found = self._pattern("alpha_pattern", ALPHA, _is_alpha)
        return {key: float(alpha) for key, alpha in found.items()}

    def _pattern(self, name: str, wanted: str, is_fine: Any) -> dict[str, Any]:
        value = self.fields.get(name)
        if not is_set(value):
            return {}
        if not isinstance(value, Mapping):
            self._refuse(name, f"{name} must map module names to numbers, got {shown(value)}")
            return {}
        if len(value) > MAX_PATTERN_KEYS:
            self._refuse(name, f"{name} has {len(value)} keys, at most {MAX_PATTERN_KEYS} are read")
            return {}
        kept = {key: number for key, number in value.items() if is_fine(number)}
        for key, number in value.items():
            if key not in kept:
                self._refuse(name, f"{name}[{shown(key)}] must be {wanted}, got {shown(number)}")
        return kept if self._compiles(name, tuple(kept)) else {}

    # ------------------------------------------------------------------------------------------------ kinds of adapters

    def peft_type(self) -> None:
        value = self.fields.get("peft_type")
        if value is None:
            self.warnings.append("peft_type is missing; the adapter is read as LORA")
        elif value != "LORA":
            self._refuse("peft_type", f"peft_type must be 'LORA', got {shown(value)}; other methods are not supported")

    def init_lora_weights(self) -> None:
        value = self.fields.get("init_lora_weights")
        if value is None or isinstance(value, bool):
            return
        text = f"init_lora_weights={shown(value)}"
        if value in INIT_THAT_KEEPS_BASE:
            if self.fields.get("lora_bias") is True:
                self._refuse("lora_bias", f"lora_bias=True with {text}: peft does not load that; set it to true")
        elif isinstance(value, str) and value.lower().startswith(INIT_THAT_CHANGES_BASE):
            remedy = "save it with save_pretrained(path_initial_model_for_weight_conversion=...)"
            self._refuse("init_lora_weights", f"{text} changes the base weights; convert the adapter: {remedy}")
        else:
            self._refuse("init_lora_weights", f"{text} is not known; set it to true if it keeps the base")

    # ----------------------------------------------------------------------------------------------------- all the rest

    def finish(self) -> tuple[FieldVerdict, ...]:
        """Judge the fields that no method reads; returns one verdict a field, in the order of the file."""
        for name, value in self.fields.items():
            if name in HONOURED or name in IGNORED or (name in REFUSED and not is_set(value)):
                continue
            text = f"{_field(name)}={shown(value)} is not "
            if name in REFUSED:
                self._refuse(name, f"{text}supported: {REFUSED[name]}")
            elif is_set(value):
                self._refuse(name, f"{text}a known field; remove it if it does not change the result")
            else:
                self.warnings.append(f"{text}a known field and is ignored")
        return tuple(self._verdict(name, value) for name, value in self.fields.items())

    def _verdict(self, name: str, value: Any) -> FieldVerdict:
        if name in self._refused:
            return FieldVerdict(name, value, Verdict.REFUSED, self._refused[name])
        if name in HONOURED:
            return FieldVerdict(name, value, Verdict.HONOURED)
        return FieldVerdict(name, value, Verdict.IGNORED, IGNORED.get(name, "says nothing"))
