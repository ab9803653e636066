"""Adapters with embeddings, heads, norms, linears and tokens of their own: tokens are transformers', alone and in one
batch of all kinds; base rows and rows beside them stay as they are, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex import LLM, SamplingParams
from loraplex.adapters.weights import LoRAModel
from loraplex.core import AdapterId
from loraplex.engine import build
from loraplex.engine.engine import EngineCore
from loraplex.errors import InvalidRequestError
from loraplex.kernels.triton.backend import TritonBackend
from tests.engine.own_models import ADDED, CUT, Maker, OwnModel, Said, ask, request_of
from tests.fixtures import HIDDEN_SIZE, MIN_GAP, VOCAB_SIZE, ModelZoo, Oracle

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
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
    own: LoRAModel | None
    prompt: tuple[int, ...]
    expected: tuple[int, ...]


@dataclass(frozen=True)
class Family:
    base: Path
    cases: Mapping[str, Case]
    oracles: Mapping[str, Oracle]


FAMILIES = {"llama": True, "mistral": False, "qwen2": False, "qwen3": True}
"""Whether the embedding is the head's weight."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, zoo: ModelZoo) -> Family:
    return make_family(zoo, request.param)


def make_family(zoo: ModelZoo, name: str) -> Family:
    base = zoo.base(name, options={"tie_word_embeddings": FAMILIES[name]})
    maker = Maker(zoo.oracle(base).model)
    cases, oracles = {}, {}
    for index, (recipe, (layers, vocab_size)) in enumerate(RECIPES.items()):
        own = maker.make(*layers, vocab_size=vocab_size)
        oracles[recipe] = own.oracle
        cases[recipe] = _fit(own, own.oracle, own.vocab_size, 5 + 7 * (index % 5))
    cases["base"] = _fit(None, zoo.oracle(base), VOCAB_SIZE, 12)
    return Family(base, cases, {**oracles, "base": zoo.oracle(base)})


def _fit(own: OwnModel | None, oracle: Any, vocab_size: int, length: int) -> Case:
    """A prompt with tokens from the end of the vocabulary, on which no two logits are near a tie."""
    generator = torch.Generator().manual_seed(length)
    for _ in range(50):
        prompt = torch.randint(3, vocab_size, (length,), generator=generator)
        prompt[1:3] = torch.randint(vocab_size - 50, vocab_size, (2,), generator=generator)
        case = oracle.greedy(prompt.tolist(), NUM_TOKENS)
        if case.min_gap >= MIN_GAP:
            return Case(None if own is None else own.model, case.prompt_token_ids, case.output_token_ids)
    raise AssertionError("no fit prompt")


def started(family: Family, **settings: Any) -> LLM:
    llm = LLM(str(family.base), max_model_len=MAX_MODEL_LEN, **settings)
    for case in family.cases.values():
        if case.own is not None:
            llm.engine.adapters.add_adapter(case.own)
    return llm


def check(engine: EngineCore, family: Family, *names: str) -> None:
    """What these say in one batch."""
    chosen = [family.cases[name] for name in names or family.cases]
    said = ask(engine, [(case.own, case.prompt) for case in chosen], NUM_TOKENS)
    wrong = [
        name
        for name, case, tokens in zip(names or family.cases, chosen, said, strict=True)
        if tokens.token_ids != case.expected
    ]
    assert not wrong, wrong
    engine.check_integrity()


@pytest.fixture(params=["auto", "torch", "reference"])
def llm(request: pytest.FixtureRequest, family: Family) -> Iterator[LLM]:
    with started(family, lora_backend=request.param) as llm:
        yield llm


@pytest.fixture(scope="module")
def llama(zoo: ModelZoo) -> Family:
    return make_family(zoo, "llama")


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


def test_prompts_in_chunks_beside_others_that_decode(family: Family) -> None:
    with started(family, max_num_batched_tokens=11, max_num_seqs=7) as llm:
        check(llm.engine, family)


def test_a_step_ahead(llama: Family) -> None:
    """Tokens that are not known yet, added ones too, are those of their own rows."""
    with started(llama, look_ahead=True) as llm:
        check(llm.engine, llama)


def test_preemption(llama: Family) -> None:
    block_bytes = 4 * 2 * 16 * 16 * 2 * 2
    with started(llama, kv_cache_memory_bytes=24 * block_bytes) as llm:
        check(llm.engine, llama)
        assert llm.stats().num_preemptions > 0


