"""The sampler against an independent float64 version, Hugging Face's processors, and statistics with fixed seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.core import SamplingParams
from loraplex.engine import sampler
from loraplex.engine.sampler import (
    Sampler,
    SamplerOutput,
    SamplingBatch,
    SamplingRow,
    SamplingState,
    validate_against_vocab,
)
from loraplex.engine.sampling_batch import uniforms
from loraplex.errors import InvalidRequestError

V = 700


def row(position: int = 0, seed: int = 1, **params: Any) -> SamplingRow:
    given_lists = {name: params.pop(name) for name in ("prompt_token_ids", "output_token_ids") if name in params}
    stop_ids = params.pop("stop_ids_for_min_tokens", ())
    return SamplingRow(
        SamplingParams(max_tokens=None, **params), seed, position, stop_ids_for_min_tokens=stop_ids, **given_lists
    )


def normal_logits(num_rows: int, vocab_size: int = V, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.from_numpy(
        (np.random.default_rng(seed).normal(size=(num_rows, vocab_size)) * scale).astype(np.float32)
    )


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> SamplerOutput:
    return Sampler(logits.shape[1]).sample(logits, rows)


# ------------------------------------------------------------------------------------------------------ the oracle


def edited(logits: np.ndarray, row: SamplingRow) -> np.ndarray:
    """Penalties, bias and min_tokens, one token at a time, in float64."""
    params, out = row.params, logits.astype(np.float64).copy()
    counts = Counter(row.output_token_ids)
    for i in {*row.prompt_token_ids, *counts}:
        out[i] = out[i] / params.repetition_penalty if out[i] > 0 else out[i] * params.repetition_penalty
    for i, count in counts.items():
        out[i] -= params.frequency_penalty * count + params.presence_penalty
    for i, bias in params.logit_bias.items():
        out[i] += bias
    if row.position < params.min_tokens:
        for i in row.stop_ids_for_min_tokens:
            out[i] = -np.inf
    return out


def distribution(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Ids in the order of the draw, and the probabilities of all tokens."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    p = np.exp((logits - logits.max()) / params.temperature)
    if params.top_k:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    mass, nucleus_size = 0.0, 0
    while mass < params.top_p - 1e-12 and nucleus_size < len(order):
        mass += p[order[nucleus_size]]
        nucleus_size += 1
    if params.top_p < 1:
        p[order[nucleus_size:]] = 0
    p[p < params.min_p * p.max()] = 0
    has_top_k = 0 < params.top_k < len(logits) and params.top_k <= 1024
    if 1024 < params.top_k < len(logits):
        nucleus_size = len(order)
    is_by_id = not has_top_k and (params.top_p == 1 or nucleus_size > 128)
    return np.arange(len(logits)) if is_by_id else order, p / p.sum()


def assert_drawn_from(token_id: int, order: np.ndarray, p: np.ndarray, u: float) -> None:
    """The token's share of the CDF holds u, within rounding."""
    place = int(np.flatnonzero(order == token_id)[0])
    below = p[order[:place]].sum()
    assert p[token_id] > 0
    assert below - 1e-5 <= u <= below + p[token_id] + 1e-5


def assert_as_oracle(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> SamplerOutput:
    result = sample(logits, rows)
    assert result.failed_rows == ()
    for i, (one, token_id) in enumerate(zip(rows, result.token_ids.tolist(), strict=True)):
        processed = edited(logits[i].numpy(), one)
        if one.params.temperature == 0:
            assert processed[token_id] == pytest.approx(processed.max(), abs=1e-5)
            continue
        order, p = distribution(processed, one.params)
        assert_drawn_from(token_id, order, p, uniforms([one.seed], [one.position])[0])
    return result


def params_strategy(vocab_size: int) -> st.SearchStrategy[dict[str, Any]]:
    tokens = st.lists(st.integers(0, vocab_size - 1), max_size=30)
    choices: dict[str, st.SearchStrategy[Any]] = {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 0, 1, 2, 20, 128, 129, 500, vocab_size, 10**6]),
        "top_p": st.sampled_from([1.0, 1.0, 1e-9, 0.3, 0.9, 0.999]),
        "min_p": st.sampled_from([0.0, 0.0, 0.03, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.3, -1.1]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.7]),
        "logit_bias": st.dictionaries(st.integers(0, vocab_size - 1), st.floats(-20, 20, width=32), max_size=3),
        "min_tokens": st.sampled_from([0, 3]),
        "stop_ids_for_min_tokens": st.lists(st.integers(0, vocab_size - 1), max_size=3),
        "prompt_token_ids": tokens,
        "output_token_ids": tokens,
        "logprobs": st.sampled_from([None, None, 0, 3]),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "position": st.integers(0, 5),
    }
    return st.fixed_dictionaries(choices)


