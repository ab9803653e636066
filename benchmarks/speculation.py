"""What drafts gain and cost: an engine with them beside one without, request by request in turns.

    python -m benchmarks.speculation --json results/speculation.json
    python -m benchmarks.speculation --model path/to/model --tokens 256 --rounds 9 --batch 1 --batch 4

copy       the demo's tasks that copy, each by its adapter, --phrases phrases one batch after the other: their answers
           end by themselves (with --model: a passage of random tokens twice and its beginning, for --tokens)
repeat     one token again and again, for --tokens
random     a temperature at which every token is as likely as any other, for --tokens: nothing holds

Both engines are in one process and answer the same batch one after the other, so a ratio has one machine state in it.
Printed are the medians over --rounds of: plain seconds / seconds with drafts (above 1 is a gain), plain steps / steps
with drafts, and the share of drafted tokens that held. Outputs are compared, and must be equal. Measured on an idle
machine only.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.table import Table

from benchmarks.arguments import positive
from benchmarks.report import wide_console
from loraplex import LLM, LoRARequest, SamplingParams
from loraplex.demo.tasks import adapter_path, assets_path, phrases, prompt_of

COPYING = ("double", "swap")
Prompt = str | dict[str, list[int]]


@dataclass(frozen=True)
class Suite:
    """Prompts with their adapters, `batch` of them at once, and how their answers are drawn."""

    name: str
    batch: int
    prompts: Sequence[tuple[Prompt, LoRARequest | None]]
    params: SamplingParams


@dataclass(frozen=True)
class Measured:
    suite: str
    batch: int
    ratio: float
    fewer_steps: float
    accepted_share: float


def suites(is_demo: bool, vocab_size: int, batch: int, tokens: int, num_phrases: int) -> list[Suite]:
    rng = random.Random(batch)

    def drawn(count: int) -> list[int]:
        return [rng.randrange(3, vocab_size) for _ in range(count)]

    adapters = [LoRARequest(name, index, str(adapter_path(name))) for index, name in enumerate(COPYING, 1)]
    chosen = [adapters[place % len(adapters)] if is_demo else None for place in range(batch)]
    greedy = SamplingParams(temperature=0, max_tokens=tokens)
    endless = replace(greedy, ignore_eos=True)
    one_token = replace(endless, logit_bias={vocab_size // 2: 100.0})
    flat = replace(endless, temperature=100.0, seed=1)
    texts = [({"prompt_token_ids": drawn(32)}, adapter) for adapter in chosen]
    if is_demo:
        asked = [prompt_of(phrase) for phrase in phrases("held_out", num_phrases, seed=batch)]
        tasks = [(phrase, adapters[place % len(adapters)]) for place, phrase in enumerate(asked)]
        copy = Suite("copy", batch, tasks, greedy)
    else:
        passages = [drawn(64) for _ in range(batch)]
        copy = Suite("copy", batch, [({"prompt_token_ids": each * 2 + each[:8]}, None) for each in passages], endless)
    return [copy, Suite("repeat", batch, texts, one_token), Suite("random", batch, texts, flat)]


@dataclass(frozen=True)
class Answered:
    """steps, tokens, drafted, accepted: that the engine counted meanwhile."""

    seconds: float
    outputs: list[tuple[int, ...]]
    steps: int
    tokens: int
    drafted: int
    accepted: int


def answer(llm: LLM, suite: Suite) -> Answered:
    before, began_s, outputs = llm.stats(), time.perf_counter(), []
    for start in range(0, len(suite.prompts), suite.batch):
        prompts, adapters = zip(*suite.prompts[start : start + suite.batch], strict=True)
        outputs += llm.generate(list(prompts), suite.params, lora_request=list(adapters))
    seconds, after = time.perf_counter() - began_s, llm.stats()
    return Answered(
        seconds,
        [tuple(each.outputs[0].token_ids) for each in outputs],
        after.step_times.num_steps - before.step_times.num_steps,
        after.num_generated_tokens - before.num_generated_tokens,
        after.num_draft_tokens - before.num_draft_tokens,
        after.num_accepted_tokens - before.num_accepted_tokens,
    )


def measure(plain: LLM, drafting: LLM, suite: Suite, rounds: int) -> Measured:
    found: list[tuple[Answered, Answered]] = []
    for place in range(rounds + 1):
        order = (plain, drafting) if place % 2 else (drafting, plain)  # neither is always the first
        answers = {llm: answer(llm, suite) for llm in order}
        if answers[plain].outputs != answers[drafting].outputs:
            raise SystemExit(f"{suite.name}: drafts changed an output")
        found.append((answers[plain], answers[drafting]))
    counted = found[1:]  # in the first one adapters are loaded and prompts cached
    ratio = statistics.median(without.seconds / drafted.seconds for without, drafted in counted)
    fewer_steps = statistics.median(without.steps / drafted.steps for without, drafted in counted)
    share = statistics.median(each.accepted / max(1, each.drafted) for _, each in counted)
    return Measured(suite.name, suite.batch, ratio, fewer_steps, share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a directory or hub id (default: the demo's, with adapters that copy)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--batch", type=positive, action="append", help="requests at once; repeatable (default: 1, 4)")
    parser.add_argument("--tokens", type=positive, default=128, help="of each answer")
    parser.add_argument("--phrases", type=positive, default=64, help="of the demo's tasks")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    batches, is_demo = args.batch or [1, 4], args.model is None
    settings = {"dtype": args.dtype, "quantization": args.quantization, "max_num_seqs": max(batches)}
    settings["max_model_len"] = args.tokens + (64 if is_demo else 160)
    model = str(assets_path() / "base") if is_demo else args.model
    with LLM(model, **settings) as plain, LLM(model, speculative="n-gram", **settings) as drafting:
        vocab_size = plain.engine.info.vocab_size
        results = [
            measure(plain, drafting, suite, args.rounds)
            for batch in batches
            for suite in suites(is_demo, vocab_size, batch, args.tokens, args.phrases)
        ]
        kernels = plain.engine.info.backend_description
    columns = "suite", "batch", "seconds, plain / drafts", "steps, plain / drafts", "accepted"
    table = Table(*columns, title=f"{model}, {kernels}")
    for each in results:
        numbers = f"{each.ratio:.2f}", f"{each.fewer_steps:.2f}", f"{each.accepted_share:.0%}"
        table.add_row(each.suite, str(each.batch), *numbers)
    wide_console().print(table)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        configuration = {"model": model, "kernels": kernels, "tokens": args.tokens, "rounds": args.rounds, **settings}
        args.json.write_text(json.dumps({**configuration, "results": [asdict(each) for each in results]}, indent=2))


if __name__ == "__main__":
    main()
