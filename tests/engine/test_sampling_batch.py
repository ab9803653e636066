"""Penalties against the formula in numpy, and what requests of one prompt share of it."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.core import Request, SamplingParams
from loraplex.engine import sampling_batch
from loraplex.engine.model_runner import _sampling_row
from loraplex.engine.sampling_batch import KnownPrompts, SamplingBatch, SamplingRow, SamplingState, edited_logits
from loraplex.engine.schedule_plan import RequestState, ScheduledSequence

V = 50
LARGEST = np.finfo(np.float32).max
SPECIAL = [np.nan, np.inf, -np.inf, LARGEST, -LARGEST, 0.0, -0.0]

TOKENS = st.integers(0, V + 2)
PENALTIES = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([0.001, 0.6, 1.0, 1.0, 1.3, 10.0]),
        "frequency_penalty": st.sampled_from([-2.0, 0.0, 0.0, 0.3]),
        "presence_penalty": st.sampled_from([-2.0, 0.0, 0.0, 0.7]),
    }
)


def penalised(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """One row: all penalties of a token at once."""
    counts = Counter(output)
    ids = np.array([i for i in {*prompt, *output} if i < V], np.int64)
    count = np.array([counts[i] for i in ids], np.float32)
    r, f, p = (np.float32(getattr(params, f"{name}_penalty")) for name in ("repetition", "frequency", "presence"))
    new, old = logits.copy(), logits[ids]
    with np.errstate(all="ignore"):
        minus = f * count + p * (count > 0).astype(np.float32)
        changed = np.minimum(np.where(old > 0, old / r, old * r) - minus, LARGEST)
        new[ids] = np.where(old < np.inf, changed, old)
    return new


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_penalties_are_those_of_the_formula_to_the_bit(data: st.DataObject) -> None:
    prompts, known = data.draw(st.lists(st.lists(TOKENS, max_size=60), min_size=1, max_size=3)), KnownPrompts()
    before = np.random.default_rng(data.draw(st.integers(0, 99))).normal(size=(6, V)).astype(np.float32) * 9
    before[:, data.draw(st.lists(TOKENS.filter(lambda i: i < V), min_size=7, max_size=7))] = SPECIAL
    rows, expected = [], []
    for number in range(6):
        prompt, output = data.draw(st.sampled_from(prompts)), data.draw(st.lists(TOKENS, max_size=90))
        params, num_first = SamplingParams(**data.draw(PENALTIES)), data.draw(st.integers(0, len(output)))
        state = None
        if data.draw(st.booleans()):
            state = SamplingState(params, known.distinct_tokens(prompt), output[:num_first])
            state.commit(output[num_first : num_first + 3])
            state = state.followed_by(output[num_first + 3 :])
        rows.append(SamplingRow(params, 0, len(output), prompt, output, state=state))
        expected.append(penalised(before[number], params, prompt, output))
    logits = torch.from_numpy(before.copy())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling_batch, "_ELEMENTS_AT_ONCE", data.draw(st.sampled_from([1, 70, 2**18])))
        patch.setattr(sampling_batch, "_DENSE_PART", data.draw(st.sampled_from([0, 3, 16])))
        with edited_logits(logits, SamplingBatch.build(rows)):
            assert np.array_equal(logits.numpy(), np.stack(expected), equal_nan=True)
    assert logits.numpy().tobytes() == before.tobytes()


def rows_of(prompt: tuple[int, ...], known: KnownPrompts, count: int, **params: Any) -> list[SamplingRow]:
    rows = []
    for index in range(count):
        state = RequestState(Request(str(index), prompt, SamplingParams(**params), 9, 0), index, prompt)
        rows.append(_sampling_row(ScheduledSequence(state, 0, len(prompt), is_sampled=True), known))
    return rows


def test_completions_share_the_distinct_tokens_of_their_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    known, made = KnownPrompts(), []
    monkeypatch.setattr(sampling_batch, "DistinctTokens", counted(made))
    prompt = tuple(range(1000, 0, -1))
    rows = rows_of(prompt, known, 64, repetition_penalty=1.2) + rows_of(prompt, known, 3, repetition_penalty=1.3)
    assert [each.prompt for each in made] == [prompt]
    assert [list(row.state_or_new().seen_ids) for row in rows] == [sorted(prompt)] * 67
    made.clear()
    rows.clear()
    gc.collect()
    assert not known._known, "nothing of a prompt stays when its requests have ended"


def counted(made: list[Any]) -> type[sampling_batch.DistinctTokens]:
    class Counted(sampling_batch.DistinctTokens):
        def __init__(self, prompt: Any) -> None:
            super().__init__(prompt)
            made.append(self)

    return Counted


def test_what_min_tokens_forbids_is_sorted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(min_tokens=9, stop_token_ids=(7, 3, 7, V + 5))
    state = RequestState(Request("0", (1, 2), params, 9, 0, eos_token_ids=(3, 5)), 0, (1, 2))
    sequence, known = ScheduledSequence(state, 0, 2, is_sampled=True), KnownPrompts()
    _sampling_row(sequence, known)

    def fail(*_: Any) -> None:
        raise AssertionError("sorted again")

    monkeypatch.setattr(np, "unique", fail)
    for _ in range(2):
        logits = torch.zeros(1, V)
        with edited_logits(logits, SamplingBatch.build([_sampling_row(sequence, known)])):
            assert torch.isneginf(logits[0]).nonzero()[:, 0].tolist() == [3, 5, 7]


ONLY = {"logit_bias": {3: 1.0}}, {"presence_penalty": 1}, {"frequency_penalty": 1}


@pytest.mark.parametrize("params", ONLY, ids=str)
def test_a_prompt_is_looked_at_for_a_repetition_penalty_alone(params: dict[str, Any]) -> None:
    (row,) = rows_of(tuple(range(5000)), KnownPrompts(), 1, **params)
    state = row.state_or_new()
    assert state.num_seen == 0
    state.commit([7, 7, 8])
    assert (state.token_ids.tolist(), state.counts.tolist()) == ([7, 8], [2, 1])


@pytest.fixture
def uploaded(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    arrays, made = [], sampling_batch.upload

    def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
        arrays.append(array)
        return made(array, device)

    monkeypatch.setattr(sampling_batch, "upload", upload)
    return arrays


def test_few_tokens_are_edited_at_once(uploaded: list[np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_batch, "_ELEMENTS_AT_ONCE", 2500)
    rows = rows_of(tuple(range(1000)), KnownPrompts(), 9, repetition_penalty=1.2)
    with edited_logits(torch.zeros(9, 20_000), SamplingBatch.build(rows)):
        sizes = [array.size for array in uploaded]
        assert max(sizes) == 2000
        assert sum(sizes) == 2 * 9 * 1000, "indices and factors"


def test_completions_share_what_a_large_part_of_the_vocabulary_asks(
    uploaded: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No index of its tokens is made for each row and step, and few rows are edited at once."""
    monkeypatch.setattr(sampling_batch, "_ELEMENTS_AT_ONCE", 6500)
    rows = rows_of(tuple(range(1000)), KnownPrompts(), 64, repetition_penalty=1.2)
    for _ in range(2):
        with edited_logits(torch.zeros(64, 2000), SamplingBatch.build(rows)):
            pass
    others = [array.size for array in uploaded if array.size != 2000]
    assert len({id(array) for array in uploaded if array.size == 2000}) == 1
    assert max(others) == 3
    assert sum(others) == 2 * 64
