"""Operators of token_ranking.py for a device that runs beside the host: the same results, bit for bit, and nothing
waits for them.

No value on the device decides on the host what is called next. Rows that hold NaN give an id inside the vocabulary or
next to it, and mean nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor


def runs_beside_host(x: Tensor) -> bool:
    """Whether what is called on the tensor is only queued, so that to look at a value is to wait."""
    return x.device.type != "cpu"


def row_argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Per row of x [n, V]: first id of the largest value, int64 [n], and that value [n], NaN being largest. One
    pass."""
    values, ids = x.max(-1)
    return ids, values


def ordered_top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The first k tokens of each row of x [m, V], float32, in their order: values [m, k], ids int64 [m, k].

    key = order-preserving bits of the value, then the id backwards: no two are equal, so the order of a library's ties
    is not asked for. The k blocks that come first by (largest value, number) hold the first k tokens: each of them has
    one that comes before all of the blocks behind it.
    """
    k = min(k, x.shape[1])
    block = 128 if k <= 64 else 32
    if k > 256 or x.shape[1] < 4 * k * block:
        ids = torch.arange(x.shape[1], device=x.device).expand_as(x)
        return _first_by_key(x, ids, k)
    padding = -x.shape[1] % block
    padded = torch.nn.functional.pad(x, (0, padding), value=-torch.inf)
    maxima = padded.view(len(x), -1, block).amax(-1)
    _, blocks = _first_by_key(maxima, torch.arange(maxima.shape[1], device=x.device).expand_as(maxima), k)
    ids = (blocks[..., None] * block + torch.arange(block, device=x.device)).flatten(1)
    return _first_by_key(padded.gather(1, ids), ids, k)


def _first_by_key(x: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Of values x [m, n] of the tokens `ids`, ids < 2^31."""
    bits = (x + 0.0).view(torch.int32)  # -0.0 equals 0.0: they become one
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32 | (0x7FFFFFFF - ids)
    places = keys.topk(k, dim=-1).indices
    return x.gather(1, places), ids.gather(1, places)


def keep_prefix(x: Tensor, weights: Tensor, last: Tensor, num_last: Tensor) -> Tensor:
    """Zeroes, in place, weights [m, V] of tokens of x [m, V] behind the `num_last`-th of value `last` (both [m, 1])."""
    is_last = x == last
    return weights.masked_fill_((x < last) | (is_last & (is_last.cumsum(-1) > num_last)), 0)
