"""transformers + peft on the fixed workload, for `throughput.py` (protocol.py). Run by an environment that has both.

Mixed batches are PEFT's own: `generate(adapter_names=[...])`. Until a pattern uses an adapter the model has no LoRA
code at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from benchmarks.protocol import Job, serve


class HuggingFaceEngine:
    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        transformers.utils.logging.disable_progress_bar()
        self.version = f"transformers {transformers.__version__}, peft {peft.__version__}, torch {torch.__version__}"
        self.job = job
        self.dtype = getattr(torch, job.dtype)
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(job.base, dtype=self.dtype).eval()
        self.loaded: set[int] = set()
        self.prompts = torch.tensor(job.prompts)

    def generate(self, chosen: Sequence[int | None], output_len: int) -> list[list[int]]:
        self._load({index for index in chosen if index is not None} - self.loaded)
        is_base = all(index is None for index in chosen)
        names = ["__base__" if index is None else _name(index) for index in chosen]
        mixed = {} if is_base else {"adapter_names": names}
        without = self.model.disable_adapter() if is_base and self.loaded else contextlib.nullcontext()
        with without, torch.inference_mode():
            tokens = self.model.generate(
                input_ids=self.prompts, attention_mask=torch.ones_like(self.prompts), max_new_tokens=output_len,
                min_new_tokens=output_len, do_sample=False, eos_token_id=None, pad_token_id=1, **mixed,
            )  # fmt: skip
        return [list(output) for output in tokens[:, self.prompts.shape[1] :].tolist()]

    def _load(self, missing: set[int]) -> None:
        for index in sorted(missing):
            path = Path(self.job.adapters[index])
            if self.loaded:
                self.model.load_adapter(path, adapter_name=_name(index))
            else:
                self.model = peft.PeftModel.from_pretrained(self.model, path, adapter_name=_name(index))
            self.loaded.add(index)
        if missing:
            self.model = self.model.to(self.dtype).eval()


def _name(index: int) -> str:
    return f"adapter-{index}"


if __name__ == "__main__":
    serve(HuggingFaceEngine, __doc__)
