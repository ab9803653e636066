"""Log lines: one form for all loggers, on stderr, one line for one record whatever a client sent.

Names, paths and error texts come from clients. A line break in one would make a line of its own, an escape sequence
would be obeyed by the operator's terminal: every character that is not printable is written as Python writes it (`\\n`,
`\\x1b`).

A pipe that is full blocks what writes to it: the event loop, with every connection and the signals that end the
process. So a line is written at once where the stream takes it, as it nearly always does; else it waits in memory for a
thread that does block. What waits is bounded: lines past the bound are dropped, and a later line says how many.

A line that is written for a request names it: what a task writes by its `request_context`, what another process writes
by the field `request_id` of the record.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TextIO

from loraplex.errors import without_keys

MAX_CHARS = 4096
"""Of a message; the rest is cut off."""

MAX_PATH_CHARS = 256
"""Of a path, and of each name of a request."""

MAX_TRACEBACK_CHARS = 16_384
"""Of its end, which says what was wrong."""

AT_ONCE_BYTES = select.PIPE_BUF
"""A pipe that can be written to takes so many bytes without blocking."""

MAX_WAITING_BYTES = 1 << 20

FORMATS = ("text", "json")

_LOGGERS = ("loraplex", "uvicorn")
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb]"
)
_ACCESS = "uvicorn.access"


@dataclass(slots=True)
class RequestContext:
    """The request that a line is about; "" where it is not known. adapter: as registered. client: its tenant, its key's
    fingerprint, or its address: in whose turn work for it is done."""

    request_id: str
    tenant: str = ""
    adapter: str = ""
    client: str = ""


request_context: ContextVar[RequestContext | None] = ContextVar("request_context", default=None)
"""Of the task or thread that writes a line; None beside requests."""


def escaped(text: str) -> str:
    """On one line, without anything that changes how the line looks."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class LineFormatter(logging.Formatter):
    """`2026-01-31T09:30:00.125Z INFO loraplex.server: message [request id]`; lines of a traceback follow, indented."""

    def format(self, record: logging.LogRecord) -> str:
        request_id = _fields_of(record).get("request_id", "")
        of_request = f" [{request_id}]" if request_id else ""
        head = f"{_time_of(record)} {record.levelname} {_name_of(record)}: {_message_of(record)}{of_request}"
        trace = _traceback_of(self, record)
        lines = trace.split("\n") if trace else []
        return "\n".join([head, *(f"    {escaped(line)}" for line in lines)])


class JsonFormatter(logging.Formatter):
    """The same as one JSON object a line: time, level, logger, message, and where they are known request_id, tenant,
    adapter and exception. Of an answer also client, method, path and status."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, str | int] = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "logger": _name_of(record),
            "message": _message_of(record),
            **_fields_of(record),
        }
        if (access := _access_of(record)) is not None:
            names = ("client", "method", "path", "status")
            fields |= dict(zip(names, (*access[:3], access[4]), strict=True))
        if trace := _traceback_of(self, record):
            fields["exception"] = trace
        return json.dumps(fields)


class PatientHandler(logging.Handler):
    """Of one stream. Without a file descriptor, as in tests, lines are written as StreamHandler does."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._waiting: deque[bytes] = deque()
        self._num_bytes = self._num_dropped = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._poll = _poll_of(stream)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record) + "\n"
            if self._poll is None:
                self._stream.write(text)
                self._stream.flush()
                return
            self._put(text.encode(self._stream.encoding or "utf-8", "backslashreplace"))
        except Exception:
            self.handleError(record)

    def flush_within(self, seconds: float) -> None:
        """Give what waits so long to be written."""
        ends_s = time.monotonic() + seconds
        with self._changed:
            while self._waiting and (left_s := ends_s - time.monotonic()) > 0:
                self._changed.wait(left_s)

    def _put(self, line: bytes) -> None:
        with self._changed:
            if not self._waiting:
                line = self._written(line)
            if not line:
                return
            self._start_writer()
            if self._num_bytes + len(line) > MAX_WAITING_BYTES:
                self._num_dropped += 1
                return
            self._waiting.append(line)
            self._num_bytes += len(line)
            self._changed.notify_all()

    def _start_writer(self) -> None:
        """The next line tries again where the system has no thread for it."""
        if self._thread is None:
            thread = threading.Thread(target=self._write_waiting, name="log", daemon=True)
            with suppress(RuntimeError):
                thread.start()
                self._thread = thread

    def _written(self, line: bytes) -> bytes:
        """Write what the stream takes at once; the rest."""
        assert self._poll is not None
        while line and any(event & select.POLLOUT for _, event in self._poll.poll(0)):
            line = line[os.write(self._stream.fileno(), line[:AT_ONCE_BYTES]) :]
        return line

    def _write_waiting(self) -> None:
        """In its thread, to the end of the process. What a stream that is gone would get is lost."""
        poll = _poll_of(self._stream)
        assert poll is not None
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                line = self._waiting[0]
            try:
                poll.poll()
                rest = line[os.write(self._stream.fileno(), line[:AT_ONCE_BYTES]) :]
            except (OSError, ValueError):
                rest = b""
            with self._changed:
                self._num_bytes -= len(line) - len(rest)
                if rest:
                    self._waiting[0] = rest
                    continue
                self._waiting.popleft()
                if not self._waiting and self._num_dropped:
                    note = f"{self._num_dropped} lines of the log were dropped: its reader did not keep up\n".encode()
                    self._num_dropped = 0
                    self._waiting.append(note)
                    self._num_bytes += len(note)
                self._changed.notify_all()


