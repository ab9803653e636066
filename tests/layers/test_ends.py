"""The embedding, the head and norms with adapters, by their formulas: shares of adapters, shared rows, base rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from loraplex.core import LoraTarget, ShardKind
from loraplex.kernels.ops import KernelBackend
from loraplex.kernels.plan import LoraPlan, LoraSegment, SlotTable
from loraplex.kernels.slices import SliceWeights
from loraplex.layers.common import LayerSetup, RMSNorm
from loraplex.layers.ends import LogitsProcessorWithLoRA, RMSNormWithLoRA, VocabParallelEmbeddingWithLoRA
from loraplex.layers.linear import FusedColumnParallelLinear, ParallelLMHead, VocabParallelEmbedding
from loraplex.layers.lora import with_lora
from loraplex.memory.weights.own_packing import OwnPacking
from tests.kernels.cases import BACKENDS, same_bits

VOCAB, HIDDEN, RANK, ADDED = 90, 24, 3, 5
CPU = torch.device("cpu")
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def table_of(
    target: LoraTarget,
    backend: KernelBackend,
    by_slot: Mapping[int, SliceWeights],
    vocab_sizes: Mapping[int, int] | None = None,
) -> SlotTable:
    table, start = SlotTable((target,), 4, torch.zeros(1 << 18, dtype=torch.uint8)), 64
    packing = OwnPacking(backend, torch.float32)
    for slot, weights in by_slot.items():
        nbytes = packing.nbytes(target, [weights])
        layouts = packing.pack(target, [weights], table.buffer[start : start + nbytes])
        table.set_block(target.name, slot, start, layouts)
        start += nbytes
    for slot, size in (vocab_sizes or {}).items():
        table.set_vocab_size(slot, size)
    return table


def plan_of(num_rows: int, *segments: LoraSegment) -> LoraPlan:
    return LoraPlan.build(segments, num_rows, 4)


def lora(in_features: int, out_features: int, seed: int) -> SliceWeights:
    return SliceWeights(draw(RANK, in_features, seed=seed), draw(out_features, RANK, seed=seed), None, 0.5)


def rows_of(ids: Sequence[int], seed: int = 0) -> SliceWeights:
    return SliceWeights(
        None, None, None, 1.0, weight=draw(len(ids), HIDDEN, seed=seed), row_ids=torch.tensor(list(ids))
    )


# ------------------------------------------------------------------------------------------------------- the embedding


def make_embedding(backend: KernelBackend) -> VocabParallelEmbedding:
    layer = VocabParallelEmbedding("model.embed_tokens", VOCAB, HIDDEN, LayerSetup(backend, torch.float32, CPU))
    layer.allocate()
    layer.weight.copy_(draw(VOCAB, HIDDEN, seed=9))
    return layer


@each_backend
def test_lora_on_the_embedding_in_shares_and_on_shared_rows(backend: KernelBackend) -> None:
    base, first, second = make_embedding(backend), lora(VOCAB, HIDDEN, 1), lora(VOCAB, HIDDEN, 2)
    layer = VocabParallelEmbeddingWithLoRA(base)
    token_ids = torch.tensor([5, 0, 7, 89, 7, 1])
    plain = base.forward(token_ids)
    assert same_bits(layer.forward(token_ids, plan_of(6, LoraSegment(0, 2, 1))), plain), "not bound yet"
    layer.set_lora_info(table_of(base.target, backend, {1: first, 3: second}), backend)
    plan = plan_of(6, LoraSegment(1, 3, 1), LoraSegment(2, 5, 3, 0.25), LoraSegment(5, 6, 2))
    y = layer.forward(token_ids, plan)
    want = plain.clone()
    for start, end, weights, share in ((1, 3, first, 1.0), (2, 5, second, 0.25)):
        assert weights.lora_a is not None
        assert weights.lora_b is not None
        want[start:end] += share * 0.5 * weights.lora_a.T[token_ids[start:end]] @ weights.lora_b.T
    torch.testing.assert_close(y, want)
    assert same_bits(y[[0, 5]], plain[[0, 5]]), "rows of the base, and of an adapter that leaves the embedding alone"


@each_backend
def test_rows_of_an_adapters_own_are_looked_up(backend: KernelBackend) -> None:
    """Of added tokens, too; a whole embedding is one without row_ids."""
    base = make_embedding(backend)
    some, whole = rows_of([0, 7, 88, *range(VOCAB, VOCAB + ADDED)]), draw(VOCAB + 1, HIDDEN, seed=4)
    weights = {0: some, 1: SliceWeights(None, None, None, 1.0, weight=whole)}
    layer = VocabParallelEmbeddingWithLoRA(base)
    layer.set_lora_info(table_of(base.target, backend, weights, {0: VOCAB + ADDED, 1: VOCAB + 1}), backend)
    token_ids = torch.tensor([7, 7, 8, VOCAB + 4, 0, VOCAB, 7, VOCAB])
    y = layer.forward(token_ids, plan_of(8, LoraSegment(1, 6, 0), LoraSegment(6, 8, 1)))
    assert some.weight is not None
    known = base.forward(token_ids.clamp(max=VOCAB - 1))
    assert same_bits(y[[0, 2]], known[[0, 2]])
    assert same_bits(y[[1, 3, 4, 5]], some.weight[[1, 7, 0, 3]])
    assert same_bits(y[6:], whole[[7, VOCAB]])


# ------------------------------------------------------------------------------------------------------------ the head


def make_head(backend: KernelBackend) -> ParallelLMHead:
    layer = ParallelLMHead("lm_head", VOCAB, HIDDEN, LayerSetup(backend, torch.float32, CPU))
    layer.allocate()
    layer.weight.copy_(draw(VOCAB, HIDDEN, seed=8))
    layer.prepare()
    return layer


@each_backend
def test_the_head_of_many_vocabularies(backend: KernelBackend) -> None:
    base, weight, hidden = make_head(backend), draw(VOCAB, HIDDEN, seed=8), draw(7, HIDDEN)
    added = rows_of([3, 50, *range(VOCAB, VOCAB + ADDED)])
    by_slot = {0: lora(HIDDEN, VOCAB, 1), 1: added, 2: rows_of([3], seed=2)}
    layer = LogitsProcessorWithLoRA(base)
    layer.set_lora_info(table_of(base.target, backend, by_slot, {1: VOCAB + ADDED, 2: VOCAB - 10}), backend)
    plan = plan_of(7, LoraSegment(1, 3, 0, 0.5), LoraSegment(3, 5, 1), LoraSegment(5, 7, 2))
    logits = layer.forward(hidden, plan)
    assert logits.shape == (7, VOCAB + ADDED)
    assert logits.dtype == torch.float32
    want = torch.full((7, VOCAB + ADDED), -torch.inf)
    want[:, :VOCAB] = hidden @ weight.T
    a, b = by_slot[0].lora_a, by_slot[0].lora_b
    assert a is not None
    assert b is not None
    want[1:3, :VOCAB] += 0.25 * hidden[1:3] @ a.T @ b.T
    for start, slot in ((3, 1), (5, 2)):
        own, ids = by_slot[slot].weight, by_slot[slot].row_ids
        assert own is not None
        assert ids is not None
        want[start : start + 2, ids] = hidden[start : start + 2] @ own.T
    want[5:, VOCAB - 10 :] = -torch.inf
    torch.testing.assert_close(logits, want)
    assert same_bits(logits[:1, :VOCAB], base.forward(hidden)[:1]) or backend.name != "native"
    alone = layer.forward(hidden, plan_of(7, LoraSegment(5, 7, 2)))
    assert alone.shape == (7, VOCAB), "no wider than what is there"


@each_backend
def test_a_head_without_segments_is_the_base_layer(backend: KernelBackend) -> None:
    base, hidden = make_head(backend), draw(3, HIDDEN)
    assert same_bits(LogitsProcessorWithLoRA(base).forward(hidden, None), base.forward(hidden))


# ------------------------------------------------------------------------------------------------- norms and linears


@each_backend
def test_norms_of_adapters_own(backend: KernelBackend) -> None:
    base = RMSNorm("model.norm", HIDDEN, 1e-5, LayerSetup(backend, torch.float32, CPU))
    base.weight.copy_(draw(HIDDEN))
    own = draw(HIDDEN, seed=1)
    layer = RMSNormWithLoRA(base)
    weights = {2: SliceWeights(None, None, None, 1.0, weight=own)}
    layer.set_lora_info(table_of(base.target, backend, weights), backend)
    plan, x, residual = plan_of(5, LoraSegment(0, 2, 1), LoraSegment(2, 4, 2)), draw(5, HIDDEN), draw(5, HIDDEN, seed=3)
    total = x + residual
    for y in (layer.forward(total, plan), layer.forward_add(x.clone(), residual.clone(), plan)[0]):
        assert same_bits(y[[0, 1, 4]], base.forward(total)[[0, 1, 4]])
        torch.testing.assert_close(y[2:4], backend.rms_norm(total[2:4], own, 1e-5))
    heads = draw(5, 3, HIDDEN, seed=5)
    torch.testing.assert_close(layer.forward(heads, plan)[2:4], backend.rms_norm(heads[2:4], own, 1e-5))


@each_backend
def test_a_linear_of_an_adapters_own_has_its_own_bias(backend: KernelBackend) -> None:
    """The base's is not in its product."""
    setup = LayerSetup(backend, torch.float32, CPU)
    base = FusedColumnParallelLinear("linear", 0, HIDDEN, [40], 1, has_bias=True, setup=setup)
    base.allocate()
    base.weight.copy_(draw(40, HIDDEN))
    assert base.bias is not None
    base.bias.copy_(draw(40))
    base.prepare()
    own, bias, x = draw(40, HIDDEN, seed=1), draw(40, seed=1), draw(5, HIDDEN)
    layer = with_lora(base)
    weights = SliceWeights(draw(RANK, HIDDEN), draw(40, RANK), bias, 0.5, weight=own)
    layer.set_lora_info(table_of(base.target, backend, {0: weights}), backend)
    y = layer.forward(x, plan_of(5, LoraSegment(1, 4, 0)))
    want = x @ own.T + 0.5 * x @ draw(RANK, HIDDEN).T @ draw(40, RANK).T + bias
    torch.testing.assert_close(y[1:4], want[1:4])
    assert same_bits(y[[0, 4]], base.forward(x)[[0, 4]])
    assert base.target.kind is ShardKind.COLUMN
