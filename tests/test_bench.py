"""The workload of the benchmark: the same for everyone, and the figures that are made of it. Nothing here is timed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.bench import FIRST_TOKEN_ID, PATTERNS, Measurement, Workload, median, run_bench
from loraplex.config import EngineConfig
from loraplex.demo.tasks import adapter_path, assets_path
from loraplex.errors import ConfigError


def test_prompts_are_the_same_for_the_same_seed() -> None:
    workload = Workload(num_requests=4, prompt_len=8)
    prompts = workload.prompts(100)
    assert prompts == Workload(num_requests=4, prompt_len=8).prompts(100)
    assert prompts != Workload(num_requests=4, prompt_len=8, seed=12).prompts(100)
    assert [len(prompt) for prompt in prompts] == [8] * 4
    assert len({tuple(prompt) for prompt in prompts}) == 4
    assert all(FIRST_TOKEN_ID <= token < 100 for prompt in prompts for token in prompt)


def test_the_workload_that_peers_run_is_frozen() -> None:
    """benchmarks/throughput.py gives the same token ids to others; figures of two versions are compared."""
    workload = Workload()
    assert (workload.num_requests, workload.prompt_len, workload.output_len, workload.seed) == (16, 64, 64, 11)
    assert workload.prompts(8192)[0][:6] == FIRST_TOKENS
    assert workload.adapters("skewed", 16) == SKEWED


FIRST_TOKENS = [3708, 7095, 4588, 7022, 7574, 6402]
SKEWED = [0, 1, 8, 0, 1, 1, 0, 1, 1, 4, 0, 0, 0, 4, 2, 0]


@pytest.mark.parametrize(
    ("pattern", "num_adapters", "expected"),
    [
        ("base", 0, [None] * 6),
        ("base", 9, [None] * 6),
        ("identical", 9, [3] * 6),
        ("identical", 2, [1] * 6),  # index 3 of a list that goes round
        ("identical", 1, [0] * 6),
        ("distinct", 6, [0, 1, 2, 3, 4, 5]),
        ("distinct", 9, [0, 1, 2, 3, 4, 5]),
        ("uniform", 9, [0, 1, 2, 0, 1, 2]),  # ceil(sqrt(6)) of them
        ("uniform", 2, [0, 1, 0, 1, 0, 1]),
        ("uniform", 1, [0] * 6),
        ("skewed", 1, [0] * 6),
    ],
)
def test_patterns(pattern: str, num_adapters: int, expected: list[int | None]) -> None:
    assert Workload(num_requests=6).adapters(pattern, num_adapters) == expected


def test_skewed_prefers_the_first_ones_by_rank() -> None:
    """Zipf with alpha 1.5: of many draws the first adapter gets 1 / sum(1 / k^1.5), the second 2^-1.5 of that."""
    counts = Counter(Workload(num_requests=20_000).adapters("skewed", 8))
    total = sum(1 / rank**1.5 for rank in range(1, 9))
    for rank in range(1, 9):
        assert counts[rank - 1] / 20_000 == pytest.approx(1 / rank**1.5 / total, abs=0.02)


def test_zipf_over_all_adapters() -> None:
    """Not only over as many as there are requests; the exponent is in the name."""
    assert Workload(num_requests=4).adapters("zipf_all:0.9", 1000) == [32, 70, 664, 36]
    assert Workload(num_requests=16).adapters("zipf_all", 16) == SKEWED
    counts = Counter(Workload(num_requests=20_000).adapters("zipf_all:0.5", 100))
    total = sum(1 / rank**0.5 for rank in range(1, 101))
    assert counts[0] / 20_000 == pytest.approx(1 / total, abs=0.02)
    with pytest.raises(ConfigError, match="zipf_all:ALPHA needs a number, got 'much'"):
        Workload().adapters("zipf_all:much", 4)
    with pytest.raises(ConfigError, match="'zipf_all' cannot be run with 0 adapters"):
        Workload().adapters("zipf_all", 0)


@given(st.sampled_from(PATTERNS), st.integers(1, 40), st.integers(0, 40))
def test_every_request_gets_an_adapter_that_exists(pattern: str, num_requests: int, num_adapters: int) -> None:
    workload = Workload(num_requests=num_requests)
    needed = {"base": 0, "distinct": num_requests}.get(pattern, 1)
    if num_adapters < needed:
        with pytest.raises(
            ConfigError, match=f"{pattern!r} cannot be run with {num_adapters} adapters and {num_requests}"
        ):
            workload.adapters(pattern, num_adapters)
        return
    indices = workload.adapters(pattern, num_adapters)
    assert len(indices) == num_requests
    assert all((index is None) == (pattern == "base") for index in indices)
    assert all(index is None or 0 <= index < num_adapters for index in indices)
    if pattern == "distinct":
        assert len(set(indices)) == num_requests


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="pattern 'zipf' is unknown; there are base, identical, distinct"):
        Workload().adapters("zipf", 4)
    for name in ("num_requests", "prompt_len", "output_len"):
        with pytest.raises(ConfigError, match=f"{name} must be >= 1, got 0"):
            Workload(**{name: 0})
    config = EngineConfig(model="/nowhere")
    with pytest.raises(ConfigError, match="runs must be >= 1, got 0"):
        run_bench(config, [], Workload(), ["base"], 0)
    with pytest.raises(ConfigError, match="needs an adapter for each request"):
        run_bench(config, [], Workload(), ["base", "distinct"], 1)  # before the model is loaded
    with pytest.raises(ConfigError, match="no pattern is given; there are base, "):
        run_bench(config, [], Workload(), [], 1)


def test_adapters_that_no_pattern_uses_are_a_mistake() -> None:
    """`loraplex bench MODEL ADAPTER` measured the base alone and did not say so."""
    with pytest.raises(ConfigError, match="2 adapters are given, but pattern base uses none; ask for identical, "):
        Workload().check_patterns(["base"], 2)
    Workload().check_patterns(["base"], 0)
    Workload().check_patterns(["base", "identical"], 2)


def test_a_run_of_one_token_has_no_decode_step(capsys: pytest.CaptureFixture[str]) -> None:
    config = EngineConfig(model=str(assets_path() / "base"), num_threads=1, kv_cache_memory_bytes=1 << 24)
    assert run_bench(config, [], Workload(num_requests=2, prompt_len=4, output_len=1), ["base"], 1) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "base" in line.split())
    assert row.split()[-2] == "-"


@pytest.mark.parametrize(("rates", "expected"), [([3.0], 3.0), ([3.0, 1.0, 2.0], 2.0), ([4.0, 1.0, 3.0, 2.0], 2.0)])
def test_the_median_run_is_a_run(rates: list[float], expected: float) -> None:
    runs = [Measurement("base", 0, rate, rate / 10, 1.0) for rate in rates]
    assert median(runs) == Measurement("base", 0, expected, expected / 10, 1.0)


def test_a_table_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two adapters in directories of one name, every pattern that two adapters allow."""
    twin = tmp_path / "upper"
    twin.symlink_to(adapter_path("reverse"))
    config = EngineConfig(model=str(assets_path() / "base"), num_threads=1, kv_cache_memory_bytes=1 << 24)
    workload = Workload(num_requests=2, prompt_len=4, output_len=2)
    assert run_bench(config, [adapter_path("upper"), twin], workload, PATTERNS, 1) == 0
    printed = capsys.readouterr().out
    assert "2 requests of 4+2 tokens" in printed
    for pattern in PATTERNS:
        assert pattern in printed


def test_a_workload_that_the_model_would_cut_is_refused() -> None:
    """Completions that end at the model's length are shorter than the count that a rate would be made of."""
    Workload(1, 60, 4).check_fits(64)
    with pytest.raises(ConfigError, match="60 prompt and 5 output tokens do not fit in the model's length of 64"):
        Workload(1, 60, 5).check_fits(64)
