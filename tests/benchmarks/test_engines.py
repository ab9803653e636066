"""Which engines are run, with which jobs and in which turns. Nothing is timed; processes are a few lines of Python."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from benchmarks import engines, peer_vllm, process_tree
from benchmarks.engines import (
    Engine,
    EngineFailedError,
    own_engine,
    parse_peer,
    parse_setting,
    parse_variant,
    rounds,
    run_engine,
)
from benchmarks.protocol import Job, Run, measure

ROOT = Path(__file__).resolve().parent.parent.parent
JOB = Job(
    base="/base",
    adapters=["/a", "/b", "/c"],
    prompts=[[5, 6], [7, 8]],
    output_len=4,
    patterns={"distinct": [0, 2], "base": [None, None]},
    runs=2,
    threads=2,
)


def test_a_job_goes_to_a_file_and_back() -> None:
    assert Job.from_json(JOB.to_json()) == JOB
    assert (JOB.used, JOB.max_distinct, JOB.prompt_len) == ([0, 2], 2, 2)


class CountingEngine:
    """Makes as many tokens as asked, and a clock that a token takes a second on."""

    version = "1"

    def __init__(self, surplus: int = 0) -> None:
        self.now = 0.0
        self.surplus = surplus
        self.calls: list[tuple[tuple[int | None, ...], int]] = []

    def generate(self, chosen: list[int | None], output_len: int) -> list[list[int]]:
        self.calls.append((tuple(chosen), output_len))
        self.now += 1 + output_len
        return [[9] * (output_len + self.surplus)] * len(chosen)


def test_every_engine_is_measured_alike() -> None:
    engine = CountingEngine()
    events = list(measure(engine, JOB, clock=lambda: engine.now))
    assert engine.calls[:3] == [((0, 2), 2), ((0, 2), 1), ((0, 2), 4)]  # a warm-up, the first token, the whole
    assert [event["event"] for event in events] == ["run", "run", "tokens"] * 2
    run = Run(**{name: value for name, value in events[0].items() if name != "event"})
    assert (run.pattern, run.num_adapters) == ("distinct", 2)
    assert run.tokens_per_s == pytest.approx(2 * 4 / 5)
    assert run.first_token_s == pytest.approx(2)
    assert run.step_ms == pytest.approx(1e3)
    assert events[2] == {"event": "tokens", "pattern": "distinct", "tokens": [[9] * 4] * 2}


def test_one_token_has_no_step() -> None:
    engine = CountingEngine()
    events = list(measure(engine, replace(JOB, output_len=1), clock=lambda: engine.now))
    assert events[0]["step_ms"] is None


def test_tokens_that_were_not_made_are_not_counted() -> None:
    ticks = count()
    with pytest.raises(RuntimeError, match=r"2 outputs of \[3\] tokens, wanted 2 of 4"):
        list(measure(CountingEngine(surplus=-1), JOB, clock=lambda: float(next(ticks))))


def test_settings_and_variants() -> None:
    assert parse_setting("kv-cache-dtype=bfloat16") == ("kv_cache_dtype", "bfloat16")
    assert [parse_setting(f"x={value}")[1] for value in ("3", "true", "null", "1.5")] == [3, True, None, 1.5]
    variant = parse_variant("int8:quantization=int8,block_size=32")
    assert (variant.name, variant.settings) == ("loraplex-int8", {"quantization": "int8", "block_size": 32})
    for wrong in ("int8", ":a=1", "int8:quantization"):
        with pytest.raises(ValueError, match="is NAME"):
            parse_variant(wrong)


def test_peers_have_environments_of_their_own(tmp_path: Path) -> None:
    assert parse_peer("hf") == Engine("hf", "benchmarks.peer_hf", sys.executable, {})
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    vllm = parse_peer(f"vllm-off={tmp_path}")
    assert (vllm.module, vllm.python) == ("benchmarks.peer_vllm", str(tmp_path / "bin" / "python"))
    assert not vllm.has_lora
    with pytest.raises(ValueError, match="there is no peer 'tgi'; there are hf, vllm, vllm-off, openvino"):
        parse_peer("tgi")
    with pytest.raises(ValueError, match="is not there"):
        parse_peer(f"hf={tmp_path / 'nowhere'}")


def test_without_lora_only_the_base_pattern_is_run() -> None:
    assert list(own_engine().patterns(JOB.patterns)) == ["base", "distinct"]  # base before any adapter is loaded
    assert list(own_engine("loraplex-off").patterns(JOB.patterns)) == ["base"]


def test_who_is_slow_to_start_starts_once() -> None:
    own, hf, vllm = own_engine(), parse_peer("hf"), parse_peer("vllm")
    plan = rounds([own, hf, vllm], 3)
    assert plan == [[(own, 1), (hf, 1)], [(own, 1), (hf, 1), (vllm, 3)], [(own, 1), (hf, 1)]]
    for engine in (own, hf, vllm):
        assert sum(runs for turn in plan for one, runs in turn if one == engine) == 3
    assert rounds([vllm], 1) == [[(vllm, 1)]]


def test_a_callers_environment_is_no_handicap() -> None:
    inherited = {"OMP_NUM_THREADS": "1", "LD_PRELOAD": "x.so", "HOME": "/home", "PYTHONPATH": "/elsewhere"}
    own = engines.environment(own_engine(), 2, inherited)
    assert (own["OMP_NUM_THREADS"], own["HOME"], own["PYTHONPATH"]) == ("2", "/home", "/elsewhere")
    assert "LD_PRELOAD" not in own
    peer = engines.environment(Engine("vllm", "benchmarks.peer_vllm", "/venv/bin/python"), 2, inherited)
    assert "OMP_NUM_THREADS" not in peer
    assert "PYTHONPATH" not in peer
    assert peer["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"


def test_vllm_gets_the_slots_that_a_batch_needs(tmp_path: Path) -> None:
    for name, rank in (("a", 8), ("b", 12), ("c", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(f'{{"r": {rank}}}')
    job = replace(JOB, adapters=[str(tmp_path / name) for name in "abc"])
    assert peer_vllm.lora_settings(job)["max_lora_rank"] == 8
    job = replace(job, patterns={"uniform": [0, 1, 0]})
    assert peer_vllm.lora_settings(job) == {
        "enable_lora": True, "max_loras": 2, "max_cpu_loras": 2, "max_lora_rank": 16,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["peer_vllm", "peer_openvino", "peer_hf", "protocol", "process_tree"])
def test_what_peers_run_knows_nothing_of_loraplex(name: str) -> None:
    tree = ast.parse((ROOT / "benchmarks" / f"{name}.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {one for one in imported if one.partition(".")[0] in ("loraplex", "rich", "psutil")}
    assert {one for one in imported if one.startswith("benchmarks")} <= {
        "benchmarks.protocol",
        "benchmarks.process_tree",
    }


RUNNER = """
import json, sys
job = json.load(open(sys.argv[sys.argv.index("--job") + 1]))
print("a library's own words")
print(json.dumps({"event": "ready", "version": "7"}))
run = {"event": "run", "pattern": "base", "num_adapters": 0, "tokens_per_s": 3.5, "first_token_s": 0.1, "step_ms": 2.0}
for pattern in job["patterns"]:
    print(json.dumps({**run, "pattern": pattern}))
    print(json.dumps({"event": "tokens", "pattern": pattern, "tokens": [[1], [2]]}))