def _poll_of(stream: TextIO) -> select.poll | None:
    try:
        number = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    return poll


def configure(level: str, form: str = "text", *, with_root: bool = False) -> None:
    """Write the records of this program to stderr. with_root: those of other packages too, from warnings on."""
    handler = PatientHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else LineFormatter())
    for name in (*_LOGGERS, *([None] if with_root else [])):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = name is None
        logger.setLevel(level.upper() if name else logging.WARNING)
    if form == "json" and with_root:
        _log_stray_lines()
    if level != "debug":
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # its news of start and end are ours to tell


def flush_within(seconds: float) -> None:
    """Give lines that wait for a slow reader so long, for the process is to end."""
    for handler in logging.getLogger(_LOGGERS[0]).handlers:
        if isinstance(handler, PatientHandler):
            handler.flush_within(seconds)


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line for people, on stdout or an error on `stream`; as a JSON object where lines have that form."""
    if _has_json_lines():
        level = logging.INFO if stream is None else logging.ERROR
        text = JsonFormatter().format(logging.LogRecord(_LOGGERS[0], level, "", 0, "%s", (text,), None))
    print(text, file=stream, flush=True)


def write_any_text(*streams: TextIO) -> None:
    """Escape what a stream's encoding does not have: names may be in any script, and the terminal's may be ASCII."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def printable(line: str) -> str:
    """For the terminal, which would obey orders in a text: names in an adapter's file may hold some."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)


def arguments() -> list[str]:
    """For the command line of a process that should log as this one does: its warnings, or everything."""
    logger = logging.getLogger(_LOGGERS[0])
    if not logger.handlers or not isinstance(logger.handlers[0].formatter, LineFormatter | JsonFormatter):
        return []
    level = logging.DEBUG if logger.level <= logging.DEBUG else max(logger.level, logging.WARNING)
    return [logging.getLevelName(level).lower(), FORMATS[_has_json_lines()]]


def configure_from(given: Sequence[str]) -> None:
    """What `arguments` of another process says."""
    write_any_text(sys.stderr)
    if given:
        configure(given[0], given[1], with_root=True)


def _has_json_lines() -> bool:
    handlers = logging.getLogger(_LOGGERS[0]).handlers
    return bool(handlers) and isinstance(handlers[0].formatter, JsonFormatter)


def _log_stray_lines() -> None:
    """Python would write warnings, and the tracebacks of threads and of the process, as plain text."""
    logging.captureWarnings(True)
    log = logging.getLogger("loraplex.process")

    def of_thread(given: threading.ExceptHookArgs) -> None:
        if given.exc_type is not SystemExit:
            error = given.exc_value or given.exc_type()
            log.error("a thread ended: %s", given.exc_type.__name__, exc_info=error)

    def of_finalizer(given: sys.UnraisableHookArgs) -> None:
        log.error("%s: %r", given.err_msg or "an exception was ignored", given.object, exc_info=given.exc_value)

    threading.excepthook = of_thread
    sys.unraisablehook = of_finalizer
    sys.excepthook = lambda kind, error, trace: log.critical("the process ends", exc_info=(kind, error, trace))


def _time_of(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _name_of(record: logging.LogRecord) -> str:
    return {_ACCESS: "access", "uvicorn.error": "uvicorn"}.get(record.name, record.name)


def _message_of(record: logging.LogRecord) -> str:
    access = _access_of(record)
    text = '{} "{} {} HTTP/{}" {}'.format(*access) if access is not None else without_keys(record.getMessage())
    text = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}... ({len(text)} characters)"
    return escaped(text)


def _traceback_of(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """The end of it; "" where there is none."""
    return without_keys(formatter.formatException(record.exc_info))[-MAX_TRACEBACK_CHARS:] if record.exc_info else ""


def _fields_of(record: logging.LogRecord) -> dict[str, str]:
    """Of the request that it is about: as the record says, else as the task is."""
    context, of_record = request_context.get(), getattr(record, "request_id", "")
    known = {"request_id": of_record}
    if context is not None and not of_record:
        known = {"request_id": context.request_id, "tenant": context.tenant, "adapter": context.adapter}
    return {name: escaped(without_keys(value)[:MAX_PATH_CHARS]) for name, value in known.items() if value}


def _access_of(record: logging.LogRecord) -> tuple[str, str, str, str, int] | None:
    """Client, method, path, version and status of an answer. Without the query, which may hold what is secret."""
    if record.name != _ACCESS or not isinstance(record.args, tuple) or len(record.args) != 5:
        return None
    client, method, target, version, status = record.args
    path = without_keys(str(target).partition("?")[0])
    shown = path if len(path) <= MAX_PATH_CHARS else f"{path[:MAX_PATH_CHARS]}..."
    return str(client), str(method), escaped(shown), str(version), int(str(status))
