"""Files that an operator gives the twin."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loraplex.errors import ConfigError
from loraplex.twin.calibration import Calibration
from loraplex.twin.files import read_bounded
from loraplex.twin.workload import Arrivals


def test_a_file_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bounded(path, 5) == b"12345"
    with pytest.raises(ValueError, match="more than 4 bytes"):
        read_bounded(path, 4)


@pytest.mark.parametrize("read", [Arrivals.read, Calibration.read])
def test_what_is_no_regular_file_is_refused(read: object, tmp_path: Path) -> None:
    """A pipe hung, and a device was read to the end of the memory."""
    assert callable(read)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="no regular file"):
            read(path)
