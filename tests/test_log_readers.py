"""Lines of the log to a stream whose reader is slow, stopped or gone: a caller never waits."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO
from unittest import mock

import pytest

from loraplex import logs
from loraplex.logs import AT_ONCE_BYTES, PatientHandler


@contextmanager
def pipe() -> Iterator[tuple[int, PatientHandler, TextIO]]:
    """(where it is read, a handler that writes to it, its stream)"""
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream:
        yield read, PatientHandler(stream), stream


def log(handler: PatientHandler, text: str) -> None:
    handler.handle(logging.LogRecord("loraplex", logging.INFO, "", 0, text, None, None))


def fill(handler: PatientHandler) -> None:
    """Until the pipe is full and lines wait."""
    while not handler._waiting:
        log(handler, "x" * 1000)


def read_all(number: int, until: bytes) -> bytes:
    found = b""
    while until not in found:
        found += os.read(number, 1 << 16)
    return found


def test_a_line_is_written_at_once() -> None:
    with pipe() as (read, handler, _):
        log(handler, "one ☃")
        assert os.read(read, 100) == "one ☃\n".encode()
        assert handler._thread is None
        os.close(read)


def test_lines_wait_for_the_reader_and_come_in_their_order() -> None:
    with pipe() as (read, handler, _):
        fill(handler)
        for number in range(5):
            log(handler, f"line {number} {'y' * 3 * AT_ONCE_BYTES}")
        lines = read_all(read, b"line 4").decode().split("\n")
        assert [line[:6] for line in lines if line.startswith("line")] == [f"line {number}" for number in range(5)]
        os.close(read)


def test_what_is_too_much_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_WAITING_BYTES", 5000)
    with pipe() as (read, handler, _):
        fill(handler)
        for number in range(20):
            log(handler, f"line {number} {'y' * 1000}")
        assert handler._num_bytes <= 5000
        found = read_all(read, b"were dropped")
        dropped = 20 - found.count(b"\nline ")
        assert f"{dropped} lines of the log were dropped".encode() in found
        log(handler, "afterwards")
        assert b"afterwards" in read_all(read, b"afterwards")
        os.close(read)


def test_lines_that_waited_without_a_thread_are_written_by_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the system had refused counted as there, and no line was written any more."""
    monkeypatch.setattr(logs, "MAX_WAITING_BYTES", 5000)
    with pipe() as (read, handler, _):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
            fill(handler)
            for number in range(20):
                log(handler, f"line {number} {'y' * 1000}")
            assert handler._thread is None
        log(handler, "afterwards")
        assert b"\nline 0 " in read_all(read, b"were dropped")
        os.close(read)


def test_a_reader_that_is_gone_costs_lines_alone() -> None:
    with pipe() as (read, handler, _):
        fill(handler)
        os.close(read)
        handler.flush_within(5)
        log(handler, "unread")
        handler.flush_within(5)
        assert not handler._waiting


def test_the_end_of_a_process_waits_a_moment_for_a_stopped_reader() -> None:
    with pipe() as (read, handler, _):
        fill(handler)
        began_s = time.monotonic()
        handler.flush_within(0.05)
        assert time.monotonic() - began_s >= 0.05
        assert handler._waiting
        os.close(read)
        handler.flush_within(5)


def test_a_stream_without_a_descriptor_is_written_to() -> None:
    stream = io.StringIO()
    log(PatientHandler(stream), "one")
    assert stream.getvalue() == "one\n"


def test_a_process_logs_and_ends_though_its_log_is_not_read() -> None:
    program = (
        "import logging, os; from loraplex import logs; logs.configure('info'); log = logging.getLogger('loraplex')\n"
        "for number in range(5000): log.info('line %d', number)\n"
        "print('done', flush=True); logs.flush_within(0.1); os._exit(0)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == b"done\n"
    assert process.wait(30) == 0
    lines = process.stderr.read().split(b"\n")
    assert lines[0].endswith(b"line 0")
    process.stdout.close()
    process.stderr.close()