"""


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> Engine:
    (tmp_path / "stand_in.py").write_text(code)
    monkeypatch.setattr(engines, "ROOT", tmp_path)
    return Engine("stand-in", "stand_in")


def test_an_engines_lines_become_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Run] = []
    report = run_engine(stand_in(tmp_path, monkeypatch, RUNNER), JOB, 60, heard.append)
    assert report.version == "7"
    assert [run.pattern for run in report.runs] == ["base", "distinct"]
    assert report.runs == tuple(heard)
    assert report.tokens == {"base": [[1], [2]], "distinct": [[1], [2]]}


def test_an_engine_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = stand_in(tmp_path, monkeypatch, "raise SystemExit('no such model')")
    with pytest.raises(EngineFailedError, match=r"stand-in: exit code 1\nno such model"):
        run_engine(failing, JOB, 60)


def test_an_engine_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeping = stand_in(tmp_path, monkeypatch, "import time; time.sleep(600)")
    with pytest.raises(EngineFailedError, match="no result within 1 s"):
        run_engine(sleeping, JOB, 1)


def test_shares_of_the_processor() -> None:
    before = process_tree.ProcessorTime(own_s=1.0, machine_s=10.0)
    assert process_tree.others_share(before, process_tree.ProcessorTime(4.0, 14.0)) == pytest.approx(0.25)
    assert process_tree.others_share(before, before) == 0.0
    assert process_tree.others_share(None, before) is None


@pytest.mark.skipif(not process_tree.is_known(), reason="there is no /proc here")
def test_this_process_has_memory_and_time() -> None:
    import os

    assert os.getpid() in process_tree.processes(os.getpid())
    peak, used = process_tree.peak_rss_bytes(os.getpid()), process_tree.processor_time(os.getpid())
    assert peak is not None
    assert peak > 2**20
    assert used is not None
    assert 0 < used.own_s <= used.machine_s
