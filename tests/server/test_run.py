"""From the port to the last request: binding, the ready line, draining, exit codes."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import httpx
import pytest

from loraplex.errors import ConfigError
from loraplex.server import ServerConfig, bind
from loraplex.server import run as server_run
from loraplex.server.run import COLLECT_BUSY_TICKS, COLLECT_TICKS, FEW_REQUESTS, GC_THRESHOLDS
from loraplex.testing import FakeAsyncEngine
from tests.server.live_server import LiveServer
from tests.server.sse import events

REPOSITORY = Path(__file__).parents[2]
BODY = {"model": "sql", "prompt": "hi", "stream": True, "max_tokens": 50}
PROGRAM = """
import asyncio, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored
from loraplex.errors import ModelNotFoundError
from loraplex.server import ServerConfig, run, run_server
from loraplex.testing import FakeAsyncEngine

run.LAST_WORDS_S = float(sys.argv[4])

class Engine(FakeAsyncEngine):
    async def shutdown(self):
        if sys.argv[1] == "ends slowly":
            print("the engine ends", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
        await super().shutdown()
        print("engine is shut down", flush=True)

async def rest(config):
    print("starting", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    if sys.argv[1] == "cannot import":
        raise ImportError("no such module")

if "import" in sys.argv[1]:
    run._import_rest = rest

async def start():
    how = sys.argv[1]
    if how == "fails":
        raise ModelNotFoundError("no model here")
    if how == "slowly never":
        print("starting", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            print("clearing up", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            print("clear", flush=True)
    if how == "never":
        print("starting", flush=True)
        await asyncio.Event().wait()
    engine = Engine({"sql": "/sql"})
    if how == "holds":
        engine.hold(after_tokens=2)
    if how == "gives up":
        asyncio.get_running_loop().call_later(0.1, engine.give_up)
    return engine

folder = sys.argv[5] or None
config = ServerConfig(
    port=int(sys.argv[2]), access_log=False, shutdown_grace_s=float(sys.argv[3]), adapter_output_dir=folder
)
code = run_server(start, config)
if folder is not None:
    print("torch is there:", "torch" in sys.modules)
sys.exit(code)
"""


class Program:
    """A server in a process of its own."""

    def __init__(
        self, how: str, port: int = 0, grace_s: float = 30.0, last_words_s: float = 5.0, output_dir: str = ""
    ) -> None:
        command = [sys.executable, "-c", PROGRAM, how, str(port), str(grace_s), str(last_words_s), output_dir]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    @property
    def stdout(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def url(self) -> str:
        """From the ready line, once it is there."""
        line = self.stdout.readline()
        assert line.startswith("Loraplex is ready: http://127.0.0.1:"), line + self.stderr()
        assert "serves base (1 adapter)" in line
        return line.split()[3]

    def stderr(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def end(self) -> tuple[int, str]:
        """Exit code and what else it printed."""
        output, _ = self.process.communicate(timeout=60)
        return self.process.returncode, output


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    for program in started:
        program.process.kill()
        program.process.communicate()


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_an_idle_server_and_its_engine(programs: list[Program], which: signal.Signals) -> None:
    program = Program("answers")
    programs.append(program)
    url = program.url()
    assert httpx.get(url + "/health").status_code == 200
    program.process.send_signal(which)
    assert program.end() == (0, "engine is shut down\n")


def test_what_merges_import_is_there_before_requests_come(programs: list[Program], tmp_path: Path) -> None:
    """The first plan of a merge imported torch, which held up every request for 2 s."""
    program = Program("answers", output_dir=str(tmp_path))
    programs.append(program)
    program.url()
    program.process.send_signal(signal.SIGTERM)
    assert program.end() == (0, "engine is shut down\ntorch is there: True\n")


def test_the_log_says_which_kernels_run(programs: list[Program]) -> None:
    program = Program("answers")
    programs.append(program)
    program.url()
    program.process.send_signal(signal.SIGTERM)
    _, errors = program.process.communicate(timeout=60)
    assert re.search(
        r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO loraplex\.server: kernels: fake$", errors, re.MULTILINE
    )


def test_after_the_grace_a_stream_ends_with_an_error_of_its_own(programs: list[Program]) -> None:
    program = Program("holds", grace_s=0.0)
    programs.append(program)
    url = program.url()
    with httpx.stream("POST", url + "/v1/completions", json=BODY) as response:
        lines = response.iter_lines()
        assert "data: " in next(lines)
        program.process.send_signal(signal.SIGTERM)
        rest = "\n".join(lines)
    assert '"code":"engine_shutdown"' in rest
    assert "data: [DONE]" in rest
    output, errors = program.process.communicate(timeout=60)
    assert (program.process.returncode, output) == (0, "engine is shut down\n")
    assert "the server shuts down: it waits for 1 request, at most 0 s; Ctrl-C again ends what runs\n" in errors
    assert "1 request ended: the 0 s of --shutdown-grace-s are over\n" in errors


def test_a_second_signal_does_not_wait(programs: list[Program]) -> None:
    program = Program("holds", grace_s=3600.0)
    programs.append(program)
    url = program.url()
    with httpx.stream("POST", url + "/v1/completions", json=BODY) as response:
        lines = response.iter_lines()
        assert "data: " in next(lines)
        program.process.send_signal(signal.SIGTERM)
        while is_open(url):
            time.sleep(0.01)
        program.process.send_signal(signal.SIGTERM)
        assert '"code":"engine_shutdown"' in "\n".join(lines)
    output, errors = program.process.communicate(timeout=60)
    assert (program.process.returncode, output) == (0, "engine is shut down\n")
    assert "1 request ended: a second signal came\n" in errors


@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_request_that_is_cut_is_told_so_and_the_log_has_one_line(programs: list[Program], num_signals: int) -> None:
    """Its body does not come, so it is not the engine's to end: with the grace over, or after a second signal."""
    program = Program("answers", grace_s=0.0 if num_signals == 1 else 3600.0, last_words_s=0.1)
    programs.append(program)
    url = program.url()
    host, port = url.removeprefix("http://").split(":")
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(head.encode() + b"{")
        assert httpx.get(url + "/health").status_code == 200  # what came before it has been read
        for _ in range(num_signals):
            program.process.send_signal(signal.SIGTERM)
            while is_open(url):
                time.sleep(0.01)
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    output, errors = program.process.communicate(timeout=60)
    assert (program.process.returncode, output) == (0, "engine is shut down\n")
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b'"code":"engine_shutdown"' in answer
    assert "Traceback" not in errors
    assert "1 request cut: it did not end in time\n" in errors
    assert "uvicorn" not in errors


def is_open(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True


def test_a_taken_port_is_said_at_once_with_exit_code_1(programs: list[Program]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        program = Program("never", port)
        programs.append(program)
        output, errors = program.process.communicate(timeout=60)
        assert (program.process.returncode, output) == (1, "")
        assert errors.startswith(f"error: cannot listen on 127.0.0.1:{port}: Address already in use")
        assert errors.count("\n") == 1


def test_an_engine_that_does_not_start_is_exit_code_1(programs: list[Program]) -> None:
    program = Program("fails")
    programs.append(program)
    output, errors = program.process.communicate(timeout=60)
    assert (program.process.returncode, output, errors) == (1, "", "error: no model here\n")


def test_an_engine_that_gives_up_ends_the_server_with_exit_code_1(programs: list[Program]) -> None:
    program = Program("gives up")
    programs.append(program)
    program.url()
    output, errors = program.process.communicate(timeout=60)
    assert (program.process.returncode, output) == (1, "engine is shut down\n")
    assert "the server ends, since its engine does not start any more" in errors


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_start_of_an_engine(programs: list[Program], which: signal.Signals) -> None:
    program = Program("never")
    programs.append(program)
    assert program.stdout.readline() == "starting\n"
    program.process.send_signal(which)
    assert program.end() == (128 + which, "")


@pytest.mark.parametrize("how", ["imports slowly", "cannot import"])
def test_an_engine_that_is_ready_before_the_application_is_ended(programs: list[Program], how: str) -> None:
    """A signal that came meanwhile is not lost, and neither is the engine when there is no application."""
    program = Program(how)
    programs.append(program)
    assert program.stdout.readline() == "starting\n"
    if how == "imports slowly":
        program.process.send_signal(signal.SIGTERM)
    assert program.process.stdin is not None
    time.sleep(0.2)  # the signal is handled before the line is read, and not only sent
    program.process.stdin.write("\n")
    program.process.stdin.flush()
    assert program.stdout.readline() == "engine is shut down\n"
    assert program.process.wait(60) == (128 + signal.SIGTERM if how == "imports slowly" else 1)


def test_more_signals_do_not_keep_a_start_from_clearing_up(programs: list[Program]) -> None:
    program = Program("slowly never")
    programs.append(program)
    assert program.stdout.readline() == "starting\n"
    program.process.send_signal(signal.SIGINT)
    assert program.stdout.readline() == "clearing up\n"
    for which in (signal.SIGINT, signal.SIGTERM):
        program.process.send_signal(which)
    assert program.process.stdin is not None
    program.process.stdin.write("\n")
    assert program.end() == (128 + signal.SIGINT, "clear\n")


def test_a_signal_while_the_engine_ends_does_not_end_the_server(programs: list[Program]) -> None:
    """The handlers were removed with the application's, so that it was killed before the engine's end was over."""
    program = Program("ends slowly")
    programs.append(program)
    program.url()
    program.process.send_signal(signal.SIGTERM)
    assert program.stdout.readline() == "the engine ends\n"
    for which in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        program.process.send_signal(which)
    assert program.process.stdin is not None
    program.process.stdin.write("\n")
    assert program.end() == (0, "engine is shut down\n")


def test_running_requests_finish_within_the_grace() -> None:
    """The server stops taking connections while one request is held; it ends with its whole answer."""
    config = ServerConfig(port=0, access_log=False, log_level="warning", shutdown_grace_s=3600.0)
    engine = FakeAsyncEngine({"sql": "/sql"})
    engine.hold(after_tokens=2)
    with ThreadPoolExecutor(1) as pool, LiveServer(engine, config) as server:
        asked = pool.submit(httpx.post, server.url + "/v1/completions", json=BODY, timeout=60)
        while engine.num_running == 0:
            time.sleep(0.01)
        server.stop()
        while is_open(server.url):
            time.sleep(0.01)
        server.call(engine.resume)
        chunks = events(asked.result().content)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "[sql] hi"


def test_the_port_opens_when_the_server_is_ready() -> None:
    with bind(ServerConfig(port=0)) as sock:
        assert not is_open(f"http://127.0.0.1:{sock.getsockname()[1]}")


def test_an_address_that_is_not_this_machines() -> None:
    text = r"cannot listen on 203\.0\.113\.7:0: Cannot assign requested address; "
    with pytest.raises(ConfigError, match=text + "it is no address of this machine, choose another --host"):
        bind(ServerConfig(host="203.0.113.7", port=0))


def test_a_port_that_needs_privileges(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(sock: socket.socket, address: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    text = (
        r"cannot listen on 127\.0\.0\.1:80: Permission denied; ports below 1024 need privileges, choose another --port"
    )
    with pytest.raises(ConfigError, match=text):
        bind(ServerConfig(port=80))


def test_no_thread_stays() -> None:
    before = threading.active_count()
    with LiveServer(FakeAsyncEngine()) as server:
        assert httpx.get(server.url + "/health").status_code == 200
    assert threading.active_count() <= before


async def test_objects_of_large_answers_are_not_looked_at_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own thresholds stop everybody for seconds while a million log probabilities come together."""
    found = []

    class Server:
        exit_code = 0

        async def serve(self, sockets: list[socket.socket]) -> None:
            found.append(gc.get_threshold())

        def stop(self) -> None: ...

    before = gc.get_threshold()
    monkeypatch.setattr(server_run, "make_server", lambda *arguments: Server())
    config = ServerConfig(port=0)
    try:
        with bind(config) as sock:
            await server_run.serve(FakeAsyncEngine(), config, sock)
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
    assert found == [server_run.GC_THRESHOLDS]


@pytest.mark.parametrize(
    ("num_requests", "ticks", "is_collected"),
    [
        (0, COLLECT_TICKS - 1, False),
        (FEW_REQUESTS, COLLECT_TICKS, True),
        (FEW_REQUESTS + 1, COLLECT_TICKS, False),
        (FEW_REQUESTS + 1, COLLECT_BUSY_TICKS, True),
    ],
)
async def test_cycles_are_looked_for_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch, num_requests: int, ticks: int, is_collected: bool
) -> None:
    engine, config = FakeAsyncEngine(), ServerConfig(port=0)
    server = server_run.make_server(engine, config, lambda context: None)
    monkeypatch.setattr(type(server._context), "num_in_flight", num_requests)
    found: list[None] = []
    monkeypatch.setattr(gc, "collect", lambda: found.append(None))
    await server.on_tick(ticks)
    assert bool(found) == is_collected


def test_no_usual_collection_looks_at_many_objects() -> None:
    """Of half a million, which 4,000 waiting requests have, one would take 200 ms."""
    young, middle, _ = GC_THRESHOLDS
    assert young * (middle + 1) <= 50_000


def test_the_application_is_imported_while_the_engine_starts() -> None:
    """It takes half a second, in which the engine's process would not be there yet; numpy and pydantic a fifth."""
    late = {"fastapi", "loraplex.server.app", "numpy", "pydantic", "torch"}
    code = f"import sys, loraplex.server.run, loraplex.frontend.async_engine; print(sorted({late} & {{*sys.modules}}))"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
