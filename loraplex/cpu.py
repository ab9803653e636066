"""The share of the processor that this process may have, and what its threads got. Standard library only."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
V1_CONTROLLERS = ("cpu,cpuacct", "cpuacct,cpu", "cpu")
"""Folders in which version 1 keeps the quota; one is a link to the other, or the only one."""


@dataclass(frozen=True, slots=True)
class CpuLimit:
    """The most threads that can run at the same time, and which bound that is."""

    num_threads: int
    bound: str


def cpu_limit(proc: Path = PROC, cgroups: Path = CGROUPS) -> CpuLimit:
    """The least of: cores, cores that this thread is bound to, quota of its control group (rounded up).

    Threads beyond a quota cost more than they give: when it is used up, all threads stand still until its period ends.
    """
    num_cores = os.cpu_count() or 1
    limit = CpuLimit(num_cores, f"{num_cores} cores" if num_cores > 1 else "1 core")
    num_allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else num_cores
    if num_allowed < num_cores:
        limit = CpuLimit(num_allowed, f"bound to {num_allowed} of {num_cores} cores")
    quota = min(_quotas(proc, cgroups), default=math.inf)
    if quota < limit.num_threads:
        limit = CpuLimit(max(1, math.ceil(quota)), f"quota of {quota:g} cores in the control group")
    return limit


def chosen_threads(wanted: int | None, usual: int) -> int:
    """As many as the setting says; without one `usual`, but no more than can run at the same time."""
    limit = cpu_limit()
    if wanted is None:
        if limit.num_threads < usual:
            logger.info("%d threads: %s", limit.num_threads, limit.bound)
        return min(usual, limit.num_threads)
    if wanted > limit.num_threads:
        logger.warning("num_threads is %d, but no more than %d can run: %s", wanted, limit.num_threads, limit.bound)
    return wanted


def _quotas(proc: Path, cgroups: Path) -> Iterator[float]:
    """Cores that each control group around this process may use, where it has a quota."""
    for line in _lines(proc / "self/cgroup"):
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0":
            yield from _quotas_of(cgroups, path, "cpu.max")
            yield from _quotas_of(cgroups / "unified", path, "cpu.max")
        elif "cpu" in controllers.split(","):
            for folder in V1_CONTROLLERS:
                yield from _quotas_of(cgroups / folder, path, "cpu.cfs_quota_us")


def _quotas_of(root: Path, path: str, name: str) -> Iterator[float]:
    """Of the group and those that it lies in. Inside a container the path may be the host's: only the root is there."""
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            return
        words = [word for line in _lines(folder / name) for word in line.split()]
        if name == "cpu.cfs_quota_us" and words:
            words += _lines(folder / "cpu.cfs_period_us")
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]) > 0:
            yield int(words[0]) / int(words[1])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, ValueError):
        return []


@dataclass(frozen=True, slots=True)
class CpuUse:
    """What the threads that compute got of the processor since they began; seconds are sums over them.

    wait_s: ready to run, while others had the cores. left_out_s: of threads that were not used because their cores were
    taken. num_preemptions: times that a thread lost its core before it was done (involuntary context switches).
    num_threads, num_active: what the last operator asked for, and what it got.
    """

    cpu_s: float = 0.0
    wait_s: float = 0.0
    left_out_s: float = 0.0
    num_preemptions: int = 0
    num_threads: int = 0
    num_active: int = 0

    def since(self, before: CpuUse) -> CpuUse:
        """What was added; all of it where the process began again."""
        if self.cpu_s < before.cpu_s:
            return self
        return CpuUse(
            self.cpu_s - before.cpu_s,
            max(0.0, self.wait_s - before.wait_s),
            max(0.0, self.left_out_s - before.left_out_s),
            max(0, self.num_preemptions - before.num_preemptions),
            self.num_threads,
            self.num_active,
        )

    @property
    def wanted_s(self) -> float:
        """The processor time that was wanted, had or not."""
        return self.cpu_s + self.wait_s + self.left_out_s

    @property
    def missing_share(self) -> float:
        """Of the processor time that was wanted, what others had: 0 to 1."""
        missing_s = self.wait_s + self.left_out_s
        return missing_s / self.wanted_s if missing_s > 0 else 0.0


class CpuMeter:
    """Reads the use of the thread that made it, and of all threads that Python did not start: those of the kernels."""

    def __init__(self, proc: Path = PROC) -> None:
        self._tasks = proc / "self/task"
        self._own_id = threading.get_native_id()

    def read(self) -> CpuUse:
        """Seconds and preemptions; all 0 on a system that does not tell."""
        of_python = {thread.native_id for thread in threading.enumerate()} - {self._own_id}
        cpu_ns = wait_ns = num_preemptions = 0
        for task in self._task_ids() - of_python:
            schedule = [word for line in _lines(self._tasks / f"{task}/schedstat") for word in line.split()]
            if len(schedule) == 3:
                cpu_ns, wait_ns = cpu_ns + int(schedule[0]), wait_ns + int(schedule[1])
            num_preemptions += sum(
                int(line.split()[1])
                for line in _lines(self._tasks / f"{task}/status")
                if line.startswith("nonvoluntary_ctxt_switches")
            )
        return CpuUse(cpu_ns / 1e9, wait_ns / 1e9, num_preemptions=num_preemptions)

    def _task_ids(self) -> set[int]:
        try:
            return {int(name) for name in os.listdir(self._tasks)}
        except OSError:
            return set()
