"""Log lines: their form, and that one record is one line."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from loraplex import logs

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """As they were, afterwards."""
    names = ("uvicorn", "uvicorn.access", None)
    kept = [(each, each.handlers[:], each.propagate, each.level) for each in map(logging.getLogger, names)]
    logging.getLogger("uvicorn.access").propagate = True  # a server without an access log turns it off
    yield
    for logger, handlers, propagate, level in kept:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
    logging.getLogger("uvicorn.error").setLevel(logging.NOTSET)


def test_a_line_has_time_level_and_logger(capsys: Capture) -> None:
    logs.configure("info")
    logging.getLogger("loraplex.frontend.client").info("%d adapters", 3)
    logging.getLogger("loraplex.frontend.client").debug("not shown")
    captured = capsys.readouterr()
    assert re.fullmatch(rf"{TIME} INFO loraplex\.frontend\.client: 3 adapters\n", captured.err)
    assert captured.out == ""


def test_all_loggers_have_one_form_on_one_stream(capsys: Capture) -> None:
    logs.configure("info", with_root=True)
    for name in ("loraplex.server", "uvicorn.error", "asyncio", "some.package"):
        logging.getLogger(name).warning("text")
    logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:5", "GET", "/health", "1.1", 200)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert [re.sub(rf"^{TIME} ", "", line) for line in lines] == [
        "WARNING loraplex.server: text",
        "WARNING uvicorn: text",
        "WARNING asyncio: text",
        "WARNING some.package: text",
        'INFO access: 127.0.0.1:5 "GET /health HTTP/1.1" 200',
    ]
    assert captured.out == ""


def test_other_packages_tell_warnings_only(capsys: Capture) -> None:
    logs.configure("debug", with_root=True)
    logging.getLogger("some.package").info("text")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_access_log_has_no_query(capsys: Capture, form: str) -> None:
    logs.configure("info", form)
    target = "/v1/models?api_key=secret"
    logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:5", "GET", target, "1.1", 200)
    text = capsys.readouterr().err
    assert "/v1/models HTTP/1.1" in text
    assert "secret" not in text


def test_long_paths_and_messages_are_cut(capsys: Capture) -> None:
    logs.configure("info")
    logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', "a:5", "GET", "/" + "x" * 999, "1.1", 404)
    logging.getLogger("loraplex").info("y" * 9_999)
    access, message = capsys.readouterr().err.splitlines()
    assert len(access) < 400
    assert len(message) < logs.MAX_CHARS + 100
    assert message.endswith("(9999 characters)")


def test_json_is_one_object_a_line(capsys: Capture) -> None:
    logs.configure("info", "json")
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        logging.getLogger("loraplex.server").exception("it failed: %s", "a\nb")
    (line,) = capsys.readouterr().err.splitlines()
    fields = json.loads(line)
    assert (fields["level"], fields["logger"], fields["message"]) == ("error", "loraplex.server", "it failed: a\\nb")
    assert re.fullmatch(TIME, fields["time"])
    assert "ValueError: first" in fields["exception"]


def test_the_lines_of_a_traceback_are_indented(capsys: Capture) -> None:
    logs.configure("info")
    try:
        raise ValueError("first\n2026-01-01T00:00:00.000Z INFO loraplex.server: forged\x1b[2J")
    except ValueError:
        logging.getLogger("loraplex.server").exception("it failed")
    head, *rest = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"{TIME} ERROR loraplex\.server: it failed", head)
    assert len(rest) > 2
    assert all(line.startswith("    ") for line in rest)
    assert "\x1b" not in "".join(rest)


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_end_of_a_long_traceback_is_kept(capsys: Capture, form: str) -> None:
    """A message of many megabytes in an error was written in full where lines are text."""
    logs.configure("info", form)
    try:
        raise ValueError("x" * 4 * logs.MAX_TRACEBACK_CHARS + "the end")
    except ValueError:
        logging.getLogger("loraplex.server").exception("it failed")
    text = capsys.readouterr().err
    assert "the end" in text
    assert len(text) < logs.MAX_TRACEBACK_CHARS + 500


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("a\nb\r\tc", "a\\nb\\r\\tc"),
        ("\x1b[31mred\x07\x00", "\\x1b[31mred\\x07\\x00"),
        ("\x85\x9b\u2028\u2029", "\\x85\\x9b\\u2028\\u2029"),
        ("\u202eevil\u2066\u200b", "\\u202eevil\\u2066\\u200b"),
        ("\ud800", "\\ud800"),
        ("Gr\u00fc\u00dfe \u4f60\u597d \U0001f600", "Gr\u00fc\u00dfe \u4f60\u597d \U0001f600"),
    ],
)
def test_what_is_not_printable_is_escaped(capsys: Capture, hostile: str, shown: str) -> None:
    logs.configure("info")
    logging.getLogger("loraplex").info("name %s", hostile)
    assert capsys.readouterr().err.endswith(f"name {shown}\n")


def test_another_process_logs_alike(capsys: Capture) -> None:
    logs.configure("info", "json")
    assert logs.arguments() == ["warning", "json"]
    logs.configure("debug")
    given = logs.arguments()
    assert given == ["debug", "text"]
    logs.configure_from(given)
    logging.getLogger("loraplex.engine").debug("text")
    assert "DEBUG loraplex.engine: text" in capsys.readouterr().err


def test_a_program_that_has_its_own_logging_keeps_it() -> None:
    logging.getLogger("loraplex").handlers = [logging.StreamHandler(sys.stderr)]
    assert logs.arguments() == []
    logs.configure_from([])
    assert len(logging.getLogger("loraplex").handlers) == 1


def test_lines_name_the_request_that_they_are_written_for(capsys: Capture) -> None:
    log = logging.getLogger("loraplex.server")
    for form in logs.FORMATS:
        logs.configure("info", form)
        outside = logs.request_context.set(logs.RequestContext("mine", "acme", "acme/s\nql"))
        log.info("of it")
        logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', "a:5", "POST", "/x?key=1", "1.1", 200)
        logs.request_context.reset(outside)
        log.info("beside it")
        log.error("of another process", extra={"request_id": "theirs\n" + "x" * 999})
    *text, one, access, beside, other = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2][:30] for line in text] == [
        "of it [mine]",
        'a:5 "POST /x HTTP/1.1" 200 [mi',
        "beside it",
        "of another process [theirs\\nxx",
    ]
    fields = {"request_id": "mine", "tenant": "acme", "adapter": "acme/s\\nql"}
    assert json.loads(one).items() >= {"message": "of it", **fields}.items()
    of_access = {"client": "a:5", "method": "POST", "path": "/x", "status": 200}
    assert json.loads(access).items() >= {"logger": "access", **of_access, **fields}.items()
    assert json.loads(beside).keys() == {"time", "level", "logger", "message"}
    assert json.loads(other)["request_id"].startswith("theirs\\nx")
    assert len(json.loads(other)["request_id"]) <= logs.MAX_PATH_CHARS + 1


def test_what_python_writes_by_itself_is_an_object_too() -> None:
    """Warnings, and tracebacks of threads, finalizers and the process; lines for people on stdout."""
    code = """
import threading, warnings
from loraplex import logs
logs.configure("info", "json", with_root=True)
logs.say("ready")
warnings.warn("a warning")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
class Odd:
    def __del__(self):
        raise KeyError("odd")
Odd()
raise ValueError("the end\\nof it")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["message"] == "ready"
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["level"] for line in lines] == ["warning", "error", "error", "critical"]
    assert "a warning" in lines[0]["message"]
    for line, error in zip(lines[1:], ("ZeroDivisionError", "KeyError", "ValueError: the end"), strict=True):
        assert error in line["exception"]


def test_lines_for_people_stay_text_without_json(capsys: Capture) -> None:
    logs.configure("info")
    logs.say("ready")
    logs.say("error: no", sys.stderr)
    assert capsys.readouterr() == ("ready\n", "error: no\n")
    logs.configure("info", "json")
    logs.say("error: no", sys.stderr)
    assert json.loads(capsys.readouterr().err).items() >= {"level": "error", "message": "error: no"}.items()
