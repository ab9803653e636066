"""The setting attention_backend: what is taken, what is said about it, and what is refused."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
import torch

from loraplex import LLM, EngineConfig, SamplingParams
from loraplex.errors import ConfigError
from loraplex.kernels.ops import get_backend
from loraplex.kernels.triton import attention_choice
from loraplex.kernels.triton.backend import TritonBackend
from loraplex.kernels.triton.flash_attention import MODULE
from tests.fixtures import ModelZoo
from tests.kernels.cases import FP16, FP32, assert_close
from tests.kernels.test_attention import LAYER
from tests.kernels.triton.fake_flash_attention import FakeFlashAttention
from tests.kernels.triton.test_attention import Rig

CPU = torch.device("cpu")
PROMPTS = ("One day, a long time ago, when there was no path yet", "Two", "Three cats and four dogs")


def choose(wanted: str, windows: tuple[int | None, ...] = (None,), dtype: torch.dtype = FP16) -> TritonBackend:
    backend = TritonBackend(CPU, attention=wanted)
    backend.choose_attention(4, dtype, torch.zeros(3, 1, 2, 2, 16, 16, dtype=dtype), windows)
    return backend


def test_it_has_no_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeFlashAttention().install(monkeypatch)
    backend = TritonBackend(CPU, attention="flash_attn")
    with pytest.raises(ConfigError, match="cannot run here: the model's attention has sinks"):
        backend.choose_attention(4, FP16, torch.zeros(3, 1, 2, 2, 16, 16, dtype=FP16), (None,), None, has_sinks=True)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of the Triton kernels and of FlashAttention 3, as they will be measured."""
    taken = [3.0, 2.0]
    monkeypatch.setattr(attention_choice, "seconds_of", lambda runs, _: taken[: len(runs)])
    return taken


