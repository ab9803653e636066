"""Loraplex on the fixed workload, for `throughput.py`: the offline engine, no cached prefix, one process
(protocol.py)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.protocol import Job, serve
from loraplex import __version__
from loraplex.config import DEFAULT_ADAPTER_BYTES, DEFAULT_HOST_BYTES
from loraplex.core import LoRARequest, SamplingParams
from loraplex.frontend.llm import LLM

PACKED_PER_FILE = 2.25
"""Packed bytes for a byte of a file, at most: 16-bit adapters that stock torch widens, and alignment."""


class LoraplexEngine:
    """`settings` are keywords of LLM; adapters get room for all of the job's."""

    def __init__(self, job: Job) -> None:
        self.prompts = [{"prompt_token_ids": prompt} for prompt in job.prompts]
        self.requests = [LoRARequest(f"{i}-{Path(path).name}", i, path) for i, path in enumerate(job.adapters, 1)]
        room = _adapter_room(job) if job.settings.get("enable_lora", True) else {}
        # Peers recompute every prompt in every run, so the prefix cache is off.
        settings: dict[str, Any] = {
            "device": "cpu",  # as the peers have it, and whatever else the machine has
            "dtype": job.dtype,
            "num_threads": job.threads,
            "max_num_seqs": len(job.prompts),
            "enable_prefix_caching": False,
            **room,
            **job.settings,
        }
        self.llm = LLM(job.base, **settings)
        info = self.llm.engine.info
        self.version = f"{__version__} ({info.backend} kernels)"

    def generate(self, chosen: Sequence[int | None], output_len: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        adapters = [None if index is None else self.requests[index] for index in chosen]
        is_off = not any(adapters)
        outputs = self.llm.generate(self.prompts, params, lora_request=None if is_off else adapters)
        return [list(output.outputs[0].token_ids) for output in outputs]


def _adapter_room(job: Job) -> dict[str, int]:
    files = sum(_weight_bytes(Path(job.adapters[index])) for index in job.used)
    wanted = int(PACKED_PER_FILE * files)
    return {
        "adapter_memory_bytes": max(DEFAULT_ADAPTER_BYTES, wanted),
        "host_memory_bytes": max(DEFAULT_HOST_BYTES, wanted),
    }


def _weight_bytes(adapter: Path) -> int:
    return sum(os.path.getsize(file) for file in adapter.glob("*.safetensors"))


if __name__ == "__main__":
    serve(LoraplexEngine, __doc__)
