"""What would be honoured or refused of an adapter, and why: `loraplex adapter inspect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from loraplex.adapters.conversion import ModuleCost, cost_of, file_widths, part_shapes
from loraplex.adapters.fields import FieldVerdict, Verdict, is_set
from loraplex.adapters.files import TEXT_NAMES, AdapterFolder, TensorEntry
from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.kinds import (
    BASE_BIAS,
    BASE_WEIGHT,
    BIAS_COPY,
    COPY,
    OWN_PARTS,
    PARTS,
    PEFT_TYPES,
    SHARED,
    TOKENS,
    WEIGHT,
    Kind,
    TensorName,
    TypeVerdict,
    no_part,
    unused_reasons,
)
from loraplex.adapters.regular_file import check_size
from loraplex.adapters.sources.opener import ReadText, no_text
from loraplex.adapters.tensors import DTYPES, ReadPlan, WeightFile, read_tensors
from loraplex.adapters.validation import WHY_CALLED, TensorCheck, why_uncalled
from loraplex.adapters.weights import CheckedReader, LoRAModel
from loraplex.config import LoRAConfig
from loraplex.core import LongContexts, LoraTarget, ShardKind
from loraplex.errors import AdapterBaseMismatchError, AdapterError, AdapterValidationError, shown
from loraplex.logs import printable


@dataclass(frozen=True, slots=True)
class OwnFact:
    """A part of an adapter: what it is, of how many modules, its bytes (is_most: at most), and what a step reads."""

    what: str
    num_modules: int
    nbytes: int
    step: str
    is_most: bool = False
    where: str = ""

    def __str__(self) -> str:
        modules = "" if self.num_modules == 1 else f" of {self.num_modules} modules"
        most = "at most " if self.is_most else ""
        return f"{self.what}{modules}, {most}{self.nbytes} bytes{self.where}; a step reads {self.step}"


@dataclass(frozen=True, slots=True)
class Packed:
    """What an adapter is in memory, in a CPU's layout: the bytes of all its parts, and these one by one.

    is_most: the bytes may be fewer. has_projections: VeRA's A and B are shared.
    """

    nbytes: int
    is_most: bool
    parts: tuple[OwnFact, ...]
    has_projections: bool

    def __str__(self) -> str:
        most, why = ("at most ", "; the base's weights were not read") if self.is_most else ("", "")
        return f"{most}{self.nbytes} bytes in all on a CPU{why}"


@dataclass(frozen=True, slots=True)
class Weigher:
    """How a model is sized as packing does it. keeps_projections: as CheckedReader's."""

    weigh: Callable[[LoRAModel], Packed]
    keeps_projections: bool


