"""The engines that `throughput.py` can measure, how each is started, and in which order they take their turns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.protocol import Job, Run

ROOT = Path(__file__).resolve().parent.parent
OWN = "loraplex"
OWN_ENGINES = (OWN, "loraplex-off")
PEERS = {
    "hf": "transformers + peft",
    "vllm": "vLLM, LoRA on",
    "vllm-off": "vLLM, LoRA off: base pattern only",
    "openvino": "OpenVINO GenAI",
}
WITHOUT_LORA = ("loraplex-off", "vllm-off")
SLOW_TO_START = ("vllm", "vllm-off")
"""Started once, for all runs; the others once per round."""

HANDICAPS = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "KMP_AFFINITY", "KMP_BLOCKTIME", "LD_PRELOAD",
)  # fmt: skip
"""Of the caller's environment: each engine gets what is good for it instead."""

TCMALLOC = ("/usr/lib/*/libtcmalloc_minimal.so.4", "/usr/lib64/libtcmalloc_minimal.so.4")


class EngineFailedError(RuntimeError):
    """An engine ended without a result, or did not end in time; the message has the end of what it printed."""


@dataclass(frozen=True)
class Engine:
    """One column of the comparison. `settings` go into its job."""

    name: str
    module: str
    python: str = sys.executable
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_own(self) -> bool:
        return self.name.startswith(OWN)

    @property
    def has_lora(self) -> bool:
        return bool(self.settings.get("enable_lora", True))

    @property
    def is_slow_to_start(self) -> bool:
        return self.name in SLOW_TO_START

    def patterns(self, wanted: Mapping[str, list[int | None]]) -> dict[str, list[int | None]]:
        """What it can run of these; base requests first, before any adapter is loaded."""
        order = sorted(wanted, key=lambda name: name != "base")
        return {name: wanted[name] for name in order if self.has_lora or not set(wanted[name]) - {None}}


def own_engine(name: str = OWN, settings: Mapping[str, Any] | None = None) -> Engine:
    """Loraplex in this environment; `loraplex-off` has LoRA turned off."""
    chosen = dict(settings or {})
    if name in WITHOUT_LORA:
        chosen["enable_lora"] = False
    return Engine(name, "benchmarks.engine_loraplex", settings=chosen)


def parse_variant(text: str) -> Engine:
    """`int8:quantization=int8,kv_cache_dtype=bfloat16` is Loraplex with these settings, named loraplex-int8."""
    label, _, settings = text.partition(":")
    if not label or not settings:
        raise ValueError(f"a variant is NAME:SETTING=VALUE[,SETTING=VALUE...], got {text!r}")
    return own_engine(f"{OWN}-{label}", dict(parse_setting(one) for one in settings.split(",")))


def parse_setting(text: str) -> tuple[str, Any]:
    """`name=value`; a value is JSON if it can be (numbers, true, null), else a string. Dashes become underscores."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"a setting is NAME=VALUE, got {text!r}")
    try:
        return name.replace("-", "_"), json.loads(value)
    except json.JSONDecodeError:
        return name.replace("-", "_"), value


def parse_peer(text: str) -> Engine:
    """`hf`, `vllm=/path/to/environment`, `openvino=/path/to/python`: a peer and its Python (default: this one)."""
    name, _, where = text.partition("=")
    if name not in PEERS:
        raise ValueError(f"there is no peer {name!r}; there are {', '.join(PEERS)}")
    module = "benchmarks.peer_" + name.removesuffix("-off")
    settings = {"enable_lora": False} if name in WITHOUT_LORA else {}
    return Engine(name, module, _python_of(where) if where else sys.executable, settings)


def _python_of(where: str) -> str:
    """The interpreter of a virtual environment's folder; a file is one itself."""
    path = Path(where).expanduser().absolute()
    python = path / "bin" / "python" if path.is_dir() else path
    if not python.exists():
        raise ValueError(f"{python} is not there: give the folder of a virtual environment, or a Python interpreter")
    return str(python)


def rounds(engines: Sequence[Engine], num_runs: int) -> list[list[tuple[Engine, int]]]:
    """(engine, runs) of each round, in order: everyone has a run in every round, but who is slow to start has all in
    the middle one."""
    plan: list[list[tuple[Engine, int]]] = []
    for index in range(num_runs):
        turn = []
        for engine in engines:
            if not engine.is_slow_to_start:
                turn.append((engine, 1))
            elif index == num_runs // 2:
                turn.append((engine, num_runs))
        plan.append(turn)
    return plan


