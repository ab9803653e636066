"""Packed blocks say exactly what the adapter's tensors say, whole and in shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from loraplex.adapters.tensors import ReadPlan
from loraplex.adapters.weights import Blueprint, LoRALayerWeights, LoRAModel
from loraplex.core import LoraTarget, Shard, ShardKind
from loraplex.distributed import shard_bias, shard_columns, shard_rows
from loraplex.kernels.ops import KernelBackend, get_backend
from loraplex.kernels.plan import LoraPlan, LoraSegment, SlotTable
from loraplex.kernels.slices import ABSENT, SliceWeights
from loraplex.memory.weights.packing import BaseWeights, Mixing, PackedLayout, Packer, UnfitWeightsError
from tests.kernels.cases import BACKENDS as KERNELS
from tests.memory.gains import applied, make_dora, make_ia3
from tests.memory.rig import (
    BASE,
    BASE_BIAS,
    BASE_WEIGHTS,
    CPU,
    TARGETS,
    FakeBase,
    expected_delta,
    make_model,
    make_targets,
)

BACKENDS = tuple(backend.name for backend in KERNELS)


def pack(
    model: LoRAModel,
    targets: tuple[LoraTarget, ...],
    backend: str,
    dtype: torch.dtype = torch.float32,
    base: BaseWeights = BASE,
):
    """(layout, views): the adapter written into memory of its own."""
    packer = Packer(targets, get_backend(backend, CPU), dtype, base)
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
    layout, memory = pack(LoRAModel("d", 0, {name: layer}), TARGETS, "reference", base=FakeBase(base))
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

    base = FakeBase({name: full.chunk(size)[rank] for name, full in BASE_BIAS.items()})
    layout, memory = pack(model, targets, "reference", base=base)
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
    packer = Packer(TARGETS, get_backend(backend, CPU), torch.float32, BASE)
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
        return Packer(targets, get_backend(backend, CPU), compute_dtype, FakeBase(base_bias)).form(lora_dtype)

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
    packer = Packer(TARGETS, get_backend(backend, CPU), torch.float32, BASE)
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


# ---------------------------------------------------------------------------------------------------------- DoRA, IA3

each_gain_backend = pytest.mark.parametrize("backend", KERNELS, ids=lambda backend: backend.name)


def slices_of(
    model: LoRAModel,
    targets: Sequence[LoraTarget] = TARGETS,
    base: BaseWeights = BASE,
    backend: KernelBackend = KERNELS[0],
    dtype: torch.dtype = torch.float32,
) -> dict[str, SliceWeights]:
    """What is packed for each module, out of the packed bytes."""
    packer = Packer(targets, backend, dtype, base)
    layout = packer.lay_out(model)
    packer.check_layout(layout)
    views = [torch.full((size,), 255, dtype=torch.uint8) for size in layout.sizes]
    packer.write(model, layout, views)
    slices = {}
    for block in layout.blocks:
        target = next(t for t in targets if t.name == block.target_name)
        unpacked = packer.unpack(block, views[block.extent_index])
        slices |= {s.module_name: each for s, each in zip(target.slices, unpacked, strict=True) if each is not None}
    return slices


def expected_dora(layer: LoRALayerWeights, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None):
    """m (x V^T + scaling lora_bias) / ||V|| + b, V := W + scaling B A, with the bias that replaces the base's."""
    assert layer.magnitude is not None
    merged = weight.double() + layer.scaling * layer.lora_b.double() @ layer.lora_a.double()
    gain = layer.magnitude.double() / merged.norm(dim=1)
    lora_bias = 0 if layer.lora_bias is None else layer.scaling * layer.lora_bias.double()
    kept = bias if layer.bias is None else layer.bias
    return gain * (x.double() @ merged.T + lora_bias) + (0 if kept is None else kept.double())


@each_gain_backend
@pytest.mark.parametrize("with_biases", [False, True])
def test_dora_is_packed_as_its_formula(backend: KernelBackend, with_biases: bool) -> None:
    """On a base with a bias (q_proj) and without; the bias replaced, or with a lora_bias, or neither."""
    model = make_dora("content", with_biases=with_biases)
    slices = slices_of(model, backend=backend)
    assert slices.keys() == model.layers.keys()
    for layer in model:
        s, weight, bias = slices[layer.module_name], BASE_WEIGHTS[layer.module_name], BASE_BIAS.get(layer.module_name)
        assert s.gain is not None
        assert s.gain.dtype == torch.float32
        x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(applied(s, x, weight, bias), expected_dora(layer, x, weight, bias))
        needs_bias = bias is not None or layer.bias is not None or layer.lora_bias is not None
        assert (s.bias is not None) == needs_bias


