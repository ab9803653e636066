"""What is made of weights before steps run: a base that is quantised or has an adapter merged into it, and compressed
copies of adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loraplex.errors import AdapterContentChangedError
from tests.engine.driver import Driver
from tests.fixtures import HIDDEN_SIZE, VOCAB_SIZE, ModelZoo
from tests.ranks.engines import LORA, SETTINGS, Asked, adapter_of, answers, kind_of, load, opened

pytestmark = pytest.mark.slow

MODULES = (
    ("model.layers.0.self_attn.q_proj", HIDDEN_SIZE, HIDDEN_SIZE),
    ("model.layers.1.mlp.down_proj", HIDDEN_SIZE, 160),
    ("lm_head", VOCAB_SIZE, HIDDEN_SIZE),
)
"""Names, outputs and inputs."""


def rms(one: list[float], other: list[float]) -> float:
    return (sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) / len(one)) ** 0.5


def logprobs_of(driver: Driver, asks: list[Asked]) -> list[float]:
    """Of the tokens of prompts."""
    ids = [driver.submit(each.prompt, each.name, max_tokens=1, prompt_logprobs=0) for each in asks]
    driver.finish()
    scored = [each for one in ids for each in driver.outputs[one].prompt_logprobs or () if each is not None]
    return [each.logprob for position in scored for each in position.values()]


@pytest.mark.parametrize(
    ("quantization", "backend"),
    [
        ("int8", "auto"),
        ("int4", "auto"),
        *(pytest.param(each, "reference", marks=pytest.mark.ranks) for each in ("int8", "int4", "fp8")),
    ],
)
def test_a_quantised_base_is_no_further_from_the_exact_one_than_with_one_rank(
    zoo: ModelZoo, quantization: str, backend: str
) -> None:
    """A rank rounds its own part of a row, whose largest number is no larger than the row's. DoRA divides by the norms
    of what the ranks multiply with."""
    base = zoo.base("llama", options={"tie_word_embeddings": False})
    adapters = {"LoRA": adapter_of(zoo, base, "all linears"), "DoRA": kind_of(zoo, base, "DoRA")}
    adapters |= {name: zoo.own_adapter(base, name) for name in ("LoRA of both", "saved head")}
    asks = [Asked(name, 60, shift=index) for index, name in enumerate((None, *adapters))]
    seen, said = [], []
    for size, kept in ((1, None), (1, quantization), (2, quantization)):
        with opened(base, size, quantization=kept, lora_backend=backend) as driver:
            load(driver, adapters)
            seen.append(logprobs_of(driver, asks))
            said.append(answers(driver, [replace(each, num_tokens=4) for each in asks]))
    exact, of_one, of_two = seen
    assert rms(of_one, exact) > 0
    assert rms(of_two, exact) <= 1.15 * rms(of_one, exact)
    assert said[2] == said[1] or backend == "reference" or quantization == "int4"


@pytest.mark.parametrize("quantization", [None, "int8", "int4-a16"])
def test_norms_and_rows_are_of_the_whole_base(zoo: ModelZoo, quantization: str | None) -> None:
    """Those of one rank; of a linear that is cut by inputs each rank rounds its part of a row by itself, and in 4 bits
    in groups of its own. The head is the embedding, which stays as it was loaded."""
    base, tokens = zoo.base("llama"), torch.tensor([0, 5, 4095, 4096, 8191])
    seen = []
    for size in (1, 2):
        with opened(base, size, quantization=quantization) as driver:
            model, norms = driver.engine._runner._model, []
            for name, out_features, in_features in MODULES:
                norms.append(model.row_norms(name, torch.ones(2, in_features), torch.ones(out_features, 2), 0.01))
            seen.append((norms, model.base_rows("lm_head", tokens), model.base_rows("model.embed_tokens", tokens)))
    for (name, *_), of_one, of_two in zip(MODULES, seen[0][0], seen[1][0], strict=True):
        is_split = quantization is not None and name.endswith("down_proj")
        torch.testing.assert_close(
            of_two, of_one, rtol=(2e-2 if quantization == "int4-a16" else 2e-3) if is_split else 1e-5, atol=0
        )
        assert not is_split or not torch.equal(of_two, of_one)
    assert all(torch.equal(*each) for each in zip(seen[0][1:], seen[1][1:], strict=True))


@pytest.mark.parametrize("kind", ["LoRA", "DoRA"])
def test_a_merged_adapter_says_what_it_says_unmerged(zoo: ModelZoo, kind: str) -> None:
    base, asks = zoo.base("llama", options={"attention_bias": True, "mlp_bias": True}), [Asked(None), Asked(None, 30)]
    path = kind_of(zoo, base, "DoRA") if kind == "DoRA" else adapter_of(zoo, base, "bias all")
    with opened(base, 1) as driver:
        load(driver, {"sql": path})
        expected = answers(driver, [replace(each, name="sql") for each in asks])
        assert answers(driver, asks) != expected
    merged = Driver(base, is_lora_on=False, **{**SETTINGS, "tensor_parallel_size": 2, "merge_adapter": str(path)})
    try:
        assert answers(merged, asks) == expected
    finally:
        merged.close()
    with pytest.raises(AdapterContentChangedError):
        Driver(
            base,
            is_lora_on=False,
            **{**SETTINGS, "tensor_parallel_size": 2, "merge_adapter": str(path), "merge_adapter_digest": "another"},
        )


@pytest.mark.parametrize(
    ("compression", "is_full"),
    [
        ("lossless", False),
        *(pytest.param(*each, marks=pytest.mark.ranks) for each in (("lossless", True), ("int8", False))),
    ],
)
def test_a_compressed_copy_is_restored_for_every_rank(zoo: ModelZoo, compression: str, is_full: bool) -> None:
    base = zoo.base("llama")
    lora = replace(LORA, max_loras=1, host_compression=compression, fully_sharded_loras=is_full)
    adapters: dict[str, Path] = {name: adapter_of(zoo, base, name) for name in ("all linears", "patterns")}
    adapters |= {name: zoo.own_adapter(base, name) for name in ("trained tokens", "added tokens, LoRA of both")}
    asks = [Asked(name, num_tokens=8) for name in adapters]
    with opened(base, 2, lora) as driver:
        load(driver, adapters)
        before = logprobs_of(driver, asks)
        store, housekeeping = driver.engine.adapters._residency, driver.engine.adapters.housekeeping
        store.room.pass_id += 5  # no request asked lately
        assert housekeeping.reclaim_idle("host", -1e9, 4) > 0
        assert store.tiers.compressed is not None
        for _ in range(200):  # a loader's thread makes the copies
            if len(store.tiers.compressed) and not any(each.host for each in store.weights.values()):
                break
            driver.engine.adapters.wait_for_change(0.05)
        after = logprobs_of(driver, asks)
        assert driver.stats.memory.found["compressed"] > 0
        driver.check_integrity()
    assert after == pytest.approx(before, abs=0 if compression == "lossless" else 0.2)
    assert compression == "lossless" or after != before
