"""What an adapter takes in memory and in a step, part by part, before it is loaded: by the layout of packing.

The base's weights are not read. Which rows of an embedding or a head are the base's is then unknown, and their bytes
are the most that they can be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from loraplex.adapters.inspect import OwnFact, Packed, Weigher
from loraplex.adapters.weights import LoRAModel
from loraplex.core import LoraSlice, LoraTarget, ShardKind
from loraplex.errors import AdapterValidationError
from loraplex.kernels.protocols import AdapterPacking
from loraplex.kernels.slices import ABSENT, SliceLayout
from loraplex.memory.weights.packing import PackedBlock, PackedLayout, Packer, UnfitWeightsError, can_share

_SAMPLED = "for the rows that are sampled"
_ROWS = "rows that differ from the base's"
_OF_TARGET = {
    (ShardKind.EMBEDDING, "a"): ("A of a LoRA of the embedding", "a column for each token"),
    (ShardKind.EMBEDDING, "b"): ("B of a LoRA of the embedding", "all of it"),
    (ShardKind.EMBEDDING, "weight"): (f"{_ROWS}, of the embedding", "a row for each token that has one"),
    (ShardKind.HEAD, "a"): ("A of a LoRA of the output layer", f"all of it, {_SAMPLED}"),
    (ShardKind.HEAD, "b"): ("B of a LoRA of the output layer", f"all of it, {_SAMPLED}"),
    (ShardKind.HEAD, "weight"): (f"{_ROWS}, of the output layer", f"all of them, {_SAMPLED}"),
    (ShardKind.NORM, "weight"): ("own weights of norms", "all, in place of the base's"),
}
_OF_LINEARS = {
    "a": ("A of linears", "all"),
    "b": ("B of linears", "all"),
    "bias": ("added biases", "all"),
    "dora": ("gains of DoRA, made at a load of the magnitudes and the base's rows", "all"),
    "gain": ("gains of outputs", "all"),
    "input": ("gains of inputs", "all"),
    "inputs": ("gains of an input that several linears have", "all, the base's weight once more"),
    "weight": ("own weights of linears", "all, beside the base's"),
    "scales": ("lambdas", "all, with the projections as wide as the linear"),
}
"""What a part is, and what a step reads of it."""


class _Part(NamedTuple):
    """Where a part starts in its block, and how many products a row computes with it."""

    key: str
    offset: int
    num_products: int


@dataclass
class _Sum:
    modules: set[str] = field(default_factory=set)
    nbytes: int = 0
    num_products: int = 0


def weigher_of(targets: Sequence[LoraTarget], backend: AdapterPacking, compute_dtype: torch.dtype) -> Weigher:
    """For adapters of a base, as a CPU's memory would have them."""

    def weigh_or_refuse(model: LoRAModel) -> Packed:
        try:
            return weigh(model, targets, backend, compute_dtype)
        except UnfitWeightsError as error:
            raise AdapterValidationError.from_reasons("", [str(error)]) from error

    return Weigher(weigh_or_refuse, can_share(backend, targets, is_one_memory=True))


def weigh(
    model: LoRAModel, targets: Sequence[LoraTarget], backend: AdapterPacking, compute_dtype: torch.dtype
) -> Packed:
    """Raises UnfitWeightsError, as a load would."""
    layout = Packer(targets, backend, compute_dtype, _UnreadBase(targets)).lay_out(model)
    by_name, sums = {target.name: target for target in targets}, dict[tuple[str, str], _Sum]()
    for block, nbytes in _sized(layout):
        target = by_name[block.target_name]
        parts = sorted(_parts(target, block), key=lambda each: each[1].offset)
        ends = [*(part.offset for _, part in parts[1:]), nbytes]
        for (module, part), end in zip(parts, ends, strict=True):
            known = _OF_TARGET.get((target.kind, part.key)) or _OF_LINEARS[part.key]
            of_it = sums.setdefault(known, _Sum())
            of_it.modules.add(module)
            of_it.nbytes += end - part.offset
            of_it.num_products += part.num_products
    facts = [_fact(what, step, of_it) for (what, step), of_it in sorted(sums.items())]
    if layout.projections is not None:
        text = "projections, kept once for all adapters with equal ones"
        facts.append(OwnFact(text, 1, layout.shared_nbytes, "all, once for all rows of such adapters"))
    return Packed(layout.nbytes, any(fact.is_most for fact in facts), tuple(facts), layout.projections is not None)


def _fact(what: str, step: str, of_it: _Sum) -> OwnFact:
    is_most = what.startswith(_ROWS)
    most = "at most " if is_most else ""
    computed = f", and computes {most}{of_it.num_products} products for a row" if of_it.num_products else ""
    return OwnFact(what, len(of_it.modules), of_it.nbytes, f"{step}{computed}", is_most=is_most)


def _sized(layout: PackedLayout) -> Iterator[tuple[PackedBlock, int]]:
    """Each block with its bytes: it ends where the next one of its extent starts."""
    starts = {(block.extent_index, block.offset) for block in layout.blocks}
    starts |= {(index, size) for index, size in enumerate(layout.sizes)}
    for block in layout.blocks:
        end = min(offset for index, offset in starts if index == block.extent_index and offset > block.offset)
        yield block, end - block.offset


def _parts(target: LoraTarget, block: PackedBlock) -> Iterator[tuple[str, _Part]]:
    """By module. Slices may have their A in one place: then the last of them has its bytes."""
    for s, layout in zip(target.slices, block.layouts, strict=True):
        for part in () if layout is None else _parts_of(target, s, layout):
            if part.offset != ABSENT:
                yield s.module_name, part


def _parts_of(target: LoraTarget, s: LoraSlice, layout: SliceLayout) -> Iterator[_Part]:
    num_in, num_out = target.in_features, s.out_features
    is_embedding, is_norm = target.kind is ShardKind.EMBEDDING, target.kind is ShardKind.NORM
    yield _Part("a", layout.a_offset, 0 if is_embedding else layout.rank * num_in)
    yield _Part("b", layout.b_offset, layout.rank * num_out)
    yield _Part("bias", layout.bias_offset, 0)
    yield _Part("dora" if layout.rank else "gain", layout.gain_offset, num_out)
    if len(target.slices) == 1:
        yield _Part("input", layout.input_gain_offset, num_in)
    else:
        yield _Part("inputs", layout.input_gain_offset, num_in + num_in * num_out)
    lines = layout.num_rows * num_in if not (is_embedding or is_norm) else 0
    yield _Part("weight", layout.weight_offset, lines)
    yield _Part("scales", layout.scales_offset, layout.rank * (num_in + num_out + 1) + num_out)


class _UnreadBase:
    """packing.BaseWeights of which only the shapes are known, which is all that a layout depends on."""

    weights_name = ""

    def __init__(self, targets: Sequence[LoraTarget]) -> None:
        self._widths = {s.module_name: s.out_features for target in targets for s in target.slices if s.has_bias}

    def base_bias(self, module_name: str) -> torch.Tensor | None:
        width = self._widths.get(module_name)
        return None if width is None else torch.zeros(width)

    def base_rows(self, module_name: str, token_ids: torch.Tensor) -> torch.Tensor | None:
        return None

    def row_norms(self, module_name: str, lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float) -> torch.Tensor:
        raise AssertionError("a layout asks for no norms")
