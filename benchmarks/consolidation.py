"""What moving requests between two runners costs and changes: wrong tokens, seconds to one runner and back, stalls.

    python -m benchmarks.consolidation                    1,000 requests that move, a fall and a rise of load, stalls
    python -m benchmarks.consolidation --skip stalls      the same on a machine that is not quiet
moves     each request moves once or more, at any of its tokens; it is right when ids, text, log probabilities and
          reasons are those of the same request that stayed. Target: none is wrong.
load      requests for two runners end until half of one's places are taken. Seconds until the other one has ended
          (target: --idle-s + 2), and, when as many come again, until it serves.
stalls    time between two outputs of requests that stay, while others move to and fro beside them, over that without
          moves. Target: 1.2 for P99.
The demo's model and adapters, one thread each, in this process' front.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.arguments import positive
from benchmarks.loaded_engine import save, verdict
from benchmarks.open_loop import Spread
from benchmarks.report import wide_console
from loraplex.config import EngineConfig, LoRAConfig
from loraplex.core import RequestOutput, SamplingParams
from loraplex.demo.tasks import TASKS, adapter_path, assets_path, prompt_of
from loraplex.errors import RequestAbortedError
from loraplex.frontend.async_engine import AsyncEngine
from loraplex.frontend.runners.settings import RunnerSettings
from loraplex.routing import RunnerState

PLACES = 8
MAX_MODEL_LEN = 4096
LENGTH = 96
NUM_TOGETHER = 6
MAX_STALL = 1.2
PATIENCE_S = 120.0
PARTS = ("moves", "load", "stalls")
MODELS = (None, *(task.name for task in TASKS))
PROMPTS = tuple(map(prompt_of, ("banana bread", "a quick brown fox", "loraplex", "one two three")))
PARAMS = tuple(
    SamplingParams(max_tokens=LENGTH, ignore_eos=True, **each)
    for each in (
        {"temperature": 0},
        {"temperature": 1.4, "seed": 11, "top_p": 0.9},
        {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 1.0, "seed": 12, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"temperature": 2.0, "seed": 13, "n": 2},
    )
)

Question = tuple[str, str | None, SamplingParams]


@dataclass(frozen=True)
class Result:
    """`target` None: there is none."""

    what: str
    value: float
    unit: str
    target: float | None = None


@asynccontextmanager
async def two_runners(base: str, **settings: Any) -> AsyncIterator[AsyncEngine]:
    lora = LoRAConfig(adapter_memory_bytes=1 << 26, host_memory_bytes=1 << 26)
    config = EngineConfig(
        model=base, device="cpu", num_threads=1, kv_cache_memory_bytes=1 << 26, max_num_seqs=PLACES, lora=lora
    )
    runners = RunnerSettings(data_parallel_size=2, placement="spread", **settings)
    engine = await AsyncEngine.start(config, served_model_name="base", runners=runners)
    try:
        for task in TASKS:
            await engine.load_adapter(task.name, str(adapter_path(task.name)))
        yield engine
        await engine.check_integrity()
    finally:
        await engine.shutdown()


def stretched_base(folder: Path) -> str:
    """The demo's model with room for requests that last."""
    shutil.copytree(assets_path() / "base", folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": MAX_MODEL_LEN}))
    return str(folder)


def seen(output: RequestOutput) -> list[Any]:
    """All of an answer but its times, as text: ids, words, log probabilities, reasons."""
    scored = [each and {token: repr(each[token]) for token in each} for each in output.prompt_logprobs or ()]
    return [
        scored,
        *(
            (
                each.text,
                tuple(each.token_ids),
                each.finish_reason,
                [{t: repr(e[t]) for t in e} for e in each.logprobs or ()],
            )
            for each in output.outputs
        ),
    ]


async def move(engine: AsyncEngine, request_id: str) -> bool:
    """To the other runner."""
    stream = engine._streams.get(request_id)
    if stream is None:
        return False
    target = engine._runners.all[1 - stream.placement.runner.number]
    return await engine._mover.move(stream, target)


# ---------------------------------------------------------------------------------------------------------------- moves


async def wrong_moves(engine: AsyncEngine, num_moved: int, seed: int = 0) -> tuple[int, int, int]:
    """(requests that moved, moves, those that say something else) of at least `num_moved` requests."""
    rng = random.Random(seed)
    questions: list[Question] = [(prompt, model, params) for prompt in PROMPTS for model in MODELS for params in PARAMS]
    expected: dict[int, list[Any]] = {}
    counts = [0, 0, 0]

    async def ask(number: int) -> None:
        which = rng.randrange(len(questions))
        prompt, model, params = questions[which]
        if which not in expected:
            expected[which] = seen(
                [each async for each in engine.generate(prompt, params, f"s{number}", model=model)][-1]
            )
        output, moves, next_at = None, 0, rng.randrange(1, LENGTH // 2)
        moving: set[asyncio.Task[bool]] = set()
        async for output in engine.generate(prompt, params, f"m{number}", model=model):
            if len(output.outputs[0].token_ids) >= next_at and not output.finished:
                next_at += rng.randrange(8, LENGTH)
                moving.add(asyncio.create_task(move(engine, f"m{number}")))
        moves = sum(await asyncio.gather(*moving))
        assert output is not None
        counts[0] += moves > 0
        counts[1] += moves
        counts[2] += moves > 0 and seen(output) != expected[which]

    number = 0
    while counts[0] < num_moved:
        await asyncio.gather(*(ask(number + index) for index in range(NUM_TOGETHER)))
        number += NUM_TOGETHER
    return counts[0], counts[1], counts[2]


# ----------------------------------------------------------------------------------------------------------------- load


class Crowd:
    """Requests that last until they are called off."""

    def __init__(self, engine: AsyncEngine, name: str = "crowd") -> None:
        self._engine = engine
        self._name = name
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._num = 0
        self.gaps_s: list[float] = []

    async def grow_to(self, count: int) -> None:
        """Until all have a first token or wait for a place."""
        while len(self._tasks) < count:
            self._num += 1
            request_id = f"{self._name}{self._num}"
            self._tasks[request_id] = asyncio.create_task(self._last(request_id))
        await asyncio.sleep(0.1)

    async def fall_to(self, count: int) -> None:
        gone = list(self._tasks)[count:]
        for request_id in gone:
            await self._engine.abort(request_id)
        await asyncio.gather(*(self._tasks.pop(request_id) for request_id in gone))

    @property
    def ids(self) -> Sequence[str]:
        return list(self._tasks)

    async def _last(self, request_id: str) -> None:
        params = SamplingParams(max_tokens=MAX_MODEL_LEN - 64, temperature=0, ignore_eos=True)
        last_s = None
        try:
            while True:  # a request is as long as the model's context: then another one takes its place
                async for _ in self._engine.generate(PROMPTS[0], params, request_id, model=TASKS[0].name):
                    now_s = time.perf_counter()
                    self.gaps_s += [] if last_s is None else [now_s - last_s]
                    last_s = now_s
        except RequestAbortedError:
            return


def is_released(engine: AsyncEngine) -> bool:
    return any(runner.state is RunnerState.RELEASED for runner in engine._runners.all)


async def until(condition: Any) -> float:
    """Seconds until it holds."""
    began_s = time.monotonic()
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)
    return time.monotonic() - began_s


async def fall_and_rise(engine: AsyncEngine) -> tuple[float, float]:
    """Seconds from a fall of load to the end of a runner, and from the rise to its return."""
    crowd = Crowd(engine)
    await crowd.grow_to(2 * PLACES)
    await until(lambda: engine.health().num_serving == 2)
    await asyncio.sleep(3.0)
    assert not is_released(engine), "both are needed"
    await crowd.fall_to(PLACES // 2)
    fell_s = await until(lambda: is_released(engine))
    await crowd.grow_to(2 * PLACES)
    rose_s = await until(lambda: engine.health().num_serving == 2)
    await crowd.fall_to(0)
    return fell_s, rose_s


# --------------------------------------------------------------------------------------------------------------- stalls


async def stalls(engine: AsyncEngine, seconds: float, num_rounds: int) -> tuple[float, float]:
    """P99 of the time between two outputs of requests that stay: (beside requests that stay, too; that move)."""
    staying, others = Crowd(engine, "staying"), Crowd(engine, "moving")
    await staying.grow_to(PLACES // 2)
    await others.grow_to(PLACES // 2)
    await asyncio.sleep(1.0)
    gaps: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * num_rounds):
        is_moving = turn % 2 == 1
        staying.gaps_s.clear()
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            if is_moving:
                await asyncio.gather(*(move(engine, each) for each in others.ids))
            await asyncio.sleep(0.5)
        gaps[is_moving] += staying.gaps_s
    await staying.fall_to(0)
    await others.fall_to(0)
    quiet, moving = Spread.of(gaps[False]), Spread.of(gaps[True])
    assert quiet is not None
    assert moving is not None
    return quiet.p99, moving.p99


async def measure(args: argparse.Namespace, base: str) -> list[Result]:
    results = []
    parts = [each for each in PARTS if each not in args.skip]
    if "moves" in parts:
        async with two_runners(base) as engine:
            num_moved, num_moves, num_wrong = await wrong_moves(engine, args.requests)
        results += [
            Result("requests that moved", num_moved, ""),
            Result("moves", num_moves, ""),
            Result("requests with another answer", num_wrong, "", 0),
        ]
    if "load" in parts:
        async with two_runners(base, min_runners=1, idle_s=args.idle_s) as engine:
            fell_s, rose_s = await fall_and_rise(engine)
        results += [
            Result("from the fall to one runner", fell_s, "s", args.idle_s + 2.0),
            Result("from the rise to two", rose_s, "s"),
        ]
    if "stalls" in parts:
        async with two_runners(base) as engine:
            quiet_s, moving_s = await stalls(engine, args.seconds, args.rounds)
        results += [
            Result("P99 between outputs, none moves", 1e3 * quiet_s, "ms"),
            Result("P99 between outputs, others move", 1e3 * moving_s, "ms"),
            Result("ratio", moving_s / quiet_s, "x", MAX_STALL),
        ]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=positive, default=1000, help="that move")
    parser.add_argument("--idle-s", type=float, default=2.0, help="--runner-idle-s of the fall")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a round of stalls")
    parser.add_argument("--rounds", type=positive, default=3, help="of stalls, with and without moves in turns")
    parser.add_argument("--skip", nargs="*", choices=PARTS, default=[], help="parts to leave out")
    parser.add_argument("--json", type=Path, help="where the figures are kept")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(measure(args, stretched_base(Path(folder) / "base")))
    table = Table(title="Two runners, the demo's model, one thread each", title_justify="left")
    for heading in ("what", "value", "target", ""):
        table.add_column(heading, justify="left" if heading in ("what", "") else "right")
    for each in results:
        target = "-" if each.target is None else f"{each.target:g} {each.unit}"
        state = "-" if each.target is None else verdict(each.value, each.target)
        table.add_row(each.what, f"{each.value:.4g} {each.unit}", target, state)
    wide_console().print(table)
    save(args.json, {"results": [asdict(each) for each in results]})


if __name__ == "__main__":
    main()
