"""Mutants of the demo's adapters, for any time: python -m tests.security.fuzz_adapters --seconds 600 --seed 1

Prints how each was answered, the slowest and the growth of memory. Exit code 1 with the mutant's number when one was
answered by an error outside the tree, or when the process grew by more than --max-growth-mib after the first hundred.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

from loraplex.demo.tasks import TASKS, adapter_path
from tests.security.adapter_mutator import AdapterMutator, LoadPath

WARM_UP = 100


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def fuzz(seconds: float, seed: int, first: int, max_growth_mib: float) -> int:
    mutators = [AdapterMutator(adapter_path(task.name), seed) for task in TASKS]
    started, number, slowest, base_mib, peak_mib = time.monotonic(), first, (0.0, -1), 0.0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = LoadPath(Path(folder))
        while time.monotonic() - started < seconds:
            changes = mutators[number % len(mutators)].write(number, Path(folder) / "mutant")
            began = time.monotonic()
            try:
                path.judge(Path(folder) / "mutant")
            except BaseException:
                traceback.print_exc()
                print(f"seed {seed}, mutant {number}: {'; '.join(changes)}")
                return 1
            slowest = max(slowest, (time.monotonic() - began, number))
            number += 1
            peak_mib = max(peak_mib, resident_mib())
            if number - first == WARM_UP:
                base_mib = peak_mib
    print(f"{number - first} mutants of seed {seed}: {dict(sorted(path.counts.items()))}")
    print(
        f"slowest: {slowest[0]:.2f} s, mutant {slowest[1]}; resident {base_mib:.0f} MiB after {WARM_UP}, "
        f"{peak_mib:.0f} MiB at most"
    )
    return int(number - first > WARM_UP and peak_mib - base_mib > max_growth_mib)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first mutant")
    parser.add_argument("--max-growth-mib", type=float, default=128.0)
    options = parser.parse_args()
    return fuzz(options.seconds, options.seed, options.first, options.max_growth_mib)


if __name__ == "__main__":
    sys.exit(main())