def test_auto_takes_it_where_it_is_faster_and_says_so(
    monkeypatch: pytest.MonkeyPatch, times: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    FakeFlashAttention().install(monkeypatch)
    with caplog.at_level(logging.INFO):
        assert choose("auto").description.endswith(", FlashAttention 3 for prompts")
        assert "attention of prompts: FlashAttention 3 (FlashAttention 3: 1.50 times as fast" in caplog.text
        times[1] = 2.9  # not by enough
        assert "FlashAttention" not in choose("auto").description
    assert "attention of prompts: Triton (FlashAttention 3: 1.03 times as fast" in caplog.text
    assert len(caplog.records) == 2


def test_asked_for_it_is_taken_however_fast_it_is(monkeypatch: pytest.MonkeyPatch, times: list[float]) -> None:
    FakeFlashAttention().install(monkeypatch)
    times[1] = 9.0
    assert "FlashAttention 3" in choose("flash_attn").description


def test_triton_does_not_even_look(monkeypatch: pytest.MonkeyPatch) -> None:
    flash = FakeFlashAttention().install(monkeypatch)
    assert "FlashAttention" not in choose("triton").description
    assert flash.calls == []


def test_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed second is said to be faster. Every window is tried, shorter than contexts."""
    flash = FakeFlashAttention().install(monkeypatch)
    clock = iter(range(100))
    monkeypatch.setattr(attention_choice, "_on_cpu", lambda run: (run(), 1.0 / (1 + next(clock)))[1])
    assert "FlashAttention 3" in choose("auto", (None, 4096)).description
    assert {call["window"] for call in flash.calls} == {(-1, -1), (31, 0)}
    assert flash.calls[0]["lens"].tolist() == [0, 32, 64]


@pytest.mark.parametrize(
    ("flash", "windows", "dtype", "reason"),
    [
        (None, (None,), FP16, "it is not installed"),
        (FakeFlashAttention(), (None,), FP32, "float32"),
        (
            FakeFlashAttention(error=RuntimeError("no paged KV here\nat")),
            (None,),
            FP16,
            "RuntimeError: no paged KV here",
        ),
        (FakeFlashAttention(error=TypeError("unexpected keyword")), (8,), FP16, "TypeError: unexpected keyword"),
        (FakeFlashAttention(factor=1.01), (None,), FP16, "other numbers than Triton's"),
        (FakeFlashAttention(factor=float("nan")), (None,), FP16, "other numbers than Triton's"),
    ],
    ids=["absent", "float32", "no paged KV", "other version", "wrong", "nan"],
)
def test_where_it_cannot_run_auto_leaves_it_and_asking_for_it_is_an_error(
    flash: FakeFlashAttention | None,
    windows: tuple[int | None, ...],
    dtype: torch.dtype,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if flash is None:
        monkeypatch.setitem(sys.modules, MODULE, None)
    else:
        flash.install(monkeypatch)
    with caplog.at_level(logging.INFO):
        assert "FlashAttention" not in choose("auto", windows, dtype).description
    assert "attention of prompts: Triton" in caplog.text
    assert reason in caplog.text
    with pytest.raises(ConfigError, match="attention_backend is flash_attn, which cannot run here") as caught:
        choose("flash_attn", windows, dtype)
    assert reason in str(caught.value)


def test_chosen_it_runs_what_it_covers_and_the_kernels_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    flash = FakeFlashAttention().install(monkeypatch)
    backend = choose("flash_attn")
    flash.calls.clear()
    for dtype, num_calls in ((FP16, 1), (FP32, 1)):
        rig = Rig([1, 9], [30, 12], dtype=dtype)
        got = backend.paged_attention(rig.q, rig.kv[:, LAYER], rig.plan, rig.scale, 5)
        assert_close(got, rig.expected(5), dtype)
        assert len(flash.calls) == num_calls
    assert not backend.fallbacks()


@pytest.mark.parametrize("name", ["torch", "reference", "auto"])
def test_other_kernels_than_tritons_have_no_choice(name: str) -> None:
    for wanted in ("triton", "flash_attn"):
        with pytest.raises(ConfigError, match=f"attention_backend {wanted} needs triton kernels on a GPU"):
            get_backend(name, CPU, "auto", wanted)
    get_backend(name, CPU).choose_attention(4, FP32, torch.zeros(1), (None,))


def test_an_unknown_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"attention_backend must be one of .*'fa4'"):
        EngineConfig(model="m", attention_backend="fa4")


# --------------------------------------------------------------------------------------------------------- whole models


def generate(base: str, **settings: Any) -> tuple[list[tuple[int, ...]], str]:
    """Chunks of 8 tokens: prompts, chunks, decodes and steps with all of them; and what ran."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(base, dtype="float16", max_num_batched_tokens=8, max_num_seqs=4, **settings) as llm:
        outputs = llm.generate(list(PROMPTS), params)
        return [tuple(output.outputs[0].token_ids) for output in outputs], llm.engine.info.backend_description


@pytest.mark.interpreter
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_greedy_tokens_equal_the_reference(zoo: ModelZoo, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """mistral has a sliding window."""
    base = str(zoo.base(family))  # transformers makes it, which has an eye on that module, too
    flash = FakeFlashAttention().install(monkeypatch)
    expected, _ = generate(base, lora_backend="reference")
    got, description = generate(base, lora_backend="triton", attention_backend="flash_attn")
    assert got == expected
    assert "FlashAttention 3 for prompts" in description
    assert len(flash.calls) > 4
    assert any(0 in call["lens"].tolist() for call in flash.calls), "no step had decodes and prompts"


def test_an_engine_says_why_it_does_not_start(zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch) -> None:
    base = str(zoo.base("llama"))
    monkeypatch.setitem(sys.modules, MODULE, None)
    with pytest.raises(ConfigError, match="flash_attn, which cannot run here: it is not installed"):
        generate(base, lora_backend="triton", attention_backend="flash_attn")
