"""Several runners of one thread beside one engine with as many threads: throughput of the same requests, in turns.

    python -m benchmarks.runners --size s
32 requests over 16 adapters, both in one process' front. Targets: two runners serve at least 0.9 of one engine's tokens
per second, and every answer is the engine's own. The speed is the median over the rounds of the runners' figure over
the engine's.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from benchmarks.arguments import positive
from benchmarks.engines import parse_setting
from benchmarks.fixture import Fixture
from benchmarks.loaded_engine import add_arguments, fixture_for, lora_requests, save, title_of, verdict
from benchmarks.report import wide_console
from loraplex.bench import Workload
from loraplex.config import EngineConfig, LoRAConfig
from loraplex.core import SamplingParams
from loraplex.frontend.async_engine import AsyncEngine
from loraplex.frontend.runners.settings import RunnerSettings

MIN_SPEED = 0.9


@dataclass(frozen=True)
class Round:
    """Tokens per second of both, in one turn, and how many answers differ."""

    engine: float
    runners: float
    num_different: int


async def started(made: Fixture, args: argparse.Namespace, num_runners: int) -> AsyncEngine:
    """With all adapters; the threads are shared out among the runners."""
    lora = LoRAConfig(adapter_memory_bytes=2 << 30, host_memory_bytes=2 << 30)
    settings: dict[str, Any] = {
        "device": "cpu",
        "dtype": args.dtype,
        "num_threads": args.threads // num_runners,
        "max_num_seqs": args.requests_in_flight,
        "enable_prefix_caching": False,
    }
    config = EngineConfig(model=str(made.base), lora=lora, **{**settings, **dict(map(parse_setting, args.settings))})
    runners = RunnerSettings(data_parallel_size=num_runners)
    engine = await AsyncEngine.start(config, served_model_name="base", runners=runners)
    for request in lora_requests(made):
        await engine.load_adapter(request.lora_name, request.lora_path)
    return engine


async def answers(
    engine: AsyncEngine, made: Fixture, args: argparse.Namespace, turn: int
) -> tuple[float, list[list[int]]]:
    """Tokens per second of all requests at once, and the answers."""
    prompts = Workload(args.requests_in_flight, args.prompt_len).prompts(engine.info.vocab_size)
    names = [request.lora_name for request in lora_requests(made)]
    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True, detokenize=False)

    async def ask(index: int) -> list[int]:
        tokens: list[int] = []
        model = names[index % len(names)]
        async for output in engine.generate(prompts[index], params, f"{turn}-{index}", model=model):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    began = time.perf_counter()
    outputs = await asyncio.gather(*map(ask, range(len(prompts))))
    return sum(map(len, outputs)) / (time.perf_counter() - began), list(outputs)


async def measure(made: Fixture, args: argparse.Namespace) -> list[Round]:
    """Both live at once, and one is idle while the other works; the first turn of each warms up."""
    one, several = await started(made, args, 1), await started(made, args, args.runners)
    rounds: list[Round] = []
    try:
        for turn in range(args.rounds + 1):
            speed, expected = await answers(one, made, args, turn)
            other, found = await answers(several, made, args, turn)
            different = sum(each != own for each, own in zip(found, expected, strict=True))
            rounds.append(Round(speed, other, different))
    finally:
        await several.shutdown()
        await one.shutdown()
    return rounds[1:]


def table_of(rounds: Sequence[Round], title: str) -> Table:
    ratios = sorted(each.runners / each.engine for each in rounds)
    speed = statistics.median(ratios)
    table = Table(title=title, title_justify="left")
    for heading in ("engine tok/s", "runners tok/s", "speed", "least and most", "other answers", "verdict"):
        table.add_column(heading, justify="right")
    different = sum(each.num_different for each in rounds)
    table.add_row(
        f"{statistics.median(each.engine for each in rounds):.1f}",
        f"{statistics.median(each.runners for each in rounds):.1f}",
        f"{speed:.2f} (>= {MIN_SPEED})",
        f"{ratios[0]:.2f} {ratios[-1]:.2f}",
        str(different),
        verdict(speed, MIN_SPEED, is_at_least=True) if not different else "MISSED",
    )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    made = fixture_for(args)
    rounds = asyncio.run(measure(made, args))
    title = title_of(
        made, args, f"{args.runners} runners, {args.requests_in_flight} requests, {args.adapters} adapters"
    )
    wide_console().print(table_of(rounds, title))
    save(args.json, {"title": title, "rounds": [asdict(each) for each in rounds]})
    return 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(result, rank=16, adapters=16)
    result.set_defaults(requests_in_flight=32)
    result.add_argument("--runners", type=positive, default=2, help="share the threads (default: 2)")
    result.add_argument("--rounds", type=positive, default=5, help="default: 5")
    result.add_argument("--prompt-len", type=positive, default=64, help="tokens (default: 64)")
    result.add_argument("--output-len", type=positive, default=64, help="tokens (default: 64)")
    return result


if __name__ == "__main__":
    raise SystemExit(main())
