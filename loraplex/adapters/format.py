"""adapter_config.json of a PEFT adapter, read exactly or refused by field.

scaling(module) = alpha(module) / rank(module), or alpha(module) / sqrt(rank(module)) with use_rslora
rank(module), alpha(module): the value of the first key of rank_pattern, alpha_pattern that names the module, else r,
lora_alpha (`alpha` in files of LoHa and LoKr)

AdaLoRA:  scaling = lora_alpha / (init_r + 1e-5) in every module, whatever its rank_pattern left of init_r
VeRA:     scaling = 1
IA3, LN_TUNING, TRAINABLE_TOKENS:  no ranks, no scaling

A LoRA may be trained with a longer context than its base. As in vLLM its rows then have linear rope scaling (position
interpolation, arXiv 2306.15595) of

    factor   = vllm_long_context_scaling_factor, or ceil(context_length / positions of the base)

which is in place of the base's own where that is linear, too; its context is context_length, or positions * factor. No
other rope type is stretched: yarn and llama3 scale by dimension, and no trainer that writes these fields has them
together with a factor.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.adapter_store import LongContext
from loraplex.adapters.fields import (
    ALPHA,
    CONTEXT_FIELDS,
    MAX_FIELDS,
    RANK,
    ConfigReader,
    FieldVerdict,
)
from loraplex.adapters.files import CONFIG_NAME, AdapterFolder
from loraplex.adapters.kinds import TEXT_PREFIXES, Kind, text_name
from loraplex.adapters.patterns import (
    BlockDiagonal,
    PatternError,
    Value,
    dotted_suffixes,
    fullmatches,
    layer_indices,
    named_by,
    named_by_ends,
    named_by_spans,
    pattern_values,
)
from loraplex.adapters.regular_file import Roots
from loraplex.config import MAX_LORA_RANK, LoRAConfig
from loraplex.core import STRETCHED_ROPE_TYPES, LongContexts
from loraplex.errors import AdapterFileFormatError, AdapterValidationError, shown

MIN_SCALING, MAX_SCALING = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Of float32: the least with full precision, and the largest."""

ADALORA_SPARE = 1e-5
"""What peft adds to AdaLoRA's rank, by which it divides."""

NOT_LINEAR_TARGETS = ("lm_head", "embed_tokens")
"""Last name components that 'all-linear' leaves out: peft excludes the output layer, and embeddings are no linears."""