@dataclass(frozen=True)
class AdapterReport:
    """All that can be said of an adapter. `reasons` empty: it would be loaded (by this base, if targets were given).

    ranks, scalings, dtypes: value -> number of modules (of tensors, for dtypes); `nbytes` of the tensors; digest "" if
    unreadable. kind: its peft_type, and whether that is served, converted at load or refused. parts: (number, bytes) of
    tensors by part. own: what is beyond LoRA on linears; vocabulary: where the adapter's ends, if its file says it.
    context: how far it stretches the base's, if it does.
    served_ranks, served_nbytes: what is made of a converted adapter, in float32. packed: what a load has in memory.
    text_files: those about the text of its requests, which are checked beside the base's tokenizer alone.
    """

    path: str
    base_model_name: str | None
    kind: str
    fields: tuple[FieldVerdict, ...]
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    modules: tuple[str, ...] = ()
    ranks: dict[int, int] | None = None
    scalings: dict[float, int] | None = None
    dtypes: dict[str, int] | None = None
    parts: dict[str, tuple[int, int]] | None = None
    own: tuple[OwnFact, ...] = ()
    vocabulary: str = ""
    context: str = ""
    served_ranks: dict[int, int] | None = None
    served_nbytes: int = 0
    packed: Packed | None = None
    nbytes: int = 0
    num_tensors: int = 0
    weight_file: str = ""
    adapter_digest: str = ""
    is_checked_against_base: bool = False
    text_files: tuple[str, ...] = ()

    @property
    def is_honoured(self) -> bool:
        return not self.reasons

    def describe(self) -> str:
        """The report as text: the verdict, its reasons, what the files hold, the fields that are set."""
        lines = [f"{self.path}: {'would be loaded' if self.is_honoured else 'is refused'}{self._base_note()}"]
        lines += [f"  refused: {reason}" for reason in self.reasons]
        lines += [f"  warning: {warning}" for warning in self.warnings]
        lines += [f"  {label}: {value}" for label, value in self._facts() if value]
        for each in self.fields:
            if is_set(each.value) or each.verdict is Verdict.REFUSED:
                reason = f"  ({each.reason})" if each.verdict is Verdict.IGNORED else ""
                lines.append(f"  {each.verdict.value:8} {each.name} = {shown(each.value, 80)}{reason}")
        return "\n".join(map(printable, lines))

    def _base_note(self) -> str:
        return "" if self.is_checked_against_base else " (not checked against a base model; give one with --base)"

    def _facts(self) -> list[tuple[str, str]]:
        def counts(values: dict[int, int] | dict[float, int] | dict[str, int] | None, what: str) -> str:
            return ", ".join(f"{value} ({count} {what})" for value, count in sorted((values or {}).items()))

        parts = sorted((self.parts or {}).items())
        served = f"a LoRA of rank {counts(self.served_ranks, 'modules')}, {self.served_nbytes} bytes in float32"
        served, packed = f"{served}, before alignment", self.packed
        return [
            ("kind", self.kind),
            ("base model", self.base_model_name or ""),
            (
                "file",
                f"{self.weight_file}, {self.num_tensors} tensors, {self.nbytes} bytes" if self.weight_file else "",
            ),
            ("dtype", counts(self.dtypes, "tensors")),
            *((f"part {part}", f"{count} tensors, {nbytes} bytes") for part, (count, nbytes) in parts),
            *(("has", str(fact)) for fact in self.own),
            ("vocabulary", self.vocabulary),
            ("context", self.context),
            ("rank", counts(self.ranks, "modules")),
            ("served as", served if self.served_ranks else ""),
            *(() if packed is None else (("in memory", str(fact)) for fact in packed.parts)),
            ("in memory", "" if packed is None else f"{packed}"),
            ("scaling", counts(self.scalings, "modules")),
            ("modules", ", ".join(sorted({module.rpartition(".")[2] for module in self.modules}))),
            ("text of its requests", ", ".join(self.text_files)),
            ("digest", self.adapter_digest),
        ]


def inspect_adapter(
    path: str | Path,
    targets: Sequence[LoraTarget] | None = None,
    lora_config: LoRAConfig | None = None,
    long_contexts: LongContexts | None = None,
    weigher: Weigher | None = None,
    read_text: ReadText = no_text,
) -> AdapterReport:
    """Read an adapter directory and judge it; with `targets`, as the base model that publishes them would, and with
    `long_contexts`, what it makes of that base's positions. weigher: of that base; it sizes what is honoured.
    read_text: as a load into that base reads the text.

    Raises only when there is no readable adapter_config.json; everything else is in `reasons`.
    """
    limits = lora_config or LoRAConfig()
    helper = PEFTHelper.from_local_dir(path)
    if helper.is_other_method:
        return _report(path, helper, helper.reasons(limits))
    try:
        file = WeightFile.open(AdapterFolder(Path(path), helper.adapter), limits.host_memory_bytes)
        check_size(file.nbytes, limits.host_memory_bytes, helper.adapter)
    except AdapterError as error:
        return _report(path, helper, [*helper.reasons(limits), error.message])
    check = _parse(file, helper)
    names = {name: entry for name, entry in check.names.items() if entry.dtype in DTYPES}
    facts = _module_facts(names, helper)
    digest, damaged = _digest(file, names, helper)
    packed = None
    if targets is None:
        check.costs = facts.costs
        reasons = [*helper.reasons(limits), *unused_reasons(check.unknown, helper.kind), *check.reasons, *damaged]
        reasons, warnings = [*reasons, *_pairs(names, helper), *check.over_limits(limits)], helper.warnings
    else:
        keeps_projections = weigher is not None and weigher.keeps_projections
        reader = CheckedReader(targets, limits, long_contexts, keeps_projections)
        reasons, warnings, packed = _judge(path, helper, reader, weigher, read_text)
    return replace(
        _report(path, helper, reasons, facts),
        kind=_kind_of(helper, packed),
        warnings=warnings,
        dtypes=dict(Counter(entry.dtype for entry in names.values())),
        parts=_parts(names),
        own=_own_facts(names),
        vocabulary=_vocabulary(names, targets),
        context=_context(helper, long_contexts),
        packed=packed,
        nbytes=file.nbytes,
        num_tensors=len(file.entries),
        weight_file=file.name,
        adapter_digest=digest,
        is_checked_against_base=targets is not None,
    )


