"""Replicas on Ray Serve beside one with the memory of all: how many requests find their adapter resident.

    python -m benchmarks.ray_serve
3 replicas, 200 adapters, popularity Zipf 0.9. A replica keeps --places adapters, and the one beside them 3 times as
many. A hit is a request whose adapter is on the device. Target: the replicas' share of hits is at least 0.9 of the
one's. Figures are counts, so that a busy machine changes them little; the demo's model is small enough for any.
Adapters are the demo's with other scalings, written to a temporary folder: no two are equal. Needs the extra `ray`.

    python -m benchmarks.ray_serve --loads 20 --database-url postgresql://USER@HOST/DATABASE?options=-csearch_path%3DNEW
Instead, the time from a load at one replica until each replica has answered a request with the adapter; a schema that
is empty. Target: at most 1 s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from rich.table import Table
from safetensors.torch import load_file, save_file

from benchmarks.arguments import positive
from benchmarks.report import wide_console
from loraplex.demo.tasks import ADAPTERS, adapter_path, assets_path
from loraplex.serve.exchange import REPLICA_HEADER

ZIPF_ALPHA = 0.9
MIN_SHARE = 0.9
MAX_KNOWN_S = 1.0
_COUNTS = re.compile(r"^loraplex:adapter_(hits|misses)_total(?:\{[^\n]*\})? ([0-9.e+]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """Requests that found their adapter on the device, those that did not, and how many each replica answered."""

    replicas: int
    places: int
    hits: int
    misses: int
    by_replica: tuple[int, ...]

    @property
    def hit_rate(self) -> float:
        return self.hits / (self.hits + self.misses)


def write_adapters(folder: Path, count: int) -> list[str]:
    """`name=path` of each."""
    sources = [adapter_path(task.name) for task in ADAPTERS]
    modules = []
    for number in range(count):
        name = f"a{number:04d}"
        shutil.copytree(sources[number % len(sources)], folder / name)
        file = folder / name / "adapter_model.safetensors"
        tensors = load_file(file)
        save_file({key: value * (1 + number / 256) for key, value in tensors.items()}, file)
        modules.append(f"{name}={folder / name}")
    return modules


@contextlib.contextmanager
def served(options: Sequence[str], replicas: int, places: int, policy: str, **variables: str) -> Iterator[str]:
    """The URL of `loraplex serve --ray` while the block runs."""
    limits = ["--max-loras", str(places), "--max-cpu-loras", str(places), "--max-num-seqs", str(min(places, 8))]
    basics = ["--served-model-name", "demo", "--port", "0", "--no-access-log", "--log-level", "warning"]
    small = ["--num-threads", "1", "--no-standby-engine", "--disk-memory-bytes", "0"]
    ray = ["--ray", "--ray-num-cpus", "0.01", "--ray-min-replicas", str(replicas), "--ray-policy", policy]
    command = [sys.executable, "-m", "loraplex", "serve", str(assets_path() / "base")]
    process = subprocess.Popen(
        [*command, *basics, *small, *limits, *ray, *options],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )
    assert process.stdout is not None
    try:
        yield next(word for line in process.stdout for word in line.split() if word.startswith("http://"))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)
        process.stdout.close()


async def ask_all(client: httpx.AsyncClient, adapters: Sequence[str], at_once: int) -> Counter[str]:
    """One short request for each, so many at a time, in this order; the answers of each replica."""
    waiting, answered = iter(adapters), Counter[str]()

    async def ask_some() -> None:
        for adapter in waiting:
            body = {"model": adapter, "prompt": "banana bread=", "max_tokens": 4, "temperature": 0}
            answer = await client.post("/v1/completions", json=body)
            answer.raise_for_status()
            answered[answer.headers[REPLICA_HEADER]] += 1

    await asyncio.gather(*(ask_some() for _ in range(at_once)))
    return answered


async def counts(client: httpx.AsyncClient, names: Sequence[str]) -> Counter[str]:
    total: Counter[str] = Counter()
    for name in names:
        page = (await client.get("/metrics", headers={REPLICA_HEADER: name})).text
        total.update({key: int(float(value)) for key, value in _COUNTS.findall(page)})
    return total


async def measure(url: str, replicas: int, places: int, args: argparse.Namespace) -> Result:
    """After as many requests again as are counted, in which memory fills."""
    draw = np.random.default_rng(args.seed)
    weights = np.arange(1, args.adapters + 1) ** -ZIPF_ALPHA
    trace = [f"a{each:04d}" for each in draw.choice(args.adapters, 2 * args.requests, p=weights / weights.sum())]
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        names = sorted(await ask_all(client, trace[: args.requests], args.at_once))
        before = await counts(client, names)
        answered = await ask_all(client, trace[args.requests :], args.at_once)
        after = await counts(client, sorted({*names, *answered}))
    new = after - before
    return Result(replicas, places, new["hits"], new["misses"], tuple(answered[name] for name in sorted(answered)))


async def measure_loads(url: str, modules: Sequence[str], replicas: int) -> list[tuple[float, float]]:
    """Of each load, at the replicas in turn: the seconds to its answer, and until all replicas have used it."""
    found: set[str] = set()
    times = []
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        while len(found) < replicas:
            found |= set(await ask_all(client, ["demo"] * 8 * replicas, 4 * replicas))
        names = sorted(found)
        for number, module in enumerate(modules):
            name, path = module.split("=", 1)
            at = {REPLICA_HEADER: names[number % replicas]}
            began_s = time.perf_counter()
            (await client.post("/v1/adapters", json={"name": name, "path": path}, headers=at)).raise_for_status()
            answered_s = time.perf_counter()
            bodies = {"model": name, "prompt": "banana bread=", "max_tokens": 1}
            calls = (client.post("/v1/completions", json=bodies, headers={REPLICA_HEADER: each}) for each in names)
            answers = await asyncio.gather(*calls)
            times.append((answered_s - began_s, time.perf_counter() - began_s))
            assert [(each.status_code, each.headers[REPLICA_HEADER]) for each in answers] == [(200, n) for n in names]
    return times


def table_of(results: Sequence[Result], title: str) -> Table:
    table = Table("replicas", "adapters each", "requests by replica", "hits", "misses", "hit rate", title=title)
    for each in results:
        cells = (each.replicas, each.places, each.by_replica, each.hits, each.misses, f"{each.hit_rate:.3f}")
        table.add_row(*map(str, cells))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=positive, default=200)
    parser.add_argument("--places", type=positive, default=20, help="adapters that a replica has room for")
    parser.add_argument("--replicas", type=positive, default=3)
    parser.add_argument("--requests", type=positive, default=2000)
    parser.add_argument("--at-once", type=positive, default=6)
    parser.add_argument("--policy", default="latency")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--loads", type=positive, help="measure so many loads instead; with --database-url")
    parser.add_argument("--database-url", help="a PostgreSQL registry without a name in it")
    args = parser.parse_args()
    if (args.loads is None) != (args.database_url is None):
        parser.error("--loads and --database-url go together")
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(not (_are_hits_many(folder, args) if args.loads is None else _are_loads_fast(folder, args)))


def _are_hits_many(folder: str, args: argparse.Namespace) -> bool:
    options = ["--disable-dynamic-loading", "--lora-modules", *write_adapters(Path(folder), args.adapters)]
    results = []
    for replicas, places in ((args.replicas, args.places), (1, args.replicas * args.places)):
        with served(options, replicas, places, args.policy) as url:
            results.append(asyncio.run(measure(url, replicas, places, args)))
    title = (
        f"{args.adapters} adapters, Zipf {ZIPF_ALPHA}, {args.requests} requests, {args.at_once} at once, {args.policy}"
    )
    wide_console().print(table_of(results, title))
    share = results[0].hit_rate / results[1].hit_rate
    print(f"the replicas' share of hits is {share:.3f} of the one's; target {MIN_SHARE}")
    return share >= MIN_SHARE


def _are_loads_fast(folder: str, args: argparse.Namespace) -> bool:
    modules = write_adapters(Path(folder), args.loads)
    options = ["--adapter-root", folder]
    with served(options, args.replicas, args.places, args.policy, LORAPLEX_DATABASE_URL=args.database_url) as url:
        times = asyncio.run(measure_loads(url, modules, args.replicas))
    for what, seconds in zip(("is answered", "answers at all replicas"), zip(*times, strict=True), strict=True):
        print(f"a load {what} after {statistics.median(seconds):.3f} s (median), at most {max(seconds):.3f}")
    return max(all_s for _, all_s in times) <= MAX_KNOWN_S


if __name__ == "__main__":
    main()
