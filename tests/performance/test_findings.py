"""Each rule speaks when it should, with its number and its remedy, and not otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from loraplex.cpu import CpuUse
from loraplex.metrics import ChunkRun, KernelSpeedup, MemoryMode, MemoryReport
from loraplex.performance.findings import find
from loraplex.performance.histogram import Quantiles
from loraplex.performance.report import AdapterPerformance, Finding, LoraPerformanceReport, SwitchCost

GOOD_REQUESTS = AdapterPerformance(
    "(all)",
    num_requests=100,
    num_finished=100,
    first_token=Quantiles(100, 0.1, 0.1, 0.2, 0.2, 0.3),
    inter_token=Quantiles(900, 0.02, 0.02, 0.03, 0.03, 0.05),
    share_in_first_token=1.0,
    share_in_inter_token=1.0,
    share_in_both=1.0,
)
GOOD = LoraPerformanceReport(
    begun_time=0.0,
    seconds=10.0,
    backend="native",
    backend_description="native avx512, 2 threads",
    requests=GOOD_REQUESTS,
    admitted={"nothing": 100},
    part_seconds={"build": 0.1, "forward": 8.0},
    device_share=0.8,
    num_prefill_tokens=1,
)


def speedup(op: str, times: float) -> KernelSpeedup:
    return KernelSpeedup(op, "native", "torch", "16 x 64", 1.0, times)


def findings(**changes: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in find(replace(GOOD, **changes))}


def test_nothing_stands_out() -> None:
    assert {name: finding.severity for name, finding in findings().items()} == {
        "service": "info",
        "kernels": "info",
        "nothing": "info",
    }


@pytest.mark.parametrize(
    ("changes", "name", "severity", "text", "remedy"),
    [
        (
            {"admitted": {"nothing": 69, "load": 31}, "evictions": {"host_room": 4}},
            *("waited_for_load", "warning", "31 % of requests waited for a load", "host_memory_bytes"),
        ),
        ({"admitted": {"nothing": 80, "load": 20}}, "waited_for_load", "warning", "20 %", "Preload or pin"),
        ({"admitted": {"nothing": 90, "room": 10}}, "waited_for_room", "warning", "10 %", "adapter_memory_bytes"),
        ({"evictions": {"device_room": 120}}, "churn", "advice", "120 adapters", "adapter_memory_bytes"),
        ({"num_load_failures": 3}, "load_failures", "warning", "3 loads", "load_failed"),
        ({"num_restarts": 1, "num_faults": 1}, "restarted", "warning", "once", "log"),
        ({"num_faults": 2}, "faults", "warning", "2 faults", "events"),
        ({"memory": MemoryReport(quarantined={1: "NaN"})}, "quarantined", "warning", "1 adapters", "/v1/memory"),
        ({"memory": MemoryReport(mode=MemoryMode.LOW_MEMORY)}, "low_memory", "warning", "low-memory", "memory"),
        (
            {"memory": MemoryReport(fragmentation=0.5, chunks=(ChunkRun("adapters", 4),))},
            *("fragmentation", "advice", "50 %", "Compaction"),
        ),
        ({"num_preemptions": 5}, "preemptions", "advice", "5 requests", "kv_cache_memory_bytes"),
        (
            {"backend": "torch", "backend_description": "stock torch (no g++)"},
            *("fallback", "advice", "no g++", "doctor"),
        ),
        ({"operator_seconds": {"gemm": 3.0, "lora": 3.0}}, "lora_share", "advice", "50 %", "ranks"),
        ({"operator_seconds": {"gemm": 9.0, "lora": 1.0}}, "lora_share", "info", "10 %", ""),
        ({"slowdown": 1.5}, "slowdown", "advice", "1.50 times", "ranks"),
        ({"slowdown": 1.1}, "slowdown", "info", "1.10 times", ""),
        ({"part_seconds": {"build": 3.0, "forward": 7.0}}, "build", "advice", "30 %", "max_num_seqs"),
        (
            {"cpu": CpuUse(10.0, 3.0, 2.0, 412, 2, 1)},
            *("cpu_contention", "warning", "no core in 33 % of the time", "taskset"),
        ),
        (
            {"cpu": CpuUse(10.0, 3.0, 2.0, 412, 2, 1)},
            *("cpu_contention", "warning", "412 involuntary context switches", "num_threads"),
        ),
        (
            {"kernel_fallbacks": {"linear: no kernel for it": 5, "rms_norm: too wide": 70, "silu_mul: odd": 1}},
            *("kernel_fallbacks", "advice", "70 calls of an operator that has a kernel (2 other operators too)"),
            "kernel_fallbacks of the report",
        ),
        (
            {"kernel_fallbacks": {"linear: no kernel for it": 5}},
            "kernel_fallbacks",
            "advice",
            "linear: no kernel",
            "do not cover",
        ),
        (
            {"kernel_speedups": (speedup("linear", 2.0), speedup("row_argmax", 0.5), speedup("silu_mul", 9.0))},
            *("kernel_speedups", "advice", "silu_mul is 9.0 times as fast, the least is row_argmax with 0.5"),
            "Slower than stock torch here: row_argmax.",
        ),
        ({"kernel_speedups": (speedup("linear", 2.0),)}, "kernel_speedups", "info", "1 kernels were timed", ""),
        ({"device_share": 0.2}, "idle", "info", "20 %", "room for more load"),
        ({"requests": replace(GOOD_REQUESTS, num_failed=2)}, "failed", "warning", "2 of 100", "log"),
        ({"requests": replace(GOOD_REQUESTS, num_finished=3)}, "few_requests", "info", "Only 3", "longer"),
        (
            {"requests": replace(GOOD_REQUESTS, share_in_both=0.5, share_in_first_token=0.5)},
            *("service", "warning", "50 % of requests kept both", "First tokens wait"),
        ),
        (
            {"requests": replace(GOOD_REQUESTS, share_in_both=0.5, share_in_inter_token=0.5)},
            *("service", "warning", "50 %", "Steps are long"),
        ),
        (
            {"requests": replace(GOOD_REQUESTS, inter_token=Quantiles(900, 0.02, 0.02, 0.03, 0.2, 0.3))},
            *("tail", "advice", "10 times the median", "max_num_batched_tokens"),
        ),
        (
            {"adapters": (AdapterPerformance("slow", first_token=Quantiles(9, 2.0, 2.0, 2.0, 2.0, 2.0), tier="host"),)},
            *("slow_adapter", "advice", "'slow'", "host"),
        ),
    ],
)
def test_a_rule(changes: dict[str, Any], name: str, severity: str, text: str, remedy: str) -> None:
    finding = findings(**changes)[name]
    assert finding.severity == severity
    assert text in finding.text
    assert remedy in finding.remedy
    assert bool(finding.remedy) == (bool(remedy))
    assert name not in findings() or name == "service"


def test_the_median_load_is_told() -> None:
    cost = SwitchCost(load=Quantiles(9, 0.05, 0.042, 0.1, 0.1, 0.1))
    assert "42 ms" in findings(admitted={"load": 1}, switch_cost=cost)["waited_for_load"].text


def test_warnings_come_first() -> None:
    order = [each.severity for each in find(replace(GOOD, num_load_failures=1, slowdown=2.0))]
    assert order == sorted(order, key=["warning", "advice", "info"].index)
    assert "nothing" not in findings(slowdown=2.0)


def test_contention_is_named_instead_of_smaller_batches() -> None:
    """Long steps and a tail have another reason then."""
    bad = replace(
        GOOD_REQUESTS,
        share_in_both=0.5,
        share_in_inter_token=0.5,
        inter_token=Quantiles(900, 0.02, 0.02, 0.03, 0.3, 0.5),
    )
    alone, beside = findings(requests=bad), findings(requests=bad, cpu=CpuUse(10.0, 8.0, 0.0, 900, 2, 2))
    for name in ("service", "tail"):
        assert "max_num_batched_tokens" in alone[name].remedy
        assert "max_num" not in beside[name].remedy
        assert "cores" in beside[name].remedy
    assert "cpu_contention" not in alone


def test_an_idle_engine_is_not_contended() -> None:
    """The few threads that it wakes may wait for most of their time, and nothing is slower for it."""
    assert "cpu_contention" not in findings(cpu=CpuUse(0.01, 0.02, 0.0, 10, 2, 2))


@pytest.mark.parametrize(("backend", "device"), [("triton", "cuda"), ("torch", "cuda:1"), ("native", "cpu")])
def test_a_compiler_is_advised_only_where_slow_kernels_run_on_a_cpu(backend: str, device: str) -> None:
    found = findings(backend=backend, device=device)
    assert "fallback" not in found
    assert found["kernels"].severity == "info"


def test_a_device_whose_time_was_not_measured_is_not_called_idle() -> None:
    assert "idle" not in findings(device_share=None, device="cuda:0")


def test_a_core_that_is_rarely_missed_is_no_finding() -> None:
    assert "cpu_contention" not in findings(cpu=CpuUse(10.0, 0.5, 0.2, 40, 2, 2))
