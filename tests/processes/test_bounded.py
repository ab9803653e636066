"""What ends a process of its own ends its question alone. Signals from outside: `text/test_adapter_text.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loraplex.errors import InvalidRequestError
from loraplex.processes.bounded import BoundedProcesses
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


@pytest.mark.parametrize("question", ["abort", "read address 0", "loop", "allocate", "fail", "write too much"])
def test_what_ends_a_process_ends_its_question_alone(question: str, processes: BoundedProcesses) -> None:
    pid = processes.ask("pid")
    assert processes.ask(question) is None
    assert processes.ask("pid") not in (pid, None)


def test_a_refusal_is_told(processes: BoundedProcesses) -> None:
    pid = processes.ask("pid")
    with pytest.raises(InvalidRequestError, match="the reason") as raised:
        processes.ask("refuse")
    assert raised.value.param == "field"
    assert processes.ask("pid") == pid
