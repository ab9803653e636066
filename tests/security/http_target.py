"""A server to attack, in a process of its own, over a fake engine: `python -m tests.security.http_target [--port N]`.

Tests use `HttpTarget`, which starts it on a free port. `HealthProbe` measures meanwhile how long others wait.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from loraplex.server import ServerConfig, bind
from loraplex.server.run import serve
from loraplex.testing import FakeAsyncEngine
from loraplex.testing.fake_engine import FakeModelInfo

ROOT = Path(__file__).resolve().parents[2]
MAX_MODEL_LEN = 8192
JSON_HEADERS = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes
    seconds: float

    def json(self) -> Any:
        return json.loads(self.body)


class HttpTarget:
    """The server; `stderr` is what it logged once it has ended."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self.stderr = ""

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "tests.security.http_target", "--port", "0", *self._arguments]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert "http://" in line, self._process.communicate()[1]
        self.url = next(word for word in line.split() if word.startswith("http://"))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.terminate()
        self.stderr = self._process.communicate(timeout=30)[1]

    def connection(self, timeout_s: float = 60) -> http.client.HTTPConnection:
        address = urlsplit(self.url)
        assert address.hostname is not None
        return http.client.HTTPConnection(address.hostname, address.port, timeout=timeout_s)

    def send(
        self, path: str, body: bytes | None = None, method: str = "POST", headers: dict[str, str] | None = None
    ) -> Reply:
        begun = time.perf_counter()
        with contextlib.closing(self.connection()) as connection:
            connection.request(method, path, body, JSON_HEADERS if headers is None else headers)
            response = connection.getresponse()
            return Reply(response.status, response.read(), time.perf_counter() - begun)

    @property
    def peak_bytes(self) -> int:
        """The most memory that the process ever had."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


class HealthProbe:
    """Asks /health all the time, over one connection, while the block runs. `longest_s`: of the slowest answer."""

    def __init__(self, target: HttpTarget, pause_s: float = 0.005) -> None:
        self._target = target
        self._pause_s = pause_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.longest_s = 0.0
        self.num_answers = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._is_over.set()
        self._thread.join()

    def _ask(self) -> None:
        with contextlib.closing(self._target.connection()) as connection:
            while not self._is_over.wait(self._pause_s):
                begun = time.perf_counter()
                connection.request("GET", "/health")
                response = connection.getresponse()
                response.read()
                assert response.status == 200
                self.longest_s = max(self.longest_s, time.perf_counter() - begun)
                self.num_answers += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8511)
    parser.add_argument("--strict-fields", action="store_true")
    arguments = parser.parse_args()
    config = ServerConfig(
        port=arguments.port,
        strict_fields=arguments.strict_fields,
        access_log=False,
        log_level="warning",
        shutdown_grace_s=1.0,
    )
    adapters = {name: f"/adapters/{name}" for name in ("sql", "chat")}
    engine = FakeAsyncEngine(adapters, model_info=FakeModelInfo(max_model_len=MAX_MODEL_LEN))
    with contextlib.closing(bind(config)) as sock:
        asyncio.run(serve(engine, config, sock))


if __name__ == "__main__":
    main()