@dataclass(frozen=True, slots=True)
class ModuleNumbers:
    """Rank, alpha and scaling by module name. warnings: modules that several keys of a pattern name."""

    ranks: dict[str, int]
    alphas: dict[str, float]
    scalings: dict[str, float]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class PEFTHelper:
    """One adapter's configuration. `problems`: why it is refused, found in the configuration alone.

    A value that cannot be used is replaced by its default and named there, so that all else can still be checked. r,
    lora_alpha: of AdaLoRA init_r, of LoHa and LoKr `alpha`, of IA3 0 and 1. kept_ranks: what AdaLoRA's rank_pattern
    leaves of init_r, by module. token_indices: trained tokens by the end of a module's name, "" for every target.
    invocation_tokens: of an aLoRA, which acts from their last occurrence in a prompt on; (): on all rows.
    context_length and the two behind it: of an adapter with a longer context than its base, 0 where they are not said.
    is_other_method: its peft_type is not served, and nothing else of it was read.
    """

    adapter: str
    r: int
    lora_alpha: float
    target_modules: tuple[str, ...] | str
    exclude_modules: tuple[str, ...] | str = ()
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    rank_pattern: Mapping[str, int] | None = None
    alpha_pattern: Mapping[str, float] | None = None
    use_rslora: bool = False
    bias: str = "none"
    lora_bias: bool = False
    fan_in_fan_out: bool = False
    base_model_name: str | None = None
    kind: Kind = Kind.LORA
    use_dora: bool = False
    block_diagonal: BlockDiagonal | None = None
    kept_ranks: Mapping[str, int] | None = None
    feedforward_modules: tuple[str, ...] | str = ()
    decompose_both: bool = False
    decompose_factor: int = -1
    modules_to_save: tuple[str, ...] = ()
    token_indices: Mapping[str, tuple[int, ...]] | None = None
    ensure_weight_tying: bool = False
    invocation_tokens: tuple[int, ...] = ()
    context_length: int = 0
    vllm_max_position_embeddings: int = 0
    vllm_long_context_scaling_factor: float = 0.0
    target_parameters: tuple[str, ...] = ()
    is_other_method: bool = False
    verdicts: tuple[FieldVerdict, ...] = ()
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @classmethod
    def from_local_dir(cls, path: str | Path, adapter: str | None = None, roots: Roots = None) -> PEFTHelper:
        """Raises what `AdapterFolder.read_config` raises, of a file that must be inside the roots."""
        name = adapter or Path(path).name or str(path)
        return cls.from_dict(AdapterFolder(Path(path), name, roots).read_config(), name)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], adapter: str = "adapter") -> PEFTHelper:
        """Never raises for what the fields say: `validate_legal` does, with all reasons.

        Raises AdapterFileFormatError for what is no JSON object.
        """
        where = f"adapter {adapter!r}: {CONFIG_NAME}"
        if not isinstance(fields, Mapping):
            raise AdapterFileFormatError(f"{where} must be a JSON object, got {shown(fields)}")
        if len(fields) > MAX_FIELDS:
            raise AdapterFileFormatError(f"{where} has {len(fields)} fields, at most {MAX_FIELDS} are read")
        read = ConfigReader(fields)
        given = {} if read.is_other_method else _FIELDS_OF[read.kind](read)
        return cls(
            adapter=adapter,
            **{"r": 1, "lora_alpha": 1.0, "target_modules": (), **given},
            base_model_name=read.text("base_model_name_or_path"),
            kind=read.kind,
            is_other_method=read.is_other_method,
            verdicts=read.finish(),
            problems=tuple(read.problems),
            warnings=tuple(read.warnings),
        )

    # ------------------------------------------------------------------------------------------------------- validation

    def reasons(self, lora_config: LoRAConfig) -> list[str]:
        """Why this configuration is refused under these limits; empty when it is not.

        Not in it: ranks of other kinds than LoRA, which the shapes of the base decide, too (validation.py).
        """
        reasons = list(self.problems)
        limit = lora_config.max_lora_rank
        if self.kind is Kind.LORA and limit is not None and self.max_rank > limit:
            text = f"rank {self.max_rank} is above max_lora_rank {limit}"
            reasons.append(f"{text}; raise the limit or train with a lower rank")
        elif self.kind is Kind.LORA and self.max_rank > MAX_LORA_RANK:
            text = f"rank {self.max_rank} is above {MAX_LORA_RANK}, the highest that is served"
            reasons.append(f"{text}; train with a lower rank, or cut it down by a singular value decomposition")
        if self.has_bias and not lora_config.bias_enabled:
            text = f"bias={self.bias!r}, lora_bias={self.lora_bias}"
            reasons.append(f"{text}: bias_enabled is off on this server; train without biases")
        return reasons

    def validate_legal(self, lora_config: LoRAConfig) -> None:
        """Raise AdapterValidationError with every reason, or return."""
        reasons = self.reasons(lora_config)
        if reasons:
            raise AdapterValidationError.from_reasons(self.adapter, reasons)

    @property
    def has_bias(self) -> bool:
        return self.bias != "none" or self.lora_bias

    @functools.cached_property
    def max_rank(self) -> int:
        return max((self.r, *(self.rank_pattern or {}).values()))

    def blocks_of(self, module: str) -> tuple[int, int]:
        """The blocks on the diagonals of its A and B; 1: it is whole."""
        return (1, 1) if self.block_diagonal is None else self.block_diagonal.blocks_of(module)

    # -------------------------------------------------------------------------------------------------------- scaling

    @property
    def scaling_factor(self) -> float:
        """The scaling where no pattern applies."""
        return self._scaling(self.lora_alpha, self.r)

    @property
    def vllm_lora_scaling_factor(self) -> float:
        """vLLM's name for `scaling_factor`."""
        return self.scaling_factor

    def scaling_of(self, module_name: str) -> float:
        return self.numbers((module_name,)).scalings[module_name]

    def numbers(self, module_names: Sequence[str]) -> ModuleNumbers:
        """Of each module. Raises AdapterValidationError for a pattern that cannot be matched."""
        rank_pattern, alpha_pattern = self.rank_pattern or {}, self.alpha_pattern or {}
        with self._refusing_bad_patterns():
            by_rank, by_alpha = _values(rank_pattern, module_names), _values(alpha_pattern, module_names)
        kept = self.kept_ranks or {}
        ranks = {name: by_rank.get(name, (kept.get(name, self.r),))[0] for name in module_names}
        alphas = {name: by_alpha.get(name, (self.lora_alpha,))[0] for name in module_names}
        scalings = {name: self._scaling(alphas[name], ranks[name]) for name in module_names}
        warnings = (*_ambiguous("rank_pattern", by_rank), *_ambiguous("alpha_pattern", by_alpha))
        return ModuleNumbers(ranks, alphas, scalings, warnings)

    def unusable_scalings(self, numbers: ModuleNumbers) -> list[str]:
        """Reasons: scalings that float32, in which they are applied, has as infinity or as nothing."""
        odd: dict[tuple[float, int], list[str]] = {}
        for name, scaling in numbers.scalings.items():
            if not MIN_SCALING <= scaling <= MAX_SCALING:
                odd.setdefault((numbers.alphas[name], numbers.ranks[name]), []).append(name)
        divisor = "sqrt(r)" if self.use_rslora else "init_r" if self.kind is Kind.ADALORA else "r"
        formula = f"{'alpha' if self.kind in (Kind.LOHA, Kind.LOKR) else 'lora_alpha'} / {divisor}"
        limits = f"it must be within {MIN_SCALING:.1e} and {MAX_SCALING:.1e}"
        return [
            f"{_and_more(names[0], names)}: the scaling {formula} is {self._scaling(alpha, rank):g} "
            f"with lora_alpha {alpha:g} and r {rank}; {limits}"
            for (alpha, rank), names in odd.items()
        ]

    def _scaling(self, alpha: float, rank: int) -> float:
        if self.kind in (Kind.IA3, Kind.VERA, Kind.LN_TUNING, Kind.TRAINABLE_TOKENS):
            return 1.0
        if self.kind is Kind.ADALORA:
            return alpha / (self.r + ADALORA_SPARE)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    @contextmanager
    def _refusing_bad_patterns(self) -> Iterator[None]:
        try:
            yield
        except PatternError as error:
            raise AdapterValidationError.from_reasons(self.adapter, [str(error)]) from error

    # ---------------------------------------------------------------------------------------------------------- context

    @property
    def context_fields(self) -> tuple[str, ...]:
        """The names of those that say a longer context than the base's."""
        return tuple(name for name in CONTEXT_FIELDS if getattr(self, name))

    def long_context(self, base: LongContexts) -> LongContext | None:
        """None where the adapter has the base's positions. `context_reasons` is about the others."""
        factor = self.vllm_long_context_scaling_factor or base.rope_factor
        if self.context_length and not self.vllm_long_context_scaling_factor:
            factor = float(math.ceil(self.context_length / base.num_positions))
        if factor == base.rope_factor:
            return None
        return LongContext(factor, self.context_length or int(base.num_positions * factor))

    def context_reasons(self, base: LongContexts) -> list[str]:
        """Why this base refuses the adapter's context."""
        found, stated, end = [], self.vllm_max_position_embeddings, base.num_positions
        if stated not in (0, end):
            text = "it was trained on a base of other positions"
            found.append(f"vllm_max_position_embeddings={stated}: {text}, here {end}")
        context = self.long_context(base)
        if context is None:
            return found
        factor, what = context.rope_factor, f"it stretches the base's {end} positions by {context.rope_factor:g}"
        if base.rope_type not in STRETCHED_ROPE_TYPES:
            names = " or ".join(STRETCHED_ROPE_TYPES)
            found.append(f"{what}, but their rope_type is {base.rope_type!r}: only {names} is stretched")
        elif factor < base.rope_factor:
            found.append(f"{what}, which is less than the base's own factor, {base.rope_factor:g}")
        elif context.max_model_len > end * factor:
            found.append(f"{what}, to {int(end * factor)}, and context_length is {context.max_model_len}")
        elif factor not in base.scaling_factors:
            allowed = ", ".join(f"{each:g}" for each in base.scaling_factors) or "none"
            text = f"long_lora_scaling_factors allows {allowed}: start the server with {factor:g} among them"
            found.append(f"{what}; {text}")
        return found

    # --------------------------------------------------------------------------------------------------------- matching

    def match_modules(self, module_names: Sequence[str]) -> frozenset[str]:
        """The modules that peft would put LoRA on.

        Raises AdapterValidationError for a pattern that cannot be matched.
        """
        with self._refusing_bad_patterns():
            saved = named_by_spans(frozenset(self.modules_to_save), module_names)  # peft targets nothing inside of them
            excluded = self._excluded(module_names) | saved.keys()
            return frozenset(self._targeted(module_names)) - excluded

    def match_parameters(self, names: Sequence[str]) -> frozenset[str]:
        """The parameters that peft would put LoRA on: an entry is the name, or its end behind a dot."""
        return frozenset(named_by(self.target_parameters, names)) if self.target_parameters else frozenset()

    def unmatched_parameters(self, names: Sequence[str]) -> tuple[str, ...]:
        """Entries of target_parameters that name none of these."""
        said = {suffix for name in names for suffix in dotted_suffixes(name)} if self.target_parameters else set()
        return tuple(entry for entry in self.target_parameters if entry not in said)

    def match_saved(self, module_names: Sequence[str]) -> dict[str, frozenset[str]]:
        """Module -> the entries of modules_to_save that peft copies it for: the end of its name, or of a parent's,
        without regard to dots. Raises as `match_modules` does."""
        with self._refusing_bad_patterns():
            return named_by_ends(frozenset(self.modules_to_save), module_names, with_parents=True)

    def match_trained_tokens(self, module_names: Sequence[str]) -> dict[str, frozenset[str]]:
        """Module -> the keys of token_indices that name it: the end of its name, without regard to dots. Raises as
        `match_modules` does."""
        with self._refusing_bad_patterns():
            return named_by_ends(frozenset(self.token_indices or ()), module_names)

    def match_feedforward(self, module_names: Sequence[str]) -> frozenset[str]:
        """The modules whose inputs IA3 multiplies: peft takes the end of a name, without regard to dots.

        Raises AdapterValidationError for a pattern that cannot be matched.
        """
        entries = self.feedforward_modules
        if not entries:
            return frozenset()
        with self._refusing_bad_patterns():
            if isinstance(entries, str):
                return frozenset(fullmatches(entries, module_names))
            return frozenset(named_by_ends(frozenset(entries), module_names))

    def unmatched_targets(self, module_names: Sequence[str]) -> tuple[str, ...]:
        """Entries of a target_modules list that name none of these modules, whatever the layers or exclusions."""
        if isinstance(self.target_modules, str):
            return ()
        unsaid = _of_text_alone(self.target_modules)
        for name in module_names:
            unsaid.difference_update(dotted_suffixes(name))
        return tuple(entry for entry in self.target_modules if text_name(entry) in unsaid)

    def _excluded(self, names: Sequence[str]) -> frozenset[str]:
        if not isinstance(self.exclude_modules, str):
            return frozenset(named_by(_of_text_alone(self.exclude_modules), names))
        excluded = frozenset(fullmatches(self.exclude_modules, names))
        if "language_model" not in self.exclude_modules:
            return excluded
        beside = _beside_other_parts(names)
        return excluded.union(beside[name] for name in fullmatches(self.exclude_modules, [*beside]))

    def _targeted(self, names: Sequence[str]) -> list[str]:
        if isinstance(self.target_modules, str):
            if self.target_modules.lower() == "all-linear":
                return [name for name in names if name.rpartition(".")[2] not in NOT_LINEAR_TARGETS]
            found = fullmatches(self.target_modules, names)
            if not found:
                beside = _beside_other_parts(names)
                found = {beside[name]: index for name, index in fullmatches(self.target_modules, [*beside]).items()}
            return list(found)
        exact = _of_text_alone(self.target_modules)  # peft takes an exact name whatever its layer
        by_suffix = named_by(exact, names)
        if not self.layers_to_transform:
            return by_suffix
        indices, layers = layer_indices(self.layers_pattern, by_suffix), frozenset(self.layers_to_transform)
        return [name for name in by_suffix if name in exact or indices.get(name) in layers]

    # --------------------------------------------------------------------------------------------------------- identity

    def naming(self) -> Hashable:
        """All that decides which tensors are called for, in which shapes, and how they are scaled.

        Not in it: what is refused or warned of for the configuration alone.
        """
        named, excluded, feedforward = (
            entries if isinstance(entries, str) else frozenset(entries)  # peft saves a set, in any order
            for entries in (self.target_modules, self.exclude_modules, self.feedforward_modules)
        )
        kept = tuple((self.kept_ranks or {}).items())
        of_kind = feedforward, kept, self.decompose_both, self.decompose_factor
        layers = self.layers_to_transform, self.layers_pattern
        return self.canonical(), named, excluded, *layers, of_kind, self.target_parameters

    def canonical(self) -> bytes:
        """The fields that change the mathematics of given tensors, as JSON; keys sorted, patterns in their order.

        What plain LoRA does not have is there when it is set: the digests of plain LoRA are older.
        """
        fields: dict[str, Any] = {
            "r": self.r,
            "lora_alpha": self.lora_alpha,
            "use_rslora": self.use_rslora,
            "rank_pattern": list((self.rank_pattern or {}).items()),
            "alpha_pattern": list((self.alpha_pattern or {}).items()),
            "bias": self.bias,
            "lora_bias": self.lora_bias,
        }
        if self.kind is not Kind.LORA:
            fields["peft_type"] = self.kind.value
        if self.use_dora:
            fields["use_dora"] = True
        if (blocks := self.block_diagonal) is not None:
            fields["use_bdlora"] = [blocks.of_a, blocks.of_b, blocks.num_blocks]
        if self.invocation_tokens:
            fields["alora_invocation_tokens"] = self.invocation_tokens
        if self.token_indices:
            fields["token_indices"] = {name: list(ids) for name, ids in self.token_indices.items()}
        if self.modules_to_save:
            fields["modules_to_save"] = self.modules_to_save
        if self.ensure_weight_tying and (self.token_indices or self.modules_to_save):
            fields["ensure_weight_tying"] = True
        fields |= {name: getattr(self, name) for name in self.context_fields}
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def _of_text_alone(entries: Iterable[str]) -> set[str]:
    """Entries of a list, with the names that modules have where the text model is alone."""
    return {text_name(entry) for entry in entries}


