"""A server of two tenants."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.tenancy import Tenancy, tenancy


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Tenancy]:
    with tenancy(tmp_path) as made:
        yield made
