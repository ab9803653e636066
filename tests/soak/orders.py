"""What the soak may do to an engine process: orders by name, each a line of JSON on a socket of the process.

The lead's list: a fault is one entry in FAULTS. An order has `adapter_id`, `seed` and `seconds`; what the function
returns goes back.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from loraplex.engine.engine import EngineCore
from tests.faults import injectors

FOLDER_VARIABLE = "LORAPLEX_SOAK_FOLDER"
GROUPS = ("weights", "alloc", "copy", "disk")


@dataclass(frozen=True)
class Order:
    fault: str
    adapter_id: int = 0
    seed: int = 0
    seconds: float = 0.0

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


@dataclass(frozen=True)
class Fault:
    """`group`: what `--faults` turns on. taints: the adapter's answers may be wrong until a fault or recovery is told.

    errors: what requests and verbs may fail with, beside what they always may, while it lasts and a little longer.
    """

    group: str
    inject: Callable[[EngineCore, Order], Any]
    taints: bool = False
    errors: tuple[str, ...] = ()


def _for_a_while(make: Callable[[EngineCore], AbstractContextManager[Any]]) -> Callable[[EngineCore, Order], bool]:
    def inject(engine: EngineCore, order: Order) -> bool:
        with make(engine):
            time.sleep(order.seconds)
        return True

    return inject


_UNSERVED = ("AdapterUnavailableError", "AdapterNoRoomError", "AdapterLoadError", "EngineError", "AdapterFaultError")

FAULTS: dict[str, Fault] = {
    "flip_host": Fault(
        "weights",
        lambda engine, order: injectors.flip_host_bytes(engine.adapters, order.adapter_id, Random(order.seed), 4),
        taints=True,
        errors=_UNSERVED,
    ),
    "flip_device": Fault(
        "weights",
        lambda engine, order: injectors.flip_device_bytes(engine.adapters, order.adapter_id, Random(order.seed), 4),
        taints=True,
        errors=_UNSERVED,
    ),
    "nan": Fault(
        "weights",
        lambda engine, order: injectors.poison_with_nan(engine.adapters, order.adapter_id),
        taints=True,
        errors=_UNSERVED,
    ),
    "no_memory": Fault(
        "alloc", _for_a_while(lambda engine: injectors.failing_allocations(engine.adapters)), errors=_UNSERVED
    ),
    "memory_error": Fault(
        "alloc",
        _for_a_while(lambda engine: injectors.failing_allocations(engine.adapters, MemoryError("injected"))),
        errors=_UNSERVED,
    ),
    "copy_error": Fault(
        "copy", _for_a_while(lambda engine: injectors.failing_copies(RuntimeError("injected"))), errors=_UNSERVED
    ),
    "read_error": Fault(
        "disk", _for_a_while(lambda engine: injectors.failing_reads(OSError("injected"))), errors=_UNSERVED
    ),
}


def socket_of(folder: Path, pid: int) -> Path:
    return folder / f"orders-{pid}"


async def give(folder: Path, pid: int, order: Order) -> Any:
    """Have an order carried out; what came of it. OSError when the process is not there, RuntimeError with its
    error."""
    reader, writer = await asyncio.open_unix_connection(socket_of(folder, pid))
    try:
        writer.write(order.line())
        answer = await reader.readline()
    finally:
        writer.close()
    if not answer:
        raise ConnectionResetError(f"process {pid} ended before it had carried out {order.fault}")
    reply = json.loads(answer)
    if "error" in reply:
        raise RuntimeError(f"{order.fault}: {reply['error']}")
    return reply["value"]
