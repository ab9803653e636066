"""How long a server does not answer after its engine process was killed, idle and under requests that fail meanwhile.

    python -m benchmarks.recovery                   the demo, 5 kills idle, then 5 under 100 requests/s
    python -m benchmarks.recovery --no-standby      the same, and in turns with it without a spare process
    python -m benchmarks.recovery --python OTHER/.venv/bin/python
                                                    the same, and in turns with it another checkout's server
A kill is SIGKILL; recovery is the time from there to the end of the first request that was answered with 200. Idle
means one request at a time, every 50 ms. Each run has a server of its own, with the demo's model and eight adapters,
one of them pinned.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich.table import Table

from benchmarks.arguments import positive
from benchmarks.report import wide_console
from loraplex.demo.tasks import TASKS, adapter_path, assets_path

START_PATIENCE_S = 120.0
RECOVERY_PATIENCE_S = 60.0
IDLE_PERIOD_S = 0.05
SETTLE_S = 8.0
"""Between the start of a server and the kill: a spare engine process has been made by then."""

ENGINE_MODULE = "loraplex.frontend.process"
BODY = json.dumps({"model": "demo", "prompt": "banana=", "max_tokens": 1, "temperature": 0}).encode()


@dataclass(frozen=True)
class Candidate:
    """A server that is measured: the interpreter of its checkout, and flags of `loraplex serve`."""

    python: str
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join((self.folder.name, *self.flags))

    @property
    def folder(self) -> Path:
        return Path(self.python).parents[2]


@dataclass(frozen=True)
class Recovery:
    """One kill. server_s: processor time of the server's process until the recovery; statuses: answers until then."""

    server: str
    requests_per_s: int
    seconds: float
    server_s: float
    rss_mib: float
    statuses: dict[str, int]


class Connection:
    """One connection kept alive. A request that cannot be sent or read has status 0; a new connection follows."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: bytes) -> int:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection("127.0.0.1", self._port)
            reader, writer = self._streams
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", answer, re.IGNORECASE)
            await reader.readexactly(int(length[1]) if length else 0)
            return int(answer.split(b" ", 2)[1])
        except (OSError, EOFError):
            self.close()
            return 0

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None


@asynccontextmanager
async def server(candidate: Candidate) -> AsyncIterator[tuple[psutil.Process, int]]:
    """The demo's server on a free port: its process and the port."""
    modules = [f"{task.name}={adapter_path(task.name)}" for task in TASKS]
    process = await asyncio.create_subprocess_exec(
        candidate.python, "-m", "loraplex", "serve", str(assets_path() / "base"), "--served-model-name", "demo",
        "--lora-modules", *modules, "--port", "0", *candidate.flags,
        cwd=candidate.folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_PATIENCE_S):
            while not (ready := re.search(rb"ready: http://[\d.]+:(\d+)", await process.stdout.readline())):
                if process.stdout.at_eof():
                    raise RuntimeError(f"the server of {candidate.name} ended before it was ready")
        yield psutil.Process(process.pid), int(ready[1])
    finally:
        process.terminate()
        await process.wait()


def engine_of(process: psutil.Process) -> psutil.Process:
    """The engine that serves: of several processes the largest, since a spare has no model."""
    engines = [child for child in process.children() if ENGINE_MODULE in child.cmdline()]
    return max(engines, key=lambda child: child.memory_info().rss)


def rss_mib(process: psutil.Process) -> float:
    """Of the server and its engines."""
    return sum(each.memory_info().rss for each in [process, *process.children()]) / 2**20


async def measure(candidate: Candidate, requests_per_s: int) -> Recovery:
    async with server(candidate) as (process, port):
        first = Connection(port)
        assert await first.post("/v1/completions", BODY) == 200
        await first.post("/v1/adapters/upper/pin", b"{}")
        await asyncio.sleep(SETTLE_S)
        rss = rss_mib(process)
        before_s = sum(process.cpu_times()[:2])
        os.kill(engine_of(process).pid, signal.SIGKILL)
        seconds, statuses = await recovery(port, requests_per_s)
        server_s = sum(process.cpu_times()[:2]) - before_s
        first.close()
        return Recovery(candidate.name, requests_per_s, seconds, server_s, rss, statuses)


async def recovery(port: int, requests_per_s: int) -> tuple[float, dict[str, int]]:
    """(seconds until the first 200, answers until then by status)."""
    began_s, statuses, is_back = time.perf_counter(), Counter[str](), asyncio.Event()
    period_s = 1 / requests_per_s if requests_per_s else IDLE_PERIOD_S
    free = [Connection(port)]

    async def ask() -> None:
        connection = free.pop() if free else Connection(port)
        status = await connection.post("/v1/completions", BODY)
        free.append(connection)
        if not is_back.is_set():
            statuses[str(status)] += 1
        if status == 200:
            is_back.set()

    running: set[asyncio.Task[None]] = set()
    due_s = began_s
    async with asyncio.timeout(RECOVERY_PATIENCE_S):
        while not is_back.is_set():
            due_s += period_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            if requests_per_s or not running:
                task = asyncio.create_task(ask())
                running.add(task)
                task.add_done_callback(running.discard)
    seconds = time.perf_counter() - began_s
    await asyncio.gather(*running)
    for connection in free:
        connection.close()
    return seconds, dict(statuses)


def show(recoveries: Sequence[Recovery]) -> None:
    table = Table(title="Seconds from kill -9 of the engine to the first answer")
    for name in ("server", "requests/s", "median", "worst", "runs", "server's CPU s", "RSS MiB", "answers meanwhile"):
        table.add_column(name)
    for name, rate in dict.fromkeys((each.server, each.requests_per_s) for each in recoveries):
        runs = [each for each in recoveries if (each.server, each.requests_per_s) == (name, rate)]
        seconds = [each.seconds for each in runs]
        table.add_row(
            name,
            str(rate or "idle"),
            f"{statistics.median(seconds):.2f}",
            f"{max(seconds):.2f}",
            " ".join(f"{each:.2f}" for each in seconds),
            f"{statistics.median(each.server_s for each in runs):.2f}",
            f"{statistics.median(each.rss_mib for each in runs):.0f}",
            str(dict(sum((Counter(each.statuses) for each in runs), Counter()))),
        )
    wide_console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=positive, default=5, help="kills of each kind")
    parser.add_argument("--rate", type=positive, default=100, help="requests per second that fail meanwhile")
    parser.add_argument(
        "--python", action="append", default=[], help="interpreter of a checkout whose server is measured, too"
    )
    parser.add_argument("--no-standby", action="store_true", help="measure this server without a spare process, too")
    parser.add_argument("--only", choices=("idle", "load"), help="one kind alone")
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    args = parser.parse_args()
    others = [Candidate(sys.executable, ("--no-standby-engine",))] if args.no_standby else []
    candidates = [*map(Candidate, args.python), *others, Candidate(sys.executable)]
    rates = {"idle": (0,), "load": (args.rate,), None: (0, args.rate)}[args.only]
    cases = [(candidate, rate) for rate in rates for _ in range(args.runs) for candidate in candidates]
    recoveries = [asyncio.run(measure(candidate, rate)) for candidate, rate in cases]
    show(recoveries)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(each) for each in recoveries], indent=1))


if __name__ == "__main__":
    main()