def _judge(
    path: str | Path, helper: PEFTHelper, reader: CheckedReader, weigher: Weigher | None, read_text: ReadText
) -> tuple[list[str], tuple[str, ...], Packed | None]:
    """(reasons, warnings, what is in memory) of the base model."""
    reasons, warnings, vocab_size, packed = list[str](), helper.warnings, None, None
    try:
        model = reader.read(Path(path), helper)
        warnings, vocab_size = model.warnings, model.vocab_size
        packed = None if weigher is None else weigher.weigh(model)
    except AdapterValidationError as error:
        reasons += error.reasons
    except AdapterBaseMismatchError as error:
        reasons.append(error.message)
    except AdapterError as error:
        reasons += [*helper.reasons(reader.lora_config), error.message]
    try:
        read_text(AdapterFolder(Path(path), helper.adapter), vocab_size)
    except AdapterValidationError as error:
        reasons += error.reasons
    except AdapterError as error:
        reasons.append(error.message)
    return reasons, warnings, packed


def _context(helper: PEFTHelper, base: LongContexts | None) -> str:
    context = None if base is None else helper.long_context(base)
    if context is None or base is None:
        return "a longer one, which depends on the base's positions" if helper.context_fields and base is None else ""
    stretched = f"the base's {base.num_positions} positions stretched by {context.rope_factor:g}"
    return f"{context.max_model_len} tokens, {stretched}; a step reads no more, and computes its rows' angles by it"


def _parse(file: WeightFile, helper: PEFTHelper) -> TensorCheck:
    """What can be read, and reasons for the rest."""
    check = TensorCheck(helper, base={})
    for entry in file.entries:
        check.add(entry)
    return check


