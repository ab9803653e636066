"""What several attacks need."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.server.raw_connection import Connection


@pytest.fixture
async def connection() -> AsyncIterator[Connection]:
    connection = Connection()
    yield connection
    connection.protocol.connection_lost(None)
    await connection.settle()