@pytest.mark.parametrize("compression", ["none", "lossless"])
def test_eviction_to_disk_and_back(llama: Family, tmp_path: Path, compression: str) -> None:
    """Room for two of the largest: each comes back as it was."""
    room = int(2.2 * max(_packed_bytes(llama)))
    settings = {"adapter_memory_bytes": room, "host_memory_bytes": 3 * room // 2, "host_compression": compression}
    with started(llama, **settings, aging_steps=8, disk_cache_dir=str(tmp_path / "disk")) as llm:
        for _ in range(2):
            check(llm.engine, llama)
        memory = llm.stats().memory
        assert memory.evictions["host_room"] > 0
        disk = llm.engine.adapters._residency.tiers.disk
        assert disk is not None
        assert disk.stats().num_hits > 0
    with started(llama, **settings, aging_steps=8, disk_cache_dir=str(tmp_path / "disk")) as llm:
        for case in llama.cases.values():  # what was packed by the process before is used by this one
            if case.own is not None:
                llm.engine.adapters.promote_adapter(AdapterId(case.own.adapter_id))
        check(llm.engine, llama)


def _packed_bytes(family: Family) -> list[int]:
    with started(family) as llm:
        return [each.nbytes for each in llm.engine.adapters.list_adapters()]


def test_rows_of_a_whole_weight_that_are_the_bases_cost_nothing(llama: Family) -> None:
    with started(llama) as llm:
        nbytes = {each.adapter_id: each.nbytes for each in llm.engine.adapters.list_adapters()}
        added = llama.cases["added"].own
        fewer = llama.cases["fewer"].own
        assert added is not None
        assert fewer is not None
        row = 4 * HIDDEN_SIZE
        assert nbytes[added.adapter_id] < 2 * (ADDED + 16) * (row + 8) + 32 * row
        assert nbytes[fewer.adapter_id] == 0


def test_adapters_that_move_are_found(llama: Family) -> None:
    with started(llama) as llm:
        check(llm.engine, llama)
        engine = llm.engine
        for name in ("linear", "norms", "head"):
            own = llama.cases[name].own
            assert own is not None
            while engine.adapters.evict_adapter(AdapterId(own.adapter_id)):
                pass
        engine.adapters.compact(1 << 30, math.inf)
        check(engine, llama)


# ----------------------------------------------------------------------------------------------------- rows stay apart


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.9, "seed": 3}, {"temperature": 1.0, "top_p": 0.7, "top_k": 40}]
)
def test_base_rows_are_those_of_a_server_without_lora(family: Family, params: Mapping[str, Any]) -> None:
    """Tokens and log probabilities, whatever is beside them."""
    prompts = [(None, family.cases["base"].prompt), (None, family.cases["linear"].prompt)]
    others = [(case.own, case.prompt) for case in family.cases.values() if case.own is not None]
    with LLM(str(family.base), max_model_len=MAX_MODEL_LEN, enable_lora=False) as llm:
        expected = ask(llm.engine, prompts, NUM_TOKENS, logprobs=3, prompt_logprobs=2, **params)
    with started(family) as llm:
        said = ask(llm.engine, [*others, *prompts], NUM_TOKENS, logprobs=3, prompt_logprobs=2, **params)
    assert said[-2:] == expected
    assert max(token for each in said[-2:] for token in each.token_ids) < VOCAB_SIZE


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("auto", "bfloat16"), ("auto", "int8"), ("torch", "bfloat16"), ("reference", "float16")],
)
def test_in_other_dtypes_base_rows_stay_too(llama: Family, backend: str, dtype: str) -> None:
    """And each kind says something of its own; int8 is of the base's weights."""
    settings: dict[str, Any] = {"quantization": "int8"} if dtype == "int8" else {"dtype": dtype}
    settings |= {"max_model_len": MAX_MODEL_LEN, "lora_backend": backend}
    base = [(None, llama.cases["fewer"].prompt)]
    others = [(case.own, llama.cases["fewer"].prompt) for case in llama.cases.values() if case.own is not None]
    with LLM(str(llama.base), enable_lora=False, **settings) as llm:
        expected = ask(llm.engine, base, NUM_TOKENS, logprobs=2)
    with LLM(str(llama.base), **settings) as llm:
        for case in llama.cases.values():
            if case.own is not None:
                llm.engine.adapters.add_adapter(case.own)
        said = ask(llm.engine, [*base, *others], NUM_TOKENS, logprobs=2)
        llm.check_integrity()
    if backend == "auto":  # native kernels; stock torch promises no bits in a batch of another size
        assert said[:1] == expected
    assert len({each.logprobs for each in map(_hashable, said)}) == len(said)


def _hashable(said: Said) -> Said:
    return replace(said, logprobs=tuple(tuple(sorted(each.items())) for each in said.logprobs))  # type: ignore[misc]


def test_a_row_is_what_it_is_alone(family: Family) -> None:
    """Of every kind, drawn at random, bit for bit: with native kernels."""
    with started(family) as llm:
        if llm.engine.info.backend != "native":
            pytest.skip("stock torch promises no bits")
        cases = [(case.own, case.prompt) for case in family.cases.values()]
        params = {"temperature": 0.8, "logprobs": 3, "prompt_logprobs": 2}
        together = ask(llm.engine, cases, NUM_TOKENS, **params)
        for case, expected in zip(cases, together, strict=True):
            assert ask(llm.engine, [case], NUM_TOKENS, **params) == [expected]


# -------------------------------------------------------------------------------------------------------- vocabularies


