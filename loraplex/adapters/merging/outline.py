"""An adapter on disk without a base model at hand: its configuration, names and shapes, then its weights.

What an engine serves was checked against its base model when it was loaded, and what is made of it will be; here its
own shapes stand for the base. So the same reader finds NaN, damage and missing tensors, and the digest says whether
the content is still what was loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.adapters.conversion import cost_of, file_widths
from loraplex.adapters.files import AdapterFolder, TensorEntry
from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.kinds import OWN_PARTS, Kind, TensorName, parse_tensor_name, unused_reasons
from loraplex.adapters.opener import read_adapter
from loraplex.adapters.source import AdapterSource
from loraplex.adapters.tensors import WeightFile
from loraplex.adapters.weights import CheckedReader, LoRAModel
from loraplex.config import DEFAULT_HOST_BYTES, LoRAConfig
from loraplex.core import LoraSlice, LoraTarget
from loraplex.errors import AdapterContentChangedError, AdapterValidationError


def reader_limits(max_bytes: int) -> LoRAConfig:
    """Of the reader, which bounds by its host budget what conversions make, too."""
    return LoRAConfig(host_memory_bytes=max(max_bytes, DEFAULT_HOST_BYTES))


@dataclass(frozen=True)
class Origin:
    """Where an adapter lies. digest: what its content must be; None: whatever it is."""

    name: str
    path: str
    source: AdapterSource
    digest: str | None = None


@dataclass(frozen=True)
class Outline:
    """The headers of one adapter. entries: tensors that are understood; shapes: (rank as served, in, out) of a module.

    A width that no tensor says, such as the inputs of a module with a bias alone, is 1.
    """

    origin: Origin
    document: Mapping[str, Any]
    helper: PEFTHelper
    entries: Mapping[TensorName, TensorEntry]
    shapes: Mapping[str, tuple[int, int, int]]

    @classmethod
    def read(cls, origin: Origin, limits: LoRAConfig) -> Outline:
        """Read the configuration and the headers. Raises AdapterValidationError for what is not served at all, and the
        errors of the files."""
        folder = AdapterFolder(Path(origin.path), origin.name, origin.source.roots_of(Path(origin.path)))
        document = folder.read_config()
        helper = PEFTHelper.from_dict(document, origin.name)
        helper.validate_legal(limits)
        file = WeightFile.open(folder, limits.host_memory_bytes)
        named = [(parse_tensor_name(entry.name, helper.kind), entry) for entry in file.entries]
        unknown = unused_reasons([entry.name for name, entry in named if name is None], helper.kind)
        if unknown:
            raise AdapterValidationError.from_reasons(origin.name, unknown)
        entries = {name: entry for name, entry in named if name is not None}
        if helper.kind is Kind.VERA or any(_is_own(name) for name in entries):
            what = "VeRA's shared A and B" if helper.kind is Kind.VERA else "an embedding or whole weights of its own"
            text = f"it has {what}, which no merge or export can say yet; serve it as it is"
            raise AdapterValidationError.from_reasons(origin.name, [text])
        return cls(origin, document, helper, entries, _shapes(helper, entries))

    def model(self, limits: LoRAConfig) -> LoRAModel:
        """The weights. Raises what `CheckedReader.read` raises, and AdapterContentChangedError."""
        origin = self.origin
        model = read_adapter(origin.path, origin.name, origin.source, CheckedReader(self._targets(), limits))
        if origin.digest not in (None, model.adapter_digest):
            raise AdapterContentChangedError(
                f"adapter {origin.name!r}: its files have changed since it was loaded; reload it first"
            )
        return model

    def _targets(self) -> tuple[LoraTarget, ...]:
        biased = {name.module for name in self.entries if name.part == "bias"}
        return tuple(
            LoraTarget(module, 0, width, width, (LoraSlice(module, 0, height, height, module in biased),))
            for module, (_, width, height) in self.shapes.items()
        )


def _is_own(name: TensorName) -> bool:
    return name.part in OWN_PARTS or name.module.endswith("embed_tokens")


def _shapes(helper: PEFTHelper, entries: Mapping[TensorName, TensorEntry]) -> dict[str, tuple[int, int, int]]:
    parts: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, entry in entries.items():
        parts.setdefault(name.module, {})[name.part] = entry.shape
    ranks = helper.numbers(tuple(parts)).ranks
    shapes = {}
    for module, found in parts.items():
        widths = file_widths(helper.kind, found)
        if widths is not None:
            shapes[module] = cost_of(helper, ranks[module], *widths).rank, *widths
        elif found.keys() == {"bias"} and len(found["bias"]) == 1:
            shapes[module] = 0, 1, found["bias"][0]
        else:
            text = f"{module}: the shapes of {', '.join(sorted(found))} are not those of a linear"
            raise AdapterValidationError.from_reasons(helper.adapter, [text])
    return shapes
