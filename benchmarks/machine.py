"""What this machine can do at most, on one thread and on all cores: memory read, multiply-add (fp32, int8 x int16).

    python -m benchmarks.machine             # a few seconds; kept in results/machine.json for the other benchmarks
    python -m benchmarks.machine --cached    # show what is kept
Run it alone on a quiet machine: every fraction of a limit is a fraction of these figures. It compiles
benchmarks/machine.cpp with the system's C++ compiler, for the instruction set that Loraplex's kernels use here
(LORAPLEX_ISA chooses another).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.limits import Peaks
from loraplex.kernels.native.choice import open_library
from loraplex.kernels.native.library import NativeLibrary

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
CACHE = RESULTS / "machine.json"
FLAGS = {
    "portable": ("-DLORAPLEX_PORTABLE",),
    "avx2": ("-march=x86-64-v3",),
    "avx512": ("-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512"),
    "neon": ("-march=armv8-a",),
    "neon_dotprod": ("-march=armv8.2-a+dotprod",),
}
"""As CMakeLists.txt compiles the kernels."""

READ_BYTES = 2**29  # far larger than any cache
ROUND_S = 0.3
ROUNDS = 3
WARM_UP_S = 0.3


class NoCompilerError(RuntimeError):
    """There is no C++ compiler with OpenMP here."""


@dataclass(frozen=True)
class Machine:
    """What was measured, where and when. `peaks`: by number of threads."""

    cpu: str
    cores: int
    isa: str
    measured: str
    peaks: dict[int, Peaks]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Machine:
        fields = json.loads(text)
        peaks = {int(threads): Peaks(**values) for threads, values in fields.pop("peaks").items()}
        return cls(**fields, peaks=peaks)


def machine(*, may_measure: bool = True, cache: Path = CACHE) -> Machine | None:
    """The figures of this machine: kept ones of this processor and instruction set, else measured now and kept.

    None when there is no compiler, or none are kept and `may_measure` is false.
    """
    kept = Machine.from_json(cache.read_text()) if cache.exists() else None
    if kept is not None and (kept.cpu, kept.cores, kept.isa) == (cpu_name(), os.cpu_count(), isa_in_use()):
        return kept
    if not may_measure:
        return None
    try:
        measured = measure()
    except NoCompilerError:
        return None
    keep(measured, cache)
    return measured


def keep(measured: Machine, cache: Path = CACHE) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text(measured.to_json())


def measure() -> Machine:
    """Best of several rounds each. Raises NoCompilerError."""
    isa, cores = isa_in_use(), os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        functions = _compile(isa, Path(folder))
        peaks = {threads: _peaks(functions, threads) for threads in sorted({1, cores})}
    return Machine(cpu_name(), cores, isa, time.strftime("%Y-%m-%d %H:%M"), peaks)


def _peaks(functions: ctypes.CDLL, threads: int) -> Peaks:
    data = np.ones(READ_BYTES // 4, np.float32)
    start = np.linspace(0, 1, functions.float_operations_per_step() // 2, dtype=np.float32)
    pair, weights = np.ones(2, np.int16), (np.arange(functions.int16_operations_per_step() // 2) % 251).astype(np.int8)

    def read(is_split: int) -> float:
        functions.read_memory(data.ctypes.data, data.size, threads, is_split)
        return float(READ_BYTES)

    def floats(steps: int = 1 << 20) -> float:
        functions.multiply_floats(steps, threads, start.ctypes.data, 0.999, 0.001)
        return float(steps * threads * functions.float_operations_per_step())

    def int16(steps: int = 1 << 20) -> float:
        functions.multiply_int16(steps, threads, pair.ctypes.data, weights.ctypes.data)
        return float(steps * threads * functions.int16_operations_per_step())

    _repeat(floats, WARM_UP_S)  # the processor reaches its speed
    bandwidth = max(_best_rate(lambda split=split: read(split)) for split in (0, 1))
    return Peaks(bandwidth=bandwidth, fp32=_best_rate(floats), int16=_best_rate(int16))


def _best_rate(work: Callable[[], float]) -> float:
    return max(_repeat(work, ROUND_S) for _ in range(ROUNDS))


def _repeat(work: Callable[[], float], seconds: float) -> float:
    """Work a second of the best call."""
    best, until = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        done = work()
        best = max(best, done / (time.perf_counter() - began))
    return best


def compiler() -> str | None:
    """The system's C++ compiler, if it has OpenMP."""
    found = next(
        (path for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++") if (path := shutil.which(name))), None
    )
    if found is None:
        return None
    probe = subprocess.run(
        [found, "-x", "c++", "-fopenmp", "-o", os.devnull, "-"],
        input="#include <omp.h>\nint main() { return omp_get_num_threads() - 1; }",
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    return found if probe.returncode == 0 else None


def _compile(isa: str, folder: Path) -> ctypes.CDLL:
    found = compiler()
    if found is None:
        raise NoCompilerError("no C++ compiler with OpenMP: the machine's limits cannot be measured")
    library = folder / "machine.so"
    source = Path(__file__).with_suffix(".cpp")
    command = [found, "-std=c++20", "-O3", "-fopenmp", "-fPIC", "-shared", "-w", *FLAGS[isa], f"-I{ROOT / 'csrc'}"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    functions = ctypes.CDLL(str(library))
    pointer, long, number = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    functions.read_memory.argtypes = (pointer, long, number, number)
    functions.multiply_floats.argtypes = (long, number, pointer, ctypes.c_float, ctypes.c_float)
    functions.multiply_int16.argtypes = (long, number, pointer, pointer)
    for name in ("read_memory", "multiply_floats", "multiply_int16"):
        getattr(functions, name).restype = ctypes.c_float
    for name in ("float_operations_per_step", "int16_operations_per_step"):
        getattr(functions, name).restype = long
    return functions


def isa_in_use() -> str:
    """The instruction set of the native kernels here; without them that of every x86 processor of today, or
    portable."""
    library = open_library()
    if isinstance(library, NativeLibrary):
        return library.isa
    import torch

    return "avx2" if torch.backends.cpu.get_cpu_capability().startswith("AVX") else "portable"


def cpu_name() -> str:
    """As /proc/cpuinfo has it: virtual machines of one provider differ in it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines) if value}
    model = names.get("model name", platform.machine())
    return f"{model} family {names.get('cpu family', '?')} model {names.get('model', '?')}"


def show(console: Console, found: Machine) -> None:
    table = Table(title=f"{found.cpu}, {found.cores} cores, {found.isa}, {found.measured}", title_justify="left")
    for heading in ("threads", "memory read GB/s", "fp32 GFLOP/s", "int8 x int16 GOP/s"):
        table.add_column(heading, justify="right")
    for threads, peaks in found.peaks.items():
        figures = (peaks.bandwidth, peaks.fp32, peaks.int16)
        table.add_row(str(threads), *(f"{figure / 1e9:.1f}" for figure in figures))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cached", action="store_true", help="show the figures that are kept; measure nothing")
    arguments = parser.parse_args()
    console = Console()
    if arguments.cached:
        kept = machine(may_measure=False)
        if kept is None:
            raise SystemExit(f"nothing is kept for this machine in {CACHE}: run python -m benchmarks.machine")
        show(console, kept)
        return
    try:
        measured = measure()
    except NoCompilerError as error:
        raise SystemExit(str(error)) from error
    keep(measured)
    show(console, measured)


if __name__ == "__main__":
    main()
