"""Mixes of adapters in one request: token-identical to peft, beside single adapters and the base; and what is refused.

The oracle of LoRAs is `add_weighted_adapter` with combination_type="cat"; of other kinds, several active adapters,
whose scalings are multiplied by the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex import LLM, LoRARequest, SamplingParams
from loraplex.core import AdapterMix, MixPart, Request, mix_digest
from loraplex.errors import AdapterMixError, AdapterTooLargeError, InvalidRequestError
from tests.engine.driver import packed_nbytes
from tests.engine.mix_oracles import active_oracle, cat_oracle
from tests.fixtures import (
    ADAPTER_OPTIONS,
    FAMILIES,
    KIND_OPTIONS,
    REFERENCE_FAMILIES,
    VOCAB_SIZE,
    GreedyCase,
    ModelZoo,
    Oracle,
    some_of,
)

NUM_TOKENS = 32
PROMPT_LENGTH = 33
BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

LORAS = {"all": "all linears", "rank 64": "rank 64", "q and v": "q and v", "biased": "bias all"}
KINDS = ("DoRA", "DoRA of q, k, v", "IA3", "IA3 of o", "IA3 of shared inputs", "LoHa")

CAT = {
    "two": (("all", 0.7), ("rank 64", 0.3)),
    "three, one taken away": (("q and v", 1.5), ("all", -0.5), ("rank 64", 0.25)),
    "one at half its weight": (("all", 0.5),),
}
ACTIVE = {
    "DoRA, then LoRA": (("DoRA", 1.0), ("all", 0.5)),
    "LoRA, then DoRA": (("all", 0.5), ("DoRA", 1.0)),
    "two DoRAs": (("DoRA of q, k, v", 1.0), ("DoRA", 1.0)),
    "two IA3s": (("IA3", 1.0), ("IA3 of o", 1.0)),
    "IA3s of shared inputs": (("IA3 of shared inputs", 1.0), ("IA3", 1.0)),
    "LoRA and LoHa": (("all", 0.5), ("LoHa", 0.7)),
    "a LoRA with biases and another": (("biased", 1.0), ("all", 0.5)),
    "another and a DoRA with biases": (("all", 0.5), ("DoRA of q, k, v", 1.0)),
}
HAS_BIASES = ("qwen2",)
NEED_NO_BIASES = ("two DoRAs",)
"""Mixes that are refused where the base has biases."""


@dataclass(frozen=True)
class MixCase:
    """What the engine must say to one prompt through a mix."""

    name: str
    parts: tuple[tuple[str, float], ...]
    greedy: GreedyCase


@dataclass(frozen=True)
class MixFamily:
    base: Path
    requests: dict[str, LoRARequest]
    cases: tuple[MixCase, ...] = ()

    def mix(self, parts: Sequence[tuple[str, float]]) -> list[tuple[LoRARequest, float]]:
        return [(self.requests[name], weight) for name, weight in parts]


@pytest.fixture(scope="module", params=some_of(FAMILIES, 2))
def family(request: pytest.FixtureRequest, zoo: ModelZoo) -> MixFamily:
    base = zoo.base(request.param)
    paths = adapter_paths(zoo, base)
    cases = []
    for make, mixes in ((cat_oracle, CAT), (active_oracle, ACTIVE)):
        for name, parts in mixes.items():
            if request.param in HAS_BIASES and name in NEED_NO_BIASES:
                continue
            oracle = make(zoo, base, [(paths[part], weight) for part, weight in parts])
            cases.append(MixCase(name, parts, fit_case(oracle)))
    requests = {name: LoRARequest(name, index, str(path)) for index, (name, path) in enumerate(paths.items(), 1)}
    return MixFamily(base, requests, tuple(cases))


def adapter_paths(zoo: ModelZoo, base: Path) -> dict[str, Path]:
    import peft

    made = {
        name: zoo.adapter(base, peft.LoraConfig(**ADAPTER_OPTIONS[field], task_type="CAUSAL_LM"))
        for name, field in LORAS.items()
    }
    for kind in KINDS:
        config_class, options = KIND_OPTIONS[kind]
        made[kind] = zoo.adapter(base, getattr(peft, config_class)(**options, task_type="CAUSAL_LM"))
    return made


def fit_case(oracle: Oracle) -> GreedyCase:
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        prompts = torch.randint(3, VOCAB_SIZE, (16, PROMPT_LENGTH), generator=generator).tolist()
        found = next((case for case in oracle.greedy_batch(prompts, NUM_TOKENS) if case.is_fit), None)
        if found is not None:
            return found
    raise AssertionError("no fit prompt")


def start(family: MixFamily, **options: Any) -> LLM:
    return LLM(str(family.base), max_model_len=PROMPT_LENGTH + NUM_TOKENS, block_size=BLOCK_SIZE, **options)


def check(llm: LLM, family: MixFamily, cases: Sequence[MixCase]) -> None:
    """All cases in one call, beside each adapter alone and the base."""
    prompts = [{"prompt_token_ids": case.greedy.prompt_token_ids} for case in cases]
    others = [None, *family.requests.values()]
    asked = [family.mix(case.parts) for case in cases] + others
    outputs = llm.generate(prompts + prompts[:1] * len(others), GREEDY, lora_request=asked)
    wrong = [
        case.name
        for case, output in zip(cases, outputs, strict=False)
        if output.outputs[0].token_ids != case.greedy.output_token_ids
    ]
    assert not wrong
    for case, output in zip(cases, outputs, strict=False):
        assert output.lora_request == tuple(family.mix(case.parts)) == output.outputs[0].lora_request
    llm.check_integrity()


def test_each_alone_equals_peft(family: MixFamily) -> None:
    with start(family) as llm:
        for case in family.cases:
            (output,) = llm.generate(
                {"prompt_token_ids": case.greedy.prompt_token_ids}, GREEDY, lora_request=family.mix(case.parts)
            )
            assert output.outputs[0].token_ids == case.greedy.output_token_ids, case.name
        assert llm.stats().num_prefix_hit_tokens == 0


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_one_batch_of_all_equals_peft_and_again_from_the_prefix_cache(family: MixFamily, backend: str) -> None:
    check_one_batch_and_again(family, backend)


@pytest.mark.parametrize("family", REFERENCE_FAMILIES, indirect=True)
def test_one_batch_of_all_by_the_reference(family: MixFamily) -> None:
    check_one_batch_and_again(family, "reference")


def check_one_batch_and_again(family: MixFamily, backend: str) -> None:
    with start(family, lora_backend=backend, num_threads=1) as llm:
        check(llm, family, family.cases)
        num_hits = llm.stats().num_prefix_hit_tokens
        check(llm, family, family.cases)
        assert llm.stats().num_prefix_hit_tokens - num_hits >= len(family.cases) * BLOCK_SIZE


def test_chunks_preemption_and_less_room_than_adapters(family: MixFamily) -> None:
    """Room for three of nine: mixes wait until all of theirs are there, and requests are paused for them."""
    sizes = sorted(packed_nbytes(family.base, Path(each.lora_path)) for each in family.requests.values())
    room = sum(sizes[-3:])
    with start(
        family,
        max_num_batched_tokens=24,
        max_num_seqs=6,
        adapter_memory_bytes=room,
        host_memory_bytes=room + 64 * 1024,
        aging_steps=8,
    ) as llm:
        check(llm, family, family.cases)
        stats = llm.stats()
        assert stats.memory.evictions["host_room"] > 0
        assert stats.memory.resident_bytes["device"] <= room


def test_biases_that_do_not_meet_are_mixed(zoo: ModelZoo) -> None:
    """LoRA's own add up, with their weights, where the base has none; where it has some, they are of other modules."""
    import peft

    own: dict[str, Any] = {"r": 4, "lora_alpha": 6, "lora_bias": True}
    configs = {
        "llama": (
            peft.LoraConfig(**own, target_modules=["q_proj", "down_proj"]),
            peft.LoraConfig(**own, target_modules=["q_proj", "o_proj"]),
            peft.LoraConfig(r=4, use_dora=True, target_modules=["q_proj", "up_proj"]),
        ),
        "qwen2": (
            peft.LoraConfig(r=4, lora_alpha=6, bias="lora_only", target_modules=["k_proj", "gate_proj"]),
            peft.LoraConfig(r=4, use_dora=True, target_modules=["q_proj", "v_proj"]),
            peft.LoraConfig(**own, target_modules=["o_proj", "gate_proj"]),
        ),
    }
    weights = {"llama": ((0.7, -0.5), (1.5, 0.5, 1.0)), "qwen2": ((1.0, 1.0), (1.0, 1.0, -0.5))}
    for family, of_family in configs.items():
        base = zoo.base(family)
        paths = {f"{i}": zoo.adapter(base, config, seed=90 + i) for i, config in enumerate(of_family)}
        requests = {name: LoRARequest(name, i, str(path)) for i, (name, path) in enumerate(paths.items(), 1)}
        cases = []
        for chosen in weights[family]:
            parts = tuple(zip(paths, chosen, strict=False))
            oracle = active_oracle(zoo, base, [(paths[name], weight) for name, weight in parts])
            cases.append(MixCase(f"{family} {chosen}", parts, fit_case(oracle)))
        with start(MixFamily(base, requests)) as llm:
            check(llm, MixFamily(base, requests), cases)


