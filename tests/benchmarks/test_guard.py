"""The guard's verdicts and the micro-benchmarks' arithmetic, with clocks of their own: nothing here is timed."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
from rich.console import Console

from benchmarks import guard
from benchmarks.guard import Ratio
from benchmarks.kernels import Timed, cases, cells, table_of
from benchmarks.limits import Peaks
from benchmarks.operators import (
    attention_case,
    copies_for,
    greedy_case,
    is_own,
    linear_case,
    lora_case,
    lora_parameters,
)
from benchmarks.timing import best_of, in_turn
from loraplex.kernels.native.choice import NoLibrary, open_library
from loraplex.kernels.native.library import NativeLibrary
from loraplex.kernels.ops import get_backend

CPU = torch.device("cpu")


class Clock:
    """Calls take the times that they are told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def call(self, *seconds: float) -> Callable[[], None]:
        times = iter(seconds)
        last = seconds[-1]

        def run() -> None:
            self.now += next(times, last)

        return run


def test_the_best_round_counts() -> None:
    clock = Clock()
    best = best_of({"a": clock.call(9.0, 3.0, 2.0, 1.0, 4.0), "b": clock.call(5.0)}, 0.0, clock)
    assert best == {"a": 1.0, "b": 5.0}


def test_calls_go_round() -> None:
    seen: list[str] = []
    call = in_turn([lambda: seen.append("a"), lambda: seen.append("b")])
    for _ in range(3):
        call()
    assert seen == ["a", "b", "a"]


def test_a_working_set_is_larger_than_caches() -> None:
    assert copies_for(2**20) == 64  # as many as are worth the memory
    assert copies_for(2**25) == 4
    assert copies_for(2**30) == 1


def test_a_ratio_is_measured_again_before_it_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([{"ours": 3.0, "theirs": 1.0}, {"ours": 1.0, "theirs": 1.0}, {"ours": 9.0, "theirs": 1.0}])
    monkeypatch.setattr(guard, "best_of", lambda calls, seconds: next(times))
    measured = guard.measure(Ratio("one", 2.0, lambda: (int, int)))
    assert (measured.measured, measured.is_broken) == (1.0, False)
    monkeypatch.setattr(guard, "best_of", lambda calls, seconds: {"ours": 3.0, "theirs": 1.0})
    measured = guard.measure(Ratio("one", 2.0, lambda: (int, int)))
    assert (measured.measured, measured.is_broken) == (3.0, True)


def test_a_latency_is_measured_again_before_it_is_broken() -> None:
    tries = iter([0.060, 0.040, 9.0])
    measured = guard.measure_latency(guard.Latency("one", 50.0, lambda: next(tries)))
    assert (measured.measured_ms, measured.is_broken) == (40.0, False)
    measured = guard.measure_latency(guard.Latency("one", 50.0, lambda: 0.051), attempts=2)
    assert (measured.measured_ms, measured.is_broken) == (51.0, True)


def test_latencies_that_are_broken_end_the_guard_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    late = guard.Latency("switch", 50.0, float, 60.0)
    monkeypatch.setattr(guard, "measured_latencies", lambda attempts: [late])
    assert guard.main(["--latencies"]) == 1
    assert guard.main(["--latencies", "--show"]) == 0
    monkeypatch.setattr(guard, "open_library", lambda: NoLibrary("they are not built"))
    assert guard.main([]) == 1
    late = guard.Latency("switch", 50.0, float, 40.0)
    assert guard.main(["--latencies"]) == guard.main([]) == 0


