"""A server with the demo's model and adapters on a free port, for the examples that are clients."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

START_TIMEOUT_S = 120.0


@contextmanager
def demo_server(url: str | None) -> Iterator[str]:
    """The address of `url`'s server, or of one that runs within the block."""
    if url is not None:
        yield url
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "loraplex", "demo", "--serve", "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _wait_until_healthy(process, url, log)
            yield url
        finally:
            process.terminate()
            process.wait()


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            log.seek(0)
            raise RuntimeError(f"the server exited with code {process.returncode}:\n{log.read().decode()}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.1)
    raise TimeoutError(f"no answer from {url} within {START_TIMEOUT_S:.0f} s")


def call(method: str, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """One request to a route of Loraplex's own, JSON both ways."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer
