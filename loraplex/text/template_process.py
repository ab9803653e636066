"""Chat templates of adapters, rendered in processes of their own: `TemplateProcesses` here, `main` over there.

A template is a program, and an adapter's comes from a stranger. The sandbox of `chat_template` bounds what it reaches;
the limits of the process bound what it costs: CPU time by a timer of the kernel that ends the process in the middle of
any call, memory by RLIMIT_AS. A process that was ended is started again by the next render. One that others end is no
fault of the template, which is rendered once more; one that does not answer, because it is stopped say, is ended.

A message on either pipe is its length in 8 bytes, then its data. A question is plain data (`marshal`: this side wrote
it). An answer comes from where a stranger's program runs: one letter, `t` for a text and `e` for an error, in capitals
where the process ends with it, and UTF-8, which is decoded piece by piece, because one call would keep the interpreter
from other threads. A process ends when its input does, and after a template that left much memory in it: the limit is
for each one.
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
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any

from loraplex.environment import OUTSIDE_SIGNALS, child_environment
from loraplex.errors import AdapterBusyError, AdapterUnavailableError, InvalidRequestError, shown
from loraplex.text.chat_template import Json, check_template, render_chat, render_open_chat
from loraplex.text.utf8 import decode_in_pieces

MAX_RENDER_CPU_S = 2.0
MAX_RENDER_S = 30.0
"""Of time that passes, with the start of the process: at its priority it may get a tenth of a core."""

MAX_RENDER_BYTES = 2**29
"""Of address space beside what the process has when it starts."""
MAX_TEXT_BYTES = 2**25
MAX_KEPT_BYTES = 2**26
"""Of them, what a process may have kept when it takes the next question: compiled templates, and what they hold."""

NUM_PROCESSES = 2
NICENESS = 10
END_S = 1.0
"""From the end of its answers to the end of the process; one that wrote too much goes on."""

_LENGTH_BYTES = 8


class TemplateProcesses:
    """Any thread may call it, and waits where all processes are busy. The first render starts a process."""

    def __init__(self) -> None:
        self._idle: queue.LifoQueue[_Process] = queue.LifoQueue()
        self._all = [_Process() for _ in range(NUM_PROCESSES)]
        for process in self._all:
            self._idle.put(process)
        self.close = weakref.finalize(self, _end_all, self._all)

    def check(self, templates: Mapping[str, str]) -> None:
        """Raises InvalidRequestError for one that cannot be compiled; all together have the time of one render."""
        self._ask({"templates": dict(templates)})

    def render(self, source: str, variables: Mapping[str, Json], is_open: bool = False) -> str:
        """`render_chat`, or `render_open_chat`; also raises InvalidRequestError for a template that costs too much."""
        return self._ask({"source": source, "variables": dict(variables), "is_open": is_open})

    def _ask(self, question: dict[str, Json]) -> str:
        data = marshal.dumps(question)
        process = self._idle.get()
        try:
            answer = process.ask(data)
            if isinstance(answer, signal.Signals):
                answer = process.ask(data)
        finally:
            self._idle.put(process)
        if isinstance(answer, signal.Signals):
            text = f"the process for chat templates of adapters was killed by {answer.name} from outside, twice"
            raise AdapterUnavailableError(f"{text}; is there memory enough for it? Come again")
        if answer is None:
            raise InvalidRequestError(
                f"the chat template of this adapter needs more than {MAX_RENDER_CPU_S:g} s or too much memory, and was "
                "ended: correct it in the adapter's directory",
                param="messages",
            )
        kind, text = answer
        if kind in b"eE":
            param, _, message = text.partition("\n")
            raise InvalidRequestError(message, param=param or None)
        return text


class _Process:
    """One of them, for one caller at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, data: bytes) -> tuple[bytes, str] | signal.Signals | None:
        """None: a limit ended the process, or it wrote too much, or what no answer is. A signal: it was killed from
        outside. Raises AdapterUnavailableError when it does not answer in time."""
        until_s = time.monotonic() + MAX_RENDER_S
        try:
            process = self._running()
            limit = threading.Timer(MAX_RENDER_S, process.kill)
            limit.daemon = True
            limit.start()
        except (OSError, RuntimeError) as error:  # no descriptor, no memory, no process, no thread is left
            reason = f"the process for chat templates of adapters could not be started ({error}): come again"
            raise AdapterBusyError(reason) from error
        answer: tuple[bytes, str] | None = None
        code: int | None = None
        try:
            told = _told(process, data)
            if told is not None:
                answer = told[:1], decode_in_pieces(told, start=1, errors="surrogatepass")
            else:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(END_S)
        except ValueError:
            pass
        finally:
            limit.cancel()
            # None also of a caller that was interrupted: the next one must not read this one's answer
            if answer is None or answer[0].isupper():
                self.end()
        if code == -signal.SIGKILL and time.monotonic() >= until_s:
            text = f"the process for chat templates of adapters did not answer within {MAX_RENDER_S:g} s"
            raise AdapterUnavailableError(f"{text}, and was ended; is it stopped, or the machine too busy? Come again")
        return signal.Signals(-code) if code is not None and -code in OUTSIDE_SIGNALS else answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.end()
            self._process = _start()
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


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__],
        env={**child_environment(), "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _told(process: subprocess.Popen[bytes], question: bytes) -> bytes | None:
    """None also when the process ended meanwhile."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(OSError):
        _write(process.stdin, question)
        return _read(process.stdout)
    return None


def _write(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(_LENGTH_BYTES, "little"))
    pipe.write(data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes | None:
    """None at the end, or for a message that is too long."""
    length = int.from_bytes(pipe.read(_LENGTH_BYTES), "little")
    data = pipe.read(length) if 0 < length <= MAX_TEXT_BYTES else b""
    return data if data and len(data) == length else None


# ------------------------------------------------------------------------------------------------- in the process


def main() -> None:
    own_bytes = _address_space()
    _limit(own_bytes)
    os.nice(NICENESS)  # it does not keep a core from the server
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    is_full = False
    while not is_full and (data := _read(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_PROF, MAX_RENDER_CPU_S)
        answer = _answer(marshal.loads(data)).encode("utf-8", "surrogatepass")
        signal.setitimer(signal.ITIMER_PROF, 0)
        is_full = _address_space() - own_bytes - 2 * len(answer) > MAX_KEPT_BYTES
        _write(sys.stdout.buffer, (answer[:1].upper() if is_full else answer[:1]) + answer[1:])


def _address_space() -> int:
    """Bytes; 0 where the system does not say."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/statm", encoding="ascii") as sizes:
        return int(sizes.read().split()[0]) * resource.getpagesize()
    return 0


def _limit(own_bytes: int) -> None:
    """Memory, and no files, and no processes. A system that has not one of the limits goes without it."""
    limits = {"RLIMIT_AS": own_bytes + MAX_RENDER_BYTES, "RLIMIT_FSIZE": 0, "RLIMIT_NPROC": 0, "RLIMIT_CORE": 0}
    for name, most in limits.items():
        with suppress(OSError, ValueError, AttributeError):
            resource.setrlimit(getattr(resource, name), (most, most))


def _answer(question: Mapping[str, Any]) -> str:
    try:
        if "templates" in question:
            return _check(question["templates"])
        render = render_open_chat if question["is_open"] else render_chat
        return "t" + render(question["source"], question["variables"])
    except InvalidRequestError as error:
        return f"e{error.param or ''}\n{error.message[:2000]}"


def _check(templates: Mapping[str, str]) -> str:
    for name, source in templates.items():
        try:
            check_template(source)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"chat template {shown(name)}: {error.message}", param=error.param) from error
    return "t"


if __name__ == "__main__":
    main()
