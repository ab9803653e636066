"""An engine on a GPU that is not there (fake_gpu.py): it starts, steps, mixes no devices; no launch waits for one.

The host waits where it is to; `check_waits` says so of all that happened since the last `clear`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loraplex import LoRAConfig
from loraplex.errors import AdapterFaultError
from loraplex.frontend.lora_profiling import kernels_of
from loraplex.kernels.triton import attention_choice, lora
from loraplex.metrics import MemoryMode
from loraplex.performance.profile import LoraProfile
from tests.engine.driver import Driver
from tests.engine.fake_gpu import ArgumentLauncher, FakeGpu, fake_gpu
from tests.engine.rules_bench import MAX_MODEL_LEN, NAMES, Bench, loaded
from tests.fixtures import ModelZoo
from tests.kernels.triton.fake_flash_attention import FakeFlashAttention

pytestmark = pytest.mark.interpreter
"""An engine on fake tensors takes seconds to warm up, and each test has one."""

NUM_TOKENS = 6
REQUESTS: tuple[tuple[str | None, dict[str, Any]], ...] = (
    (None, {}),
    (NAMES[0], {"temperature": 1.0}),
    (NAMES[1], {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1, "logprobs": 3}),
    (NAMES[0], {"temperature": 0.7, "top_k": 20, "logit_bias": {5: 1.0}, "min_tokens": 3}),
    (None, {"presence_penalty": 1.0}),
    (NAMES[1], {"prompt_logprobs": 2}),
)


MEANT = {
    "StepHandle.result": {"Download.result"},  # of the oldest step in flight, and only for that
    "Transfers._land": {"Arrival.join"},  # an adapter's weights, in a loader's thread
    "Caretaker._record_one": {"ModelRunner.answer"},  # a diagnostic prompt, while there are no requests
}
"""What waits, and where in it."""


def check_waits(gpu: FakeGpu, *besides: str) -> None:
    """besides: functions that wait themselves, and are to."""
    host = gpu.host
    assert host.waits_elsewhere(*MEANT, *besides) == []
    assert [wait for wait in host.waits_in("ModelRunner.launch") if wait.place not in besides] == []
    for function, places in MEANT.items():
        assert {wait.place for wait in host.waits_in(function)} <= places
    assert host.waits_in("StepHandle.result") != []


def run(driver: Driver, gpu: FakeGpu) -> None:
    """Requests of all kinds, to their ends."""
    for name, params in REQUESTS:
        driver.submit(list(range(5, 25)), name, max_tokens=NUM_TOKENS, **params)
    for _ in range(200):
        driver.advance()
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
        besides = (
            ("StagedBuffers.begin",) if "max_num_batched_tokens" in settings else ()
        )  # steps without a result, see below
        for _ in range(2):
            gpu.host.waits.clear()
            run(driver, gpu)
            check_waits(gpu, *besides)
        if not settings.get("enforce_eager"):
            assert driver.stats.graph_steps["lora"] > NUM_TOKENS
            assert driver.stats.eager_steps.keys() == {"prefill"}
        driver.close()


@pytest.mark.parametrize("look_ahead", [True, False])
def test_a_profile_counts_the_devices_own_time(bench: Bench, look_ahead: bool) -> None:
    """A millisecond a step on this GPU. Without a profile no events are recorded around steps."""
    with fake_gpu() as gpu:
        driver = make(bench, {"enable_diagnosis": False}, look_ahead=look_ahead)
        loaded(driver, bench)
        run(driver, gpu)
        assert "device" not in driver.engine._profiler.seconds
        driver.engine.start_profile()
        run(driver, gpu)
        steps = driver.engine.stop_profile()
        assert steps.part_seconds["device"] == pytest.approx(1e-3 * steps.num_steps)
        report = LoraProfile({}.get).report(driver.stats, steps, kernels_of(driver.engine.info), [])
        assert report.device_share == pytest.approx(1e-3 * steps.num_steps / steps.seconds)
        run(driver, gpu)
        assert driver.engine._profiler.seconds["device"] == pytest.approx(1e-3 * steps.num_steps)
        driver.close()


def test_the_monitor_reads_the_gpus_memory_and_gives_back_what_the_allocator_keeps(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """96 % are taken, by others too: no low-memory mode, which is about the host. A machine without memory then has
    the host tier unlocked, and requests are answered after that."""
    kept = [96 << 20]
    with fake_gpu() as gpu:
        driver = make(bench, {"enable_diagnosis": False, "disk_memory_bytes": 0}, enforce_eager=True)
        loaded(driver, bench)
        monitor, memory = driver.engine._caretaker.monitor, driver.engine._caretaker.monitor._memory
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4, 100))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: kept[0])
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: kept.__setitem__(0, 0))
        memory._system_pressure = lambda: 0.1  # type: ignore[attr-defined]
        monitor._next_look_s = 0.0
        gpu.host.waits.clear()
        monitor.tick()
        assert gpu.host.waits == []
        assert monitor.history[-1].pressure["gpu"] == pytest.approx(0.96)
        assert (monitor.mode, kept) == (MemoryMode.NORMAL, [0])
        kept[0] = 32 << 20
        assert memory.release_gpu() == 32 << 20
        arena = driver.engine.adapters._tiers.host.pool.arena
        assert arena.is_pinned
        memory._system_pressure = lambda: 0.99  # type: ignore[attr-defined]
        monitor._next_look_s = 0.0
        monitor.tick()
        assert (monitor.mode, arena.is_pinned) == (MemoryMode.LOW_MEMORY, False)
        run(driver, gpu)
        driver.close()


def test_prompts_through_flash_attention_wait_for_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lengths are uploaded once a step. Decode steps, captured and eager ones, do without it."""
    flash = FakeFlashAttention().install(monkeypatch)
    with fake_gpu() as gpu:
        driver = make(bench, {"enable_diagnosis": False}, attention_backend="flash_attn")
        assert driver.engine.info.backend_description.endswith("FlashAttention 3 for prompts")
        loaded(driver, bench)
        gpu.host.waits.clear()
        flash.calls.clear()
        run(driver, gpu)
        check_waits(gpu)
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


