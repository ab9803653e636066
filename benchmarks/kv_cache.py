"""Attention of a decode step over KV caches of several dtypes, in turns on one machine; prints the ratios.

    python -m benchmarks.kv_cache --threads 1
The best round of each counts. Keys and values come from memory, not from a cache (operators.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from benchmarks.arguments import positive
from benchmarks.fixture import SIZES
from benchmarks.machine import cpu_name, isa_in_use
from benchmarks.operators import attention_case
from benchmarks.timing import best_of
from loraplex.kernels.ops import KernelBackend, get_backend

DTYPES = ("float32", "bfloat16", "int8")
CONTEXTS = (512, 2048, 8192, 32768)
MOST_TOKENS = 131072
"""Of all sequences of a step, so that the float32 cache of one layer takes 0.2 GB."""


def times(backend: KernelBackend, size: str, context: int, seconds: float) -> tuple[int, dict[str, float]]:
    """(sequences of the step, seconds of one attention by dtype); backend: the native one."""
    num_sequences = max(1, min(16, MOST_TOKENS // context))
    cases = {dtype: attention_case(size, (context,) * num_sequences, 1, dtype).build(backend) for dtype in DTYPES}
    return num_sequences, best_of({dtype: call for dtype, call in cases.items() if call is not None}, seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=positive, default=1, help="default: 1")
    parser.add_argument("--size", choices=tuple(SIZES), default="s", help="shape of which model (default: s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each context (default: 5)")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    backend = get_backend("native", torch.device("cpu"))
    print(f"{cpu_name()}, {isa_in_use()}, {args.threads} threads, {args.size}")
    with torch.inference_mode():
        for context in CONTEXTS:
            num_sequences, best = times(backend, args.size, context, args.seconds)
            shown = ", ".join(f"{dtype} {1e6 * best[dtype]:.0f} us" for dtype in DTYPES)
            ratios = " and ".join(f"{best[dtype] / best['int8']:.2f}" for dtype in DTYPES[:-1])
            print(f"{num_sequences} x {context}: {shown}; over int8 {ratios}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
