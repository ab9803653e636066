"""One call of the sampler for rows whose vocabularies end at different tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.engine.sampler import Sampler
from loraplex.kernels import device_ranking
from loraplex.kernels.reference import ReferenceBackend
from loraplex.kernels.torch_ops import TorchBackend
from tests.engine.test_sampler import V, normal_logits, params_strategy, row

BACKENDS = TorchBackend(), ReferenceBackend()


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (4, 1, 3, 0, 5, 2)])
def test_rows_of_other_vocabularies_draw_what_they_draw_alone(order: tuple[int, ...]) -> None:
    """Smaller, the sampler's own and two larger ones, in any order; odd rows and rows without a token are found."""
    sizes = [V, V + 9, V, V - 9, V + 300, V]
    logits = torch.full((6, V + 300), -torch.inf)
    for i, size in enumerate(sizes):
        logits[i, :size] = normal_logits(1, size, seed=i)[0]
    logits[1, V + 3] = torch.nan
    rows = [row(position=i, seed=i, temperature=0.8, logprobs=2) for i in range(6)]
    barred = row(temperature=0.8, min_tokens=9)
    rows[2] = replace(barred, stop_ids_for_min_tokens=tuple(range(V)))
    chosen = list(order)
    drawn = Sampler(V).launch_by_vocabulary(logits[chosen], [rows[i] for i in chosen], [sizes[i] for i in chosen])
    result = drawn.result()
    assert result.failed_rows == (order.index(1),)
    assert result.barred_rows == (order.index(2),)
    assert drawn.token_ids.tolist() == result.token_ids.tolist()
    for place, i in enumerate(order):
        size = max(sizes[i], V)
        alone = Sampler(size).sample(logits[i : i + 1, :size].clone(), [rows[i]])
        assert alone.token_ids.tolist() == [result.token_ids[place]]
        assert alone.logprobs == (result.logprobs[place],)
        assert result.token_ids[place] < sizes[i]


def of_sizes(sizes: Sequence[int], seed: int) -> torch.Tensor:
    """-inf behind each row's vocabulary."""
    logits = torch.full((len(sizes), max(sizes)), -torch.inf)
    for i, size in enumerate(sizes):
        logits[i, :size] = normal_logits(1, size, seed=seed + i)[0]
    return logits


@pytest.mark.parametrize("beside_host", [False, True])
@pytest.mark.parametrize("base", [3, V, 1000])
@given(st.integers(0, 2**32), st.lists(params_strategy(20), min_size=1, max_size=7), st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_vocabulary_of_any_size_draws_what_it_draws_alone(
    base: int, beside_host: bool, seed: int, options: list[dict[str, Any]], data: st.DataObject
) -> None:
    """Also where top_k is between the sizes, log probabilities are asked for all tokens, or all is forbidden."""
    sizes, ops = [data.draw(st.integers(base, base + 64)) for _ in options], data.draw(st.sampled_from(BACKENDS))
    for one, size in zip(options, sizes, strict=True):
        one["top_k"] = data.draw(st.sampled_from([one["top_k"], size - 1, size, size + 1]))
        one["logprobs"] = data.draw(st.sampled_from([one["logprobs"], 20]))
        if not data.draw(st.integers(0, 5)):
            one["stop_ids_for_min_tokens"] = range(size)
    rows, logits = [row(**one) for one in options], of_sizes(sizes, seed)
    with patch.object(device_ranking, "runs_beside_host", lambda _: beside_host):
        result = Sampler(base, ops).launch_by_vocabulary(logits, rows, sizes).result()
        for i, size in enumerate(sizes):
            alone = Sampler(size, ops).sample(logits[i : i + 1, :size].clone(), rows[i : i + 1])
            assert alone.token_ids.tolist() == [result.token_ids[i]]
            assert alone.logprobs == (result.logprobs[i],)
            assert (alone.failed_rows, alone.barred_rows) == tuple(
                (0,) * (i in found) for found in (result.failed_rows, result.barred_rows)
            )


@pytest.mark.parametrize(("base", "most"), [(V, 2), (1000, 3)])
def test_adapters_do_not_choose_the_number_of_draws(base: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 sizes beside the base's: one draw for all of them, two where the scale of the weights changes between."""
    sizes, draws, launch = [base, *range(base + 1, base + 65)], [], Sampler.launch

    def counted(sampler: Sampler, logits: torch.Tensor, rows: Any) -> Any:
        draws.append(len(logits))
        return launch(sampler, logits, rows)

    monkeypatch.setattr(Sampler, "launch", counted)
    rows = [row(position=i) for i in range(65)]
    Sampler(base).launch_by_vocabulary(of_sizes(sizes, 0), rows, sizes).result()
    assert (len(draws), sum(draws)) == (most, 65)


def test_log_probabilities_are_of_a_row_s_own_vocabulary_to_the_last_bit() -> None:
    """Zeros behind it would group the sum in another way."""
    sizes, rows = [*range(V, V + 128)], [row(position=i, logprobs=0) for i in range(128)]
    logits, ops = of_sizes(sizes, 0), ReferenceBackend()
    result = Sampler(V, ops).launch_by_vocabulary(logits, rows, sizes).result()
    for i, size in enumerate(sizes):
        alone = Sampler(size, ops).sample(logits[i : i + 1, :size].clone(), [rows[i]])
        assert alone.logprobs == (result.logprobs[i],)
