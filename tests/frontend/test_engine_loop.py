"""The loop of an engine process, in this one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from unittest import mock

import pytest
import zmq

from loraplex.adapter_store import AdapterContent
from loraplex.frontend import messages as msg
from loraplex.frontend.engine_loop import NUM_LOAD_THREADS, EngineProcess

ROOTS = ("/adapters",)


@pytest.fixture
def engine() -> mock.Mock:
    return mock.Mock(name="engine")


@pytest.fixture
def loop(engine: mock.Mock) -> Iterator[EngineProcess]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        loop = EngineProcess(socket, engine)
        yield loop
        for threads in (loop._loads, loop._opens, loop._quick_verbs):
            threads.close()


def test_files_of_one_tenant_are_opened_beside_those_of_another_from_the_same_roots(
    loop: EngineProcess, engine: mock.Mock
) -> None:
    """The roots were taken for the tenant, so a tenant whose directory hangs held up all others."""
    is_other_open = threading.Event()

    def open_adapter(path: str, adapter_name: str, tenant: str, roots: tuple[str, ...]) -> AdapterContent:
        if tenant == "acme":
            is_other_open.wait(60)
        else:
            is_other_open.set()
        return AdapterContent("0" * 64, 9, 8, 110)

    engine.adapters.open_adapter = open_adapter
    try:
        for tenant in (*["acme"] * NUM_LOAD_THREADS, "beta"):
            loop._call_store(msg.CallStore(1, "open_adapter", ("/adapters/sql", "sql", tenant, ROOTS)))
        assert is_other_open.wait(10)
    finally:
        is_other_open.set()
