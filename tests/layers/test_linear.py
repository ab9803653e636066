"""Linears: weights land in their slices, shards recombine to the whole, wrapped and bare layers are called alike."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex.core import Shard
from loraplex.kernels.native.choice import open_library
from loraplex.kernels.native.library import NativeLibrary
from loraplex.kernels.ops import get_backend
from loraplex.kernels.plan import LoraPlan, LoraSegment
from loraplex.layers.common import LayerSetup, WeightPart
from loraplex.layers.linear import (
    FusedColumnParallelLinear,
    MergedColumnParallelLinear,
    ParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from loraplex.layers.lora import with_lora

CPU = torch.device("cpu")
HIDDEN = 16
HEADS, HEAD_DIM = 8, 6
SIZES = (1, 2, 4)


needs_native = pytest.mark.skipif(not isinstance(open_library(), NativeLibrary), reason="no native kernels are built")


def setup_of(rank: int, size: int) -> LayerSetup:
    return LayerSetup(get_backend("torch", CPU), torch.float32, CPU, Shard(rank, size))


def random_checkpoint(parts: list[WeightPart]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {part.name: torch.randn(part.shape) for part in parts}


def fill(layer: ParallelLinear | VocabParallelEmbedding | ParallelLMHead, checkpoint: dict[str, Tensor]) -> None:
    layer.allocate()
    parts = list(layer.weight_parts())
    assert {part.name for part in parts} == set(checkpoint)
    for part in parts:
        part.destination.fill_(float("nan"))
    for part in parts:
        part.load(checkpoint[part.name])


def whole_output(checkpoint: dict[str, Tensor], module: str, x: Tensor) -> Tensor:
    return F.linear(x, checkpoint[f"{module}.weight"], checkpoint.get(f"{module}.bias"))


def make(kind: str, setup: LayerSetup, has_bias: bool) -> ParallelLinear:
    if kind == "column":
        return FusedColumnParallelLinear("c", 3, HIDDEN, [24], 1, has_bias, setup)
    if kind == "fused":
        return FusedColumnParallelLinear("f", 3, HIDDEN, (4, 2), 6, has_bias, setup)
    if kind == "merged":
        return MergedColumnParallelLinear("g", 3, HIDDEN, [("gate", 24), ("up", 40)], has_bias, setup)
    if kind == "row":
        return RowParallelLinear("r", 3, HIDDEN, 24, has_bias, setup)
    num_kv_heads = int(kind.removeprefix("qkv"))
    return QKVParallelLinear("a", 3, HIDDEN, HEAD_DIM, HEADS, num_kv_heads, ("q", "k", "v"), has_bias, setup)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["column", "merged", "qkv4", "qkv2", "qkv1"])
def test_column_shards_side_by_side_are_the_whole(kind: str, size: int, has_bias: bool) -> None:
    checkpoint = random_checkpoint(list(make(kind, setup_of(0, 1), has_bias).weight_parts()))
    x = torch.randn(5, HIDDEN)
    outputs: dict[str, list[Tensor]] = {}
    for rank in range(size):
        layer = make(kind, setup_of(rank, size), has_bias)
        fill(layer, checkpoint)
        y = layer.forward(x)
        assert y.shape[1] == sum(s.out_features for s in layer.target.slices)
        for s in layer.target.slices:
            columns = y[:, s.out_offset : s.out_offset + s.out_features]
            outputs.setdefault(s.module_name, []).append(columns)
    for module, columns in outputs.items():
        whole = whole_output(checkpoint, module, x)
        copies = sum(c.shape[1] for c in columns) // whole.shape[1]  # ranks that hold the same k or v head
        assert copies == (size // int(kind[3:]) if module in ("k", "v") and size > int(kind[3:]) else 1)
        torch.testing.assert_close(torch.cat(columns[::copies], dim=1), whole)
        for i in range(0, size, copies):
            assert all(torch.equal(columns[i], columns[i + j]) for j in range(copies))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_shards_of_fused_linears_are_parts_of_each(size: int, has_bias: bool) -> None:
    checkpoint = random_checkpoint(list(make("fused", setup_of(0, 1), has_bias).weight_parts()))
    x = torch.randn(5, HIDDEN)
    whole = whole_output(checkpoint, "f", x)
    for rank in range(size):
        layer = make("fused", setup_of(rank, size), has_bias)
        fill(layer, checkpoint)
        last = whole[:, 24:].chunk(min(size, 2), dim=1)[rank * min(size, 2) // size]  # neighbours have the same part
        own = torch.cat([whole[:, :24].chunk(size, dim=1)[rank], last], dim=1)
        torch.testing.assert_close(layer.forward(x), own)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_row_shards_add_up_to_the_whole(size: int, has_bias: bool) -> None:
    checkpoint = random_checkpoint(list(make("row", setup_of(0, 1), has_bias).weight_parts()))
    x = torch.randn(5, HIDDEN)
    total = torch.zeros(5, 24)
    for rank in range(size):
        layer = make("row", setup_of(rank, size), has_bias)
        fill(layer, checkpoint)
        total += layer.forward(x.chunk(size, dim=1)[rank])
    torch.testing.assert_close(total, whole_output(checkpoint, "r", x))


@pytest.mark.parametrize("size", SIZES)
def test_vocabulary_shards_recombine(size: int) -> None:
    checkpoint = {"e.weight": torch.randn(32, HIDDEN)}
    token_ids = torch.tensor([0, 31, 7, 8, 15, 16, 16])
    embedded, logits = torch.zeros(7, HIDDEN), []
    for rank in range(size):
        embedding = VocabParallelEmbedding("e", 32, HIDDEN, setup_of(rank, size))
        fill(embedding, checkpoint)
        embedded += embedding.forward(token_ids)
        head = ParallelLMHead("e", 32, HIDDEN, setup_of(rank, size))
        fill(head, checkpoint)
        logits.append(head.forward(checkpoint["e.weight"][:3]))
    assert torch.equal(embedded, checkpoint["e.weight"][token_ids])
    torch.testing.assert_close(torch.cat(logits, 1), checkpoint["e.weight"][:3] @ checkpoint["e.weight"].T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("backend", "quantization"),
    [
        ("reference", None),
        ("torch", None),
        pytest.param("native", None, marks=needs_native),
        pytest.param("native", "int8", marks=needs_native),
        pytest.param("native", "int4", marks=needs_native),
    ],
)
def test_a_tied_head_has_the_weight_of_its_embedding(
    backend: str, size: int, quantization: str | None, dtype: torch.dtype
) -> None:
    checkpoint, vocab = {"e.weight": torch.randn(38 * size, HIDDEN).to(dtype)}, 38 * size
    ops = get_backend(backend, CPU)
    token_ids, embedded = torch.tensor([0, 37, 7, 8, 15, 16, 16, vocab - 1]), torch.zeros(8, HIDDEN)
    for rank in range(size):
        setup = LayerSetup(ops, dtype, CPU, Shard(rank, size), quantization)
        embedding = VocabParallelEmbedding("e", vocab, HIDDEN, setup, is_tied=True)
        head = ParallelLMHead("lm_head", vocab, HIDDEN, setup, tied_to=embedding)
        assert list(head.weight_parts()) == []
        fill(embedding, checkpoint)
        embedding.prepare()
        if head.has_own_weight:
            head.allocate()
            head.prepare()
        else:
            assert head.weight is embedding.weight
        embedded += embedding.forward(token_ids)
        alone = ParallelLMHead("e", vocab, HIDDEN, setup)
        fill(alone, checkpoint)
        alone.prepare()
        x = torch.randn(3, HIDDEN).to(setup.activation_dtype)
        assert torch.equal(head.forward(x), alone.forward(x))
    assert torch.equal(embedded, checkpoint["e.weight"][token_ids].float())


@needs_native
def test_native_weights_of_a_tied_head_are_there_once() -> None:
    ops = get_backend("native", CPU)
    shared = {
        q: VocabParallelEmbedding("e", 32, HIDDEN, LayerSetup(ops, torch.float32, CPU, quantization=q), True)
        for q in (None, "int8", "int4")
    }
    assert [each.is_head for each in shared.values()] == [True, False, False]
    assert not VocabParallelEmbedding("e", 32, HIDDEN, LayerSetup(ops, torch.float32, CPU), is_tied=False).is_head


def test_what_cannot_be_dealt_out_evenly_is_refused() -> None:
    with pytest.raises(ValueError, match="24 features or heads cannot be dealt out evenly to 5 ranks"):
        RowParallelLinear("r", 3, 24, HIDDEN, False, setup_of(0, 5))
    with pytest.raises(ValueError, match="3 features or heads"):
        QKVParallelLinear("a", 0, HIDDEN, HEAD_DIM, HEADS, 3, ("q", "k", "v"), False, setup_of(0, 4))


@pytest.mark.parametrize("kind", ["column", "merged", "row", "qkv2"])
def test_bare_and_wrapped_layers_are_called_alike(kind: str) -> None:
    bare = make(kind, setup_of(0, 1), True)
    fill(bare, random_checkpoint(list(bare.weight_parts())))
    wrapped, x = with_lora(bare), torch.randn(5, HIDDEN)
    assert wrapped.target is bare.target
    for plan in (None, LoraPlan.build([], 5, capacity=1)):
        assert torch.equal(bare.forward(x, plan), wrapped.forward(x, plan))
    with pytest.raises(AssertionError, match="has no LoRA"):
        bare.forward(x, LoraPlan.build([LoraSegment(0, 5, 0)], 5, capacity=1))


@pytest.mark.parametrize("head_dim", [8, 16], ids=["cut inside a panel", "cut between panels"])
@pytest.mark.parametrize(
    ("backend", "quantization"),
    [
        ("reference", None),
        ("torch", None),
        pytest.param("native", None, marks=needs_native),
        pytest.param("native", "int8", marks=needs_native),
        pytest.param("native", "int4", marks=needs_native),
    ],
)
def test_one_slice_alone_has_the_columns_of_all(backend: str, quantization: str | None, head_dim: int) -> None:
    setup = LayerSetup(get_backend(backend, CPU), torch.float32, CPU, quantization=quantization)
    layer = QKVParallelLinear("qkv", 0, HIDDEN, head_dim, 3, 1, ("q", "k", "v"), True, setup)
    fill(layer, random_checkpoint(list(layer.weight_parts())))
    layer.prepare()
    x = torch.randn(5, HIDDEN)
    whole = layer.forward(x)
    for index, s in enumerate(layer.target.slices):
        part, columns = layer.forward_slice(x, index), whole[:, s.out_offset : s.out_offset + s.out_features]
        torch.testing.assert_close(part, columns)
        if backend == "native":
            assert torch.equal(part, columns)


def test_base_bias_is_this_ranks_part() -> None:
    layer = make("qkv2", setup_of(1, 2), True)
    checkpoint = random_checkpoint(list(layer.weight_parts()))
    fill(layer, checkpoint)
    got = layer.base_bias("k")
    assert got is not None
    assert torch.equal(got, checkpoint["k.bias"][HEAD_DIM:])
    assert make("row", setup_of(0, 1), False).base_bias("r") is None


def test_row_norms_are_of_this_ranks_rows() -> None:
    layer = make("qkv2", setup_of(1, 2), False)
    checkpoint = random_checkpoint(list(layer.weight_parts()))
    fill(layer, checkpoint)
    a, b = torch.randn(3, layer.target.in_features), torch.randn(HEAD_DIM, 3)
    want = (checkpoint["k.weight"][HEAD_DIM:] + 2 * b @ a).norm(dim=1)
    torch.testing.assert_close(layer.row_norms("k", a, b, 2.0), want)


def test_rows_that_are_cut_over_ranks_have_no_norms_here() -> None:
    layer = make("row", setup_of(0, 2), False)
    fill(layer, random_checkpoint(list(layer.weight_parts())))
    a, b = torch.randn(3, layer.target.in_features), torch.randn(layer.target.slices[0].out_features, 3)
    with pytest.raises(ValueError, match="rows of r are cut over 2 ranks"):
        layer.row_norms("r", a, b, 1.0)
