"""schemathesis over a server's whole /openapi.json: `scripts/schemathesis` makes its environment and runs this.

    python -m tests.security.fuzz_http --program .venv-schemathesis/bin/schemathesis --keys admin --seconds 120

The server is `loraplex serve` with the demo's model and adapters, as a process, with directories for its state and for
what it makes. `--keys` says which key the requests have: of an admin or a tenant of a server with tenants, or none of a
server without. Printed are schemathesis's findings, how long /health took meanwhile, and how much memory grew after a
third of the time. Exit code 1 for a finding, an answer 500, or growth beyond --max-growth-mib.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil

from loraplex.demo.tasks import TASKS, adapter_path, assets_path

CONFIG = Path(__file__).with_name("schemathesis.toml")
ADMIN_KEY = "admin-key-of-a-fuzzed-server"
KEYS = ("none", "admin", "tenant")
STALL_S = 0.1


@dataclass(frozen=True)
class Target:
    url: str
    key: str | None
    process: psutil.Process
    log: Path

    def resident_mib(self) -> float:
        """Of the server and its engine."""
        found = 0
        for each in (self.process, *self.process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += each.memory_info().rss
        return found / 2**20


@contextlib.contextmanager
def serving(keys: str, port: int, folder: Path) -> Iterator[Target]:
    adapters = [f"{task.name}={adapter_path(task.name)}" for task in TASKS]
    command = [sys.executable, "-m", "loraplex", "serve", str(assets_path() / "base"), "--served-model-name", "demo"]
    command += ["--port", str(port), "--num-threads", "1", "--no-standby-engine", "--max-request-s", "20"]
    command += ["--adapter-output-dir", str(folder / "made")]
    command += ["--adapter-root", str(assets_path()), "--lora-modules", *adapters]
    if keys != "none":  # without a key of its own it would be shut by the first tenant that a request makes
        command += ["--state-dir", str(folder / "state"), "--admin-api-key", ADMIN_KEY]
    log = folder / "log"
    with log.open("wb") as errors:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=env, text=True)
    assert server.stdout is not None
    try:
        line = next((line for line in server.stdout if line.startswith("Loraplex is ready")), None)
        assert line is not None, log.read_text()
        url = next(word for word in line.split() if word.startswith("http://"))
        yield Target(url, _key(url, keys), psutil.Process(server.pid), log)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
        server.stdout.close()


def _key(url: str, keys: str) -> str | None:
    """Of what the requests are; a server with keys has two tenants, and a public adapter."""
    if keys == "none":
        return None
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {ADMIN_KEY}"}, trust_env=False) as admin:
        for tenant in ("acme", "beta"):
            roots = [str(assets_path() / "adapters")]
            admin.post("/v1/tenants", json={"name": tenant, "adapter_roots": roots}).raise_for_status()
        admin.put("/v1/shares", json={"adapter": "upper", "public": True}).raise_for_status()
        secret: str = admin.post("/v1/keys", json={"tenant": "acme"}).raise_for_status().json()["key"]
    return ADMIN_KEY if keys == "admin" else secret


class Watch:
    """Asks /health all the time and looks at the memory every second, while the block runs."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=each) for each in (self._ask, self._look, self._sleep)]
        self.seconds: list[float] = []
        self.num_failed = 0
        self.resident: list[float] = []
        self.latest_s = 0.0

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        host = urlsplit(self._target.url)
        assert host.hostname is not None
        connection = http.client.HTTPConnection(host.hostname, host.port, timeout=60)
        while not self._is_over.wait(0.01):
            begun = time.perf_counter()
            try:
                connection.request("GET", "/health")
                response = connection.getresponse()
                response.read()
                self.num_failed += response.status != 200
            except (OSError, http.client.HTTPException):
                self.num_failed += 1
                connection.close()
            self.seconds.append(time.perf_counter() - begun)
        connection.close()

    def _sleep(self) -> None:
        """How late a thread wakes that does nothing: what the machine itself adds to an answer."""
        while not self._is_over.is_set():
            begun = time.perf_counter()
            time.sleep(0.01)
            self.latest_s = max(self.latest_s, time.perf_counter() - begun - 0.01)

    def _look(self) -> None:
        while not self._is_over.wait(1):
            self.resident.append(self._target.resident_mib())


def fuzz(options: argparse.Namespace, folder: Path) -> int:
    with serving(options.keys, options.port, folder) as target:
        command = [options.program, "--config-file", str(CONFIG), "run", f"{target.url}/openapi.json"]
        command += ["--seed", str(options.seed), "--max-time", str(options.seconds), *options.words]
        command += [
            "--header",
            f"Authorization: Bearer {target.key}" if target.key else "X-Requested-With: schemathesis",
        ]
        with Watch(target) as watch:
            run = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(CONFIG.parent)}, check=False)
        log = target.log.read_text(errors="replace")
    errors = [line for line in log.splitlines() if line.endswith('" 500') or "Traceback" in line]
    begin = watch.resident[len(watch.resident) // 3 :]
    growth = max(begin) - begin[0]
    watch.seconds.sort()
    slow = sum(each > STALL_S for each in watch.seconds)
    print(
        f"keys {options.keys}: schemathesis ended with {run.returncode}; {len(errors)} answers 500; "
        f"{len(watch.seconds)} answers of /health, {watch.num_failed} failed, "
        f"longest {watch.seconds[-1] * 1000:.0f} ms, {slow} beyond {STALL_S * 1000:.0f} ms "
        f"(an idle thread woke {watch.latest_s * 1000:.0f} ms late); "
        f"memory {begin[0]:.0f} MiB after a third, {growth:.0f} MiB more at most"
    )
    print(*errors[:20], sep="\n")
    return int(run.returncode != 0 or bool(errors) or growth > options.max_growth_mib)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=".venv-schemathesis/bin/schemathesis")
    parser.add_argument("--keys", choices=KEYS, default="admin")
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--max-growth-mib", type=float, default=128.0)
    parser.add_argument("words", nargs="*", help="what else schemathesis is told")
    options = parser.parse_args()
    options.program = str(Path(options.program).absolute())
    with tempfile.TemporaryDirectory() as folder:
        return fuzz(options, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
