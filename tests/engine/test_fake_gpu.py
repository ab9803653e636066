"""An engine on a GPU that is not there (fake_gpu.py): it starts, steps, mixes no devices, and no step waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loraplex import LoRAConfig
from loraplex.kernels.triton import attention_choice
from loraplex.memory.arena import Arena
from tests.engine.driver import Driver
from tests.engine.fake_gpu import GPU, ArgumentLauncher, FakeGpu, fake_gpu
from tests.engine.rules_bench import MAX_MODEL_LEN, NAMES, Bench, loaded
from tests.kernels.triton.fake_flash_attention import FakeFlashAttention

NUM_TOKENS = 6
REQUESTS: tuple[tuple[str | None, dict[str, Any]], ...] = (
    (None, {}),
    (NAMES[0], {"temperature": 1.0}),
    (NAMES[1], {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1, "logprobs": 3}),
    (NAMES[0], {"temperature": 0.7, "top_k": 20, "logit_bias": {5: 1.0}, "min_tokens": 3}),
    (None, {"presence_penalty": 1.0}),
    (NAMES[1], {"prompt_logprobs": 2}),
)


def run(driver: Driver, gpu: FakeGpu) -> None:
    """Requests of all kinds, to their ends."""
    for name, params in REQUESTS:
        driver.submit(list(range(5, 25)), name, max_tokens=NUM_TOKENS, **params)
    for _ in range(200):
        driver.step(1)
        gpu.loader.run()
        if not driver.engine.has_unfinished:
            break
    assert driver.errors == {}
    assert [len(output.outputs[0].token_ids) for output in driver.outputs.values()] == [NUM_TOKENS] * len(REQUESTS)
    assert driver.stats.kernel_fallbacks == {}
    driver.outputs.clear()


def make(bench: Bench, lora: dict[str, Any] | None = None, **settings: Any) -> Driver:
    usual: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8}
    config = LoRAConfig(**{"host_memory_bytes": 1 << 24, "scrub_bytes_per_s": 0, **(lora or {})})
    return Driver(bench.base, config, **{**usual, **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enforce_eager": True},
        {"max_num_batched_tokens": 8},
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"quantization": "fp8"},
        {"lora": {"lora_dtype": "int8"}},
        {"look_ahead": False},
        {"kv_cache_memory_bytes": 1 << 22, "lora": {"adapter_memory_bytes": 1 << 22}},
    ],
    ids=str,
)
def test_no_step_waits_for_the_device(bench: Bench, settings: dict[str, Any]) -> None:
    with fake_gpu() as gpu:
        driver = make(bench, **settings)
        assert driver.engine.graphs is None or driver.engine.graphs.num_graphs == 2 * 4  # 1, 2, 4, 8
        assert driver.engine._flights._look_ahead is settings.get("look_ahead", True)
        loaded(driver, bench)
        gpu.waits.clear()
        run(driver, gpu)
        assert gpu.waits == []
        run(driver, gpu)
        assert gpu.waits == []
        if not settings.get("enforce_eager"):
            assert driver.stats.graph_steps["lora"] > NUM_TOKENS
            assert driver.stats.eager_steps.keys() == {"prefill"}
        driver.close()


def test_prompts_through_flash_attention_wait_for_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lengths are uploaded once a step. Decode steps, captured and eager ones, do without it."""
    flash = FakeFlashAttention().install(monkeypatch)
    with fake_gpu() as gpu:
        driver = make(bench, attention_backend="flash_attn")
        assert driver.engine.info.backend_description.endswith("FlashAttention 3 for prompts")
        loaded(driver, bench)
        gpu.waits.clear()
        flash.calls.clear()
        run(driver, gpu)
        assert gpu.waits == []
        assert driver.stats.graph_steps["lora"] > 0
        assert len(flash.calls) == driver.stats.eager_steps["prefill"] * 2  # layers
        assert len({id(call["lens"]) for call in flash.calls}) == driver.stats.eager_steps["prefill"]
        driver.close()


def test_tiles_that_flash_attention_leaves_are_compiled_at_start(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones, whose keys are not divided; the trial has others, and is left out here."""
    FakeFlashAttention().install(monkeypatch)
    launched: set[tuple[int, bool]] = set()

    def launch(self: ArgumentLauncher, kernel: Any, *args: Any, **options: Any) -> None:
        if kernel.__name__ == "prefill_attention_kernel":
            launched.add((options["ROWS"], options["IS_SPLIT"]))

    with fake_gpu():
        monkeypatch.setattr(ArgumentLauncher, "launch", launch)
        monkeypatch.setattr(attention_choice, "_tried", lambda *_: (None, 1.0))
        make(bench, attention_backend="flash_attn").close()
    assert (64, False) in launched


@pytest.mark.parametrize("is_there", [True, False])
def test_as_fast_as_triton_is_not_enough(bench: Bench, monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    """All that is measured on this GPU takes equally long."""
    flash = FakeFlashAttention().install(monkeypatch) if is_there else None
    with fake_gpu():
        driver = make(bench)
        assert "FlashAttention" not in driver.engine.info.backend_description
        assert flash is None or len(flash.calls) > 50
        driver.close()


def test_blocks_are_moved_and_memory_is_released_between_steps(bench: Bench) -> None:
    with fake_gpu():
        driver = make(bench, device_memory="16MiB")
        loaded(driver, bench)
        driver.submit(list(range(5, 25)), NAMES[0], max_tokens=NUM_TOKENS)
        driver.step(2)
        driver.engine.settle()
        driver.engine._runner.move_kv_blocks([0, 1], [2, 3])
        driver.engine._caretaker.monitor.alarm("a test")
        driver.step(20)
        assert driver.errors == {}
        driver.close()


class TestTheGpu:
    def test_what_waits_and_what_mixes_devices_is_seen(self) -> None:
        with fake_gpu() as gpu:
            x = torch.zeros(4, device="cuda")
            assert x.device == GPU
            assert x[1:][None].shape == (1, 3)
            assert gpu.waits == []
            x.tolist()
            assert len(gpu.waits) == 1
            with pytest.raises(RuntimeError, match="device"):
                torch.add(x, torch.zeros(4))

    def test_its_memory_is_none(self) -> None:
        with fake_gpu():
            assert Arena(1 << 40, 1 << 20, "cuda").memory.device == GPU
