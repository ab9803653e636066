"""Engine processes that die, are overloaded, cannot start, or lose their parent: all requests are answered, nothing is
left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import zmq

from loraplex.adapters.source import AdapterSource
from loraplex.config import LoRAConfig
from loraplex.core import Claim, RequestOutput
from loraplex.demo.tasks import TASKS, adapter_path
from loraplex.errors import (
    ConfigError,
    EngineDeadError,
    EngineOverloadedError,
    EngineShutdownError,
    LoraplexError,
    ModelNotFoundError,
    ModelWeightError,
)
from loraplex.events import EventKind
from loraplex.frontend import client as frontend_client
from loraplex.frontend.async_engine import AsyncEngine
from loraplex.frontend.client import EngineClient
from tests.frontend.processes import (
    BASE,
    Client,
    demo_config,
    first,
    is_running,
    rest,
    stretched_base,
    temporary_folder,
    until,
    within,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADAPTERS = tuple(task.name for task in TASKS)
PINNED = "sort"


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where engines make their sockets. At the end nothing is left there, and no engine runs."""
    with temporary_folder(tmp_path_factory.mktemp("t")) as path:
        yield path
        assert list(path.iterdir()) == []
    assert engine_processes() == []


def engine_processes() -> list[int]:
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if is_running(child.pid) and "loraplex.frontend.process" in child.cmdline()]


# ---------------------------------------------------------------------------------------------------------------- death


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stretched_base(tmp_path_factory.mktemp("model") / "base")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mortal(base: str) -> AsyncIterator[Client]:
    """An engine with all adapters of the demo, one of them pinned."""
    engine = await within(AsyncEngine.start(demo_config(model=base), served_model_name="base"))
    for name in ADAPTERS:
        await within(engine.load_adapter(name, str(adapter_path(name)), is_pinned=name == PINNED))
    yield Client(engine)
    await within(engine.shutdown())


async def answers(client: Client) -> list[RequestOutput]:
    """One at a time, of the base and every adapter."""
    return [(await client.outputs("banana bread=", model))[-1] for model in (None, *ADAPTERS)]


async def read_to_the_end(stream: AsyncIterator[RequestOutput]) -> RequestOutput | LoraplexError:
    try:
        return (await rest(stream))[-1]
    except LoraplexError as error:
        return error


async def test_a_signal_to_all_processes_of_a_service_is_the_servers(mortal: Client) -> None:
    """systemd and some container runtimes send it to each: the engine ended at once, and nothing was drained."""
    pid = mortal.engine.engine_pid
    assert pid is not None
    stream = mortal.long(max_tokens=256)
    await first(stream)
    for which in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(pid, which)
    assert len((await rest(stream))[-1].outputs[0].token_ids) == 256
    assert await mortal.ask("banana bread=")
    assert mortal.engine.engine_pid == pid


async def test_after_a_death_every_request_is_answered_and_the_engine_comes_back(mortal: Client) -> None:
    engine = mortal.engine
    before = await answers(mortal)
    await within(engine.start_lora_profiling())
    streams = [mortal.long((None, *ADAPTERS)[index % 9]) for index in range(16)]
    await asyncio.gather(*map(first, streams))
    first_pid = engine.engine_pid
    assert first_pid is not None
    os.kill(first_pid, signal.SIGKILL)
    ended = await asyncio.gather(*map(read_to_the_end, streams))
    assert any(isinstance(end, EngineDeadError) for end in ended)
    for end in ended:
        if isinstance(end, LoraplexError):
            assert isinstance(end, EngineDeadError)
            assert "the engine process exited unexpectedly (killed by SIGKILL); it is being restarted" in str(end)
        else:
            assert end.finished
    assert engine.num_unfinished == 0
    assert engine.registry is not None
    assert engine.registry.num_references == 0
    await check_down(mortal, "it is being restarted")
    curious = asyncio.create_task(look_all_the_time(engine))
    await until(lambda: engine.health().is_alive)
    await within(curious)
    assert engine.health().message == ""
    assert engine.engine_pid != first_pid
    after = await answers(mortal)
    assert [output.outputs for output in after] == [output.outputs for output in before]
    assert [output.outputs[0].text for output in after[1:]] == [task.apply("banana bread") for task in TASKS]
    infos = {info.ref.adapter_name: info for info in await within(engine.list_adapters())}
    assert [name for name, info in infos.items() if info.is_pinned] == [PINNED]
    await within(engine.check_integrity())
    told = [numbered.event for numbered in engine.events.after(0).events]
    assert [event.kind for event in told if event.kind in (EventKind.FAULT, EventKind.RESTART)] == [
        EventKind.FAULT,
        EventKind.RESTART,
    ]
    report = await within(engine.generate_lora_performance_report())
    assert (report.num_faults, report.num_restarts) == (1, 1)
    assert report.num_steps > 0, "the new process records too"
    assert report.requests.num_finished >= len(after)
    assert "restarted" in {finding.name for finding in report.findings}


