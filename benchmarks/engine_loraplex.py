"""Loraplex on the fixed workload, for `throughput.py`. One JSON line per run on stdout."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from loraplex.bench import Workload, measure
from loraplex.engine.llm import LLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", required=True)
    parser.add_argument("--adapters", nargs="*", default=[])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--pattern", required=True)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--prompt-len", type=int, required=True)
    parser.add_argument("--output-len", type=int, required=True)
    parser.add_argument("--runs", type=int, required=True)
    arguments = parser.parse_args()
    workload = Workload(arguments.requests, arguments.prompt_len, arguments.output_len)
    # The peer recomputes every prompt in every run, so the prefix cache is off.
    with LLM(
        arguments.base,
        dtype=arguments.dtype,
        max_num_seqs=workload.num_requests,
        enable_prefix_caching=False,
        enable_lora=arguments.pattern != "base",
    ) as llm:
        for run in measure(llm, list(map(Path, arguments.adapters)), workload, arguments.pattern, arguments.runs):
            print(json.dumps(asdict(run)), flush=True)


if __name__ == "__main__":
    main()
