"""Workers that break things: the engine process is killed, faults are ordered."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from pathlib import Path
from random import Random
from typing import Any

from loraplex.core import AdapterSpec, Tier
from loraplex.errors import EngineDeadError
from loraplex.frontend.async_engine import AsyncEngine
from tests.soak.ledger import Ledger
from tests.soak.orders import FAULTS, Fault, Order, give

REVIVAL_PATIENCE_S = 60.0
FAULT_PERIOD_S = 1.0
TAIL_S = 1.0
QUARANTINE_S = 60.0
"""Errors of a fault may come this long after its end."""


class Killer:
    """Kills the engine process with SIGKILL every `period_s`, give or take a quarter, and waits until it is back."""

    def __init__(self, seed: int, engine: AsyncEngine, ledger: Ledger, period_s: float) -> None:
        self._rng = Random(f"{seed}/killer")
        self._engine = engine
        self._ledger = ledger
        self._period_s = period_s
        self._killed: list[float] = []

    @property
    def num_kills(self) -> int:
        return len(self._killed)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._period_s * self._rng.uniform(0.75, 1.25))
            await self.kill()

    async def kill(self) -> None:
        ledger, pid, began_s = self._ledger, self._engine.engine_pid, time.monotonic()
        assert pid is not None
        ledger.note(f"killer: kill -9 {pid}")
        ledger.is_down.set(True)
        os.kill(pid, signal.SIGKILL)
        self._killed.append(began_s)
        while self._engine.engine_pid == pid or not self._engine.health().is_alive:
            await asyncio.sleep(0.01)
            if time.monotonic() - began_s > REVIVAL_PATIENCE_S:
                ledger.find(f"the engine did not come back: {self._engine.health().message}")
                return
        ledger.note(f"killer: the engine is back as {self._engine.engine_pid}")
        ledger.is_down.set(False)


class Injector:
    """Orders a fault of the chosen groups every FAULT_PERIOD_S. `folder` is where the processes have their sockets."""

    def __init__(self, seed: int, engine: AsyncEngine, ledger: Ledger, folder: Path, groups: frozenset[str]) -> None:
        self._seed = seed
        self._engine = engine
        self._ledger = ledger
        self._folder = folder
        self._faults = [name for name, fault in FAULTS.items() if fault.group in groups]
        self._tainted: dict[int, str] = {}
        self._heeded_s = time.monotonic()
        self._tainted_s = -math.inf
        self._number = 0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(FAULT_PERIOD_S)
            await self._heed_events()
            await self._inject()

    async def _inject(self) -> None:
        rng = Random(f"{self._seed}/injector/{self._number}")
        self._number += 1
        fault, seconds, seed = rng.choice(self._faults), rng.uniform(0.05, 0.5), rng.randrange(1 << 30)
        spec = await self._victim(rng)
        if spec is None:
            return
        what = FAULTS[fault]
        self._ledger.actions[f"fault: {fault}"] += 1
        self._ledger.note(
            f"injector #{self._number} {fault} {spec.adapter_name} id {spec.adapter_id} for {seconds:.2f} s"
        )
        self._ledger.fault_errors.set(frozenset(what.errors))
        was_tainted = self._is_tainted(spec)
        if what.taints:
            self._ledger.tainted[spec.adapter_digest].set(True)
            self._tainted[spec.adapter_id] = spec.adapter_digest
        value = await self._give(Order(fault, spec.adapter_id, seed, seconds))
        if what.taints and not value and not was_tainted:
            self._clear({spec.adapter_id})
        self._ledger.count(f"fault: {fault}", "injected" if value else "nothing there")
        await asyncio.sleep(TAIL_S)
        self._ledger.fault_errors.set(frozenset({"AdapterFaultError"} if self._may_be_quarantined(what) else ()))

    def _may_be_quarantined(self, last: Fault) -> bool:
        """Whether some content may still be on its way back: a diagnosis waits for its turn, and for room."""
        if last.taints:
            self._tainted_s = time.monotonic()
        return time.monotonic() - self._tainted_s < QUARANTINE_S

    async def _victim(self, rng: Random) -> AdapterSpec | None:
        """An adapter that is on the device now; None when there is none, or no engine."""
        registry = self._engine.registry
        assert registry is not None
        try:
            residencies = await asyncio.to_thread(registry._store.list_adapters)
        except EngineDeadError:
            return None
        on_device = {where.adapter_id for where in residencies if where.tier is Tier.DEVICE}
        specs = [spec for spec in registry.specs() if spec.adapter_id in on_device]
        return rng.choice(specs) if specs else None

    async def _heed_events(self) -> None:
        """The engine has noticed: from now on it is accountable for that content again. A new process has nothing of
        the old one."""
        registry = self._engine.registry
        assert registry is not None
        if self._ledger.was_down_since(self._heeded_s):
            self._clear(set(self._tainted))
        self._heeded_s = time.monotonic()
        self._tainted |= {spec.adapter_id: spec.adapter_digest for spec in registry.specs() if self._is_tainted(spec)}
        for kind, adapter_id in await self._give(Order("events")) or ():
            self._ledger.count("engine's events", kind)
            if adapter_id in self._tainted:
                digest = self._tainted[adapter_id]
                self._clear({each for each, has in self._tainted.items() if has == digest})

    def _is_tainted(self, spec: AdapterSpec) -> bool:
        """Contents are shared: an event may name any of the adapters that have it."""
        return spec.adapter_digest in self._tainted.values()

    def _clear(self, adapter_ids: set[int]) -> None:
        for adapter_id in adapter_ids:
            self._ledger.tainted[self._tainted.pop(adapter_id)].set(False)

    async def _give(self, order: Order) -> Any:
        pid = self._engine.engine_pid
        try:
            return None if pid is None else await give(self._folder, pid, order)
        except OSError:
            return None  # killed meanwhile
        except RuntimeError as error:
            self._ledger.find(f"injector: {error}")
            return None
