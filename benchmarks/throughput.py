"""Throughput of Loraplex beside its peers, in one run on one machine; prints the ratios.

    python -m benchmarks.throughput --size s      beside transformers + peft, made fixtures
    python -m benchmarks.throughput --size tiny --runs 1 --json results/tiny.json
    python -m benchmarks.throughput --fixture DIR --peer hf --peer vllm=VENV --peer vllm-off=VENV \\
        --peer openvino=VENV --engines loraplex,loraplex-off --variant int8:quantization=int8 \\
        --json results/s.json --plot results/s.png

Each engine runs in a process of its own and never beside another, on the same prompts of token ids, greedily, the end
token ignored, no prefix cached. A pattern has a warm-up, then --runs timed runs. Engines take turns in rounds; one that
is slow to start (vLLM) has all its runs in the middle round. Quote the ratios: absolute figures belong to the machine
and its other load (the last column: repeat where it is more than a few percent).

tok/s: output tokens over the seconds of the whole batch, prefill included. first tokens: seconds of the batch with one
output token. ms/step: what each further token of the batch takes, at the contexts of these lengths (--prompt-len 240
--output-len 32: about 256). of limit: the fraction of what this machine could do at most (limits.py; attention left
out), by `python -m benchmarks.machine`. Patterns: base (no adapter), identical (one), distinct (one each), uniform
(about sqrt(n)), skewed (Zipf 1.5 over as many as requests), zipf_all:ALPHA (Zipf over all adapters of the fixture).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.arguments import listed_of, positive
from benchmarks.engines import (
    OWN,
    OWN_ENGINES,
    PEERS,
    ROOT,
    Engine,
    EngineFailedError,
    own_engine,
    parse_peer,
    parse_setting,
    parse_variant,
    rounds,
    run_engine,
)
from benchmarks.fixture import SIZES, Fixture, fixture, fixture_of
from benchmarks.limits import AdapterSize, Limit, ModelShape, Peaks, limit_of
from benchmarks.machine import Machine, cpu_name, isa_in_use, machine
from benchmarks.protocol import Job, Run
from benchmarks.report import EngineResult, Report, load_tokens, matches, save_tokens, show, wide_console
from loraplex.bench import PATTERNS, Workload
from loraplex.errors import ConfigError

WORKLOADS = {"tiny": Workload(4, 16, 64), "s": Workload(16, 64, 64), "m": Workload(8, 64, 32)}
DEFAULT_PEERS = ("hf",)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    console = wide_console()
    engines = engines_of(args)
    try:
        for pattern in args.patterns.split(","):
            Workload(1).adapters(pattern, 1)  # the name at least, before a fixture is made
        made = fixture_of(args.fixture) if args.fixture else fixture(args.size, WORKLOADS[args.size].num_requests)
        workload = workload_of(args, made)
        job = make_job(made, workload, args)
    except (ConfigError, ValueError) as error:
        raise SystemExit(str(error)) from error
    report = Report(configuration(args, made, workload, job))
    tokens: dict[str, dict[str, list[list[int]]]] = {}
    saved = [load_tokens(path, identity_of(made, workload)) for path in args.compare]
    limits = Limits(made, workload, machine(), args.threads)
    for engine in engines:
        report.engines[engine.name] = EngineResult(engine.is_own, dict(engine.settings))
        report.engines[engine.name].limits = limits.of(engine, job)
    for number, turn in enumerate(rounds(engines, args.runs), 1):
        for engine, num_runs in turn:
            console.print(f"[dim]{time.strftime('%H:%M:%S')} round {number}: {engine.name}[/]", highlight=False)
            _take_turn(engine, job, num_runs, args, report.engines[engine.name], tokens, console)
            report.matches = matches(tokens | {name: of for one in saved for name, of in one.items()}, report.first)
            if args.json:
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(report.to_json())  # after each turn: what is measured is not lost
    if args.save_tokens:
        save_tokens(args.save_tokens, identity_of(made, workload), tokens)
    show(console, report, str(report.configuration["title"]))
    if args.plot:
        from benchmarks.plot import plot

        plot(report, args.plot, str(report.configuration["title"]))
    return int(any(result.error for result in report.engines.values()))


def _take_turn(
    engine: Engine, job: Job, num_runs: int, args: argparse.Namespace, result: EngineResult,
    tokens: dict[str, dict[str, list[list[int]]]], console: Console,
) -> None:  # fmt: skip
    """One process of one engine. A failure is noted, and the engine has no more turns."""
    if result.error:
        return

    def say(run: Run) -> None:
        console.print(
            f"[dim]  {time.strftime('%H:%M:%S')} {run.pattern}: {run.tokens_per_s:.1f} tok/s[/]", highlight=False
        )

    job = Job(**{**asdict(job), "runs": num_runs})
    try:
        said = run_engine(engine, job, args.timeout, say)
    except EngineFailedError as error:
        result.error = str(error)
        console.print(str(error), style="red", highlight=False, markup=False)
        return
    result.version = said.version
    result.starts_s.append(said.start_s)
    result.runs += said.runs
    tokens[engine.name] = dict(said.tokens)


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = new.add_argument_group("what is run")
    what.add_argument(
        "--size", choices=SIZES, default="s", help="a fixture of this size, made under fixtures/ if it is not there"
    )
    what.add_argument(
        "--fixture", type=Path, metavar="DIR", help="instead: a folder with base/ and folders of adapters"
    )
    what.add_argument("--patterns", default=",".join(PATTERNS), help="comma-separated (default: %(default)s)")
    what.add_argument("--requests", type=positive, help="of a batch (default: by size, tiny 4, s 16, m 8)")
    what.add_argument("--prompt-len", type=positive, help="tokens (default: by size, tiny 16, s 64, m 64)")
    what.add_argument("--output-len", type=positive, help="tokens (default: by size, tiny 64, s 64, m 32)")
    what.add_argument("--runs", type=positive, default=3, help="timed runs of each pattern on each engine (default: 3)")
    who = new.add_argument_group("who runs it")
    who.add_argument(
        "--engines", default=OWN, help="loraplex, loraplex-off (LoRA off); the first is compared with all others"
    )
    who.add_argument(
        "--variant", action="append", default=[], metavar="NAME:SETTING=VALUE,...",
        help="Loraplex once more with these settings of LLM, e.g. int8:quantization=int8; may be repeated",
    )  # fmt: skip
    who.add_argument(
        "--peer", action="append", metavar="NAME[=VENV]",
        help=f"{', '.join(PEERS)}, with the environment that runs it (default: this Python); may be repeated; none: no "
        "peer",
    )  # fmt: skip
    who.add_argument("--threads", type=positive, default=os.cpu_count(), help="of every engine (default: all cores)")
    who.add_argument(
        "--timeout", type=float, default=3000, help="seconds for one turn of an engine (default: %(default)s)"
    )
    _add_settings(new.add_argument_group("settings (the dtype of all engines, the rest of Loraplex)"))
    out = new.add_argument_group("results")
    out.add_argument(
        "--json", type=Path, metavar="FILE", help="write measurements and configuration here, after every turn"
    )
    out.add_argument("--plot", type=Path, metavar="FILE", help="write a picture (needs the `bench` extra)")
    out.add_argument("--save-tokens", type=Path, metavar="FILE", help="write every engine's outputs")
    out.add_argument(
        "--compare", type=Path, action="append", default=[], metavar="FILE",
        help="count identical outputs with what --save-tokens wrote, too; may be repeated",
    )  # fmt: skip
    return new


def _add_settings(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--dtype", default="float32", help="of the weights (default: float32)")
    group.add_argument("--quantization", help="int8, or as the fixture is")
    group.add_argument("--kv-cache-dtype", help="of keys and values")
    group.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", dest="settings",
        help="any other setting of EngineConfig or LoRAConfig; may be repeated",
    )  # fmt: skip


def engines_of(args: argparse.Namespace) -> list[Engine]:
    """Loraplex and its variants, then the peers. Exits with a message for what cannot be."""
    try:
        common = dict(parse_setting(text) for text in args.settings)
        for name in ("quantization", "kv_cache_dtype"):
            if getattr(args, name):
                common[name] = getattr(args, name)
        own = [own_engine(name, common) for name in listed_of(OWN_ENGINES)(args.engines)]
        for text in args.variant:
            variant = parse_variant(text)
            own.append(own_engine(variant.name, common | dict(variant.settings)))
        named = DEFAULT_PEERS if args.peer is None else [peer for peer in args.peer if peer != "none"]
        return own + [parse_peer(text) for text in named]
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise SystemExit(str(error)) from error


def workload_of(args: argparse.Namespace, made: Fixture) -> Workload:
    """By the size of the fixture, as far as the arguments do not say otherwise."""
    usual = WORKLOADS.get(made.size, Workload())
    return Workload(
        args.requests or usual.num_requests, args.prompt_len or usual.prompt_len, args.output_len or usual.output_len
    )


def make_job(made: Fixture, workload: Workload, args: argparse.Namespace) -> Job:
    """The job that every engine gets. Raises ConfigError for a pattern that cannot be run."""
    vocab_size = json.loads((made.base / "config.json").read_text())["vocab_size"]
    patterns = {name: workload.adapters(name, len(made.adapters)) for name in args.patterns.split(",")}
    return Job(
        base=str(made.base.resolve()),
        adapters=[str(path.resolve()) for path in made.adapters],
        prompts=workload.prompts(vocab_size),
        output_len=workload.output_len,
        patterns=patterns,
        dtype=args.dtype,
        threads=args.threads,
    )


class Limits:
    """What each engine could reach at most; empty without figures of the machine."""

    def __init__(self, made: Fixture, workload: Workload, found: Machine | None, threads: int) -> None:
        self.made, self.workload = made, workload
        self.model = ModelShape.of_folder(made.base)
        self.peaks: Peaks | None = None if found is None else found.peaks.get(threads)
        self._sizes: dict[int, AdapterSize] = {}

    def of(self, engine: Engine, job: Job) -> dict[str, Limit]:
        """By pattern."""
        if self.peaks is None:
            return {}
        storage = str(engine.settings.get("quantization") or engine.settings.get("dtype") or job.dtype)
        lens = self.workload.prompt_len, self.workload.output_len
        return {
            pattern: limit_of(self.model, storage, [self._size(index) for index in chosen], *lens, self.peaks)
            for pattern, chosen in engine.patterns(job.patterns).items()
        }

    def _size(self, index: int | None) -> AdapterSize | None:
        if index is None:
            return None
        if index not in self._sizes:
            self._sizes[index] = AdapterSize.of_folder(self.made.adapters[index])
        return self._sizes[index]


def identity_of(made: Fixture, workload: Workload) -> dict[str, Any]:
    """What outputs depend on: they are compared only if this is equal."""
    return {
        **asdict(workload),
        "base": (made.base / "model.safetensors").stat().st_size,
        "fixture": made.base.parent.name,
    }


def configuration(args: argparse.Namespace, made: Fixture, workload: Workload, job: Job) -> dict[str, Any]:
    """All that the figures depend on, and a title that says the most of it."""
    found = machine()
    title = (
        f"{made.base.parent.name} {args.dtype}, {workload.num_requests} requests of "
        f"{workload.prompt_len}+{workload.output_len} tokens, median of {args.runs} runs, {args.threads} threads, "
        f"{cpu_name()}, {isa_in_use()}, {time.strftime('%Y-%m-%d')}"
    )
    return {
        "title": title,
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "commit": _commit(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "isa": isa_in_use(),
        "threads": args.threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "dtype": args.dtype,
        "runs": args.runs,
        "fixture": made.base.parent.name,
        "size": made.size,
        "workload": asdict(workload),
        "patterns": {name: len(set(chosen) - {None}) for name, chosen in job.patterns.items()},
        "peaks": {} if found is None else {str(threads): asdict(peaks) for threads, peaks in found.peaks.items()},
        "peaks_measured": None if found is None else found.measured,
    }


def _commit() -> str | None:
    """This checkout's commit, with a plus when files are changed; None when it is not a checkout."""
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return said.stdout.strip() or None


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # engines are sessions of their own, which would live on
    raise SystemExit(main())
