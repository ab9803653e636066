"""Usage against what clients got, while requests are cut and processes are killed.

    python -m tests.soak.usage --seconds 600
    python -m tests.soak.usage --seconds 60 --seed 7 --port 19431

A server of the demo's model runs as a process with two tenants. Clients send completions and chats, of several prompts
and completions, through adapters, a mix and the base, whole and as streams; they leave streams in the middle and set
timeouts. Its engine is killed, and the server itself, by SIGKILL and by SIGTERM. At the end the rows of usage have,
by key and adapter, what clients were told:

    a whole answer     its `usage`, to the token
    a cut one          at least the tokens that came, at most all that were asked for
    kill -9 of server  of what ended in the LOST_S before it, or ran then, anything from nothing to all of it
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from loraplex.demo.tasks import adapter_path, assets_path
from loraplex.tenants.records import Role, TenantTable
from loraplex.tenants.store import open_store
from loraplex.tenants.usage import UsageQuery

ADAPTERS = ("upper", "sort")
MODELS = {"demo": "", "upper": "upper", "sort": "sort", "upper:0.5,sort:0.5": "//mix"}
COUNTS = ("requests", "prompt_tokens", "cached_tokens", "generated_tokens")
LOST_S = 2.5
"""The second that is not written yet, and how long a busy machine may take to write it."""

READY_S = 120.0


@dataclass
class Entry:
    """What one request used, at least and at most."""

    key_id: str
    adapter: str
    began_s: float
    ended_s: float
    least: Counter[str]
    most: Counter[str]


@dataclass
class Book:
    """What clients know. outcomes: how many requests ended how."""

    entries: list[Entry] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    kills_s: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, entry: Entry, outcome: str) -> None:
        with self.lock:
            self.entries.append(entry)
            self.outcomes[outcome] += 1

    def findings(self, rows: list[dict[str, Any]]) -> list[str]:
        """What the rows have beyond what may be."""
        least: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        most: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        found: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for entry in self.entries:
            is_lost = any(entry.began_s <= kill_s < entry.ended_s + LOST_S for kill_s in self.kills_s)
            least[entry.key_id, entry.adapter].update({} if is_lost else entry.least)
            most[entry.key_id, entry.adapter].update(entry.most)
        for row in rows:
            found[row["key_id"], row["adapter"]].update({name: row[name] for name in COUNTS})
        return [
            f"key {key[0]}, adapter {key[1]!r}: {name} is {found[key][name]}, not {least[key][name]}..{most[key][name]}"
            for key in sorted({*most, *found})
            for name in COUNTS
            if not least[key][name] <= found[key][name] <= most[key][name]
        ]


class Server:
    """`loraplex serve` with a state directory, which is started again after each end of it."""

    def __init__(self, folder: Path, port: int) -> None:
        self.state_dir, self.url = folder / "state", f"http://127.0.0.1:{port}"
        self._log, self._port = folder / "server.log", port
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = [
            "--served-model-name",
            "demo",
            "--num-threads",
            "1",
            "--max-request-s",
            "20",
            "--shutdown-grace-s",
            "1",
        ]
        for name in ADAPTERS:
            options += ["--lora-modules", f"{name}={adapter_path(name)}"]
        place = ["--state-dir", str(self.state_dir), "--host", "127.0.0.1", "--port", str(self._port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "loraplex", "serve", str(assets_path() / "base"), *place, *options],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until_s = time.monotonic() + READY_S
        while not self.is_ready():
            if self._process.poll() is not None or time.monotonic() > until_s:
                raise SystemExit(f"the server did not start: {self._log.read_text()[-2000:]}")
            time.sleep(0.05)

    def is_ready(self) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200
        return False

    def end(self, number: signal.Signals) -> None:
        assert self._process is not None
        if number == signal.SIGKILL:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
        else:
            self._process.send_signal(number)
        self._process.wait(READY_S)

    def kill_engine(self) -> None:
        """The child with the most memory."""
        assert self._process is not None
        children: list[int] = []
        for task in Path(f"/proc/{self._process.pid}/task").iterdir():
            with suppress(OSError):
                children += map(int, (task / "children").read_text().split())
        sizes = {}
        for pid in children:
            with suppress(OSError):
                sizes[pid] = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        if sizes:
            with suppress(ProcessLookupError):
                os.kill(max(sizes, key=sizes.__getitem__), signal.SIGKILL)


class Client(threading.Thread):
    """Sends one request after another, with one key, and writes down what it got."""

    def __init__(self, url: str, key: tuple[str, str], book: Book, seed: int, is_over: threading.Event) -> None:
        super().__init__(daemon=True)
        self._http = httpx.Client(base_url=url, timeout=60, trust_env=False)
        self._http.headers["authorization"] = f"Bearer {key[1]}"
        self._key_id, self._book, self._random, self._is_over = key[0], book, random.Random(seed), is_over
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._is_over.is_set():
                self._one()
        except BaseException as error:
            self.error = error
        finally:
            self._http.close()

    def _body(self) -> tuple[str, dict[str, Any], int, int]:
        """url, body, and how many prompts and tokens it may cost."""
        rng, model = self._random, self._random.choice(list(MODELS))
        n, max_tokens = rng.choice([1, 1, 2, 3]), rng.choice([1, 8, 40, 120])
        body: dict[str, Any] = {
            "model": model,
            "n": n,
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "ignore_eos": True,
        }
        if rng.random() < 0.2:
            body["timeout"] = rng.choice([0.05, 0.5])
        if rng.random() < 0.2:
            body |= {"stop": "a"}
        if rng.random() < 0.3:
            body["messages"] = [{"role": "user", "content": rng.choice(PHRASES)}]
            return "/v1/chat/completions", body, 1, n * max_tokens
        prompts = [rng.choice(PHRASES) + "=" for _ in range(rng.choice([1, 1, 3]))]
        body["prompt"] = prompts
        if rng.random() < 0.1:
            body |= {"max_tokens": 0, "echo": True}
        return "/v1/completions", body, len(prompts), n * max_tokens * len(prompts)

    def _one(self) -> None:
        url, body, num_prompts, num_tokens = self._body()
        most = Counter({"requests": num_prompts, "generated_tokens": num_tokens})
        most |= Counter({"prompt_tokens": 200 * num_prompts, "cached_tokens": 200 * num_prompts})
        began_s, least = time.monotonic(), Counter[str]()
        try:
            if self._random.random() < 0.5:
                outcome = self._stream(url, body, least)
            else:
                answer = self._http.post(url, json=body)
                outcome = str(answer.status_code)
                if answer.status_code == 200:
                    least.update(_told(answer.json()["usage"], num_prompts))
            if outcome in ("200", "200 stream"):
                most = least
        except httpx.HTTPError as error:
            outcome = type(error).__name__
            self._is_over.wait(0.1)
        self._book.add(Entry(self._key_id, MODELS[body["model"]], began_s, time.monotonic(), least, most), outcome)

    def _stream(self, url: str, body: dict[str, Any], least: Counter[str]) -> str:
        """Cut after some chunks, or to its end; `least` grows by what each chunk tells."""
        body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        num_chunks = self._random.choice([1, 5, 20, None, None, None])
        is_whole = False
        with self._http.stream("POST", url, json=body) as answer:
            if answer.status_code != 200:
                return f"{answer.status_code} stream"
            for number, line in enumerate(line for line in answer.iter_lines() if line.startswith("data: ")):
                if line == "data: [DONE]":
                    return "200 stream" if is_whole else "ended early"
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    return "error in a stream"
                is_whole = not chunk["choices"]
                told = _told(chunk["usage"], 0)
                if is_whole:
                    told["requests"] = len(body["prompt"]) if "prompt" in body else 1
                least.update({name: num - least[name] for name, num in told.items()})
                if number == num_chunks:
                    return "left"
        return "cut"


def _told(usage: dict[str, Any], num_prompts: int) -> Counter[str]:
    return Counter(
        {
            "requests": num_prompts,
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "generated_tokens": usage["completion_tokens"],
        }
    )


PHRASES = ("banana bread", "golden guitar", "night ocean", "paper rocket and a silver sailor in the spring sunset")


@contextmanager
def running(book: Book, server: Server, keys: list[tuple[str, str]], num_clients: int, seed: int) -> Iterator[None]:
    """Clients of these keys, until the block ends. Raises what one of them raised."""
    is_over = threading.Event()
    clients = [Client(server.url, keys[i % len(keys)], book, 1000 * seed + i, is_over) for i in range(num_clients)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        is_over.set()
        for client in clients:
            client.join()
    for client in clients:
        if client.error is not None:
            raise client.error


def soak(folder: Path, *, seconds: float, seed: int, port: int, num_clients: int = 6, every_s: float = 8.0) -> Book:
    """Findings are printed by `main`; every_s: between two kills, of the engine, the server, the server's end."""
    book, server, rng = Book(), Server(folder, port), random.Random(seed)
    server.start()
    keys = []
    with closing(open_store(server.state_dir, None)) as store:
        for tenant in ("acme", "beta"):
            store.create_tenant(tenant)
            for _ in range(2):
                key, secret = store.create_key(Role.TENANT, tenant)
                keys.append((key.key_id, secret))
        for name in ADAPTERS:
            store.share(name, [TenantTable.ALL])
    time.sleep(1)  # the server has the keys then
    try:
        with running(book, server, keys, num_clients, seed):
            until_s = time.monotonic() + seconds
            order = ["engine killed", "server killed", "server ended"]
            rng.shuffle(order)
            while (left_s := until_s - time.monotonic()) > 0:
                time.sleep(min(left_s, every_s * rng.uniform(0.5, 1.5)))
                if time.monotonic() >= until_s:
                    break
                order.append(what := order.pop(0))
                book.outcomes[what] += 1
                if what == "engine killed":
                    server.kill_engine()
                    continue
                if what == "server killed":
                    book.kills_s.append(time.monotonic())
                server.end(signal.SIGKILL if what == "server killed" else signal.SIGTERM)
                server.start()
    finally:
        server.end(signal.SIGTERM)
    return book


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=19431)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        book = soak(Path(folder), seconds=args.seconds, seed=args.seed, port=args.port)
        findings = book.findings(rows_of(Path(folder)))
    print(f"{len(book.entries)} requests: {dict(book.outcomes)}")
    print(*findings or ["usage is what clients got"], sep="\n")
    return 1 if findings else 0


def rows_of(folder: Path) -> list[dict[str, Any]]:
    with closing(open_store(folder / "state", None)) as store:
        return store.usage(UsageQuery(), 10_000)


if __name__ == "__main__":
    raise SystemExit(main())