# ------------------------------------------------------------------------------------------------------ rows of a batch


def requests_of(zoo: ModelZoo, family: str) -> MixFamily:
    """Without cases."""
    base = zoo.base(family)
    paths = adapter_paths(zoo, base)
    return MixFamily(base, {name: LoRARequest(name, i, str(path)) for i, (name, path) in enumerate(paths.items(), 1)})


@pytest.fixture(scope="module")
def llama(zoo: ModelZoo) -> MixFamily:
    return requests_of(zoo, "llama")


@pytest.fixture(scope="module")
def biased_base(zoo: ModelZoo) -> LLM:
    return start(requests_of(zoo, "qwen2"))


@pytest.fixture(scope="module")
def warm(llama: MixFamily) -> LLM:
    return start(llama, enable_prefix_caching=False, num_threads=1)


@pytest.fixture(scope="module")
def without_lora(llama: MixFamily) -> LLM:
    return start(llama, enable_prefix_caching=False, num_threads=1, enable_lora=False)


WEIGHTS = st.sampled_from((-1.0, 0.0, 0.25, 0.7, 1.0, 2.0))
PLAIN = st.sampled_from(("all", "rank 64", "q and v", "LoHa"))
ORDERED = (
    (("DoRA", 1.0), ("all", 0.5)),
    (("q and v", 2.0), ("DoRA", 1.0)),
    (("IA3 of o", 1.0), ("IA3", 1.0)),
    (("IA3", 1.0), ("IA3 of shared inputs", 1.0)),
)
ROUTES = st.one_of(
    st.just(()),
    PLAIN.map(lambda name: ((name, 1.0),)),
    st.lists(st.tuples(PLAIN, WEIGHTS), min_size=1, max_size=4, unique_by=lambda part: part[0]).map(tuple),
    st.sampled_from(ORDERED),
)
SCORED = SamplingParams(temperature=0, max_tokens=3, logprobs=3, ignore_eos=True)


