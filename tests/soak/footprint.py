"""The resident memory of both processes over time, and whether it is flat."""

from __future__ import annotations

import asyncio
import statistics
from collections import defaultdict

import psutil

from loraplex.frontend.async_engine import AsyncEngine
from tests.soak.ledger import Ledger

PERIOD_S = 0.25
MIN_SAMPLES = 80
SLACK_BYTES = 8 << 20
SLACK_SHARE = 0.02
"""Allocators keep what they got: the last third may hold this much more than the one before it."""


class Footprint:
    """Samples of this process and of each engine process, in bytes."""

    def __init__(self, engine: AsyncEngine, ledger: Ledger) -> None:
        self._engine = engine
        self._ledger = ledger
        self._samples: dict[str, list[int]] = defaultdict(list)

    async def run(self) -> None:
        while True:
            self._sample("server", psutil.Process().pid)
            pid = self._engine.engine_pid
            if pid is not None and not self._ledger.is_down.now:
                self._sample(f"engine {pid}", pid)
            await asyncio.sleep(PERIOD_S)

    def _sample(self, name: str, pid: int) -> None:
        try:
            self._samples[name].append(psutil.Process(pid).memory_info().rss)
        except psutil.NoSuchProcess:
            return

    def judge(self) -> None:
        """Processes that lived long enough to tell."""
        for name, samples in self._samples.items():
            if len(samples) < MIN_SAMPLES:
                continue
            third = len(samples) // 3
            before, after = statistics.median(samples[third : 2 * third]), statistics.median(samples[2 * third :])
            if after - before > SLACK_BYTES + SLACK_SHARE * before:
                self._ledger.find(
                    f"the memory of {name} grows: {before / 2**20:.1f} MiB in the second third of its life, "
                    f"{after / 2**20:.1f} in the last"
                )

    def rows(self) -> list[tuple[str, str]]:
        """Each process, in words."""
        rows = []
        for name, samples in self._samples.items():
            third = max(1, len(samples) // 3)
            medians = [
                statistics.median(samples[at : at + third]) / 2**20 for at in range(0, 3 * third, third) if samples[at:]
            ]
            rows.append(
                (name, f"{max(samples) / 2**20:.1f} MiB at most; thirds {', '.join(f'{each:.1f}' for each in medians)}")
            )
        return rows
