"""A directory of many adapters as a source: the start, a page of its names, and the first request for one of them.

    python -m benchmarks.adapter_sources                       10,000 directories, adapters of rank 16 for `s`
    python -m benchmarks.adapter_sources --size tiny --adapters 1000 --requests 5
start      seconds until the server is ready, with the source and without it. Target: 3 s more at most.
page       milliseconds of GET /v1/adapters?source=dir&limit=100 from random places. Target: 50 ms.
by need    milliseconds to the first token of a request for a name of the source that nothing has asked for.
cold       the same of a name that was registered before the server's start, whose weights are in no memory.
           In turns with the other, each name once. Target: by need takes at most 1.1 times as long.
loaded     the same of a name that is loaded by POST /v1/adapters first, which is counted: what a client without sources
           does.
All contents differ where a first token is measured; the other directories are links to one adapter's files. The
system's cache has the files, nothing is packed on disk (LORAPLEX_CACHE=none).
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from benchmarks.arguments import positive
from benchmarks.fixture import SIZES, fixture

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


class Client:
    """A connection for each request."""

    def __init__(self, port: int) -> None:
        self._port = port

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        try:
            headers = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"{method} {path}: {response.status} {answer[:500].decode(errors='replace')}")
        return answer

    def first_token(self, model: str) -> None:
        body = {"model": model, "prompt": list(range(100, 132)), "max_tokens": 1, "temperature": 0}
        self.ask("POST", "/v1/completions", body)


@contextmanager
def server(base: Path, *flags: str) -> Iterator[tuple[Client, float]]:
    """And the seconds until it was ready."""
    command = [sys.executable, "-m", "loraplex", "serve", str(base), "--served-model-name", "base", "--port", "0"]
    began_s = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--no-access-log", *flags],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "LORAPLEX_CACHE": "none"},
    )
    try:
        assert process.stdout is not None
        ready = re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())
        if ready is None:
            raise RuntimeError("the server did not start")
        yield Client(int(ready[1])), time.perf_counter() - began_s
    finally:
        process.terminate()
        process.wait()


def ms_of(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began_s)


def directory_of(root: Path, adapter: Path, num_adapters: int, measured: list[str]) -> None:
    """`measured` have contents of their own."""
    weights = load_file(adapter / WEIGHTS)
    for number, name in enumerate(measured):
        (root / name).mkdir(parents=True)
        save_file({key: tensor * (1 + (number + 1) / 256) for key, tensor in weights.items()}, root / name / WEIGHTS)
        os.link(root / measured[0] / CONFIG, root / name / CONFIG) if number else (root / name / CONFIG).write_bytes(
            (adapter / CONFIG).read_bytes()
        )
    for number in range(num_adapters - len(measured)):
        (root / f"a{number:06}").mkdir()
        for file in (WEIGHTS, CONFIG):
            os.link(root / measured[0] / file, root / f"a{number:06}" / file)


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    made = fixture(args.size, 1, ranks=[args.rank], adapter_dtype="bfloat16")
    kinds = ("cold", "by need", "loaded")
    names = {kind: [f"{kind.replace(' ', '-')}-{number}" for number in range(args.requests)] for kind in kinds}
    root = folder / "adapters"
    directory_of(root, made.adapters[0], args.adapters, ["warm", *(name for kind in kinds for name in names[kind])])
    source, state = ("--adapter-source", f"dir={root}"), ("--state-dir", str(folder / "state"))
    times: dict[str, list[float]] = {kind: [] for kind in (*kinds, "page")}
    with server(made.base, *state) as (client, start_s):
        for name in names["cold"]:
            client.ask("POST", "/v1/adapters", {"name": name, "path": str(root / name)})
    with server(made.base, *state, *source) as (client, start_with_source_s):
        client.first_token("warm")
        for each in zip(*names.values(), strict=True):
            for kind, name in random.sample(list(zip(kinds, each, strict=True)), len(kinds)):

                def request(kind: str = kind, name: str = name) -> None:
                    if kind == "loaded":
                        client.ask("POST", "/v1/adapters", {"name": name, "path": str(root / name)})
                    client.first_token(name)

                times[kind].append(ms_of(request))
        for _ in range(args.requests):
            after = f"a{random.randrange(args.adapters):06}"
            page = f"/v1/adapters?source=dir&limit=100&after={after}"
            times["page"].append(ms_of(lambda page=page: client.ask("GET", page)))  # type: ignore[misc]
    middle = {kind: statistics.median(each) for kind, each in times.items()}
    return {
        "adapters": args.adapters,
        "bytes of one": (made.adapters[0] / WEIGHTS).stat().st_size,
        "start_s": start_s,
        "start with source_s": start_with_source_s,
        "median_ms": middle,
        "largest_ms": {kind: max(each) for kind, each in times.items()},
        "by need / cold": middle["by need"] / middle["cold"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="s")
    parser.add_argument("--rank", type=positive, default=16)
    parser.add_argument("--adapters", type=positive, default=10_000)
    parser.add_argument("--requests", type=positive, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(args, Path(folder)), indent=2))


if __name__ == "__main__":
    main()
