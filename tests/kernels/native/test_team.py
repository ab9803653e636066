"""The threads of the kernels: bits when their number changes and cores are taken, fork, sleep, a race detector."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from loraplex.cpu import CpuUse
from loraplex.kernels.native.backend import NativeBackend
from tests.kernels.cases import same_bits
from tests.kernels.native.machine import ISAS, library_or_skip

library_or_skip(ISAS[-1])

CSRC = Path(__file__).parents[3] / "csrc"
BURN = "while True: sum(range(1000))"
ROWS = (1, 5, 16, 130)


def product(native: NativeBackend, num_threads: int, rows: int) -> torch.Tensor:
    """Several regions: a linear, its norm and its activation."""
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((rows, 256), (2048, 256)))
    backend = NativeBackend(native.library, num_threads)
    y = backend.silu_mul(backend.linear(x, backend.prepare_linear(weight)))
    return backend.rms_norm(y, torch.ones(1024), 1e-6)


@contextmanager
def neighbours() -> Iterator[None]:
    """A process that computes, on each core; they end with the block."""
    burners = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def test_another_number_of_threads_in_each_call(native: NativeBackend) -> None:
    expected = {rows: product(native, 1, rows) for rows in ROWS}
    for num_threads in (4, 2, 9, 1, 3, 2, 17):
        for rows in ROWS:
            assert same_bits(product(native, num_threads, rows), expected[rows]), (num_threads, rows)


def test_bits_while_every_core_is_taken(native: NativeBackend) -> None:
    """Threads lose their cores in the middle of a part, come late, and are left out and tried again."""
    expected = {rows: product(native, 1, rows) for rows in ROWS}
    with neighbours():
        until = time.monotonic() + 0.5  # for each library; their teams have one source
        while time.monotonic() < until:
            for rows in ROWS:
                assert same_bits(product(native, 3, rows), expected[rows]), rows


def test_more_threads_than_a_team_can_have(native: NativeBackend) -> None:
    assert same_bits(product(native, 5000, 16), product(native, 1, 16))


def test_callers_do_not_wait_for_one_another(native: NativeBackend) -> None:
    """One that finds the threads at work for another computes alone."""
    expected, differing = product(native, 1, 130), []

    def work() -> None:
        differing.extend(i for i in range(10) if not same_bits(product(native, 3, 130), expected))

    callers = [threading.Thread(target=work) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
        assert not caller.is_alive()
    assert differing == []


def test_a_forked_child_computes(native: NativeBackend) -> None:
    """In a small process: a fork of the tests' own, with all their arenas, may lack memory."""
    code = (
        "from tests.kernels.native import test_team as t, machine; import os, sys\n"
        "native = t.NativeBackend(machine.library_or_skip(sys.argv[1]), 1)\n"
        "expected = t.product(native, 3, 130)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if t.same_bits(t.product(native, 3, 130), expected) else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    command = [sys.executable, "-c", code, native.library.isa]
    with subprocess.Popen(command, cwd=CSRC.parent, start_new_session=True) as parent:
        try:
            assert parent.wait(120) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)  # a child that hangs, too


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="this system does not tell")
def test_threads_sleep_between_calls(native: NativeBackend) -> None:
    product(native, 3, 130)
    time.sleep(0.05)
    before = _team_ticks()
    time.sleep(0.5)
    assert before
    assert _team_ticks() == before, "a thread runs although there is nothing to do"


def _team_ticks() -> dict[str, str]:
    """Processor time of each thread of the team."""
    tasks = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text() == "loraplex-cpu\n"]
    return {task.name: " ".join((task / "stat").read_text().split()[13:15]) for task in tasks}


def test_what_the_backend_says_of_its_threads(native: NativeBackend) -> None:
    backend = NativeBackend(native.library, 3)
    product(native, 3, 130)
    use = backend.cpu_use(CpuUse(cpu_s=7.0))
    assert (use.cpu_s, use.num_threads) == (7.0, 3)
    assert 1 <= use.num_active <= 3
    assert use.left_out_s >= 0
    assert native.library.team_stats().computed > 0


def test_small_work_stays_on_the_calling_thread(native: NativeBackend) -> None:
    backend, x = NativeBackend(native.library, 3), torch.randn(1, 128)
    weight = backend.prepare_linear(torch.randn(384, 128))
    before = native.library.team_stats().computed
    for _ in range(10):
        backend.linear(x, weight)
    assert native.library.team_stats().computed == before


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_races(tmp_path: Path, sanitizer: str) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    program = tmp_path / "team_stress"
    sources = [Path(__file__).with_name("team_stress.cpp"), CSRC / "team.cpp"]
    flags = ["-std=c++20", "-O1", "-g", f"-fsanitize={sanitizer}", f"-I{CSRC}", "-pthread"]
    built = subprocess.run([compiler, *flags, *sources, "-o", program], capture_output=True, text=True, check=False)
    if built.returncode:
        pytest.skip(f"no {sanitizer} sanitizer here: {built.stderr[-200:]}")
    environment = {**os.environ, "TSAN_OPTIONS": "die_after_fork=0"}
    ran = subprocess.run([program, "0.5"], capture_output=True, text=True, check=False, env=environment, timeout=120)
    if "unexpected memory mapping" in ran.stderr:
        pytest.skip("the sanitizer does not run on this kernel")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert int(ran.stdout.split()[0]) > 0
