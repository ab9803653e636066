"""python -m tests.soak.usage --seconds 600 --seed N: what clients drew is what they are billed for.

Tenants ask a real server: some read every answer to its end, some leave in the middle. The engine is killed again and
again, and so is the server, as `kill -9` of all its processes. Each client counts tokens itself. At the end the rows of
usage lie between two bounds, by key:

    tokens of whole answers + those seen of others  <=  billed  <=  tokens of whole answers + most of others
    the lower bound leaves out what came in the last `slack_s` before a kill of the server

A key whose answers were all whole, in a run that kills no server, has one bound: its bill is exact.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from loraplex.tenants.records import Role
from loraplex.tenants.store import TenantStore, open_store
from loraplex.tenants.usage import UsageQuery
from tests.server.test_shared_registry import Program

NUM_CLIENTS = 6
MAX_TOKENS = 96
COUNTED = ("requests", "prompt_tokens", "generated_tokens")


@dataclass(frozen=True)
class Plan:
    """kill_*_s: pauses between kills, None: none. slack_s: what a kill of the server may cost."""

    seconds: float = 600.0
    seed: int = 0
    kill_engine_s: float | None = 20.0
    kill_server_s: float | None = 45.0
    slack_s: float = 1.5


@dataclass
class Asked:
    """One request of a client. seen: how many tokens it had, and when. is_whole: it came to its end; is_refused: the
    answer was 4xx. One that was 5xx may have begun: its engine died."""

    num_prompt_tokens: int
    max_tokens: int
    seen: list[tuple[float, int]] = field(default_factory=list)
    is_whole: bool = False
    is_refused: bool = False

    def least(self, until_s: float) -> tuple[int, int, int]:
        """Requests, prompt tokens and tokens that it is billed for at least, of what it had by then."""
        num_tokens = max((count for at_s, count in self.seen if at_s <= until_s), default=0)
        return (1, self.num_prompt_tokens, num_tokens) if num_tokens else (0, 0, 0)

    def most(self) -> tuple[int, int, int]:
        if self.is_refused:
            return 1, 0, 0  # it may have been admitted, and refused by the engine
        return 1, self.num_prompt_tokens, self.seen[-1][1] if self.is_whole else self.max_tokens


@dataclass
class Client:
    """Asks one request after another with one key; leaves: it goes away in the middle of some."""

    key_id: str
    secret: str
    leaves: bool
    asked: list[Asked] = field(default_factory=list)

    def ask(self, url: str, chance: random.Random) -> None:
        prompt = [chance.randrange(1, 60) for _ in range(chance.randrange(1, 30))]
        asked = Asked(len(prompt), chance.randrange(1, MAX_TOKENS))
        leaves_at = chance.randrange(1, MAX_TOKENS) if self.leaves else MAX_TOKENS + 1
        body = {"model": "demo", "prompt": prompt, "max_tokens": asked.max_tokens, "ignore_eos": True, "stream": True}
        self.asked.append(asked)
        headers = {"authorization": f"Bearer {self.secret}"}
        num_tokens = 0
        with (
            suppress(httpx.HTTPError),
            httpx.Client(base_url=url, timeout=60, trust_env=False, headers=headers) as http,
            http.stream("POST", "/v1/completions", json={**body, "return_token_ids": True}) as stream,
        ):
            asked.is_refused = 400 <= stream.status_code < 500
            for line in stream.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event: dict[str, Any] = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return
                (choice,) = event["choices"]
                num_tokens += len(choice["token_ids"])
                asked.seen.append((time.monotonic(), num_tokens))
                if choice["finish_reason"] is not None:
                    asked.is_whole = True
                elif num_tokens >= leaves_at:
                    return


@dataclass
class Report:
    """rows: by key, the bounds and the bill of each of COUNTED."""

    rows: dict[str, list[tuple[int, int, int]]]
    num_kills: tuple[int, int]

    @property
    def findings(self) -> list[str]:
        return [
            f"key {key_id}: {billed} {name} are billed, and {least} to {most} were used"
            for key_id, bounds in self.rows.items()
            for name, (least, billed, most) in zip(COUNTED, bounds, strict=True)
            if not least <= billed <= most
        ]


class UsageSoak:
    """`run` once, in an empty folder."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self._chance = random.Random(plan.seed)
        self._clients: list[Client] = []
        self._num_engine_kills = self._num_server_kills = 0
        self._bounds: dict[str, list[list[int]]] = {}

    def run(self) -> Report:
        first = self._program("first")  # it makes the database
        try:
            first.wait_until_ready()
        finally:
            first.kill()
        with closing(open_store(self._folder / "state", None)) as store:
            for number in range(NUM_CLIENTS):
                name = f"tenant{number}"
                store.create_tenant(name)
                key, secret = store.create_key(Role.TENANT, name)
                self._clients.append(Client(key.key_id, secret, leaves=number % 2 == 1))
            self._bounds = {each.key_id: [[0, 0] for _ in COUNTED] for each in self._clients}
            left_s, life_s = self._plan.seconds, self._plan.kill_server_s or self._plan.seconds
            while left_s > 0:
                self._serve(min(life_s, left_s), is_last=left_s <= life_s)
                left_s -= life_s
            return self._report(store)

    def _serve(self, seconds: float, is_last: bool) -> None:
        """One life of the server: until it is killed, or drains where it is the last one."""
        program = self._program(f"server{self._num_server_kills}")
        try:
            program.wait_until_ready()
            plan, dies_s = self._plan, time.monotonic() + seconds
            is_over = threading.Event()
            threads = [
                threading.Thread(target=self._ask_on, args=(client, str(program.client.base_url), is_over, index))
                for index, client in enumerate(self._clients)
            ]
            for thread in threads:
                thread.start()
            while time.monotonic() < dies_s:
                pause_s = plan.kill_engine_s or plan.seconds
                time.sleep(max(0.0, min(pause_s, dies_s - time.monotonic())))
                if plan.kill_engine_s is not None and time.monotonic() < dies_s:
                    self._num_engine_kills += _kill_engine(program.process.pid)
            is_over.set()
            if not is_last:
                killed_s = time.monotonic()
                program.kill()
                self._num_server_kills += 1
            for thread in threads:
                thread.join()
            if is_last:
                program.process.send_signal(signal.SIGTERM)
                program.process.wait(60)
            self._settle(killed_s - plan.slack_s if not is_last else time.monotonic())
        finally:
            program.kill()

    def _program(self, name: str) -> Program:
        return Program(None, self._folder / f"{name}.log", "--state-dir", str(self._folder / "state"))

    def _ask_on(self, client: Client, url: str, is_over: threading.Event, index: int) -> None:
        chance = random.Random(f"{self._plan.seed} {index} {self._num_server_kills}")
        while not is_over.is_set():
            client.ask(url, chance)

    def _settle(self, until_s: float) -> None:
        """Of what was asked in one life."""
        for client in self._clients:
            for asked in client.asked:
                bounds = zip(self._bounds[client.key_id], asked.least(until_s), asked.most(), strict=True)
                for sums, least, most in bounds:
                    sums[0] += least
                    sums[1] += most
            client.asked.clear()

    def _report(self, store: TenantStore) -> Report:
        billed: dict[str, dict[str, int]] = {}
        for row in store.usage(UsageQuery(), 10_000):
            of_key = billed.setdefault(row["key_id"], dict.fromkeys(COUNTED, 0))
            for name in COUNTED:
                of_key[name] += row[name]
        rows = {
            key_id: [
                (least, billed.get(key_id, {}).get(name, 0), most)
                for name, (least, most) in zip(COUNTED, bounds, strict=True)
            ]
            for key_id, bounds in self._bounds.items()
        }
        return Report(rows, (self._num_engine_kills, self._num_server_kills))


def _kill_engine(pid: int) -> int:
    """Of the server with this pid; how many processes that were."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    engines = [int(each) for each in found if b"frontend.process" in Path(f"/proc/{each}/cmdline").read_bytes()]
    for each in engines:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    return len(engines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.usage", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slack-s", type=float, default=Plan.slack_s)
    parser.add_argument("--no-server-kills", action="store_true")
    given = parser.parse_args()
    kill_server_s = None if given.no_server_kills else min(45.0, given.seconds / 3)
    kill_engine_s = min(20.0, given.seconds / 5)
    plan = Plan(given.seconds, given.seed, kill_engine_s, kill_server_s, given.slack_s)
    with tempfile.TemporaryDirectory(prefix="usage-soak-") as folder:
        report = UsageSoak(plan, Path(folder)).run()
    for key_id, bounds in report.rows.items():
        shown = (f"{name} {low} <= {bill} <= {high}" for name, (low, bill, high) in zip(COUNTED, bounds, strict=True))
        print(f"{key_id}: {', '.join(shown)}")
    print("kills of the engine and of the server: {} and {}".format(*report.num_kills))
    print("\n".join(report.findings) or "every bill is within its bounds")
    return int(bool(report.findings))


if __name__ == "__main__":
    sys.exit(main())
