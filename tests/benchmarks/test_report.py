"""Figures to tables and files: what is shown is what was measured."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import kernels, many_adapters, throughput
from benchmarks.fixture import SIZES, fixture_of
from benchmarks.limits import Limit
from benchmarks.many_adapters import Counters, Side, blocks_of, draw_adapters
from benchmarks.protocol import Run
from benchmarks.report import EngineResult, Report, identity_lines, load_tokens, matches, row, save_tokens, show
from loraplex.bench import Workload
from loraplex.demo.tasks import adapter_path, assets_path


def run(rate: float, pattern: str = "base", peak: int | None = 2**30) -> Run:
    return Run(pattern, 0, rate, 0.5, 20.0, peak, 0.01)


def a_report() -> Report:
    own = EngineResult(
        True, {"num_threads": 2}, "1", [2.0], [run(200.0), run(240.0), run(210.0)], {"base": Limit(10.0, 420.0)}
    )
    hf = EngineResult(False, version="5", starts_s=[4.0, 6.0], runs=[run(100.0, peak=2**31), run(70.0, "skewed")])
    vllm = EngineResult(False, runs=[run(140.0)])
    report = Report({"title": "a title", "cores": 2}, {"loraplex": own, "hf": hf, "vllm": vllm})
    report.matches = {"hf": {"base": (15, 16)}}
    return report


def test_a_report_goes_to_a_file_and_back() -> None:
    report = a_report()
    assert Report.from_json(report.to_json()) == report


def test_a_row_has_the_median_and_the_ratios() -> None:
    report = a_report()
    own, hf = row(report, "base", "loraplex"), row(report, "base", "hf")
    assert own[:5] == ["base", "loraplex", "0", "210.0 (50 %)", "200.0-240.0"]
    assert own[5:9] == ["0.500", "20.0 (50 %)", "", "1.50"]  # 210 against vLLM, the best of the peers
    assert hf[3] == "100.0 (-)"
    assert hf[7:10] == ["2.10", "", "15/16"]
    assert row(report, "skewed", "hf")[7] == ""  # the first engine did not run it
    assert report.best_peer("skewed") == 70.0
    assert report.engines["hf"].peak_rss_bytes == 2**31


def test_everything_is_shown() -> None:
    report = a_report()
    report.engines["openvino"] = EngineResult(False, error="no [model] there")
    text = io.StringIO()
    show(Console(file=text, width=170), report, "a title")
    for wanted in (
        "a title",
        "skewed",
        "vllm",
        "start and memory",
        "5.0",
        "identical outputs, loraplex and hf: 15/16",
        "no [model] there",
    ):
        assert wanted in text.getvalue()


def test_identical_outputs_are_counted(tmp_path: Path) -> None:
    own, peer = {"base": [[1, 2], [3, 4]], "distinct": [[5]]}, {"base": [[1, 2], [3, 5]], "skewed": [[1]]}
    assert matches({"a": own, "b": peer}, "a") == {"b": {"base": (1, 2)}}
    workload = {"seed": 11, "fixture": "s"}
    save_tokens(tmp_path / "saved.json", workload, {"b": peer})
    assert load_tokens(tmp_path / "saved.json", workload) == {"b (saved.json)": peer}
    with pytest.raises(ValueError, match="is of another workload"):
        load_tokens(tmp_path / "saved.json", {"seed": 12, "fixture": "s"})
    report = a_report()
    report.matches = matches({"a": own, "b": peer}, "a")
    assert identity_lines(report) == ["identical outputs, loraplex and b: 1/2"]


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the `bench` extra is not installed")
    from benchmarks.plot import plot

    plot(a_report(), tmp_path / "picture.png", "a title")
    assert (tmp_path / "picture.png").stat().st_size > 1000


# ----------------------------------------------------------------------------------------------------------- throughput


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """The demo's model and two adapters as a fixture's folder."""
    (tmp_path / "base").symlink_to(assets_path() / "base")
    for number, name in enumerate(("upper", "reverse")):
        (tmp_path / f"a{number:03d}").symlink_to(adapter_path(name))
    return tmp_path


def test_a_folder_is_a_fixture(made: Path) -> None:
    found = fixture_of(made)
    assert [path.name for path in found.adapters] == ["a000", "a001"]
    assert found.size == made.name  # of no known shape
    with pytest.raises(ValueError, match="is no fixture"):
        fixture_of(made / "base")


def test_every_engine_gets_one_job(made: Path) -> None:
    args = throughput.parser().parse_args(
        [
            "--fixture",
            str(made),
            "--requests",
            "3",
            "--prompt-len",
            "5",
            "--patterns",
            "base,uniform,zipf_all:0.9",
            "--dtype",
            "bfloat16",
        ]
    )
    found = fixture_of(made)
    workload = throughput.workload_of(args, found)
    assert (workload.num_requests, workload.prompt_len, workload.output_len) == (3, 5, 64)
    job = throughput.make_job(found, workload, args)
    assert job.prompts == workload.prompts(json.loads((made / "base" / "config.json").read_text())["vocab_size"])
    assert job.patterns["base"] == [None] * 3
    assert job.patterns["uniform"] == [0, 1, 0]
    assert job.patterns["zipf_all:0.9"] == workload.adapters("zipf_all:0.9", 2)
    assert [len(prompt) for prompt in job.prompts] == [5] * 3
    assert job.dtype == "bfloat16"


def test_the_workloads_of_the_sizes_are_frozen() -> None:
    """Figures of two versions are compared."""
    sizes = {name: (w.num_requests, w.prompt_len, w.output_len, w.seed) for name, w in throughput.WORKLOADS.items()}
    assert sizes == {"tiny": (4, 16, 64, 11), "s": (16, 64, 64, 11), "m": (8, 64, 32, 11)}
    assert set(sizes) == set(SIZES)


def test_settings_reach_loraplex_and_nobody_else() -> None:
    args = throughput.parser().parse_args(
        [
            "--engines",
            "loraplex,loraplex-off",
            "--variant",
            "small:block_size=32",
            "--set",
            "seed=3",
            "--quantization",
            "int8",
            "--peer",
            "hf",
        ]
    )
    own, off, variant, hf = throughput.engines_of(args)
    assert own.settings == {"seed": 3, "quantization": "int8"}
    assert off.settings == {"seed": 3, "quantization": "int8", "enable_lora": False}
    assert variant.settings == {"seed": 3, "quantization": "int8", "block_size": 32}
    assert hf.settings == {}
    with pytest.raises(SystemExit, match="there is no peer"):
        throughput.engines_of(throughput.parser().parse_args(["--peer", "unknown"]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engines", "loraplex,lorapelx-off"], "there is no 'lorapelx-off'; there are loraplex, loraplex-off"),
        (["--patterns", "base,zipf"], "pattern 'zipf' is unknown; there are base, "),
        (["--fixture", "/nonexistent"], "/nonexistent is no fixture"),
        (["--size", "tiny", "--runs", "0"], "2"),
        (["--size", "tiny", "--threads", "0"], "2"),
        (["--size", "tiny", "--output-len", "0"], "2"),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_line_and_before_anything_is_made(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine of an unknown name was Loraplex under that name."""
    monkeypatch.setattr(throughput, "fixture", lambda *_: pytest.fail("a fixture is made"))
    with pytest.raises(SystemExit, match=message):
        throughput.main(arguments)