def _parts(names: dict[TensorName, TensorEntry]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for name, entry in names.items():
        count, nbytes = found.get(name.part, (0, 0))
        found[name.part] = count + 1, nbytes + entry.nbytes
    return found


_OF_EMBEDDING, _OF_HEAD = "embed_tokens", "lm_head"
_SAMPLED = "for the rows that are sampled"
_DIFFERENT = f"at most all of it, {_SAMPLED}: rows that are the base's are not kept"
_ENDS = {
    (_OF_EMBEDDING, WEIGHT): ("an embedding of its own", "a row for each token, if it is not the base's"),
    (_OF_EMBEDDING, BASE_WEIGHT): (
        "the embedding as it was saved",
        "a row for each token, if it is not the base's",
    ),
    (_OF_EMBEDDING, COPY): ("the embedding once more", "none of it"),
    (_OF_EMBEDDING, TOKENS): ("trained tokens of the embedding", "a row for each token that is one of them"),
    (_OF_EMBEDDING, "lora_embedding_A"): ("A of a LoRA of the embedding", "a column for each token"),
    (_OF_EMBEDDING, "lora_embedding_B"): ("B of a LoRA of the embedding", "all of it"),
    (_OF_HEAD, WEIGHT): ("an output layer of its own", _DIFFERENT),
    (_OF_HEAD, BASE_WEIGHT): ("the output layer as it was saved", _DIFFERENT),
    (_OF_HEAD, COPY): ("the output layer once more", "none of it"),
    (_OF_HEAD, TOKENS): ("trained tokens of the output layer", f"all of them, {_SAMPLED}"),
}
"""By the end of a module's name and the part: what it is, and what a step reads of it."""


def _own_facts(names: dict[TensorName, TensorEntry]) -> tuple[OwnFact, ...]:
    found: dict[tuple[str, str], list[TensorName]] = {}
    for name, entry in names.items():
        leaf = name.module.rpartition(".")[2]
        known = _ENDS.get((leaf, name.part))
        if name.module == "" and name.part in SHARED.values():
            known = "projections, kept once for all adapters with equal ones (CPU)", "all, once for all such rows"
        if name.part == BASE_WEIGHT and TensorName(name.module, COPY) in names:
            known = "a layer as it was before training", "none of it"
        elif name.part in (BIAS_COPY, BASE_BIAS):
            known = "biases of saved linears once more, or as they were before training", "none of it"
        elif known is None and leaf == _OF_HEAD and name.part not in ("bias", *OWN_PARTS):
            known = "an adapter of the output layer", f"all of it, {_SAMPLED}"
        elif known is None and name.part in OWN_PARTS:
            is_norm = len(entry.shape) == 1
            known = ("own weights of norms", "all") if is_norm else ("own weights of linears", "all, beside the base's")
        if known is not None:
            found.setdefault(known, []).append(name)
    return tuple(
        OwnFact(
            what,
            len({name.module for name in of_it}),
            sum(names[name].nbytes for name in of_it),
            step,
            where=" in the file",
        )
        for (what, step), of_it in sorted(found.items())
    )


def _vocabulary(names: dict[TensorName, TensorEntry], targets: Sequence[LoraTarget] | None) -> str:
    """By the rows of whole weights of the embedding and the head."""
    ends = (_OF_EMBEDDING, _OF_HEAD)
    rows = [
        entry.shape[0]
        for name, entry in names.items()
        if name.part in (WEIGHT, BASE_WEIGHT) and name.module.endswith(ends) and len(entry.shape) == 2
    ]
    if not rows:
        return ""
    bases = [target.full_in_features for target in targets or () if target.kind is ShardKind.EMBEDDING]
    return f"{max(rows)} tokens" + (f", the base has {bases[0]}" if bases else "")


def _digest(file: WeightFile, names: dict[TensorName, TensorEntry], helper: PEFTHelper) -> tuple[str, list[str]]:
    try:
        _, digest, not_finite = read_tensors(file, ReadPlan.of(names), helper.canonical())
    except AdapterError as error:
        return "", [error.message]
    return digest, [f"tensor {name!r} has NaN or Inf" for name in not_finite]


def _pairs(names: dict[TensorName, TensorEntry], helper: PEFTHelper) -> list[str]:
    """What can be checked without a base: the tensors of a module with one another, and the ranks."""
    try:
        modules = _modules(names)
        numbers, feedforward = helper.numbers(modules), helper.match_feedforward(modules)
        reasons = [*helper.unusable_scalings(numbers), *_uncalled_own(names, helper)]
    except AdapterValidationError as error:
        return list(error.reasons)
    if not modules and not any(name.part in OWN_PARTS for name in names):
        first = next(iter(PARTS[helper.kind].values()), WEIGHT)
        reasons.append(f"the file has no {first}: there is no {helper.kind} adapter in it")
    for module, rank in numbers.ranks.items():
        reasons += _odd_parts(module, rank, _entries_of(module, names, helper), helper, module in feedforward)
    return reasons


def _uncalled_own(names: dict[TensorName, TensorEntry], helper: PEFTHelper) -> Iterator[str]:
    """What no field calls for. Layers of tokens may be there in any case: peft saves them as it sees fit."""
    modules = tuple({name.module for name in names if name.part in OWN_PARTS})
    is_tuning = helper.kind is Kind.LN_TUNING
    saved = helper.match_saved(modules).keys() | (helper.match_modules(modules) if is_tuning else frozenset())
    ends = {module for module in modules if module.rpartition(".")[2] in (_OF_EMBEDDING, _OF_HEAD)}
    if helper.ensure_weight_tying and not saved.isdisjoint(ends):
        saved |= ends
    for name, entry in names.items():
        is_end = name.module in ends
        is_called = {
            WEIGHT: is_end or name.module in saved,
            BASE_WEIGHT: is_end,
            **dict.fromkeys((COPY, BIAS_COPY, BASE_BIAS), name.module in saved),
            TOKENS: bool(helper.token_indices),
        }.get(name.part, True)
        if not is_called:
            yield f"tensor {entry.name!r} is not used: no field calls for its {name.part}: {no_part(helper.kind)}"


def _odd_parts(
    module: str, rank: int, found: dict[str, TensorEntry], helper: PEFTHelper, is_feedforward: bool
) -> Iterator[str]:
    """Of one module, by the widths that its tensors say."""
    blocks = helper.blocks_of(module)
    widths = file_widths(helper.kind, {part: entry.shape for part, entry in found.items()}, blocks)
    if widths is None and helper.kind is Kind.LOKR:
        yield f"{module}: the file has no lokr_w1 and lokr_w2, each whole or in two factors"
        return
    reason = helper.block_diagonal and widths and helper.block_diagonal.reason_against(module, rank, *widths)
    if reason:
        yield reason
        return
    wanted = part_shapes(helper, rank, *(widths or (0, 0)), is_feedforward, "lora_embedding_A" in found, blocks)
    rule = f"its rank should be {rank}"
    if helper.kind is Kind.IA3:
        rule = f"feedforward_modules calls for {'[1, in]' if is_feedforward else '[out, 1]'}"
    for part, shape in wanted.items():
        entry = found.get(part)
        if entry is None:
            yield f"{module}: the file has no {part}{WHY_CALLED.get(part, '')}"
        elif len(entry.shape) != len(shape) or (widths is not None and entry.shape != shape):
            yield f"tensor {entry.name!r} has shape {list(entry.shape)}, {rule}"
    for part in found:
        if part not in wanted:
            yield f"{module}: the file has {part} but {why_uncalled(part, wanted)}"


def _entries_of(module: str, names: dict[TensorName, TensorEntry], helper: PEFTHelper) -> dict[str, TensorEntry]:
    of_module = ((part, TensorName(module, part)) for part in PARTS[helper.kind].values() if part != "bias")
    return {part: names[name] for part, name in of_module if name in names}


def _modules(names: dict[TensorName, TensorEntry]) -> tuple[str, ...]:
    return tuple(sorted({name.module for name in names if name.module and name.part not in ("bias", *OWN_PARTS)}))


@dataclass(frozen=True)
class _ModuleFacts:
    modules: tuple[str, ...] = ()
    ranks: dict[int, int] | None = None
    scalings: dict[float, int] | None = None
    costs: dict[str, ModuleCost] = field(default_factory=dict)


def _module_facts(names: dict[TensorName, TensorEntry], helper: PEFTHelper) -> _ModuleFacts:
    modules = _modules(names)
    if helper.kind is Kind.IA3:
        return _ModuleFacts(modules)
    try:
        numbers = helper.numbers(modules)
    except AdapterValidationError:  # a pattern that cannot be matched: it is among the reasons
        return _ModuleFacts(modules)
    ranks, scalings = dict(Counter(numbers.ranks.values())), dict(Counter(numbers.scalings.values()))
    costs = {}
    for module, rank in numbers.ranks.items():
        shapes = {part: entry.shape for part, entry in _entries_of(module, names, helper).items()}
        blocks = helper.blocks_of(module)
        widths = file_widths(helper.kind, shapes, blocks)
        if widths is not None:
            costs[module] = cost_of(helper, rank, *widths, blocks)
    return _ModuleFacts(modules, ranks, scalings, costs)


def _kind_of(helper: PEFTHelper, packed: Packed | None = None) -> str:
    """In words: which, whether it is served, what it computes."""
    if helper.is_other_method:
        return "of another method, refused"
    found = PEFT_TYPES[helper.kind]
    how = "served" if found.verdict is TypeVerdict.SERVED else "converted to A and B at load"
    if packed is not None and packed.has_projections:
        how = "served as it is on a CPU"
    variant = " with DoRA" if helper.use_dora else ", block-diagonal" if helper.block_diagonal is not None else ""
    return f"{helper.kind}{variant}, {how}: {found.mathematics}"


def _report(
    path: str | Path, helper: PEFTHelper, reasons: Sequence[str], facts: _ModuleFacts | None = None
) -> AdapterReport:
    facts = facts or _ModuleFacts()
    is_converted = PEFT_TYPES[helper.kind].verdict is TypeVerdict.CONVERTED
    served_ranks = dict(Counter(cost.rank for cost in facts.costs.values())) if is_converted else None
    return AdapterReport(
        path=str(path),
        base_model_name=helper.base_model_name,
        kind=_kind_of(helper),
        fields=helper.verdicts,
        reasons=AdapterValidationError.from_reasons(helper.adapter, reasons).reasons,
        warnings=helper.warnings,
        modules=facts.modules,
        ranks=facts.ranks,
        scalings=facts.scalings,
        served_ranks=served_ranks,
        served_nbytes=sum(cost.nbytes for cost in facts.costs.values()),
        text_files=tuple(name for name in TEXT_NAMES if (Path(path) / name).is_file()),
    )
