"""`loraplex profile`: parts add up to the whole, and a run on the demo model has every part."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from loraplex.bench import Workload
from loraplex.config import EngineConfig
from loraplex.demo.tasks import adapter_path, assets_path
from loraplex.errors import ConfigError
from loraplex.frontend.llm import LLM
from loraplex.kernels.protocols import KernelBackend
from loraplex.metrics import KernelSpeedup
from loraplex.models import decoder
from loraplex.models.config import ModelConfig
from loraplex.models.speedup import KernelShapes
from loraplex.performance.settings import ProfileSettings
from loraplex.profile import PARTS, Profile, StepProfiler, profile, run_profile

BASE = str(assets_path() / "base")
ADAPTERS = [Path(adapter_path("sort"))]


def test_parts_add_up_to_the_total() -> None:
    seconds = {
        "schedule": 0.1,
        "build": 0.2,
        "forward": 2.0,
        "gemm": 1.0,
        "lora": 0.25,
        "sample": 0.3,
        "detokenise": 0.1,
    }
    one = Profile.of(seconds, wall_s=3.0, num_steps=2)
    assert one.total_ms == pytest.approx(1500)
    assert sum(one.part_ms.values()) == pytest.approx(one.total_ms)
    assert one.part_ms["python"] == pytest.approx(1e3 * (2.0 - 1.25) / 2)
    assert one.part_ms["other"] == pytest.approx(1e3 * 0.3 / 2)
    assert one.largest == "gemm"


def test_a_run_has_every_part() -> None:
    profiler = StepProfiler()
    workload = Workload(num_requests=3, prompt_len=8, output_len=6)
    with LLM.from_config(EngineConfig(model=BASE, enable_prefix_caching=False), profiler=profiler) as llm:
        prefill, decode = profile(llm, profiler, ADAPTERS, workload, "identical")
    assert (prefill.num_steps, decode.num_steps) == (1, 5)
    for part in PARTS:
        assert decode.part_ms[part] > 0, part
        assert prefill.part_ms[part] > 0 or part == "detokenise", part


def test_kernels_are_measured_only_on_request() -> None:
    with LLM(BASE) as llm:
        llm.generate([[5, 6, 7]])
        assert set(llm.stats().step_times.seconds) == {"schedule", "build", "forward", "sample", "wait", "commit"}
        assert llm.stats().step_times.seconds["forward"] > 0


def test_the_table_names_the_largest_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_profile(EngineConfig(model=BASE), [], Workload(2, 8, 4), "base") == 0
    out = capsys.readouterr().out
    assert "decode: the largest part is" in out
    assert "detokenise" in out


@pytest.mark.parametrize("has_report", [False, True])
def test_kernels_are_timed_beside_their_fallbacks_for_a_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, has_report: bool
) -> None:
    seen: list[KernelShapes] = []

    def measure(backend: KernelBackend, shapes: KernelShapes) -> tuple[KernelSpeedup, ...]:
        seen.append(shapes)
        return (KernelSpeedup("linear", backend.name, "torch", "1 x 1", 1.0, 2.0),)

    monkeypatch.setattr(decoder, "measure_speedups", measure)
    assert run_profile(EngineConfig(model=BASE), [], Workload(2, 8, 4), "base", ProfileSettings(json=has_report)) == 0
    assert len(seen) == has_report
    if has_report:
        assert [each["op"] for each in json.loads(capsys.readouterr().out)["kernel_speedups"]] == ["linear"]
        config = ModelConfig.from_dir(BASE)
        assert (seen[0].hidden_size, seen[0].vocab_size) == (config.hidden_size, config.vocab_size)
        assert (str(seen[0].device), seen[0].block_size) == ("cpu", 16)


def test_the_kernels_of_an_engine_are_measured_in_bounded_time() -> None:
    with LLM(BASE) as llm:
        llm.start_lora_profiling()
        llm.generate([[5, 6, 7]])
        before, fallbacks = time.monotonic(), llm.stats().kernel_fallbacks
        report = llm.generate_lora_performance_report(measure_kernels=True)
        assert time.monotonic() - before < 10, "0.5 s, on a machine that is shared"
        assert report.kernel_fallbacks == fallbacks
        if llm.engine.info.backend == "native":
            assert {each.op for each in report.kernel_speedups} >= {"linear", "add_lora", "row_argmax"}
            assert all(each.speedup > 0 for each in report.kernel_speedups)
        llm.generate([[5, 6, 7]])
        llm.check_integrity()


def test_the_prefill_is_one_whatever_the_prefix_cache_holds() -> None:
    """The warm-up's prompts were in the cache, and a prefill of 64 tokens a request was one of 16."""
    profiler = StepProfiler()
    with LLM.from_config(EngineConfig(model=BASE), profiler=profiler) as llm:
        profile(llm, profiler, [], Workload(num_requests=3, prompt_len=64, output_len=2), "base")
        assert llm.stats().num_prefix_hit_tokens == 0


def test_one_token_has_no_decode_step() -> None:
    with pytest.raises(ConfigError, match="output_len must be >= 2"):
        run_profile(EngineConfig(model=BASE), ADAPTERS, Workload(2, 8, 1), "identical")


def test_adapters_that_the_pattern_does_not_use_are_a_mistake() -> None:
    with pytest.raises(ConfigError, match="1 adapters are given, but pattern base uses none"):
        run_profile(EngineConfig(model=BASE), ADAPTERS, Workload(2, 8, 4), "base")
