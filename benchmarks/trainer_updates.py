"""How long a trainer waits for the first token of its new weights: tensors that are sent, and a file that is reloaded.

    python -m benchmarks.trainer_updates                     `s`, rank 16, 20 updates of each kind in turns
    python -m benchmarks.trainer_updates --state-dir         versions outlive the server: all is synced
    python -m benchmarks.trainer_updates --size tiny --updates 5
sent    `PUT /v1/adapters/policy/tensors`, from the last byte of the body to the answer, and to the first token of a
        request that follows; the rest of the body was there before. Target: 300 ms to the token.
file    `POST /v1/load_lora_adapter` with load_inplace of a directory that has the same tensors, from the request on.
        Writing the file is not counted.
Meanwhile one client asks for /health without a pause and one streams from the base model: their longest waits, during
updates and without, say what an update costs others. The body takes the loopback network here.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from safetensors.torch import load_file, save, save_file

from benchmarks.arguments import positive
from benchmarks.fixture import SIZES, fixture
from benchmarks.report import wide_console

FILE = "adapter_model.safetensors"
TARGET_MS = 300.0
SETTLE_S = 0.3
"""From the body but its last byte to that byte: the server has read the rest by then."""


@dataclass(frozen=True)
class Update:
    """Milliseconds from the body, or the request, to the answer and to the first token."""

    kind: str
    answer_ms: float
    token_ms: float


@dataclass
class Watch:
    """Longest waits of others, in milliseconds: of each period."""

    health_ms: list[float] = field(default_factory=lambda: [0.0])
    token_gap_ms: list[float] = field(default_factory=lambda: [0.0])

    def begin_period(self) -> None:
        self.health_ms.append(0.0)
        self.token_gap_ms.append(0.0)


class Client:
    """A connection for each request, to 127.0.0.1."""

    def __init__(self, port: int) -> None:
        self.port = port

    def send(self, method: str, path: str, body: bytes, *, settles: bool = False) -> float:
        """Seconds to the whole answer. settles: from the last byte of the body on."""
        with socket.create_connection(("127.0.0.1", self.port)) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            kind = "application/octet-stream" if settles else "application/json"
            head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
            head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            sock.sendall(head.encode() + body[:-1])
            if settles:
                time.sleep(SETTLE_S)
            began_s = time.perf_counter()
            sock.sendall(body[-1:])
            answer = b"".join(iter(lambda: sock.recv(65536), b""))
            seconds = time.perf_counter() - began_s
        if not re.match(rb"HTTP/1.1 20[01]", answer):
            raise RuntimeError(answer.decode(errors="replace")[:2000])
        return seconds

    def first_token(self, model: str) -> float:
        began_s = time.perf_counter()
        for _ in self.tokens(model, 1):
            break
        return time.perf_counter() - began_s

    def tokens(self, model: str, max_tokens: int) -> Iterator[None]:
        """Once for each piece of a stream."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        body = {"model": model, "prompt": list(range(100, 132)), "max_tokens": max_tokens, "temperature": 0}
        body |= {"stream": True, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        try:
            for line in response:
                if line.startswith(b"data: {"):
                    yield
        finally:
            connection.close()


@contextmanager
def server(base: Path, adapter: Path, flags: list[str], port: int) -> Iterator[Client]:
    command = [sys.executable, "-m", "loraplex", "serve", str(base), "--served-model-name", "base", "--port", str(port)]
    command += ["--lora-modules", f"policy={adapter}", "--no-access-log", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())
        if ready is None:
            raise RuntimeError("the server did not start")
        yield Client(int(ready[1]))
    finally:
        process.terminate()
        process.wait()


@contextmanager
def watched(client: Client) -> Iterator[Watch]:
    watch, is_over = Watch(), threading.Event()

    def ask_health() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", client.port)
        while not is_over.is_set():
            began_s = time.perf_counter()
            connection.request("GET", "/health")
            connection.getresponse().read()
            watch.health_ms[-1] = max(watch.health_ms[-1], 1e3 * (time.perf_counter() - began_s))
            time.sleep(0.005)

    def stream() -> None:
        while not is_over.is_set():
            last_s = None
            for _ in client.tokens("base", 200):
                now_s = time.perf_counter()
                if last_s is not None:
                    watch.token_gap_ms[-1] = max(watch.token_gap_ms[-1], 1e3 * (now_s - last_s))
                last_s = now_s

    threads = [threading.Thread(target=each) for each in (ask_health, stream)]
    for thread in threads:
        thread.start()
    try:
        yield watch
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def timed(kind: str, client: Client, update: Callable[[], float]) -> Update:
    answer_s = update()
    return Update(kind, 1e3 * answer_s, 1e3 * (answer_s + client.first_token("policy")))


def run(args: argparse.Namespace) -> dict[str, Any]:
    made = fixture(args.size, 1, ranks=[args.rank], adapter_dtype=args.adapter_dtype)
    weights = load_file(made.adapters[0] / FILE)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = ["--state-dir", str(folder / "state")] if args.state_dir else []
        file = folder / "policy"
        file.mkdir()
        (file / "adapter_config.json").write_bytes((made.adapters[0] / "adapter_config.json").read_bytes())
        client = stack.enter_context(server(made.base, made.adapters[0], [*flags, *args.flags], args.port))
        client.first_token("policy")
        updates, load = [], json.dumps({"lora_name": "policy", "lora_path": str(file), "load_inplace": True}).encode()

        def step(number: int) -> None:
            sent = {name: tensor * (1 + number / 64) for name, tensor in weights.items()}
            body = save(sent)
            put = ("PUT", "/v1/adapters/policy/tensors", body)
            updates.append(timed("sent", client, lambda: client.send(*put, settles=True)))
            save_file({name: tensor * (1 + (number + 0.5) / 64) for name, tensor in weights.items()}, file / FILE)
            updates.append(timed("file", client, lambda: client.send("POST", "/v1/load_lora_adapter", load)))

        for number in range(1, args.updates + 1):
            step(number)
        watch = stack.enter_context(watched(client))
        for number in range(args.updates + 1, args.updates + 1 + args.updates // 2):
            time.sleep(1.0)
            watch.begin_period()
            step(number)
            watch.begin_period()
    idle = updates[: 2 * args.updates]
    return {
        "bytes": len(save(weights)),
        "updates": [asdict(each) for each in idle],
        "beside a stream": [asdict(each) for each in updates[2 * args.updates :]],
        "longest waits": {
            "without updates": [max(watch.health_ms[::2]), max(watch.token_gap_ms[::2])],
            "during updates": [max(watch.health_ms[1::2]), max(watch.token_gap_ms[1::2])],
        },
    }


def show(figures: dict[str, Any]) -> None:
    table = Table(title=f"{figures['bytes'] / 1e6:.1f} MB of tensors; milliseconds", title_justify="left")
    for column in ("", "to the answer", "to the first token", "longest", "target"):
        table.add_column(column, justify="right" if column else "left")
    for title in ("updates", "beside a stream"):
        for kind in ("sent", "file"):
            rows = [each for each in figures[title] if each["kind"] == kind]
            if not rows:
                continue
            answer, token = ([each[key] for each in rows] for key in ("answer_ms", "token_ms"))
            name = kind if title == "updates" else f"{kind}, {title}"
            target = f"{TARGET_MS:g}" if kind == "sent" else ""
            middle = (f"{statistics.median(answer):.0f}", f"{statistics.median(token):.0f}", f"{max(token):.0f}")
            table.add_row(name, *middle, target)
    console = wide_console()
    console.print(table)
    for title, (health_ms, gap_ms) in figures["longest waits"].items():
        console.print(f"{title}: /health at most {health_ms:.0f} ms, between two tokens of a stream {gap_ms:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="s")
    parser.add_argument("--rank", type=positive, default=16)
    parser.add_argument("--adapter-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--updates", type=positive, default=20, help="of each kind (default: 20)")
    parser.add_argument("--state-dir", action="store_true", help="with a state directory")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("flags", nargs="*", help="further flags of `loraplex serve`, behind --")
    args = parser.parse_args()
    figures = run(args)
    show(figures)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
