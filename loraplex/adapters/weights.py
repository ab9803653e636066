"""An adapter in host memory: `delta(module) = scaling * lora_b @ lora_a`, `[out, in]`; and its reading for one base.

lora_a [rank, in], lora_b [out, rank] as PEFT stores them; `scaling` is kept apart. lora_bias [out] is added, scaled:
`y += scaling * (x A^T B^T + lora_bias)`. bias [out] replaces the base's bias of the module. Other kinds than LoRA are
made into these, a magnitude or gains (conversion.py), in float32 whatever the file has. weight and row_ids are what an
adapter has of its own (own.py).

What was found good of a configuration and a header is remembered by both, since those of a thousand adapters of one
recipe are equal (`Blueprint`, docs/adr/0014). Read and checked each time: the file's identity, bytes, NaN, the digest.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from loraplex.adapter_store import LongContext
from loraplex.adapters.conversion import (
    Converter,
    are_equal,
    block_diagonal,
    converter_of,
    row_maxima,
    scales_of,
    with_tokens,
)
from loraplex.adapters.experts import ExpertBase, ExpertCut
from loraplex.adapters.files import BIN_NAME, MIN_TENSORS, TEXT_NAMES, AdapterFolder, read_files
from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.kinds import MAX_PARTS, PARTS, SHARED, Kind, TensorName
from loraplex.adapters.own import Equal, OwnPart, OwnParts
from loraplex.adapters.regular_file import Roots, check_size
from loraplex.adapters.tensors import DTYPES, ReadPlan, WeightFile, is_finite, read_tensors
from loraplex.adapters.validation import TensorCheck, base_modules
from loraplex.config import LoRAConfig
from loraplex.core import LongContexts, LoraTarget
from loraplex.errors import AdapterLoadError, AdapterValidationError
from loraplex.processes.fair_turns import ByteBudget

BIN_COPIES = 3
MAX_BLUEPRINTS = 32
MAX_REFUSED_BYTES = 2**26
"""Of a larger adapter that is refused already the numbers are not read: NaN would be one more reason, and a sparse file
of a few kilobytes would cost gigabytes."""
MAX_KNOWN_HEADER_BYTES = 2**20
"""Of a larger header nothing is remembered, so that what is has a bound."""

SMALL_READS = 256
"""What takes up to one in so many of the bytes that readers may hold waits for none: together that is as much again."""

FLOAT32_FIELDS = ("magnitude", "gain", "input_gain")
SCALES = ("rank_scale", "out_scale")
LAYER_FIELDS = ("lora_a", "lora_b", "lora_bias", "bias", *FLOAT32_FIELDS, *SCALES, "weight", "row_ids")
"""The tensors of a layer; FLOAT32_FIELDS and SCALES are float32, whatever lora_dtype is, and row_ids int64."""

_FIELDS = {"embedding_a": "lora_a", "embedding_b": "lora_b"}


@dataclass(frozen=True, eq=False)
class LoRALayerWeights:
    """One module's share of an adapter. `lora_a` and `lora_b` are None when only the bias is replaced (bias "all"), and
    of IA3.

    magnitude [out] (DoRA): the row norms that W + scaling * B A is brought to. gain [out], input_gain [in] (IA3): what
    the outputs, or the inputs, of the base's module are multiplied by.

    weight is in place of the base's: [out, in] of a linear, [hidden] of a norm, rows [n, hidden] of an embedding or a
    head, those of the tokens row_ids int64 [n], ascending; without row_ids, of 0 to n - 1. LoRA on an embedding has
    lora_a [rank, vocabulary] and lora_b [hidden, rank].

    rank_scale [rank], out_scale [out] are in place of lora_a and lora_b in a model with projections (VeRA): the delta
    is diag(out_scale) B diag(rank_scale) A, A and B cut to the module.

    a_blocks, b_blocks (block-diagonal LoRA): A or B is so many blocks on its diagonal, and zeros elsewhere; 1: it is
    whole.
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
    weight: torch.Tensor | None = None
    row_ids: torch.Tensor | None = None
    rank_scale: torch.Tensor | None = None
    out_scale: torch.Tensor | None = None
    a_blocks: int = 1
    b_blocks: int = 1

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What is there, by field name."""
        return {field: tensor for field in LAYER_FIELDS if (tensor := getattr(self, field)) is not None}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> LoRALayerWeights:
        """The same layer with these tensors, by field name; those not given are None."""
        fields: dict[str, Any] = {field: tensors.get(field) for field in LAYER_FIELDS}
        return replace(self, **fields)


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One layer: without tensors, and by number which of the plan's are its own. parts: by short name (of a LoRA:
    field); weight, tokens, token_ids: as OwnPart's; in_features: the module's, of a VeRA; expert: of tensors that all
    experts of a layer share, what is its own."""

    layer: LoRALayerWeights
    parts: Mapping[str, int]
    weight: int | None = None
    tokens: int | None = None
    token_ids: tuple[int, ...] = ()
    in_features: int = 0
    expert: ExpertCut | None = None

    def fields(self, tensors: Sequence[torch.Tensor], convert: Converter | None) -> dict[str, torch.Tensor]:
        parts = {short: tensors[index] for short, index in self.parts.items()}
        if self.expert is not None:
            return self.expert.of(parts)
        if "vera_a" in parts:
            parts["vera_a"] = parts["vera_a"][:, : self.in_features]
        bias = {short: part for short, part in parts.items() if short == "bias"}
        made = parts if convert is None or not parts.keys() - bias.keys() else {**convert(parts), **bias}
        for field, count in (("lora_a", self.layer.a_blocks), ("lora_b", self.layer.b_blocks)):
            if count > 1 and field in made:
                made = {**made, field: block_diagonal(made[field], count)}
        weight = None if self.weight is None else tensors[self.weight]
        if self.tokens is not None:
            return {**made, **with_tokens(weight, tensors[self.tokens], self.token_ids)}
        return made if weight is None else {**made, "weight": weight}


