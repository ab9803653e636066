"""`loraplex` and `python -m loraplex`: the command line, and the end of its process."""

from __future__ import annotations

import os
import select
import sys
from typing import NoReturn

from loraplex import interrupt, logs

LAST_LINES_S = 1.0
"""For lines of the log whose reader is slow."""

BROKEN_PIPE_CODE = 141
"""As a shell says of a program that SIGPIPE ended."""


def run() -> NoReturn:
    """Run the command and end at once: a thread that still waits for a silent hub must not keep the process."""
    interrupt.end_at_once()
    _open_closed_streams()
    logs.write_any_text(sys.stdout, sys.stderr)
    from loraplex.cli import main  # half a second of imports

    code: object = 1
    try:
        main()
    except SystemExit as end:
        code = BROKEN_PIPE_CODE if isinstance(end.__context__, BrokenPipeError) else end.code  # rich's is 1
    except BrokenPipeError:
        if not _is_reader_gone():
            raise
        code = BROKEN_PIPE_CODE
    logs.flush_within(LAST_LINES_S)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:  # the output was short, and its reader is gone
        code = code or BROKEN_PIPE_CODE
    except OSError:
        pass
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _open_closed_streams() -> None:
    """The parent process may have closed some: a socket or pipe would get their numbers, and libuv aborts then."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def _is_reader_gone() -> bool:
    """Whether the reader of the output is gone (`loraplex ... | head -1`), rather than that some other pipe broke."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


if __name__ == "__main__":
    run()
