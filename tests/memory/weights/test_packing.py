"""Packed blocks say exactly what the adapter's tensors say, whole and in shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from loraplex.adapters.tensors import ReadPlan
from loraplex.adapters.weights import Blueprint, LoRALayerWeights, LoRAModel
from loraplex.core import LoraTarget, Shard, ShardKind
from loraplex.kernels.ops import get_backend
from loraplex.kernels.plan import LoraPlan, LoraSegment, SlotTable
from loraplex.memory.weights.packing import PackedLayout, Packer
from tests.kernels.cases import BACKENDS as KERNELS
from tests.memory.rig import BASE_BIAS, CPU, TARGETS, expected_delta, make_model, make_targets

BACKENDS = tuple(backend.name for backend in KERNELS)


def pack(
    model: LoRAModel, targets: tuple[LoraTarget, ...], backend: str, dtype: torch.dtype = torch.float32, base_bias=None
):
    """(layout, views): the adapter written into memory of its own."""
    packer = Packer(targets, get_backend(backend, CPU), dtype, base_bias or BASE_BIAS.get)
    layout = packer.lay_out(model)
    memory = torch.full((layout.nbytes,), 255, dtype=torch.uint8)
    packer.write(model, layout, list(memory.split(list(layout.sizes))))
    return layout, memory


def output(
    layout: PackedLayout,
    memory: torch.Tensor,
    targets: tuple[LoraTarget, ...],
    target: LoraTarget,
    x: torch.Tensor,
    backend: str,
):
    """What a kernel adds to the output of `target` when it reads this memory."""
    table = SlotTable(targets, 1, memory)
    starts = [sum(layout.sizes[:i]) for i in range(len(layout.sizes))]
    for block in layout.blocks:
        table.set_block(block.target_name, 0, starts[block.extent_index] + block.offset, block.layouts)
    y = torch.zeros(len(x), sum(s.out_features for s in target.slices))
    plan = LoraPlan.build([LoraSegment(0, len(x), 0)], len(x), 1)
    get_backend(backend, CPU).add_lora(y, x, plan, table, table.first_row(target.name), target.slices)
    return y


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_kernel_reads_what_the_adapter_says(backend: str) -> None:
    model = make_model("content", rank=5)
    layout, memory = pack(model, TARGETS, backend)
    for target in TARGETS:
        x = torch.randn(4, target.in_features, generator=torch.Generator().manual_seed(1))
        y = output(layout, memory, TARGETS, target, x, backend)
        torch.testing.assert_close(y.double(), expected_delta(model, target, x), rtol=1e-5, atol=1e-5)


def test_one_extent_per_layer_at_true_rank() -> None:
    sizes = {rank: pack(make_model("x", rank), TARGETS, "reference")[0].sizes for rank in (4, 8)}
    assert len(sizes[4]) == len({target.layer for target in TARGETS})
    assert all(a < b < 2 * a for a, b in zip(sizes[4], sizes[8], strict=True))  # biases do not grow
    assert all(size % 64 == 0 for size in sizes[4])


def test_a_layer_without_weights_has_no_extent() -> None:
    model = make_model("content")
    layers = {name: layer for name, layer in model.layers.items() if ".1." in name}
    layout, _ = pack(replace(model, layers=layers), TARGETS, "reference")
    assert len(layout.sizes) == 1
    assert {block.target_name for block in layout.blocks} == {t.name for t in TARGETS if t.layer == 1}


def test_the_layout_is_a_function_of_the_content() -> None:
    model = make_model("content")
    first, second = pack(model, TARGETS, "reference"), pack(model, TARGETS, "reference")
    assert first[0] == second[0]
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("has_base", [True, False], ids=["base bias", "no base bias"])
def test_a_replaced_bias_alone_is_the_difference_to_the_base(has_base: bool) -> None:
    target = TARGETS[0]
    name = target.slices[0].module_name
    bias = torch.linspace(2, 3, 16)
    layer = LoRALayerWeights(name, 0, 8.0, None, None, None, bias, 1.0)
    base = {name: torch.linspace(-1, 1, 16)} if has_base else {}
    layout, memory = pack(LoRAModel("d", 0, {name: layer}), TARGETS, "reference", base_bias=base.get)
    y = output(layout, memory, TARGETS, target, torch.ones(2, 16), "reference")
    torch.testing.assert_close(y[0, :16] + base.get(name, torch.zeros(16)), bias)
    assert not y[:, 16:].any()


def test_the_compute_dtype_decides_the_bias_of_narrow_adapters() -> None:
    """A difference of two 16-bit biases must not widen the whole block to float32."""
    model = make_model("content")
    layers = {
        name: replace(layer, **{part: tensor.bfloat16() for part, tensor in layer.tensors.items()})
        for name, layer in model.layers.items()
    }
    layout, _ = pack(replace(model, layers=layers), TARGETS, "reference", torch.bfloat16)
    assert {one.dtype for block in layout.blocks for one in block.layouts if one is not None} == {torch.bfloat16}


def test_a_tensor_that_does_not_fit_is_named() -> None:
    model = make_model("content")
    name = TARGETS[0].slices[0].module_name
    layer = replace(model.layers[name], lora_a=torch.zeros(4, 17))
    with pytest.raises(ValueError, match=f"lora_a of {name} has 17 features where the base model has 16"):
        pack(replace(model, layers={**model.layers, name: layer}), TARGETS, "reference")


def shard_targets(size: int, rank: int) -> tuple[LoraTarget, ...]:
    """This rank's share of TARGETS; k and v (8 outputs, heads of 4) are replicated beyond two shards."""
    shares = []
    for target in TARGETS:
        if target.kind is ShardKind.ROW:
            shares.append(replace(target, in_features=target.full_in_features // size, shard=Shard(rank, size)))
            continue
        slices, offset = [], 0
        for index, s in enumerate(target.slices):
            width = s.full_out_features // (size if index == 0 else min(size, 2))
            slices.append(replace(s, out_offset=offset, out_features=width))
            offset += width
        shares.append(replace(target, slices=tuple(slices), shard=Shard(rank, size)))
    return tuple(shares)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_recombine_to_the_whole(size: int) -> None:
    model = make_model("content", rank=4)
    whole = {t.name: expected_delta(model, t, inputs(t)) for t in TARGETS}
    parts = [shard_outputs(model, size, rank) for rank in range(size)]
    for target in TARGETS:
        if target.kind is ShardKind.ROW:
            got = torch.stack([part[target.name] for part in parts]).sum(0)
        else:
            columns = []
            for index, s in enumerate(target.slices):
                step = size // (size if index == 0 else min(size, 2))
                for rank in range(0, size, step):
                    share = shard_targets(size, rank)[TARGETS.index(target)].slices[index]
                    columns.append(
                        parts[rank][target.name][:, share.out_offset : share.out_offset + share.out_features]
                    )
                assert sum(c.shape[1] for c in columns) == s.out_offset + s.out_features
            got = torch.cat(columns, 1)
        torch.testing.assert_close(got.double(), whole[target.name], rtol=1e-5, atol=1e-5)


def inputs(target: LoraTarget) -> torch.Tensor:
    return torch.randn(3, target.full_in_features, generator=torch.Generator().manual_seed(3))


def shard_outputs(model: LoRAModel, size: int, rank: int) -> dict[str, torch.Tensor]:
    targets = shard_targets(size, rank)

    def base_bias(module_name: str) -> torch.Tensor | None:
        full = BASE_BIAS.get(module_name)
        return None if full is None else full.chunk(size)[rank]

    layout, memory = pack(model, targets, "reference", base_bias=base_bias)
    outputs = {}
    for target in targets:
        x = inputs(target)
        if target.kind is ShardKind.ROW:
            x = x.chunk(size, dim=1)[rank]
        outputs[target.name] = output(layout, memory, targets, target, x, "reference")
    return outputs


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layout_of_this_model_is_known_and_others_are_not(backend: str) -> None:
    """Whatever else a file says: kernels would read beyond an extent."""
    packer = Packer(TARGETS, get_backend(backend, CPU), torch.float32, BASE_BIAS.get)
    layout = pack(make_model("content", rank=5), TARGETS, backend)[0]
    packer.check_layout(layout)
    packer.check_layout(PackedLayout((), ()))
    first, *rest = layout.blocks
    (part, *parts) = first.layouts
    assert part is not None

    def with_part(**changes: object) -> PackedLayout:
        return replace(layout, blocks=(replace(first, layouts=(replace(part, **changes), *parts)), *rest))

    wrong = [
        with_part(rank=6),
        with_part(rank=0),
        with_part(a_offset=64),
        with_part(b_offset=part.b_offset + 64),
        with_part(bias_offset=-1),
        with_part(dtype=torch.float64 if backend == "native" else torch.bfloat16),
        replace(layout, sizes=(layout.sizes[0] + 64, *layout.sizes[1:])),
        replace(layout, sizes=(*layout.sizes, 64)),
        replace(layout, blocks=tuple(rest)),
        replace(layout, blocks=tuple(reversed(layout.blocks))),
        replace(layout, blocks=(first, *layout.blocks)),
        replace(layout, blocks=(replace(first, offset=64), *rest)),
        replace(layout, blocks=(replace(first, extent_index=1), *rest)),
        replace(layout, blocks=(replace(first, target_name="other"), *rest)),
        replace(layout, blocks=(replace(first, layouts=first.layouts[:-1]), *rest)),
        replace(layout, blocks=(replace(first, layouts=(None,) * len(first.layouts)), *rest)),
    ]
    for index, each in enumerate(wrong):
        try:
            packer.check_layout(each)
        except ValueError:
            continue
        pytest.fail(f"case {index} is taken")


def test_a_form_names_all_that_decides_the_bytes() -> None:
    """Backend, dtypes, targets, shards, the base's biases; it is the same in the next process."""

    def form(
        backend: str = "reference",
        targets: Sequence[LoraTarget] = TARGETS,
        compute_dtype: torch.dtype = torch.float32,
        base_bias: Mapping[str, torch.Tensor] = BASE_BIAS,
        lora_dtype: str = "auto",
    ) -> str:
        return Packer(targets, get_backend(backend, CPU), compute_dtype, base_bias.get).form(lora_dtype)

    name = next(iter(BASE_BIAS))
    shard = [replace(TARGETS[0], shard=Shard(0, 2)), *TARGETS[1:]]
    forms = [
        form(),
        form(targets=TARGETS[:-1]),
        form(targets=shard),
        form(compute_dtype=torch.bfloat16),
        form(base_bias={}),
        form(base_bias=BASE_BIAS | {name: BASE_BIAS[name] + 1}),
        form(base_bias=BASE_BIAS | {name: BASE_BIAS[name].bfloat16()}),
        form(lora_dtype="bfloat16"),
    ]
    assert len(set(forms)) == len(forms)
    assert form() == form("torch") == form(targets=make_targets())  # stock backends share a layout
    if "native" in BACKENDS:
        assert form("native") != form()


@pytest.mark.parametrize("backend", BACKENDS)
def test_models_of_one_blueprint_share_their_layout_and_nothing_else(backend: str) -> None:
    blueprint = Blueprint(ReadPlan.of({}), (), ())
    packer = Packer(TARGETS, get_backend(backend, CPU), torch.float32, BASE_BIAS.get)
    layouts = []
    for digest in ("one", "two"):
        model = make_model(digest, rank=5)
        layouts.append(packer.lay_out(replace(model, blueprint=blueprint)))
        memory = torch.full((layouts[-1].nbytes,), 255, dtype=torch.uint8)
        packer.write(model, layouts[-1], list(memory.split(list(layouts[-1].sizes))))
        alone, expected = pack(model, TARGETS, backend)
        assert alone == layouts[-1]
        assert torch.equal(memory, expected)
    assert layouts[0] is layouts[1]
    other = packer.lay_out(replace(make_model("one", rank=3), blueprint=Blueprint(ReadPlan.of({}), (), ())))
    assert other != layouts[0]
