"""Triton's nucleus in the interpreter, beside the sort of stock torch, bit for bit."""

from __future__ import annotations

import pytest
import torch

from loraplex.engine.sampler import Sampler
from loraplex.kernels import device_ranking
from loraplex.kernels.token_ranking import WeightRule, keep_nucleus, token_weights
from loraplex.kernels.triton import nucleus
from loraplex.kernels.triton.backend import TritonBackend
from tests.engine.test_sampler import normal_logits, row

pytestmark = pytest.mark.interpreter


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> TritonBackend:
    monkeypatch.setattr(nucleus, "TILE", 256)  # two for a row
    return TritonBackend(torch.device("cpu"))


def rows_of(kind: str, num_rows: int, vocab_size: int) -> torch.Tensor:
    x = normal_logits(num_rows, vocab_size, scale=0.5)
    if kind == "tied":
        return x.round()
    if kind == "flat":
        return torch.zeros_like(x)
    if kind == "zeros":
        return torch.where(x > 0, 0.0, -0.0)
    if kind == "masked":
        x[x < 0.3] = -torch.inf
        x[:, 0] = 1
    return x


@pytest.mark.parametrize(
    ("kind", "vocab_size"),
    [("normal", 300), ("tied", 257), ("flat", 256), ("zeros", 300), ("masked", 300), ("normal", 1)],
)
def test_as_the_sort_does(backend: TritonBackend, kind: str, vocab_size: int) -> None:
    x = rows_of(kind, 5, vocab_size)
    rule = WeightRule(x.amax(-1, keepdim=True), torch.full((5, 1), 0.8), 2.0 ** (53 - vocab_size.bit_length()))
    weights, mass = token_weights(x, rule)
    wanted = mass * torch.tensor([1e-9, 0.05, 0.5, 0.99, 1.0], dtype=torch.float64)[:, None]
    expected = keep_nucleus(x, weights.clone(), wanted, rule)
    assert torch.equal(backend.keep_nucleus(x, weights, wanted, rule), expected)
    assert not backend.fallbacks()


def test_rows_that_nobody_reads_stay(backend: TritonBackend) -> None:
    x = normal_logits(3, 300)
    x[2, 5] = torch.nan
    rule = WeightRule(x.amax(-1, keepdim=True), torch.ones(3, 1), 2.0**40)
    weights, mass = token_weights(x, rule)
    wanted = torch.tensor([[0.0], [0.5], [torch.nan]], dtype=torch.float64)
    wanted[1] *= mass[1]
    kept = backend.keep_nucleus(x, weights.clone(), wanted, rule)
    assert torch.equal(kept[0], weights[0])
    assert torch.equal(
        kept[1:2], keep_nucleus(x[1:2], weights[1:2], wanted[1:2], WeightRule(rule.top[1:2], torch.ones(1, 1), 2.0**40))
    )


def test_what_it_does_not_cover_is_counted(backend: TritonBackend) -> None:
    x = normal_logits(2, 64)
    rule = WeightRule(x.amax(-1, keepdim=True), torch.ones(2, 1), 2.0**40)
    weights, mass = token_weights(x, rule)
    wide = torch.stack([weights, weights], -1)[..., 0]
    expected = keep_nucleus(x, weights.clone(), mass / 2, rule)
    assert torch.equal(backend.keep_nucleus(x, wide, mass / 2, rule), expected)
    assert [each.label for each in backend.fallbacks()] == ["keep_nucleus: logits or weights are not dense"]


def test_the_sampler_draws_the_same_with_it(backend: TritonBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = normal_logits(4, 300, scale=0.5)
    logits[::2] *= 20  # sharp rows need no nucleus of the whole vocabulary
    rows = [row(i, top_p=0.9, min_p=0.01 if i % 3 else 0.0) for i in range(4)]
    expected = Sampler(300).sample(logits, rows).token_ids.tolist()
    monkeypatch.setattr(device_ranking, "runs_beside_host", lambda _: True)
    assert Sampler(300, backend).sample(logits, rows).token_ids.tolist() == expected
    assert not backend.fallbacks()
