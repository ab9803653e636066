"""What it costs to go from one resident adapter to another, request by request.

    python -m benchmarks.switching --size s
Requests run one at a time. Blocks that stay on one adapter and blocks that alternate between two are interleaved, so that both see the
same weather. Printed: the median time of a request in each, and the difference, which should be under 1 ms.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks.fixture import SIZES, fixture
from loraplex.bench import Workload
from loraplex.core import LoRARequest, SamplingParams
from loraplex.engine.llm import LLM

BLOCK = 8


def time_requests(llm: LLM, prompt: list[int], adapters: list[LoRARequest], output_len: int) -> list[float]:
    """Seconds of each request, one after the other."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    seconds = []
    for adapter in adapters:
        began = time.perf_counter()
        llm.generate({"prompt_token_ids": prompt}, params, lora_request=adapter)
        seconds.append(time.perf_counter() - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="s")
    parser.add_argument("--prompt-len", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=20, help=f"of {BLOCK} requests each way")
    arguments = parser.parse_args()
    made = fixture(arguments.size, 16)
    # a0001 and a0005: the same rank, so that only the change of adapter differs.
    one, other = (_request(made.adapters[index], number) for number, index in enumerate((1, 5), 1))
    with LLM(str(made.base), dtype="float32", enable_prefix_caching=False) as llm:
        prompt = Workload(1, arguments.prompt_len).prompts(llm.engine.info.vocab_size)[0]
        time_requests(llm, prompt, [one, other] * BLOCK, arguments.output_len)
        staying: list[float] = []
        alternating: list[float] = []
        for index in track(range(arguments.blocks), "measuring"):
            stays = [one, other][index % 2]
            staying += time_requests(llm, prompt, [stays] * BLOCK, arguments.output_len)
            alternating += time_requests(llm, prompt, [one, other] * (BLOCK // 2), arguments.output_len)
    stay_ms, alternate_ms = 1e3 * statistics.median(staying), 1e3 * statistics.median(alternating)
    Console().print(
        f"{arguments.size}: staying {stay_ms:.2f} ms, alternating {alternate_ms:.2f} ms a request of "
        f"{arguments.prompt_len}+{arguments.output_len} tokens (medians of {len(staying)}): {alternate_ms - stay_ms:+.2f} ms"
    )


def _request(path: Path, number: int) -> LoRARequest:
    return LoRARequest(path.name, number, str(path))


if __name__ == "__main__":
    main()
