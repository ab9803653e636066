"""What the sampler is told of each row of a batch, and the edits that these ask of the logits.

    logits -> mask of a grammar -> penalties -> logit_bias -> min_tokens

Edits touch few elements of a row, so they are scattered into the logits and taken back after the draw; a row is copied
only for a repetition penalty over much of the vocabulary. A mask stays: log probabilities are those of the tokens that
it allows, as in vLLM.

No edit makes NaN or +Inf of a finite logit. So a row whose largest edited logit is one of these had it before, and
speaks against its adapter or the base; where that is -Inf, a mask or `min_tokens` forbade all there was.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraplex.core import SamplingParams
from loraplex.kernels.device_copies import upload
from loraplex.kernels.protocols import SamplingOps

_LARGEST = torch.finfo(torch.float32).max
_ELEMENTS_AT_ONCE = 2**18
_DENSE_PART = 16
"""A prompt of this part of the vocabulary is penalised by whole rows: an element of a scatter takes as long as ten."""

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class DistinctTokens:
    """Of a prompt, ascending. `prompt` is kept so that its `id` stays its own."""

    __slots__ = ("__weakref__", "_factors", "prompt", "token_ids")

    def __init__(self, prompt: Sequence[int]) -> None:
        self.prompt = prompt
        self.token_ids = np.unique(np.asarray(prompt, np.int64))
        self._factors: tuple[float, Float32s] = 1.0, np.zeros(0, np.float32)

    def is_dense_in(self, vocab_size: int) -> bool:
        return len(self.token_ids) * _DENSE_PART >= vocab_size

    def factors(self, penalty: float, vocab_size: int) -> Float32s:
        """[vocab_size]: `penalty` for its tokens, 1 for others. Kept for the next step and completion."""
        if self._factors[0] != penalty or len(self._factors[1]) != vocab_size:
            factors = np.ones(vocab_size, np.float32)
            factors[self.token_ids[(self.token_ids >= 0) & (self.token_ids < vocab_size)]] = penalty
            self._factors = penalty, factors
        return self._factors[1]


class KnownPrompts:
    """The prompts of requests that draw: completions of one share the object, and so its distinct tokens."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[int, DistinctTokens] = WeakValueDictionary()

    def distinct_tokens(self, prompt: Sequence[int]) -> DistinctTokens:
        found = self._known.get(id(prompt))
        if found is None:
            found = self._known[id(prompt)] = DistinctTokens(prompt)
        return found


