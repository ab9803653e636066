"""What peft says of activated LoRA: its own search of the invocation, its own forward pass over transformers' model."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.variants import calculate_alora_offsets
from torch import Tensor

from tests.fixtures import VOCAB_SIZE, GreedyCase, ModelZoo


class ActivatedOracle:
    """One base with one aLoRA, not merged."""

    def __init__(self, zoo: ModelZoo, base: Path, adapter: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded: Any = PeftModel.from_pretrained(copy.deepcopy(zoo.oracle(base).model), adapter)
        self.model = loaded.eval()

    def offsets(self, prompts: Tensor) -> list[int | None]:
        """As `generate` computes them, once, from the prompts: how many rows from the end are the adapter's."""
        found: list[int | None] = calculate_alora_offsets(self.model.peft_config, "default", prompts)
        return found

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """float32 [len(token_ids), vocab] of one forward pass over a prompt."""
        prompts = torch.tensor([list(token_ids)])
        logits: Tensor = self.model(prompts, alora_offsets=self.offsets(prompts)).logits[0].float()
        return logits

    @torch.inference_mode()
    def greedy_batch(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[GreedyCase]:
        """Greedy outputs of prompts of one length; eos does not stop them."""
        cache, step = None, torch.tensor([list(p) for p in prompts])
        offsets, tokens, gaps = self.offsets(step), [], []
        for _ in range(num_tokens):
            out = self.model(step, past_key_values=cache, use_cache=True, alora_offsets=offsets)
            best = out.logits[:, -1].float().topk(2)
            cache, step = out.past_key_values, best.indices[:, :1]
            tokens.append(step[:, 0])
            gaps.append(best.values[:, 0] - best.values[:, 1])
        outputs, min_gaps = torch.stack(tokens, 1).tolist(), torch.stack(gaps, 1).amin(1).tolist()
        return [GreedyCase(tuple(p), tuple(o), g) for p, o, g in zip(prompts, outputs, min_gaps, strict=True)]

    @torch.inference_mode()
    def generated(self, prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """What peft's `generate` says, greedy."""
        prompts = torch.tensor([list(prompt)])
        mask = torch.ones_like(prompts)
        out = self.model.generate(input_ids=prompts, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False)
        return tuple(out[0, len(prompt) :].tolist())

    def fit_case(self, invocation: Sequence[int], starts: Sequence[int], length: int, num_tokens: int) -> GreedyCase:
        """Of a prompt with the invocation at these positions and nowhere else."""
        for prompts in itertools.islice(_prompts(length), 20):
            for prompt in prompts:
                for start in starts:
                    prompt[start : start + len(invocation)] = invocation
            found = next((each for each in self.greedy_batch(prompts, num_tokens) if each.is_fit), None)
            if found is not None:
                return found
        raise AssertionError(f"no fit prompt with the invocation at {starts}")


def _prompts(length: int) -> Iterator[list[list[int]]]:
    generator = torch.Generator().manual_seed(length)
    while True:
        yield torch.randint(100, VOCAB_SIZE, (16, length), generator=generator).tolist()


@dataclass(frozen=True)
class ActivatedCase:
    """A prompt through an adapter (None: the base). start: where the last invocation begins; None: nowhere, or of
    another kind."""

    name: str
    path: Path | None
    greedy: GreedyCase
    start: int | None = None