@dataclass(frozen=True, eq=False)
class Projections:
    """A [rank, most inputs] and B [most outputs, rank] that all modules of a VeRA share, and most VeRAs of a base.

    digest: of their numbers, dtype and shapes: only equal ones are stored as one.
    """

    lora_a: torch.Tensor
    lora_b: torch.Tensor
    digest: str

    @classmethod
    def of(cls, lora_a: torch.Tensor, lora_b: torch.Tensor) -> Projections:
        if lora_a.dtype != lora_b.dtype:
            lora_a, lora_b = lora_a.float(), lora_b.float()
        content = hashlib.blake2b(f"{lora_a.dtype} {(*lora_a.shape, *lora_b.shape)}".encode(), digest_size=16)
        for tensor in (lora_a, lora_b):
            content.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        return cls(lora_a, lora_b, content.hexdigest())

    @property
    def nbytes(self) -> int:
        return self.lora_a.nbytes + self.lora_b.nbytes


@dataclass(frozen=True, eq=False)
class Blueprint:
    """An adapter without its numbers, found good: one object for a recipe. warnings: of the tensors alone.

    convert: what makes fields of a layer's parts, None where they are the fields. made_bytes: of what is made of the
    file's tensors. equal: names of tensors that are one in peft. vocab_size: as LoRAModel's. keeps_projections: the
    file's are those of the model.
    """

    plan: ReadPlan
    layers: tuple[LayerPlan, ...]
    warnings: tuple[str, ...]
    convert: Converter | None = None
    made_bytes: int = 0
    equal: tuple[Equal, ...] = ()
    vocab_size: int | None = None
    keeps_projections: bool = False

    def projections_of(self, block: torch.Tensor) -> Projections | None:
        if not self.keeps_projections:
            return None
        tensors = dict(zip(self.plan.names, self.plan.tensors(block), strict=True))
        return Projections.of(*(tensors[TensorName("", part)] for part in ("vera_A", "vera_B")))

    def layers_of(self, block: torch.Tensor) -> dict[str, LoRALayerWeights]:
        """Those of a block that was read by the plan."""
        tensors = self.plan.tensors(block)
        return {
            plan.layer.module_name: plan.layer.with_tensors(plan.fields(tensors, self.convert)) for plan in self.layers
        }

    def unequal(self, block: torch.Tensor) -> list[str]:
        """Reasons: tensors that are one in peft and differ in the file, so that one of them would be lost there."""
        if not self.equal:
            return []
        tensors = dict(zip(self.plan.names, self.plan.tensors(block), strict=True))
        text = "peft has one tensor for both; save the adapter again"
        return [
            f"{each.first.canonical} and {each.second.canonical} differ: {text}"
            for each in self.equal
            if not are_equal(tensors[each.first], tensors[each.second], each.is_transposed)
        ]


