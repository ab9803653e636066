"""`loraplex` and `python -m loraplex`: the command line, and the end of its process."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

from loraplex.cli import main


def run() -> NoReturn:
    """Run the command and end at once: a thread that still waits for a hub that does not answer must not keep the process."""
    code: object = 1
    try:
        main()
    except SystemExit as end:
        code = end.code
    with contextlib.suppress(OSError):  # whoever read the output may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    run()
