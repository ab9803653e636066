"""Whether the tensors of a file are exactly what the configuration and the base model call for.

    wanted: lora_A.weight [rank, in], lora_B.weight [out, rank] of each module that the configuration names and the base
            has, and with lora_bias their lora_B.bias [out], with use_dora their lora_magnitude_vector [out],
            the tensors of its kind where it is no LoRA (conversion.part_shapes),
            bias [out] of the modules with a bias: those named (bias "lora_only") or all (bias "all"),
            what the adapter has of its own (own.py)

Every difference is a reason. When all differences are those between two base models (widths, number of layers), the
adapter is made for another base, which is an error of its own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from loraplex.adapters.conversion import ModuleCost, cost_of, file_widths, part_shapes
from loraplex.adapters.experts import NO_EXPERTS, STACK_PARTS, ExpertBase, ExpertStack
from loraplex.adapters.files import TensorEntry
from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.kinds import (
    OWN_PARTS,
    PARTS,
    TOKENS,
    Kind,
    TensorName,
    no_part,
    parse_tensor_name,
    unused_reasons,
    why_unknown,
)
from loraplex.adapters.own import BaseModule, OwnParts
from loraplex.adapters.tensors import DTYPES
from loraplex.config import LoRAConfig
from loraplex.core import LoraTarget, ShardKind
from loraplex.errors import AdapterBaseMismatchError, AdapterValidationError, shown

UNSUPPORTED_BASE_MODULES = ("model.embed_tokens", "lm_head")
MAX_REASONS_OF_A_KIND = 20

SHARE_OF_CONVERTED, GROWTH_OF_CONVERTED = 8, 4
"""What is made of an adapter has at most an eighth of the host budget, or four times the file's bytes (of 16 bits, some
become 32): a file of a megabyte that took gigabytes would push out all other adapters."""

LAYERS = "number of layers"

_LAYER = re.compile(r".*?\blayers\.(?P<layer>\d+)\..")
_HIDDEN_IN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
_HIDDEN_OUT = ("o_proj", "down_proj", "embed_tokens")
_WIDTHS = {"q_proj": "attention width", "k_proj": "key/value width", "v_proj": "key/value width"}
_WIDTHS |= {"gate_proj": "intermediate size", "up_proj": "intermediate size", "lm_head": "vocabulary size"}
_WIDTHS |= dict.fromkeys(("input_layernorm", "post_attention_layernorm", "norm"), "hidden size")
_WIDTHS_IN = {"o_proj": "attention width", "down_proj": "intermediate size", "embed_tokens": "vocabulary size"}
_OF_INPUTS = ("lora_A.weight", "lora_A", "hada_w1_b", "hada_w2_b", "lora_embedding_A")
_WITHOUT_WIDTH = ("lora_E", "vera_lambda_d", *PARTS[Kind.LOKR])
"""Parts with a column for each of the module's inputs, and parts that say nothing of its widths; the others have a row
for each of its outputs."""
WHY_CALLED = {"lora_magnitude_vector": ", which use_dora calls for", "lora_B.bias": ", which lora_bias calls for"}
_UNCALLED = {
    "lora_B.bias": "lora_bias is not set in adapter_config.json",
    "lora_magnitude_vector": "use_dora is not set in adapter_config.json: is it DoRA?",
}


def base_modules(targets: Iterable[LoraTarget]) -> dict[str, BaseModule]:
    """module name -> its sizes, over all slices of all targets."""
    return {name: module for target in targets for name, module in BaseModule.all_of(target)}


@dataclass
class TensorCheck:
    """The findings about one file. `names` maps what is understood to its entry, `unknown` is the rest.

    reasons: faults of the adapter itself; differences: those that another base model would explain; widths: what these
    say, width -> {(the file's, the base's)}; agreed: widths that a tensor of the file has as the base has them. costs:
    what each module that the configuration names is served as; inputs: those whose inputs IA3 multiplies; own: what is
    in place of the base's; extra_vocab_size: the most tokens that may be added.
    keeps_projections: whether VeRA's A and B are not multiplied out. is_whole: `base` has all modules of a base model,
    not those alone that the file has. experts: what the base has of these; stacks: what of them the adapter is on.
    """

    helper: PEFTHelper
    base: Mapping[str, BaseModule]
    extra_vocab_size: int = 0
    keeps_projections: bool = False
    is_whole: bool = True
    experts: ExpertBase = NO_EXPERTS
    stacks: dict[str, ExpertStack] = field(default_factory=dict)
    names: dict[TensorName, TensorEntry] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    widths: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
    agreed: set[str] = field(default_factory=set)
    costs: dict[str, ModuleCost] = field(default_factory=dict)
    inputs: frozenset[str] = frozenset()
    own: OwnParts | None = None

    def raise_if_refused(self, more_reasons: Sequence[str] = ()) -> None:
        """AdapterBaseMismatchError when another base explains all, else AdapterValidationError with all reasons."""
        reasons = [*more_reasons, *self.reasons]
        if not reasons and self.differences and self._is_another_base():
            raise AdapterBaseMismatchError(self._another_base())
        reasons += self.differences
        if reasons:
            kept = _shortened(reasons)
            raise AdapterValidationError.from_reasons(self.helper.adapter, kept, len(reasons) - len(kept))

    def _is_another_base(self) -> bool:
        """Each width is one other number throughout the file. Fewer layers alone are an incomplete file."""
        if self.widths.keys() == {LAYERS} and all(theirs < ours for theirs, ours in self.widths[LAYERS]):
            return False
        return self.agreed.isdisjoint(self.widths) and all(len(pairs) == 1 for pairs in self.widths.values())

    def _another_base(self) -> str:
        widths = sorted(self.widths.items())
        facts = ", ".join(f"{width} {theirs} against {ours}" for width, ((theirs, ours),) in widths)
        named = self.helper.base_model_name
        base = f" (its adapter_config.json names {shown(named)})" if named else ""
        example = f"{facts}; for example " if facts else ""
        return f"adapter {self.helper.adapter!r} is made for another base model{base}: {example}{self.differences[0]}"

    # ------------------------------------------------------------------------------------------------------ one by one

    def add(self, entry: TensorEntry) -> None:
        """Take one tensor of the file: its name, dtype and whether it is there twice."""
        name = parse_tensor_name(entry.name, self.helper.kind)
        if name is None:
            self.unknown.append(entry.name)
            return
        if entry.dtype not in DTYPES and name not in self.names:
            kind = "float8 " if entry.dtype.upper().startswith(("F8", "FLOAT8")) else ""
            supported = f"supported are {', '.join(DTYPES)}: convert it"
            self.reasons.append(f"tensor {entry.name!r} has {kind}dtype {entry.dtype}; {supported}")
        first = self.names.setdefault(name, entry)
        if first is not entry:
            self.reasons.append(f"tensors {first.name!r} and {entry.name!r} are the same part of the adapter; keep one")

    def check(self) -> None:
        """Compare what was added with what is wanted."""
        self.reasons.extend(unused_reasons(self.unknown, self.helper.kind))
        try:
            self._rename()
            if not self._is_foreign():
                self._check()
        except AdapterValidationError as error:  # a pattern that cannot be matched
            self.reasons.extend(error.reasons)

    def _check(self) -> None:
        helper = self.helper
        adaptable = tuple(module for module, base in self.base.items() if base.kind is not ShardKind.NORM)
        unsupported = tuple(module for module in UNSUPPORTED_BASE_MODULES if module not in self.base)
        if helper.kind in (Kind.LN_TUNING, Kind.TRAINABLE_TOKENS):
            matched: frozenset[str] = frozenset()
            self._check_targets(helper.match_modules((*self.base, *unsupported)), tuple(self.base), unsupported)
        else:
            matched = helper.match_modules((*adaptable, *unsupported))
            self._check_targets(matched, adaptable, unsupported)
        matched = self._with_parameters(matched)
        self.own = OwnParts(helper, self.base, self.names, matched & self.base.keys(), self.is_whole)
        matched = self.own.targeted
        self.reasons.extend(self.own.reasons)
        self._check_lora_only(matched | self.own.saved)
        numbers = helper.numbers(sorted(matched))
        self.warnings.extend(numbers.warnings)
        self.reasons.extend(helper.unusable_scalings(numbers))
        self.inputs = helper.match_feedforward(sorted(matched))
        self._check_kept_ranks(matched)
        for module in sorted(matched):
            rank, sizes = numbers.ranks[module], self.sizes_of(module)
            reason = helper.block_diagonal and helper.block_diagonal.reason_against(module, rank, *sizes)
            if reason:
                self.reasons.append(reason)
                continue
            self.costs[module] = cost_of(helper, rank, *sizes, helper.blocks_of(module))
            if module in self._modules_in_file:
                self._check_module(module, rank)
            else:
                self._missing_module(module)
        self._check_stacks(matched)
        self._check_shared(matched)
        self._check_own(self.own)
        called_for = matched.union(self.stacks)
        for name, entry in self.names.items():
            if name.part == "bias":
                self._check_bias(name, entry, matched)
            elif name.module and name.part not in OWN_PARTS and name.module not in called_for:
                self._unwanted(name, entry)
        self._check_missing_biases(matched)
        if self.keeps_projections:
            text = "vera_A and vera_B are kept once for all adapters with equal ones, beside the vectors of each module"
            self.warnings.append(f"peft_type is {helper.kind}; {text}")
        elif helper.kind in (Kind.LOHA, Kind.LOKR, Kind.VERA):
            text = f"it is served as a LoRA of ranks up to {self.served_rank}, with {self.served_nbytes} bytes"
            text += " before alignment"
            self.warnings.append(f"peft_type is {helper.kind}; {text}")

    def _check_shared(self, matched: frozenset[str]) -> None:
        """VeRA's two matrices are as wide as the widest of the modules that share them."""
        if self.helper.kind is not Kind.VERA:
            return
        most = [max(sizes, default=0) for sizes in zip(*map(self.sizes_of, matched), strict=True)] or [0, 0]
        for part, shape, axis in (("vera_A", (self.helper.r, most[0]), 1), ("vera_B", (most[1], self.helper.r), 0)):
            entry = self.names.get(TensorName("", part))
            if entry is None:
                self.reasons.append(f"the file has no {part}; train the adapter with save_projection=True")
            elif entry.shape != shape:
                text = f"tensor {entry.name!r} has shape {list(entry.shape)}, expected {list(shape)}"
                if len(entry.shape) == 2 and entry.shape[1 - axis] == self.helper.r and entry.shape[axis]:
                    self._differs(f"width of {part}", entry.shape[axis], shape[axis], text)
                else:
                    self.reasons.append(text)

    def sizes_of(self, module: str) -> tuple[int, int]:
        """(inputs, outputs), with the adapter's vocabulary."""
        base, vocab_size = self.base[module], self.own.vocab_size if self.own else 0
        if base.kind is ShardKind.EMBEDDING:
            return vocab_size, base.out_features
        return base.in_features, vocab_size if base.kind is ShardKind.HEAD else base.out_features

    def _check_own(self, own: OwnParts) -> None:
        for name, shape in own.shapes.items():
            entry = self.names[name]
            if entry.shape != shape:
                self._check_own_shape(name, entry, shape)
        for name in own.unused():
            if name.module in self.base:
                self._unused(
                    self.names[name], f"adapter_config.json calls for no {name.part}: {no_part(self.helper.kind)}"
                )
            else:
                self._unwanted(name, self.names[name])
        most = own.base_vocab_size + self.extra_vocab_size
        if own.vocab_size > most:
            text = f"it is for a vocabulary of {own.vocab_size} tokens, the base has {own.base_vocab_size}"
            text = f"{text} and lora_extra_vocab_size allows {self.extra_vocab_size} more"
            self._differs("vocabulary size", own.vocab_size, own.base_vocab_size, text)

    def _check_own_shape(self, name: TensorName, entry: TensorEntry, wanted: tuple[int, ...]) -> None:
        """Every axis of a whole weight may be another base's."""
        text = f"tensor {entry.name!r} has shape {list(entry.shape)}, expected {list(wanted)}"
        if len(entry.shape) != len(wanted) or 0 in entry.shape or name.part == TOKENS:
            self.reasons.append(text)
            return
        inputs, outputs = _widths_of(name.module.rpartition(".")[2])
        is_embedding = self.base[name.module].kind is ShardKind.EMBEDDING
        widths = (inputs, outputs) if is_embedding else (outputs, inputs)
        for width, has, wants in zip(widths, entry.shape, wanted, strict=False):
            if has != wants:
                self._differs(width, has, wants, text)

    @property
    def served_rank(self) -> int:
        return max((cost.rank for cost in self.costs.values()), default=0)

    @property
    def served_nbytes(self) -> int:
        """Of what is made of the file's tensors."""
        return sum(cost.nbytes for cost in self.costs.values())

    def over_limits(self, lora_config: LoRAConfig) -> list[str]:
        """Reasons: the rank and the bytes of a converted adapter. Those of a LoRA are in its configuration and file."""
        reasons: list[str] = []
        if not lora_config.bias_enabled and any(
            map(self._is_saved, {n.module for n in self.names if n.part == "bias"})
        ):
            reasons.append("modules_to_save has biases: bias_enabled is off on this server; train without them")
        if self.helper.kind is Kind.LORA and self.helper.block_diagonal is None:
            return reasons
        limit, budget = lora_config.max_lora_rank, lora_config.host_memory_bytes
        if limit is not None and self.served_rank > limit and self.helper.kind is not Kind.LORA:
            text = f"as a LoRA it has rank {self.served_rank}, which is above max_lora_rank {limit}"
            reasons.append(f"{text}; raise the limit or train with a lower rank")
        file_bytes = sum(entry.nbytes for entry in self.names.values())
        most = min(budget, max(budget // SHARE_OF_CONVERTED, GROWTH_OF_CONVERTED * file_bytes))
        if self.served_nbytes > most:
            text = f"as a LoRA it has {self.served_nbytes} bytes; a file of {file_bytes} bytes may become {most}"
            reasons.append(f"{text}, by the host budget of {budget}; raise host_memory_bytes or lower the rank")
        return reasons

    @cached_property
    def _modules_in_file(self) -> frozenset[str]:
        """Once for all tensors, as their number of layers: there may be thousands."""
        return frozenset(name.module for name in self.names if name.part != "bias" and name.module)

    @cached_property
    def _layers_in_file(self) -> int:
        return _num_layers(self._modules_in_file)

    @cached_property
    def _layers_in_base(self) -> int:
        return _num_layers(self.base)

    def _is_foreign(self) -> bool:
        """Whether the base has none of the file's modules, not even in another number of layers."""
        modules = self._modules_in_file
        if self.helper.kind in (Kind.LN_TUNING, Kind.TRAINABLE_TOKENS):
            return False
        ours = self.base.keys() | self.experts.stacks.keys() | self.experts.blocks
        known = {_layer_like(module, 0) for module in ours} | set(UNSUPPORTED_BASE_MODULES)
        if not modules or any(_layer_like(module, 0) in known for module in modules):
            return False
        self.differences.append(f"none of its {len(modules)} modules is there, not {min(modules)!r}")
        return True

    def _check_targets(self, matched: frozenset[str], adaptable: tuple[str, ...], unsupported: tuple[str, ...]) -> None:
        if not matched and not self.helper.target_parameters:
            self.reasons.append(f"target_modules={shown(self.helper.target_modules)} names no module of the base model")
        for entry in self.helper.unmatched_targets((*adaptable, *unsupported)) if self.is_whole else ():
            self.reasons.append(f"target_modules: {shown(entry)} names no module of the base model; remove it")
        text = "adapters on embeddings and the output layer are not supported yet"
        self.reasons.extend(f"target_modules names {module!r}: {text}" for module in unsupported if module in matched)

    # ---------------------------------------------------------------------------------------------------------- experts

    def _rename(self) -> None:
        """Tensors of stacks of experts, and of routers, by the names that these have here."""
        targeted = self.helper.match_parameters(tuple(self.experts.stacks))
        self.stacks = {name: stack for name, stack in self.experts.stacks.items() if name in targeted}
        for theirs, ours in list(self.experts.named(self.names, targeted)):
            entry = self.names.pop(theirs)
            first = self.names.setdefault(ours, entry)
            if first is not entry:
                self.reasons.append(f"tensors {first.name!r} and {entry.name!r} are the same part; keep one")

    def _with_parameters(self, matched: frozenset[str]) -> frozenset[str]:
        """With the linears whose weights target_parameters names; without experts and routers that target_modules names
        as it names linears, if the file has none of them: transformers has no linears there, and peft wrapped none."""
        helper, by_parameter = self.helper, {self.experts.parameter_of(module): module for module in self.base}
        names = (*by_parameter, *self.experts.stacks)
        for entry in helper.unmatched_parameters(names) if self.is_whole else ():
            self.reasons.append(
                f"target_parameters: {shown(entry)} names no weight of a linear or of experts; remove it"
            )
        for is_expert in (True, False):
            group = {m for m in matched if m in self.base and self._is_no_linear(m, is_expert)}
            if group and group.isdisjoint(self._modules_in_file):
                matched -= group
        wrapped = {by_parameter[name] for name in helper.match_parameters(tuple(by_parameter))}
        ends = {module for module in wrapped if not self.base[module].is_linear}
        self.reasons.extend(f"target_parameters names {each}.weight, which is no linear's" for each in sorted(ends))
        return matched | (wrapped - ends)

    def _is_no_linear(self, module: str, is_expert: bool) -> bool:
        """In transformers: of an expert, or a router. The gate of a shared expert is a linear there."""
        base = self.base[module]
        return base.is_expert if is_expert else base.is_lora_only and module.endswith((".gate", ".router"))

    def _check_lora_only(self, named: frozenset[str]) -> None:
        """Of experts and routers no other kind is served: their inputs are others', too."""
        helper, own = self.helper, self.own
        kind = "use_dora" if helper.use_dora else "use_bdlora" if helper.block_diagonal else str(helper.kind)
        for module in sorted(named):
            if module not in self.base or not self.base[module].is_lora_only:
                continue
            if own is not None and module in own.saved:
                self.reasons.append(f"modules_to_save names {module!r}: weights of experts are served by LoRA alone")
            elif kind != Kind.LORA:
                self.reasons.append(f"{module}: {kind} of experts and routers is not supported; train a LoRA of them")

    def _check_stacks(self, matched: frozenset[str]) -> None:
        """Both tensors of each stack, with the shapes that its rank and the number of experts call for."""
        numbers = self.helper.numbers(sorted(self.stacks))
        self.warnings.extend(numbers.warnings)
        self.reasons.extend(self.helper.unusable_scalings(numbers))
        for parameter, stack in self.stacks.items():
            both = sorted(module for module, _ in stack.modules if module in matched)
            if both:
                text = f"target_parameters names {parameter!r} and target_modules {both[0]!r}, which is a part of it"
                self.reasons.append(f"{text}; train one")
                continue
            for part, shape in stack.shapes(numbers.ranks[parameter]).items():
                name = TensorName(parameter, part)
                if name in self.names:
                    self._check_shape(name, self.names[name], shape)
                else:
                    text = f"{parameter}: the file has no {part}, which target_parameters calls for"
                    self.reasons.append(f"{text}; save the adapter again")
            self.costs |= {module: ModuleCost(numbers.ranks[parameter], 0) for module, _ in stack.modules}
        for name, entry in self.names.items():
            if name.module in self.stacks and name.part not in (*STACK_PARTS, *OWN_PARTS, "bias"):
                self._unused(entry, f"a parameter of experts has {' and '.join(STACK_PARTS)} alone")

    def _check_kept_ranks(self, matched: frozenset[str]) -> None:
        """Of modules that the file has and the base has not, their tensors say it."""
        kept = self.helper.kept_ranks or {}
        for module in sorted(kept.keys() - matched - (self._modules_in_file - self.base.keys())):
            self.reasons.append(f"rank_pattern names {shown(module)}, which is no target of the adapter")
        if matched and matched <= kept.keys() and not any(kept[module] for module in matched):
            self.reasons.append("rank_pattern leaves no rank to any module: the adapter changes nothing")

    def _check_module(self, module: str, rank: int) -> None:
        base, kind, is_feedforward = self.base[module], self.helper.kind, module in self.inputs
        is_embedding = base.kind is ShardKind.EMBEDDING
        blocks = self.helper.blocks_of(module)
        wanted = part_shapes(self.helper, rank, *self.sizes_of(module), is_feedforward, is_embedding, blocks)
        names = {part: TensorName(module, part) for part in PARTS[kind].values() if part != "bias"}
        found = {part: self.names[name] for part, name in names.items() if name in self.names}
        if kind is Kind.LOKR and self._fits_other_widths(module, rank, found):
            return
        for part, shape in wanted.items():
            if part in found:
                self._check_shape(names[part], found[part], shape)
            else:
                text = f"{module}: the file has no {part}{WHY_CALLED.get(part, '')}"
                self.reasons.append(f"{text}; save the adapter again")
        for part in found:
            is_said = is_embedding and self.helper.use_dora  # why an embedding has no magnitude
            if part not in wanted and not is_said:
                self.reasons.append(f"{module}: the file has {part} but {why_uncalled(part, wanted)}")

    def _fits_other_widths(self, module: str, rank: int, found: Mapping[str, TensorEntry]) -> bool:
        """Of LoKr, whose tensors say the widths of their module by products only: whether they fit another module."""
        shapes = {part: entry.shape for part, entry in found.items()}
        ours, theirs = self.sizes_of(module), file_widths(Kind.LOKR, shapes)
        if theirs is None or part_shapes(self.helper, rank, *theirs) != shapes:
            return False
        for width, has, wants in zip(_widths_of(module.rpartition(".")[2]), theirs, ours, strict=True):
            if has == wants:
                self.agreed.add(width)
            else:
                self.widths.setdefault(width, set()).add((has, wants))
        if theirs != ours:
            text = f"are for {theirs[0]} inputs and {theirs[1]} outputs, the base has {ours[0]} and {ours[1]}"
            self.differences.append(f"{module}: its tensors {text}")
        return True

    def _missing_module(self, module: str) -> None:
        """Without any tensor, or with chosen layers, missing layers do not speak for another base."""
        layer, layers, helper = _layer_of(module), self._layers_in_file, self.helper
        text = f"{module}: adapter_config.json names it, but the file has no tensors for it"
        is_chosen = bool(helper.layers_to_transform) or bool(helper.exclude_modules)
        if layer is None or layer < layers or not self._modules_in_file or is_chosen:
            self.reasons.append(f"{text}; save the adapter again")
        else:
            self._differs(LAYERS, layers, self._layers_in_base, text)

    def _check_shape(self, name: TensorName, entry: TensorEntry, wanted: tuple[int, ...]) -> None:
        """A wrong rank or number of axes is the adapter's fault, a wrong width may be another base's."""
        width, axis = _width_of(name, wanted)
        if entry.shape == wanted:
            if axis >= 0:
                self.agreed.add(width)
            return
        text = f"tensor {entry.name!r} has shape {list(entry.shape)}, expected {list(wanted)}"
        odd_axes = [i for i, (has, wants) in enumerate(zip(entry.shape, wanted, strict=False)) if has != wants]
        if len(entry.shape) == len(wanted) and odd_axes == [axis] and entry.shape[axis]:
            self._differs(width, entry.shape[axis], wanted[axis], text)
        else:
            hint = " (was it saved from shards that were not gathered?)" if 0 in entry.shape else ""
            self.reasons.append(text + hint)

    def _unwanted(self, name: TensorName, entry: TensorEntry) -> None:
        layer, layers = _layer_of(name.module), self._layers_in_base
        if name.module in self.base:
            self._unused(entry, f"adapter_config.json does not name {name.module!r}")
        elif name.module in self.experts.blocks:
            self._unused(entry, "it is of a parameter of experts that target_parameters does not name")
        elif layer is not None and layer >= layers and _layer_like(name.module, 0) in self.base:
            text = f"tensor {entry.name!r} is of layer {layer}, the base has {layers}"
            self._differs(LAYERS, self._layers_in_file, layers, text)
        else:
            is_embedding = name.module.endswith(("embed_tokens", "lm_head"))
            why = why_unknown(name.canonical, self.helper.kind) if is_embedding else "is the adapter for another model?"
            self._unused(entry, f"the base model has no linear {name.module!r}; {why}")

    def _unused(self, entry: TensorEntry, why: str) -> None:
        self.reasons.append(f"tensor {entry.name!r} is not used: {why}")

    # ---------------------------------------------------------------------------------------------------------- biases

    def _check_bias(self, name: TensorName, entry: TensorEntry, matched: frozenset[str]) -> None:
        base = self.base.get(name.module)
        if self._is_saved(name.module) and base is not None and base.has_bias:
            self._check_shape(name, entry, (base.out_features,))
        elif "bias" not in PARTS[self.helper.kind]:
            self._unused(entry, no_part(self.helper.kind))
        elif self.helper.bias == "none":
            self._unused(entry, "bias is 'none' in adapter_config.json")
        elif base is None:
            self._unwanted(name, entry)
        elif not base.has_bias:
            self._unused(entry, f"the base model has no linear {name.module!r} with a bias")
        elif self.helper.bias == "lora_only" and name.module not in matched:
            self._unused(entry, f"bias is 'lora_only' and {name.module!r} is no target")
        else:
            self._check_shape(name, entry, (base.out_features,))

    def _check_missing_biases(self, matched: frozenset[str]) -> None:
        bias = self.helper.bias
        text = f"bias is {bias!r}, but the file has no bias for it; set bias to 'none' if it was not trained"
        for module, base in self.base.items():
            is_wanted = base.has_bias and (bias == "all" or (bias == "lora_only" and module in matched))
            if TensorName(module, "bias") in self.names:
                continue
            if is_wanted:
                self.reasons.append(f"{module}: {text}")
            elif base.has_bias and self._is_saved(module):
                self.reasons.append(
                    f"{module}: the file has its own weight, but not its own bias; save the adapter again"
                )

    def _is_saved(self, module: str) -> bool:
        return self.own is not None and module in self.own.saved

    def _differs(self, width: str, theirs: int, ours: int, text: str) -> None:
        self.differences.append(text)
        self.widths.setdefault(width, set()).add((theirs, ours))


def why_uncalled(part: str, wanted: Iterable[str]) -> str:
    """What to say about a part of a module that the configuration does not call for."""
    return _UNCALLED.get(part, f"the configuration calls for {', '.join(wanted)}")


def _layer_of(module: str) -> int | None:
    match = _LAYER.match(module)
    return int(match["layer"]) if match else None


def _layer_like(module: str, layer: int) -> str:
    match = _LAYER.match(module)  # once, from the start: `sub` looks again from each character, n * n steps
    return module if match is None else f"{module[: match.start('layer')]}{layer}{module[match.end('layer') :]}"


def _num_layers(modules: Iterable[str]) -> int:
    layers = [layer for module in modules if (layer := _layer_of(module)) is not None]
    return max(layers, default=-1) + 1


def _width_of(name: TensorName, wanted: tuple[int, ...]) -> tuple[str, int]:
    """What the tensor's width is called, and its axis; -1 where it has none."""
    inputs, outputs = _widths_of(name.module.rpartition(".")[2])
    if name.part in _OF_INPUTS or (name.part == "ia3_l" and wanted[0] == 1):
        return inputs, 1
    return outputs, -1 if name.part in _WITHOUT_WIDTH else 0


@lru_cache(maxsize=64)  # a check asks for each tensor
def _widths_of(leaf: str) -> tuple[str, str]:
    """What the widths of a module's inputs and of its outputs are called, by the last component of its name."""
    inputs = "hidden size" if leaf in _HIDDEN_IN else _WIDTHS_IN.get(leaf, f"inputs of {leaf}")
    return inputs, "hidden size" if leaf in _HIDDEN_OUT else _WIDTHS.get(leaf, f"outputs of {leaf}")


def _shortened(reasons: Sequence[str]) -> list[str]:
    """At most MAX_REASONS_OF_A_KIND of the reasons that differ in a layer number only."""
    kept: list[str] = []
    counts: Counter[str] = Counter()
    for reason in reasons:
        kind = re.sub(r"\d+", "#", reason)
        counts[kind] += 1
        if counts[kind] <= MAX_REASONS_OF_A_KIND:
            kept.append(reason)
    return kept
