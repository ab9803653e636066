"""From logits to a token, in stock torch: what the sampler asks of a kernel backend.

Tokens are ordered by (value, descending; id, ascending). Weights are whole numbers in floats with row sums up to 2^53,
so sums of them are exact in any order. Searches here are those that stock torch does slower, or leaves undefined at
ties. Tensors on another device than a CPU are searched by device_ranking.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loraplex.kernels import device_ranking

_BLOCK = 128
_BIAS_OF_BYTE = torch.from_numpy(
    np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf)
).float()
"""[256, 8]: what eight bits of a mask add to their logits."""


@dataclass(frozen=True, slots=True)
class WeightRule:
    """From logits of rows [m, V] to weights: maxima `top` [m, 1], `temperature` [m, 1], the best token's weight
    `scale`."""

    top: Tensor
    temperature: Tensor
    scale: float

    def of(self, values: Tensor) -> Tensor:
        """floor(scale * exp((values - top) / temperature)), float32 like values [m, k]."""
        return (values - self.top).div_(self.temperature).exp_().mul_(self.scale).floor_()


def mask_logits(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """Row rows[i] of logits [n, V] += 0 where bitmask [m, W] allows a token, -inf elsewhere; in place."""
    bits = bitmask.view(torch.uint8).int()
    bias = torch.nn.functional.embedding(bits, _BIAS_OF_BYTE.to(logits.device)).view(len(rows), -1)
    for row, line in zip(rows.tolist(), bias[:, : logits.shape[1]], strict=True):
        logits[row, : len(line)] += line
        logits[row, len(line) :] += -torch.inf


def row_argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Per row of x [n, V]: the first id of the largest value, int64 [n], and that value [n]; NaN counts as largest.

    A vectorised maximum by blocks, then a search in one block: torch's own argmax is scalar on a CPU, 20 times slower.
    """
    if device_ranking.runs_beside_host(x):
        return device_ranking.row_argmax(x)
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


def token_weights(logits: Tensor, rule: WeightRule) -> tuple[Tensor, Tensor]:
    """(the weights [m, V] of all tokens, a new tensor; their sums float64 [m, 1])"""
    weights = rule.of(logits)
    return weights, block_sums(weights).sum(-1, keepdim=True)


def invert_cdf(weights: Tensor, least: Tensor | None, uniform: Tensor) -> Tensor:
    """First id whose inclusive prefix sum exceeds floor(u * total): weights [m, V], u float64 [m, 1] -> int64 [m].

    Weights below `least` [m, 1] count as 0 (and may become 0). Finds the block of 128 first, then the id in it. An id
    of weight 0 is never drawn.
    """
    if least is not None:
        weights.masked_fill_(weights < least, 0)
    mass = block_sums(weights).cumsum(-1)
    target = target_mass(mass[:, -1:], uniform)
    block = torch.searchsorted(mass, target, right=True).clamp_(max=mass.shape[1] - 1)  # beyond it for NaN alone
    before = torch.where(block > 0, mass.gather(1, (block - 1).clamp_(min=0)), 0.0)
    ids = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(1, ids.clamp(max=weights.shape[1] - 1)).double().cumsum(-1)
    place = torch.searchsorted(inside, target - before, right=True).clamp_(max=_BLOCK - 1)
    return ids.gather(1, place)[:, 0]


def ordered_top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The first k tokens of each row of x [m, V] in their order: values [m, k], ids int64 [m, k]."""
    if device_ranking.runs_beside_host(x):
        return device_ranking.ordered_top_k(x, k)
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
    """torch.topk; for a small k among the k blocks of the largest maxima, which hold an answer and are far fewer."""
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
    if device_ranking.runs_beside_host(x):
        return x.sort(dim=-1, descending=True).values
    return torch.from_numpy(np.sort(x.numpy(), axis=-1)).flip(-1)


def keep_prefix(x: Tensor, weights: Tensor, last: Tensor, num_last: Tensor) -> Tensor:
    """Zeroes, in place, weights [m, V] of tokens of x [m, V] behind the `num_last`-th of value `last` (both [m, 1])."""
    if device_ranking.runs_beside_host(x):
        return device_ranking.keep_prefix(x, weights, last, num_last)
    weights.masked_fill_(x < last, 0)
    is_last = x == last
    for row in (is_last.sum(-1, keepdim=True) > num_last).nonzero()[:, 0].tolist():
        weights[row, is_last[row].nonzero()[int(num_last[row]) :, 0]] = 0
    return weights


def keep_nucleus(logits: Tensor, weights: Tensor, wanted: Tensor, rule: WeightRule) -> Tensor:
    """`weights` [m, V] with 0 behind the shortest prefix of mass `wanted` float64 [m, 1] or more; in place."""
    values = sort_descending(logits)
    sorted_weights = rule.of(values).double()
    size = (sorted_weights.cumsum(-1) - sorted_weights < wanted).sum(-1, keepdim=True)
    last = values.gather(1, (size - 1).clamp_(min=0))  # 0 for NaN alone
    return keep_prefix(logits, weights, last, size - (values > last).sum(-1, keepdim=True))


def log_sum_exp(logits: Tensor) -> Tensor:
    """log(sum(exp(logits))) of each row, float64 [m, 1]."""
    top = logits.amax(-1, keepdim=True)
    return block_sums((logits - top).exp_()).sum(-1, keepdim=True).log() + top.double()


def token_ranks(logits: Tensor, token_ids: Tensor) -> Tensor:
    """1 + the number of tokens before `token_ids` [m] in the order, int64 [m]."""
    chosen = logits.gather(1, token_ids[:, None])
    is_lower_id = torch.arange(logits.shape[1], device=logits.device) < token_ids[:, None]
    return 1 + ((logits > chosen) | ((logits == chosen) & is_lower_id)).sum(-1)


class StockSampling:
    """The operators of the sampler as a backend has them."""

    mask_logits = staticmethod(mask_logits)
    row_argmax = staticmethod(row_argmax)
    ordered_top_k = staticmethod(ordered_top_k)
    token_weights = staticmethod(token_weights)
    invert_cdf = staticmethod(invert_cdf)
    keep_nucleus = staticmethod(keep_nucleus)
    log_sum_exp = staticmethod(log_sum_exp)
    token_ranks = staticmethod(token_ranks)
