"""A plan is a size that was simulated and holds, and the next smaller one that was simulated does not."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from loraplex.errors import ConfigError
from loraplex.twin.fleet import Fleet
from loraplex.twin.planning import Option, Plan, make_plan
from loraplex.twin.results import SimulationResult, Spread
from loraplex.twin.settings import FleetSettings, ServiceLevel, TwinSettings
from loraplex.twin.simulation import Simulation
from loraplex.twin.workload import Workload
from tests.twin.parts import ADAPTER_BYTES, MIB, calibration
from tests.twin.parts import settings as engine_settings

BUSY = Workload(adapters=12, rate=60, requests=300, prompt_tokens="16-64", output_tokens="8-24")


def plan_for(level: ServiceLevel, workload: Workload = BUSY) -> Plan:
    return make_plan(calibration(), engine_settings(), workload, level)


def tried(plan: Plan, step: str) -> dict[int, Option]:
    return {each.devices: each for each in plan.options if each.step == step}


@settings(deadline=None, max_examples=3)
@given(rate=st.sampled_from([10.0, 60.0, 150.0, 300.0]), first_token_s=st.sampled_from([0.05, 0.3, 2.0]))
def test_the_answer_holds_and_one_device_less_does_not(rate: float, first_token_s: float) -> None:
    level = ServiceLevel(first_token_s=first_token_s, inter_token_s=0.2, max_devices=8)
    workload = Workload(adapters=12, rate=rate, requests=150, prompt_tokens="16-64", output_tokens="8-24")
    plan = plan_for(level, workload)
    devices = tried(plan, "devices")
    if plan.chosen is None:
        assert max(devices) == 8
        assert not any(each.holds for each in plan.options)
        return
    assert plan.chosen.holds
    assert plan.chosen.result.first_token_s.p99 <= first_token_s
    assert plan.chosen.devices == min(number for number, each in devices.items() if each.holds)
    assert plan.chosen.devices == 1 or not devices[plan.chosen.devices - 1].holds


@pytest.mark.parametrize("needed", range(1, 18))
def test_the_search_finds_the_least_number(needed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of simulations that hold from so many runners on; 17 are more than it may look at."""
    real = Simulation(calibration(), engine_settings(), Workload(adapters=1, requests=2)).run()
    asked: list[int] = []

    class Fake:
        def __init__(self, measured: object, sized: TwinSettings, workload: object) -> None:
            self._is_enough = sized.runners >= needed
            asked.append(sized.runners)

        def run(self) -> SimulationResult:
            return replace(real, first_token_s=Spread(p99=0.1 if self._is_enough else 9.0))

    monkeypatch.setattr("loraplex.twin.planning.Simulation", Fake)
    plan = plan_for(ServiceLevel(max_devices=16))
    assert len([number for number in asked if number != needed]) <= 8
    if needed > 16:
        assert plan.chosen is None
        return
    assert plan.chosen is not None
    assert plan.chosen.devices == needed
    assert needed == 1 or needed - 1 in asked


def test_adapter_memory_shrinks_as_far_as_the_level_holds() -> None:
    """With a device to spare, all adapters need not be in memory; the KV cache is what was used and a quarter more."""
    plan = plan_for(ServiceLevel(first_token_s=0.6, inter_token_s=0.3))
    best = plan.chosen
    assert best is not None
    assert best.adapter_memory_bytes < 12 * ADAPTER_BYTES
    smaller = [each for each in plan.options if each.adapter_memory_bytes < best.adapter_memory_bytes]
    assert not any(each.holds for each in smaller)
    assert best.step == "all"
    assert best.result.kv_bytes <= best.kv_cache_memory_bytes < engine_settings().kv_cache_memory_bytes
    again = engine_settings(
        runners=best.devices,
        adapter_memory_bytes=best.adapter_memory_bytes,
        host_memory_bytes=best.adapter_memory_bytes,
        kv_cache_memory_bytes=best.kv_cache_memory_bytes,
    )
    assert Simulation(calibration(), again, BUSY).run().first_token_s == best.result.first_token_s


def test_a_device_bounds_both() -> None:
    bound = 6 * ADAPTER_BYTES
    plan = plan_for(ServiceLevel(memory_bytes=bound, first_token_s=2.0, inter_token_s=0.5))
    assert plan.chosen is not None
    assert all(each.adapter_memory_bytes + each.kv_cache_memory_bytes <= bound for each in plan.options)
    with pytest.raises(ConfigError, match="hold no request of 512 tokens"):
        plan_for(ServiceLevel(memory_bytes=MIB))


def test_figures_and_table() -> None:
    plan = plan_for(ServiceLevel(first_token_s=0.6, inter_token_s=0.3))
    figures = json.loads(json.dumps(plan.figures()))
    assert plan.chosen is not None
    assert figures["chosen"]["devices"] == plan.chosen.devices
    assert [each["step"] for each in figures["options"]] == [each.step for each in plan.options]
    assert plan.table().row_count == len(plan.options)
    console = Console(width=80, file=io.StringIO())
    assert console.measure(plan.table()).minimum <= 80
    assert f"{plan.chosen.devices} device" in plan.sentence()
    none = plan_for(ServiceLevel(first_token_s=0.001, max_devices=2))
    assert none.chosen is None
    assert none.sentence() == "no number of devices up to 2 holds this service level"


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plot(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plan.{ending}"
    plan_for(ServiceLevel(first_token_s=0.6, inter_token_s=0.3)).plot(path)
    assert path.stat().st_size > 5000
    assert (b"PNG" if ending == "png" else b"<svg") in path.read_bytes()[:2000]


def test_ranks_beyond_those_that_were_measured_are_said() -> None:
    """Every simulation says it, of steps and of replicas without."""
    beyond, within = (Workload(adapters=4, requests=20, ranks=ranks) for ranks in ((8, 64), (2, 16)))
    text = "rank 64 is beyond 16, the highest that was measured: its times are drawn on as lines"
    assert Simulation(calibration(), engine_settings(), beyond).run().notes == (text,)
    assert not Simulation(calibration(), engine_settings(), within).run().notes
    assert text in Fleet(calibration(), beyond, TwinSettings(), FleetSettings(replicas=2)).run().notes


def test_levels_that_cannot_be() -> None:
    for wrong, message in (
        ({"first_token_s": 0}, "first_token_s must be > 0"),
        ({"max_devices": 65}, "max_devices must be 1..64"),
        ({"memory_bytes": 0}, "memory_bytes must be >= 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            ServiceLevel(**wrong)  # type: ignore[arg-type]
