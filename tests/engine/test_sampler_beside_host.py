"""The sampler for a device beside the host, on CPU tensors and on none: the same tokens, and nothing that waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from loraplex.engine.sampler import Sampler, SamplerOutput, SamplingRow
from loraplex.kernels import device_ranking
from loraplex.kernels.device_copies import Download, upload
from tests.engine.test_sampler import V, normal_logits, params_strategy, row

OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_p": 0.99, "logprobs": 3},
    {"top_p": 1e-9},
    {"top_k": 50, "min_p": 0.02},
    {"top_k": 300, "top_p": 0.8},
    {"top_k": 2000},
    {"top_k": 5000, "top_p": 0.7, "min_p": 0.001, "temperature": 2},
    {"min_p": 0.05, "logprobs": 0},
    {"min_p": 0.001, "top_p": 0.95, "temperature": 1.5},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "prompt_token_ids": [1, 2], "output_token_ids": [2, 2, 0]},
    {"logit_bias": {1: 4.0}, "min_tokens": 3, "stop_ids_for_min_tokens": [0, 1]},
)


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """CPU tensors count as those of a device beside the host."""
    with patch.object(device_ranking, "runs_beside_host", lambda _: True):
        yield


class NothingWaits(TorchFunctionMode):
    """Refuses every call that looks at a value, or makes a shape of one."""

    WAITING = ("item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique", "equal", "allclose")
    WAITING_AS = ("__bool__", "__int__", "__float__", "__index__", "__contains__", "__array__")

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        assert name not in (*self.WAITING, *self.WAITING_AS), f"{name} waits for the device"
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            is_mask = [isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in index]
            assert not any(is_mask), f"{name} with a mask waits for the device"
        if name == "where":
            assert len(args) == 3, "where of a condition alone is nonzero"
        return func(*args, **(kwargs or {}))


def assert_same(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> SamplerOutput:
    """Drawn in both ways, nothing waited for in the second, and the logits are as before."""
    expected = Sampler(logits.shape[1]).sample(logits, rows)
    before = logits.clone()
    with as_on_a_device():
        with NothingWaits():
            drawn = Sampler(logits.shape[1]).launch(logits, rows)
        found = drawn.result()
    assert drawn.token_ids.tolist() == found.token_ids.tolist() == expected.token_ids.tolist()
    assert (found.failed_rows, found.barred_rows) == (expected.failed_rows, expected.barred_rows)
    assert found.logprobs == expected.logprobs
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    return found


@given(st.integers(0, 2**32), st.lists(params_strategy(V), min_size=1, max_size=6), st.booleans())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_mix_of_parameters(seed: int, options: list[dict[str, Any]], is_tied: bool) -> None:
    logits = normal_logits(len(options), seed=seed)
    assert_same(logits.round() if is_tied else logits, [row(**one) for one in options])


@pytest.mark.parametrize("vocab_size", [4, 127, 128, 129, 8192, 70_001])
@pytest.mark.parametrize("kind", ["normal", "tied", "flat", "masked"])
def test_vocabularies_and_hard_places(vocab_size: int, kind: str) -> None:
    rows = [row(position, seed, **one) for position in range(2) for seed, one in enumerate(OPTIONS)]
    logits = normal_logits(len(rows), vocab_size)
    if kind == "tied":
        logits = logits.round()
    elif kind == "flat":
        logits = torch.zeros_like(logits)
    elif kind == "masked":
        logits[logits < 1] = -torch.inf
        logits[:, 2] = 1
    assert_same(logits, rows)


@pytest.mark.parametrize("vocab_size", [1, 2])
def test_tiny_vocabularies(vocab_size: int) -> None:
    options = [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.0, "logprobs": 2}]
    assert_same(normal_logits(5, vocab_size), [row(seed=i, **one) for i, one in enumerate(options)])


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.99])
def test_top_p_that_the_best_few_do_not_satisfy(top_p: float) -> None:
    """Flat rows beside sharp ones: some need the whole vocabulary."""
    logits = normal_logits(40, 5000, scale=0.5)
    logits[::2] *= 20
    assert_same(logits, [row(i, top_p=top_p, min_p=0.01 if i % 3 else 0.0) for i in range(40)])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, "all -inf"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_bad_row_fails_alone(bad: float | str, options: dict[str, Any]) -> None:
    logits = normal_logits(3)
    if isinstance(bad, str):
        logits[1] = -torch.inf
    else:
        logits[1, 200] = bad
    found = assert_same(logits, [row(i, **options) for i in range(3)])
    is_own_doing = "min_tokens" in options and bad == "all -inf"  # to tell these apart would take another look
    assert (found.barred_rows if is_own_doing else found.failed_rows) == (1,)


def test_rows_at_once_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.engine.sampler._MAX_ELEMENTS", 3 * V)
    rows = [row(i, seed=i, **{"logprobs": 2, **OPTIONS[i % len(OPTIONS)]}) for i in range(40)]
    assert_same(normal_logits(40), rows)


def test_a_greedy_batch_is_one_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the search of the largest touches a whole row."""
    sampler, calls = Sampler(V), []
    for name in ("ordered_top_k", "token_weights", "invert_cdf", "keep_nucleus", "log_sum_exp", "token_ranks"):
        monkeypatch.setattr(sampler.ops, name, lambda *_, name=name: calls.append(name))
    with as_on_a_device():
        logits = normal_logits(5)
        token_ids = sampler.launch(logits, [row(temperature=0)] * 5).result().token_ids
    assert token_ids.tolist() == logits.argmax(-1).tolist()
    assert calls == []


def test_nothing_looks_at_a_tensor_without_values() -> None:
    """On the meta device there is nothing to look at: whatever waited for a value would raise."""
    rows = [row(i, seed=i, **{"logprobs": i % 3 or None, **one}) for i, one in enumerate(OPTIONS)]
    for vocab_size in (V, 70_001):
        logits = torch.empty(len(rows), vocab_size, device="meta")
        drawn = Sampler(vocab_size).launch(logits, rows)
        assert drawn.token_ids.shape == (len(rows),)
        assert drawn.token_ids.device.type == "meta"
        Sampler(vocab_size).launch_prompt_logprobs(logits, [1] * len(rows), 3)


def test_prompt_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.engine.sampler._MAX_ELEMENTS", 3 * V)  # three rows at a time
    logits, next_ids = normal_logits(10).round(), np.random.default_rng(1).integers(0, V, 10).tolist()
    for k in (0, 4):
        expected = Sampler(V).prompt_logprobs(logits, next_ids, k)
        with as_on_a_device(), NothingWaits():
            finish = Sampler(V).launch_prompt_logprobs(logits, next_ids, k)
        assert finish() == expected
        assert Sampler(V).launch_prompt_logprobs(logits, next_ids, k)() == expected


def test_what_waits_is_noticed() -> None:
    x = torch.ones(3)
    for wait in (x.tolist, x.sum().item, lambda: bool(x[0]), lambda: x[x > 0], x.nonzero, lambda: torch.where(x > 0)):
        with NothingWaits(), pytest.raises(AssertionError, match=r"waits|nonzero"):
            wait()


def test_copies() -> None:
    array = np.arange(6).reshape(2, 3)
    there = upload(array, torch.device("cpu"))
    assert there.data_ptr() == array.ctypes.data
    assert [tensor.tolist() for tensor in Download([there, there + 1]).result()] == [
        array.tolist(),
        (array + 1).tolist(),
    ]