# --------------------------------------------------------------------------------------------- against the oracle


@given(st.integers(0, 2**32), st.lists(params_strategy(V), min_size=1, max_size=6))
@settings(max_examples=80, deadline=None)
def test_any_mix_of_parameters(seed: int, options: list[dict[str, Any]]) -> None:
    assert_as_oracle(normal_logits(len(options), seed=seed), [row(**one) for one in options])


@pytest.mark.parametrize("vocab_size", [1, 2, 127, 128, 129, 8192, 70_001])
def test_vocabulary_sizes(vocab_size: int) -> None:
    options = [{}, {"top_k": 5}, {"top_p": 0.9}, {"top_p": 0.2}, {"min_p": 0.1}, {"temperature": 0.0}, {"top_k": 1000}]
    options += [{"top_k": 1025}, {"top_k": 5000, "top_p": 0.6, "min_p": 0.01}, {"top_k": 8191, "temperature": 100}]
    rows = [row(position, seed, **one) for position in range(3) for seed, one in enumerate(options)]
    assert_as_oracle(normal_logits(len(rows), vocab_size), rows)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.99])
def test_top_p_on_flat_logits_needs_more_than_the_best_few(top_p: float) -> None:
    rows = [row(i, top_p=top_p) for i in range(50)]
    assert_as_oracle(normal_logits(50, 5000, scale=0.5), rows)


def hf_probabilities(logits: torch.Tensor, params: SamplingParams, token_ids: Sequence[int]) -> np.ndarray:
    from transformers import (
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    ids = torch.tensor([list(token_ids)])
    scores = logits[None]
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    scores = TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return scores[0].double().softmax(-1).numpy()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"top_k": 20},
        {"top_p": 0.8},
        {"top_p": 0.97},
        {"min_p": 0.05},
        {"top_k": 30, "top_p": 0.9, "temperature": 1.4},
        {"top_k": 30, "min_p": 0.1},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.6, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_same_distribution_as_hugging_face(options: dict[str, Any]) -> None:
    logits = normal_logits(1)
    tokens = [1, 1, 5, 17, 400]
    rows = [row(i, prompt_token_ids=tokens[:3], output_token_ids=tokens[3:], **options) for i in range(300)]
    p = hf_probabilities(logits[0], rows[0].params, tokens)
    order, own = distribution(edited(logits[0].numpy(), rows[0]), rows[0].params)
    np.testing.assert_allclose(own, p, atol=1e-6)
    for one, token_id in zip(rows, sample(logits.repeat(300, 1), rows).token_ids, strict=True):
        assert_drawn_from(token_id, order, p, uniforms([one.seed], [one.position])[0])


# ------------------------------------------------------------------------------------------------------ statistics


