"""Adapters with embeddings, heads, norms, linears and tokens of their own: tokens are transformers', alone and in one
batch of all kinds; base rows and rows beside them stay as they are, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex import LLM
from loraplex.engine.engine import EngineCore
from tests.engine.own_models import ADDED, CUT, Maker, OwnModel, ask
from tests.fixtures import MIN_GAP, VOCAB_SIZE, ModelZoo

NUM_TOKENS = 24
MAX_MODEL_LEN = 96

RECIPES: Mapping[str, tuple[tuple[str, ...], int | None]] = {
    "linear": (("linear",), None),
    "embedding": (("embedding", "linear"), None),
    "head": (("head",), None),
    "embedding and head": (("embedding", "head"), None),
    "rows of the embedding": (("rows of the embedding", "linear"), None),
    "rows of both": (("rows of the embedding", "rows of the head"), None),
    "whole embedding": (("whole embedding",), None),
    "whole head": (("whole head", "linear"), None),
    "norms": (("norms",), None),
    "linears": (("linears", "linear"), None),
    "added": (("resized", "linear"), VOCAB_SIZE + ADDED),
    "added with LoRA": (("resized", "embedding", "head"), VOCAB_SIZE + ADDED),
    "fewer": (("resized",), VOCAB_SIZE - CUT),
    "everything": (("linear", "embedding", "whole head", "norms"), None),
}
"""What an adapter has, and where its vocabulary ends."""


@dataclass(frozen=True)
class Case:
    own: OwnModel | None
    prompt: tuple[int, ...]
    expected: tuple[int, ...]


@dataclass(frozen=True)
class Family:
    base: Path
    cases: Mapping[str, Case]


FAMILIES = {"llama": True, "mistral": False, "qwen2": False, "qwen3": True}
"""Whether the embedding is the head's weight."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, zoo: ModelZoo) -> Family:
    base = zoo.base(request.param, options={"tie_word_embeddings": FAMILIES[request.param]})
    maker = Maker(zoo.oracle(base).model)
    cases = {}
    for index, (name, (layers, vocab_size)) in enumerate(RECIPES.items()):
        own = maker.make(*layers, vocab_size=vocab_size)
        cases[name] = _fit(own, own.oracle, own.vocab_size, 5 + 7 * (index % 5))
    cases["base"] = _fit(None, zoo.oracle(base), VOCAB_SIZE, 12)
    return Family(base, cases)


def _fit(own: OwnModel | None, oracle: Any, vocab_size: int, length: int) -> Case:
    """A prompt with tokens from the end of the vocabulary, on which no two logits are near a tie."""
    generator = torch.Generator().manual_seed(length)
    for _ in range(50):
        prompt = torch.randint(3, vocab_size, (length,), generator=generator)
        prompt[1:3] = torch.randint(vocab_size - 50, vocab_size, (2,), generator=generator)
        case = oracle.greedy(prompt.tolist(), NUM_TOKENS)
        if case.min_gap >= MIN_GAP:
            return Case(own, case.prompt_token_ids, case.output_token_ids)
    raise AssertionError("no fit prompt")


def started(family: Family, **settings: Any) -> LLM:
    llm = LLM(str(family.base), max_model_len=MAX_MODEL_LEN, **settings)
    for case in family.cases.values():
        if case.own is not None:
            llm.engine.adapters.add_adapter(case.own.model)
    return llm


def check(engine: EngineCore, family: Family, *names: str) -> None:
    """What these say in one batch."""
    chosen = [family.cases[name] for name in names or family.cases]
    said = ask(engine, [(case.own, case.prompt) for case in chosen], NUM_TOKENS)
    wrong = [
        name for name, case, tokens in zip(names or family.cases, chosen, said, strict=True) if tokens != case.expected
    ]
    assert not wrong, wrong
    engine.check_integrity()


@pytest.fixture(params=["auto", "torch", "reference"])
def llm(request: pytest.FixtureRequest, family: Family) -> Iterator[LLM]:
    with started(family, lora_backend=request.param) as llm:
        yield llm


def test_the_oracles_say_what_the_base_does_not(family: Family) -> None:
    said = {case.expected for case in family.cases.values()}
    assert len(said) == len(family.cases)
    assert max(max(family.cases[name].expected) for name in ("added", "added with LoRA")) >= VOCAB_SIZE


def test_alone(llm: LLM, family: Family) -> None:
    for name in family.cases:
        check(llm.engine, family, name)


def test_in_one_batch_and_again(llm: LLM, family: Family) -> None:
    check(llm.engine, family)
    check(llm.engine, family)
    assert llm.stats().num_prefix_hit_tokens > 0
