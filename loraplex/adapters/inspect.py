"""What would be honoured or refused of an adapter, and why: `loraplex adapter inspect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loraplex.adapters.fields import FieldVerdict, Verdict, is_set
from loraplex.adapters.files import AdapterFolder, TensorEntry
from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.regular_file import check_size
from loraplex.adapters.tensor_names import TensorName, unused_reasons
from loraplex.adapters.tensors import DTYPES, ReadPlan, WeightFile, read_tensors
from loraplex.adapters.validation import TensorCheck
from loraplex.adapters.weights import LoRAModel
from loraplex.config import LoRAConfig
from loraplex.core import LoraTarget
from loraplex.errors import AdapterBaseMismatchError, AdapterError, AdapterValidationError, shown


@dataclass(frozen=True)
class AdapterReport:
    """All that can be said of an adapter. `reasons` empty: it would be loaded (by this base, if targets were given).

    ranks, scalings, dtypes: value -> number of modules (of tensors, for dtypes); `nbytes` of the tensors; digest "" if
    unreadable.
    """

    path: str
    base_model_name: str | None
    fields: tuple[FieldVerdict, ...]
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    modules: tuple[str, ...] = ()
    ranks: dict[int, int] | None = None
    scalings: dict[float, int] | None = None
    dtypes: dict[str, int] | None = None
    nbytes: int = 0
    num_tensors: int = 0
    weight_file: str = ""
    adapter_digest: str = ""
    is_checked_against_base: bool = False

    @property
    def is_honoured(self) -> bool:
        return not self.reasons

    def describe(self) -> str:
        """The report as text: the verdict, its reasons, what the files hold, the fields that are set."""
        lines = [f"{self.path}: {'would be loaded' if self.is_honoured else 'is refused'}{self._base_note()}"]
        lines += [f"  refused: {reason}" for reason in self.reasons]
        lines += [f"  warning: {warning}" for warning in self.warnings]
        lines += [f"  {label}: {value}" for label, value in self._facts() if value]
        for field in self.fields:
            if is_set(field.value) or field.verdict is Verdict.REFUSED:
                reason = f"  ({field.reason})" if field.verdict is Verdict.IGNORED else ""
                lines.append(f"  {field.verdict.value:8} {field.name} = {shown(field.value, 80)}{reason}")
        return "\n".join(map(_printable, lines))

    def _base_note(self) -> str:
        return "" if self.is_checked_against_base else " (not checked against a base model; give one with --base)"

    def _facts(self) -> list[tuple[str, str]]:
        def counts(values: dict[int, int] | dict[float, int] | dict[str, int] | None, what: str) -> str:
            return ", ".join(f"{value} ({count} {what})" for value, count in sorted((values or {}).items()))

        return [
            ("base model", self.base_model_name or ""),
            (
                "file",
                f"{self.weight_file}, {self.num_tensors} tensors, {self.nbytes} bytes" if self.weight_file else "",
            ),
            ("dtype", counts(self.dtypes, "tensors")),
            ("rank", counts(self.ranks, "modules")),
            ("scaling", counts(self.scalings, "modules")),
            ("modules", ", ".join(sorted({module.rpartition(".")[2] for module in self.modules}))),
            ("digest", self.adapter_digest),
        ]


def _printable(line: str) -> str:
    """What an adapter calls its fields and modules may hold orders for the terminal: they are shown, not obeyed."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)


def inspect_adapter(
    path: str | Path, targets: Sequence[LoraTarget] | None = None, lora_config: LoRAConfig | None = None
) -> AdapterReport:
    """Read an adapter directory and judge it; with `targets`, as the base model that publishes them would.

    Raises only when there is no readable adapter_config.json; everything else is in `reasons`.
    """
    limits = lora_config or LoRAConfig()
    helper = PEFTHelper.from_local_dir(path)
    try:
        file = WeightFile.open(AdapterFolder(Path(path), helper.adapter), limits.host_memory_bytes)
        check_size(file.nbytes, limits.host_memory_bytes, helper.adapter)
    except AdapterError as error:
        return _report(path, helper, [*helper.reasons(limits), error.message])
    names, odd = _parse(file, helper)
    digest, damaged = _digest(file, names, helper)
    if targets is None:
        reasons, warnings = [*helper.reasons(limits), *odd, *damaged, *_pairs(names, helper)], helper.warnings
    else:
        reasons, warnings = _judge(path, helper, targets, limits)
    return replace(
        _report(path, helper, reasons, _module_facts(names, helper)),
        warnings=warnings,
        dtypes=dict(Counter(entry.dtype for entry in names.values())),
        nbytes=file.nbytes,
        num_tensors=len(file.entries),
        weight_file=file.name,
        adapter_digest=digest,
        is_checked_against_base=targets is not None,
    )


