"""How long the command line's help, the start of a server, and the adapters of its command line take.

    python -m benchmarks.start                        the model s, 200 adapters of rank 8, 5 runs
    python -m benchmarks.start --model DIR --adapters DIR --max-adapters 2000 --runs 1
    python -m benchmarks.start --python OTHER/.venv/bin/python
                                                      the same, and in turns with it another checkout
Each figure has two parts: seconds from the start of the process (wall), and processor time, its own and that of the
processes below it. On a machine that others use the latter is the one to trust.

help       `loraplex --help` and `loraplex serve --help`, to the end
ready      `loraplex serve MODEL`, until its line that the port is open
health     until /health is 200
token      until a completion of one token is answered
adapters   of a server with --lora-modules, a journal and a new disk tier: what it takes beyond `ready`

Starts are warm: a first one, which is not counted, writes the packed weights, and files are in the page cache. All
candidates share one folder of packed weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.arguments import positive
from benchmarks.fixture import fixture
from benchmarks.process_tree import processor_time
from benchmarks.report import wide_console

ADAPTERS = "adapters"
PATIENCE_S = 1800.0
PACKING_S = 60.0
"""For packed weights to be written; a small model's are not."""

BODY = json.dumps({"model": "base", "prompt": [5, 6, 7], "max_tokens": 1, "temperature": 0}).encode()


@dataclass(frozen=True)
class Figure:
    """One measurement of a candidate: seconds from the start of its process, and of processor time."""

    candidate: str
    what: str
    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Candidate:
    """A checkout: its interpreter."""

    python: str

    @property
    def folder(self) -> Path:
        return Path(self.python).absolute().parents[2]

    def command(self, *arguments: str) -> list[str]:
        return [self.python, "-m", "loraplex", *arguments]


