"""A process that is made before what speaks with it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from loraplex.errors import ConfigError
from loraplex.frontend.client import EngineClient
from loraplex.processes.engine_child import EngineChild
from loraplex.server import ServerConfig, run_server
from tests.frontend.holding_process import MODULE
from tests.frontend.processes import demo_config


def is_there(pid: int | None) -> bool:
    return pid is not None and psutil.pid_exists(pid)


async def test_a_client_takes_a_process_that_was_made_before() -> None:
    child = EngineChild()
    child.make()
    pid = child.pid
    client = EngineClient(demo_config(), lambda outputs: None, lambda error: None, child=child)
    try:
        await client.start()
        assert client.pid == pid
    finally:
        await client.stop()
    assert not is_there(pid)
    assert not child.folder.exists()


def test_its_end_leaves_nothing_and_a_second_one_neither() -> None:
    child = EngineChild(MODULE)
    child.make()
    child.make()
    assert is_there(child.pid)
    child.end()
    child.end()
    assert (is_there(child.pid), child.is_over, child.folder.exists()) == (False, True, False)


async def test_each_that_waits_gets_the_exit_code() -> None:
    child = EngineChild(MODULE)
    child.make()
    assert child.pid is not None
    try:
        os.kill(child.pid, signal.SIGKILL)
        assert [await child.wait(), await child.wait()] == [-signal.SIGKILL] * 2
    finally:
        child.end()


@pytest.mark.parametrize("num_refused", [1, 2])
async def test_it_is_waited_for_where_the_system_has_no_thread(
    monkeypatch: pytest.MonkeyPatch, num_refused: int
) -> None:
    """Each later wait was for a future that was never set."""
    child, refused, start = EngineChild(MODULE), list[str](), threading.Thread.start

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name == "engine-end" and len(refused) < num_refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    child.make()
    try:
        first = asyncio.ensure_future(child.wait())
        await asyncio.sleep(0)
        child.kill()
        assert [await first, await child.wait()] == [-signal.SIGKILL] * 2
        assert len(refused) == num_refused
    finally:
        child.end()


def test_a_server_that_cannot_start_ends_it(capfd: pytest.CaptureFixture[str]) -> None:
    child = EngineChild(MODULE)

    async def start() -> None:
        raise AssertionError("it came this far")

    assert run_server(start, ServerConfig(host="203.0.113.1", port=1), child=child) == 1  # type: ignore[arg-type]
    assert "203.0.113.1" in capfd.readouterr().err
    assert (child.is_made, child.is_over, child.folder.exists()) == (True, True, False)


async def test_a_path_that_is_too_long_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    child = EngineChild()
    child.make()
    assert await child.wait() == 1
    with pytest.raises(ConfigError, match="its path has"):
        EngineClient(demo_config(), lambda outputs: None, lambda error: None, child=child)
    assert capfd.readouterr().err == ""
