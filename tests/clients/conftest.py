"""A server of the demo's base model and adapters in a process of its own, and where the clients' environments are."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "loraplex" / "demo" / "assets"
ADAPTERS = ("reverse", "upper")
KEY = "clients-key-0123456789"
TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Served:
    url: str
    key: str


@pytest.fixture(scope="module", params=[KEY, ""], ids=["key", "no key"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    modules = [f"{name}={ASSETS / 'adapters' / name}" for name in ADAPTERS]
    words = ["serve", str(ASSETS / "base"), "--served-model-name", "demo", "--port", str(port)]
    keys = ["--api-key", request.param] if request.param else []
    command = [sys.executable, "-m", "loraplex", *words, *keys, "--lora-modules", *modules]
    url, place = f"http://127.0.0.1:{port}", tmp_path_factory.mktemp("server") / "log"
    with place.open("wb") as log:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
        try:
            while not _is_up(url, server):
                time.sleep(0.1)
            yield Served(url, request.param or "none")
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0, place.read_text()


def _is_up(url: str, server: subprocess.Popen[bytes]) -> bool:
    assert server.poll() is None
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def run(served: Served) -> Callable[..., str]:
    """Runs a client in its environment; what it printed."""

    def call(environment: str, *words: str) -> str:
        python = ROOT / f".venv-client-{environment}" / "bin" / "python"
        if not python.exists():
            pytest.skip(f"there is no {python.parents[1].name}: make it with scripts/clients {environment}")
        env = {**os.environ, "OPENAI_API_KEY": served.key, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([str(python), *words], capture_output=True, text=True, timeout=TIMEOUT_S, env=env)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    return call
