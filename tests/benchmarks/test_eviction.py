"""The simulator: traces are what they say, replays count right, Belady's bound is one."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.eviction import (
    BELADY,
    ONLINE,
    TRACES,
    Count,
    Request,
    Shape,
    TraceClock,
    World,
    main,
    make_world,
    replay,
    replay_belady,
    totals,
)
from loraplex.memory.eviction.policies import get_policy

SHAPE = Shape(num_adapters=50, num_requests=2000, rate=5.0)


def trace_of(adapters: Sequence[int]) -> list[Request]:
    return [Request(float(i), adapter) for i, adapter in enumerate(adapters)]


def world_of(nbytes: Sequence[int], room_bytes: int) -> World:
    return World("any", tuple(nbytes), tuple(float(each) for each in nbytes), room_bytes)


def run(name: str, trace: Sequence[Request], world: World) -> Count:
    clock = TraceClock()
    return replay(trace, world, get_policy(name, clock), clock)


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_is_in_order_of_the_length_asked_and_repeatable(name: str) -> None:
    trace = TRACES[name](SHAPE, np.random.default_rng(1))
    times = [request.now_s for request in trace]
    assert times == sorted(times)
    assert times[0] >= 0
    assert 0 < len(trace) <= SHAPE.num_requests
    assert {request.adapter for request in trace} <= set(range(SHAPE.num_adapters))
    assert trace == TRACES[name](SHAPE, np.random.default_rng(1))
    assert trace != TRACES[name](SHAPE, np.random.default_rng(2))


def popular(trace: Sequence[Request], num: int) -> set[int]:
    return {adapter for adapter, _ in Counter(request.adapter for request in trace).most_common(num)}


def test_popularity_drifts_in_the_shifting_trace_only() -> None:
    shape = Shape(num_adapters=50, num_requests=20_000, rate=5.0)
    kept = {}
    for name in ("zipf", "shifting"):
        trace = TRACES[name](shape, np.random.default_rng(3))
        kept[name] = len(popular(trace[:4000], 10) & popular(trace[-4000:], 10))
    assert kept["zipf"] >= 9
    assert kept["shifting"] <= 5


def test_bursts_are_burstier_than_chance_and_periods_are_not() -> None:
    spread = {}
    for name in ("uniform", "bursty", "periodic"):
        trace = TRACES[name](Shape(50, 20_000, 5.0), np.random.default_rng(4))
        by_adapter: dict[int, list[float]] = {}
        for request in trace:
            by_adapter.setdefault(request.adapter, []).append(request.now_s)
        intervals = [np.diff(times) for times in by_adapter.values() if len(times) >= 5]
        spread[name] = float(np.median([each.std() / each.mean() for each in intervals]))
    assert spread["periodic"] < 0.1 < 0.9 < spread["uniform"] < 1.1 < 2 < spread["bursty"]


def test_a_replay_counts_hits_bytes_and_seconds() -> None:
    """Room for two: 0 and 1 come in, 0 is there again, 2 pushes 1 out, 1 is gone."""
    count = run("lru", trace_of([0, 1, 0, 2, 1]), world_of([10, 10, 10], 20))
    assert count == Count(num_requests=5, num_hits=1, asked_bytes=50, hit_bytes=10, reload_s=40.0)
    assert (count.hit_rate, count.byte_hit_rate) == (0.2, 0.2)


def test_a_large_one_pushes_out_as_many_as_it_must() -> None:
    count = run("fifo", trace_of([0, 1, 2, 3, 2, 1]), world_of([10, 10, 10, 20], 30))
    assert count.num_hits == 1  # 3 took the room of 0 and 1


def test_belady_is_exact_with_equal_sizes() -> None:
    """Against the best of all choices of a victim, on small traces."""
    draw = np.random.default_rng(5)
    for _ in range(20):
        adapters = [int(each) for each in draw.integers(0, 5, 12)]
        assert replay_belady(trace_of(adapters), world_of([1] * 5, 3)).num_hits == best_hits(adapters, 3)


def best_hits(adapters: Sequence[int], room: int) -> int:
    hits_of: dict[frozenset[int], int] = {frozenset(): 0}
    for adapter in adapters:
        following: dict[frozenset[int], int] = {}
        for held, hits in hits_of.items():
            if adapter in held:
                choices = [(held, hits + 1)]
            elif len(held) < room:
                choices = [(held | {adapter}, hits)]
            else:
                choices = [(held - {victim} | {adapter}, hits) for victim in held]
            for after, num in choices:
                following[after] = max(num, following.get(after, 0))
        hits_of = following
    return max(hits_of.values())


@pytest.mark.parametrize("name", TRACES)
def test_no_policy_beats_belady_with_equal_sizes(name: str) -> None:
    world = make_world("equal", SHAPE.num_adapters, 0.1, remote_share=0.0, seed=1)
    trace = TRACES[name](SHAPE, np.random.default_rng(1))
    bound = replay_belady(trace, world)
    for policy in ONLINE:
        count = run(policy, trace, world)
        assert count.num_hits <= bound.num_hits
        assert count.reload_s >= bound.reload_s


def test_with_mixed_sizes_belady_lets_a_large_one_go_rather_than_two_small_ones() -> None:
    trace = trace_of([0, 1, 2, 3, 1, 2, 0])  # 0 is large; room for it and both small ones, 3 is one too many
    assert replay_belady(trace, world_of([20, 10, 10, 10], 40)).num_hits == 2


def test_a_world_has_the_sizes_and_the_room_asked_for() -> None:
    equal, mixed = (make_world(sizes, 200, 0.1, 0.0, seed=1) for sizes in ("equal", "mixed"))
    assert len(set(equal.nbytes)) == 1
    assert max(mixed.nbytes) == 8 * min(mixed.nbytes)
    assert mixed.room_bytes == pytest.approx(0.1 * sum(mixed.nbytes), abs=1)
    far = make_world("equal", 200, 0.1, 1.0, seed=1)
    assert far.reload_s[0] == pytest.approx(10 * equal.reload_s[0])


def test_the_command_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "figures.json"
    arguments = [
        "--traces",
        "zipf,bursty",
        "--adapters",
        "30",
        "--requests",
        "300",
        "--seeds",
        "2",
        "--json",
        str(path),
    ]
    assert main(arguments) == 0
    rows = json.loads(path.read_text())["results"]
    wanted = itertools.product(["zipf", "bursty"], ["equal", "mixed"], [*ONLINE, BELADY])
    assert [(row["trace"], row["sizes"], row["policy"]) for row in rows] == list(wanted)
    output = capsys.readouterr().out
    assert "belady (exact)" in output
    assert "belady by size (heuristic)" in output


def test_a_mistake_in_the_arguments_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in (
        (["--traces", "azure"], "no 'azure'"),
        (["--room", "2"], "must be 0..1, got 2"),
        (["--rate", "0"], "must be > 0, got 0"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert text in capsys.readouterr().err


def test_totals_add_up() -> None:
    one, two = Count(10, 5, 100, 50, 1.0), Count(20, 5, 100, 70, 2.0)
    assert totals({("a", "equal", "lru"): one, ("b", "equal", "lru"): two}) == {"lru": Count(30, 10, 200, 120, 3.0)}
