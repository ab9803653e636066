"""One soak: an engine process under pressure, workers around it, and what must be true when they have stopped."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import psutil

from loraplex.config import EngineConfig, LoRAConfig
from loraplex.frontend.async_engine import AsyncEngine
from loraplex.frontend.supervisor import Supervision
from tests.soak.askers import Asker, watch_references
from tests.soak.footprint import Footprint
from tests.soak.held_sources import FRONT_MARKER, heeding
from tests.soak.ledger import Ledger
from tests.soak.operators import Operator
from tests.soak.orders import FOLDER_VARIABLE
from tests.soak.world import World
from tests.soak.wreckers import Injector, Killer

BLOCK_SIZE = 16
NUM_KV_BLOCKS = 24
KV_BLOCK_BYTES = 2 * 2 * BLOCK_SIZE * 2 * 16 * 4  # layers, K and V, tokens, heads, head_dim, float32
PATIENCE_S = 60.0
FAREWELL_PATIENCE_S = 15.0


@dataclass(frozen=True)
class Plan:
    """How long, with what seed, how many of each. kill_period_s None: the engine process lives."""

    seconds: float
    seed: int = 0
    num_askers: int = 10
    num_operators: int = 3
    num_names_each: int = 8
    num_device: int = 6
    num_host: int = 12
    kill_period_s: float | None = 120.0
    fault_groups: frozenset[str] = frozenset()


class Worker(Protocol):
    worker: str

    async def act(self, number: int) -> None: ...


@dataclass
class Report:
    """What a soak found. `findings` is empty when all is well."""

    plan: Plan
    ledger: Ledger
    memory: list[tuple[str, str]]
    engine_counters: dict[str, float]
    num_kills: int

    @property
    def findings(self) -> list[str]:
        return self.ledger.findings


class Soak:
    """`run` once. `folder` takes sources and sockets, and must be empty of temporary files afterwards."""

    def __init__(self, plan: Plan, world: World, folder: Path) -> None:
        self._plan = plan
        self._world = world
        self._folder = folder
        self.ledger = Ledger()
        self._counters: dict[str, float] = {}

    async def run(self) -> Report:
        for name in ("sources", "sockets", "tmp"):
            (self._folder / name).mkdir()
        before = {thread.ident for thread in threading.enumerate()}
        with self._surroundings():
            engine = await AsyncEngine.start(
                self._config(), served_model_name="base", supervision=Supervision(module="tests.soak.engine_main")
            )
            killer = Killer(self._plan.seed, engine, self.ledger, self._plan.kill_period_s or 0)
            footprint = Footprint(engine, self.ledger)
            try:
                await self._work(engine, killer, footprint)
                if not self.ledger.findings:
                    await self._check_idle(engine)
            finally:
                await engine.shutdown()
        await self._check_gone(before)
        footprint.judge()
        return Report(self._plan, self.ledger, footprint.rows(), self._counters, killer.num_kills)

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Temporary files where they can be counted; sources that may hang; the engine knows where to listen for
        faults."""
        with (
            heeding(FRONT_MARKER),
            mock.patch.object(tempfile, "tempdir", str(self._folder / "tmp")),
            mock.patch.dict(os.environ, {FOLDER_VARIABLE: str(self._folder / "sockets")}),
        ):
            yield

    def _config(self) -> EngineConfig:
        device_bytes = self._world.nbytes_of(self._plan.num_device)
        lora = LoRAConfig(
            adapter_memory_bytes=device_bytes,
            host_memory_bytes=max(device_bytes, self._world.nbytes_of(self._plan.num_host)),
            aging_steps=16,
            disk_cache_dir=str(self._folder / "disk"),
            disk_memory_bytes=2 * self._world.nbytes_of(self._plan.num_host),
            scrub_bytes_per_s=1 << 30,
        )
        return EngineConfig(
            model=str(self._world.base),
            lora=lora,
            num_threads=1,
            max_model_len=128,
            max_num_seqs=8,
            max_num_batched_tokens=48,
            block_size=BLOCK_SIZE,
            kv_cache_memory_bytes=NUM_KV_BLOCKS * KV_BLOCK_BYTES,
            packed_cache_dir="none",
        )

    # ------------------------------------------------------------------------------------------------------------- work

    async def _work(self, engine: AsyncEngine, killer: Killer, footprint: Footprint) -> None:
        assert engine.registry is not None
        watch_references(engine.registry)
        plan, sources = self._plan, self._folder / "sources"
        operators = [
            Operator(f"operator-{index}", plan.seed, engine, self._world, self.ledger, sources, self._names_of(index))
            for index in range(plan.num_operators)
        ]
        for operator in operators:
            await operator.prepare()
        askers = [
            Asker(f"asker-{index}", plan.seed, engine, self._world, self.ledger) for index in range(plan.num_askers)
        ]
        workers: list[Worker] = [*operators, *askers]
        background = [footprint.run()]
        if plan.kill_period_s is not None:
            background.append(killer.run())
        if plan.fault_groups:
            injector = Injector(plan.seed, engine, self.ledger, self._folder / "sockets", plan.fault_groups)
            background.append(injector.run())
        deadline_s = time.monotonic() + plan.seconds
        tasks = [asyncio.create_task(self._in_background(each)) for each in background]
        await asyncio.gather(*(self._drive(worker, deadline_s, engine) for worker in workers))
        while self.ledger.is_down.now and not self.ledger.findings:
            await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _names_of(self, index: int) -> dict[str, int]:
        """Operators have names of all families, and share contents with each other."""
        numbers = range(index, index + self._plan.num_names_each)
        return {f"{'abcdefgh'[index]}{at}": number % self._world.num_families for at, number in enumerate(numbers)}

    async def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self.ledger.find(f"a worker of the soak itself failed: {type(error).__name__}: {error}")
            raise

    async def _drive(self, worker: Worker, deadline_s: float, engine: AsyncEngine) -> None:
        """One action after the other until the time is over. None may take longer than PATIENCE_S."""
        number = 0
        while time.monotonic() < deadline_s and not self.ledger.has_enough:
            if self.ledger.is_down.now:
                await asyncio.sleep(0.02)  # else all would only be refused, thousands of times
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await worker.act(number)
            except TimeoutError:
                self._find_hang(worker, number, engine)
                return
            except Exception as error:
                self.ledger.find(f"{worker.worker} #{number}: {type(error).__name__}: {error}")
            number += 1

    def _find_hang(self, worker: Worker, number: int, engine: AsyncEngine) -> None:
        """With the stacks of the engine's threads, on its standard error."""
        self.ledger.find(f"{worker.worker} #{number} took longer than {PATIENCE_S} s")
        pid = engine.engine_pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)

    # -------------------------------------------------------------------------------------------------------------- end

    async def _check_idle(self, engine: AsyncEngine) -> None:
        """Nothing runs: every reference has returned, both sides know the same adapters, and when these are unloaded
        nothing is left."""
        registry = engine.registry
        assert registry is not None
        await self._expect("requests in the server", lambda: engine.num_unfinished == 0)
        await self._expect("references to adapters", lambda: registry.num_references == 0)
        await self._expect("versions that drain", lambda: not registry._table.draining)
        await self._check_integrity(engine)
        stats = await engine.stats()
        self._require((stats.num_running, stats.num_waiting) == (0, 0), f"the engine has requests: {stats}")
        known = {spec.adapter_id for spec in registry.specs()}
        held = {where.adapter_id for where in await asyncio.to_thread(registry._store.list_adapters)}
        pinned = {w.adapter_id for w in await asyncio.to_thread(registry._store.list_adapters) if w.is_pinned}
        meant = {version.adapter_id for version in registry._table.current.values() if version.is_pinned}
        self._require(pinned <= meant, f"the engine has {pinned} pinned, the server meant {meant}")
        self._require(held == known, f"the engine holds adapters {held}, the server knows {known}")
        self._counters = {
            "promotions": stats.memory.counters["promotions"],
            **{f"loads by {cause}": count for cause, count in stats.memory.loads.items()},
            **{f"evictions by {cause}": count for cause, count in stats.memory.evictions.items()},
            "load failures": stats.memory.counters["load_failures"],
            "preemptions": stats.num_preemptions,
            "pauses": stats.num_pauses,
            "cached prompt tokens": stats.num_prefix_hit_tokens,
        }
        for name in list(registry._table.current):
            await engine.unload_adapter(name)
        memory = (await engine.stats()).memory
        resident = {tier: memory.resident_bytes[tier] for tier in ("device", "host")}
        self._require(not any(resident.values()), f"adapters left {resident}")
        self._require(memory.num_adapters == 0, f"{memory.num_adapters} adapters are left")
        await self._check_integrity(engine)

    async def _check_integrity(self, engine: AsyncEngine) -> None:
        try:
            await engine.check_integrity()
        except Exception as error:
            self.ledger.find(f"at the end: {type(error).__name__}: {error}")

    async def _check_gone(self, threads_before: set[int | None]) -> None:
        """After the shutdown: no task, thread, process or temporary file of the engine."""
        gc.collect()

        def left() -> list[str]:
            return [thread.name for thread in threading.enumerate() if thread.ident not in threads_before]

        ours = ("adapter-", "loraplex-")
        await self._expect("threads", lambda: not any(name.startswith(ours) for name in left()))
        me = asyncio.current_task()
        await self._expect("tasks", lambda: not [task for task in asyncio.all_tasks() if task is not me])
        await self._expect("processes", lambda: not psutil.Process().children(recursive=True))
        await self._expect("temporary files", lambda: not list((self._folder / "tmp").iterdir()))

    async def _expect(self, what: str, is_gone: Callable[[], bool]) -> None:
        """Farewells may take a moment."""
        deadline_s = time.monotonic() + FAREWELL_PATIENCE_S
        while not is_gone() and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        self._require(is_gone(), f"{what} are left")

    def _require(self, is_fine: bool, text: str) -> None:
        if not is_fine:
            self.ledger.find(f"at the end: {text}")
