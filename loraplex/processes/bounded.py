"""Work that a stranger's data can make costly or fatal, in processes of its own: `BoundedProcesses` here,
`answer_questions` over there.

The limits of a process bound what a question costs: CPU time by a timer of the kernel that ends the process in the
middle of any call, memory by RLIMIT_AS. A process that was ended, or that failed, is started again by the next
question. One that others end is no fault of the question, which is asked once more; one that does not answer, because
it is stopped say, is ended.

A message on either pipe is its length in 8 bytes, then its data. A question is plain data (`marshal`: this side wrote
it). An answer comes from where a stranger's data was: one letter, `t` for a text and `e` for an error, in capitals
where the process ends with it, and UTF-8 with surrogates. A process ends when its input does, and after a question that
left much memory in it: the limit is for each one.
"""

from __future__ import annotations

import marshal
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from loraplex.errors import InvalidRequestError, LoraplexError
from loraplex.processes.environment import OUTSIDE_SIGNALS, child_environment, leave_to_parent
from loraplex.processes.fair_turns import FairTurns

NUM_PROCESSES = 2
NICENESS = 10
END_S = 1.0
"""From the end of its answers to the end of the process; one that wrote too much goes on."""

_LENGTH_BYTES = 8


@dataclass(frozen=True)
class BoundedWork:
    """What the processes are for, and what one question may cost.

    name: in messages, "the process for {name}". module: whose `main` calls `answer_questions`. answer_s: of time that
    passes, with the start of the process: at its priority it may get a tenth of a core. growth_bytes: of address space,
    beside what the process has when it starts. kept_bytes: of them, what it may have kept when it takes the next
    question. busy, unavailable: the errors when no process can be started, and when others ended it or it does not
    answer.
    """

    name: str
    module: str
    cpu_s: float
    answer_s: float
    growth_bytes: int
    kept_bytes: int
    answer_bytes: int
    busy: type[LoraplexError]
    unavailable: type[LoraplexError]


class BoundedProcesses:
    """Any thread may call it, and waits where all processes are busy, or one is with a question of the same client. The
    first question starts a process."""

    def __init__(self, work: BoundedWork) -> None:
        self._work = work
        self._turns = FairTurns(NUM_PROCESSES, most_of_a_client=1, most_without_client=NUM_PROCESSES)
        self._idle: queue.LifoQueue[_Process] = queue.LifoQueue()
        self._all = [_Process(work) for _ in range(NUM_PROCESSES)]
        for process in self._all:
            self._idle.put(process)
        self.close = weakref.finalize(self, _end_all, self._all)

    def ask(self, question: Any) -> bytes | None:
        """The text. None: it cost too much, or ended the process.

        Raises InvalidRequestError for an answer that is an error, and the work's own errors when it is not the
        question's fault.
        """
        data = marshal.dumps(question)
        with self._turns.own():
            process = self._idle.get()
            try:
                answer = process.ask(data)
                if isinstance(answer, signal.Signals):
                    answer = process.ask(data)
            finally:
                self._idle.put(process)
        if isinstance(answer, signal.Signals):
            text = f"the process for {self._work.name} was killed by {answer.name} from outside, twice"
            raise self._work.unavailable(f"{text}; is there memory enough for it? Come again")
        if answer is None:
            return None
        kind, told = answer[:1], answer[1:]
        if kind in b"eE":
            param, _, message = told.decode(errors="replace").partition("\n")
            raise InvalidRequestError(message, param=param or None)
        return told


class _Process:
    """One of them, for one caller at a time."""

    def __init__(self, work: BoundedWork) -> None:
        self._work = work
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, data: bytes) -> bytes | signal.Signals | None:
        """None: a limit ended the process, or it wrote too much, or what no answer is. A signal: it was killed from
        outside. Raises the work's errors when it cannot be started, or does not answer in time."""
        until_s = time.monotonic() + self._work.answer_s
        try:
            process = self._running()
            limit = threading.Timer(self._work.answer_s, process.kill)
            limit.daemon = True
            limit.start()
        except (OSError, RuntimeError) as error:  # no descriptor, no memory, no process, no thread is left
            reason = f"the process for {self._work.name} could not be started ({error}): come again"
            raise self._work.busy(reason) from error
        answer: bytes | None = None
        code: int | None = None
        try:
            answer = _told(process, data, self._work.answer_bytes)
            if answer is None:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(END_S)
        finally:
            limit.cancel()
            # None also of a caller that was interrupted: the next one must not read this one's answer
            if answer is None or answer[:1].isupper():
                self.end()
        if code == -signal.SIGKILL and time.monotonic() >= until_s:
            text = f"the process for {self._work.name} did not answer within {self._work.answer_s:g} s"
            raise self._work.unavailable(f"{text}, and was ended; is it stopped, or the machine too busy? Come again")
        return signal.Signals(-code) if code is not None and -code in OUTSIDE_SIGNALS else answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.end()
            self._process = start(self._work.module)
        return self._process

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with suppress(OSError):
                process.communicate()


def _end_all(processes: list[_Process]) -> None:
    for process in processes:
        process.end()


def start(module: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        env={**child_environment(), "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _told(process: subprocess.Popen[bytes], question: bytes, most_bytes: int) -> bytes | None:
    """None also when the process ended meanwhile."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(OSError):
        _write(process.stdin, question)
        return _read(process.stdout, most_bytes)
    return None


def _write(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(_LENGTH_BYTES, "little"))
    pipe.write(data)
    pipe.flush()


def _read(pipe: IO[bytes], most_bytes: int) -> bytes | None:
    """None at the end, or for a message that is too long."""
    length = int.from_bytes(pipe.read(_LENGTH_BYTES), "little")
    data = pipe.read(length) if 0 < length <= most_bytes else b""
    return data if data and len(data) == length else None


# ------------------------------------------------------------------------------------------------- in the process


def answer_questions(work: BoundedWork, answer: Callable[[Any], str]) -> None:
    """Until the input ends. answer: a text, or it raises InvalidRequestError."""
    own_bytes = _address_space()
    _limit(own_bytes + work.growth_bytes)
    os.nice(NICENESS)  # it does not keep a core from the server
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    leave_to_parent()
    is_full = False
    while not is_full and (data := _read(sys.stdin.buffer, sys.maxsize)) is not None:
        signal.setitimer(signal.ITIMER_PROF, work.cpu_s)
        told = _told_of(answer, marshal.loads(data)).encode("utf-8", "surrogatepass")
        signal.setitimer(signal.ITIMER_PROF, 0)
        is_full = _address_space() - own_bytes - 2 * len(told) > work.kept_bytes
        _write(sys.stdout.buffer, (told[:1].upper() if is_full else told[:1]) + told[1:])


def _told_of(answer: Callable[[Any], str], question: Any) -> str:
    try:
        return "t" + answer(question)
    except InvalidRequestError as error:
        return f"e{error.param or ''}\n{error.message[:2000]}"


def _address_space() -> int:
    """Bytes; 0 where the system does not say."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/statm", encoding="ascii") as sizes:
        return int(sizes.read().split()[0]) * resource.getpagesize()
    return 0


def _limit(most_bytes: int) -> None:
    """Memory, and no files, and no processes. A system that has not one of the limits goes without it."""
    limits = {"RLIMIT_AS": most_bytes, "RLIMIT_FSIZE": 0, "RLIMIT_NPROC": 0, "RLIMIT_CORE": 0}
    for name, most in limits.items():
        with suppress(OSError, ValueError, AttributeError):
            resource.setrlimit(getattr(resource, name), (most, most))
