"""Log probabilities of tokens, with their ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex.core import Logprob, TokenLogprobs
from loraplex.kernels.ops import KernelBackend


def token_logprobs(
    ops: KernelBackend, logits: Tensor, token_ids: Tensor, num_best: Sequence[int]
) -> list[TokenLogprobs]:
    """log softmax(logits [m, V]) of the `num_best[i]` best tokens of each row, by rank, and of `token_ids` [m] in any case.

    Rank: 1 + the number of tokens before this one in the order (value, descending; id, ascending).
    """
    log_mass = ops.log_sum_exp(logits)
    k = min(max(num_best, default=0), logits.shape[1])
    values, ids = ops.ordered_top_k(logits, k) if k else (logits[:, :0], token_ids[:, None][:, :0])
    best = zip((values - log_mass).tolist(), ids.tolist(), num_best, strict=True)
    result: list[TokenLogprobs] = []
    for row_values, row_ids, count in best:
        ranked = zip(row_ids[:count], row_values[:count], strict=True)
        result.append({i: Logprob(value, rank) for rank, (i, value) in enumerate(ranked, 1)})
    chosen = token_ids.tolist()
    rest = [row for row, entries in enumerate(result) if chosen[row] not in entries]
    if rest:
        rows = torch.tensor(rest, device=logits.device)
        of_rest = logits if len(rest) == len(logits) else logits[rows]
        logprobs = (logits[rows, token_ids[rows]] - log_mass[rows, 0]).tolist()
        ranks = ops.token_ranks(of_rest, token_ids[rows]).tolist()
        for row, logprob, rank in zip(rest, logprobs, ranks, strict=True):
            result[row][chosen[row]] = Logprob(logprob, rank)
    return result
