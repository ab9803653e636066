"""What ends a process of its own ends its question alone. Signals from outside: `text/test_adapter_text.py`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from loraplex.errors import InvalidRequestError
from loraplex.processes import bounded
from loraplex.processes.bounded import NUM_PROCESSES, BoundedProcesses
from loraplex.processes.fair_turns import working_for
from tests.processes.bounded_work import WORK


@pytest.fixture
def processes() -> Iterator[BoundedProcesses]:
    processes = BoundedProcesses(WORK)
    yield processes
    processes.close()


def test_a_process_answers_many_questions(processes: BoundedProcesses) -> None:
    assert processes.ask({"a": [1, 2.5, None]}) == b"{'a': [1, 2.5, None]}"
    assert processes.ask("") == b""
    assert processes.ask("pid") == processes.ask("pid")


def test_a_signal_to_all_processes_of_a_service_is_the_servers(processes: BoundedProcesses) -> None:
    pid = processes.ask("pid")
    assert pid is not None
    for which in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(int(pid), which)
    assert processes.ask("pid") == pid


@pytest.mark.parametrize("question", ["abort", "read address 0", "loop", "allocate", "fail", "write too much"])
def test_what_ends_a_process_ends_its_question_alone(question: str, processes: BoundedProcesses) -> None:
    pid = processes.ask("pid")
    assert processes.ask(question) is None
    assert processes.ask("pid") not in (pid, None)


def test_costly_questions_of_a_tenant_leave_a_process_to_others(processes: BoundedProcesses) -> None:
    """32 loads of one tenant, each with a template that costs the most it may, held up another's chats for 25 s."""
    num_begun, lock = 0, threading.Lock()

    def ask_costly() -> None:
        nonlocal num_begun
        with working_for("acme"):
            for _ in range(2):
                with lock:
                    num_begun += 1
                assert processes.ask("loop") is None

    threads = [threading.Thread(target=ask_costly) for _ in range(8)]
    for thread in threads:
        thread.start()
    with working_for("beta"):
        for number in range(4):
            before = num_begun
            assert processes.ask(number) == f"{number}".encode()
            assert num_begun - before <= 2
    for thread in threads:
        thread.join()


def test_beside_requests_all_processes_work(processes: BoundedProcesses) -> None:
    meet = threading.Barrier(NUM_PROCESSES)

    def ask(process: Any, data: bytes) -> bytes:
        meet.wait(30)
        return b"t"

    with mock.patch.object(bounded._Process, "ask", ask):
        threads = [threading.Thread(target=processes.ask, args=("x",)) for _ in range(NUM_PROCESSES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert meet.n_waiting == 0
    assert not meet.broken


def test_a_refusal_is_told(processes: BoundedProcesses) -> None:
    pid = processes.ask("pid")
    with pytest.raises(InvalidRequestError, match="the reason") as raised:
        processes.ask("refuse")
    assert raised.value.param == "field"
    assert processes.ask("pid") == pid
