"""How much memory the machine, or the container, has left. Linux; elsewhere nothing is known."""

from __future__ import annotations

import re
from pathlib import Path


def system_pressure(root: Path = Path("/")) -> float | None:
    """The share of memory that cannot be had any more, 0 to 1: of the machine or of the container's limit, whichever is nearer its end."""
    shares = [share for share in (_machine(root), _container(root)) if share is not None]
    return max(shares, default=None)


def _machine(root: Path) -> float | None:
    """From MemAvailable, in which the kernel counts what it can take back."""
    found = _numbers(root / "proc/meminfo", r"^(MemTotal|MemAvailable):\s+(\d+)")
    if "MemAvailable" not in found or not found.get("MemTotal"):
        return None
    return 1 - found["MemAvailable"] / found["MemTotal"]


def _container(root: Path) -> float | None:
    """cgroup v2: what is in use but for inactive file pages, which the kernel takes back."""
    folder = root / "sys/fs/cgroup"
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup v2 here, or the limit is "max"
        return None
    inactive = _numbers(folder / "memory.stat", r"^(inactive_file) (\d+)").get("inactive_file", 0)
    return max(0.0, min(1.0, (used - inactive) / limit)) if limit else None


def _numbers(path: Path, pattern: str) -> dict[str, int]:
    try:
        return {name: int(number) for name, number in re.findall(pattern, path.read_text(), re.MULTILINE)}
    except OSError:
        return {}