async def look_all_the_time(engine: AsyncEngine) -> None:
    """Calls at any moment of a restart are answered and do not disturb it."""
    while not engine.health().is_alive:
        with contextlib.suppress(EngineDeadError):
            await within(engine.stats())
        await asyncio.sleep(0)


async def check_down(client: Client, outlook: str) -> None:
    """Everybody is told so, at once, with an error of his own."""
    health = client.engine.health()
    assert not health.is_alive
    assert outlook in health.message
    errors = []
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=outlook) as raised:
            await client.ask("banana=", "upper")
        errors.append(raised.value)
    assert errors[0] is not errors[1]
    with pytest.raises(EngineDeadError):
        await within(client.engine.load_adapter("new", str(adapter_path("upper"))))
    with pytest.raises(EngineDeadError):
        await within(client.engine.list_adapters())
    assert client.engine.registry is not None
    assert sorted(client.engine.registry.names()) == sorted(ADAPTERS)


async def test_kills_during_its_start_do_not_use_up_its_lives(mortal: Client) -> None:
    """The first kill is of a process that serves, the others of those that were to replace it, while they start."""
    engine = mortal.engine
    for _ in range(4):
        pid = engine.engine_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda pid=pid: engine.engine_pid not in (None, pid))
    assert not engine.health().is_alive
    await check_down(mortal, "it is restarted in 1 s")
    await until(lambda: engine.health().is_alive)
    assert await mortal.ask("banana=", "upper") == "BANANA"
    await within(engine.check_integrity())


async def test_a_temporary_folder_with_a_long_path_is_refused(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(ConfigError, match=r"its path has \d+ characters; set TMPDIR"):
        await AsyncEngine.start(demo_config(model=base))
    assert list(folder.iterdir()) == []


# ------------------------------------------------------------------------------------------------ overload and shutdown


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small(base: str) -> AsyncIterator[Client]:
    """An engine that runs two requests and lets two wait."""
    engine = await within(AsyncEngine.start(demo_config(model=base, max_num_seqs=2, max_waiting_requests=2)))
    await within(engine.load_adapter("upper", str(adapter_path("upper"))))
    yield Client(engine)
    await within(engine.shutdown())


async def test_more_requests_than_may_wait_are_refused(small: Client) -> None:
    """While the process is stopped nothing is taken off its queue, so the counts are exact."""
    pid = small.engine.engine_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        tasks = [asyncio.create_task(small.ask("banana=")) for _ in range(4)]
        await until(lambda: small.engine.num_unfinished == 4)
        with pytest.raises(
            EngineOverloadedError,
            match="4 requests are running or waiting, each completion counted, and 4 are the limit",
        ):
            await small.ask("tiger=")
    finally:
        os.kill(pid, signal.SIGCONT)
    ended = await within(asyncio.gather(*tasks, return_exceptions=True))
    # It finds four new requests at once, of which two may wait.
    assert [str(end) for end in ended[:2]] == ["banana", "banana"]
    assert all(isinstance(end, EngineOverloadedError) for end in ended[2:])
    assert await small.ask("tiger=") == "tiger"
    await within(small.engine.check_integrity())


async def test_a_tenant_that_fills_the_queue_leaves_each_other_one_its_share(small: Client) -> None:
    """`--max-num-seqs 2 --max-waiting-requests 2`, and 60 connections of one tenant: another got 429 each time."""
    pid = small.engine.engine_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        acme = [asyncio.create_task(small.ask("banana=", claim=Claim("acme"))) for _ in range(4)]
        await until(lambda: small.engine.num_unfinished == 4)
        with pytest.raises(EngineOverloadedError):
            await small.ask("tiger=", claim=Claim("acme"))
        beta = asyncio.create_task(small.ask("tiger=", claim=Claim("beta")))
        await until(lambda: small.engine.num_unfinished == 5)
        with pytest.raises(EngineOverloadedError):
            await small.ask("tiger=", claim=Claim("beta"))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert await within(beta) == "tiger"
    await within(asyncio.gather(*acme, return_exceptions=True))
    await within(small.engine.check_integrity())


async def test_each_completion_of_a_prompt_counts_among_those_that_wait(small: Client) -> None:
    """A prompt of 128 completions is 128 requests in both processes."""
    pid = small.engine.engine_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        task = asyncio.create_task(small.ask("banana=", n=4))
        await until(lambda: small.engine.num_unfinished == 1)
        with pytest.raises(EngineOverloadedError, match="4 requests are running or waiting, each completion counted"):
            await small.ask("tiger=")
    finally:
        os.kill(pid, signal.SIGCONT)
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: small.engine._places.total == 0)
    assert await small.ask("tiger=") == "tiger"


