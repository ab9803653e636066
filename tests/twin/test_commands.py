"""The commands: a calibration of the demo's model, and what is made of it, as JSON, a table and errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from loraplex import cli
from loraplex.demo.tasks import assets_path
from loraplex.twin.calibrate import MAX_RATIOS
from loraplex.twin.calibration import Calibration
from loraplex.twin.step_model import FEATURES
from tests.twin.parts import calibration

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """(exit code, standard output, standard error) of a command."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["loraplex", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def measured(tmp_path: Path) -> str:
    path = tmp_path / "calibration.json"
    calibration().write(path)
    return str(path)


def test_calibrate(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    options = "--seconds", "5", "--ranks", "4", "16", "--max-num-seqs", "8", "--num-threads", "1"
    code, out, err = run("calibrate", str(assets_path() / "base"), "--output", str(path), *options)
    assert code == 0, err
    assert out.startswith(f"{path}: ")
    made = Calibration.read(path)
    assert made.num_steps > 50
    assert min(made.num_steps, MAX_RATIOS) <= len(made.step_ratios) <= MAX_RATIOS
    assert made.step_ms.keys() == set(FEATURES)
    assert sum(made.step_ms.values()) > 0
    assert sorted(made.adapter_bytes) == [1, 4, 16]
    assert made.adapter_bytes[1] < made.adapter_bytes[4] < made.adapter_bytes[16]
    assert 0 < made.front.step_ms + made.front.output_ms < sum(made.step_ms.values())
    assert made.front.request_ms > 0
    assert made.source.seconds(made.adapter_bytes[16]) > 0
    assert (made.has_one_memory, made.look_ahead, made.max_model_len) == (True, False, 256)
    code, out, err = run("simulate", str(path), "--requests", "20", "--json", "--rate", "20", "--adapters", "4")
    assert code == 0, err
    assert json.loads(out)["num_failed"] == 0


def test_calibrate_says_what_cannot_be(run: Run, tmp_path: Path) -> None:
    base = str(assets_path() / "base")
    assert "--seconds must be >= 5" in run("calibrate", base, "--seconds", "1")[2]
    assert "--ranks must be 1..512" in run("calibrate", base, "--ranks", "0")[2]
    assert "n-gram is not in a step model" in run("calibrate", base, "--speculative", "n-gram")[2]
    assert "there is no directory" in run("calibrate", base, "--output", str(tmp_path / "no" / "c.json"))[2]


def test_simulate(run: Run, measured: str) -> None:
    code, out, _ = run("simulate", measured, "--requests", "50", "--adapters", "8", "--adapter-memory-bytes", "4MiB")
    assert code == 0
    assert "round on 1 x nowhere" in out
    assert "first token, P50 / P90 / P99" in out
    code, out, _ = run("simulate", measured, "--requests", "50", "--json", "--runners", "2", "--placement", "spread")
    figures = json.loads(out)
    assert (code, figures["detail"], len(figures["utilization"])) == (0, "steps", 2)


def test_simulate_replicas(run: Run, measured: str) -> None:
    code, out, _ = run("simulate", measured, "--replicas", "5", "--requests", "500", "--rate", "50", "--warm-up", "0.5")
    assert code == 0
    assert "waiting is an estimate" in out
    code, out, _ = run("simulate", measured, "--replicas", "5", "--requests", "200", "--json")
    assert json.loads(out)["detail"] == "requests"
    code, _, err = run("simulate", measured, "--replicas", "5", "--host-memory-bytes", "8GiB")
    assert code == 1
    assert "--host-memory-bytes is of --runners" in err


def test_simulate_says_what_cannot_be(run: Run, measured: str, tmp_path: Path) -> None:
    assert "loraplex calibrate" in run("simulate", str(tmp_path / "none.json"))[2]
    assert "--prompt-tokens must be a number" in run("simulate", measured, "--prompt-tokens", "much")[2]
    assert "--rate is the trace's" in run("simulate", measured, "--trace", "t", "--rate", "9")[2]


def test_plan(run: Run, measured: str) -> None:
    load = "--requests", "100", "--rate", "20", "--adapters", "8", "--output-tokens", "8"
    code, out, err = run("plan", measured, *load, "--first-token-s", "0.5")
    assert code == 0, err
    assert "1 device, each with --adapter-memory-bytes" in out
    code, out, _ = run("plan", measured, *load, "--first-token-s", "0.5", "--json")
    assert json.loads(out)["chosen"]["devices"] == 1
    code, out, _ = run("plan", measured, *load, "--first-token-s", "0.001", "--max-devices", "2")
    assert code == 1
    assert "no number of devices up to 2" in out


def test_plan_says_what_cannot_be(run: Run, measured: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--runners is what plan looks for" in run("plan", measured, "--runners", "2")[2]
    assert "--device-memory-bytes 1048576 hold" in run("plan", measured, "--device-memory-bytes", "1MiB")[2]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "a plot needs matplotlib" in run("plan", measured, "--plot", "x.png")[2]
