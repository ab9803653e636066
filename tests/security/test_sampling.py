"""Sampling parameters as a weapon: what is refused, offline too, and that the sampler stands what is not."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.core import SamplingParams
from loraplex.engine.sampler import Sampler, SamplingRow
from loraplex.errors import InvalidRequestError
from loraplex.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS

NAN, INF, HUGE = math.nan, math.inf, 10**5000
TINY = 5e-324
NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
WHOLE = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
REFUSED: tuple[tuple[str, Any], ...] = (
    *((name, value) for name in NUMBERS for value in (NAN, INF, -INF, HUGE, -HUGE, 1e300, np.float64(1e300))),
    *((name, value) for name in WHOLE for value in (HUGE, -HUGE, 2**63, -(2**63) - 1)),
    ("repetition_penalty", 1e-300),
    ("repetition_penalty", TINY),
    ("repetition_penalty", Fraction(1, 10**400)),
    ("repetition_penalty", 0.00099),
    ("top_p", Fraction(1, 10**400)),
    ("temperature", 101),
    ("top_k", 2**31),
    ("stop_token_ids", range(MAX_STOP_TOKEN_IDS + 1)),
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0)),
    *(("logit_bias", {5: value}) for value in (NAN, INF, -INF, 100.1, -100.1, HUGE, 10**400)),
    ("logit_bias", {"9" * 5000: 1}),
)


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=[f"{name}-{index}" for index, (name, _) in enumerate(REFUSED)])
def test_what_could_harm_is_refused_by_name_and_shortly(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 2, "top_p": 1.0, "top_k": -1, "presence_penalty": 2, "frequency_penalty": -2},  # OpenAI's ends
        {"repetition_penalty": 0.01},
        {"temperature": 0, "repetition_penalty": 2, "min_p": 1},  # SGLang's
        {"temperature": 1e-300, "top_p": TINY, "min_p": TINY},
        {"seed": -(2**63), "logprobs": 20, "prompt_logprobs": 20, "n": 128, "max_tokens": 2**63 - 1},
    ],
    ids=str,
)
def test_what_clients_of_the_peers_send_is_accepted(params: dict[str, Any]) -> None:
    accepted = SamplingParams(**params)
    assert {name: getattr(accepted, name) for name in params} == {
        **params,
        **({"top_k": 0} if "top_k" in params else {}),
    }


# ---------------------------------------------------------------- the sampler

V = 300
LARGEST = 3.4028235e38

extremes = st.sampled_from([0.0, -0.0, TINY, 1e-38, 1e-7, 1.0, 20.0, -20.0, 1e4, -1e30, 1e30, LARGEST, -LARGEST, -INF])
rows_of_logits = st.lists(st.floats(-50, 50, width=32) | extremes, min_size=4, max_size=40)


def within(low: float, high: float, *others: float) -> st.SearchStrategy[float]:
    """Any number of a range, its ends, and numbers that are next to nothing."""
    return st.sampled_from([low, high, *others]) | st.floats(low, high)


PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": within(0, 100, TINY, 9.99e-6, 1e-5, 1e-300),
        "top_p": within(TINY, 1, 1e-300, 1 - 2**-53),
        "top_k": st.sampled_from([-1, 0, 1, 2, V, 2**31 - 1]) | st.integers(1, 400),
        "min_p": within(0, 1, TINY),
        "presence_penalty": within(-2, 2, TINY),
        "frequency_penalty": within(-2, 2),
        "repetition_penalty": within(0.001, 10, 1 + 2**-52),
        "logit_bias": st.dictionaries(st.integers(0, V - 1), within(-100, 100, TINY), max_size=8),
        "min_tokens": st.integers(0, 3),
        "logprobs": st.none() | st.integers(0, 20),
        "seed": st.none() | st.sampled_from([-(2**63), 2**63 - 1, 0]) | st.integers(-(2**63), 2**63 - 1),
    },
)


def padded(numbers: list[float]) -> list[float]:
    return (numbers * V)[:V]


@given(rows_of_logits, PARAMS, st.lists(st.integers(0, V - 1), max_size=6), st.integers(0, 3))
@settings(max_examples=250, deadline=None)
def test_whatever_the_parameters_a_row_gets_a_token_and_leaves_its_neighbours_alone(
    numbers: list[float], params: dict[str, Any], seen: list[int], position: int
) -> None:
    """Only a row without any finite logit fails, and only min_tokens takes a row's last token away."""
    hostile = SamplingRow(
        SamplingParams(max_tokens=None, **params),
        params.get("seed") or 0,
        position,
        prompt_token_ids=[1, 2, 3],
        output_token_ids=seen,
        stop_ids_for_min_tokens=seen,
    )
    quiet = SamplingRow(SamplingParams(), 7, position)
    neighbours = torch.from_numpy(np.random.default_rng(len(numbers)).normal(size=(2, V)).astype(np.float32))
    logits = torch.stack([neighbours[0], torch.tensor(padded(numbers), dtype=torch.float32), neighbours[1]])
    before = logits.clone()
    result = Sampler(V).sample(logits, [quiet, hostile, quiet])
    alone = Sampler(V).sample(neighbours, [quiet, quiet]).token_ids
    assert result.token_ids[[0, 2]].tolist() == alone.tolist()
    assert torch.equal(logits, before)
    has_finite = math.isfinite(max(padded(numbers)))
    assert has_finite or result.failed_rows or result.barred_rows
    if has_finite:
        assert result.failed_rows == ()
        assert not result.barred_rows or hostile.is_below_min_tokens
        assert result.barred_rows or math.isfinite(before[1, result.token_ids[1]])
