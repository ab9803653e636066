"""`loraplex serve --state-dir`: a server that is killed and started again is the same server."""

from __future__ import annotations

import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from loraplex.demo.tasks import TASKS, adapter_path
from tests.test_openai_end_to_end import PATIENCE_S, REPOSITORY, SMALL, Server

REMEMBERED = ("name", "version", "digest", "path", "rank", "lora_int_id", "is_pinned", "alias_of", "aliases", "loads")


class Client:
    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def send(self, method: str, where: str, **body: Any) -> Any:
        response = self.http.request(method, f"/v1/adapters{where}", json=body or None)
        assert response.is_success, response.text
        return response.json()

    def ask(self, model: str) -> Any:
        """The answer, or the code of the error."""
        body = {"model": model, "prompt": "banana=", "temperature": 0}
        answer = self.http.post("/v1/completions", json=body).json()
        return answer["choices"][0]["text"] if "choices" in answer else answer["error"]["code"]

    def cards(self) -> dict[str, Any]:
        return {card["name"]: card for card in self.send("GET", "")["data"]}

    def remembered(self) -> list[dict[str, Any]]:
        cards = self.cards().values()
        versions = [[(each["version"], each["digest"], each["state"]) for each in card["versions"]] for card in cards]
        return [
            {**{key: card[key] for key in REMEMBERED}, "versions": each}
            for card, each in zip(cards, versions, strict=True)
        ]


def test_a_killed_server_comes_back_as_it_was(tmp_path: Path) -> None:
    flags = ("--state-dir", str(tmp_path / "state"), "--lora-modules", f"upper={adapter_path('upper')}")
    vanishing = shutil.copytree(adapter_path(TASKS[-1].name), tmp_path / "vanishing")  # content that no other has
    models = ("upper", "mine", "mine@1", "mine@2", "old", "old@1", "demo")
    with Server(tmp_path, *flags) as server, httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        client = Client(http)
        client.send("POST", "", name="mine", path=str(adapter_path("sort")), lora_int_id=42)
        client.send("PUT", "/mine", path=str(adapter_path("reverse")), is_pinned=True)
        client.send("POST", "", name="old", path=str(adapter_path("sort")))
        client.send("POST", "/switch", old="old", new="upper")
        client.send("POST", "", name="vanishing", path=str(vanishing))
        client.send("POST", "", name="gone", path=str(adapter_path("sort")))
        client.send("DELETE", "/gone")
        before, answers = client.remembered(), [client.ask(model) for model in models]
        assert answers[:6] == ["BANANA", "ananab", "aaabnn", "ananab", "BANANA", "aaabnn"]
        refused = subprocess.run(
            (sys.executable, "-m", "loraplex", "serve", server.base, *SMALL, "--port", "0", *flags),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            cwd=REPOSITORY,
            check=False,
        )
        assert refused.returncode == 1
        assert "is in use by another server" in refused.stderr
        server.process.send_signal(signal.SIGKILL)
        server.end()
    shutil.rmtree(vanishing)
    with Server(tmp_path, *flags) as server, httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        client = Client(http)
        assert client.remembered() == before
        cards = client.cards()
        assert {name for name, card in cards.items() if card["tier"] != "source"} <= {"mine"}
        assert [client.ask(model) for model in models] == answers
        assert client.ask("vanishing") == "adapter_unavailable"
        assert client.ask("upper") == "BANANA"
        until_on_device(client, "mine")
        assert client.send("POST", "/mine/rollback")["version"] == 1
        assert client.send("PUT", "/new", path=str(adapter_path("sort")))["version"] == 1
        assert [client.ask("mine"), client.ask("new")] == ["aaabnn", "aaabnn"]
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
    check_ids(tmp_path / "state")


def until_on_device(client: Client, name: str) -> None:
    """Pinned adapters are promoted in the background."""
    deadline_s = time.monotonic() + PATIENCE_S
    while client.cards()[name]["tier"] != "device":
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def check_ids(state_dir: Path) -> None:
    """`new` has an id of its own, beyond that of every adapter that there ever was."""
    with sqlite3.connect(state_dir / "journal.sqlite") as database:
        ids = dict(database.execute("SELECT name || '@' || number, adapter_id FROM versions").fetchall())
        requests = dict(database.execute("SELECT name, num_requests FROM names").fetchall())
    database.close()
    assert ids == {"upper@1": 1, "mine@1": 2, "mine@2": 3, "old@1": 4, "vanishing@1": 5, "new@1": 7}
    assert requests["upper"] >= 2  # of the second life: it ended in order
