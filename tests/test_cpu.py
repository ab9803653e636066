"""How many threads may run at the same time, from affinity and both versions of control groups; and what threads
got."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from loraplex.cpu import CpuLimit, CpuMeter, CpuUse, chosen_threads, cpu_limit


class Machine:
    """A /proc and a /sys/fs/cgroup made of files."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"

    def limit(self) -> CpuLimit:
        return cpu_limit(self.proc, self.cgroups)

    def process_in(self, *lines: str) -> None:
        self.write(self.proc / "self/cgroup", "\n".join(lines) + "\n")

    def group(self, path: str, text: str) -> None:
        self.write(self.cgroups / path, text)

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Of 16 cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    return Machine(tmp_path)


def test_all_cores_without_a_bound(machine: Machine) -> None:
    assert machine.limit() == CpuLimit(16, "16 cores")


def test_affinity(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 7})
    assert machine.limit() == CpuLimit(3, "bound to 3 of 16 cores")


@pytest.mark.parametrize(
    ("text", "threads"),
    [("150000 100000\n", 2), ("400000 100000\n", 4), ("1000 100000", 1), ("max 100000\n", 16), ("9900000 100000", 16)],
)
def test_quota_of_version_2(machine: Machine, text: str, threads: int) -> None:
    machine.process_in("0::/pod/app")
    machine.group("pod/app/cpu.max", text)
    assert machine.limit().num_threads == threads


def test_the_least_quota_of_the_groups_around_counts(machine: Machine) -> None:
    machine.process_in("0::/pod/app")
    machine.group("pod/app/cpu.max", "800000 100000\n")
    machine.group("pod/cpu.max", "250000 100000\n")
    machine.group("cpu.max", "max 100000\n")
    assert machine.limit() == CpuLimit(3, "quota of 2.5 cores in the control group")


@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize("path", ["/docker/0123", "/"])
def test_quota_of_version_1(machine: Machine, folder: str, path: str) -> None:
    """Inside a container the path is often the host's, and the container's own group is the root."""
    machine.process_in("3:cpuset:/x", f"2:cpu,cpuacct:{path}", "0::/")
    machine.group(f"{folder}/cpu.cfs_quota_us", "200000\n")
    machine.group(f"{folder}/cpu.cfs_period_us", "100000\n")
    assert machine.limit() == CpuLimit(2, "quota of 2 cores in the control group")


def test_version_1_without_a_quota(machine: Machine) -> None:
    machine.process_in("2:cpu:/")
    machine.group("cpu/cpu.cfs_quota_us", "-1\n")
    machine.group("cpu/cpu.cfs_period_us", "100000\n")
    assert machine.limit().num_threads == 16


@pytest.mark.parametrize("text", ["", "max", "a b", "-5 100000", "100000 0", "1 2 3", "\x00\xff"])
def test_a_file_that_is_not_understood_bounds_nothing(machine: Machine, text: str) -> None:
    machine.process_in("0::/../../etc", "nonsense", "::", "0::/app")
    machine.group("app/cpu.max", text)
    assert machine.limit().num_threads == 16


def test_threads_are_chosen_by_setting_and_bounds(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    assert (chosen_threads(None, 8), chosen_threads(None, 32), chosen_threads(3, 8)) == (8, 16, 3)
    assert caplog.text == ""
    assert chosen_threads(17, 8) == 17, "a setting is obeyed"
    assert "num_threads is 17, but no more than 16 can run: 16 cores" in caplog.text


def test_this_machine_has_a_limit() -> None:
    assert 1 <= cpu_limit().num_threads <= (os.cpu_count() or 1)


def test_use_since() -> None:
    before, after = CpuUse(2.0, 1.0, 0.5, 10, 4, 4), CpuUse(5.0, 2.0, 1.5, 30, 4, 3)
    grown = after.since(before)
    assert grown == CpuUse(3.0, 1.0, 1.0, 20, 4, 3)
    assert grown.missing_share == pytest.approx(0.4)
    assert before.since(after) == before, "the engine's process began again"
    assert CpuUse().missing_share == 0.0


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not tell")
def test_a_meter_counts_its_own_thread_and_not_pythons_others() -> None:
    meter, ended = CpuMeter(), threading.Event()
    other = threading.Thread(target=_compute_until, args=(ended,))
    before = meter.read()
    other.start()
    time.sleep(0.5)
    idle = meter.read().since(before)
    ended.set()
    other.join()
    until = time.thread_time() + 0.1
    while time.thread_time() < until:
        pass
    busy = meter.read().since(before)
    assert idle.cpu_s < 0.25, "the other thread had all of it"
    assert busy.cpu_s > 0.09


def _compute_until(ended: threading.Event) -> None:
    while not ended.is_set():
        sum(range(1000))


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert CpuMeter(tmp_path).read() == CpuUse()
