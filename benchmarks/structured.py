"""What masks cost: decode steps of a batch with forms beside the same batch without, in turns.

    python -m benchmarks.structured --model path/to/model --batch 16 --tokens 64 --rounds 5

Every request draws from a JSON schema whose text does not end within the tokens that are measured. A step's time is
the median over the decode steps of a round; printed are the medians over the rounds and the share that forms add.
Measured on an idle machine only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from loraplex import LLM, SamplingParams, StructuredOutputsParams

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3},
        "size": {"type": "integer", "minimum": 0, "maximum": 9999},
        "kind": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 1000}


def step_seconds(llm: LLM, batch: int, tokens: int, form: StructuredOutputsParams | None) -> float:
    """The median of the steps after the prompts."""
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=tokens, ignore_eos=True, structured_outputs=form)
    for number in range(batch):
        llm.submit([10 + number, 11, 12, 13], params)
    seconds = []
    while llm.has_unfinished:
        began = time.perf_counter()
        outputs = llm.step()
        if outputs and min(len(each.outputs[0].token_ids) for each in outputs) > 2:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    form = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    with LLM(args.model, max_num_seqs=args.batch, max_model_len=args.tokens + 64) as llm:
        for each in (None, form):  # kernels, the vocabulary and the grammar are there from now on
            step_seconds(llm, args.batch, 8, each)
        rounds = [
            [step_seconds(llm, args.batch, args.tokens, each) for each in (None, form)] for _ in range(args.rounds)
        ]
    plain, masked = (statistics.median(column) for column in zip(*rounds, strict=True))
    result = {"batch": args.batch, "plain_ms": 1e3 * plain, "masked_ms": 1e3 * masked, "share": masked / plain - 1}
    print(
        f"batch {args.batch}: {1e3 * plain:.2f} ms a step, {1e3 * masked:.2f} ms with forms: {masked / plain - 1:+.1%}"
    )
    if args.json is not None:
        args.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
