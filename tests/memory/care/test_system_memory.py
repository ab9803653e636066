"""What is left of the machine's or the container's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.memory.care.monitor import has_room, system_pressure


def write(root: Path, **files: str) -> Path:
    places = {"meminfo": "proc/meminfo", "limit": "sys/fs/cgroup/memory.max"}
    places |= {"current": "sys/fs/cgroup/memory.current", "stat": "sys/fs/cgroup/memory.stat"}
    for name, text in files.items():
        path = root / places[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    600 kB\n"


def test_nothing_known(tmp_path: Path) -> None:
    assert system_pressure(tmp_path) is None


def test_the_machine(tmp_path: Path) -> None:
    assert system_pressure(write(tmp_path, meminfo=MEMINFO)) == pytest.approx(0.4)


def test_a_container_that_is_nearer_its_end(tmp_path: Path) -> None:
    root = write(tmp_path, meminfo=MEMINFO, limit="1000\n", current="900\n", stat="anon 1\ninactive_file 100\n")
    assert system_pressure(root) == pytest.approx(0.8)


def test_a_container_without_a_limit(tmp_path: Path) -> None:
    root = write(tmp_path, meminfo=MEMINFO, limit="max\n", current="900\n", stat="")
    assert system_pressure(root) == pytest.approx(0.4)


def test_room_is_what_leaves_the_pressure_below_a_share(tmp_path: Path) -> None:
    assert has_room(10**15, 0.5, tmp_path), "nothing is known"
    root = write(tmp_path, meminfo=MEMINFO)
    assert has_room(99 * 1024, 0.5, root)
    assert not has_room(100 * 1024, 0.5, root)
    write(root, limit="1000\n", current="600\n", stat="anon 1\ninactive_file 200\n")
    assert has_room(99, 0.5, root), "of the nearer limit"
    assert not has_room(100, 0.5, root)


def test_this_machine() -> None:
    pressure = system_pressure()
    assert pressure is None or 0 <= pressure <= 1
