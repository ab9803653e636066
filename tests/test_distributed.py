"""Slicing for 1, 2, 4 and 8 shards: the parts put together are the whole layer, its delta and its bias."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.core import LoraSlice, LoraTarget, Shard, ShardKind
from loraplex.distributed import (
    NO_TOKEN,
    own_rows,
    shard_bias,
    shard_columns,
    shard_lora,
    shard_lora_a,
    shard_lora_b,
    shard_rows,
    shard_token_rows,
)

IN, RANK, TOKENS = 24, 5, 3
SIZES = pytest.mark.parametrize("size", [1, 2, 4, 8])


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(shape[0]))


def target_of(kind: ShardKind, shard: Shard, out: list[tuple[int, int]], in_features: int = IN) -> LoraTarget:
    """out: (this shard's, the checkpoint's) output features of each slice."""
    slices, offset = [], 0
    for i, (here, full) in enumerate(out):
        slices.append(LoraSlice(f"linear.{i}", offset, here, full))
        offset += here
    return LoraTarget("linear", 0, in_features, IN, tuple(slices), kind, shard)


def shards(size: int) -> list[Shard]:
    return [Shard(rank, size) for rank in range(size)]


@SIZES
@pytest.mark.parametrize("full", [[32], [32, 32], [16, 48]], ids=str)
def test_column_parts_side_by_side_are_the_whole(size: int, full: list[int]) -> None:
    """One linear, and merged ones (gate, up): each slice is cut by itself."""
    x = draw(TOKENS, IN)
    for index, features in enumerate(full):
        a, b, bias = draw(RANK, IN), draw(features, RANK), draw(features)
        parts = []
        for shard in shards(size):
            target = target_of(ShardKind.COLUMN, shard, [(n // size, n) for n in full])
            own_bias = shard_bias(target, index, bias)
            assert own_bias is not None
            assert shard_lora_a(target, index, a).shape == a.shape
            parts.append(x @ shard_lora_a(target, index, a).T @ shard_lora_b(target, index, b).T + own_bias)
        torch.testing.assert_close(torch.cat(parts, dim=1), x @ a.T @ b.T + bias)


@SIZES
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 4), (8, 2), (8, 1)])
def test_qkv_is_cut_by_heads_and_scarce_kv_heads_are_replicated(size: int, heads: int, kv_heads: int) -> None:
    head_dim, x = 3, draw(TOKENS, IN)
    own_kv = max(kv_heads // size, 1)
    full = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    out = [(heads // size * head_dim, full[0]), (own_kv * head_dim, full[1]), (own_kv * head_dim, full[2])]
    for index, features in enumerate(full):
        a, b = draw(RANK, IN), draw(features, RANK)
        whole = (x @ a.T @ b.T).view(TOKENS, -1, head_dim)
        num_heads = whole.shape[1]
        for shard in shards(size):
            target = target_of(ShardKind.QKV, shard, out)
            part = x @ shard_lora_a(target, index, a).T @ shard_lora_b(target, index, b).T
            own = out[index][0] // head_dim
            first = shard.rank * num_heads // size  # the heads whose group this rank's q heads belong to
            torch.testing.assert_close(part.view(TOKENS, own, head_dim), whole[:, first : first + own])


@SIZES
@pytest.mark.parametrize("is_full", [False, True], ids=["sharded", "fully sharded"])
def test_several_linears_in_one_module_are_cut_one_by_one(size: int, is_full: bool) -> None:
    """q, k and v of 8, 2 and 2 heads, fused in the checkpoint: a rank's outputs are its parts of each."""
    x, a, b, bias = draw(TOKENS, IN), draw(RANK, IN), draw(36, RANK), draw(36)
    whole, own = x @ a.T @ b.T + bias, ((24, 24 // size), *(2 * [(6, 6 // min(size, 2))]))
    here = sum(each for _, each in own)
    cut, biases, targets = [], [], []
    for shard in shards(size):
        target = target_of(ShardKind.COLUMN, shard, [(here, 36)])
        target = replace(target, slices=(replace(target.slices[0], parts=own),), is_fully_sharded=is_full)
        targets.append(target)
        cut.append(shard_lora(target, 0, a, b, 1, 4))
        biases.append(shard_bias(target, 0, bias))
    h = torch.cat([x @ own_a.T for own_a, _, is_exchanged in cut if is_exchanged] or [x @ a.T], dim=1)
    for rank, ((_, own_b, is_exchanged), own_bias, target) in enumerate(zip(cut, biases, targets, strict=True)):
        assert is_exchanged == (is_full and size > 1)
        places = [range(36)[rows] for rows in own_rows(target.slices[0], target.shard)]
        assert [len(each) for each in places] == [each for _, each in own]
        first = rank * min(size, 2) // size  # the k and v head of this rank's q heads
        assert [each.start for each in places] == [rank * own[0][1], 24 + first * own[1][1], 30 + first * own[2][1]]
        columns = [column for each in places for column in each]
        torch.testing.assert_close(h @ own_b.T + own_bias, whole[:, columns])


@SIZES
def test_row_parts_add_up_to_the_whole_and_the_bias_counts_once(size: int) -> None:
    x, a, b, bias = draw(TOKENS, IN), draw(RANK, IN), draw(16, RANK), draw(16)
    total = torch.zeros(TOKENS, 16, dtype=torch.float64)
    for shard in shards(size):
        target = target_of(ShardKind.ROW, shard, [(16, 16)], IN // size)
        own_x = shard_columns(x, IN // size, shard)
        assert shard_lora_b(target, 0, b).shape == b.shape
        total += own_x @ shard_lora_a(target, 0, a).T @ shard_lora_b(target, 0, b).T
        own_bias = shard_bias(target, 0, bias)
        assert (own_bias is None) == (shard.rank > 0)
        if own_bias is not None:
            total += own_bias
    torch.testing.assert_close(total, x @ a.T @ b.T + bias)


@SIZES
def test_replicated_layers_are_not_cut(size: int) -> None:
    a, b, bias = draw(RANK, IN), draw(16, RANK), draw(16)
    for shard in shards(size):
        target = target_of(ShardKind.REPLICATED, shard, [(16, 16)])
        assert torch.equal(shard_lora_a(target, 0, a), a)
        assert torch.equal(shard_lora_b(target, 0, b), b)
        assert torch.equal(shard_bias(target, 0, bias), bias)


@SIZES
def test_base_weights_are_cut_by_the_same_rule(size: int) -> None:
    weight = draw(32, IN)
    assert torch.equal(torch.cat([shard_rows(weight, 32 // size, s) for s in shards(size)]), weight)
    assert torch.equal(torch.cat([shard_columns(weight, IN // size, s) for s in shards(size)], dim=1), weight)


def test_parts_are_views() -> None:
    weight = draw(32, IN)
    assert shard_rows(weight, 8, Shard(1, 4)).data_ptr() == weight[8].data_ptr()


def test_what_cannot_be_dealt_out_is_refused() -> None:
    with pytest.raises(ValueError, match="30 entries cannot be cut into parts of 8"):
        shard_rows(draw(30, 2), 8, Shard(0, 4))
    with pytest.raises(ValueError, match="for 4 shards"):
        shard_rows(draw(24, 2), 8, Shard(0, 4))  # three parts for four ranks


def test_another_models_dimensions_are_refused_by_module() -> None:
    target = target_of(ShardKind.COLUMN, Shard(), [(16, 16), (8, 8)])
    with pytest.raises(ValueError, match=r"lora_a of linear\.0 has 25 features where the base model has 24"):
        shard_lora_a(target, 0, draw(RANK, 25))
    with pytest.raises(ValueError, match=r"lora_b of linear\.1 has 16"):
        shard_lora_b(target, 1, draw(16, RANK))
    with pytest.raises(ValueError, match=r"bias of linear\.1 has 7"):
        shard_bias(target, 1, draw(7))


# ----------------------------------------------------------------------------------- fully sharded, and block-diagonal


def fully(target: LoraTarget) -> LoraTarget:
    return replace(target, is_fully_sharded=True)


@SIZES
def test_fully_sharded_column_parts(size: int) -> None:
    """The rank is cut, filled up where it cannot be dealt out: x A^T of all ranks side by side goes through each B."""
    x, a, b = draw(TOKENS, IN), draw(RANK, IN), draw(32, RANK)
    targets = [fully(target_of(ShardKind.COLUMN, shard, [(32 // size, 32)])) for shard in shards(size)]
    cut = [shard_lora(target, 0, a, b) for target in targets]
    padded = -(-RANK // size) * size
    assert all(is_exchanged == (size > 1) for _, _, is_exchanged in cut)
    assert all(own_a.shape == (padded // size, IN) for own_a, _, _ in cut)
    h = torch.cat([x @ own_a.T for own_a, _, _ in cut], dim=1)
    torch.testing.assert_close(torch.cat([h @ own_b.T for _, own_b, _ in cut], dim=1), x @ a.T @ b.T)


@SIZES
def test_fully_sharded_row_parts(size: int) -> None:
    """The outputs are cut, too: the sum of x A^T over ranks goes through each B, to outputs of its own."""
    x, a, b = draw(TOKENS, IN), draw(RANK, IN), draw(16, RANK)
    targets = [fully(target_of(ShardKind.ROW, shard, [(16, 16)], IN // size)) for shard in shards(size)]
    cut = [shard_lora(target, 0, a, b) for target in targets]
    assert all(own_b.shape == (16 // size, RANK) for _, own_b, _ in cut)
    own_x = x.chunk(size, dim=1)
    h = sum((part @ own_a.T for part, (own_a, _, _) in zip(own_x, cut, strict=True)), torch.zeros(()))
    torch.testing.assert_close(torch.cat([h @ own_b.T for _, own_b, _ in cut], dim=1), x @ a.T @ b.T)


def blocks_of(num_blocks: int, rows: int, columns: int) -> torch.Tensor:
    return torch.block_diag(*draw(rows, columns // num_blocks).chunk(num_blocks))


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("num_blocks", [2, 4])
@SIZES
def test_block_diagonal_parts_exchange_nothing_where_blocks_match(size: int, num_blocks: int, is_full: bool) -> None:
    """Of a column-parallel linear B is so, of a row-parallel one A. More ranks than blocks: as any adapter."""
    x, rank, total = draw(TOKENS, IN), 8, torch.zeros(())
    a, b, outs = draw(rank, IN), blocks_of(num_blocks, 32, rank), []
    row_a, row_b = blocks_of(num_blocks, rank, IN), draw(16, rank)
    for shard in shards(size):
        column, row = (
            replace(each, is_fully_sharded=is_full)
            for each in (
                target_of(ShardKind.COLUMN, shard, [(32 // size, 32)]),
                target_of(ShardKind.ROW, shard, [(16, 16)], IN // size),
            )
        )
        cut, row_cut = shard_lora(column, 0, a, b, 1, num_blocks), shard_lora(row, 0, row_a, row_b, num_blocks)
        does_match = num_blocks % size == 0
        assert cut[2] == row_cut[2] == (is_full and not does_match)
        if does_match:
            assert cut[0].shape == (rank // size, IN)
            assert row_cut[1].shape == (16, rank // size)
            outs.append(x @ cut[0].T @ cut[1].T)
            total = total + x.chunk(size, dim=1)[shard.rank] @ row_cut[0].T @ row_cut[1].T
    if outs:
        torch.testing.assert_close(torch.cat(outs, dim=1), x @ a.T @ b.T)
        torch.testing.assert_close(total, x @ row_a.T @ row_b.T)


def test_a_head_that_several_ranks_have_takes_the_blocks_of_its_outputs() -> None:
    """Two kv heads on four ranks: each rank has one, which two of four blocks make."""
    a, b = draw(8, IN), blocks_of(4, 12, 8)
    for shard in shards(4):
        own_a, own_b, is_exchanged = shard_lora(fully(target_of(ShardKind.QKV, shard, [(6, 12)])), 0, a, b, 1, 4)
        head = shard.rank // 2
        assert not is_exchanged
        assert torch.equal(own_a, a[4 * head : 4 * head + 4])
        assert torch.equal(own_b, b[6 * head : 6 * head + 6, 4 * head : 4 * head + 4])


@given(
    size=st.sampled_from([1, 2, 4]),
    row_ids=st.lists(st.integers(0, 44), unique=True, min_size=1).map(sorted),
    kind=st.sampled_from([ShardKind.EMBEDDING, ShardKind.HEAD]),
)
def test_each_token_row_is_on_the_rank_of_its_token_and_ranks_have_equally_many(
    size: int, row_ids: list[int], kind: ShardKind
) -> None:
    """Of a vocabulary of 40; tokens beyond it are on the last rank."""
    ids, weight = torch.tensor(row_ids), 1.0 + torch.arange(2.0 * len(row_ids)).view(-1, 2)
    found, widths = {}, set()
    for shard in shards(size):
        if kind is ShardKind.HEAD:
            target = LoraTarget("head", 1, 2, 2, (LoraSlice("head", 0, 40 // size, 40),), kind, shard)
        else:
            target = LoraTarget("embedding", -1, 40 // size, 40, (LoraSlice("embedding", 0, 2, 2),), kind, shard)
        rows, local_ids = shard_token_rows(target, weight, ids)
        widths.add((len(rows), len(local_ids)))
        assert local_ids.tolist() == sorted(local_ids.tolist())
        for row, local_id in zip(rows, local_ids.tolist(), strict=True):
            if local_id == NO_TOKEN:
                assert not row.any()
                continue
            assert 0 <= local_id < 40 // size or shard.rank == size - 1
            found[local_id + shard.rank * 40 // size] = row.tolist()
    assert found == dict(zip(row_ids, weight.tolist(), strict=True))
    assert len(widths) == 1