def _judge(
    path: str | Path, helper: PEFTHelper, targets: Sequence[LoraTarget], limits: LoRAConfig
) -> tuple[list[str], tuple[str, ...]]:
    """(reasons, warnings) of the base model."""
    try:
        return [], LoRAModel.from_local_checkpoint(path, helper, targets, limits).warnings
    except AdapterValidationError as error:
        return list(error.reasons), helper.warnings
    except AdapterBaseMismatchError as error:
        return [error.message], helper.warnings
    except AdapterError as error:
        return [*helper.reasons(limits), error.message], helper.warnings


def _parse(file: WeightFile, helper: PEFTHelper) -> tuple[dict[TensorName, TensorEntry], list[str]]:
    """What can be read, and reasons for the rest."""
    check = TensorCheck(helper, base={})
    for entry in file.entries:
        check.add(entry)
    names = {name: entry for name, entry in check.names.items() if entry.dtype in DTYPES}
    return names, [*unused_reasons(check.unknown), *check.reasons]


def _digest(file: WeightFile, names: dict[TensorName, TensorEntry], helper: PEFTHelper) -> tuple[str, list[str]]:
    try:
        _, digest, not_finite = read_tensors(file, ReadPlan.of(names), helper.canonical())
    except AdapterError as error:
        return "", [error.message]
    return digest, [f"tensor {name!r} has NaN or Inf" for name in not_finite]


def _pairs(names: dict[TensorName, TensorEntry], helper: PEFTHelper) -> list[str]:
    """What can be checked without a base: A with B, and the ranks."""
    try:
        modules = _modules(names)
        numbers = helper.numbers(modules)
    except AdapterValidationError as error:
        return list(error.reasons)
    reasons = helper.unusable_scalings(numbers)
    if not modules:
        reasons.append("the file has no lora_A.weight: there is no LoRA in it")
    for module, rank in numbers.ranks.items():
        for part, axis in (("lora_A.weight", 0), ("lora_B.weight", 1)):
            entry = names.get(TensorName(module, part))
            if entry is None:
                reasons.append(f"{module}: the file has no {part}")
            elif len(entry.shape) != 2 or entry.shape[axis] != rank:
                reasons.append(f"tensor {entry.name!r} has shape {list(entry.shape)}, its rank should be {rank}")
    return reasons


def _modules(names: dict[TensorName, TensorEntry]) -> tuple[str, ...]:
    return tuple(sorted({name.module for name in names if name.part != "bias"}))


@dataclass(frozen=True)
class _ModuleFacts:
    modules: tuple[str, ...] = ()
    ranks: dict[int, int] | None = None
    scalings: dict[float, int] | None = None


def _module_facts(names: dict[TensorName, TensorEntry], helper: PEFTHelper) -> _ModuleFacts:
    modules = _modules(names)
    try:
        numbers = helper.numbers(modules)
    except AdapterValidationError:  # a pattern that cannot be matched: it is among the reasons
        return _ModuleFacts(modules)
    return _ModuleFacts(modules, dict(Counter(numbers.ranks.values())), dict(Counter(numbers.scalings.values())))


def _report(
    path: str | Path, helper: PEFTHelper, reasons: Sequence[str], facts: _ModuleFacts | None = None
) -> AdapterReport:
    facts = facts or _ModuleFacts()
    return AdapterReport(
        path=str(path),
        base_model_name=helper.base_model_name,
        fields=helper.verdicts,
        reasons=AdapterValidationError.from_reasons(helper.adapter, reasons).reasons,
        warnings=helper.warnings,
        modules=facts.modules,
        ranks=facts.ranks,
        scalings=facts.scalings,
    )
