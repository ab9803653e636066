"""The rules of adapters with every kind at once, in any order of requests, aborts, verbs and changes of the sources.

The machine is that of test_engine_properties.py. What an adapter, a mix or the base says is what an engine says that
has nothing else, to the bit where kernels are native: of the base, one without LoRA. Tokens of adapters and of the base
are those of transformers + peft.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from loraplex.core import AdapterChoice, AdapterMix
from loraplex.errors import AdapterMixError
from tests.engine.driver import Driver, packed_nbytes
from tests.engine.mix_oracles import active_oracle
from tests.engine.test_engine_properties import BLOCK_SIZE, NUM_TOKENS, World, play
from tests.fixtures import KIND_OPTIONS, MIN_GAP, VOCAB_SIZE, ModelZoo

pytestmark = pytest.mark.slow

NUM_CANDIDATES, NUM_ASKED = 48, 8
"""Prompts that are drawn, and that are asked about at a time, until one is fit."""

MIX_WEIGHTS = (1.0, 1.0)
_Q = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
SOME_TOKENS = list(range(8000, 3, -80))
PLAIN: Mapping[str, Mapping[str, Any]] = {
    "LoRA": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "LoRA with biases": {"r": 5, "lora_alpha": 9, "target_modules": "all-linear", "lora_bias": True},
    "ends": {**_Q, "target_modules": ["embed_tokens", "lm_head", "v_proj"]},
    "norms": {**_Q, "modules_to_save": ["norm", "input_layernorm"]},
    "a linear of its own": {**_Q, "modules_to_save": ["0.self_attn.k_proj"]},
    "trained tokens": {**_Q, "trainable_token_indices": SOME_TOKENS},
}
KINDS = ("DoRA", "IA3", "LoHa", "LoKr", "VeRA")
ADDED = 40
"""Tokens: rows of the embedding and the head, and answers that have them."""

FITS = {("IA3", "IA3")} | {
    pair
    for pair in itertools.product(("DoRA", "LoHa", "LoKr", "LoRA", "LoRA with biases", "VeRA", "ends"), repeat=2)
    if pair[0] <= pair[1]
}
"""Mixes, in the order of their names, that are not refused with weights of one."""


@pytest.fixture(scope="module")
def kinds(zoo: ModelZoo) -> World:
    base = zoo.base("llama")
    contents = {
        name: zoo.adapter(base, peft.LoraConfig(**options, task_type="CAUSAL_LM"), seed=70)
        for name, options in PLAIN.items()
    }
    for name in KINDS:
        config_class, options = KIND_OPTIONS[name]
        contents[name] = zoo.adapter(base, getattr(peft, config_class)(**options, task_type="CAUSAL_LM"), seed=71)
    added = peft.LoraConfig(**_Q, trainable_token_indices=list(range(VOCAB_SIZE, VOCAB_SIZE + ADDED)))
    contents["added"] = zoo.adapter(base, added, seed=72, strength=2, vocab_size=VOCAB_SIZE + ADDED)
    contents = dict(sorted(contents.items()))
    prompts, expected, scores, is_native = spoken(base, contents)
    for name in (None, *contents):
        oracle = zoo.oracle(base, None if name is None else contents[name])
        for prompt, answer in zip(prompts, expected[() if name is None else (name,)], strict=True):
            assert oracle.greedy(prompt, NUM_TOKENS).output_token_ids == answer, name
    for pair in (("LoRA", "ends"), ("LoRA", "LoRA with biases")):
        oracle = active_oracle(zoo, base, [(contents[name], 1.0) for name in pair])
        assert [oracle.greedy(each, NUM_TOKENS).output_token_ids for each in prompts] == expected[pair], pair
    nbytes = {name: packed_nbytes(base, path) for name, path in contents.items()}
    return World(base, contents, prompts, expected, nbytes, scores if is_native else {}, MIX_WEIGHTS, is_counted=True)


Scores = list[list[dict[int, float]]]


def spoken(
    base: Path, contents: Mapping[str, Path]
) -> tuple[list[list[int]], dict[tuple[str, ...], list[tuple[int, ...]]], dict[tuple[str, ...], Scores], bool]:
    """Prompts on which nothing is near a tie, and what each says to them with nothing beside it."""
    with_lora, without = Driver(base, max_model_len=64), Driver(base, is_lora_on=False, max_model_len=64)
    for name, path in contents.items():
        with_lora.registry.load(name, str(path))
        with_lora.registry.load(f"{name} again", str(path))
    choices: dict[tuple[str, ...], AdapterChoice] = {(): None, **{(name,): name for name in contents}}
    for a, b in itertools.combinations_with_replacement(contents, 2):
        choices[a, b] = AdapterMix(((a, MIX_WEIGHTS[0]), (f"{b} again", MIX_WEIGHTS[1])))
    prompts: list[list[int]] = []
    expected: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    scores: dict[tuple[str, ...], Scores] = {}
    generator = torch.Generator().manual_seed(4)
    for length, num_shared in ((20, 0), (36, BLOCK_SIZE), (9, 0), (33, 0)):
        shared = prompts[0][:num_shared] if num_shared else []
        fresh = torch.randint(3, VOCAB_SIZE, (NUM_CANDIDATES, length - num_shared), generator=generator).tolist()
        for start in range(0, NUM_CANDIDATES, NUM_ASKED):
            candidates = [shared + each for each in fresh[start : start + NUM_ASKED]]
            cases = {}
            for key, choice in choices.items():
                try:
                    cases[key] = alone(with_lora if key else without, choice, candidates)
                except AdapterMixError:
                    assert key not in FITS
            assert {key for key in cases if len(key) == 2} == FITS
            least = [min(least_gap(case[i][1]) for case in cases.values()) for i in range(NUM_ASKED)]
            if max(least) >= MIN_GAP:
                break
        fit = next(i for i, gap in enumerate(least) if gap >= MIN_GAP)
        prompts.append(candidates[fit])
        for key, case in cases.items():
            expected.setdefault(key, []).append(case[fit][0])
            scores.setdefault(key, []).append(case[fit][1])
    is_native = with_lora.engine.info.backend == "native"
    with_lora.close()
    without.close()
    return prompts, expected, scores, is_native


def alone(
    driver: Driver, choice: AdapterChoice, prompts: Sequence[Sequence[int]]
) -> list[tuple[tuple[int, ...], list[dict[int, float]]]]:
    """Tokens and log probabilities."""
    ids = [driver.submit(prompt, choice, max_tokens=NUM_TOKENS, logprobs=2) for prompt in prompts]
    driver.finish()
    said = [(driver.tokens(each), driver.outputs[each].outputs[0].logprobs or ()) for each in ids]
    return [(tokens, [{i: entry[i].logprob for i in entry} for entry in entries]) for tokens, entries in said]


def least_gap(scores: Sequence[Mapping[int, float]]) -> float:
    return min(max(each.values()) - min(each.values()) for each in scores)


def test_answers_differ_and_say_what_was_added(kinds: World) -> None:
    first = [answers[0] for answers in kinds.expected.values()]
    assert len(set(first)) == len(first)
    assert max(map(max, kinds.expected[("added",)])) >= VOCAB_SIZE


def test_nothing_is_lost_or_mixed_up(kinds: World) -> None:
    play(kinds, max_examples=30)