class SamplingState:
    """What one request's edits of the logits need between steps: token counts, kept sparse, and its bias as arrays.

    `forbidden_ids`: the distinct ones of `stop_ids_for_min_tokens`.
    `token_ids [m]` are the distinct tokens of the output, `counts [m]` how often each is in it. A prompt is looked at
    for a repetition penalty alone. `commit` costs O(1) per token, and a search in the prompt for a new one.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int] | DistinctTokens = (),
        output_token_ids: Sequence[int] = (),
        stop_ids_for_min_tokens: Sequence[int] = (),
    ) -> None:
        self.forbidden_ids = np.unique(np.asarray(stop_ids_for_min_tokens, np.int64))
        self.bias_ids = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        self.bias_values = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        if not isinstance(prompt, DistinctTokens):
            prompt = DistinctTokens(prompt if params.repetition_penalty != 1 else ())
        self.prompt = prompt
        self._size = 0
        self._token_ids = np.zeros(64, np.int64)
        self._counts = np.zeros(64, np.float32)
        self._is_new = np.zeros(64, np.bool_)
        self._index: dict[int, int] = {}
        self.commit(output_token_ids)

    @property
    def token_ids(self) -> Int64s:
        return self._token_ids[: self._size]

    @property
    def counts(self) -> Float32s:
        return self._counts[: self._size]

    @property
    def num_seen(self) -> int:
        """Not less than there are `seen_ids`."""
        return len(self.prompt.token_ids) + self._size

    @property
    def new_ids(self) -> Int64s:
        """The distinct tokens of the output that are not in the prompt."""
        return self.token_ids[self._is_new[: self._size]]

    @property
    def seen_ids(self) -> Int64s:
        """The distinct tokens of prompt and output, for a repetition penalty."""
        return np.concatenate([self.prompt.token_ids, self.new_ids])

    def commit(self, token_ids: Sequence[int]) -> None:
        """These tokens are now part of the output."""
        for token_id in token_ids:
            where = self._index.get(token_id)
            if where is None:
                where = self._append(token_id)
            self._counts[where] += 1

    def followed_by(self, token_ids: Sequence[int]) -> SamplingState:
        """As it is once these tokens are part of the output, too; this one stays as it is."""
        state = copy.copy(self)
        state._token_ids, state._counts = self._token_ids.copy(), self._counts.copy()
        state._is_new, state._index = self._is_new.copy(), dict(self._index)
        state.commit(token_ids)
        return state

    def _append(self, token_id: int) -> int:
        where, prompt = self._size, self.prompt.token_ids
        if where == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._is_new = np.concatenate([self._is_new, np.zeros_like(self._is_new)])
        place = np.searchsorted(prompt, token_id)
        self._is_new[where] = place == len(prompt) or prompt[place] != token_id
        self._token_ids[where] = token_id
        self._index[token_id] = where
        self._size += 1
        return where


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One row of logits. `position` is the index of the token being drawn: 0 for the first of the output.

    `state` holds the counts of exactly `output_token_ids`, and `stop_ids_for_min_tokens`; without it they are counted
    from the two lists, when a penalty asks. `mask`: the tokens that a grammar allows, bit i of word w is token 32 w +
    i; what is behind its end is not allowed. `vocab_size`: the row's own, where its logits go on with -inf behind it.
    """

    params: SamplingParams
    seed: int
    position: int
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    stop_ids_for_min_tokens: Sequence[int] = ()
    state: SamplingState | None = None
    mask: npt.NDArray[np.int32] | None = None
    vocab_size: int | None = None

    @property
    def has_penalties(self) -> bool:
        return self.params.has_penalties

    @property
    def is_below_min_tokens(self) -> bool:
        return self.position < self.params.min_tokens and len(self.stop_ids_for_min_tokens) > 0

    @property
    def may_bar_all(self) -> bool:
        """Whether what the request asks may leave no token."""
        return self.mask is not None or self.is_below_min_tokens

    @property
    def top_k(self) -> int:
        """0 where it leaves every token."""
        top_k = self.params.top_k
        return top_k if self.vocab_size is None or top_k < self.vocab_size else 0

    @property
    def num_logprobs(self) -> int:
        num_best = self.params.logprobs or 0
        return num_best if self.vocab_size is None else min(num_best, self.vocab_size)

    def needs_state(self) -> bool:
        return self.has_penalties or bool(self.params.logit_bias) or self.is_below_min_tokens

    def state_or_new(self) -> SamplingState:
        return self.state or SamplingState(
            self.params, self.prompt_token_ids, self.output_token_ids, self.stop_ids_for_min_tokens
        )


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The rows of one call, with their parameters as arrays [n]."""

    rows: tuple[SamplingRow, ...]
    temperature: Float32s
    top_k: Int64s
    top_p: Float64s
    min_p: Float32s
    edited: tuple[int, ...]
    with_logprobs: tuple[int, ...]

    @classmethod
    def build(cls, rows: Sequence[SamplingRow]) -> SamplingBatch:
        params = [row.params for row in rows]
        return cls(
            rows=tuple(rows),
            temperature=np.array([p.temperature for p in params], np.float32),
            top_k=np.array([row.top_k for row in rows], np.int64),
            top_p=np.array([p.top_p for p in params], np.float64),
            min_p=np.array([p.min_p for p in params], np.float32),
            edited=tuple(i for i, row in enumerate(rows) if row.needs_state()),
            with_logprobs=tuple(i for i, p in enumerate(params) if p.logprobs is not None),
        )


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> Float64s:
    """u [n] in [0, 1), multiples of 2^-53, a function of (seed mod 2^64, position) alone.

    Counter-based: two rounds of the finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
    Generators).
    """
    seed = np.array([s & (2**64 - 1) for s in seeds], np.uint64)
    position = np.asarray(positions, np.uint64)
    golden = np.uint64(0x9E3779B97F4A7C15)
    mixed = _mix64(_mix64(seed + golden) + (position + np.uint64(1)) * golden)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix64(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def mask_logits(ops: SamplingOps, logits: Tensor, batch: SamplingBatch) -> None:
    """Rows of logits [n, V] that have a mask get -inf where it does not allow a token; in place."""
    rows = [i for i, row in enumerate(batch.rows) if row.mask is not None]
    if not rows:
        return
    vocab_size = logits.shape[1]
    words = np.zeros((len(rows), -(-vocab_size // 32)), np.int32)
    for known, i in zip(words, rows, strict=True):
        mask = batch.rows[i].mask
        assert mask is not None
        known[: len(mask)] = mask[: len(known)]
    ops.mask_logits(logits, torch.tensor(rows), upload(words, logits.device))


@contextmanager
def edited_logits(logits: Tensor, batch: SamplingBatch) -> Iterator[None]:
    """Penalties, bias and forbidden stop tokens written into `logits` [n, V]; the old values stand again afterwards.

    Only touched elements are moved: a copy of the logits would cost more than all the edits.
    """
    flat = logits.view(-1)
    undo: list[tuple[Tensor, Tensor, Tensor]] = []
    try:
        for make_edits in (_repetitions, _counted, _biases, _forbidden) if batch.edited else ():
            for edit in make_edits(batch, logits.shape[1]):
                values, where = logits if edit.is_of_rows else flat, upload(edit.index, logits.device)
                old = values[where]
                undo.append((values, where, old))
                values[where] = edit.changed(old)
        yield
    finally:
        for values, where, old in reversed(undo):
            values[where] = old


@dataclass(frozen=True, slots=True)
class _Edit:
    """Distinct flat indices into logits [n * V], or rows of it, and what makes new values of the old ones."""

    index: Int64s
    changed: Callable[[Tensor], Tensor]
    is_of_rows: bool = False


def _flat_index(per_row: Sequence[tuple[int, Int64s]], vocab_size: int) -> tuple[Int64s, Bools]:
    """Flat indices of (row, token ids), and which of all ids were inside the vocabulary (the others are left out)."""
    token_ids = np.concatenate([ids for _, ids in per_row] or [np.zeros(0, np.int64)])
    rows = np.repeat(np.array([row for row, _ in per_row], np.int64), [len(ids) for _, ids in per_row])
    is_known = (token_ids >= 0) & (token_ids < vocab_size)
    return (rows * vocab_size + token_ids)[is_known], is_known


def _parts(
    batch: SamplingBatch, is_wanted: Callable[[SamplingParams], bool]
) -> Iterator[list[tuple[int, SamplingState]]]:
    """So few of the edited rows at a time that a temporary for their tokens stays small, and one at least."""
    part: list[tuple[int, SamplingState]] = []
    num_left = _ELEMENTS_AT_ONCE
    for i in batch.edited:
        if not is_wanted(batch.rows[i].params):
            continue
        state = batch.rows[i].state_or_new()
        if part and state.num_seen > num_left:
            yield part
            part, num_left = [], _ELEMENTS_AT_ONCE
        part.append((i, state))
        num_left -= state.num_seen
    if part:
        yield part


def _spread(values: Sequence[float], per_row: Sequence[tuple[int, Int64s]], is_known: Bools) -> Float32s:
    return np.repeat(np.array(values, np.float32), [len(token_ids) for _, token_ids in per_row])[is_known]


def _repetitions(batch: SamplingBatch, vocab_size: int) -> Iterator[_Edit]:
    """r over prompt and output: l / r if l > 0 else l * r."""
    dense: dict[tuple[DistinctTokens, float], list[int]] = {}
    for part in _parts(batch, lambda params: params.repetition_penalty != 1):
        penalties = [batch.rows[i].params.repetition_penalty for i, _ in part]
        per_row: list[tuple[int, Int64s]] = []
        for (i, state), penalty in zip(part, penalties, strict=True):
            if is_dense := state.prompt.is_dense_in(vocab_size):
                dense.setdefault((state.prompt, penalty), []).append(i)
            per_row.append((i, state.new_ids if is_dense else state.seen_ids))
        index, is_known = _flat_index(per_row, vocab_size)
        factors = _spread(penalties, per_row, is_known)

        def changed(old: Tensor, factors: Float32s = factors) -> Tensor:
            factor = upload(factors, old.device)
            return _finite(torch.where(old > 0, old / factor, old * factor), old)

        yield _Edit(index, changed)
    num_at_once = max(1, _ELEMENTS_AT_ONCE // vocab_size)
    for (prompt, penalty), rows in dense.items():
        for start in range(0, len(rows), num_at_once):
            of_rows = partial(_penalised, penalty, prompt.factors(penalty, vocab_size))
            yield _Edit(np.array(rows[start : start + num_at_once], np.int64), of_rows, is_of_rows=True)


def _penalised(penalty: float, factors: Float32s, old: Tensor) -> Tensor:
    """Rows [m, V] by `factors` [V], each `penalty` or 1. Of l / r and l * r the formula takes the smaller one for r > 1
    and the larger one for r < 1, whatever the sign: ten times faster than a choice by the sign on a CPU."""
    factor = upload(factors, old.device)
    divided, multiplied = old / factor, old * factor
    if penalty > 1:
        return torch.minimum(divided, multiplied)
    return torch.maximum(torch.maximum(divided, multiplied).clamp_(max=_LARGEST), old)


def _counted(batch: SamplingBatch, vocab_size: int) -> Iterator[_Edit]:
    """l - frequency * count - presence over the output."""
    for part in _parts(batch, lambda params: params.frequency_penalty != 0 or params.presence_penalty != 0):
        per_row, params = [(i, state.token_ids) for i, state in part], [batch.rows[i].params for i, _ in part]
        index, is_known = _flat_index(per_row, vocab_size)
        counts = np.concatenate([state.counts for _, state in part])[is_known]
        minus = _spread([p.frequency_penalty for p in params], per_row, is_known) * counts
        minus += _spread([p.presence_penalty for p in params], per_row, is_known)

        def changed(old: Tensor, minus: Float32s = minus) -> Tensor:
            return _finite(old - upload(minus, old.device), old)

        yield _Edit(index, changed)


def _finite(new: Tensor, old: Tensor) -> Tensor:
    """Nothing becomes Inf by a penalty; NaN and Inf stay to be seen."""
    return torch.where(old < torch.inf, new.clamp_(max=_LARGEST), old)


def _biases(batch: SamplingBatch, vocab_size: int) -> Iterator[_Edit]:
    """l + logit_bias[id]."""
    rows = [i for i in batch.edited if batch.rows[i].params.logit_bias]
    states = [batch.rows[i].state_or_new() for i in rows]
    index, is_known = _flat_index([(i, state.bias_ids) for i, state in zip(rows, states, strict=True)], vocab_size)
    values = np.concatenate([state.bias_values for state in states] or [np.zeros(0, np.float32)])[is_known]
    yield _Edit(index, lambda old: old + upload(values, old.device))


def _forbidden(batch: SamplingBatch, vocab_size: int) -> Iterator[_Edit]:
    """-inf for the tokens that would end a request before min_tokens."""
    rows = [i for i in batch.edited if batch.rows[i].is_below_min_tokens]
    per_row = [(i, batch.rows[i].state_or_new().forbidden_ids) for i in rows]
    yield _Edit(_flat_index(per_row, vocab_size)[0], lambda old: torch.full_like(old, -torch.inf))
