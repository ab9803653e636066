"""What `throughput.py` and the engines beside it tell each other: a job goes in as JSON, a JSON line comes out per
event.

An engine's runner is a module of a few lines: a class with `version` and `generate`, and `serve(Class)`. The loop, the
arguments and the clock are here, once for all, so every engine is measured alike. Standard library only: a peer's
runner is run by the peer's own environment, which has neither Loraplex nor rich.

    python -m benchmarks.peer_hf --job job.json      # throughput.py writes the job and reads the lines

Events: {"event": "ready", "version"}, then per run {"event": "run", "pattern", ...} (the fields of Run), then {"event":
"tokens", "pattern", "tokens"} after the last run of a pattern.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

from benchmarks.process_tree import others_share, peak_rss_bytes, processor_time

WARM_UP_TOKENS = 2


@dataclass(frozen=True)
class Job:
    """The same for every engine but `runs` and `settings`. Prompts are token ids; decoding is greedy, past the end
    token.

    patterns: for each name the adapter of each prompt, an index into `adapters` or None for the base. settings: this
    engine's own.
    """

    base: str
    adapters: list[str]
    prompts: list[list[int]]
    output_len: int
    patterns: dict[str, list[int | None]]
    runs: int = 1
    dtype: str = "float32"
    threads: int = 1
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def used(self) -> list[int]:
        """Indices of the adapters that any pattern uses, in order."""
        return sorted({index for chosen in self.patterns.values() for index in chosen if index is not None})

    @property
    def max_distinct(self) -> int:
        """The most adapters of one batch."""
        return max((len(set(chosen) - {None}) for chosen in self.patterns.values()), default=0)

    @property
    def prompt_len(self) -> int:
        return max(map(len, self.prompts))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Run:
    """One timed run of one pattern.

    tokens_per_s: output tokens over the seconds of the whole batch, prefill included. first_token_s: seconds of the
    same batch with one output token. step_ms: what each further token of the batch takes, (seconds - first_token_s) /
    (output_len - 1); None for one token. peak_rss_bytes: of the engine's processes so far. others_share: of the
    processor time, what went to other programs meanwhile.
    """

    pattern: str
    num_adapters: int
    tokens_per_s: float
    first_token_s: float
    step_ms: float | None
    peak_rss_bytes: int | None = None
    others_share: float | None = None


class Engine(Protocol):
    """What a runner brings: started by its constructor, which gets the Job."""

    version: str

    def generate(self, chosen: Sequence[int | None], output_len: int) -> list[list[int]]:
        """The greedy output of each prompt of the job through the adapter chosen for it."""
        ...


def measure(engine: Engine, job: Job, clock: Callable[[], float] = time.perf_counter) -> Iterator[dict[str, Any]]:
    """The events of a job: for each pattern a warm-up that loads its adapters, then the timed runs."""
    for pattern, chosen in job.patterns.items():
        engine.generate(chosen, min(WARM_UP_TOKENS, job.output_len))
        tokens: list[list[int]] = []
        for _ in range(job.runs):
            began = clock()
            engine.generate(chosen, 1)
            first_s = clock() - began
            before, began = processor_time(os.getpid()), clock()
            tokens = engine.generate(chosen, job.output_len)
            seconds = clock() - began
            others = others_share(before, processor_time(os.getpid()))
            _check(tokens, job)
            run = Run(
                pattern=pattern,
                num_adapters=len(set(chosen) - {None}),
                tokens_per_s=len(tokens) * job.output_len / seconds,
                first_token_s=first_s,
                step_ms=1e3 * (seconds - first_s) / (job.output_len - 1) if job.output_len > 1 else None,
                peak_rss_bytes=peak_rss_bytes(os.getpid()),
                others_share=others,
            )
            yield {"event": "run", **asdict(run)}
        yield {"event": "tokens", "pattern": pattern, "tokens": tokens}


def _check(tokens: Sequence[Sequence[int]], job: Job) -> None:
    """A rate counts tokens that were made."""
    lengths = {len(output) for output in tokens}
    if len(tokens) != len(job.prompts) or lengths != {job.output_len}:
        raise RuntimeError(
            f"{len(tokens)} outputs of {sorted(lengths)} tokens, wanted {len(job.prompts)} of {job.output_len}"
        )


def serve(start: Callable[[Job], Engine], description: str | None = None) -> None:
    """The main function of every runner."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--job", type=Path, help="file with the job (protocol.py, Job) as JSON; default: standard input"
    )
    arguments = parser.parse_args()
    job = Job.from_json(arguments.job.read_text() if arguments.job else sys.stdin.read())
    events = _own_stdout()
    engine = start(job)
    _say(events, {"event": "ready", "version": engine.version})
    for event in measure(engine, job):
        _say(events, event)
    # An engine's own threads and processes may not end by themselves; everything is said.
    os._exit(0)


def _own_stdout() -> TextIO:
    """Standard output for the events alone: what libraries print goes to standard error."""
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return events


def _say(events: TextIO, event: dict[str, Any]) -> None:
    events.write(json.dumps(event) + "\n")
    events.flush()