def _beside_other_parts(names: Sequence[str]) -> dict[str, str]:
    """What modules of a text model are called where it is beside other parts -> their names."""
    return {
        before + name.removeprefix(here): name
        for before, here in TEXT_PREFIXES.items()
        for name in names
        if name.startswith(here)
    }


def _values(patterns: Mapping[str, Value], names: Sequence[str]) -> dict[str, tuple[Value, ...]]:
    """`pattern_values`, of names beside other parts, too, where a pattern has such."""
    values = pattern_values(patterns, names)
    if any("language_model" in key for key in patterns):
        beside = _beside_other_parts(names)
        values = {beside[name]: found for name, found in pattern_values(patterns, [*beside]).items()} | values
    return values


# ------------------------------------------------------------------------------------------- what each kind's file says


def _of_lora(read: ConfigReader) -> dict[str, Any]:
    read.init_lora_weights()
    rank, alpha, use_rslora = read.number("r", RANK), read.number("lora_alpha", ALPHA), read.flag("use_rslora")
    read.vllm_lora_scaling_factor(alpha / math.sqrt(rank) if use_rslora else alpha / rank)
    return {
        "r": rank,
        "lora_alpha": alpha,
        **_targets(read),
        "target_parameters": read.target_parameters(),
        **_layers(read),
        "rank_pattern": read.pattern("rank_pattern", RANK),
        "alpha_pattern": read.pattern("alpha_pattern", ALPHA),
        "use_rslora": use_rslora,
        "bias": read.bias(),
        "lora_bias": read.flag("lora_bias"),
        "fan_in_fan_out": read.fan_in_fan_out(),
        "use_dora": read.use_dora(),
        "block_diagonal": read.use_bdlora(),
        "token_indices": read.trainable_token_indices(),
        "invocation_tokens": read.invocation_tokens(),
        "ensure_weight_tying": read.flag("ensure_weight_tying"),
        **read.context(),
    }


