"""An adapter on disk without a base model at hand: its configuration, names and shapes, then its weights.

What an engine serves was checked against its base model when it was loaded, and what is made of it will be; here its
own shapes stand for the base. So the same reader finds NaN, damage and missing tensors, and the digest says whether
the content is still what was loaded.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from loraplex.adapters.conversion import cost_of, file_widths
from loraplex.adapters.files import BIN_NAME, AdapterFolder, TensorEntry
from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.kinds import (
    BASE_WEIGHT,
    COPY,
    OWN_PARTS,
    PEFT_TYPES,
    TOKENS,
    WEIGHT,
    Kind,
    TensorName,
    TypeVerdict,
    parse_tensor_name,
    unused_reasons,
)
from loraplex.adapters.source import AdapterSource
from loraplex.adapters.source_reader import read_adapter
from loraplex.adapters.tensors import DTYPES, ReadPlan, WeightFile, read_tensors
from loraplex.adapters.weights import BIN_COPIES, CheckedReader, LoRAModel
from loraplex.config import DEFAULT_HOST_BYTES, LoRAConfig
from loraplex.core import LoraSlice, LoraTarget, ShardKind
from loraplex.errors import AdapterContentChangedError, AdapterTooLargeError, AdapterValidationError


def reader_limits(max_bytes: int) -> LoRAConfig:
    """Of the reader, which bounds by its host budget what conversions make, too."""
    return LoRAConfig(host_memory_bytes=max(max_bytes, DEFAULT_HOST_BYTES))


_bins, _parsing = threading.Lock(), threading.Lock()
"""A server plans several merges at a time: of all, one .bin is in memory and one file is parsed."""


def check_memory(verb: str, nbytes: int, max_bytes: int) -> None:
    """Raise AdapterTooLargeError for a merge or an export that would take more."""
    if nbytes > max_bytes:
        text = f"the {verb} would take {nbytes} bytes of memory and {max_bytes} are the limit (max_merge_bytes)"
        raise AdapterTooLargeError(f"{text}; {'merge fewer adapters, or ' if verb == 'merge' else ''}raise it")


@dataclass(frozen=True)
class Origin:
    """Where an adapter lies. digest: what its content must be; None: whatever it is."""

    name: str
    path: str
    source: AdapterSource
    digest: str | None = None

    @property
    def folder(self) -> AdapterFolder:
        return AdapterFolder(Path(self.path), self.name, self.source.roots_of(Path(self.path)))

    @property
    def bytes_to_open(self) -> int:
        """Of memory, while its headers are read: of a .bin, that is all of it. Raises what finding the file raises."""
        folder = self.folder
        if folder.weight_name() != BIN_NAME:
            return 0
        with suppress(OSError):
            return os.stat(folder.path / BIN_NAME).st_size * BIN_COPIES
        return 0  # what opens it says what it is

    @contextmanager
    def open(self, limits: LoRAConfig) -> Iterator[WeightFile]:
        """A .bin is let go before another is read."""
        folder = self.folder
        with _bins if folder.weight_name() == BIN_NAME else nullcontext():
            yield WeightFile.open(folder, limits.host_memory_bytes)

    def check_content(self, limits: LoRAConfig, max_bytes: int) -> None:
        """Raise AdapterContentChangedError unless the files have the content of the digest, AdapterTooLargeError, and
        the errors of the files. Nothing of the files is compared with anything else."""
        helper = PEFTHelper.from_dict(self.folder.read_config(), self.name)
        with self.open(limits) as file:
            check_memory("export", file.nbytes, max_bytes)
            named = [(parse_tensor_name(entry.name, helper.kind), entry) for entry in file.entries]
            known = {name: entry for name, entry in named if name is not None and entry.dtype in DTYPES}
            _, digest, _ = read_tensors(file, ReadPlan.of(known), helper.canonical())
        self.check_digest(digest)

    def check_digest(self, found: str) -> None:
        if self.digest not in (None, found):
            raise AdapterContentChangedError(
                f"adapter {self.name!r}: its files have changed since it was loaded; reload it first"
            )


@dataclass(frozen=True)
class FiledModule:
    """A module as an adapter's tensors show it. A width that none of them says is 1. rank: as it is served."""

    rank: int
    in_features: int
    out_features: int
    kind: ShardKind = ShardKind.REPLICATED

    @property
    def widths(self) -> tuple[int, int]:
        return self.in_features, self.out_features


