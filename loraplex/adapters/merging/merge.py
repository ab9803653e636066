"""A merge: planned and bounded from headers, then computed module by module.

plan_merge   configurations and headers -> which modules, which ranks, how many bytes; or every reason to refuse
run_merge    read, combine (combine.py), with progress, until done or cancelled
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from loraplex.adapters.conversion import are_equal
from loraplex.adapters.files import TensorEntry
from loraplex.adapters.kinds import BASE_WEIGHT, WEIGHT, Kind
from loraplex.adapters.merging.combine import Part, combine
from loraplex.adapters.merging.outline import Origin, Outline, check_memory, reader_limits
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
    Kind.LORA: {"lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B"},
    Kind.ADALORA: {"lora_A", "lora_B", "lora_E"},
}
"""Of the others all parts; what else an adapter has, neither A and B nor gains can say."""

MERGED_KINDS = (Kind.LORA, Kind.ADALORA, Kind.LOHA, Kind.LOKR, Kind.IA3)
SAVED_PARTS = (WEIGHT, BASE_WEIGHT)
"""What peft files of the base's embedding and head beside a LoRA of one of them."""

MAX_QUANTILE_NUMBERS = 2**24
"""More than torch.quantile takes."""

_LAYER = re.compile(r".*?\blayers\.(?P<layer>\d+)\..")
_LEAVES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

OnProgress = Callable[[int, int], None]
IsCancelled = Callable[[], bool]


@dataclass(frozen=True)
class MergedModule:
    """members: the adapters that have the module, by their number. rank: of the result, at most; of IA3 0.

    A gain has as many numbers as the module has inputs or outputs; the other width is 1.
    """

    name: str
    members: tuple[int, ...]
    rank: int
    in_features: int
    out_features: int

    @property
    def nbytes(self) -> int:
        return (self.rank * (self.in_features + self.out_features) or self.in_features * self.out_features) * 4


@dataclass(frozen=True)
class MergePlan:
    """modules: in the model's order. saved: modules whose weight peft saved beside a LoRA of an embedding or a head,
    with the adapters that have it. nbytes: of the result; total_bytes: in memory while it is made, at most."""

    wish: MergeWish
    outlines: tuple[Outline, ...]
    modules: tuple[MergedModule, ...]
    saved: Mapping[str, Mapping[int, TensorEntry]]
    total_bytes: int

    @property
    def nbytes(self) -> int:
        kept = sum(max(entry.nbytes for entry in found.values()) for found in self.saved.values())
        return kept + sum(module.nbytes for module in self.modules)

    @property
    def is_ia3(self) -> bool:
        return self.outlines[0].helper.kind is Kind.IA3


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
    for origin in origins:
        check_memory("merge", origin.bytes_to_open, max_bytes)
    outlines = tuple(Outline.read(origin, reader_limits(max_bytes)) for origin in origins)
    for outline in outlines:
        if reasons := _reasons(outline, outlines[0], wish):
            raise AdapterValidationError.from_reasons(outline.origin.name, reasons)
    names = {name for outline in outlines for name in outline.modules}
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
    held = sum(each.rank * sum(each.widths) * 4 for outline in outlines for each in outline.modules.values())
    held += sum(entry.nbytes for outline in outlines for entry in outline.own.values())
    work = max((_work_bytes(module, outlines, wish) for module in modules), default=0)
    made = MergePlan(wish, outlines, modules, _saved(outlines), 0)
    plan = replace(made, total_bytes=held + made.nbytes + work)
    check_memory("merge", plan.total_bytes, max_bytes)
    return plan


def _reasons(outline: Outline, first: Outline, wish: MergeWish) -> list[str]:
    """Why an adapter that is served cannot be merged."""
    helper = outline.helper
    if helper.kind not in MERGED_KINDS:
        return [f"peft_type {helper.kind} is not merged, as in peft; merge LoRAs, or IA3 with IA3"]
    if (helper.kind is Kind.IA3) is not (first.helper.kind is Kind.IA3):
        return [f"peft_type {helper.kind} is not merged with {first.helper.kind}, as in peft; merge those of one kind"]
    if helper.kind is Kind.IA3 and wish.combination_type not in (None, Combination.LINEAR):
        return [f"peft_type IA3 is merged by linear alone, not by {wish.combination_type}; leave combination_type out"]
    if helper.context_fields:
        text = "an adapter with a longer context is not merged: the result would have one context for all"
        return [f"{', '.join(helper.context_fields)}: {text}"]
    if helper.invocation_tokens:
        return ["alora_invocation_tokens: an aLoRA acts from its invocation on, and is not merged, as in peft"]
    if helper.use_dora:
        return ["use_dora: the norms of a DoRA are not merged, as in peft; merge adapters without them"]
    if helper.block_diagonal is not None:
        return ["use_bdlora: a sum of block-diagonal LoRAs is none; merge plain LoRAs"]
    if helper.modules_to_save or helper.token_indices:
        field = "modules_to_save" if helper.modules_to_save else "trainable_token_indices"
        return [f"{field}: weights of an adapter's own are not merged; peft leaves them out in silence"]
    parts = MERGED_PARTS.get(helper.kind)
    known = parts is None or {*parts, *SAVED_PARTS}
    odd = sorted(name.canonical for name in outline.entries if known is not True and name.part not in known)
    return [f"{len(odd)} tensors such as {odd[0]!r} are not merged: A and B cannot say them"] if odd else []


def _saved(outlines: Sequence[Outline]) -> dict[str, dict[int, TensorEntry]]:
    saved: dict[str, dict[int, TensorEntry]] = {}
    for number, outline in enumerate(outlines):
        for name, entry in outline.own.items():
            saved.setdefault(name.module, {})[number] = entry
    return saved


