"""Reading an adapter for one base model: equal configurations and headers are judged once.

What configuration, names, shapes and dtypes say depends on nothing else than the fields of the one and the header of
the other. Those of a thousand adapters of one recipe are equal, so what was found good is remembered by them
(`Blueprint`); what is refused is not. Read and checked each time: the file's identity, its bytes, NaN and Inf, the
digest.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from loraplex.adapters.files import BIN_NAME, MIN_TENSORS, AdapterFolder, read_files
from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.regular_file import Roots, check_size
from loraplex.adapters.tensor_names import PARTS, TensorName
from loraplex.adapters.tensors import DTYPES, ReadPlan, WeightFile, read_tensors
from loraplex.adapters.validation import TensorCheck, base_modules
from loraplex.config import LoRAConfig
from loraplex.core import LoraTarget
from loraplex.errors import AdapterLoadError

BIN_COPIES = 3
MAX_BLUEPRINTS = 32
MAX_REFUSED_BYTES = 2**26
"""Of a larger adapter that is refused already the numbers are not read: NaN would be one more reason, and a sparse file
of a few kilobytes would cost gigabytes."""
MAX_KNOWN_HEADER_BYTES = 2**20
"""Of a larger header nothing is remembered, so that what is has a bound."""


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One module: its numbers, and which of the tensors read are its own, in the order of PARTS; None: it has none."""

    module_name: str
    rank: int
    lora_alpha: float
    scaling: float
    parts: tuple[int | None, ...]


@dataclass(frozen=True, eq=False)
class Blueprint:
    """An adapter without its numbers, found good: one object for a recipe. warnings: of the tensors alone."""

    plan: ReadPlan
    layers: tuple[LayerPlan, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class AdapterContent:
    """An adapter that was read and found good: one block of memory, not cut into layers yet.

    `nbytes` of its tensors in the file's dtypes.
    """

    blueprint: Blueprint
    block: torch.Tensor
    adapter_digest: str
    warnings: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return self.blueprint.plan.nbytes

    @property
    def rank(self) -> int:
        return max(layer.rank for layer in self.blueprint.layers)


class ByteBudget:
    """Readers wait until what they all hold is within `max_bytes`. One alone may hold more."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, nbytes: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self.held_bytes == 0 or self.held_bytes + nbytes <= self.max_bytes)
            self.held_bytes += nbytes
        try:
            yield
        finally:
            with self._changed:
                self.held_bytes -= nbytes
                self._changed.notify_all()


class CheckedReader:
    """Reads adapters for the base model that publishes `targets`. Any number of threads may use it at once.

    What they read together is bounded by the host budget, since a hundred files of a few gigabytes, sparse on disk,
    would be as many gigabytes in memory.
    """

    def __init__(self, targets: Sequence[LoraTarget], lora_config: LoRAConfig) -> None:
        self.lora_config = lora_config
        self._base = base_modules(targets)
        self.max_tensors = max(MIN_TENSORS, len(self._base) * len(PARTS))
        """With spare, so that messages say what is wrong."""
        self._budget = ByteBudget(lora_config.host_memory_bytes)
        self._known: OrderedDict[Hashable, Blueprint] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, directory: Path, helper: PEFTHelper, roots: Roots = None) -> AdapterContent:
        """Raises AdapterValidationError with every reason (configuration, names, shapes, dtypes, NaN).

        Also AdapterBaseMismatchError, AdapterTooLargeError, and the errors of the files (missing, permission, outside
        the roots, truncated, format).
        """
        folder = AdapterFolder(directory, helper.adapter, roots)
        nbytes = _bytes_to_read(folder)
        with self._budget.hold(nbytes):
            return self._read(folder, helper, nbytes)

    def _read(self, folder: AdapterFolder, helper: PEFTHelper, held_bytes: int) -> AdapterContent:
        max_bytes = self.lora_config.host_memory_bytes
        file = WeightFile.open(folder, max_bytes, self.max_tensors)
        if sum(shard.size for shard in file.shards) > held_bytes:
            text = "grew while it was read; load it again when it is complete"
            raise AdapterLoadError(f"adapter {helper.adapter!r} {text}")
        check = TensorCheck(helper, self._base)
        key = _key(file, helper)
        blueprint = self._get(key)
        if blueprint is None:
            check_size(file.nbytes, max_bytes, helper.adapter)
            blueprint = _blueprint(file, check)
        reasons = helper.reasons(self.lora_config)
        if blueprint.plan.nbytes > MAX_REFUSED_BYTES:
            check.raise_if_refused(reasons)
        block, digest, not_finite = read_tensors(file, blueprint.plan, helper.canonical())
        remedy = "train again or take an earlier checkpoint"
        check.reasons.extend(f"tensor {name!r} has NaN or Inf; {remedy}" for name in not_finite)
        check.raise_if_refused(reasons)
        self._put(key, blueprint)
        return AdapterContent(blueprint, block, digest, (*helper.warnings, *blueprint.warnings))

    def _get(self, key: Hashable) -> Blueprint | None:
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def _put(self, key: Hashable, blueprint: Blueprint) -> None:
        if key is None:
            return
        with self._lock:
            self._known.setdefault(key, blueprint)
            if len(self._known) > MAX_BLUEPRINTS:
                self._known.popitem(last=False)


def _bytes_to_read(folder: AdapterFolder) -> int:
    """At most, by the sizes of the files; those of .bin are in memory as a file, as a zip and as tensors."""
    nbytes = 0
    for path in read_files(folder):
        with suppress(OSError):
            nbytes += os.stat(path).st_size * (BIN_COPIES if path.name == BIN_NAME else 1)
    return nbytes


def _key(file: WeightFile, helper: PEFTHelper) -> Hashable:
    """All that a blueprint depends on beside the base model; None for what is not remembered (.bin, long headers)."""
    if file.loaded is not None or sum(len(shard.header) for shard in file.shards) > MAX_KNOWN_HEADER_BYTES:
        return None
    return helper.naming(), tuple((shard.header, shard.size, shard.expected) for shard in file.shards)


def _blueprint(file: WeightFile, check: TensorCheck) -> Blueprint:
    """Of what can be read, with the findings about the rest in `check`."""
    for entry in file.entries:
        check.add(entry)
    check.check()
    plan = ReadPlan.of({name: entry for name, entry in check.names.items() if entry.dtype in DTYPES})
    layers = () if check.reasons or check.differences else _layers(plan, check.helper)
    return Blueprint(plan, layers, tuple(check.warnings))


def _layers(plan: ReadPlan, helper: PEFTHelper) -> tuple[LayerPlan, ...]:
    modules = sorted({name.module for name in plan.names})
    numbers, indices = helper.numbers(modules), {name: index for index, name in enumerate(plan.names)}
    layers = []
    for module in modules:
        parts = tuple(indices.get(TensorName(module, part)) for part in PARTS.values())
        rank = 0 if parts[0] is None else numbers.ranks[module]
        layers.append(LayerPlan(module, rank, numbers.alphas[module], numbers.scalings[module], parts))
    return tuple(layers)