@dataclass(frozen=True)
class Outline:
    """The headers of one adapter. entries: tensors that are understood; modules: those that they are of."""

    origin: Origin
    document: Mapping[str, Any]
    helper: PEFTHelper
    entries: Mapping[TensorName, TensorEntry]
    modules: Mapping[str, FiledModule]

    @classmethod
    def read(cls, origin: Origin, limits: LoRAConfig) -> Outline:
        """Read the configuration and the headers. Raises AdapterValidationError for what is not served at all, and the
        errors of the files."""
        folder = origin.folder
        document = folder.read_config()
        helper = PEFTHelper.from_dict(document, origin.name)
        helper.validate_legal(limits)
        with origin.open(limits) as file, _parsing:
            return cls._of(origin, document, helper, file)

    @classmethod
    def _of(cls, origin: Origin, document: Mapping[str, Any], helper: PEFTHelper, file: WeightFile) -> Outline:
        named = [(parse_tensor_name(entry.name, helper.kind), entry) for entry in file.entries]
        unknown = unused_reasons([entry.name for name, entry in named if name is None], helper.kind)
        if unknown:
            raise AdapterValidationError.from_reasons(origin.name, unknown)
        entries = {name: entry for name, entry in named if name is not None}
        return cls(origin, document, helper, entries, _modules(helper, entries))

    @property
    def own(self) -> dict[TensorName, TensorEntry]:
        """The tensors that are in place of the base's, or of rows of them."""
        return {name: entry for name, entry in self.entries.items() if name.part in OWN_PARTS}

    @property
    def export_bytes(self) -> int:
        """Of memory: the tensors of the file, and what is made of those of a converted kind."""
        is_converted = PEFT_TYPES[self.helper.kind].verdict is TypeVerdict.CONVERTED
        made = sum(each.rank * sum(each.widths) * 4 for each in self.modules.values()) if is_converted else 0
        return made + sum(entry.nbytes for entry in self.entries.values())

    def model(self, limits: LoRAConfig) -> LoRAModel:
        """The weights. Raises what `CheckedReader.read` raises, and AdapterContentChangedError."""
        origin = self.origin
        reader = CheckedReader(self._targets(), limits, is_whole=False)
        model = read_adapter(origin.path, origin.name, origin.source, reader)
        origin.check_digest(model.adapter_digest)
        return model

    def tensors(self, limits: LoRAConfig) -> tuple[dict[TensorName, torch.Tensor], str]:
        """(the tensors as they are in the file, the digest). Raises what `model` raises."""
        model = self.model(limits)
        assert model.blueprint is not None
        plan, digest = model.blueprint.plan, model.adapter_digest
        del model  # what was made of the tensors is not wanted: only whether it could be
        with self.origin.open(limits) as file:
            block, again, _ = read_tensors(file, plan, self.helper.canonical())
        replace(self.origin, digest=digest).check_digest(again)
        return dict(zip(plan.names, plan.tensors(block), strict=True)), digest

    def _targets(self) -> tuple[LoraTarget, ...]:
        biased = {name.module for name in self.entries if name.part == "bias"}
        is_tied = self._has_tied_ends()
        return tuple(
            LoraTarget(
                name,
                0,
                module.in_features,
                module.in_features,
                (LoraSlice(name, 0, module.out_features, module.out_features, name in biased),),
                module.kind,
                is_tied=is_tied and module.kind is ShardKind.HEAD,
            )
            for name, module in self.modules.items()
        )

    def _has_tied_ends(self) -> bool:
        """Whether the file has for both ends what the configuration calls for at one: so it does of a base whose head
        is tied."""
        ends = [name for name, module in self.modules.items() if module.kind in (ShardKind.EMBEDDING, ShardKind.HEAD)]
        if len(ends) != 2:
            return False
        trained = [name for name in ends if TensorName(name, TOKENS) in self.entries]
        is_of_tokens = self.helper.kind is Kind.TRAINABLE_TOKENS
        called = self.helper.match_modules(ends) if is_of_tokens else self.helper.match_trained_tokens(ends).keys()
        saved = self.helper.match_saved(ends).keys()
        has_copies = all(TensorName(name, COPY) in self.entries for name in ends if name not in saved)
        is_one = len(self.helper.match_modules(ends)) == 1 or (len(saved) == 1 and has_copies)
        is_tying = self.helper.ensure_weight_tying and is_one
        return is_tying or len(called) < len(trained)


