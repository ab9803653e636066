"""A merge: planned and bounded from headers, then computed module by module.

plan_merge   configurations and headers -> which modules, which ranks, how many bytes; or every reason to refuse
run_merge    read, combine (combine.py), with progress, until done or cancelled
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from loraplex.adapters.kinds import Kind
from loraplex.adapters.merging.combine import Part, combine
from loraplex.adapters.merging.outline import Origin, Outline, reader_limits
from loraplex.adapters.merging.wish import Combination, MergeWish
from loraplex.adapters.merging.written import MadeAdapter, check_output, write_directory
from loraplex.adapters.source import AdapterSource
from loraplex.adapters.tensors import is_finite
from loraplex.adapters.weights import LoRAModel
from loraplex.errors import (
    AdapterBaseMismatchError,
    AdapterTooLargeError,
    AdapterValidationError,
    RequestAbortedError,
)

MERGED_PARTS = {
    Kind.LORA: {"lora_A.weight", "lora_B.weight"},
    Kind.ADALORA: {"lora_A", "lora_B", "lora_E"},
}
"""Of LoHa and LoKr all parts; what else an adapter has, A and B cannot say."""

MERGED_KINDS = (Kind.LORA, Kind.ADALORA, Kind.LOHA, Kind.LOKR)
MAX_QUANTILE_NUMBERS = 2**24
"""More than torch.quantile takes."""

_LAYER = re.compile(r".*?\blayers\.(?P<layer>\d+)\..")
_LEAVES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

OnProgress = Callable[[int, int], None]
IsCancelled = Callable[[], bool]


@dataclass(frozen=True)
class MergedModule:
    """members: the adapters that have the module, by their number. rank: of the result, at most."""

    name: str
    members: tuple[int, ...]
    rank: int
    in_features: int
    out_features: int

    @property
    def nbytes(self) -> int:
        return self.rank * (self.in_features + self.out_features) * 4


@dataclass(frozen=True)
class MergePlan:
    """modules: in the model's order. nbytes: of the result; total_bytes: in memory while it is made, at most."""

    wish: MergeWish
    outlines: tuple[Outline, ...]
    modules: tuple[MergedModule, ...]
    total_bytes: int

    @property
    def nbytes(self) -> int:
        return sum(module.nbytes for module in self.modules)


def merge_directories(wish: MergeWish, output: Path, max_bytes: int) -> MadeAdapter:
    """Merge adapters that are named by directory or hub id, and write the result. Raises what the steps raise."""
    check_output(output)
    source = AdapterSource()
    plan = plan_merge([Origin(path, str(source.fetch(path)), source) for path, _ in wish.adapters], wish, max_bytes)
    made = run_merge(plan, max_bytes)
    write_directory(made, output)
    return made


# -------------------------------------------------------------------------------------------------------------- plan


def plan_merge(
    origins: Sequence[Origin], wish: MergeWish, max_bytes: int, max_lora_rank: int | None = None
) -> MergePlan:
    """What the merge of these adapters, in the wish's order, would be. No tensor of a safetensors file is read.

    Raises AdapterValidationError for what cannot be merged, AdapterBaseMismatchError, AdapterTooLargeError, and the
    errors of the files.
    """
    outlines = tuple(Outline.read(origin, reader_limits(max_bytes)) for origin in origins)
    for outline in outlines:
        if reasons := _reasons(outline):
            raise AdapterValidationError.from_reasons(outline.origin.name, reasons)
    names = {name for outline in outlines for name in outline.shapes}
    modules = tuple(_planned(name, outlines, wish) for name in sorted(names, key=_place))
    modules = tuple(module for module in modules if module.members)
    if not modules:
        raise AdapterValidationError.from_reasons(
            outlines[0].origin.name, ["it has no A and B: there is nothing to merge"]
        )
    rank = max((module.rank for module in modules), default=0)
    if max_lora_rank is not None and rank > max_lora_rank:
        text = f"the result would have rank {rank}, which is above max_lora_rank {max_lora_rank}"
        raise AdapterTooLargeError(f"{text}; merge fewer adapters, or by a combination_type that ends in svd")
    held = sum(rank * (width + height) * 4 for each in outlines for rank, width, height in each.shapes.values())
    work = max((_work_bytes(module, outlines, wish) for module in modules), default=0)
    plan = MergePlan(wish, outlines, modules, held + sum(module.nbytes for module in modules) + work)
    if plan.total_bytes > max_bytes:
        text = f"the merge would take {plan.total_bytes} bytes of memory and {max_bytes} are the limit"
        raise AdapterTooLargeError(f"{text} (max_merge_bytes); merge fewer adapters, or raise it")
    return plan


def _reasons(outline: Outline) -> list[str]:
    """Why an adapter that is served cannot be merged."""
    helper = outline.helper
    if helper.kind not in MERGED_KINDS:
        return [f"peft_type {helper.kind} is not merged: it has no A and B"]
    if helper.use_dora:
        return ["use_dora: the norms of a DoRA are not merged, as in peft; merge adapters without them"]
    parts = MERGED_PARTS.get(helper.kind)
    odd = sorted(name.canonical for name in outline.entries if parts is not None and name.part not in parts)
    return [f"{len(odd)} tensors such as {odd[0]!r} are not merged: A and B cannot say them"] if odd else []