def chi_square(counts: np.ndarray, p: np.ndarray, num_draws: int) -> float:
    """Statistic over its degrees of freedom in standard deviations of the latter (normal: many bins), about N(0, 1)."""
    expected = p * num_draws
    assert counts[p == 0].sum() == 0
    is_common = expected >= 5
    observed = np.append(counts[is_common], counts[~is_common].sum())
    wanted = np.append(expected[is_common], expected[~is_common].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = max(len(wanted) - 1, 1)
    return (((observed - wanted) ** 2 / wanted).sum() - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("is_by_seed", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.6}, {"top_k": 12}, {"top_p": 0.9}, {"min_p": 0.03}, {"top_k": 40, "top_p": 0.95}],
    ids=str,
)
def test_draws_follow_the_distribution(options: dict[str, Any], is_by_seed: bool) -> None:
    """Over the positions of one request, and over requests with successive seeds at one position."""
    num_draws = 20_000
    logits = normal_logits(1, 60, seed=5, scale=1.5)
    params = SamplingParams(**options)
    rows = [SamplingRow(params, *((i, 3) if is_by_seed else (7, i))) for i in range(num_draws)]
    token_ids = sample(logits.expand(num_draws, -1), rows).token_ids
    _, p = distribution(logits[0].numpy().astype(np.float64), params)
    assert abs(chi_square(np.bincount(token_ids, minlength=60), p, num_draws)) < 4


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    grid = np.array([uniforms([seed] * 256, range(256)) for seed in range(-128, 128)])
    assert grid.min() >= 0
    assert grid.max() < 1
    counts = np.histogram(grid, bins=512, range=(0, 1))[0]
    assert abs(chi_square(counts, np.full(512, 1 / 512), grid.size)) < 4
    for left, right in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1]), (grid[1:, 1:], grid[:-1, :-1])):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 4 / math.sqrt(left.size)


def test_uniforms_depend_on_seed_and_position_only() -> None:
    seeds, positions = [5, -1, 2**63 - 1, -(2**63), 5], [0, 9, 3, 3, 1]
    together = uniforms(seeds, positions)
    assert len(set(together.tolist())) == 5
    alone = [uniforms([s], [p])[0] for s, p in zip(seeds, positions, strict=True)]
    assert together.tolist() == alone
    assert uniforms([42], [7])[0] == 0.7347204584623639  # a seed means the same in every release


# --------------------------------------------------------------------------------------- independence of the batch