def _of_adalora(read: ConfigReader) -> dict[str, Any]:
    init_r = read.number("init_r", RANK)
    return {
        "r": init_r,
        "lora_alpha": read.number("lora_alpha", ALPHA),
        **_targets(read),
        **_layers(read),
        "kept_ranks": read.rank_masks(init_r),
        "ensure_weight_tying": read.flag("ensure_weight_tying"),
        "bias": read.bias(),
        "fan_in_fan_out": read.fan_in_fan_out(),
    }


def _of_ia3(read: ConfigReader) -> dict[str, Any]:
    return {
        "r": 0,
        **_targets(read),
        "feedforward_modules": read.feedforward_modules(),
        "fan_in_fan_out": read.fan_in_fan_out(),
    }


def _of_loha(read: ConfigReader) -> dict[str, Any]:
    return {
        "r": read.number("r", RANK),
        "lora_alpha": read.number("alpha", ALPHA),
        **_targets(read),
        **_layers(read),
        "rank_pattern": read.pattern("rank_pattern", RANK),
        "alpha_pattern": read.pattern("alpha_pattern", ALPHA),
    }


def _of_lokr(read: ConfigReader) -> dict[str, Any]:
    return {
        **_of_loha(read),
        "decompose_both": read.flag("decompose_both"),
        "decompose_factor": read.decompose_factor(),
    }