def said(llm: LLM, family: MixFamily, routes: Sequence[tuple[tuple[str, float], ...]], seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    prompts = [{"prompt_token_ids": torch.randint(3, VOCAB_SIZE, (7,), generator=generator).tolist()} for _ in routes]
    asked = [family.mix(route) or None for route in routes]
    outputs = llm.generate(prompts, SCORED, lora_request=asked)
    return [[[(t, each[t].logprob) for t in each] for each in output.outputs[0].logprobs or ()] for output in outputs]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(routes=st.lists(ROUTES, min_size=1, max_size=6), seed=st.integers(0, 2**16))
def test_each_row_of_any_batch_is_that_row_alone_and_base_rows_keep_their_bits(
    warm: LLM, without_lora: LLM, llama: MixFamily, routes: list[tuple[tuple[str, float], ...]], seed: int
) -> None:
    """Alone: all others are base rows, so that the batch has the same shape."""
    together = said(warm, llama, routes, seed)
    base = said(without_lora, llama, [()] * len(routes), seed)
    for index, route in enumerate(routes):
        if not route:
            assert together[index] == base[index]
            continue
        alone = said(warm, llama, [route if i == index else () for i in range(len(routes))], seed)[index]
        for found, expected in zip(together[index], alone, strict=True):
            assert [token for token, _ in found] == [token for token, _ in expected]
            assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-4)
    warm.check_integrity()


