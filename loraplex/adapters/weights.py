"""An adapter in host memory: `delta(module) = scaling * lora_b @ lora_a`, `[out, in]`; and its reading for one base.

lora_a [rank, in], lora_b [out, rank] as PEFT stores them; `scaling` is kept apart. lora_bias [out] is added, scaled:
`y += scaling * (x A^T B^T + lora_bias)`. bias [out] replaces the base's bias of the module.

What was found good of a configuration and a header is remembered by both, since those of a thousand adapters of one
recipe are equal (`Blueprint`, docs/adr/0014). Read and checked each time: the file's identity, bytes, NaN, the digest.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from loraplex.adapters.files import BIN_NAME, MIN_TENSORS, AdapterFolder, read_files
from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.regular_file import Roots, check_size
from loraplex.adapters.tensor_names import PARTS, TensorName
from loraplex.adapters.tensors import DTYPES, ReadPlan, WeightFile, is_finite, read_tensors
from loraplex.adapters.validation import TensorCheck, base_modules
from loraplex.config import LoRAConfig
from loraplex.core import LoraTarget
from loraplex.errors import AdapterLoadError, AdapterValidationError

BIN_COPIES = 3
MAX_BLUEPRINTS = 32
MAX_REFUSED_BYTES = 2**26
"""Of a larger adapter that is refused already the numbers are not read: NaN would be one more reason, and a sparse file
of a few kilobytes would cost gigabytes."""
MAX_KNOWN_HEADER_BYTES = 2**20
"""Of a larger header nothing is remembered, so that what is has a bound."""


@dataclass(frozen=True, eq=False)
class LoRALayerWeights:
    """One module's share of an adapter. `lora_a` and `lora_b` are None when only the bias is replaced (bias "all").

    magnitude [out] (DoRA): the row norms that W + scaling * B A is brought to. gain [out], input_gain [in] (IA3): what
    the outputs, or the inputs, of the base's module are multiplied by.
    """

    module_name: str
    rank: int
    lora_alpha: float
    lora_a: torch.Tensor | None
    lora_b: torch.Tensor | None
    lora_bias: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    scaling: float = 1.0
    magnitude: torch.Tensor | None = None
    gain: torch.Tensor | None = None
    input_gain: torch.Tensor | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What is there, by field name."""
        return {field: tensor for field in PARTS if (tensor := getattr(self, field)) is not None}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> LoRALayerWeights:
        """The same layer with these tensors, by field name; those not given are None."""
        fields: dict[str, Any] = {field: tensors.get(field) for field in PARTS}
        return replace(self, **fields)


@dataclass(frozen=True, eq=False)
class Blueprint:
    """An adapter without its numbers, found good: one object for a recipe. warnings: of the tensors alone.

    layers: each without tensors, and by field which of the plan's tensors are its own.
    """

    plan: ReadPlan
    layers: tuple[tuple[LoRALayerWeights, dict[str, int]], ...]
    warnings: tuple[str, ...]

    def layers_of(self, block: torch.Tensor) -> dict[str, LoRALayerWeights]:
        """Those of a block that was read by the plan."""
        tensors = self.plan.tensors(block)
        return {
            layer.module_name: layer.with_tensors({field: tensors[index] for field, index in parts.items()})
            for layer, parts in self.layers
        }


@dataclass(frozen=True, eq=False)
class LoRAModel:
    """All layers of one adapter. `adapter_digest` identifies the content; `adapter_id` is 0 until `clone` gives one.

    blueprint: models that have the same one differ in nothing but their numbers.
    """

    adapter_digest: str
    rank: int
    layers: Mapping[str, LoRALayerWeights]
    adapter_id: int = 0
    warnings: tuple[str, ...] = ()
    blueprint: Blueprint | None = None

    @property
    def id(self) -> int:
        """vLLM's name for `adapter_id`."""
        return self.adapter_id

    @cached_property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers.values())

    def __iter__(self) -> Iterator[LoRALayerWeights]:
        return iter(self.layers.values())

    def get_lora(self, module_name: str) -> LoRALayerWeights | None:
        return self.layers.get(module_name)

    def check_lora_name(self, module_name: str) -> bool:
        return module_name in self.layers

    def clone(self, adapter_id: int) -> LoRAModel:
        """The same tensors under another id."""
        return replace(self, adapter_id=adapter_id)

    @staticmethod
    def from_local_checkpoint(
        directory: str | Path,
        peft_helper: PEFTHelper,
        targets: Sequence[LoraTarget],
        lora_config: LoRAConfig,
        adapter_id: int = 0,
    ) -> LoRAModel:
        """What `CheckedReader.read` reads and raises."""
        return CheckedReader(targets, lora_config).read(Path(directory), peft_helper).clone(adapter_id)


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

    def read(self, directory: Path, helper: PEFTHelper, roots: Roots = None) -> LoRAModel:
        """Read and validate an adapter's directory.

        Raises AdapterValidationError with every reason (configuration, names, shapes, dtypes, NaN; then conversions).

        Also AdapterBaseMismatchError, AdapterTooLargeError, and the errors of the files (missing, permission, outside
        the roots, truncated, format).
        """
        folder = AdapterFolder(directory, helper.adapter, roots)
        nbytes = _bytes_to_read(folder)
        with self._budget.hold(nbytes):
            return self._read(folder, helper, nbytes)

    def _read(self, folder: AdapterFolder, helper: PEFTHelper, held_bytes: int) -> LoRAModel:
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
        layers = _convert(blueprint.layers_of(block), self.lora_config, helper.adapter)
        warnings = (*helper.warnings, *blueprint.warnings)
        return LoRAModel(digest, max(layer.rank for layer in layers.values()), layers, 0, warnings, blueprint)

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
    return Blueprint(plan, tuple(layers), tuple(check.warnings))


def _layers(plan: ReadPlan, helper: PEFTHelper) -> Iterator[tuple[LoRALayerWeights, dict[str, int]]]:
    modules = sorted({name.module for name in plan.names})
    numbers, indices = helper.numbers(modules), {name: index for index, name in enumerate(plan.names)}
    for module in modules:
        names = {field: TensorName(module, part) for field, part in PARTS.items()}
        parts = {field: indices[name] for field, name in names.items() if name in indices}
        rank = numbers.ranks[module] if "lora_a" in parts else 0
        scaling = numbers.scalings[module]
        yield LoRALayerWeights(module, rank, numbers.alphas[module], None, None, scaling=scaling), parts


def _convert(layers: dict[str, LoRALayerWeights], lora_config: LoRAConfig, adapter: str) -> dict[str, LoRALayerWeights]:
    """The layers in `lora_dtype`, unless it is `auto`, or `int8`, which they become when they are packed.

    A value that does not fit is a reason to refuse.
    """
    if lora_config.lora_dtype in ("auto", "int8"):
        return layers
    dtype: torch.dtype = getattr(torch, lora_config.lora_dtype)
    converted = {
        name: layer.with_tensors({field: tensor.to(dtype) for field, tensor in layer.tensors.items()})
        for name, layer in layers.items()
    }
    reasons = [
        f"{name}: {field} does not fit in lora_dtype={lora_config.lora_dtype!r}; use auto, bfloat16 or float32"
        for name, layer in converted.items()
        for field, tensor in layer.tensors.items()
        if not is_finite(tensor)
    ]
    if reasons:
        raise AdapterValidationError.from_reasons(adapter, reasons)
    return converted