def _of_vera(read: ConfigReader) -> dict[str, Any]:
    read.is_projection_saved()
    read.no_bias()
    return {"r": read.number("r", RANK), **_targets(read), **_layers(read), "fan_in_fan_out": read.fan_in_fan_out()}


def _of_ln_tuning(read: ConfigReader) -> dict[str, Any]:
    return {"r": 0, **_targets(read)}


def _of_trainable_tokens(read: ConfigReader) -> dict[str, Any]:
    return {"r": 0, "target_modules": read.target_modules(), "token_indices": read.token_indices()}


def _targets(read: ConfigReader) -> dict[str, Any]:
    return {
        "target_modules": read.target_modules(),
        "exclude_modules": read.names_or_regex("exclude_modules"),
        "modules_to_save": read.modules_to_save(),
    }


def _layers(read: ConfigReader) -> dict[str, Any]:
    return {"layers_to_transform": read.layers_to_transform(), "layers_pattern": read.layers_pattern()}


_FIELDS_OF: dict[Kind, Callable[[ConfigReader], dict[str, Any]]] = {
    Kind.LORA: _of_lora,
    Kind.ADALORA: _of_adalora,
    Kind.IA3: _of_ia3,
    Kind.LOHA: _of_loha,
    Kind.LOKR: _of_lokr,
    Kind.VERA: _of_vera,
    Kind.LN_TUNING: _of_ln_tuning,
    Kind.TRAINABLE_TOKENS: _of_trainable_tokens,
}


def _ambiguous(field: str, values: Mapping[str, Sequence[float]]) -> list[str]:
    """A warning where several keys have different values for a module.

    Saving sorts the keys, so the first may be another than in training. A wrong rank is refused with the shapes; a
    wrong alpha would not be noticed.
    """
    odd = sorted(name for name, hits in values.items() if len(set(hits)) > 1)
    text = "several keys name {}; the first is taken, as peft does, but peft sorts the keys when it saves"
    return [f"{field}: {text.format(_and_more(repr(odd[0]), odd))}"] if odd else []


def _and_more(first: str, names: Sequence[str]) -> str:
    return f"{first} and {len(names) - 1} more modules" if names[1:] else first