def test_a_mix_of_one_with_a_weight_of_one_is_the_adapter_itself(llama: MixFamily) -> None:
    """Its bits, and its KV."""
    prompt = {"prompt_token_ids": list(range(5, 5 + PROMPT_LENGTH))}
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=2, ignore_eos=True)
    with start(llama, num_threads=1) as llm:
        (alone,) = llm.generate(prompt, params, lora_request=llama.requests["all"])
        (mixed,) = llm.generate(prompt, params, lora_request=llama.mix([("all", 1)]))
        assert mixed.num_cached_tokens == 2 * BLOCK_SIZE
        assert list(map(dict, mixed.outputs[0].logprobs)) == list(map(dict, alone.outputs[0].logprobs))
        (half,) = llm.generate(prompt, params, lora_request=llama.mix([("all", 0.5)]))
        assert half.num_cached_tokens == 0
        (other_order,) = llm.generate(prompt, params, lora_request=llama.mix([("all", 0.5), ("q and v", 1)]))
        (same,) = llm.generate(prompt, params, lora_request=llama.mix([("all", 0.5), ("q and v", 1)]))
        (reverse,) = llm.generate(prompt, params, lora_request=llama.mix([("q and v", 1), ("all", 0.5)]))
        assert (other_order.num_cached_tokens, same.num_cached_tokens, reverse.num_cached_tokens) == (0, 32, 0)


def test_kv_of_a_mix_is_forgotten_with_each_of_its_contents(llama: MixFamily) -> None:
    prompt = {"prompt_token_ids": list(range(5, 5 + PROMPT_LENGTH))}
    parts = llama.mix([("all", 0.5), ("q and v", 1)])
    with start(llama) as llm:
        llm.generate(prompt, GREEDY, lora_request=parts)
        digest = llm._front.registry.resolve("q and v").adapter_digest
        llm.engine._scheduler.forget_kv(digest)
        (output,) = llm.generate(prompt, GREEDY, lora_request=parts)
        assert output.num_cached_tokens == 0


# ------------------------------------------------------------------------------------------------------------- refusals


