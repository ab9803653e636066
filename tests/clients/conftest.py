"""A server of the demo's base model and adapters in a process of its own, and where the clients' environments are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.frontend.processes import stretched_base

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).with_name("scripts")
ASSETS = ROOT / "loraplex" / "demo" / "assets"
ADAPTERS = ("reverse", "upper")
HIDDEN = "rot13"
"""Loaded, and granted to no tenant."""
ADMIN_KEY = "clients-admin-key-0123456789"
TIMEOUT_S = 600.0
"""Of one client: some import torch or transformers in several processes, and the machine may have other work."""
QUOTAS = {"acme": {}, "blocked": {"requests_per_s": 0.0001}, "slow": {"requests_per_s": 0.25}}


@dataclass(frozen=True)
class Served:
    """`key`: may use ADAPTERS; `blocked_key`, `slow_key`: of tenants with few requests, "" on a server without keys."""

    url: str
    key: str
    blocked_key: str = ""
    slow_key: str = ""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo's base with room for tokens of any form."""
    return stretched_base(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="session", params=["tenants", "no keys"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("server")
    modules = [f"{name}={ASSETS / 'adapters' / name}" for name in (*ADAPTERS, HIDDEN)]
    command = [sys.executable, "-m", "loraplex", "serve", model, "--served-model-name", "demo", "--port", "0"]
    command += ["--num-threads", "1", "--tool-call-parser", "hermes", "--lora-modules", *modules]
    if request.param == "tenants":
        command += ["--state-dir", str(folder / "state"), "--admin-api-key", ADMIN_KEY]
    place = folder / "log"
    with place.open("wb") as log:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=env, text=True)
        assert server.stdout is not None
        try:
            line = next((line for line in server.stdout if line.startswith("Loraplex is ready")), None)
            assert line is not None, place.read_text()
            url = next(word for word in line.split() if word.startswith("http://"))
            yield _with_tenants(url) if request.param == "tenants" else Served(url, "none")
        finally:
            server.send_signal(signal.SIGINT)
            ended = server.wait(60)
            server.stdout.close()
        assert ended == 0, place.read_text()
        assert " 500\n" not in place.read_text()


def _with_tenants(url: str) -> Served:
    """Tenants that may use ADAPTERS; one of them has spent its only request."""
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {ADMIN_KEY}"}, trust_env=False) as admin:
        keys = {}
        for tenant, quota in QUOTAS.items():
            admin.post("/v1/tenants", json={"name": tenant, "quota": quota}).raise_for_status()
            keys[tenant] = admin.post("/v1/keys", json={"tenant": tenant}).raise_for_status().json()["key"]
        for name in ADAPTERS:
            admin.put("/v1/shares", json={"adapter": name, "public": True}).raise_for_status()
        body = {"model": "demo", "prompt": "a=", "max_tokens": 1}
        headers = {"Authorization": f"Bearer {keys['blocked']}"}
        admin.post("/v1/completions", json=body, headers=headers).raise_for_status()
    return Served(url, keys["acme"], keys["blocked"], keys["slow"])


@pytest.fixture
def run(served: Served) -> Callable[..., str]:
    """Runs a program of a client's environment; what it printed."""

    def call(environment: str, program: str, *words: str, folder: Path | None = None) -> str:
        place = ROOT / f".venv-client-{environment}"
        if not place.exists():
            pytest.skip(f"there is no {place.name}: make it with scripts/clients {environment}")
        client = {"CLIENT_URL": served.url, "CLIENT_KEY": served.key, "OPENAI_API_KEY": served.key}
        client |= {"CLIENT_BLOCKED_KEY": served.blocked_key, "CLIENT_SLOW_KEY": served.slow_key}
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        if environment == "aiperf":  # offline it takes a directory for a name on the hub
            offline = {"HF_HUB_OFFLINE": "", "AIPERF_SERVICE_REGISTRATION_TIMEOUT": "240"}
        paths = {"NODE_PATH": str(place / "node_modules"), "PATH": f"{place / 'bin'}:{os.environ['PATH']}"}
        env = {**os.environ, **client, **offline, **paths, "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1"}
        done = subprocess.run(
            [program, *words], capture_output=True, text=True, timeout=TIMEOUT_S, env=env, cwd=folder, check=False
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
        return done.stdout

    return call