def test_the_promises_are_measured_on_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each, with a limit that nothing reaches: what is timed runs."""
    monkeypatch.setattr(guard, "TRIES", 1)
    measured = guard.measured_latencies(attempts=1)
    assert [(each.name, each.limit_ms) for each in measured] == [
        ("alternating, both resident", 1.0),
        ("host to device", 10.0),
        ("switch_lora", 5.0),
    ]
    assert all(each.measured_ms < float("inf") for each in measured)


def test_the_table_names_what_broke() -> None:
    text = io.StringIO()
    shown = [Ratio("fine", 2.0, lambda: (int, int), measured=1.0), Ratio("lost", 2.0, lambda: (int, int), measured=2.5)]
    shown.append(Ratio("later", 2.0, lambda: (int, int), is_native=False, measured=3.0))
    Console(file=text, width=120).print(guard.table_of(shown))
    lines = {line.split("│")[1].strip(): line for line in text.getvalue().splitlines() if line.startswith("│")}
    assert "BROKEN" in lines["lost"]
    assert "ok" in lines["fine"]
    assert "no native kernel" in lines["later"]


def test_a_missing_library_fails_where_it_could_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "compiler", lambda: "/usr/bin/c++")
    assert guard.missing_library("not installed", True)[0] == 1
    assert guard.missing_library("not installed", False)[0] == 0
    monkeypatch.setattr(guard, "compiler", lambda: None)
    assert guard.missing_library("not installed", True)[0] == 0


def test_cells_of_a_case() -> None:
    one = Timed("linear", "s qkv float32 T=1", 50.0, 200.0, 25.0, True)
    assert cells(one) == ["linear", "s qkv float32 T=1", "50.0", "200", "4.00", "25.0", "50 %"]
    lonely = Timed("linear", "s qkv int8 T=1", 50.0, None, None, False)
    assert cells(lonely)[1:] == ["s qkv int8 T=1 (no native kernel yet)", "50.0", "-", "-", "-", "-"]
    assert table_of([one, lonely], "a title").row_count == 2


def test_every_case_has_a_name_of_its_own() -> None:
    names = [case.name for case in cases(["s", "m"], ["float32", "int8"], [1, 16, 1024])]
    assert len(set(names)) == len(names)


def test_floors() -> None:
    peaks = Peaks(bandwidth=1e9, fp32=1e12, int16=1e12)
    linear = linear_case("tiny", "qkv", "float32", 1)
    assert linear.floor_s is not None
    assert linear.floor_s(peaks) == pytest.approx(4 * 128 * 64 / 1e9)
    # Rank 2 on a layer of `tiny`: A and B of q, k, v, o, gate, up, down.
    outs_and_ins = (64 + 64) + 2 * (32 + 64) + (64 + 64) + 2 * (160 + 64) + (64 + 160)
    assert lora_parameters("tiny", [2]) == 2 * outs_and_ins
    lora = lora_case("tiny", 4, (2, 2), "bfloat16", "2 x r2")
    assert lora.floor_s is not None
    assert lora.floor_s(peaks) == pytest.approx(2 * 2 * 2 * outs_and_ins / 1e9)
    attention = attention_case("tiny", (32, 32), 1, "float32")
    assert attention.floor_s is not None
    assert attention.floor_s(peaks) == pytest.approx(4 * 2 * 32 * 64 / 1e9)
    attention = attention_case("tiny", (32, 32), 1, "int8")
    assert attention.floor_s is not None
    assert attention.floor_s(peaks) == pytest.approx(2 * (32 + 4) * 64 / 1e9), "a head with a scale"


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_cases_run_on_every_backend(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each at the smallest shapes: inputs fit the operators."""
    library = open_library()
    if backend == "native" and not isinstance(library, NativeLibrary):
        pytest.skip(library.reason)
    monkeypatch.setattr("benchmarks.operators.MAX_COPIES", 2)
    for case in cases(["tiny"], ["float32", "bfloat16", "int8"], [1, 3]):
        if " 1024" in case.name or "layer" in case.name or "49152" in case.name:
            continue
        call = case.build(get_backend(backend, CPU))
        if call is None:
            assert "int8" in case.name
        else:
            call()
    call = lora_case("tiny", 4, (8, 16), "bfloat16", "2 adapters").build(get_backend(backend, CPU))
    assert call is not None
    call()


def test_stock_torch_has_no_kernels_of_its_own() -> None:
    torch_backend = get_backend("torch", CPU)
    assert not is_own(torch_backend, linear_case("tiny", "o", "float32", 1))
    assert not is_own(torch_backend, greedy_case("tiny", 2))
