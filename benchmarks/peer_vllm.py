"""vLLM's offline engine on a CPU on the fixed workload, for `throughput.py` (protocol.py), in its own environment.

settings: `enable_lora` (false: LoRA off, base requests only). With LoRA on, vLLM gets as many slots as a batch has
adapters, each as wide as the widest adapter, which it needs; prefixes are not cached.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.protocol import Job, serve

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as max_lora_rank."""

SPARE_TOKENS = 16


class VllmEngine:
    def __init__(self, job: Job) -> None:
        import vllm
        from vllm.lora.request import LoRARequest

        self.version = vllm.__version__
        self.params = vllm.SamplingParams
        self.prompts = [{"prompt_token_ids": prompt} for prompt in job.prompts]
        self.has_lora = job.settings.get("enable_lora", True)
        self.requests = [LoRARequest(_name(path, i), i, path) for i, path in enumerate(job.adapters, 1)]
        self.llm = vllm.LLM(
            model=job.base,
            dtype=job.dtype,
            max_model_len=job.prompt_len + job.output_len + SPARE_TOKENS,
            max_num_seqs=len(job.prompts),
            enable_prefix_caching=False,
            skip_tokenizer_init=not (Path(job.base) / "tokenizer.json").exists(),
            seed=0,
            **(lora_settings(job) if self.has_lora else {}),
        )

    def generate(self, chosen: Sequence[int | None], output_len: int) -> list[list[int]]:
        params = self.params(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        adapters = [None if index is None else self.requests[index] for index in chosen] if self.has_lora else None
        outputs = self.llm.generate(self.prompts, params, lora_request=adapters, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def lora_settings(job: Job) -> dict[str, Any]:
    """Slots for the adapters of one batch, host memory for all, and the smallest of vLLM's ranks for the widest."""
    widest = max((_rank(job.adapters[index]) for index in job.used), default=RANKS[0])
    slots = max(1, job.max_distinct)
    return {
        "enable_lora": True,
        "max_loras": slots,
        "max_cpu_loras": max(slots, len(job.used)),
        "max_lora_rank": next(rank for rank in RANKS if rank >= widest),
    }


def _name(path: str, number: int) -> str:
    return f"{number}-{Path(path).name}"


def _rank(adapter: str) -> int:
    return int(json.loads((Path(adapter) / "adapter_config.json").read_text())["r"])


if __name__ == "__main__":
    serve(VllmEngine, __doc__)
