"""Files that an operator gives the twin: regular ones, of a bounded length."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Raises OSError, and ValueError for what is no regular file or longer."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no regular file")
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"it has more than {most_bytes} bytes")
    return data
