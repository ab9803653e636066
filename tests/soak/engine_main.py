"""The engine process of the soak: the ordinary one, with free memory that holds NaN, sources that may hang, and a
socket for faults.

python -m tests.soak.engine_main ADDRESS        started by Supervision(module=...); SIGUSR1 shows where every thread is
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import math
import os
import signal
import socketserver
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

from loraplex.engine import build as engine_build
from loraplex.engine.build import build_engine
from loraplex.engine.engine import EngineCore
from loraplex.frontend import process
from tests.soak import held_sources
from tests.soak.orders import FAULTS, FOLDER_VARIABLE, Order, socket_of

_FAULT_KINDS = ("fault", "recovery")


class Orders(socketserver.StreamRequestHandler):
    """One order on one connection. It never raises into the server."""

    server: OrderServer

    def handle(self) -> None:
        order = Order(**json.loads(self.rfile.readline()))
        try:
            reply = {"value": self.server.carry_out(order)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        with contextlib.suppress(OSError):
            self.wfile.write(json.dumps(reply).encode() + b"\n")


class OrderServer(socketserver.ThreadingUnixStreamServer):
    """Carries out orders on one engine. Beside the faults there are `events` (since it was asked last) and `heap`
    (objects by type)."""

    daemon_threads = True

    def __init__(self, engine: EngineCore, path: Path) -> None:
        super().__init__(str(path), Orders)
        self._engine = engine
        self._events: list[tuple[str, int | None]] = []
        self._take_events = engine.take_events
        engine.take_events = self._note_events  # type: ignore[method-assign]  # the process takes them; both see them
        threading.Thread(target=self.serve_forever, name="orders", daemon=True).start()

    def carry_out(self, order: Order) -> Any:
        if order.fault == "events":
            events, self._events = self._events, []
            return events
        if order.fault == "heap":
            gc.collect()
            return Counter(type(each).__name__ for each in gc.get_objects()).most_common(40)
        return FAULTS[order.fault].inject(self._engine, order)

    def _note_events(self) -> Any:
        events = self._take_events()
        self._events += [(event.kind.value, event.adapter_id) for event in events if event.kind in _FAULT_KINDS]
        return events


def build(*arguments: Any, **options: Any) -> EngineCore:
    engine = build_engine(*arguments, **options)
    engine.adapters._residency.tiers.host.pool.poison()
    engine._runner._kv.fill_(math.nan)
    OrderServer(engine, socket_of(Path(os.environ[FOLDER_VARIABLE]), os.getpid()))
    return engine


def main(address: str) -> int:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with (
        held_sources.heeding(held_sources.ENGINE_MARKER),
        mock.patch.object(engine_build, "build_engine", build),
    ):
        return process.main(address)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