def _planned(name: str, outlines: Sequence[Outline], wish: MergeWish) -> MergedModule:
    found = {number: outline.modules[name] for number, outline in enumerate(outlines) if name in outline.modules}
    widths = {each.widths for each in found.values()}
    if len(widths) > 1:
        first, other = ([outlines[number].origin.name for number in found][at] for at in (0, -1))
        if outlines[0].helper.kind is Kind.IA3 and any(1 in width for width in widths):
            text = f"{name}: feedforward_modules names it in some of the adapters alone: its inputs are scaled there"
            raise AdapterValidationError.from_reasons(other, [f"{text}, and its outputs elsewhere"])
        text = f"{name} has {' and '.join(f'{i} inputs, {o} outputs' for i, o in sorted(widths))}"
        raise AdapterBaseMismatchError(f"adapters {first!r} and {other!r} are of different base models: {text}")
    width, height = widths.pop()
    if outlines[0].helper.kind is Kind.IA3:
        return MergedModule(name, tuple(found), 0, width, height)
    ranks = {number: each.rank for number, each in found.items() if each.rank}
    return MergedModule(name, tuple(ranks), _rank(name, ranks, outlines, wish, min(width, height)), width, height)


def _rank(name: str, ranks: dict[int, int], outlines: Sequence[Outline], wish: MergeWish, most: int) -> int:
    combination = wish.combination
    if combination is Combination.CAT:
        return sum(ranks.values())
    if combination.is_svd:
        largest = max((each.rank for outline in outlines for each in outline.modules.values()), default=0)
        return min(wish.svd_rank or largest, most)
    if len(set(ranks.values())) > 1:
        listed = ", ".join(f"{outlines[number].origin.name!r} has {rank}" for number, rank in ranks.items())
        text = f"combination_type {combination} needs equal ranks: of {name}, {listed}"
        raise AdapterValidationError.from_reasons(outlines[0].origin.name, [f"{text}; use cat or svd"])
    return max(ranks.values(), default=0)


def _work_bytes(module: MergedModule, outlines: Sequence[Outline], wish: MergeWish) -> int:
    """Of what is made on the way to one module's result, beside it."""
    width, height, num = module.in_features, module.out_features, len(module.members)
    total_rank = sum(outlines[number].modules[module.name].rank for number in module.members)
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


def _place(name: str) -> tuple[int, int, int, str]:
    """Modules as the base model has them, the embedding first and the head last: draws are in this order."""
    match, leaf = _LAYER.match(name), name.rpartition(".")[2]
    layer = int(match["layer"]) if match else 0
    block = 0 if leaf == "embed_tokens" else 1 if match else 2
    return block, layer, _LEAVES.index(leaf) if leaf in _LEAVES else len(_LEAVES), name


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
    factors, gains, described = {}, {}, _described(plan, models)
    generator = torch.Generator().manual_seed(wish.seed or 0)
    for done, module in enumerate(plan.modules, len(models)):
        begin(done)
        try:
            if plan.is_ia3:
                gains[module.name] = _gain(module, models, wish)
            else:
                parts = tuple(_parts(module, models, wish))
                factors[module.name] = *combine(parts, wish, module.rank, generator), 1.0
        except OverflowError as error:
            raise _too_large(module.name) from error
        made = (gains[module.name],) if plan.is_ia3 else factors[module.name][:2]
        if not all(map(is_finite, made)):
            raise _too_large(module.name)
    begin(total)
    base = plan.outlines[0].helper.base_model_name
    if plan.is_ia3:
        return MadeAdapter.of_ia3(gains, base, described)
    return MadeAdapter.of_lora(factors, base, described, _kept(plan, models))


def _gain(module: MergedModule, models: Sequence[LoRAModel], wish: MergeWish) -> torch.Tensor:
    """[1, in] or [out, 1]: the sum of the weighted gains. A module that an adapter does not have adds nothing."""
    total = torch.zeros(module.out_features, module.in_features)
    for number in module.members:
        layer = models[number].layers[module.name]
        gain = layer.gain if layer.input_gain is None else layer.input_gain
        assert gain is not None
        total += gain.float().view(total.shape) * wish.adapters[number][1]
    return total


def _kept(plan: MergePlan, models: Sequence[LoRAModel]) -> dict[str, torch.Tensor]:
    """The saved weights of embeddings and heads. Raises AdapterValidationError for those that differ."""
    kept: dict[str, torch.Tensor] = {}
    for module, found in plan.saved.items():
        for number in found:
            weight = models[number].layers[module].weight
            assert weight is not None
            if not are_equal(kept.setdefault(module, weight), weight):
                text = f"its saved weight of {module} differs from another's, and one adapter has one alone"
                reason = f"{text}; save them with save_embedding_layers=False"
                raise AdapterValidationError.from_reasons(plan.outlines[number].origin.name, [reason])
    return kept


def _parts(module: MergedModule, models: Sequence[LoRAModel], wish: MergeWish) -> Iterator[Part]:
    for number in module.members:
        layer = models[number].layers[module.name]
        assert layer.lora_a is not None
        assert layer.lora_b is not None
        factors, is_embedding = (layer.lora_a.float(), layer.lora_b.float()), module.name.endswith("embed_tokens")
        yield Part(*factors, layer.scaling, wish.adapters[number][1], is_embedding)


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
    combination = Combination.LINEAR if plan.is_ia3 else wish.combination
    return f"{combination}{listed}: {' + '.join(terms)}"
