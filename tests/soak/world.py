"""What the soak plays with: contents on disk, the sources of names, and what every content says alone.

A family is one adapter config with several versions of its weights. A source is a directory with the files of one
version of its family; a version is replaced by another with one rename, so that no reader ever sees half of each.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from loraplex import LLM, LoRARequest, SamplingParams
from loraplex.core import Logprob
from tests.fixtures import ADAPTER_OPTIONS, MIN_GAP, TARGET_MODULES, VOCAB_SIZE, ModelZoo

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
NUM_TOKENS = 40
PROMPT_SHAPES = ((9, 0), (20, 0), (33, 0), (36, 16), (47, 32), (18, 16))
"""(length, tokens shared with the other prompts): KV blocks of 16 tokens that only the adapter tells apart."""

_ALL = list(TARGET_MODULES)
FAMILIES: tuple[Mapping[str, Any], ...] = (
    {"r": 8, "lora_alpha": 16, "target_modules": _ALL},
    {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]},
    {"r": 12, "lora_alpha": 9, "target_modules": _ALL, "lora_bias": True},
    {"r": 1, "lora_alpha": 1, "target_modules": ["down_proj"]},
    {"r": 16, "lora_alpha": 16, "target_modules": ["k_proj", "o_proj", "gate_proj"]},
    {"r": 32, "lora_alpha": 16, "target_modules": _ALL},
    {"r": 5, "lora_alpha": 7, "use_rslora": True, "target_modules": _ALL},
    ADAPTER_OPTIONS["patterns"],
    ADAPTER_OPTIONS["one layer"],
    ADAPTER_OPTIONS["bias all"],
    {"r": 8, "lora_alpha": 8, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    {"r": 24, "lora_alpha": 24, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
)
BROKEN = ("missing", "truncated", "not tensors", "no weights", "no config", "NaN", "other base", "a pipe", "bad json")


@dataclass(frozen=True)
class Answer:
    """What a content says alone to a prompt. From token `num_sure` on two tokens are as likely; rounding decides."""

    token_ids: tuple[int, ...]
    num_sure: int

    def is_said_by(self, token_ids: Sequence[int]) -> bool:
        """Whether `token_ids` begin as this answer does, as far as that is sure."""
        count = min(self.num_sure, len(token_ids))
        return len(token_ids) <= len(self.token_ids) and tuple(token_ids[:count]) == self.token_ids[:count]


@dataclass(frozen=True)
class Content:
    """One version of a family, at a path that no verb changes."""

    digest: str
    family: int
    path: Path
    nbytes: int


@dataclass(frozen=True)
class World:
    """`answers[digest][i]` answers `prompts[i]`; digest "" is the base model. nbytes: packed, as in memory."""

    base: Path
    contents: Mapping[str, Content]
    prompts: Sequence[tuple[int, ...]]
    answers: Mapping[str, Sequence[Answer]]

    @property
    def num_families(self) -> int:
        return 1 + max(content.family for content in self.contents.values())

    def versions(self, family: int) -> list[Content]:
        return [content for content in self.contents.values() if content.family == family]

    def nbytes_of(self, num_adapters: int) -> int:
        """Room for so many adapters of middling size, and for the largest one in any case."""
        sizes = sorted(content.nbytes for content in self.contents.values())
        return max(sizes[-1], num_adapters * sizes[len(sizes) // 2])


def make_world(zoo: ModelZoo, num_families: int, num_versions: int, num_prompts: int) -> World:
    """Contents and their answers, from an engine with room for everything that runs one adapter at a time."""
    base = zoo.base("llama")
    paths = [
        (family, zoo.adapter(base, LoraConfig(**options, task_type="CAUSAL_LM"), seed=500 + 10 * family + version))
        for family, options in enumerate(FAMILIES[:num_families])
        for version in range(num_versions)
    ]
    prompts = make_prompts(num_prompts)
    contents: dict[str, Content] = {}
    with LLM(str(base), max_model_len=128, num_threads=1, kv_cache_memory_bytes=1 << 26) as llm:
        answers = {"": answers_of(llm, prompts, None)}
        for number, (family, path) in enumerate(paths, start=1):
            said = answers_of(llm, prompts, LoRARequest(f"c{number}", number, str(path)))
            info = next(info for info in llm.adapters() if info.ref.adapter_name == f"c{number}")
            digest = info.ref.adapter_digest
            contents[digest] = Content(digest, family, path, info.nbytes)
            answers[digest] = said
    assert len(contents) == len(paths), "two versions are alike"
    sure = [each.num_sure for said in answers.values() for each in said]
    assert sum(sure) > 0.6 * NUM_TOKENS * len(sure), "too many near ties: the comparison would say little"
    return World(base, contents, prompts, answers)


def make_prompts(num_prompts: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(11)

    def draw(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist())

    shared = draw(max(length for length, _ in PROMPT_SHAPES))
    shapes = itertools.islice(itertools.cycle(PROMPT_SHAPES), num_prompts)
    return [shared[:num_shared] + draw(length - num_shared) for length, num_shared in shapes]


def answers_of(llm: LLM, prompts: Sequence[tuple[int, ...]], lora_request: LoRARequest | None) -> list[Answer]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2, detokenize=False)
    outputs = llm.generate(list(prompts), params, lora_request=lora_request)
    answers = []
    for output in outputs:
        completion = output.outputs[0]
        assert completion.logprobs is not None
        gaps = [_gap(list(candidates.values())) for candidates in completion.logprobs]
        num_sure = next((i for i, gap in enumerate(gaps) if gap < MIN_GAP), NUM_TOKENS)
        answers.append(Answer(tuple(completion.token_ids), num_sure))
    return answers


def _gap(candidates: list[Logprob]) -> float:
    first, second = sorted((candidate.logprob for candidate in candidates), reverse=True)[:2]
    return first - second


# -------------------------------------------------------------------------------------------------------------- sources


@dataclass(frozen=True)
class Source:
    """A directory that a name is loaded from."""

    path: Path

    def write(self, content: Content) -> None:
        """Its files are those of `content` from now on; a reader that has one of them open reads on what it opened."""
        self.path.mkdir(exist_ok=True)
        for name in (CONFIG, WEIGHTS):  # of one family: the config is the same, the weights change with one rename
            fresh = self.path / f".{name}"
            shutil.copy(content.path / name, fresh)
            os.replace(fresh, self.path / name)

    def spoil(self, how: str, content: Content) -> None:
        """Make it what no engine may load, in one of the ways of BROKEN."""
        self.write(content)
        weights, config = self.path / WEIGHTS, self.path / CONFIG
        match how:
            case "missing":
                shutil.rmtree(self.path)
            case "truncated":
                self._replace(weights.read_bytes()[:-100])
            case "not tensors":
                self._replace(b"not a tensor in sight" * 40)
            case "no weights":
                weights.unlink()
            case "no config":
                config.unlink()
            case "NaN":
                self._change(lambda tensor: torch.full_like(tensor, math.nan))
            case "other base":
                self._change(lambda tensor: torch.zeros(3, 3))
            case "a pipe":
                weights.unlink()
                os.mkfifo(weights)
            case "bad json":
                config.write_text(json.dumps({"r": 0}) + "{")

    def _replace(self, data: bytes) -> None:
        fresh = self.path / ".fresh"
        fresh.write_bytes(data)
        os.replace(fresh, self.path / WEIGHTS)

    def _change(self, change: Any) -> None:
        tensors = load_file(self.path / WEIGHTS)
        name = min(tensors)
        save_file({**tensors, name: change(tensors[name])}, self.path / ".fresh")
        os.replace(self.path / ".fresh", self.path / WEIGHTS)