def test_steps_without_a_result_are_not_queued_without_end(bench: Bench) -> None:
    """Parts of a long prompt give none to wait for. The host is two of them ahead: it waits for the copy of the step
    before the last."""
    with fake_gpu() as gpu:
        driver = make(bench, max_num_batched_tokens=8)
        driver.submit(list(range(5, 85)), max_tokens=1)
        gpu.host.waits.clear()
        for _ in range(2):
            driver.advance()
        assert gpu.host.waits == []
        for num_waits in range(1, 8):
            driver.advance()
            assert [wait.place for wait in gpu.host.waits] == ["StagedBuffers.begin"] * num_waits
        driver.finish()
        driver.close()


def test_the_step_before_is_waited_for_when_the_next_is_launched(bench: Bench) -> None:
    with fake_gpu() as gpu:
        driver = make(bench)
        driver.submit(list(range(5, 25)), max_tokens=NUM_TOKENS)
        gpu.host.waits.clear()
        driver.advance()
        assert gpu.host.waits == []
        driver.advance()
        assert [wait.place for wait in gpu.host.waits] == ["Download.result"]
        assert len(driver.engine._flights) == 1
        driver.finish()
        driver.close()


def test_a_capture_for_a_larger_rank_is_waited_for_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "LEAST_RANK_CAPACITY", 1)  # so that the bench's adapters have larger ones
    with fake_gpu() as gpu:
        driver = make(bench)
        loaded(driver, bench)
        gpu.host.waits.clear()
        run(driver, gpu)
        assert gpu.host.waits_in("ModelRunner.launch") != []
        check_waits(gpu, "CudaGraphDevice.capture")
        gpu.host.waits.clear()
        run(driver, gpu)
        check_waits(gpu)
        driver.close()