@given(st.integers(0, 2**32), st.lists(params_strategy(V), min_size=2, max_size=7), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_a_row_does_not_depend_on_its_neighbours(seed: int, options: list[dict[str, Any]], random: Any) -> None:
    rows = [row(**one) for one in options]
    logits = normal_logits(len(rows), seed=seed)
    together = sample(logits, rows)
    order = list(range(len(rows)))
    random.shuffle(order)
    shuffled = sample(logits[order], [rows[i] for i in order])
    for place, i in enumerate(order):
        alone = sample(logits[i : i + 1], [rows[i]])
        assert alone.token_ids[0] == together.token_ids[i] == shuffled.token_ids[place]
        assert alone.logprobs[0] == together.logprobs[i] == shuffled.logprobs[place]


def test_large_batch_equals_single_rows() -> None:
    options = [{}, {"top_k": 20}, {"top_p": 0.9}, {"top_p": 0.9, "top_k": 300}, {"temperature": 0.0}, {"min_p": 0.2}]
    rows = [row(i, seed=i, **options[i % len(options)]) for i in range(48)]
    logits = normal_logits(48, 20_011)
    together = sample(logits, rows).token_ids.tolist()
    assert together == [int(sample(logits[i : i + 1], [one]).token_ids[0]) for i, one in enumerate(rows)]


def test_rows_at_once_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor of which rows what was there before an edit is kept."""
    options = [{}, {"top_k": 20}, {"top_p": 0.9}, {"temperature": 0.0}, {"top_k": 300}, {"min_tokens": 99}]
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "prompt_token_ids": range(0, V, 2)}
    rows = [row(i, seed=i, logprobs=2, stop_ids_for_min_tokens=range(V), **options[i % 6]) for i in range(33)]
    rows += [row(i, seed=i, logprobs=2, output_token_ids=[5, i], **penalties) for i in range(7)]
    logits, sizes, edit = normal_logits(40), [], sampler.edited_logits
    together = sample(logits, rows)
    assert together.barred_rows == (5, 11, 17, 23, 29)
    monkeypatch.setattr("loraplex.engine.sampler._MAX_ELEMENTS", 3 * V)
    monkeypatch.setattr(sampler, "edited_logits", lambda part, rows: sizes.append(len(part)) or edit(part, rows))
    in_parts = sample(logits, rows)
    assert in_parts.token_ids.tolist() == together.token_ids.tolist()
    assert replace(in_parts, token_ids=()) == replace(together, token_ids=())
    assert sizes == [3] * 13 + [1]
    assert torch.equal(logits, normal_logits(40))


def test_a_batch_built_before_gives_the_same() -> None:
    rows = [row(i, top_k=9) for i in range(4)]
    logits = normal_logits(4)
    built = Sampler(V).sample(logits, SamplingBatch.build(rows))
    assert built.token_ids.tolist() == sample(logits, rows).token_ids.tolist()


# ------------------------------------------------------------------------------------------------------ edge cases


def test_empty_batch() -> None:
    result = sample(torch.zeros(0, V), [])
    assert result.token_ids.tolist() == []
    assert result.logprobs == ()


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(2, V)
    logits[1, 300:] = 2
    assert sample(logits, [row(temperature=0)] * 2).token_ids.tolist() == [0, 300]


@pytest.mark.parametrize(
    "options", [{"top_k": 1}, {"top_p": 1e-12}, {"top_p": 1e-300}, {"top_k": 1, "top_p": 0.5}], ids=str
)
def test_one_token_is_left_even_in_a_tie(options: dict[str, Any]) -> None:
    logits = torch.zeros(30, V)
    logits[:, [600, 70]] = 1
    assert set(sample(logits, [row(i, **options) for i in range(30)]).token_ids.tolist()) == {70}


def test_ties_at_the_border_go_to_the_lower_ids() -> None:
    logits = torch.zeros(400, V)
    logits[:, 9] = 1
    drawn = sample(logits, [row(i, top_k=4) for i in range(400)]).token_ids.tolist()
    assert set(drawn) == {0, 1, 2, 9}


def test_flat_nucleus_is_cut_within_its_ties() -> None:
    """All equal and top_p = 1/2: the lower half, exactly."""
    drawn = sample(torch.zeros(3000, 512), [row(i, top_p=0.5) for i in range(3000)]).token_ids
    assert drawn.max() < 256
    assert len(set(drawn.tolist())) == 256


@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 9.9e-6, 1e-5, 1e-6])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = normal_logits(8, scale=30)
    drawn = sample(logits, [row(i, temperature=temperature) for i in range(8)]).token_ids
    assert drawn.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [99.9, 100])
def test_huge_temperature_is_flat_over_what_is_possible(temperature: float) -> None:
    logits = normal_logits(1, 8).repeat(4000, 1)
    logits[:, 3] = -torch.inf
    drawn = sample(logits, [row(i, temperature=temperature) for i in range(4000)]).token_ids
    p = np.full(8, 1 / 7)
    p[3] = 0
    assert abs(chi_square(np.bincount(drawn, minlength=8), p, 4000)) < 4


def test_large_logits_do_not_overflow() -> None:
    logits = torch.full((4, V), -3e38)
    logits[:, 5] = 3e38
    rows = [row(), row(top_k=3), row(top_p=0.5), row(min_p=0.5)]
    assert sample(logits, rows).token_ids.tolist() == [5] * 4


@pytest.mark.parametrize("options", [{}, {"top_k": 50}, {"top_k": 600}, {"top_p": 0.99}, {"min_p": 0.001}], ids=str)
def test_minus_infinity_is_never_drawn(options: dict[str, Any]) -> None:
    logits = torch.full((200, V), -torch.inf)
    logits[:, [3, 500]] = 0
    drawn = set(sample(logits, [row(i, **options) for i in range(200)]).token_ids.tolist())
    assert drawn == {3, 500}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, "all -inf"])
@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.9}, {"temperature": 0}, {"logprobs": 2}], ids=str)
def test_only_the_bad_row_fails(bad: float | str, options: dict[str, Any]) -> None:
    logits = normal_logits(3)
    rows = [row(i, **options) for i in range(3)]
    expected = sample(logits, rows)
    if isinstance(bad, str):
        logits[1] = -torch.inf
    else:
        logits[1, 200] = bad
    result = sample(logits, rows)
    assert result.failed_rows == (1,)
    assert result.token_ids[[0, 2]].tolist() == expected.token_ids[[0, 2]].tolist()
    assert result.token_ids[1] == 0
    assert result.logprobs[1] is None
    assert result.logprobs[2] == expected.logprobs[2]


def test_min_tokens_forbids_stop_ids_until_then() -> None:
    logits = torch.zeros(3, V)
    logits[:, 7] = 9
    logits[:, 8] = 8
    rows = [row(i, temperature=0, min_tokens=2, stop_ids_for_min_tokens=(7, 7, V + 50), logprobs=1) for i in range(3)]
    result = sample(logits, rows)
    assert result.token_ids.tolist() == [8, 8, 7]
    first = result.logprobs[0]
    assert first is not None
    assert list(first) == [7, 8]  # of the logits before any edit


def test_forbidding_everything_bars_the_row() -> None:
    """That is the request's own doing: the model gave it logits."""
    result = sample(torch.zeros(2, 4), [row(min_tokens=1, stop_ids_for_min_tokens=range(4), logprobs=1), row()])
    assert (result.failed_rows, result.barred_rows) == ((), (0,))
    assert (result.token_ids[0], result.logprobs[0]) == (0, None)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_the_model_gave_fails_a_row_whatever_its_edits(bad: float) -> None:
    logits = torch.zeros(3, 4)
    logits[:, 1] = bad
    options = [{"repetition_penalty": 0.001, "output_token_ids": [1]}, {"logit_bias": {1: -100}}]
    rows = [row(min_tokens=1, stop_ids_for_min_tokens=[0, 2, 3]), *(row(**each) for each in options)]
    assert sample(logits, rows).failed_rows == (0, 1, 2)


@pytest.mark.parametrize("largest", [1.0, 1e30, 3.4e38])
def test_no_edit_takes_a_finite_logit_out_of_the_numbers(largest: float) -> None:
    logits = torch.tensor([[largest, -largest, 0.0, 1.0]]).repeat(4, 1)
    seen = {"output_token_ids": [0, 1, 2, 3]}
    rows = [
        row(repetition_penalty=0.001, **seen),
        row(repetition_penalty=10, frequency_penalty=2, presence_penalty=2, **seen),
        row(repetition_penalty=0.001, frequency_penalty=-2, presence_penalty=-2, top_p=0.5, **seen),
        row(repetition_penalty=10, logit_bias={0: 100, 1: -100}, min_p=1, **seen),
    ]
    result = sample(logits, rows)
    assert (result.failed_rows, result.barred_rows) == ((), ())
    assert result.token_ids[2] == 0


def test_bias_forces_and_forbids() -> None:
    logits = normal_logits(2, scale=1)
    best = int(logits[1].argmax())
    rows = [row(logit_bias={33: 100}), row(temperature=0, logit_bias={best: -100})]
    result = sample(logits, rows)
    assert result.token_ids[0] == 33
    assert result.token_ids[1] != best


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_logits_are_as_before(dtype: torch.dtype) -> None:
    logits = normal_logits(3).to(dtype)
    before = logits.clone()
    options = {"logit_bias": {1: 5.0, 2: -5.0}, "repetition_penalty": 1.7, "presence_penalty": 0.3, "min_tokens": 2}
    rows = [
        row(prompt_token_ids=[1, 2, 3], output_token_ids=[3, 4], stop_ids_for_min_tokens=[4], **options)
        for _ in range(3)
    ]
    sample(logits, rows)
    assert torch.equal(logits, before)


def test_logits_of_inference_mode_and_strided_logits() -> None:
    with torch.inference_mode():
        logits = normal_logits(2) + 0
    rows = [row(repetition_penalty=2.0, output_token_ids=[5]), row(top_k=3)]
    expected = sample(logits.clone(), rows).token_ids.tolist()
    assert sample(logits, rows).token_ids.tolist() == expected
    wide = torch.cat([logits, logits], 1)[:, :V]
    assert sample(wide, rows).token_ids.tolist() == expected


def test_wrong_shape_is_an_invariant() -> None:
    with pytest.raises(AssertionError, match="2 rows"):
        sample(torch.zeros(3, V), [row()] * 2)


# -------------------------------------------------------------------------------------------------- state, logprobs


@given(st.lists(st.integers(0, 200), max_size=40), st.lists(st.integers(0, 200), max_size=300), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_state_counts_as_a_counter_does(prompt: list[int], output: list[int], step: int) -> None:
    state = SamplingState(SamplingParams(repetition_penalty=1.1), prompt, output[:step])
    for start in range(step, len(output), step):
        state.commit(output[start : start + step])
    assert dict(zip(state.token_ids.tolist(), state.counts.tolist(), strict=True)) == Counter(output)
    assert sorted(state.seen_ids) == sorted({*prompt, *output})


@given(st.lists(st.integers(0, V - 1), max_size=20), st.lists(st.integers(0, V - 1), max_size=80))
@settings(max_examples=30, deadline=None)
def test_state_and_lists_give_the_same_draw(prompt: list[int], output: list[int]) -> None:
    options: dict[str, Any] = {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "logit_bias": {3: 1.5}}
    by_lists = row(prompt_token_ids=prompt, output_token_ids=output, **options)
    state = SamplingState(by_lists.params, prompt)
    state.commit(output)
    by_state = replace(by_lists, prompt_token_ids=(), output_token_ids=(), state=state)
    logits = normal_logits(2)
    logits[1] = logits[0]
    result = sample(logits, [by_lists, by_state])
    assert result.token_ids[0] == result.token_ids[1]


def test_ids_beyond_the_vocabulary_are_passed_over_in_penalties() -> None:
    with_unknown = row(repetition_penalty=2.0, prompt_token_ids=[0, V, 10**9], output_token_ids=[V + 1])
    known_only = row(repetition_penalty=2.0, prompt_token_ids=[0])
    logits = normal_logits(1).repeat(2, 1)
    token_ids = sample(logits, [with_unknown, known_only]).token_ids
    assert token_ids[0] == token_ids[1]


def test_logprobs_are_of_the_logits_as_they_came() -> None:
    logits = normal_logits(4)
    rows = [
        row(logprobs=2, temperature=0.3, top_k=5),
        row(logprobs=0, logit_bias={650: 100.0}),
        row(),
        row(logprobs=20, temperature=0, repetition_penalty=3.0, prompt_token_ids=range(V)),
    ]
    result = sample(logits, rows)
    expected = logits.double().log_softmax(-1)
    assert result.logprobs[2] is None
    for i, entries in enumerate(result.logprobs):
        for token_id, entry in (entries or {}).items():
            assert entry.logprob == pytest.approx(float(expected[i, token_id]), abs=1e-5)
    forced = result.logprobs[1]
    assert forced is not None
    assert list(forced) == [650]
    assert forced[650].rank == int((logits[1] > logits[1, 650]).sum()) + 1
    assert [len(entries or {}) for entries in result.logprobs[3:]] == [20]


def test_prompt_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.engine.sampler._MAX_ELEMENTS", 3 * V)  # three rows at a time
    logits = normal_logits(10)
    next_ids = [int(i) for i in np.random.default_rng(1).integers(0, V, 10)]
    result = Sampler(V).prompt_logprobs(logits, next_ids, 4)
    expected = logits.double().log_softmax(-1)
    assert len(result) == 10
    for i, (token_id, entries) in enumerate(zip(next_ids, result, strict=True)):
        assert set(entries) == {*logits[i].topk(4).indices.tolist(), token_id}
        assert entries[token_id].logprob == pytest.approx(float(expected[i, token_id]), abs=1e-5)
    assert [list(entries) for entries in Sampler(V).prompt_logprobs(logits, torch.tensor(next_ids), 0)] == [
        [i] for i in next_ids
    ]
    assert Sampler(V).prompt_logprobs(logits[:0], [], 4) == ()


def test_validate_against_vocab() -> None:
    validate_against_vocab(SamplingParams(logit_bias={0: 1, 99: 1}), 100)
    with pytest.raises(InvalidRequestError, match=r"2 token id\(s\) outside the vocabulary 0..99: -1, 100"):
        validate_against_vocab(SamplingParams(logit_bias={100: 1, -1: 1, 5: 1}), 100)
