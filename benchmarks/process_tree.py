"""Memory and processor time of a process and all its descendants, from Linux's /proc. Standard library only: peers'
environments run it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True)
class ProcessorTime:
    """Seconds of processor time since the start: of the tree, and of the whole machine (steal included)."""

    own_s: float
    machine_s: float


def is_known() -> bool:
    """Whether this system says what the other functions ask."""
    return (PROC / "self" / "status").exists()


def processes(root: int) -> list[int]:
    """`root` and its descendants, as far as they are alive."""
    parents: dict[int, int] = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            fields = _stat_fields(int(folder.name))
            if fields:
                parents[int(folder.name)] = int(fields[1])
    tree, found = {root}, True
    while found:
        more = {pid for pid, parent in parents.items() if parent in tree} - tree
        tree |= more
        found = bool(more)
    return sorted(tree)


def peak_rss_bytes(root: int) -> int | None:
    """The kernel's own high-water marks, summed over the tree: nothing runs beside what is measured. None off Linux."""
    if not is_known():
        return None
    return sum(_high_water_bytes(pid) for pid in processes(root))


def processor_time(root: int) -> ProcessorTime | None:
    """None off Linux."""
    if not is_known():
        return None
    own = 0
    for pid in processes(root):
        fields = _stat_fields(pid)
        own += int(fields[11]) + int(fields[12]) if fields else 0
    user, nice, system, _idle, _wait, interrupt, soft, steal, *_ = map(int, _machine_fields())
    return ProcessorTime(own / TICKS_PER_S, (user + nice + system + interrupt + soft + steal) / TICKS_PER_S)


def others_share(before: ProcessorTime | None, after: ProcessorTime | None) -> float | None:
    """Share of the processor time between two moments that went to others than the tree. None where it is not known."""
    if before is None or after is None:
        return None
    spent = after.machine_s - before.machine_s
    others = max(0.0, spent - (after.own_s - before.own_s))
    return others / spent if spent > 0 else 0.0


def _stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command's name (state is [0], the parent [1]); empty when it has ended."""
    try:
        return (PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []


def _machine_fields() -> list[str]:
    return (PROC / "stat").read_text().split("\n", 1)[0].split()[1:]


def _high_water_bytes(pid: int) -> int:
    try:
        lines = (PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
