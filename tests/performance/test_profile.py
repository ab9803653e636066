"""A profile counts from its beginning on, and an engine that started again counts from 0."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loraplex.core import FinishReason, Request, SamplingParams, TokenOutput
from loraplex.events import EngineEvent, EventKind
from loraplex.metrics import EngineStats, KernelSpeedup, MemoryReport
from loraplex.performance.profile import MAX_LISTED_ADAPTERS, AdapterFootprint, Kernels, LoraProfile
from loraplex.performance.report import LoraPerformanceReport
from loraplex.performance.steps import StepKind, StepProfile, StepSums

KERNELS = Kernels("native", "native avx512")
BEFORE = EngineStats(
    num_admitted={"nothing": 10, "load": 2},
    adapters_found={"device": 5, "source": 5},
    num_preemptions=1,
    memory=MemoryReport(
        fragmentation=0.25,
        counters={
            "loads_add": 3,
            "loads_request": 1,
            "loads_from_disk": 1,
            "evictions_verb": 1,
            "promotions": 4,
            "copies": 2,
            "copy_seconds": 1.0,
        },
    ),
)
AFTER = EngineStats(
    num_admitted={"nothing": 15, "load": 2, "room": 1},
    adapters_found={"device": 12, "disk": 3, "source": 7},
    num_preemptions=1,
    memory=MemoryReport(
        fragmentation=0.5,
        counters={
            "loads_add": 3,
            "loads_request": 4,
            "loads_from_disk": 4,
            "evictions_verb": 1,
            "evictions_device_room": 2,
            "promotions": 9,
            "copies": 6,
            "copy_seconds": 3.0,
        },
    ),
)


def report(before: EngineStats, after: EngineStats, profile: LoraProfile | None = None) -> LoraPerformanceReport:
    profile = profile or LoraProfile({}.get)
    profile.begin(before)
    footprints = [AdapterFootprint("sql", "host", 100, 8), AdapterFootprint("big", "device", 300, 64)]
    return profile.report(after, StepProfile(), KERNELS, footprints)


def test_counters_are_of_the_profile_alone() -> None:
    found = report(BEFORE, AFTER)
    assert found.admitted == {"nothing": 5, "room": 1}
    assert found.loads == {"request": 3}
    assert found.evictions == {"device_room": 2}
    assert found.served_from == {"device": 7, "host": 0, "disk": 3, "source": 2}
    assert (found.num_preemptions, found.fragmentation_before, found.memory.fragmentation) == (0, 0.25, 0.5)
    cost = found.switch_cost
    assert (cost.num_promotions, cost.num_copies, cost.promote_mean_s) == (5, 4, 0.5)


def test_fallbacks_are_those_of_the_profile_and_speedups_what_was_measured() -> None:
    before = replace(BEFORE, kernel_fallbacks={"linear: a reason": 3, "rms_norm: another": 2})
    after = replace(AFTER, kernel_fallbacks={"linear: a reason": 8, "rms_norm: another": 2})
    assert report(before, after).kernel_fallbacks == {"linear: a reason": 5}
    speedup = KernelSpeedup("linear", "native", "torch", "1 x 1", 1.0, 2.0)
    found = LoraProfile({}.get).report(AFTER, StepProfile(), KERNELS, [], [speedup])
    assert found.kernel_speedups == (speedup,)
    assert "kernel_speedups" in {each.name for each in found.findings}


@pytest.mark.parametrize(
    ("device", "seconds", "share"),
    [
        ("cpu", {"forward": 4.0, "sample": 1.0, "wait": 2.0}, 0.5),
        ("cuda:0", {"forward": 4.0, "sample": 1.0, "device": 8.0}, 0.8),
        ("cuda:0", {"forward": 4.0, "sample": 1.0}, None),
    ],
)
def test_the_devices_share_is_no_time_of_launches(device: str, seconds: dict[str, float], share: float | None) -> None:
    steps = StepProfile(10.0, (StepSums(StepKind(0, 1, False), num_steps=5, seconds=seconds),))
    found = LoraProfile({}.get).report(AFTER, steps, Kernels("triton", "triton", device), [])
    assert found.device_share == share
    assert ("idle" in {each.name for each in found.findings}) is False
    assert "device" not in found.part_seconds


def test_an_engine_that_started_again() -> None:
    found = report(AFTER, BEFORE)
    assert found.admitted == {"nothing": 10}
    assert found.num_preemptions == 0
    assert found.switch_cost.num_promotions == 4


def test_events_become_costs() -> None:
    profile = LoraProfile({}.get)
    for event in (
        EngineEvent(EventKind.LOAD, 1.0, "", details={"seconds": 0.25}),
        EngineEvent(EventKind.SWITCH, 1.0, "", details={"promote_s": 0.5}),
        EngineEvent(EventKind.SWITCH, 1.0, "without a time"),
        EngineEvent(EventKind.FAULT, 1.0, ""),
        EngineEvent(EventKind.RESTART, 1.0, ""),
    ):
        profile.see(event)
    found = report(BEFORE, BEFORE, profile)
    assert (found.switch_cost.load.count, found.switch_cost.load.max_s) == (1, 0.25)
    assert (found.switch_cost.switch.count, found.switch_cost.switch.max_s) == (1, 0.5)
    assert (found.num_faults, found.num_restarts) == (1, 1)


def test_adapters_with_requests_come_first_and_have_their_place() -> None:
    profile = LoraProfile({1: "sql"}.get)
    for request_id, adapter_id in (("a", 1), ("b", None), ("c", 1)):
        profile.requests.begin(Request(request_id, (1,), SamplingParams(), 4, 0, adapter_id=adapter_id))
        profile.requests.see(TokenOutput(request_id, (5,), FinishReason.STOP))
    found = report(BEFORE, AFTER, profile)
    assert [(each.name, each.num_requests, each.tier, each.nbytes, each.rank) for each in found.adapters] == [
        ("sql", 2, "host", 100, 8),
        (None, 1, "", 0, 0),
        ("big", 0, "device", 300, 64),
    ]
    assert (found.num_adapters, found.requests.num_finished, found.requests.share_in_both) == (2, 3, 1.0)


def test_a_kept_version_is_listed_only_with_requests_and_is_no_adapter_more() -> None:
    profile = LoraProfile({1: "sql@1"}.get)
    profile.requests.begin(Request("r", (1,), SamplingParams(), 4, 0, adapter_id=1))
    footprints = [
        AdapterFootprint("sql", "device", 100, 8),
        AdapterFootprint("sql@1", "disk", 200, 16, is_kept=True),
        AdapterFootprint("sql@2", "device", 100, 8, is_kept=True),
    ]
    found = profile.report(AFTER, StepProfile(), KERNELS, footprints)
    assert [(each.name, each.tier, each.rank) for each in found.adapters] == [
        ("sql@1", "disk", 16),
        ("sql", "device", 8),
    ]


def test_the_list_of_adapters_is_bounded_and_their_number_is_not() -> None:
    profile = LoraProfile({900: "busy"}.get)
    profile.requests.begin(Request("r", (1,), SamplingParams(), 4, 0, adapter_id=900))
    footprints = [AdapterFootprint(f"a{index}", "host", index, 8) for index in range(MAX_LISTED_ADAPTERS + 50)]
    found = profile.report(AFTER, StepProfile(), KERNELS, footprints)
    assert (len(found.adapters), found.num_adapters) == (MAX_LISTED_ADAPTERS, MAX_LISTED_ADAPTERS + 51)
    assert [each.name for each in found.adapters[:2]] == ["busy", f"a{MAX_LISTED_ADAPTERS + 49}"]
