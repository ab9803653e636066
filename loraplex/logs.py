"""Log lines: one form for all loggers, on stderr, one line for one record whatever a client sent.

Names, paths and error texts come from clients. A line break in one would make a line of its own, an escape sequence
would be obeyed by the operator's terminal: every character that is not printable is written as Python writes it (`\\n`,
`\\x1b`).
"""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import time
from collections.abc import Sequence
from typing import TextIO

MAX_CHARS = 4096
"""Of a message; the rest is cut off."""

MAX_PATH_CHARS = 256

FORMATS = ("text", "json")

_LOGGERS = ("loraplex", "uvicorn")
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb]"
)
_ACCESS = "uvicorn.access"


def escaped(text: str) -> str:
    """On one line, without anything that changes how the line looks."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class LineFormatter(logging.Formatter):
    """`2026-01-31T09:30:00.125Z INFO loraplex.server: message`; the lines of a traceback follow, each indented."""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_time_of(record)} {record.levelname} {_name_of(record)}: {_message_of(record)}"
        lines = [] if not record.exc_info else self.formatException(record.exc_info).split("\n")
        return "\n".join([head, *(f"    {escaped(line)}" for line in lines)])


class JsonFormatter(logging.Formatter):
    """The same as one JSON object a line: time, level, logger, message, exception."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "logger": _name_of(record),
            "message": _message_of(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def configure(level: str, form: str = "text", *, with_root: bool = False) -> None:
    """Write the records of this program to stderr. with_root: those of other packages too, from warnings on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else LineFormatter())
    for name in (*_LOGGERS, *([None] if with_root else [])):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = name is None
        logger.setLevel(level.upper() if name else logging.WARNING)
    if level != "debug":
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # its news of start and end are ours to tell


def write_any_text(*streams: TextIO) -> None:
    """Escape what a stream's encoding does not have: names may be in any script, and the terminal's may be ASCII."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def arguments() -> list[str]:
    """For the command line of a process that should log as this one does: its warnings, or everything."""
    handlers = logging.getLogger(_LOGGERS[0]).handlers
    if not handlers or not isinstance(handlers[0].formatter, LineFormatter | JsonFormatter):
        return []
    level = max(logging.getLogger(_LOGGERS[0]).level, logging.WARNING)
    if logging.getLogger(_LOGGERS[0]).level <= logging.DEBUG:
        level = logging.DEBUG
    return [logging.getLevelName(level).lower(), FORMATS[isinstance(handlers[0].formatter, JsonFormatter)]]


def configure_from(given: Sequence[str]) -> None:
    """What `arguments` of another process says."""
    write_any_text(sys.stderr)
    if given:
        configure(given[0], given[1], with_root=True)


def _time_of(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _name_of(record: logging.LogRecord) -> str:
    return {_ACCESS: "access", "uvicorn.error": "uvicorn"}.get(record.name, record.name)


def _message_of(record: logging.LogRecord) -> str:
    text = _access_text(record) if record.name == _ACCESS else record.getMessage()
    text = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}... ({len(text)} characters)"
    return escaped(text)


def _access_text(record: logging.LogRecord) -> str:
    """Without the query, which may hold what is secret."""
    if not isinstance(record.args, tuple) or len(record.args) != 5:
        return record.getMessage()
    client, method, target, version, status = record.args
    path = str(target).partition("?")[0]
    shown = path if len(path) <= MAX_PATH_CHARS else f"{path[:MAX_PATH_CHARS]}..."
    return f'{client} "{method} {shown} HTTP/{version}" {status}'
