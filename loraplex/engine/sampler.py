"""From logits to tokens, for a whole batch at once.

    logits -> mask -> penalties -> logit_bias -> min_tokens -> temperature -> top_k -> top_p -> min_p -> one draw

Tokens are ordered by (logit, descending; id, ascending), so a tie never depends on a library's sort. top_k keeps the
first k of that order; top_p the shortest prefix whose mass is at least top_p (of what top_k left); min_p the tokens
whose probability is at least min_p times the largest. Each keeps at least one token. Below a temperature of 1e-5
(vLLM's bound) a row is greedy: the first token of the order.

The draw is the inverse CDF at u = hash(seed, position), one number per row. Probabilities enter it as whole numbers

    w[i] = floor(2^s * exp((logits[i] - max) / temperature)),   s = 53 - ceil(log2(vocab_size + 1))

held in floats. Their sums stay below 2^53, so they are exact in any order: a row's token depends on its logits,
parameters, seed and position alone, never on its neighbours, on the size of the batch or on how a device splits a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraplex.core import Logprob, SamplingParams, TokenLogprobs
from loraplex.engine.sampling_batch import (
    Bools,
    Float32s,
    Float64s,
    Int64s,
    SamplingBatch,
    SamplingRow,
    SamplingState,
    edited_logits,
    mask_logits,
    uniforms,
)
from loraplex.errors import InvalidRequestError
from loraplex.kernels import device_ranking
from loraplex.kernels.device_copies import Download, upload
from loraplex.kernels.protocols import SamplingOps
from loraplex.kernels.token_ranking import WeightRule, target_mass
from loraplex.kernels.torch_ops import TorchBackend

__all__ = [
    "DrawnTokens",
    "Sampler",
    "SamplerOutput",
    "SamplingBatch",
    "SamplingRow",
    "SamplingState",
    "validate_against_vocab",
]

GREEDY_BELOW = 1e-5
_FEW = 128
_MANY = 1024
"""A larger top_k is not sorted for: all but the whole vocabulary in order would cost a hundred times a draw."""

_FLAT = 1e30
"""A temperature at which every possible token weighs the same."""

_MAX_ELEMENTS = 2**24


def validate_against_vocab(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequestError when `logit_bias` names a token id that the model does not have."""
    unknown = sorted(token_id for token_id in params.logit_bias if not 0 <= token_id < vocab_size)
    if unknown:
        shown = ", ".join(map(str, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
        raise InvalidRequestError(
            f"logit_bias has {len(unknown)} token id(s) outside the vocabulary 0..{vocab_size - 1}: {shown}; remove "
            "them",
            param="logit_bias",
        )


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """token_ids int64 [n]; logprobs [n], None where not asked.

    failed_rows: rows whose logits hold NaN or no finite maximum, as the model gave them. barred_rows: rows of which
    the request's own min_tokens or mask left no token. The token of either is 0: its request must end with an error.
    """

    token_ids: Int64s
    logprobs: tuple[TokenLogprobs | None, ...]
    failed_rows: tuple[int, ...] = ()
    barred_rows: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, token_ids: Int64s, logprobs: Sequence[TokenLogprobs | None], top: Float32s, batch: SamplingBatch
    ) -> Self:
        """top [n]: the largest logit of each row after its edits (sampling_batch.py says what those cannot do)."""
        without_token = np.flatnonzero(~np.isfinite(top)).tolist()
        barred = tuple(i for i in without_token if top[i] < 0 and batch.rows[i].may_bar_all)
        return cls(token_ids, tuple(logprobs), tuple(i for i in without_token if i not in barred), barred)

    @classmethod
    def merged(cls, parts: Sequence[tuple[Int64s, DrawnTokens]], num_rows: int) -> Self:
        """Of the places of rows, and what was drawn for them."""
        token_ids = np.zeros(num_rows, np.int64)
        logprobs: list[TokenLogprobs | None] = [None] * num_rows
        failed: list[int] = []
        barred: list[int] = []
        for places, drawn in parts:
            output = drawn.result()
            token_ids[places] = output.token_ids
            for place, entries in zip(places.tolist(), output.logprobs, strict=True):
                logprobs[place] = entries
            failed += places[list(output.failed_rows)].tolist()
            barred += places[list(output.barred_rows)].tolist()
        return cls(token_ids, tuple(logprobs), tuple(sorted(failed)), tuple(sorted(barred)))


class DrawnTokens:
    """What a call draws, on its way to the host. `token_ids`: int64 [n] on the device of the logits, for the next step
    to go on with."""

    def __init__(self, token_ids: Tensor, finish: Callable[[], SamplerOutput]) -> None:
        self.token_ids = token_ids
        self._finish = finish

    @classmethod
    def joined(cls, parts: Sequence[tuple[Int64s, DrawnTokens]]) -> Self:
        """Of the places of rows, and what was drawn for them."""
        order = np.argsort(np.concatenate([places for places, _ in parts]))
        token_ids = torch.cat([drawn.token_ids for _, drawn in parts])
        token_ids = token_ids.index_select(0, upload(order, token_ids.device))
        return cls(token_ids, lambda: SamplerOutput.merged(parts, len(order)))

    def result(self) -> SamplerOutput:
        """Waits until it is there, and for nothing that was launched later."""
        return self._finish()


class Sampler:
    """Draws one token per row of logits. It holds no state: a call is a function of its arguments.

    Every backend's `ops` draw the same tokens. On a CPU what is drawn decides what is computed next (a nucleus of the
    whole vocabulary only for rows that need it); on another device nothing waits: `launch` returns when everything is
    queued.
    """

    def __init__(self, vocab_size: int, ops: SamplingOps | None = None) -> None:
        assert 0 < vocab_size < 2**29, f"vocab_size {vocab_size}"
        self.vocab_size = vocab_size
        self.ops = ops or TorchBackend()
        self._scale = 2.0 ** (53 - vocab_size.bit_length())

    def sample(self, logits: Tensor, rows: SamplingBatch | Sequence[SamplingRow]) -> SamplerOutput:
        """`launch`, and its result."""
        return self.launch(logits, rows).result()

    def launch(self, logits: Tensor, rows: SamplingBatch | Sequence[SamplingRow]) -> DrawnTokens:
        """logits [n, vocab_size] float32 on any device; contiguous ones are edited in place, and restored
        but for masks."""
        batch = rows if isinstance(rows, SamplingBatch) else SamplingBatch.build(rows)
        assert logits.shape == (len(batch.rows), self.vocab_size), (
            f"logits {tuple(logits.shape)}, {len(batch.rows)} rows"
        )
        if batch.edited and len(batch.rows) > self.rows_at_once:  # what was there before an edit is kept for the draw
            return DrawnTokens.joined(
                [
                    (rows, self.launch(logits[rows[0] : rows[-1] + 1], [batch.rows[i] for i in rows]))
                    for rows in self._chunks(np.arange(len(batch.rows)))
                ]
            )
        with torch.inference_mode():
            logits = logits.float().contiguous()
            mask_logits(self.ops, logits, batch)
            draw = self._draw_beside_host if device_ranking.runs_beside_host(logits) else self._draw_and_wait
            return draw(logits, batch)

    def launch_by_vocabulary(
        self, logits: Tensor, rows: Sequence[SamplingRow], vocab_sizes: Sequence[int]
    ) -> DrawnTokens:
        """`launch` of rows [n, V] whose vocabularies end at different tokens, with -inf behind: a row draws what it
        would draw alone. All with added tokens are in one call, however many numbers of them adapters chose; in two
        where their weights have different scales.
        """
        sizes = np.maximum(np.array(vocab_sizes, np.int64), self.vocab_size)
        kinds = np.array([0 if size == self.vocab_size else size.bit_length() for size in sizes.tolist()])
        parts: list[tuple[Int64s, DrawnTokens]] = []
        for kind in np.unique(kinds).tolist():
            places = np.flatnonzero(kinds == kind)
            width = int(sizes[places].max())
            sampler = self if width == self.vocab_size else Sampler(width, self.ops)
            taken = _take(logits, places)
            if width < logits.shape[1]:
                taken = taken[:, :width].clone(memory_format=torch.contiguous_format)
            of_kind = [
                rows[i] if size == width else replace(rows[i], vocab_size=size)
                for i, size in zip(places.tolist(), sizes[places].tolist(), strict=True)
            ]
            parts.append((places, sampler.launch(taken, of_kind)))
        return DrawnTokens.joined(parts)

    def prompt_logprobs(self, logits: Tensor, next_ids: Sequence[int] | Tensor, k: int) -> tuple[TokenLogprobs, ...]:
        """logits [p, vocab_size] at prompt positions, next_ids [p] the prompt's next tokens; and the k best."""
        with torch.inference_mode():
            chosen = torch.as_tensor(next_ids, dtype=torch.int64, device=logits.device)
            result: list[TokenLogprobs] = []
            for rows in self._chunks(np.arange(len(chosen))):
                result += token_logprobs(self.ops, _take(logits, rows).float(), _take(chosen, rows), [k] * len(rows))
        return tuple(result)

    def launch_prompt_logprobs(
        self, logits: Tensor, next_ids: Sequence[int], k: int
    ) -> Callable[[], tuple[TokenLogprobs, ...]]:
        """`prompt_logprobs`; call what it returns to get them."""
        if not device_ranking.runs_beside_host(logits):
            known = self.prompt_logprobs(logits, next_ids, k)
            return lambda: known
        with torch.inference_mode():
            chosen = upload(np.array(next_ids, np.int64), logits.device)
            ranked = [
                RankedTokens.of(self.ops, _take(logits, rows).float(), _take(chosen, rows), k)
                for rows in self._chunks(np.arange(len(next_ids)))
            ]
            download = _LogprobsDownload(ranked, ())
        return lambda: tuple(download.entries([k] * len(next_ids)))

    # ------------------------------------------------------------------------------------------------------ on the host

    def _draw_and_wait(self, logits: Tensor, batch: SamplingBatch) -> DrawnTokens:
        if not batch.rows:
            return DrawnTokens(torch.zeros(0, dtype=torch.int64), lambda: SamplerOutput(np.zeros(0, np.int64), ()))
        with edited_logits(logits, batch):
            token_ids, top = self._choose(logits, batch)
        logprobs = self._row_logprobs(logits, token_ids, np.isfinite(top), batch)
        output = SamplerOutput.of(token_ids, logprobs, top, batch)
        return DrawnTokens(torch.from_numpy(token_ids), lambda: output)

    def _choose(self, logits: Tensor, batch: SamplingBatch) -> tuple[Int64s, Float32s]:
        """A token of each row, and its largest logit."""
        best, top = self.ops.row_argmax(logits)
        token_ids, largest = best.cpu().numpy().copy(), top.cpu().numpy()
        has_token: Bools = np.isfinite(largest)
        token_ids[~has_token] = 0
        for rows, draw in self._draws(batch, (batch.temperature >= GREEDY_BELOW) & has_token):
            token_ids[rows] = draw(_Draw.of(logits, top, batch, rows, self._scale)).cpu().numpy()
        return token_ids, largest

    def _row_logprobs(
        self, logits: Tensor, token_ids: Int64s, has_token: Bools, batch: SamplingBatch
    ) -> tuple[TokenLogprobs | None, ...]:
        result: list[TokenLogprobs | None] = [None] * len(batch.rows)
        for rows in self._chunks(np.array([i for i in batch.with_logprobs if has_token[i]], np.int64)):
            asking, taken = [batch.rows[i] for i in rows], _take(logits, rows)
            chosen = torch.from_numpy(token_ids[rows]).to(logits.device)
            num_best, log_mass = [row.num_logprobs for row in asking], _log_mass(self.ops, taken, asking)
            for i, entries in zip(rows, token_logprobs(self.ops, taken, chosen, num_best, log_mass), strict=True):
                result[i] = entries
        return tuple(result)

    # -------------------------------------------------------------------------------------------------- beside the host

    def _draw_beside_host(self, logits: Tensor, batch: SamplingBatch) -> DrawnTokens:
        with edited_logits(logits, batch):
            best, top = self.ops.row_argmax(logits)
            for rows, draw in self._draws(batch, batch.temperature >= GREEDY_BELOW):
                drawn = draw(_Draw.of(logits, top, batch, rows, self._scale))
                best = best.index_copy(0, upload(rows, logits.device), drawn)
        token_ids = best.masked_fill(~top.isfinite(), 0)
        with_logprobs = np.array(batch.with_logprobs, np.int64)
        ranked = []
        for rows in self._chunks(with_logprobs):
            asking, taken = [batch.rows[i] for i in rows], _take(logits, rows)
            k, log_mass = max(row.num_logprobs for row in asking), _log_mass(self.ops, taken, asking)
            ranked.append(RankedTokens.of(self.ops, taken, _take(token_ids, rows), k, log_mass))
        download = _LogprobsDownload(ranked, (token_ids, top))

        def finish() -> SamplerOutput:
            found, largest = download.others()
            logprobs: list[TokenLogprobs | None] = [None] * len(batch.rows)
            num_best = [batch.rows[i].num_logprobs for i in batch.with_logprobs]
            for i, entries in zip(batch.with_logprobs, download.entries(num_best), strict=True):
                logprobs[i] = entries if np.isfinite(largest[i]) else None
            return SamplerOutput.of(found, logprobs, largest, batch)

        return DrawnTokens(token_ids, finish)

    # -------------------------------------------------------------------------------------------------------- the draws

    def _draws(self, batch: SamplingBatch, is_random: Bools) -> Iterator[tuple[Int64s, Callable[[_Draw], Tensor]]]:
        """Rows that draw at random, by the way in which they do: the parameters alone decide."""
        if not is_random.any():
            return
        top_k = np.where(batch.top_k < self.vocab_size, batch.top_k, 0)
        is_free = (top_k == 0) & (batch.top_p >= 1)
        for wanted, draw in (
            (is_free, self._draw_free),
            ((top_k > 0) & (top_k <= _FEW), self._draw_top_k),
            ((top_k > _FEW) & (top_k <= _MANY), self._draw_top_k),
            (top_k > _MANY, self._draw_large_top_k),
            ((top_k == 0) & ~is_free, self._draw_top_p),
        ):
            for rows in self._chunks(np.flatnonzero(is_random & wanted)):
                yield rows, draw

    @property
    def rows_at_once(self) -> int:
        """So many that a temporary stays below 64 MiB."""
        return max(1, _MAX_ELEMENTS // self.vocab_size)

    def _chunks(self, rows: Int64s) -> Iterator[Int64s]:
        size = self.rows_at_once
        return (rows[start : start + size] for start in range(0, len(rows), size))

    def _draw_free(self, draw: _Draw) -> Tensor:
        """Neither top_k nor top_p: over the vocabulary in the order of ids."""
        weights, _ = self.ops.token_weights(draw.logits, draw.rule)
        return self.ops.invert_cdf(weights, draw.least, draw.uniform)

    def _draw_top_k(self, draw: _Draw) -> Tensor:
        """Over the best tokens in their order."""
        top_k = upload(draw.top_k, draw.logits.device)[:, None]
        values, ids = self.ops.ordered_top_k(draw.logits, int(draw.top_k.max()))
        weights = draw.rule.of(values).double()
        weights *= torch.arange(values.shape[1], device=values.device) < top_k
        return _draw_prefix(draw, weights, ids, draw.top_p * weights.sum(-1, keepdim=True))

    def _draw_large_top_k(self, draw: _Draw) -> Tensor:
        """Over the best tokens in the order of ids: the prefix that has the mass top_k where all weigh 1."""
        logits, rule = draw.logits, draw.rule
        flat = WeightRule(rule.top, torch.full_like(rule.temperature, _FLAT), 1.0)
        kept, num_possible = self.ops.token_weights(logits, flat)
        top_k = upload(draw.top_k.astype(np.float64), logits.device)[:, None]
        kept = self.ops.keep_nucleus(logits, kept, torch.minimum(top_k, num_possible), flat)
        weights = self.ops.token_weights(logits, rule)[0] * kept
        wanted = draw.top_p * weights.sum(-1, keepdim=True, dtype=torch.float64)
        return self.ops.invert_cdf(self.ops.keep_nucleus(logits, weights, wanted, rule), draw.least, draw.uniform)

    def _draw_top_p(self, draw: _Draw) -> Tensor:
        """Over the best tokens in their order where 128 of them suffice, else over the vocabulary in the order of ids.

        Where nothing may wait for the device: both, for every row.
        """
        of_vocab, mass = self.ops.token_weights(draw.logits, draw.rule)
        wanted = draw.top_p * mass
        values, ids = self.ops.ordered_top_k(draw.logits, min(_FEW, self.vocab_size))
        weights = draw.rule.of(values).double()
        token_ids = _draw_prefix(draw, weights, ids, wanted)
        lacks_mass = weights.sum(-1) < wanted[:, 0]
        if device_ranking.runs_beside_host(lacks_mass):
            wanted = wanted.masked_fill(~lacks_mass[:, None], 0)  # of the others nothing has to be kept
            nucleus = self.ops.keep_nucleus(draw.logits, of_vocab, wanted, draw.rule)
            return torch.where(lacks_mass, self.ops.invert_cdf(nucleus, draw.least, draw.uniform), token_ids)
        is_open = lacks_mass.numpy()
        if is_open.any():
            rows = np.flatnonzero(is_open)
            part = draw.take(rows)
            nucleus = self.ops.keep_nucleus(part.logits, _take(of_vocab, rows), _take(wanted, rows), part.rule)
            token_ids[torch.from_numpy(is_open)] = self.ops.invert_cdf(nucleus, part.least, part.uniform)
        return token_ids


class _LogprobsDownload:
    """Log probabilities of rows in parts, and other tensors, on their way to the host together."""

    def __init__(self, ranked: Sequence[RankedTokens], others: Sequence[Tensor]) -> None:
        self._num_others = len(others)
        self._download = Download([*others, *(tensor for part in ranked for tensor in part.tensors)])

    def others(self) -> list[npt.NDArray[Any]]:
        return [tensor.numpy() for tensor in self._download.result()[: self._num_others]]

    def entries(self, num_best: Sequence[int]) -> list[TokenLogprobs]:
        result: list[TokenLogprobs] = []
        tensors = self._download.result()[self._num_others :]
        for start in range(0, len(tensors), 5):
            part = RankedTokens(*tensors[start : start + 5])
            result += part.entries(num_best[len(result) : len(result) + len(part.chosen_ids)])
        return result


@dataclass(frozen=True, slots=True)
class _Draw:
    """Rows that draw at random: logits [m, V], how they become weights; uniform number and top_p float64 [m, 1].

    least [m, 1]: the smallest weight that min_p allows; None where no row has a min_p.
    """

    logits: Tensor
    rule: WeightRule
    uniform: Tensor
    top_p: Tensor
    least: Tensor | None
    top_k: Int64s

    @classmethod
    def of(cls, logits: Tensor, top: Tensor, batch: SamplingBatch, rows: Int64s, scale: float) -> _Draw:
        chosen = [batch.rows[i] for i in rows]
        uniform = uniforms([row.seed for row in chosen], [row.position for row in chosen])
        min_p = batch.min_p[rows]

        def column(values: Float64s | Float32s) -> Tensor:
            return upload(values, logits.device)[:, None]

        return cls(
            logits=_take(logits, rows),
            rule=WeightRule(_take(top, rows)[:, None], column(batch.temperature[rows]), scale),
            uniform=column(uniform),
            top_p=column(batch.top_p[rows]),
            least=(column(min_p) * scale).floor_() if min_p.any() else None,
            top_k=batch.top_k[rows],
        )

    def take(self, rows: Int64s) -> _Draw:
        rule = WeightRule(_take(self.rule.top, rows), _take(self.rule.temperature, rows), self.rule.scale)
        least = None if self.least is None else _take(self.least, rows)
        return _Draw(
            _take(self.logits, rows), rule, _take(self.uniform, rows), _take(self.top_p, rows), least, self.top_k[rows]
        )


def _take(tensor: Tensor, rows: Sequence[int] | Int64s) -> Tensor:
    if len(rows) == len(tensor):
        return tensor
    return tensor.index_select(0, upload(np.asarray(rows, np.int64), tensor.device))


def _draw_prefix(draw: _Draw, weights: Tensor, ids: Tensor, wanted: Tensor) -> Tensor:
    """A token of the shortest prefix of mass `wanted` [m, 1]: weights float64 [m, k], descending, of tokens `ids`."""
    mass_before = weights.cumsum(-1) - weights
    weights = weights * (mass_before < wanted)
    if draw.least is not None:
        weights = weights.masked_fill_(weights < draw.least, 0)
    mass = weights.cumsum(-1)
    place = torch.searchsorted(mass, target_mass(mass[:, -1:], draw.uniform), right=True)
    place = place.clamp_(max=mass.shape[1] - 1)  # beyond it for NaN alone
    return ids.gather(1, place)[:, 0]


def _log_mass(ops: SamplingOps, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """log(sum(exp(logits))) [m, 1], each row's over its own vocabulary: zeros behind it would group the sum in another
    way, and change its last bits."""
    if all(row.vocab_size is None for row in rows):
        return ops.log_sum_exp(logits)
    sizes = np.array([row.vocab_size or logits.shape[1] for row in rows], np.int64)
    of_sizes = [(size, np.flatnonzero(sizes == size)) for size in np.unique(sizes).tolist()]
    found = torch.cat([ops.log_sum_exp(_take(logits, places)[:, :size]) for size, places in of_sizes])
    order = np.argsort(np.concatenate([places for _, places in of_sizes]))
    return found.index_select(0, upload(order, found.device))


def token_logprobs(
    ops: SamplingOps, logits: Tensor, token_ids: Tensor, num_best: Sequence[int], log_mass: Tensor | None = None
) -> list[dict[int, Logprob]]:
    """log softmax(logits [m, V]) of the `num_best[i]` best tokens of each row, by rank, and always of `token_ids` [m].

    Rank: 1 + the number of tokens before this one in the order (value, descending; id, ascending).
    """
    log_mass = ops.log_sum_exp(logits) if log_mass is None else log_mass
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
    def of(
        cls, ops: SamplingOps, logits: Tensor, token_ids: Tensor, k: int, log_mass: Tensor | None = None
    ) -> RankedTokens:
        """The k best tokens of logits [m, V] and `token_ids` [m]; nothing waits for the device."""
        log_mass = ops.log_sum_exp(logits) if log_mass is None else log_mass
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