class Process:
    """A command that runs, and how long and how much it has worked."""

    def __init__(self, candidate: Candidate, arguments: Sequence[str], cache: Path) -> None:
        self._candidate = candidate
        self._began_s = time.perf_counter()
        self.popen = subprocess.Popen(
            candidate.command(*arguments),
            cwd=candidate.folder,
            env={**os.environ, "LORAPLEX_CACHE": str(cache)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def figure(self, what: str) -> Figure:
        """Until now."""
        wall_s, spent = time.perf_counter() - self._began_s, processor_time(self.popen.pid)
        return Figure(self._candidate.folder.name, what, wall_s, 0.0 if spent is None else spent.own_s)

    def ended(self, what: str) -> Figure:
        """Until its end."""
        assert self.popen.stdout is not None
        self.popen.stdout.read()
        _, status, used = os.wait4(self.popen.pid, 0)
        self.popen.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.perf_counter() - self._began_s
        return Figure(self._candidate.folder.name, what, wall_s, used.ru_utime + used.ru_stime)


@contextlib.contextmanager
def served(candidate: Candidate, arguments: Sequence[str], cache: Path) -> Iterator[tuple[Process, str]]:
    """A server that has said it is ready, and its URL."""
    process = Process(candidate, ("serve", *arguments, "--served-model-name", "base", "--port", "0"), cache)
    assert process.popen.stdout is not None
    try:
        lines = (line.decode() for line in process.popen.stdout)
        ready = next(filter(None, (re.search(r"ready: (http://[\d.]+:\d+)", line) for line in lines)), None)
        if ready is None:
            raise SystemExit(f"the server of {candidate.folder} ended before it was ready: {process.popen.wait()}")
        yield process, ready[1]
    finally:
        process.popen.terminate()
        process.popen.wait(PATIENCE_S)


def warm(candidate: Candidate, model: Path, cache: Path) -> None:
    """A first start, until its packed weights are on disk."""
    with served(candidate, [str(model)], cache):
        until_s = time.monotonic() + PACKING_S
        while not list(cache.glob("*.safetensors")) and time.monotonic() < until_s:
            time.sleep(0.1)


def answered(url: str, body: bytes | None = None) -> None:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        answer.read()


def help_of(candidate: Candidate, cache: Path) -> list[Figure]:
    commands = (("--help",), ("serve", "--help"))
    return [Process(candidate, each, cache).ended(" ".join(each)) for each in commands]


def start_of(candidate: Candidate, model: Path, cache: Path) -> list[Figure]:
    with served(candidate, [str(model)], cache) as (process, url):
        figures = [process.figure("ready")]
        answered(f"{url}/health")
        figures.append(process.figure("health"))
        answered(f"{url}/v1/completions", BODY)
        return [*figures, process.figure("token")]


def registration(
    candidate: Candidate, model: Path, adapters: Sequence[Path], cache: Path, ready: Sequence[Figure]
) -> Figure:
    """ready: of servers without adapters."""
    with tempfile.TemporaryDirectory(prefix="start-", dir=cache) as made:
        folders = ["--state-dir", f"{made}/state", "--disk-cache-dir", f"{made}/disk"]
        modules = [f"{path.name}={path}" for path in adapters]
        with served(candidate, [str(model), *folders, "--lora-modules", *modules], cache) as (process, url):
            figure = process.figure(ADAPTERS)
            with urllib.request.urlopen(f"{url}/v1/models") as answer:
                names = [each["id"] for each in json.load(answer)["data"]]
            assert names == ["base", *(path.name for path in adapters)], "names are in the order that was given"
    own = [each for each in ready if (each.candidate, each.what) == (figure.candidate, "ready")]
    wall_s = figure.wall_s - statistics.median(each.wall_s for each in own)
    cpu_s = figure.cpu_s - statistics.median(each.cpu_s for each in own)
    return Figure(figure.candidate, f"{len(adapters)} {ADAPTERS}", wall_s, cpu_s)


def show(figures: Sequence[Figure]) -> None:
    table = Table("candidate", "what", "cpu s", "cpu runs", "wall s", "wall runs", title="medians")
    for what, candidate in dict.fromkeys((each.what, each.candidate) for each in figures):
        runs = [each for each in figures if (each.what, each.candidate) == (what, candidate)]
        row = [candidate, what]
        for seconds in ([each.cpu_s for each in runs], [each.wall_s for each in runs]):
            row += [f"{statistics.median(seconds):.2f}", " ".join(f"{each:.2f}" for each in seconds)]
        table.add_row(*row)
    wide_console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of a model (default: a random one of the size s)")
    parser.add_argument("--adapters", type=Path, help="folder of folders of adapters (default: random ones of rank 8)")
    parser.add_argument("--max-adapters", type=int, default=200, help="how many; 0: none (default: %(default)s)")
    parser.add_argument("--python", action="append", default=[], help="interpreter of another checkout, in turns")
    parser.add_argument("--runs", type=positive, default=5, help="of each (default: %(default)s)")
    parser.add_argument("--only", choices=("help", "start", ADAPTERS), help="one kind alone; adapters with starts")
    parser.add_argument("--cache", type=Path, help="folder of packed weights that stays (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    num_made = 0 if args.adapters is not None else args.max_adapters
    made = fixture("s", num_made, ranks=(8,), adapter_dtype="bfloat16") if args.model is None or num_made else None
    model = args.model or (made.base if made is not None else None)
    adapters: Sequence[Path] = () if made is None else made.adapters
    if args.adapters is not None:
        adapters = sorted(each.parent.absolute() for each in args.adapters.glob("*/adapter_config.json"))
    adapters, candidates = adapters[: args.max_adapters], [Candidate(each) for each in (*args.python, sys.executable)]
    cache = args.cache or Path(tempfile.mkdtemp(prefix="start-"))
    figures: list[Figure] = []
    try:
        if args.only in ("help", None):
            figures += [each for _ in range(args.runs) for one in candidates for each in help_of(one, cache)]
        if args.only != "help":
            assert model is not None
            warm(candidates[0], model.absolute(), cache)
            turns = [one for _ in range(args.runs) for one in candidates]
            figures += [each for one in turns for each in start_of(one, model.absolute(), cache)]
            if adapters and args.only != "start":
                ready = tuple(figures)
                figures += [registration(one, model.absolute(), adapters, cache, ready) for one in turns]
    finally:
        if args.cache is None:
            shutil.rmtree(cache, ignore_errors=True)
    show(figures)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(each) for each in figures], indent=1))


if __name__ == "__main__":
    main()