@each_gain_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gains_are_float32_beside_weights_of_16_bits(backend: KernelBackend, dtype: torch.dtype) -> None:
    model = make_dora("content")
    tensors = ("lora_a", "lora_b", "magnitude")
    narrow = {
        name: replace(layer, **{field: getattr(layer, field).to(dtype) for field in tensors})
        for name, layer in model.layers.items()
    }
    slices = slices_of(replace(model, layers=narrow), backend=backend, dtype=dtype)
    for layer in narrow.values():
        s = slices[layer.module_name]
        assert s.lora_a is not None
        assert s.gain is not None
        assert (s.lora_a.dtype, s.gain.dtype) == (dtype, torch.float32)
        norms = BASE.row_norms(layer.module_name, layer.lora_a, layer.lora_b, layer.scaling)
        torch.testing.assert_close(s.gain, layer.magnitude.float() / norms)


@each_gain_backend
def test_ia3_is_packed_as_it_is(backend: KernelBackend) -> None:
    model = make_ia3("content")
    slices = slices_of(model, backend=backend)
    assert slices.keys() == model.layers.keys()
    for layer in model:
        s = slices[layer.module_name]
        assert (s.lora_a, s.lora_b, s.bias) == (None, None, None)
        for got, want in ((s.gain, layer.gain), (s.input_gain, layer.input_gain)):
            assert (got is None) == (want is None)
            assert got is None or torch.equal(got, want)


@pytest.mark.parametrize("backend", KERNELS, ids=lambda backend: backend.name)
def test_a_kernel_with_gains_reads_what_the_adapter_says(backend: KernelBackend) -> None:
    model = make_dora("content", with_biases=True)
    layout, memory = pack(model, TARGETS, backend.name)
    target = TARGETS[0]
    table = SlotTable(TARGETS, 1, memory)
    (block,) = (block for block in layout.blocks if block.target_name == target.name)
    table.set_block(target.name, 0, block.offset, block.layouts)
    x = torch.randn(3, target.in_features, generator=torch.Generator().manual_seed(1))
    y = torch.cat([x @ BASE_WEIGHTS[s.module_name].T + BASE_BIAS.get(s.module_name, 0) for s in target.slices], 1)
    plan = LoraPlan.build([LoraSegment(0, 3, 0)], 3, 1)
    backend.add_lora(y, x, plan, table, table.first_row(target.name), target.slices)
    for s in target.slices:
        name = s.module_name
        want = expected_dora(model.layers[name], x, BASE_WEIGHTS[name], BASE_BIAS.get(name))
        got = y[:, s.out_offset : s.out_offset + s.out_features]
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


SHARDED = {
    "DoRA": make_dora("content", modules=("q_proj", "k_proj", "v_proj"), with_biases=True),  # rows of down are cut
    "IA3": make_ia3("content"),
    "IA3 on outputs": make_ia3("content", ()),
}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", SHARDED)
def test_gains_of_shards_recombine_to_the_whole(size: int, kind: str) -> None:
    model = SHARDED[kind]
    whole = slices_of(model)
    bases = [shard_base(size, rank) for rank in range(size)]
    parts = [slices_of(model, shard_targets(size, rank), bases[rank]) for rank in range(size)]
    for target, name in ((t, s.module_name) for t in TARGETS for s in t.slices if s.module_name in model.layers):
        x, is_row = inputs(target), target.kind is ShardKind.ROW
        want = applied(whole[name], x, BASE_WEIGHTS[name], BASE_BIAS.get(name))
        got = [
            applied(part[name], x.chunk(size, 1)[rank] if is_row else x, base.weights[name], base.base_bias(name))
            for rank, (part, base) in enumerate(zip(parts, bases, strict=True))
        ]
        replicas = size * got[0].shape[1] // want.shape[1]
        together = torch.stack(got).sum(0) if is_row else torch.cat(got[::replicas], 1)
        torch.testing.assert_close(together, want)


def shard_base(size: int, rank: int) -> FakeBase:
    """This rank's rows of q, k, v, and columns of down."""
    weights, biases = {}, {}
    for target in shard_targets(size, rank):
        for index, s in enumerate(target.slices):
            rows = shard_rows(BASE_WEIGHTS[s.module_name], s.out_features, target.shard)
            weights[s.module_name] = shard_columns(rows, target.in_features, target.shard)
            bias = BASE_BIAS.get(s.module_name)
            if bias is not None:
                biases[s.module_name] = shard_bias(target, index, bias)
    return FakeBase(biases, weights)


class NoNorms(FakeBase):
    """A base whose rows take long to read."""

    def row_norms(self, module_name: str, lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float) -> torch.Tensor:
        raise AssertionError("the rows are read")


@each_gain_backend
def test_a_layout_is_made_and_checked_without_the_base(backend: KernelBackend) -> None:
    packer = Packer(TARGETS, backend, torch.float32, NoNorms(BASE_BIAS))
    for model in (make_dora("one"), make_dora("two", with_biases=True), make_ia3("three")):
        packer.check_layout(packer.lay_out(model))