@pytest.mark.parametrize(
    "arguments", [["--threads", "0"], ["--only", "linear,glu"], ["--sizes", "xl"], ["--dtypes", "int3"]]
)
def test_kernels_that_are_not_there_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """They were an empty table."""
    with pytest.raises(SystemExit, match="2"):
        kernels.main(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_no_peer_can_be_asked_for() -> None:
    assert [e.name for e in throughput.engines_of(throughput.parser().parse_args(["--peer", "none"]))] == ["loraplex"]
    assert [e.name for e in throughput.engines_of(throughput.parser().parse_args([]))] == ["loraplex", "hf"]


# -------------------------------------------------------------------------------------------------------- many adapters


def test_popular_adapters_are_anywhere() -> None:
    drawn = draw_adapters(100, 0.9, 500, seed=11)
    assert drawn == draw_adapters(100, 0.9, 500, seed=11)
    assert len(drawn) == 500
    assert set(drawn) <= set(range(100))
    most = max(set(drawn), key=drawn.count)
    assert drawn.count(most) > 500 / sum(1 / rank**0.9 for rank in range(1, 101)) / 2
    assert drawn != Workload(500).adapters("zipf_all:0.9", 100)


def test_blocks_are_all_of_it_in_order() -> None:
    assert blocks_of([1, 2, 3, 4, 5, 6, 7], 3) == [[1, 2], [3, 4], [5, 6, 7]]


def test_counters_of_two_moments() -> None:
    spent = Counters(10, 5, 4, 3, 2) - Counters(4, 3, 2, 1, 0)
    assert spent == Counters(6, 2, 2, 2, 2)
    assert spent + spent == Counters(12, 4, 4, 4, 4)
    assert spent.hit_rate == pytest.approx(0.75)
    assert Counters().hit_rate is None


def test_both_sides_are_shown() -> None:
    text = io.StringIO()
    sides = (Side(1000, 120, (90.0, 110.0, 100.0), Counters(6, 2, 2, 2, 2)), Side(5, 5, (120.0,), Counters()))
    Console(file=text, width=170).print(many_adapters.table_of(sides, "a title"))
    for wanted in ("1000", "100.0", "90.0-110.0", "75.0 %", "120.0"):
        assert wanted in text.getvalue()