def test_without_page_locked_memory_every_launch_would_wait(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpu() as gpu:
        driver = make(bench)
        loaded(driver, bench)
        driver.submit(list(range(5, 25)), NAMES[0], max_tokens=NUM_TOKENS)
        monkeypatch.setattr(gpu.host.pinned, "covers", lambda _: False)
        for _ in range(3):
            gpu.host.waits.clear()
            driver.step()
            assert "StagedBuffers.upload" in {wait.place for wait in gpu.host.waits_in("ModelRunner.launch")}
        driver.close()


@pytest.mark.parametrize("num_moved", [0, 1, 3])
def test_moved_kv_blocks_wait_for_nothing(bench: Bench, num_moved: int) -> None:
    with fake_gpu() as gpu:
        driver = make(bench)
        gpu.host.waits.clear()
        driver.engine._runner.move_kv_blocks(range(num_moved), range(4, 4 + num_moved))
        assert gpu.host.waits == []
        driver.close()


def test_weights_are_checked_beside_the_steps(bench: Bench) -> None:
    """A loader's thread waits for the checksums (which are wrong here: all bytes on the device are 0)."""
    with fake_gpu() as gpu:
        driver = make(bench, {"scrub_bytes_per_s": 1 << 30})
        loaded(driver, bench)
        driver.submit(list(range(5, 25)), NAMES[0], max_tokens=NUM_TOKENS)
        driver.step()
        gpu.loader.run()
        gpu.host.waits.clear()
        driver.engine._caretaker._last_scrub_s = -1e9
        driver.step(2)
        check_waits(gpu)
        gpu.host.waits.clear()
        gpu.loader.run()
        assert {(wait.what, wait.place) for wait in gpu.host.waits} == {("cpu", "_checksums_by_torch")}
        driver.step()
        assert [type(error) for error in driver.errors.values()] == [AdapterFaultError]
        driver.close()


def test_blocks_are_moved_and_memory_is_released_between_steps(bench: Bench) -> None:
    """Moves wait for nothing; what the allocator keeps is given back once the device is idle."""
    with fake_gpu() as gpu:
        driver = make(bench, device_memory="16MiB")
        loaded(driver, bench)
        driver.submit(list(range(5, 25)), NAMES[0], max_tokens=NUM_TOKENS)
        driver.step(2)
        driver.engine.settle()
        gpu.host.waits.clear()
        driver.engine._runner.move_kv_blocks([0, 1], [2, 3])
        driver.engine._caretaker.monitor.alarm("a test")
        assert gpu.host.waits == []
        driver.step(20)
        check_waits(gpu, "GpuMemory.release_cache")
        assert driver.errors == {}
        driver.close()


def test_what_was_launched_is_waited_for_at_the_end(bench: Bench) -> None:
    with fake_gpu() as gpu:
        driver = make(bench)
        driver.submit(list(range(5, 25)), max_tokens=NUM_TOKENS)
        driver.advance()
        gpu.host.waits.clear()
        driver.close()
        assert [(wait.what, wait.place) for wait in gpu.host.waits] == [("synchronize", "ModelRunner.wait")]


OWN_NAMES = ("LoRA of both", "trained tokens", "saved norms", "saved linears", "added tokens, LoRA of both")


@pytest.mark.parametrize("settings", [{}, {"look_ahead": False}, {"lora": {"lora_dtype": "int8"}}], ids=str)
def test_weights_of_an_adapters_own_wait_for_nothing(bench: Bench, zoo: ModelZoo, settings: dict[str, Any]) -> None:
    """Nor do added tokens; their steps run without a graph, and steps of other adapters with one."""
    paths = {name: zoo.own_adapter(bench.base, name) for name in OWN_NAMES}
    with fake_gpu() as gpu:
        driver = make(bench, **settings)
        for name, path in paths.items():
            driver.registry.load(name, str(path))
        loaded(driver, bench)
        for _ in range(2):
            gpu.host.waits.clear()
            for name in (*OWN_NAMES, NAMES[0], None):
                for params in ({}, {"temperature": 1.0, "logprobs": 3, "prompt_logprobs": 2}):
                    driver.submit(list(range(5, 25)), name, max_tokens=NUM_TOKENS, **params)
            for _ in range(400):
                driver.advance()
                gpu.loader.run()
                if not driver.engine.has_unfinished:
                    break
            assert driver.errors == {}
            check_waits(gpu)
        assert driver.stats.eager_steps["own_weights"] > 0
        replayed = driver.stats.graph_steps.get("lora", 0)
        driver.submit(list(range(5, 25)), NAMES[0], max_tokens=NUM_TOKENS)
        driver.finish()
        assert driver.stats.graph_steps["lora"] > replayed
        driver.close()
