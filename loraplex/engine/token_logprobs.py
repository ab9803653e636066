"""Log probabilities of tokens, with their ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.core import Logprob, TokenLogprobs
from loraplex.kernels.protocols import SamplingOps


def token_logprobs(
    ops: SamplingOps, logits: Tensor, token_ids: Tensor, num_best: Sequence[int]
) -> list[dict[int, Logprob]]:
    """log softmax(logits [m, V]) of the `num_best[i]` best tokens of each row, by rank, and of `token_ids` [m] in any case.

    Rank: 1 + the number of tokens before this one in the order (value, descending; id, ascending).
    """
    log_mass = ops.log_sum_exp(logits)
    k = min(max(num_best, default=0), logits.shape[1])
    values, ids = ops.ordered_top_k(logits, k) if k else (logits[:, :0], token_ids[:, None][:, :0])
    best = zip((values - log_mass).tolist(), ids.tolist(), num_best, strict=True)
    result: list[dict[int, Logprob]] = []
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


@dataclass(frozen=True, slots=True)
class RankedTokens:
    """What `token_logprobs` says of rows [m], as tensors on their device: for one that runs beside the host.

    best_logprobs, best_ids: [m, k], by rank; chosen_ids, chosen_logprobs, chosen_ranks: [m].
    """

    best_logprobs: Tensor
    best_ids: Tensor
    chosen_ids: Tensor
    chosen_logprobs: Tensor
    chosen_ranks: Tensor

    @classmethod
    def of(cls, ops: SamplingOps, logits: Tensor, token_ids: Tensor, k: int) -> RankedTokens:
        """The k best tokens of logits [m, V] and `token_ids` [m]; nothing waits for the device."""
        log_mass = ops.log_sum_exp(logits)
        k = min(k, logits.shape[1])
        values, ids = ops.ordered_top_k(logits, k) if k else (logits[:, :0], token_ids[:, None][:, :0])
        chosen = logits.gather(1, token_ids[:, None])
        ranks = ops.token_ranks(logits, token_ids)
        return cls(values - log_mass, ids, token_ids, (chosen - log_mass)[:, 0], ranks)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.best_logprobs, self.best_ids, self.chosen_ids, self.chosen_logprobs, self.chosen_ranks

    def entries(self, num_best: Sequence[int]) -> list[TokenLogprobs]:
        """As `token_logprobs` gives them, of tensors on the host."""
        rows = zip(*(tensor.tolist() for tensor in self.tensors), num_best, strict=True)
        result: list[TokenLogprobs] = []
        for logprobs, ids, chosen_id, chosen_logprob, chosen_rank, count in rows:
            ranked = zip(ids[:count], logprobs[:count], strict=True)
            entries = {i: Logprob(value, rank) for rank, (i, value) in enumerate(ranked, 1)}
            entries.setdefault(chosen_id, Logprob(chosen_logprob, chosen_rank))
            result.append(entries)
        return result