def environment(engine: Engine, threads: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for an engine's process: its makers' advice for a CPU, and no network."""
    variables = {name: value for name, value in inherited.items() if name not in HANDICAPS}
    if engine.python != sys.executable:
        variables.pop("PYTHONPATH", None)  # packages of this Python are not the peer's
    variables |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONDONTWRITEBYTECODE": "1"}
    if not engine.module.endswith("vllm"):
        return variables | {"OMP_NUM_THREADS": str(threads)}
    # vLLM binds its worker's threads itself. With OMP_NUM_THREADS its other processes have as many, which spin beside
    # the worker.
    variables |= {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
    }
    preloaded = _preloaded(Path(engine.python).parent.parent)
    return variables | ({"LD_PRELOAD": ":".join(preloaded)} if preloaded else {})


def _preloaded(venv: Path) -> list[str]:
    """vLLM's advice: tcmalloc (Debian: libtcmalloc-minimal4) and Intel's OpenMP from its own environment."""
    root = Path("/")
    found = [str(path) for pattern in TCMALLOC for path in sorted(root.glob(pattern.lstrip("/")))[:1]]
    intel = venv / "lib" / "libiomp5.so"
    return found + ([str(intel)] if intel.exists() else [])


@dataclass(frozen=True)
class EngineReport:
    """What one process of an engine said."""

    version: str
    start_s: float
    runs: tuple[Run, ...]
    tokens: Mapping[str, list[list[int]]]


def run_engine(engine: Engine, job: Job, timeout_s: float, on_run: Callable[[Run], None] | None = None) -> EngineReport:
    """Run a job in a process of its own. Raises EngineFailedError."""
    job = replace(job, settings=dict(engine.settings), patterns=engine.patterns(job.patterns))
    with tempfile.TemporaryDirectory() as folder:
        job_file, log = Path(folder) / "job.json", Path(folder) / "log"
        job_file.write_text(job.to_json())
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [engine.python, "-m", engine.module, "--job", str(job_file)],
                stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=ROOT, start_new_session=True,
                env=environment(engine, job.threads, os.environ),
            )  # fmt: skip
            try:
                report, problem = _listen(process, timeout_s, on_run)
            finally:
                _end(process)
                assert process.stdout is not None
                process.stdout.close()
        if report is None:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
            raise EngineFailedError(f"{engine.name}: {problem}\n{tail}")
    return report


def _listen(
    process: subprocess.Popen[str], timeout_s: float, on_run: Callable[[Run], None] | None
) -> tuple[EngineReport | None, str]:
    """(what it said, or None when it did not come to its end; why)."""
    began = time.monotonic()
    version, start_s, runs, tokens = "", 0.0, [], {}
    for event in _events(process, began + timeout_s):
        kind = event.pop("event")
        if kind == "ready":
            version, start_s = event["version"], time.monotonic() - began
        elif kind == "run":
            runs.append(Run(**event))
            if on_run is not None:
                on_run(runs[-1])
        else:
            tokens[event["pattern"]] = event["tokens"]
    if time.monotonic() - began >= timeout_s:
        return None, f"no result within {timeout_s:.0f} s"
    code = process.wait(timeout=10)
    if code != 0:
        return None, f"exit code {code}"
    return EngineReport(version, start_s, tuple(runs), tokens), ""


def _events(process: subprocess.Popen[str], deadline: float) -> Iterator[dict[str, Any]]:
    """Lines as they come; when the deadline passes the process is ended, and with it the lines."""
    import threading

    assert process.stdout is not None
    timer = threading.Timer(max(0.0, deadline - time.monotonic()), _end, [process])
    timer.daemon = True
    timer.start()
    try:
        for line in process.stdout:
            if line.startswith('{"event"'):
                yield json.loads(line)
    finally:
        timer.cancel()


def _end(process: subprocess.Popen[str], grace_s: float = 5.0) -> None:
    """The process and all that it started: they are a session of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        until = time.monotonic() + grace_s
        while time.monotonic() < until and _has_group(process):
            time.sleep(0.05)
    process.wait()


def _has_group(process: subprocess.Popen[str]) -> bool:
    process.poll()  # a zombie is still of the group
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True
