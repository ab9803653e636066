"""`loraplex` and `python -m loraplex`: the command line, and the end of its process."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn


def run() -> NoReturn:
    """Run the command and end at once: a thread that still waits for a hub that does not answer must not keep the process."""
    code: object = 1
    _open_closed_streams()
    try:
        from loraplex.cli import main  # here: Ctrl-C may come while it is imported

        main()
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        code = 130
    with contextlib.suppress(OSError):  # whoever read the output may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _open_closed_streams() -> None:
    """Whoever started this may have closed some: a socket or a pipe would get their numbers, and libuv ends the process over that."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


if __name__ == "__main__":
    run()