async def test_a_request_that_is_given_up_has_its_place_until_the_engine_has_read_it(small: Client) -> None:
    """Else those of a client that sends and goes away, again and again, are before all others' in the engine's socket,
    more with each: another tenant waited 14 s after 20 s of it."""
    pid = small.engine.engine_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(2):
            task = asyncio.create_task(small.ask("banana=", n=2))
            await until(lambda: small.engine.num_unfinished == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert small.engine.num_unfinished == 0
        with pytest.raises(EngineOverloadedError, match="4 requests are running or waiting"):
            await small.ask("tiger=")
    finally:
        os.kill(pid, signal.SIGCONT)
    await until(lambda: small.engine._places.total == 0)
    assert await small.ask("tiger=") == "tiger"
    await within(small.engine.check_integrity())


async def test_an_engine_is_behind_until_it_has_read(small: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is silent for long may hang, and nothing is to wait for it."""
    monkeypatch.setattr(frontend_client, "MAX_UNREAD", 1)
    pid, engine = small.engine.engine_pid, small.engine
    assert pid is not None
    assert not engine.is_behind
    os.kill(pid, signal.SIGSTOP)
    try:
        task = asyncio.create_task(small.ask("banana=", n=2))
        await until(lambda: engine.num_unfinished == 1)
        monkeypatch.setattr(frontend_client, "MAX_SILENCE_S", 0.0)
        assert not engine.is_behind
        monkeypatch.setattr(frontend_client, "MAX_SILENCE_S", 1000.0)
        assert engine.is_behind
    finally:
        os.kill(pid, signal.SIGCONT)
    await within(task)
    assert not engine.is_behind


async def test_shutdown_answers_everybody(small: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that run, a load that reads its files, and an unload that waits for a request."""
    engine, pid, registry = small.engine, small.engine.engine_pid, small.engine.registry
    assert pid is not None
    assert registry is not None
    may_fetch, is_fetching = threading.Event(), threading.Event()
    fetch = AdapterSource.fetch

    def slow(source: AdapterSource, path: str, **options: Any) -> Path:
        is_fetching.set()
        may_fetch.wait(60)
        return fetch(source, path, **options)

    monkeypatch.setattr(AdapterSource, "fetch", slow)
    streams = [small.long("upper"), small.long()]
    await asyncio.gather(*map(first, streams))
    load = asyncio.create_task(engine.load_adapter("sort", str(adapter_path("sort"))))
    unload = asyncio.create_task(engine.unload_adapter("upper", deadline_s=3600.0))
    await until(is_fetching.is_set)
    await until(lambda: not engine.has_adapter("upper"))
    await within(engine.shutdown())
    may_fetch.set()
    for end in await asyncio.gather(*map(read_to_the_end, streams)):
        assert isinstance(end, EngineShutdownError)
    with pytest.raises(EngineShutdownError):
        await within(load)
    assert (await within(unload)).is_drained
    assert registry.num_references == 0
    assert not is_running(pid)
    await check_shut_down(small)
    await within(engine.shutdown())  # a second time is nothing


async def check_shut_down(client: Client) -> None:
    engine = client.engine
    assert (engine.health().is_alive, engine.health().message) == (False, "shutting down")
    with pytest.raises(EngineShutdownError):
        await client.ask("banana=")
    with pytest.raises(EngineShutdownError):
        await within(engine.load_adapter("new", str(adapter_path("upper"))))


# ----------------------------------------------------------------------------------------------------------- bad starts


async def test_a_state_directory_without_lora_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a state directory is given, but LoRA is off"):
        await AsyncEngine.start(demo_config(is_lora_on=False), state_dir=tmp_path)


async def test_an_eviction_policy_of_ones_own_is_loaded_in_the_engine_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (
        "import os, pathlib",
        "from loraplex.memory.eviction.policies import LRU",
        "class Mine(LRU):",
        "    def __init__(self):",
        "        super().__init__()",
        "        pathlib.Path(__file__).with_name('pid').write_text(str(os.getpid()))",
        "class Half:",
        "    name, evicts, enter, use = 'half', True, LRU.enter, LRU.use",
    )
    (tmp_path / "policies_of_mine.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="'policies_of_mine:Half' lacks touch, evict, forget, order: "):
        await within(AsyncEngine.start(demo_config(LoRAConfig(eviction_policy="policies_of_mine:Half"))))
    engine = await within(AsyncEngine.start(demo_config(LoRAConfig(eviction_policy="policies_of_mine:Mine"))))
    try:
        assert (tmp_path / "pid").read_text() == str(engine.engine_pid)
        assert "policies_of_mine" not in sys.modules
    finally:
        await engine.shutdown()


async def test_a_failed_start_lets_the_state_directory_go(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ModelNotFoundError):
            await within(AsyncEngine.start(demo_config(model=str(tmp_path / "nowhere")), state_dir=tmp_path / "state"))


async def test_the_error_of_a_model_that_cannot_be_loaded_reaches_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(shutil.copytree(BASE, tmp_path / "base"))
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    others = engine_processes()
    with pytest.raises(ModelWeightError, match=str(path)):
        await within(AsyncEngine.start(demo_config(model=str(path))))
    assert engine_processes() == others
    assert caplog.records == []  # the caller has the error; nothing else is to be said, or restarted


async def test_a_start_that_is_called_off_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clients: list[EngineClient] = []
    make = EngineClient.__init__

    def remembered(client: EngineClient, *arguments: object, **options: object) -> None:
        make(client, *arguments, **options)  # type: ignore[arg-type]
        clients.append(client)

    monkeypatch.setattr(EngineClient, "__init__", remembered)
    starting = asyncio.create_task(AsyncEngine.start(demo_config()))
    await until(lambda: bool(clients) and clients[0].pid is not None)
    pid = clients[0].pid
    assert pid is not None
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await within(starting)
    assert not is_running(pid)


class FullSocket:
    """Whose messages are there already. recv waits for ever after the last one."""

    def __init__(self, count: int) -> None:
        self.left = [b"%d" % number for number in range(count)]

    async def recv(self) -> bytes:
        while not self.left:
            await asyncio.sleep(3600)
        return self.left.pop(0)

    def get(self, option: int) -> int:
        assert option == zmq.EVENTS
        return zmq.POLLIN if self.left else 0


@pytest.mark.parametrize("is_slow", [False, True])
async def test_messages_that_are_there_are_read_before_others_have_their_turn(
    monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    """One for each turn of the loop fell seconds behind two engines, whose streams took longer than their steps. At
    most for a time, which others wait."""
    client = EngineClient(demo_config(), lambda outputs: None, lambda error: None)
    if is_slow:
        monkeypatch.setattr(frontend_client, "RECEIVE_S", -1.0)
    taken: list[tuple[int, bytes]] = []
    turn = 0
    with monkeypatch.context() as patch:
        patch.setattr(client, "_socket", FullSocket(5))
        patch.setattr(client, "_take", lambda data: taken.append((turn, data)))
        receiving = asyncio.create_task(client._receive())
        for turn in range(12):  # noqa: B007  # what is taken says which
            await asyncio.sleep(0)
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
    await client.stop()
    assert [data for _, data in taken] == [b"0", b"1", b"2", b"3", b"4"]
    assert len({turn for turn, _ in taken}) == (5 if is_slow else 1)


async def test_an_end_that_is_called_off_leaves_nothing_either(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ctrl-C again, while the process that was killed is waited for."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    client = EngineClient(demo_config(), lambda outputs: None, lambda error: None)
    starting = asyncio.create_task(client.start())
    await until(lambda: client.pid is not None)
    pid = client.pid
    assert pid is not None
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    assert list(tmp_path.iterdir())
    stopping = asyncio.create_task(client.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await within(stopping)
    assert list(tmp_path.iterdir()) == []
    await until(lambda: not is_running(pid))


# -------------------------------------------------------------------------------------------------------------- orphans

PARENT = """
import asyncio, sys, tempfile
from tests.frontend.processes import Client, demo_config, first
from loraplex.frontend.async_engine import AsyncEngine

async def main():
    tempfile.tempdir = sys.argv[1]
    engine = await AsyncEngine.start(demo_config())
    stream = Client(engine).long()
    await first(stream)
    print(engine.engine_pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_an_engine_does_not_outlive_its_parent(tmp_path: Path) -> None:
    """Killed, so that it can tidy nothing up: the engine notices by itself, and no folder is left either.

    Both run in a directory with a file that looks like a module: neither may import it.
    """
    folder, directory = tmp_path / "t", tmp_path / "cwd"
    folder.mkdir()
    directory.mkdir()
    (directory / "zmq.py").write_text("raise RuntimeError('not this one')")
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", PARENT, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(await within(asyncio.to_thread(parent.stdout.readline)))
    assert is_running(pid)
    parent.kill()
    parent.wait()
    await until(lambda: not is_running(pid))
    assert list(folder.iterdir()) == []
