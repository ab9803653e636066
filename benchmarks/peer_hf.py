"""transformers + peft on the fixed workload: the peer beside which `throughput.py` measures. One JSON line per run on stdout."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from loraplex.bench import Measurement, Workload


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
    for run in measure_hf(
        arguments.base,
        list(map(Path, arguments.adapters)),
        arguments.dtype,
        workload,
        arguments.pattern,
        arguments.runs,
    ):
        print(json.dumps(asdict(run)), flush=True)


def measure_hf(
    base: str, adapter_paths: list[Path], dtype: str, workload: Workload, pattern: str, num_runs: int
) -> list[Measurement]:
    """PEFT's own mixed batches: `generate(adapter_names=[...])`; the base pattern runs without any LoRA code."""
    import transformers
    from peft import PeftModel

    transformers.utils.logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype)).eval()
    indices = workload.adapters(pattern, len(adapter_paths))
    names = ["__base__" if index is None else adapter_paths[index].name for index in indices]
    for used in sorted({index for index in indices if index is not None}):
        path = adapter_paths[used]
        if isinstance(model, PeftModel):
            model.load_adapter(path, adapter_name=path.name)
        else:
            model = PeftModel.from_pretrained(model, path, adapter_name=path.name)
    model = model.to(getattr(torch, dtype)).eval()
    tokens = torch.tensor(workload.prompts(model.config.vocab_size))
    extra = {} if pattern == "base" else {"adapter_names": names}

    def generate(count: int) -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, min_new_tokens=count,
                do_sample=False, eos_token_id=None, pad_token_id=1, **extra,
            )  # fmt: skip
        return time.perf_counter() - began

    generate(2)
    runs = []
    for _ in range(num_runs):
        first_s, seconds = generate(1), generate(workload.output_len)
        rate = workload.num_requests * workload.output_len / seconds
        step_ms = 1e3 * (seconds - first_s) / max(1, workload.output_len - 1)
        runs.append(Measurement(pattern, len(set(names) - {"__base__"}), rate, first_s, step_ms))
    return runs


if __name__ == "__main__":
    main()
