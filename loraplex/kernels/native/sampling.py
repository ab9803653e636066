"""From logits to a token (csrc/sampling.cpp): the operators of kernels/token_ranking.py, with the same results.

Weights decide tokens, so their exponentials are torch's own: every bit of a weight is that of stock torch.
"""

from __future__ import annotations

import torch

from loraplex.kernels.native.library import NativeLibrary
from loraplex.kernels.token_ranking import WeightRule


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x [n, V] float32 with dense rows."""
    assert x.dtype == torch.float32, x.dtype
    return x if x.stride(1) == 1 else x.contiguous()


def mask_logits(
    library: NativeLibrary, logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor, num_threads: int
) -> None:
    """Row rows[i] of logits [n, V] += 0 where bitmask [m, W] allows a token, -inf elsewhere; in place."""
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, (logits.dtype, logits.stride())  # noqa: PT018
    assert (rows.dtype, bitmask.dtype) == (torch.int64, torch.int32)
    rows, bitmask = rows.contiguous(), bitmask.contiguous()
    library.functions.loraplex_mask_logits(
        logits.data_ptr(),
        logits.stride(0),
        logits.shape[1],
        rows.data_ptr(),
        bitmask.data_ptr(),
        *bitmask.shape,
        num_threads,
    )


def row_argmax(library: NativeLibrary, x: torch.Tensor, num_threads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row of x [n, V]: the first id of the largest value (NaN counts as largest) and that value."""
    x = _rows(x)
    n, vocab_size = x.shape
    ids, values = torch.empty(n, dtype=torch.int64), torch.empty(n)
    library.functions.loraplex_argmax(
        x.data_ptr(), x.stride(0), n, vocab_size, ids.data_ptr(), values.data_ptr(), num_threads
    )
    return ids, values


def ordered_top_k(
    library: NativeLibrary, x: torch.Tensor, k: int, num_threads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first k tokens of each row of x [m, V] in their order: values [m, k], ids int64 [m, k]."""
    x = _rows(x)
    m, vocab_size = x.shape
    k = min(k, vocab_size)
    values, ids = torch.empty(m, k), torch.empty(m, k, dtype=torch.int64)
    library.functions.loraplex_top_k(
        x.data_ptr(), x.stride(0), m, vocab_size, k, ids.data_ptr(), values.data_ptr(), num_threads
    )
    return values, ids


def token_weights(
    library: NativeLibrary, logits: torch.Tensor, rule: WeightRule, num_threads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the weights [m, V] of all tokens, their sums float64 [m, 1])"""
    logits = _rows(logits)
    m, vocab_size = logits.shape
    top, temperature = rule.top.contiguous(), rule.temperature.contiguous()
    weights, total = torch.empty(m, vocab_size), torch.empty(m, 1, dtype=torch.float64)
    library.functions.loraplex_scale_logits(
        logits.data_ptr(),
        logits.stride(0),
        m,
        vocab_size,
        top.data_ptr(),
        temperature.data_ptr(),
        weights.data_ptr(),
        num_threads,
    )
    weights.exp_()
    library.functions.loraplex_floor_weights(
        weights.data_ptr(), m, vocab_size, rule.scale, total.data_ptr(), num_threads
    )
    return weights, total


def invert_cdf(
    library: NativeLibrary, weights: torch.Tensor, least: torch.Tensor | None, uniform: torch.Tensor, num_threads: int
) -> torch.Tensor:
    """First id whose inclusive prefix sum exceeds floor(u * total); weights below `least` [m, 1] count as 0."""
    weights, uniform = weights.contiguous(), uniform.contiguous()
    m, vocab_size = weights.shape
    least = torch.zeros(m) if least is None else least.contiguous()
    ids = torch.empty(m, dtype=torch.int64)
    library.functions.loraplex_invert_cdf(
        weights.data_ptr(), m, vocab_size, least.data_ptr(), uniform.data_ptr(), ids.data_ptr(), num_threads
    )
    return ids


def keep_nucleus(
    library: NativeLibrary, logits: torch.Tensor, weights: torch.Tensor, wanted: torch.Tensor, num_threads: int
) -> torch.Tensor:
    """`weights` with 0 behind the shortest prefix of the order of mass `wanted` float64 [m, 1] or more; in place."""
    logits, wanted = _rows(logits), wanted.contiguous()
    assert weights.is_contiguous() and wanted.dtype == torch.float64  # noqa: PT018
    library.functions.loraplex_keep_prefix(
        logits.data_ptr(), logits.stride(0), weights.data_ptr(), *weights.shape, wanted.data_ptr(), num_threads
    )
    return weights


def log_sum_exp(library: NativeLibrary, logits: torch.Tensor, num_threads: int) -> torch.Tensor:
    """log(sum(exp(logits))) of each row, float64 [m, 1]."""
    logits = _rows(logits)
    out = torch.empty(len(logits), 1, dtype=torch.float64)
    library.functions.loraplex_log_sum_exp(
        logits.data_ptr(), logits.stride(0), *logits.shape, out.data_ptr(), num_threads
    )
    return out


def token_ranks(
    library: NativeLibrary, logits: torch.Tensor, token_ids: torch.Tensor, num_threads: int
) -> torch.Tensor:
    """1 + the number of tokens before `token_ids` [m] in the order, int64 [m]."""
    logits, token_ids = _rows(logits), token_ids.contiguous()
    ranks = torch.empty_like(token_ids)
    library.functions.loraplex_ranks(
        logits.data_ptr(), logits.stride(0), *logits.shape, token_ids.data_ptr(), ranks.data_ptr(), num_threads
    )
    return ranks