def test_log_probabilities_are_over_the_adapters_vocabulary(llama: Family) -> None:
    with started(llama) as llm:
        for name in ("added", "added with LoRA", "fewer", "head", "base"):
            case = llama.cases[name]
            (said,) = ask(llm.engine, [(case.own, case.prompt)], 4, logprobs=4, prompt_logprobs=4)
            oracle = llama.oracles[name]
            expected = oracle.logits([*case.prompt, *case.expected[:4]]).log_softmax(-1)
            for position, entries in enumerate((*said.prompt_logprobs, *said.logprobs)):
                best = expected[position].topk(4)
                assert set(best.indices.tolist()) <= set(entries)
                for token_id, logprob in entries.items():
                    assert logprob == pytest.approx(expected[position, token_id].item(), abs=2e-4)


def test_a_vocabulary_is_all_that_is_drawn_from(llama: Family) -> None:
    """At a temperature at which every token is as likely as any other."""
    names = ["added", "fewer", "base", "linear"]
    with started(llama) as llm:
        cases = [(llama.cases[name].own, llama.cases[name].prompt) for name in names]
        said = ask(llm.engine, cases, 80, temperature=100.0)
    most = {name: max(each.token_ids) for name, each in zip(names, said, strict=True)}
    assert most["fewer"] < VOCAB_SIZE - CUT
    assert max(most["base"], most["linear"]) < VOCAB_SIZE
    with started(llama) as llm:
        own = llama.cases["added"].own
        said = ask(llm.engine, [(own, (5, 6, 7)), (None, (5, 6, 7))] * 3, 80, temperature=100.0, top_k=-1)
        assert max(token for each in said[::2] for token in each.token_ids) >= VOCAB_SIZE
        assert max(token for each in said[1::2] for token in each.token_ids) < VOCAB_SIZE


@pytest.mark.parametrize(("name", "token_id"), [("added", VOCAB_SIZE + ADDED), ("fewer", VOCAB_SIZE - CUT)])
def test_a_token_beyond_the_adapters_vocabulary_is_refused(llama: Family, name: str, token_id: int) -> None:
    own = llama.cases[name].own
    with started(llama) as llm:
        ask(llm.engine, [(own, (5, token_id - 1))], 2)
        with pytest.raises(InvalidRequestError, match=f"0..{token_id - 1}"):
            llm.engine.add_request(request_of("odd", own, (5, token_id), SamplingParams(max_tokens=1)))
        with pytest.raises(InvalidRequestError, match=f"0..{VOCAB_SIZE - 1}"):
            llm.engine.add_request(request_of("odd", None, (5, VOCAB_SIZE), SamplingParams(max_tokens=1)))


def test_a_token_of_an_adapter_that_is_to_be_loaded_is_checked_then(llama: Family) -> None:
    own = llama.cases["added"].own
    assert own is not None
    with LLM(str(llama.base), max_model_len=MAX_MODEL_LEN) as llm:
        manager = llm.engine.adapters
        spec, opener = manager._spec_of(own)
        with manager._residency.held():
            manager._residency.attach_locked(spec, opener).is_attached = True
        assert manager.vocab_size(spec.adapter_id) is None
        for index, token_id in enumerate((VOCAB_SIZE + ADDED, VOCAB_SIZE + ADDED - 1)):
            request = request_of(f"r{index}", own, (5, token_id), SamplingParams(max_tokens=1))
            assert llm.engine.add_request(request) == []
        ended = {}
        while llm.engine.has_unfinished:
            ended |= {output.request_id: output for output in llm.engine.step()}
            manager.wait_for_change(0.05)
        assert ended["r0"].error is not None
        assert "not in the vocabulary" in ended["r0"].error["message"]
        assert len(ended["r1"].token_ids) == 1
        llm.check_integrity()
        assert manager.vocab_size(spec.adapter_id) == VOCAB_SIZE + ADDED


def test_steps_without_their_capture_are_counted(llama: Family) -> None:
    with started(llama) as llm:
        check(llm.engine, llama, "linear", "head", "base")
        assert not llm.stats().kernel_fallbacks
        check(llm.engine, llama, "norms", "base")
        (label, calls) = next(iter(llm.stats().kernel_fallbacks.items()))
        assert "own" in label
        assert calls >= NUM_TOKENS


@pytest.mark.interpreter
def test_triton_kernels_beside_own_weights(llama: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter: LoRA of the head is a kernel's, the rest is stock torch's."""
    backend = TritonBackend(CPU)
    monkeypatch.setattr(build, "get_backend", lambda *_: backend)
    names = ["everything", "added with LoRA", "rows of both", "fewer", "linear", "base"]
    with started(llama, enforce_eager=True) as llm:
        said = ask(llm.engine, [(llama.cases[name].own, llama.cases[name].prompt) for name in names], 2)
    assert [each.token_ids for each in said] == [llama.cases[name].expected[:2] for name in names]
    assert not backend.fallbacks()
