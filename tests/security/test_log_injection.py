"""Text of clients in the log of a real server at its most talkative: no line is forged, no terminal is steered, no
secret is kept."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from loraplex.demo.tasks import adapter_path, assets_path

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
FORGED = "x\n2026-01-01T00:00:00.000Z INFO loraplex.server: FORGED \x1b[2J\x1b]0;title\x07\r\x9b31m\u2028\u202e"
KEY = "sk-not-in-the-log"


class Server:
    """`loraplex serve` of the demo's model; `log` is all that it wrote, once it has ended."""

    def __init__(self, process: subprocess.Popen[bytes], client: httpx.Client) -> None:
        self.process = process
        self.client = client

    def end(self) -> str:
        self.process.terminate()
        _, log = self.process.communicate(timeout=60)
        return log.decode()


@contextlib.contextmanager
def serve(*options: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "loraplex", "serve", str(assets_path() / "base"), "--served-model-name", "demo"]
    command += ["--port", "0", "--log-level", "debug", "--num-threads", "1", "--no-standby-engine", *options]
    environment = {**os.environ, "LORAPLEX_API_KEY": KEY}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        assert "(0 adapters)" in line
        headers = {"Authorization": f"Bearer {KEY}"}
        try:
            url = re.search(r"http://[\d.:]+", line)
            assert url is not None
            with httpx.Client(base_url=url[0], headers=headers, timeout=60) as client:
                yield Server(process, client)
        finally:
            process.kill()


def be_hostile(client: httpx.Client, tmp_path: Path) -> None:
    load = {"lora_name": "upper", "lora_path": str(adapter_path("upper"))}
    assert client.post("/v1/load_lora_adapter", json=load).status_code == 200
    assert client.post("/v1/load_lora_adapter", json={**load, "lora_name": FORGED}).status_code in (200, 400)
    bad = tmp_path / "bad\nadapter\x1b[31m"
    bad.mkdir()
    (bad / "adapter_config.json").write_text('{"peft_type": "a\\nb\\u001b"}')
    for path in (FORGED, str(bad)):
        assert client.post("/v1/load_lora_adapter", json={"lora_name": "y", "lora_path": path}).status_code >= 400
    client.post("/v1/unload_lora_adapter", json={"lora_name": FORGED})
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "upper"}).status_code == 200
    ask = {"model": "demo", "prompt": "hi", "max_tokens": 1, "user": FORGED}
    client.post("/v1/completions", json={**ask, "request_id": FORGED})
    client.post("/v1/completions", json={**ask, "model": FORGED})
    client.get("/v1/models?api_key=secret-in-a-query")
    client.get("/" + "".join(f"%{byte:02x}" for byte in FORGED.encode()))
    headers = {
        "X-Request-Id": "a\x9b31m".encode("latin-1"),
        "X-Forwarded-For": "1.2.3.4\x9b\x85FORGED".encode("latin-1"),
    }
    client.get("/health", headers=headers)  # type: ignore[arg-type]
    address = client.base_url.host, client.base_url.port
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=20) as sock:  # type: ignore[arg-type]
        sock.sendall(b"GET /FORGED\x1b[2J\nFORGED HTTP/1.1\r\n\r\n")
        assert b"\r\nx-request-id: " in sock.recv(2**16)


def test_no_line_is_forged_and_no_secret_is_kept(tmp_path: Path) -> None:
    with serve() as server:
        be_hostile(server.client, tmp_path)
        log = server.end()
    loaded = r"adapter 'upper': loaded from '.*upper' in \d.\d+ s \(version 1, rank \d+\)"
    assert re.search(rf"^{TIME} INFO \S+: {loaded} \[[0-9a-f]{{32}}\]$", log, re.M)
    assert re.search(rf"^{TIME} INFO loraplex\.events: unload: adapter 'upper' was unloaded", log, re.M)
    assert re.search(rf"^{TIME} WARNING \S+: adapter 'y' could not be loaded from '.*': ", log, re.M)
    assert re.search(rf'^{TIME} INFO access: \S+ "GET /v1/models HTTP/1.1" ', log, re.M)
    for line in log.split("\n")[:-1]:
        assert re.match(rf"(    |{TIME} [A-Z]+ [a-z._]+: )", line), line
        assert not re.match(rf"{TIME} INFO loraplex.server: FORGED", line)
        assert line.isprintable(), line
    assert "FORGED" in log
    assert "secret-in-a-query" not in log
    assert KEY not in log


def test_every_line_is_an_object_that_names_its_request(tmp_path: Path) -> None:
    """Of the server and of its engine process, which is killed, too."""
    with serve("--log-format", "json") as server:
        client, mine = server.client, {"X-Request-Id": "mine"}
        be_hostile(client, tmp_path)
        load = {"lora_name": "upper", "lora_path": str(adapter_path("upper"))}
        assert client.post("/v1/load_lora_adapter", json=load, headers=mine).status_code == 200
        ask = {"model": "upper", "prompt": "hi", "max_tokens": 1}
        assert client.post("/v1/completions", json=ask, headers=mine).status_code == 200
        for pid in children_of(server.process.pid):
            os.kill(pid, signal.SIGKILL)
        while client.get("/health?probe=generate").status_code != 200:
            time.sleep(0.05)
        log = server.end()
    lines = [json.loads(line) for line in log.splitlines()]
    for line in lines:
        assert line.keys() >= {"time", "level", "logger", "message"}
        assert all(str(value).isprintable() for name, value in line.items() if name != "exception"), line
        assert line["message"].startswith("FORGED") is False
    assert "FORGED" in log
    assert "secret-in-a-query" not in log
    assert KEY not in log
    of_mine = [line for line in lines if line.get("request_id") == "mine"]
    assert {line["logger"] for line in of_mine} >= {"access", "loraplex.audit", "loraplex.frontend.adapter_verbs"}
    (answered,) = [line for line in of_mine if line.get("path") == "/v1/completions"]
    assert (answered["adapter"], answered["status"], answered["method"]) == ("upper", 200, "POST")
    assert any(line["logger"].startswith("loraplex.frontend") and line["level"] != "info" for line in lines)


def children_of(pid: int) -> list[int]:
    """Engine processes."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for each in found if b"frontend.process" in Path(f"/proc/{each}/cmdline").read_bytes()]