@each_gain_backend
def test_a_layout_with_gains_elsewhere_is_not_this_models(backend: KernelBackend) -> None:
    """Kernels would read beyond an extent, or multiply an input that several modules have."""
    packer = Packer(TARGETS, backend, torch.float32, BASE)
    for model, index in ((make_dora("content"), 0), (make_ia3("content"), 1)):
        layout = packer.lay_out(model)
        blocks = list(layout.blocks)
        (part, *parts) = blocks[index].layouts
        assert part is not None
        here, inside = max(part.gain_offset, part.input_gain_offset), layout.sizes[0] - 64
        wrong = [
            {"gain_offset": here + 64},
            {"gain_offset": ABSENT, "input_gain_offset": ABSENT},
            {"gain_offset": inside, "input_gain_offset": inside},
            {"input_gain_offset" if index == 0 else "gain_offset": here},
        ]
        for changes in wrong:
            changed = replace(blocks[index], layouts=(replace(part, **changes), *parts))
            with pytest.raises(ValueError, match=r"laid out|bytes|gain on the input"):
                packer.check_layout(replace(layout, blocks=(*blocks[:index], changed, *blocks[index + 1 :])))


def test_a_layout_knows_whether_row_norms_are_in_it() -> None:
    packer = Packer(TARGETS, KERNELS[0], torch.float32, BASE)
    models = (make_model("plain"), make_dora("dora"), make_ia3("ia3"))
    assert [packer.lay_out(model).depends_on_base for model in models] == [False, True, False]


@pytest.mark.parametrize("what", ["row of zeros", "magnitude", "overflow"])
def test_a_gain_that_is_not_finite_is_refused_by_name(what: str) -> None:
    model = make_dora("content")
    name = TARGETS[0].slices[1].module_name
    layer, weights = model.layers[name], dict(BASE_WEIGHTS)
    assert layer.lora_b is not None
    assert layer.magnitude is not None
    weights[name] = weights[name].clone()
    lora_b, magnitude = layer.lora_b.clone(), layer.magnitude.clone()
    if what == "row of zeros":
        weights[name][5], lora_b[5] = 0, 0
    elif what == "magnitude":
        weights[name][5], lora_b[5], magnitude[5] = 1e-20, 0, 1e30
    else:
        lora_b[5] = 3e38
    layers = {**model.layers, name: replace(layer, lora_b=lora_b, magnitude=magnitude)}
    with pytest.raises(UnfitWeightsError, match=f"^{name}: .* 1 of 8 outputs .* first output 5: "):
        slices_of(replace(model, layers=layers), base=FakeBase(BASE_BIAS, weights))


@each_gain_backend
def test_gains_on_an_input_of_several_modules_are_each_modules_own(backend: KernelBackend) -> None:
    """Its layout counts as that of an IA3; A and B beside such a gain are no layout of this model."""
    model = make_ia3("content", ("k_proj", "v_proj"))
    names = [s.module_name for s in TARGETS[0].slices]
    found = slices_of(model, backend=backend)
    for name in names:
        given, got = model.layers[name], found[name]
        for field in ("gain", "input_gain"):
            vector = getattr(given, field)
            assert (getattr(got, field) is None) == (vector is None)
            assert vector is None or torch.equal(getattr(got, field), vector)
    assert [found[name].input_gain is None for name in names] == [True, False, False]
    packer = Packer(TARGETS, backend, torch.float32, BASE)
    layout = packer.lay_out(model)
    assert layout.mixing is Mixing.PRODUCT
    first, *blocks = layout.blocks
    q, k, v = first.layouts
    assert k is not None
    wrong = replace(first, layouts=(q, replace(k, a_offset=0, b_offset=64, rank=1), v))
    with pytest.raises(ValueError, match="A and B beside a gain on the input of"):
        packer.check_layout(replace(layout, blocks=(wrong, *blocks)))


@pytest.mark.parametrize(
    ("field", "module", "what"),
    [
        ("magnitude", "q_proj", "the gain"),
        ("gain", "q_proj", "the gain"),
        ("input_gain", "down_proj", "the input gain"),
    ],
)
def test_a_gain_of_another_width_is_named(field: str, module: str, what: str) -> None:
    model = make_model("content")
    name = next(name for name in model.layers if name.endswith(module))
    layer = replace(model.layers[name], **{field: torch.ones(17)})
    packer = Packer(TARGETS, KERNELS[0], torch.float32, BASE)
    with pytest.raises(ValueError, match=f"{what} of {name} has 17 features where the base model has"):
        packer.lay_out(replace(model, layers={**model.layers, name: layer}))


def test_the_least_adapter_is_one_gain() -> None:
    packer = Packer(TARGETS, KERNELS[0], torch.float32, BASE)
    k_proj = TARGETS[0].slices[1].module_name
    model = make_ia3("content")
    least = packer.lay_out(replace(model, layers={k_proj: model.layers[k_proj]})).nbytes
    assert least == packer.least_nbytes("auto") == packer.least_nbytes("int8") == 64
