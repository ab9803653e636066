"""What `loraplex route` adds to a request and to a streamed token: the same server asked directly and through it.

    python -m benchmarks.router
    python -m benchmarks.router --model path/to/model --rounds 10 --json results/router.json
Short answers (one token) one after the other, and streams of many tokens side by side, in turns. The figures of a turn
are the median latency of a request, the time of a stream, and the router's processor time; those of all turns are their
medians. The client, the server and the router share the machine: what the router adds to a latency has the switches
between their processes in it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.table import Table

from benchmarks.arguments import positive
from benchmarks.loaded_engine import save
from benchmarks.report import wide_console
from loraplex.demo.tasks import assets_path

STOP_S = 30.0


@dataclass(frozen=True)
class Turn:
    """Milliseconds: of a short request; of a stream; the router's processor time a request, and a token of a stream."""

    direct_ms: float
    routed_ms: float
    direct_stream_ms: float
    routed_stream_ms: float
    cpu_request_ms: float
    cpu_token_ms: float


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[tuple[str, psutil.Process]]:
    """A command of Loraplex that listens: its URL, and its process."""
    command = [sys.executable, "-m", "loraplex", *arguments, "--port", "0", "--no-access-log", "--log-level", "error"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = next((each for each in process.stdout if each.startswith("Loraplex")), None)
        if line is None:
            raise SystemExit(f"{' '.join(command)} did not start: it exited with {process.wait()}")
        url = next(word for word in line.split() if word.startswith("http"))
        yield url, psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_S)


def body(max_tokens: int, *, is_stream: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    if is_stream:
        options |= {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": "base", "prompt": "banana bread=", **options}


async def short(client: httpx.AsyncClient, count: int) -> float:
    """Median milliseconds of a request of one token."""
    times = []
    for _ in range(count):
        began_s = time.perf_counter()
        answer = await client.post("/v1/completions", json=body(1, is_stream=False))
        times.append(time.perf_counter() - began_s)
        answer.raise_for_status()
    return 1e3 * statistics.median(times)


async def streams(client: httpx.AsyncClient, count: int, max_tokens: int) -> float:
    """Median milliseconds of streams side by side."""

    async def one() -> float:
        began_s, events = time.perf_counter(), b""
        async with client.stream("POST", "/v1/completions", json=body(max_tokens, is_stream=True)) as answer:
            async for piece in answer.aiter_bytes():
                events += piece
        usage = next(json.loads(each[6:])["usage"] for each in reversed(events.split(b"\n\n")) if b'"usage":{' in each)
        assert usage["completion_tokens"] == max_tokens, f"a stream ended after {usage['completion_tokens']} tokens"
        return time.perf_counter() - began_s

    return 1e3 * statistics.median(await asyncio.gather(*(one() for _ in range(count))))


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(server: str, front: str, router: psutil.Process, args: argparse.Namespace) -> list[Turn]:
    """The first turn warms up."""
    turns = []
    async with (
        httpx.AsyncClient(base_url=server, timeout=300, trust_env=False) as direct,
        httpx.AsyncClient(base_url=front, timeout=300, trust_env=False) as routed,
    ):
        for _ in range(args.rounds + 1):
            direct_ms = await short(direct, args.requests)
            before_s = cpu_s(router)
            routed_ms = await short(routed, args.requests)
            cpu_request_ms = 1e3 * (cpu_s(router) - before_s) / args.requests
            direct_stream_ms = await streams(direct, args.streams, args.output_len)
            before_s = cpu_s(router)
            routed_stream_ms = await streams(routed, args.streams, args.output_len)
            cpu_token_ms = 1e3 * (cpu_s(router) - before_s) / (args.streams * args.output_len)
            turns.append(Turn(direct_ms, routed_ms, direct_stream_ms, routed_stream_ms, cpu_request_ms, cpu_token_ms))
    return turns[1:]


def table_of(turns: Sequence[Turn], args: argparse.Namespace, title: str) -> Table:
    def median(name: str) -> float:
        return statistics.median(getattr(turn, name) for turn in turns)

    added_request_ms = statistics.median(turn.routed_ms - turn.direct_ms for turn in turns)
    added_ms = statistics.median(turn.routed_stream_ms - turn.direct_stream_ms for turn in turns)
    table = Table(title=title, title_justify="left")
    for heading in ("", "direct ms", "routed ms", "added ms", "router's CPU us"):
        table.add_column(heading, justify="right")
    rows = (
        ("request", median("direct_ms"), median("routed_ms"), added_request_ms, median("cpu_request_ms")),
        (
            "streamed token",
            median("direct_stream_ms") / args.output_len,
            median("routed_stream_ms") / args.output_len,
            added_ms / args.output_len,
            median("cpu_token_ms"),
        ),
    )
    for name, direct, routed, added, cpu in rows:
        table.add_row(name, f"{direct:.3f}", f"{routed:.3f}", f"{added:.3f}", f"{1e3 * cpu:.0f}")
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    options = ["--served-model-name", "base", "--num-threads", str(args.threads), "--no-standby-engine"]
    with (
        started("serve", args.model, *options) as (server, _),
        started("route", "--replica", server) as (front, router),
    ):
        turns = asyncio.run(measure(server, front, router, args))
    load = os.getloadavg()[0]
    title = f"{args.streams} streams of {args.output_len} tokens, {args.rounds} turns, load of the machine {load:.1f}"
    wide_console().print(table_of(turns, args, title))
    save(args.json, {"title": title, "turns": [asdict(turn) for turn in turns]})
    return 0


def parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", default=str(assets_path() / "base"), help="default: the demo's base model")
    parser.add_argument("--threads", type=positive, default=1, help="of the engine (default: 1)")
    parser.add_argument("--rounds", type=positive, default=5, help="turns (default: 5)")
    parser.add_argument("--requests", type=positive, default=200, help="short requests in a turn (default: 200)")
    parser.add_argument("--streams", type=positive, default=8, help="side by side (default: 8)")
    parser.add_argument("--output-len", type=positive, default=100, help="tokens of a stream (default: 100)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