def _modules(helper: PEFTHelper, entries: Mapping[TensorName, TensorEntry]) -> dict[str, FiledModule]:
    parts: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, entry in entries.items():
        parts.setdefault(name.module, {})[name.part] = entry.shape
    shared = parts.pop("", {})
    ranks, vocab_size, modules = helper.numbers(tuple(parts)).ranks, _vocab_size(helper, parts), {}
    for module, found in parts.items():
        kind = _kind_of(module, found)
        blocks = helper.blocks_of(module)
        widths = _vera_widths(shared, found) or file_widths(helper.kind, found, blocks)
        if widths is not None:
            modules[module] = FiledModule(cost_of(helper, ranks[module], *widths, blocks).rank, *widths, kind)
        elif (widths := _own_widths(vocab_size, kind, found)) is not None:
            modules[module] = FiledModule(0, *widths, kind)
        else:
            text = f"{module}: the shapes of {', '.join(sorted(found))} are not those of a linear"
            raise AdapterValidationError.from_reasons(helper.adapter, [text])
    return modules


def _kind_of(module: str, found: Mapping[str, tuple[int, ...]]) -> ShardKind:
    """By its name, as the served families have them."""
    leaf = module.rpartition(".")[2]
    if leaf in _ENDS:
        return _ENDS[leaf]
    return ShardKind.NORM if len(found.get(WEIGHT, ())) == 1 else ShardKind.REPLICATED


_ENDS = {"embed_tokens": ShardKind.EMBEDDING, "lm_head": ShardKind.HEAD}


def _vera_widths(shared: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> tuple[int, int] | None:
    """VeRA's tensors say nothing of a module's inputs: those of the widest stand for them."""
    inputs, outputs = shared.get("vera_A", ()), found.get("vera_lambda_b", ())
    return (inputs[1], outputs[0]) if len(inputs) == 2 and len(outputs) == 1 else None


def _vocab_size(helper: PEFTHelper, parts: Mapping[str, Mapping[str, tuple[int, ...]]]) -> int:
    """By the rows of either end; of trained tokens alone, as many as hold the last of them."""
    rows = [
        found[part][axis]
        for module, found in parts.items()
        if module.rpartition(".")[2] in _ENDS
        for part, axis in _VOCABULARY_AXES.items()
        if len(found.get(part, ())) == 2
    ]
    return max(rows or (max(ids) + 1 for ids in (helper.token_indices or {}).values() if ids), default=0)


_VOCABULARY_AXES = {**dict.fromkeys((WEIGHT, BASE_WEIGHT, COPY, "lora_B.weight", "lora_B"), 0), "lora_embedding_A": 1}


def _own_widths(vocab_size: int, kind: ShardKind, found: Mapping[str, tuple[int, ...]]) -> tuple[int, int] | None:
    """Of a module with a weight, trained rows or a bias of its own, and nothing of the adapter's kind."""
    weight = next((found[part] for part in (WEIGHT, BASE_WEIGHT, COPY) if part in found), ())
    if not weight and len(found.get(TOKENS, ())) == 2:
        weight = vocab_size, found[TOKENS][1]
    if not weight:
        bias = found.get("bias", ())
        return (1, bias[0]) if len(bias) == 1 else None
    if kind is ShardKind.NORM:
        return weight[0], weight[0]
    if len(weight) != 2:
        return None
    return (weight[0], weight[1]) if kind is ShardKind.EMBEDDING else (weight[1], weight[0])
