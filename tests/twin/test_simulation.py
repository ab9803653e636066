"""Simulations whose outcome can be worked out by hand, and what holds of any."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine.schedule_plan import SchedulePlan
from loraplex.errors import ConfigError
from loraplex.twin.calibration import Calibration, FrontTime, ReadTime
from loraplex.twin.results import SimulationResult, Spread
from loraplex.twin.settings import FleetSettings, TwinSettings
from loraplex.twin.simulation import Simulation
from loraplex.twin.step_model import FEATURES
from loraplex.twin.workload import Workload
from tests.twin.parts import ADAPTER_BYTES, MIB, calibration
from tests.twin.parts import settings as engine_settings

ONE_STEP_MS = 10.0


def trace(path: Path, *rows: tuple[float, str | None, int, int]) -> Workload:
    keys = "at_s", "adapter", "prompt_tokens", "output_tokens"
    path.write_text("\n".join(json.dumps(dict(zip(keys, row, strict=True))) for row in rows))
    return Workload(trace=str(path))


def timeless(result: SimulationResult) -> SimulationResult:
    return replace(result, wall_s=0.0)


# --------------------------------------------------------------------------------------------------- by hand


def test_a_request_alone(tmp_path: Path) -> None:
    """A prompt of 20 tokens, then four steps of one: 10 + 2 ms, and 10.1 ms each."""
    result = Simulation(calibration(), engine_settings(), trace(tmp_path / "t", (1.0, None, 20, 5))).run()
    assert result.first_token_s.p50 == pytest.approx(0.012)
    assert result.end_to_end_s.p50 == pytest.approx(0.012 + 4 * 0.0101)
    assert result.inter_token_s is not None
    assert result.inter_token_s.max == pytest.approx(0.0101)
    assert result.tokens_per_s == pytest.approx(5 / (0.012 + 4 * 0.0101))
    assert (result.num_steps, result.hits, result.misses, result.loads) == (5, 0, 0, 0)
    assert result.utilization == (pytest.approx(1.0),)


def test_the_front_works_between_steps(tmp_path: Path) -> None:
    """1 ms for a request, and behind a step 2 ms and 0.5 for each output: none of it is in a step."""
    front = FrontTime(request_ms=1.0, step_ms=2.0, output_ms=0.5)
    workload = trace(tmp_path / "t", (1.0, None, 20, 3), (1.001, None, 20, 3))
    result = Simulation(calibration(front=front), engine_settings(), workload).run()
    first_s = 0.001 + 0.012 + 0.0025
    assert result.first_token_s.max == pytest.approx(first_s + 0.001 + 0.010 + 21 * 0.1e-3 + 0.003 - 0.001)
    assert result.inter_token_s is not None
    assert result.inter_token_s.max == pytest.approx(0.001 + 0.010 + 21 * 0.1e-3 + 0.003)
    assert result.num_steps == 4
    assert result.utilization[0] < 0.85


def test_who_comes_during_a_step_waits_for_its_end(tmp_path: Path) -> None:
    workload = trace(tmp_path / "t", (1.0, None, 90, 2), (1.005, None, 10, 2), (1.01, None, 10, 2))
    result = Simulation(calibration(), engine_settings(), workload).run()
    assert result.waiting_s.max == pytest.approx(0.019 - 0.005)  # the first step takes 10 + 9 ms
    assert result.first_token_s.max == pytest.approx(0.014 + 0.010 + 0.1e-3 * 21)  # both join the second
    assert result.num_steps == 3


def test_a_cold_adapter_is_waited_for(tmp_path: Path) -> None:
    """Its load takes 20 ms and 1 ns a byte; the engine has nothing else to do meanwhile."""
    workload = replace(trace(tmp_path / "t", (1.0, "a", 20, 2)), ranks=(16,))
    made = Simulation(calibration(), engine_settings(start="cold"), workload).run()
    load_s = 0.02 + 1e-9 * ADAPTER_BYTES
    assert made.first_token_s.p50 == pytest.approx(load_s + 0.012)
    assert made.waiting_s.p50 == pytest.approx(load_s)
    assert (made.misses, made.loads, made.found) == (1, 1, {"source": 1})
    warm = Simulation(calibration(), engine_settings(), workload).run()
    assert warm.first_token_s.p50 == pytest.approx(0.012)
    assert (warm.misses, warm.loads, warm.found) == (1, 0, {"host": 1})


def test_what_was_read_once_comes_from_the_disk(tmp_path: Path) -> None:
    """Room for one adapter: two take turns."""
    rows = [(1.0 + number, "ab"[number % 2], 20, 2) for number in range(6)]
    workload = replace(trace(tmp_path / "t", *rows), ranks=(16,))
    tight = engine_settings(
        start="cold", adapter_memory_bytes=ADAPTER_BYTES, host_memory_bytes=ADAPTER_BYTES, max_loras=1
    )
    result = Simulation(calibration(), tight, workload).run()
    assert result.found == {"source": 2, "disk": 4}
    assert result.evictions == {"host_room": 5}
    no_disk = Simulation(calibration(), replace(tight, disk_memory_bytes=0), workload).run()
    assert no_disk.found == {"source": 6}
    assert no_disk.first_token_s.p90 > result.first_token_s.p50 + 0.015


def test_a_device_with_memory_of_its_own_waits_for_copies(tmp_path: Path) -> None:
    """The copy takes 30 ms, the step that reads it ends no earlier; the next one finds the adapter there."""
    gpu = calibration(has_one_memory=False, copy=ReadTime(0.03, 0.0), look_ahead=True)
    workload = replace(trace(tmp_path / "t", (1.0, "a", 20, 3), (2.0, "a", 20, 3)), ranks=(16,))
    result = Simulation(gpu, engine_settings(), workload).run()
    assert result.first_token_s.max == pytest.approx(0.03, abs=1e-3)
    assert result.first_token_s.p50 == pytest.approx((0.03 + 0.012) / 2, abs=1e-3)
    assert (result.misses, result.hits) == (0, 2), "the copy began when the request came: it is arriving when it runs"


def test_look_ahead_changes_no_time_where_one_request_runs(tmp_path: Path) -> None:
    workload = trace(tmp_path / "t", (1.0, None, 20, 5))
    ahead = Simulation(calibration(look_ahead=True), engine_settings(), workload).run()
    assert timeless(ahead) == timeless(Simulation(calibration(), engine_settings(), workload).run())


def test_a_shared_beginning_is_computed_once() -> None:
    workload = Workload(
        adapters=1, rate=2, requests=20, prompt_tokens="200", output_tokens="2", shared_prefix_tokens=160
    )
    cached = Simulation(calibration(), engine_settings(), workload).run()
    computed = Simulation(calibration(), engine_settings(enable_prefix_caching=False), workload).run()
    assert cached.first_token_s.p50 == pytest.approx(0.010 + 0.0001 * 40)
    assert computed.first_token_s.p50 == pytest.approx(0.010 + 0.0001 * 200)


def test_two_runners_share_the_load() -> None:
    """Twice the throughput where one is full, and the affinity of `latency`: adapters are loaded at few places."""
    workload = Workload(adapters=8, rate=200, requests=400, prompt_tokens="16", output_tokens="16")
    one = Simulation(calibration(), engine_settings(), workload).run()
    two = Simulation(calibration(), engine_settings(runners=2), workload).run()
    assert two.tokens_per_s > 1.8 * one.tokens_per_s
    assert two.max_load < 1.1
    assert len(two.utilization) == 2
    packed = Simulation(calibration(), engine_settings(runners=2, placement="pack"), replace(workload, rate=2.0)).run()
    assert min(packed.utilization) == 0.0, "what one runner can take, pack gives to one"


def test_a_queue_that_is_full_refuses() -> None:
    workload = Workload(adapters=0, rate=10_000, requests=50, prompt_tokens="16", output_tokens="16")
    result = Simulation(calibration(), engine_settings(max_num_seqs=2, max_waiting_requests=10), workload).run()
    assert result.num_failed > 30
    assert result.num_failed + round(result.requests_per_s * result.seconds) == 50


# ---------------------------------------------------------------------------------------------------- of any


@settings(deadline=None, max_examples=25)
@given(
    runners=st.integers(1, 3),
    placement=st.sampled_from(["latency", "pack", "spread"]),
    policy=st.sampled_from(["lru", "lfu", "fifo", "gdsf", "cost_aware"]),
    room=st.integers(1, 6),
    rate=st.floats(1, 200),
    start=st.sampled_from(["loaded", "cold"]),
    has_one_memory=st.booleans(),
    look_ahead=st.booleans(),
    seed=st.integers(0, 9),
)
def test_every_request_ends_and_a_seed_gives_the_same(
    runners: int,
    placement: str,
    policy: str,
    room: int,
    rate: float,
    start: str,
    has_one_memory: bool,
    look_ahead: bool,
    seed: int,
) -> None:
    measured = calibration(has_one_memory=has_one_memory, look_ahead=look_ahead, copy=ReadTime(0.001, 1e-10))
    sized = engine_settings(
        runners=runners,
        placement=placement,
        eviction_policy=policy,
        adapter_memory_bytes=room * ADAPTER_BYTES,
        host_memory_bytes=(room + 2) * ADAPTER_BYTES,
        start=start,
        aging_steps=16,
        enable_prediction=True,
    )
    workload = Workload(
        adapters=12, rate=rate, requests=60, prompt_tokens="4-80", output_tokens="1-12", ranks=(8, 16), seed=seed
    )
    tokens: Counter[str] = Counter()

    def see(number: int, plan: SchedulePlan) -> None:
        assert 0 <= number < runners
        tokens.update(each.state.request.request_id for each in plan.sequences if each.is_sampled)

    result = Simulation(measured, sized, workload, watch=see).run()
    arrivals = workload.arrivals()
    assert result.num_failed == 0
    assert sum(tokens.values()) >= arrivals.outputs.sum()  # a preempted request draws no token twice, look-ahead may
    assert len(tokens) == 60
    assert result.tokens_per_s * result.seconds == pytest.approx(arrivals.outputs.sum())
    assert result.first_token_s.max <= result.end_to_end_s.max
    assert sum(result.found.values()) == result.hits + result.misses
    assert 0 < result.mean_utilization <= 1
    assert timeless(Simulation(measured, sized, workload).run()) == timeless(result)


# ---------------------------------------------------------------------------------------- settings and files


def test_a_request_that_is_too_long_is_refused() -> None:
    with pytest.raises(ConfigError, match="a request has 700 tokens with its answer"):
        Simulation(calibration(), engine_settings(), Workload(prompt_tokens="600", output_tokens="100"))


def test_a_kv_cache_that_holds_no_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes 16384 hold 16 tokens"):
        Simulation(calibration(), engine_settings(kv_cache_memory_bytes=1 << 14), Workload(requests=1))


def test_settings_are_those_of_the_engine() -> None:
    """Names and defaults; what cannot be is refused as an engine would."""
    made = TwinSettings().engine_config("m", 16)
    from loraplex.config import EngineConfig, LoRAConfig

    plain = EngineConfig(model="m")
    assert (made.max_num_seqs, made.kv_cache_memory_bytes) == (plain.max_num_seqs, plain.kv_cache_memory_bytes)
    assert made.lora == LoRAConfig(enable_diagnosis=False, scrub_bytes_per_s=0)
    for wrong, message in (
        ({"runners": 0}, "runners must be 1..64"),
        ({"placement": "best"}, "placement must be one of"),
        ({"start": "hot"}, "start must be one of"),
        ({"eviction_policy": "best"}, "eviction_policy must be"),
        ({"max_num_seqs": 0}, "max_num_seqs must be >= 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            TwinSettings(**wrong)  # type: ignore[arg-type]


def test_a_fleet_refuses_what_it_would_ignore() -> None:
    FleetSettings(replicas=3).check_uses(TwinSettings(max_num_seqs=8, eviction_policy="lru"))
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes is of --runners"):
        FleetSettings(replicas=3).check_uses(TwinSettings(kv_cache_memory_bytes=4 * MIB))


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path) -> None:
    path, made = tmp_path / "c.json", calibration(disk=ReadTime(0.5, 1e-9))
    made.write(path)
    assert Calibration.read(path) == made


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 0}, "no calibration of this version"),
        ({"more": 1}, "no calibration of this version"),
        ({"step_ms": {}}, "is damaged: a time is nothing"),
        ({"step_ms": dict.fromkeys(FEATURES, 1e300)}, "is damaged: a time is nothing"),
        ({"step_ratios": [[1, 1.0], [1, -1.0]]}, "is damaged: a time is nothing"),
        ({"step_ratios": [1.0]}, "is damaged: Expected `array`"),
        ({"block_bytes": 0}, "is damaged: block_bytes is nothing"),
        ({"block_bytes": 1.5}, "is damaged: Expected `int`, got `float`"),
        ({"num_extents": 10**9}, "is damaged: num_extents is nothing"),
        ({"adapter_bytes": {}}, "is damaged: adapter_bytes is nothing"),
        ({"adapter_bytes": {"0": 5}}, "is damaged: adapter_bytes is nothing"),
        ({"adapter_bytes": {"8": 10**40}}, "is damaged: "),
        ({"adapter_bytes": {"x": 1}}, "is damaged: Expected `int`"),
        ({"source": {"open": 1}}, "is damaged: source has byte_s and open_s"),
        ({"source": {"open_s": 0.0, "byte_s": -1.0}}, "is damaged: a time is nothing"),
        ({"front": {"step_ms": 1.0}}, "is damaged: front has output_ms and request_ms and step_ms"),
        ({"front": {"step_ms": 1.0, "request_ms": -1.0, "output_ms": 0.0}}, "is damaged: a time is nothing"),
        ({"model": "\x1b]0;title\x07"}, "is damaged: model is nothing"),
        ({"machine": "[link=http://x]" * 1000}, "is damaged: machine is nothing"),
    ],
)
def test_a_damaged_calibration_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "c.json"
    calibration().write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=message):
        Calibration.read(path)
    for text in ("{", "[" * 200_000, " " * 2**21):
        path.write_text(text)
        with pytest.raises(ConfigError, match="loraplex calibrate"):
            Calibration.read(path)


def test_bytes_between_the_measured_ranks() -> None:
    made = calibration(adapter_bytes={8: 800, 16: 1600, 64: 6400}, num_extents=1)
    for rank, nbytes in ((8, 832), (16, 1600), (12, 1216), (40, 4032), (128, 12800), (1, 832)):
        assert made.nbytes_of(rank) == nbytes  # whole cache lines; below the least rank, its bytes
    assert calibration(adapter_bytes={8: 800}, num_extents=1).nbytes_of(16) == 1600


def test_spreads() -> None:
    assert Spread.of(range(101)) == Spread(50.0, 50.0, 90.0, 99.0, 100.0)
    assert Spread.of(()) == Spread()
