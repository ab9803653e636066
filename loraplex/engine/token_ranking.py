"""Searches in rows of logits that stock torch does slower, or leaves undefined at ties. Pure functions of tensors.

Tokens are ordered by (value, descending; id, ascending). Weights are whole numbers in floats with row sums up to 2^53.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from loraplex.core import Logprob, TokenLogprobs

_BLOCK = 128


def row_argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Per row of x [n, V]: the first id of the largest value, int64 [n], and that value [n]; NaN counts as largest.

    A vectorised maximum by blocks, then a search in one block: torch's own argmax is scalar on a CPU, 20 times slower.
    """
    block = _block_maxima(x, _BLOCK).argmax(-1, keepdim=True)
    ids = (block * _BLOCK + torch.arange(_BLOCK, device=x.device)).clamp_(max=x.shape[1] - 1)
    inside = x.gather(1, ids)
    place = inside.argmax(-1, keepdim=True)
    return ids.gather(1, place)[:, 0], inside.gather(1, place)[:, 0]


def _blocked(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """x [n, V] as a view [n, V // block, block], and what is left over [n, V % block]."""
    num_full = x.shape[1] // block
    return x[:, : num_full * block].reshape(len(x), num_full, block), x[:, num_full * block :]


def _block_maxima(x: Tensor, block: int) -> Tensor:
    full, rest = _blocked(x, block)
    return torch.cat([full.amax(-1), rest.amax(-1, keepdim=True)], 1) if rest.shape[1] else full.amax(-1)


def block_sums(x: Tensor) -> Tensor:
    """Sums over blocks of 128 of x [n, V], float64 [n, ceil(V / 128)]."""
    full, rest = _blocked(x, _BLOCK)
    sums = full.sum(-1, dtype=torch.float64)
    return torch.cat([sums, rest.sum(-1, keepdim=True, dtype=torch.float64)], 1) if rest.shape[1] else sums


def target_mass(total: Tensor, uniform: Tensor) -> Tensor:
    """floor(u * total), below `total` even when the product rounds up."""
    return torch.minimum((uniform * total).floor_(), total - 1)


def invert_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """First id whose inclusive prefix sum exceeds floor(u * total): weights [m, V], u [m, 1] -> int64 [m].

    Finds the block of 128 first, then the id in it. An id of weight 0 is never drawn.
    """
    mass = block_sums(weights).cumsum(-1)
    target = target_mass(mass[:, -1:], uniform)
    block = torch.searchsorted(mass, target, right=True)
    before = torch.where(block > 0, mass.gather(1, (block - 1).clamp_(min=0)), 0.0)
    ids = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(1, ids.clamp(max=weights.shape[1] - 1)).double().cumsum(-1)
    place = torch.searchsorted(inside, target - before, right=True)
    return ids.gather(1, place)[:, 0]


def ordered_top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The first k tokens of each row of x [m, V] in their order: values [m, k], ids int64 [m, k]."""
    if k >= x.shape[1]:
        return torch.sort(x, dim=-1, descending=True, stable=True)
    values, ids = _top_k_any_order(x, k + 1)
    is_tie_cut = values[:, k - 1] == values[:, k]
    values, ids = values[:, :k], ids[:, :k]
    for row in is_tie_cut.nonzero()[:, 0].tolist():
        last = values[row, k - 1]
        num_above = int((values[row] > last).sum())
        ids[row, num_above:] = (x[row] == last).nonzero()[: k - num_above, 0]
    ids = ids.sort(-1).values
    values, order = torch.sort(x.gather(1, ids), dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _top_k_any_order(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """torch.topk; for a small k among the k blocks of the largest maxima, which hold an answer and are far less to search."""
    block = 128 if k <= 64 else 32
    if k > 256 or x.shape[1] < 4 * k * block:
        return torch.topk(x, k, dim=-1)
    blocks = _block_maxima(x, block).topk(k, dim=-1).indices
    ids = (blocks[..., None] * block + torch.arange(block, device=x.device)).flatten(1)
    inside = x.gather(1, ids.clamp(max=x.shape[1] - 1)).masked_fill_(ids >= x.shape[1], -torch.inf)
    values, places = inside.topk(k, dim=-1)
    return values, ids.gather(1, places)


def sort_descending(x: Tensor) -> Tensor:
    """Values of each row of x [m, V], without ids: numpy's vectorised sort is four times torch's on a CPU."""
    if x.device.type != "cpu":
        return x.sort(dim=-1, descending=True).values
    return torch.from_numpy(np.sort(x.numpy(), axis=-1)).flip(-1)


def keep_prefix(x: Tensor, weights: Tensor, last: Tensor, num_last: Tensor) -> Tensor:
    """Zeroes, in place, the weights [m, V] of all tokens of x [m, V] behind the `num_last`-th one of value `last` (both [m, 1])."""
    weights.masked_fill_(x < last, 0)
    is_last = x == last
    for row in (is_last.sum(-1, keepdim=True) > num_last).nonzero()[:, 0].tolist():
        weights[row, is_last[row].nonzero()[int(num_last[row]) :, 0]] = 0
    return weights


def token_logprobs(logits: Tensor, token_ids: Tensor, num_best: Sequence[int]) -> list[TokenLogprobs]:
    """log softmax(logits [m, V]) of the `num_best[i]` best tokens of each row, by rank, and of `token_ids` [m] in any case.

    Rank: 1 + the number of tokens before this one in the order.
    """
    top = logits.amax(-1, keepdim=True)
    log_mass = block_sums((logits - top).exp_()).sum(-1, keepdim=True).log() + top.double()
    k = min(max(num_best, default=0), logits.shape[1])
    values, ids = ordered_top_k(logits, k) if k else (logits[:, :0], token_ids[:, None][:, :0])
    best = zip((values - log_mass).tolist(), ids.tolist(), num_best, strict=True)
    result: list[TokenLogprobs] = []
    for row_values, row_ids, count in best:
        ranked = zip(row_ids[:count], row_values[:count], strict=True)
        result.append({i: Logprob(value, rank) for rank, (i, value) in enumerate(ranked, 1)})
    chosen = token_ids.tolist()
    rest = [row for row, entries in enumerate(result) if chosen[row] not in entries]
    if rest:
        rows = torch.tensor(rest, device=logits.device)
        logprobs = (logits[rows, token_ids[rows]] - log_mass[rows, 0]).tolist()
        for row, logprob, rank in zip(rest, logprobs, _ranks(logits[rows], token_ids[rows]), strict=True):
            result[row][chosen[row]] = Logprob(logprob, rank)
    return result


def _ranks(x: Tensor, token_ids: Tensor) -> list[int]:
    chosen = x.gather(1, token_ids[:, None])
    is_lower_id = torch.arange(x.shape[1], device=x.device) < token_ids[:, None]
    ranks: list[int] = (1 + ((x > chosen) | ((x == chosen) & is_lower_id)).sum(-1)).tolist()
    return ranks