@dataclass(frozen=True, eq=False)
class LoRAModel:
    """All layers of one adapter. `adapter_digest` identifies the content; `adapter_id` is 0 until `clone` gives one.

    blueprint: models that have the same one differ in nothing but their numbers. vocab_size: where the adapter's
    vocabulary ends; None: where the base's does. invocation_tokens: of an aLoRA. long_context: None where it has the
    base's positions. projections: what layers with scales share; only a reader with `keeps_projections` makes such a
    model, else they are multiplied out.
    """

    adapter_digest: str
    rank: int
    layers: Mapping[str, LoRALayerWeights]
    adapter_id: int = 0
    warnings: tuple[str, ...] = ()
    blueprint: Blueprint | None = None
    vocab_size: int | None = None
    invocation_tokens: tuple[int, ...] = ()
    long_context: LongContext | None = None
    projections: Projections | None = None

    @property
    def id(self) -> int:
        """vLLM's name for `adapter_id`."""
        return self.adapter_id

    @cached_property
    def nbytes(self) -> int:
        shared = 0 if self.projections is None else self.projections.nbytes
        return shared + sum(layer.nbytes for layer in self.layers.values())

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


class CheckedReader:
    """Reads adapters for the base model that publishes `targets`. Any number of threads may use it at once.

    long_contexts: of that base; None: an adapter with a longer context is read as any other, and not judged by it.

    What they read together is bounded by the host budget, since a hundred files of a few gigabytes, sparse on disk,
    would be as many gigabytes in memory.
    """

    def __init__(
        self,
        targets: Sequence[LoraTarget],
        lora_config: LoRAConfig,
        long_contexts: LongContexts | None = None,
        keeps_projections: bool = False,
        is_whole: bool = True,
    ) -> None:
        """keeps_projections: VeRA's shared A and B stay what they are; else each module gets an A and a B. is_whole:
        whether `targets` are all of a base model, not those alone that a file has."""
        self.lora_config = lora_config
        self._long_contexts = long_contexts
        self._keeps_projections = keeps_projections
        self._is_whole = is_whole
        self._base, self._experts = base_modules(targets), ExpertBase.of(targets)
        self.max_tensors = max(MIN_TENSORS, len(self._base) * MAX_PARTS)
        """With spare, so that messages say what is wrong."""
        self._budget = ByteBudget(lora_config.host_memory_bytes, lora_config.host_memory_bytes // SMALL_READS)
        self._known: OrderedDict[Hashable, Blueprint] = OrderedDict()
        self._lock = threading.Lock()

    def read(
        self, directory: Path, helper: PEFTHelper, roots: Roots = None, budget: ByteBudget | None = None
    ) -> LoRAModel:
        """Read and validate an adapter's directory. budget: of what readers hold, if not the one of this reader.

        Raises AdapterValidationError with every reason (configuration, names, shapes, dtypes, NaN; then conversions).

        Also AdapterBaseMismatchError, AdapterTooLargeError, and the errors of the files (missing, permission, outside
        the roots, truncated, format).
        """
        if helper.is_other_method:
            helper.validate_legal(self.lora_config)
        folder, budget = AdapterFolder(directory, helper.adapter, roots), budget or self._budget
        file_bytes = _bytes_to_read(folder)
        with budget.hold(file_bytes):
            model = self._read(folder, helper, file_bytes, 0)
        if isinstance(model, int):
            with budget.hold(file_bytes + model):
                model = self._read(folder, helper, file_bytes, model)
        if isinstance(model, int):
            raise AdapterLoadError(f"adapter {helper.adapter!r} changed while it was read; load it again")
        return model

    def _read(self, folder: AdapterFolder, helper: PEFTHelper, file_bytes: int, made_bytes: int) -> LoRAModel | int:
        """The adapter, while these bytes are held; or how many are to be held for what is made of its tensors.

        Then it is read again from the start: two that waited for more with some in hand would wait for each other.
        """
        max_bytes = self.lora_config.host_memory_bytes
        file = WeightFile.open(folder, max_bytes, self.max_tensors)
        if sum(shard.size for shard in file.shards) > file_bytes:
            text = "grew while it was read; load it again when it is complete"
            raise AdapterLoadError(f"adapter {helper.adapter!r} {text}")
        keeps_projections = self._keeps_projections and helper.kind is Kind.VERA
        extra_vocab_size = self.lora_config.lora_extra_vocab_size
        sizes = extra_vocab_size, keeps_projections, self._is_whole
        check = TensorCheck(helper, self._base, *sizes, self._experts)
        key = _key(file, helper)
        blueprint, reasons = self._get(key), helper.reasons(self.lora_config)
        reasons += [] if self._long_contexts is None else helper.context_reasons(self._long_contexts)
        if blueprint is None:
            check_size(file.nbytes, max_bytes, helper.adapter)
            blueprint = _blueprint(file, check)
            reasons += check.over_limits(self.lora_config)
        if blueprint.plan.nbytes > MAX_REFUSED_BYTES:
            check.raise_if_refused(reasons)
        if blueprint.made_bytes > made_bytes and not reasons:
            return blueprint.made_bytes
        block, digest, not_finite = read_tensors(file, blueprint.plan, helper.canonical())
        remedy = "train again or take an earlier checkpoint"
        check.reasons.extend(f"tensor {name!r} has NaN or Inf; {remedy}" for name in not_finite)
        check.raise_if_refused([*reasons, *blueprint.unequal(block)])
        self._put(key, blueprint)
        layers = blueprint.layers_of(block)
        if blueprint.made_bytes:
            _check_converted(layers, helper.adapter)
        projections = blueprint.projections_of(block)
        if projections is not None:
            _check_products(layers, blueprint.layers, projections, helper.adapter)
            projections = _projections_in(projections, self.lora_config, helper.adapter)
        layers = _convert(layers, self.lora_config, helper.adapter)
        warnings = (*helper.warnings, *blueprint.warnings)
        rank = max((layer.rank for layer in layers.values()), default=0)
        context = None if self._long_contexts is None else helper.long_context(self._long_contexts)
        return LoRAModel(
            digest,
            rank,
            layers,
            warnings=warnings,
            blueprint=blueprint,
            vocab_size=blueprint.vocab_size,
            invocation_tokens=helper.invocation_tokens,
            long_context=context,
            projections=projections,
        )

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
    for path in (each for each in read_files(folder) if each.name not in TEXT_NAMES):
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
    if check.reasons or check.differences:
        return Blueprint(plan, (), tuple(check.warnings))
    own = check.own
    assert own is not None, "a check without findings looked at what the adapter has of its own"
    keeps_projections = check.keeps_projections
    served_bytes = 0 if keeps_projections else check.served_nbytes
    made_bytes = served_bytes + sum(_merged_bytes(part, check) for part in own.parts.values())
    vocab_size = None if own.vocab_size == own.base_vocab_size else own.vocab_size
    layers, warnings = tuple(_layers(plan, check, own)), tuple(check.warnings)
    convert = scales_of if keeps_projections else converter_of(check.helper)
    return Blueprint(plan, layers, warnings, convert, made_bytes, tuple(own.equal), vocab_size, keeps_projections)


def _merged_bytes(part: OwnPart, check: TensorCheck) -> int:
    """Of a weight that trained tokens are put into: a copy, float32 where the two differ in dtype."""
    if part.weight is None or part.tokens is None:
        return 0
    weight, tokens = check.names[part.weight], check.names[part.tokens]
    return weight.nbytes if weight.dtype == tokens.dtype else math.prod(weight.shape) * torch.float32.itemsize


def _layers(plan: ReadPlan, check: TensorCheck, own: OwnParts) -> Iterator[LayerPlan]:
    """Of each module with tensors; AdaLoRA may have left a module no rank, which then changes nothing."""
    helper = check.helper
    yield from _expert_layers(plan, check)
    named = {name.module for name in plan.names if name.module} | own.parts.keys()
    modules = sorted(named - check.stacks.keys())
    numbers, indices = helper.numbers(modules), {name: index for index, name in enumerate(plan.names)}
    for module in modules:
        shorts = {**PARTS[helper.kind], "bias": "bias"}
        names = {short: TensorName(module, part) for short, part in shorts.items()}
        names |= {short: TensorName("", part) for short, part in shorts.items() if part in SHARED.values()}
        parts = {_FIELDS.get(short, short): indices[name] for short, name in names.items() if name in indices}
        cost, part = check.costs.get(module), own.parts.get(module, OwnPart())
        if helper.kind is Kind.IA3 and "ia3_l" in parts:
            parts["input_gain" if module in check.inputs else "gain"] = parts.pop("ia3_l")
        elif cost is None or cost.rank == 0:
            parts = {short: index for short, index in parts.items() if short == "bias"}
        if parts or part.weight or part.tokens:
            rank = 0 if cost is None else cost.rank
            scaling = numbers.scalings[module]
            a_blocks, b_blocks = helper.blocks_of(module)
            layer = LoRALayerWeights(
                module,
                rank,
                numbers.alphas[module],
                None,
                None,
                scaling=scaling,
                a_blocks=a_blocks,
                b_blocks=b_blocks,
            )
            weight, tokens = (None if name is None else indices[name] for name in (part.weight, part.tokens))
            in_features = check.sizes_of(module)[0] if helper.kind is Kind.VERA and cost is not None else 0
            yield LayerPlan(layer, parts, weight, tokens, part.token_ids, in_features)


def _expert_layers(plan: ReadPlan, check: TensorCheck) -> Iterator[LayerPlan]:
    """Of each module that tensors for all experts of a layer have a part of."""
    numbers, indices = check.helper.numbers(sorted(check.stacks)), {name: i for i, name in enumerate(plan.names)}
    for parameter, stack in check.stacks.items():
        parts = {field: indices[TensorName(parameter, PARTS[Kind.LORA][field])] for field in ("lora_a", "lora_b")}
        values = numbers.ranks[parameter], numbers.alphas[parameter], None, None
        for module, cut in stack.modules:
            yield LayerPlan(LoRALayerWeights(module, *values, scaling=numbers.scalings[parameter]), parts, expert=cut)


def _check_products(
    layers: Mapping[str, LoRALayerWeights], plans: Sequence[LayerPlan], shared: Projections, adapter: str
) -> None:
    """Raise AdapterValidationError for scales with which A or B, multiplied out, would not be in float32. The kernels
    do not multiply them out, and no other row would see it; but a file is good or not wherever it is served."""
    largest_b = row_maxima(shared.lora_b)
    largest_a: dict[int, torch.Tensor] = {}
    for plan in plans:
        layer, width = layers[plan.layer.module_name], plan.in_features
        if layer.rank_scale is None or layer.out_scale is None:
            continue
        if width not in largest_a:
            largest_a[width] = row_maxima(shared.lora_a[:, :width])
        products = layer.with_tensors(
            {
                "lora_a": largest_a[width] * layer.rank_scale,
                "lora_b": largest_b[: len(layer.out_scale)] * layer.out_scale,
            }
        )
        _check_converted({layer.module_name: products}, adapter)


def _projections_in(shared: Projections, lora_config: LoRAConfig, adapter: str) -> Projections:
    """In `lora_dtype`, as `_convert` does it with layers."""
    if lora_config.lora_dtype in ("auto", "int8"):
        return shared
    dtype: torch.dtype = getattr(torch, lora_config.lora_dtype)
    converted = Projections.of(shared.lora_a.to(dtype), shared.lora_b.to(dtype))
    if not (is_finite(converted.lora_a) and is_finite(converted.lora_b)):
        text = f"vera_A and vera_B do not fit in lora_dtype={lora_config.lora_dtype!r}; use auto, bfloat16 or float32"
        raise AdapterValidationError.from_reasons(adapter, [text])
    return converted


def _check_converted(layers: Mapping[str, LoRALayerWeights], adapter: str) -> None:
    """Raise AdapterValidationError for products that float32 does not hold."""
    _check_finite(layers, adapter, "float32 once it is multiplied out; the numbers of the file are too large")


def _convert(layers: dict[str, LoRALayerWeights], lora_config: LoRAConfig, adapter: str) -> dict[str, LoRALayerWeights]:
    """The layers in `lora_dtype`, unless it is `auto`, or `int8`, which they become when they are packed.

    Magnitudes and gains stay float32. A value that does not fit is a reason to refuse.
    """
    if lora_config.lora_dtype in ("auto", "int8"):
        return layers
    dtype: torch.dtype = getattr(torch, lora_config.lora_dtype)
    converted = {
        name: layer.with_tensors(
            {
                field: tensor if field in (*FLOAT32_FIELDS, *SCALES, "row_ids") else tensor.to(dtype)
                for field, tensor in layer.tensors.items()
            }
        )
        for name, layer in layers.items()
    }
    _check_finite(converted, adapter, f"lora_dtype={lora_config.lora_dtype!r}; use auto, bfloat16 or float32")
    return converted


def _check_finite(layers: Mapping[str, LoRALayerWeights], adapter: str, place: str) -> None:
    """Raise AdapterValidationError for tensors that do not fit in `place`."""
    reasons = [
        f"{name}: {field} does not fit in {place}"
        for name, layer in layers.items()
        for field, tensor in layer.tensors.items()
        if field != "row_ids" and not is_finite(tensor)
    ]
    if reasons:
        raise AdapterValidationError.from_reasons(adapter, reasons)
