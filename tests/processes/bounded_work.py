"""What a process of `BoundedProcesses` does in `test_bounded`: run as a module."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from loraplex.errors import EngineOverloadedError, EngineTimeoutError, InvalidRequestError
from loraplex.processes.bounded import BoundedWork, answer_questions

WORK = BoundedWork(
    name="tests",
    module="tests.processes.bounded_work",
    cpu_s=0.5,
    answer_s=60.0,
    growth_bytes=2**28,
    kept_bytes=2**24,
    answer_bytes=2**20,
    busy=EngineOverloadedError,
    unavailable=EngineTimeoutError,
)


def answer(question: Any) -> str:
    match question:
        case "pid":
            return str(os.getpid())
        case "abort":
            os.abort()
        case "read address 0":
            return str(ctypes.string_at(0))
        case "loop":
            while True:
                pass
        case "allocate":
            return str(len(bytearray(2**30)))
        case "fail":
            raise RuntimeError("unforeseen")
        case "write too much":
            return "x" * 2**21
        case "refuse":
            raise InvalidRequestError("the reason", param="field")
    return str(question)


if __name__ == "__main__":
    answer_questions(WORK, answer)