def _planned(name: str, outlines: Sequence[Outline], wish: MergeWish) -> MergedModule:
    found = {number: outline.shapes[name] for number, outline in enumerate(outlines) if name in outline.shapes}
    widths = {shape[1:] for shape in found.values()}
    if len(widths) > 1:
        first, other = ([outlines[number].origin.name for number in found][at] for at in (0, -1))
        text = f"{name} has {' and '.join(f'{i} inputs, {o} outputs' for i, o in sorted(widths))}"
        raise AdapterBaseMismatchError(f"adapters {first!r} and {other!r} are of different base models: {text}")
    width, height = widths.pop()
    ranks = {number: rank for number, (rank, _, _) in found.items() if rank}
    return MergedModule(name, tuple(ranks), _rank(name, ranks, outlines, wish, min(width, height)), width, height)


def _rank(name: str, ranks: dict[int, int], outlines: Sequence[Outline], wish: MergeWish, most: int) -> int:
    combination = wish.combination
    if combination is Combination.CAT:
        return sum(ranks.values())
    if combination.is_svd:
        largest = max((rank for outline in outlines for rank, _, _ in outline.shapes.values()), default=0)
        return min(wish.svd_rank or largest, most)
    if len(set(ranks.values())) > 1:
        listed = ", ".join(f"{outlines[number].origin.name!r} has {rank}" for number, rank in ranks.items())
        text = f"combination_type {combination} needs equal ranks: of {name}, {listed}"
        raise AdapterValidationError.from_reasons(outlines[0].origin.name, [f"{text}; use cat or svd"])
    return max(ranks.values(), default=0)


def _work_bytes(module: MergedModule, outlines: Sequence[Outline], wish: MergeWish) -> int:
    """Of what is made on the way to one module's result, beside it."""
    width, height, num = module.in_features, module.out_features, len(module.members)
    total_rank = sum(outlines[number].shapes[module.name][0] for number in module.members)
    if wish.svd_clamp is not None and module.rank * (width + height) > MAX_QUANTILE_NUMBERS:
        text = f"svd_clamp: {module.name} has more than {MAX_QUANTILE_NUMBERS} numbers at rank {module.rank}"
        raise AdapterTooLargeError(f"{text}; leave svd_clamp out, or lower svd_rank")
    if wish.combination.is_svd and (
        wish.combination is not Combination.SVD or wish.svd_clamp or _is_full(module, total_rank)
    ):
        return 4 * (num + 9) * width * height + 16 * min(width, height) ** 2
    return 4 * 8 * total_rank * (width + height)


def _is_full(module: MergedModule, total_rank: int) -> bool:
    return total_rank >= min(module.in_features, module.out_features)


def _place(name: str) -> tuple[bool, int, int, str]:
    """Modules as the base model has them: draws are in this order."""
    match, leaf = _LAYER.match(name), name.rpartition(".")[2]
    layer = int(match["layer"]) if match else 0
    return match is None, layer, _LEAVES.index(leaf) if leaf in _LEAVES else len(_LEAVES), name


# --------------------------------------------------------------------------------------------------------------- run


def run_merge(
    plan: MergePlan,
    max_bytes: int,
    on_progress: OnProgress = lambda done, total: None,
    is_cancelled: IsCancelled = lambda: False,
) -> MadeAdapter:
    """The merged adapter. Progress: of adapters read and modules made. Raises RequestAbortedError when it is cancelled,
    and what reading raises."""
    wish, total = plan.wish, len(plan.outlines) + len(plan.modules)

    def begin(done: int) -> None:
        on_progress(done, total)
        if is_cancelled():
            raise RequestAbortedError("the merge was cancelled")

    models: list[LoRAModel] = []
    for done, outline in enumerate(plan.outlines):
        begin(done)
        models.append(outline.model(reader_limits(max_bytes)))
    factors = {}
    generator = torch.Generator().manual_seed(wish.seed or 0)
    for done, module in enumerate(plan.modules, len(models)):
        begin(done)
        parts = tuple(_parts(module, models, wish))
        try:
            lora_a, lora_b = combine(parts, wish, module.rank, generator)
        except OverflowError as error:
            raise _too_large(module.name) from error
        if not is_finite(lora_a) or not is_finite(lora_b):
            raise _too_large(module.name)
        factors[module.name] = lora_a, lora_b, 1.0
    begin(total)
    base = plan.outlines[0].helper.base_model_name
    return MadeAdapter.of_lora(factors, base, _described(plan, models))


def _parts(module: MergedModule, models: Sequence[LoRAModel], wish: MergeWish) -> Iterator[Part]:
    for number in module.members:
        layer = models[number].layers[module.name]
        assert layer.lora_a is not None
        assert layer.lora_b is not None
        yield Part(layer.lora_a.float(), layer.lora_b.float(), layer.scaling, wish.adapters[number][1])


def _too_large(name: str) -> AdapterValidationError:
    reason = f"{name}: the result does not fit in float32; the weights of the adapters are too large"
    return AdapterValidationError.from_reasons("merged", [reason])


def _described(plan: MergePlan, models: Sequence[LoRAModel]) -> str:
    """For the header of the file: what it was made of."""
    wish = plan.wish
    terms = [
        f"{weight:g} * {name} ({model.adapter_digest[:16]})"
        for (name, weight), model in zip(wish.adapters, models, strict=True)
    ]
    extras = {"density": wish.density, "svd_rank": wish.svd_rank, "svd_clamp": wish.svd_clamp, "seed": wish.seed}
    listed = "".join(f", {field}={value}" for field, value in extras.items() if value is not None)
    return f"{wish.combination}{listed}: {' + '.join(terms)}"
