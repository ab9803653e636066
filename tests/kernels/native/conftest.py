"""The native backend on every instruction set that this machine has. Where no library is built, its tests are skipped
with the reason."""

from __future__ import annotations

import pytest

from loraplex.kernels.native.backend import NativeBackend
from tests.kernels.native.machine import ISAS, library_or_skip


@pytest.fixture(params=ISAS)
def native(request: pytest.FixtureRequest) -> NativeBackend:
    """On one thread."""
    return NativeBackend(library_or_skip(request.param), 1)