def test_what_a_mix_is_and_what_a_list_of_adapters_is(llama: MixFamily, warm: LLM) -> None:
    a, b = llama.requests["all"], llama.requests["q and v"]
    short = SamplingParams(temperature=0, max_tokens=1)
    prompts = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [8, 9]}]

    def ran(given: Any) -> list[Any]:
        return [output.lora_request for output in warm.generate(prompts, short, lora_request=given)]

    assert ran([a, b]) == [a, b]
    assert ran([(a, 1), (b, 0.5)]) == [((a, 1.0), (b, 0.5))] * 2
    assert ran([[(a, 1)], [(b, 0.5)]]) == [((a, 1.0),), ((b, 0.5),)]
    assert ran([((a, 2), (b, 1)), None]) == [((a, 2.0), (b, 1.0)), None]
    for wrong, words in (
        ((a, 0.5), "has a float; it takes LoRARequest, or a mix"),
        ([(a, 0.5), b], "has a tuple; it takes LoRARequest, or a mix"),
        ([[(a, 0.5)], [(b, True)]], "has a list"),
        ([[(a, 0.5)], []], "has a list"),
        ([[(a, 0.5)]], "has 1 entries for 2 prompts"),
        ([(a, 0.5), (a, 0.5)], "'all' twice"),
        ([(a, float("nan"))], "weight nan"),
        ([(a, float("inf"))], "weight inf"),
        ([(a, 100.5)], "weights are within"),
        ([(LoRARequest(f"n{i}", i, "/p"), 1.0) for i in range(1, 10)], "a mix has 9 adapters; it takes 1 to 8"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            ran(wrong)
    assert warm._front.registry.num_references == 0


def test_two_names_of_one_adapter_are_no_mix(llama: MixFamily) -> None:
    with start(llama) as llm:
        a, b = llama.requests["all"], llama.requests["q and v"]
        llm.add_lora(a)
        llm.switch_lora(a, b)
        with pytest.raises(InvalidRequestError, match="one adapter twice"):
            llm._front.acquire(AdapterMix((("all", 0.5), ("q and v", 0.5))))
        assert llm._front.registry.num_references == 0


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([("DoRA", 0.5), ("all", 1)], "'DoRA'.*its weight in a mix is 1, not 0.5"),
        ([("IA3", 2)], "'IA3'.*its weight in a mix is 1, not 2"),
        ([("all", 1), ("IA3", 1)], "'IA3' is an IA3, which is mixed with other IA3s only"),
        ([("biased", 0.5)], "'biased' has biases: its weight in a mix is 1, not 0.5"),
        ([("DoRA", 1), ("biased", 1)], "'DoRA' has biases, and so has another one of the mix"),
        (ACTIVE["two DoRAs"], "'DoRA of q, k, v' has biases"),
    ],
)
def test_what_peft_has_no_result_for_is_refused_by_name(
    biased_base: LLM, zoo: ModelZoo, parts: list[tuple[str, float]], words: str
) -> None:
    family = requests_of(zoo, "qwen2")
    with pytest.raises(AdapterMixError, match=words):
        biased_base.generate({"prompt_token_ids": [5, 6]}, GREEDY, lora_request=family.mix(parts))
    biased_base.check_integrity()


def test_a_mix_that_no_empty_device_holds_is_refused_and_not_waited_for(llama: MixFamily) -> None:
    sizes = [packed_nbytes(llama.base, Path(llama.requests[name].lora_path)) for name in ("all", "rank 64")]
    with start(llama, adapter_memory_bytes=sum(sizes) - 64) as llm:
        with pytest.raises(AdapterTooLargeError, match=r"a mix of 2 adapters needs .* device memory"):
            llm.generate({"prompt_token_ids": [5, 6]}, GREEDY, lora_request=llama.mix([("all", 1), ("rank 64", 1)]))
        llm.check_integrity()
    with start(llama, max_loras=1) as llm, pytest.raises(AdapterTooLargeError, match="and 1 adapters"):
        llm.generate({"prompt_token_ids": [5, 6]}, GREEDY, lora_request=llama.mix([("all", 1), ("q and v", 1)]))


def test_a_mix_of_more_adapters_than_seats_runs_alone(llama: MixFamily) -> None:
    names = ["all", "rank 64", "q and v", "LoHa"]
    with start(llama, max_num_seqs=2) as llm:
        prompts = [{"prompt_token_ids": [5, 6, index]} for index in range(7, 12)]
        parts = llama.mix([(name, 0.5) for name in names])
        outputs = llm.generate(prompts, GREEDY, lora_request=[None, parts, llama.requests["all"], parts, None])
        assert all(len(output.outputs[0].token_ids) == NUM_TOKENS for output in outputs)
        llm.check_integrity()


