"""A local Ray of its own, as small as it can be, and programs that use it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil

from loraplex.demo.tasks import adapter_path, assets_path

BASE = str(assets_path() / "base")
START_S = 240.0

_CLUSTER = """
import ray, sys
ray.init("local", num_cpus=1, object_store_memory=80 * 2**20, include_dashboard=False, log_to_driver=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""

_APPLICATION = """
import itertools, json, ray, sys
from ray import serve
from loraplex.serve import build_app
address, port, config = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
ray.init(address, log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": port})
for _ in itertools.chain(["first"], sys.stdin):
    serve.run(build_app(config), name="proxied")
    print("ready", flush=True)
"""
"""Each line on its standard input deploys it again: all of its replicas are replaced by new ones."""


class Program:
    """In a session of its own, with lines on its standard output."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # `end` closes it
        own = {
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "0" * 64,
        }
        environment = {**os.environ, **own, **variables}
        self.process = subprocess.Popen(
            [sys.executable, "-P", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
            env=environment,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise AssertionError(f"it has ended: {self._errors.read()[-4000:].decode(errors='replace')}")
        return line.rstrip("\n")

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("again\n")
        self.process.stdin.flush()

    def end(self, first: signal.Signals = signal.SIGTERM) -> int:
        """The exit code; killed where it takes too long."""
        if self.process.poll() is None:
            self.process.send_signal(first)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            return -1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
            self._errors.close()


class Cluster:
    def __init__(self) -> None:
        self.program = Program("-c", _CLUSTER)
        self.address = self.program.line()

    def replica_processes(self, application: str) -> list[psutil.Process]:
        """Those that are there, the first that was started first."""
        found = []
        for process in psutil.Process(self.program.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                title = " ".join(process.cmdline())
                if title.startswith(f"ray::ServeReplica:{application}:engines"):
                    found.append(process)
        return sorted(found, key=lambda process: process.pid)

    def end(self) -> None:
        """With all that runs in it."""
        processes = psutil.Process(self.program.process.pid).children(recursive=True)
        assert self.program.process.stdin is not None
        self.program.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.program.process.wait(30)
        self.program.end(signal.SIGKILL)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, 30)


@contextlib.contextmanager
def served(cluster: Cluster, *arguments: str, **variables: str) -> Iterator[str]:
    """`loraplex serve --ray` of the demo's model while the block runs; its URL. It ends with code 0."""
    options = ("--served-model-name", "demo", "--no-standby-engine", "--num-threads", "1", "--port", "0")
    on_ray = ("--ray", "--ray-address", cluster.address, "--ray-num-cpus", "0.01")
    program = Program("-m", "loraplex", "serve", BASE, *options, *on_ray, *arguments, **variables)
    try:
        yield next(word for word in program.line().split() if word.startswith("http://"))
    finally:
        code = program.end()
    assert code == 0


@contextlib.contextmanager
def proxied(cluster: Cluster, port: int, config: dict[str, Any]) -> Iterator[Program]:
    """`build_app` behind Serve's proxies."""
    program = Program("-c", _APPLICATION, cluster.address, str(port), json.dumps(config))
    try:
        assert program.line() == "ready"
        yield program
    finally:
        program.end(signal.SIGKILL)


def modules(names: Sequence[str]) -> list[str]:
    return [f"{name}={adapter_path(name)}" for name in names]


def until(is_so: Callable[[], bool], within_s: float = START_S) -> None:
    began_s = time.monotonic()
    while not is_so():
        assert time.monotonic() - began_s < within_s, "it did not come to be in time"
        time.sleep(0.02)
