"""Verbs of the command line that change what a server keeps: a line of the log `loraplex.audit` on stderr for each, as
servers write one for their routes. They have no key: the line names the user of the machine."""

from __future__ import annotations

import logging
import os
import pwd
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from loraplex.errors import shown
from loraplex.logs import LineFormatter

LOGGER = "loraplex.audit"


@contextmanager
def recording(verb: str, state_dir: Path | None, **targets: str | None) -> Iterator[dict[str, str | None]]:
    """Around a verb: its outcome is recorded however it ends, refusals too.

    state_dir: None for a database, whose URL may hold a password. targets: `tenant`, `key`, `adapter` that it is about,
    by kind; more may be added to what this gives.
    """
    outcome = "failed"
    try:
        yield targets
        outcome = "done"
    except Exception as error:
        outcome = f"refused, {type(error).__name__}"
        raise
    finally:
        about = "".join(f" on {kind} {shown(name)}" for kind, name in targets.items() if name is not None)
        place = "the database" if state_dir is None else repr(str(state_dir))
        text = f"loraplex {verb}{about} in {place} by {_user()}: {outcome}"
        record = logging.LogRecord(LOGGER, logging.INFO, "", 0, "%s", (text,), None)
        with suppress(OSError):  # the verb is done, whether its line is read or not
            print(LineFormatter().format(record), file=sys.stderr, flush=True)


def _user() -> str:
    uid = os.getuid()
    try:
        return f"user {pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"user of uid {uid}"