def test_the_engine_refuses_a_mix_that_no_front_sends(warm: LLM) -> None:
    parts = (MixPart(1, "a", 0.5), MixPart(2, "b", 0.5))
    good = {"adapter_id": 1, "adapter_digest": mix_digest(parts), "mix": parts}

    def refused(**changes: Any) -> None:
        request = Request("x", (5,), GREEDY, 1, 0, **{**good, **changes})
        with pytest.raises(InvalidRequestError):
            warm.engine.add_request(request)

    refused(adapter_id=2)
    refused(adapter_digest="a")
    refused(mix=(parts[0], parts[0]))
    refused(mix=(MixPart(1, "a", float("nan")), parts[1]))
    refused(mix=parts * 5)


# --------------------------------------------------------------------------------------------- verbs while a mix runs


def running(llm: LLM, family: MixFamily, parts: Sequence[tuple[str, float]]) -> str:
    request_id = llm.submit({"prompt_token_ids": [5, 6, 7]}, GREEDY, lora_request=family.mix(parts))
    llm.step()
    return request_id


def finish(llm: LLM) -> dict[str, Any]:
    outputs: dict[str, Any] = {}
    while llm.has_unfinished:
        outputs |= {output.request_id: output for output in llm.step()}
    llm.check_integrity()
    return outputs


@pytest.mark.parametrize("name", ["all", "q and v"])
def test_each_adapter_of_a_running_mix_is_held_until_it_ends(llama: MixFamily, name: str) -> None:
    parts = [("all", 0.7), ("q and v", 0.3)]
    with start(llama) as llm:
        (expected,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY, lora_request=llama.mix(parts))
        request_id = running(llm, llama, parts)
        number = llama.requests[name].lora_int_id
        assert not llm.evict_lora(number)
        assert llm.remove_lora(number)
        outputs = finish(llm)
        assert outputs[request_id].outputs[0].token_ids == expected.outputs[0].token_ids
        assert name not in {each.ref.adapter_name for each in llm.adapters()}


@pytest.mark.parametrize("name", ["all", "q and v"])
def test_a_forced_unload_of_one_adapter_ends_the_mix(llama: MixFamily, name: str) -> None:
    with start(llama) as llm:
        request_id = running(llm, llama, [("all", 0.7), ("q and v", 0.3)])
        llm.remove_lora(llama.requests[name].lora_int_id, force=True)
        assert finish(llm)[request_id].outputs[0].finish_reason == "abort"


def test_a_quarantined_adapter_refuses_its_mixes(llama: MixFamily) -> None:
    parts = [("all", 0.7), ("q and v", 0.3)]
    with start(llama) as llm:
        running(llm, llama, parts)
        finish(llm)
        adapter_id = llm._front.registry.resolve("q and v").adapter_id
        llm.engine.adapters.health.quarantine(adapter_id, "a test says so")
        with pytest.raises(Exception, match="'q and v' is quarantined"):
            llm.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY, lora_request=llama.mix(parts))


def test_odd_logits_of_a_mix_put_each_of_its_adapters_in_doubt_and_end_it_alone(
    llama: MixFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(llama) as llm:
        looked: list[int] = []
        health = llm.engine.adapters.health
        doubt: Callable[[int], None] = health.doubt
        monkeypatch.setattr(health, "doubt", lambda adapter_id: (looked.append(adapter_id), doubt(adapter_id)))
        good = running(llm, llama, [("all", 0.5)])
        request_id = running(llm, llama, [("all", 0.7), ("q and v", 0.3)])
        model = llm.engine._runner._model
        compute_logits = model.compute_logits

        def spoiled(hidden: torch.Tensor, *segments: Any) -> torch.Tensor:
            logits = compute_logits(hidden, *segments)
            if len(logits) == 2:
                logits[-1] = torch.nan  # rows of the mix come last
            return logits

        monkeypatch.setattr(model, "compute_logits", spoiled)
        llm.step()
        monkeypatch.undo()
        outputs = finish(llm)
        registry = llm._front.registry
        assert set(looked) == {registry.resolve("all").adapter_id, registry.resolve("q and v").adapter_id}
        assert outputs[good].outputs[0].finish_reason == "length"
        assert request_id not in outputs
        assert llm.memory_report().quarantined == {}
