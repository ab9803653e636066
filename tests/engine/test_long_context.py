"""Adapters with a longer context than their base: in fp32, greedy, the tokens of transformers + peft whose config has
linear rope scaling of the adapter's factor, for each family: alone, in one batch with the base, with plain adapters and
with other factors, in chunks, from the prefix cache, preempted, evicted and back, and reloaded in place."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from loraplex import LLM, LoRARequest, RequestOutput, SamplingParams
from loraplex.config import EngineConfig, LoRAConfig
from loraplex.core import Request
from loraplex.engine import build as build_module
from loraplex.engine import decode_graphs
from loraplex.engine.build import build_engine
from loraplex.errors import (
    AdapterMixError,
    AdapterValidationError,
    ConfigError,
    InvalidRequestError,
    PromptTooLongError,
)
from tests.engine.driver import Driver
from tests.engine.graph_tape import MaskedBackend, TapeDevice
from tests.engine.mix_oracles import cat_oracle
from tests.fixtures import FAMILIES, REFERENCE_FAMILIES, GreedyCase, ModelZoo

pytestmark = pytest.mark.slow

POSITIONS = 64
FACTORS = (2.0, 4.0)
NUM_TOKENS = 32
BLOCK_SIZE = 16
THETA = 10000.0
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SHORT = {"max_position_embeddings": POSITIONS}
ADAPTERS: Mapping[str, tuple[float, Mapping[str, Any], int, Mapping[str, Any]]] = {
    "plain": (1.0, {}, 20, {}),
    "by 4": (4.0, {"context_length": 256}, 150, {}),
    "by 4, not all of it": (4.0, {"context_length": 200}, 100, {"use_rslora": True}),
    "by 2": (2.0, {"context_length": 128, "vllm_max_position_embeddings": POSITIONS}, 90, {}),
    "by 2 as a factor": (2.0, {"vllm_long_context_scaling_factor": 2.0}, 70, {"use_dora": True}),
    "by 4, short": (4.0, {"vllm_long_context_scaling_factor": 4, "context_length": 256}, 20, {}),
    "by 4, own norms": (4.0, {"context_length": 256}, 80, {"modules_to_save": ["norm"]}),
}
"""Factor, fields of the configuration, length of the prompt, arguments of LoraConfig."""


def stretched(factor: float) -> dict[str, Any]:
    """Arguments of a base whose rope is stretched: its weights are those of the short one."""
    scaling = {"rope_type": "linear", "factor": factor, "rope_theta": THETA}
    return {**SHORT, "rope_parameters": scaling}


@dataclass(frozen=True)
class Case:
    """written: the adapter as peft wrote it, without a longer context."""

    name: str
    greedy: GreedyCase
    request: LoRARequest | None = None
    written: Path | None = None


@dataclass(frozen=True)
class Family:
    base: Path
    cases: tuple[Case, ...]

    def case(self, name: str) -> Case:
        return next(case for case in self.cases if case.name == name)


def with_fields(source: Path, path: Path, fields: Mapping[str, Any]) -> Path:
    """A copy of an adapter whose configuration has these fields, too."""
    shutil.copytree(source, path)
    file = path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return path


def family_of(zoo: ModelZoo, name: str, root: Path, base_options: Mapping[str, Any] = SHORT) -> Family:
    base = zoo.base(name, options=base_options)
    cases = [Case("base", zoo.fit_case(base, num_tokens=NUM_TOKENS))]
    for number, (adapter, (factor, fields, length, options)) in enumerate(ADAPTERS.items(), 1):
        config = LoraConfig(
            **{"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"], **options},
            task_type="CAUSAL_LM",
        )
        written = zoo.adapter(base, config, seed=70 + number)
        oracle_base = base if factor == 1 else zoo.base(name, options=stretched(factor))
        greedy = zoo.fit_case(oracle_base, written, length=length, num_tokens=NUM_TOKENS)
        path = with_fields(written, root / f"{number}", fields)
        cases.append(Case(adapter, greedy, LoRARequest(adapter, number, str(path)), written))
    return Family(base, tuple(cases))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, zoo: ModelZoo, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return family_of(zoo, request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(zoo: ModelZoo, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return family_of(zoo, "llama", tmp_path_factory.mktemp("llama"))


OpenLLM = Callable[..., LLM]


@pytest.fixture
def serve() -> Iterator[OpenLLM]:
    opened: list[LLM] = []

    def serve(base: Path, **settings: Any) -> LLM:
        settings = {"block_size": BLOCK_SIZE, "long_lora_scaling_factors": FACTORS, "disk_memory_bytes": 0, **settings}
        opened.append(LLM(str(base), **settings))
        return opened[-1]

    yield serve
    for llm in opened:
        llm.close()


def ask(llm: LLM, cases: Sequence[Case], params: SamplingParams = GREEDY) -> list[RequestOutput]:
    prompts = [{"prompt_token_ids": case.greedy.prompt_token_ids} for case in cases]
    return llm.generate(prompts, params, lora_request=[case.request for case in cases])


def check(llm: LLM, cases: Sequence[Case]) -> None:
    said = [output.outputs[0].token_ids for output in ask(llm, cases)]
    wrong = [case.name for case, each in zip(cases, said, strict=True) if each != case.greedy.output_token_ids]
    assert wrong == []
    llm.check_integrity()


def test_the_oracles_have_the_weights_of_the_base_and_other_answers(llama: Family, zoo: ModelZoo) -> None:
    """What the tests below rest on."""
    weights = zoo.oracle(llama.base).model.state_dict()
    for factor in FACTORS:
        other = zoo.oracle(zoo.base("llama", options=stretched(factor)))
        assert all(torch.equal(tensor, weights[name]) for name, tensor in other.model.state_dict().items())
        prompt = llama.case("base").greedy.prompt_token_ids
        assert other.greedy(prompt, NUM_TOKENS).output_token_ids != llama.case("base").greedy.output_token_ids


def test_alone(family: Family, serve: OpenLLM) -> None:
    llm = serve(family.base)
    for case in family.cases:
        check(llm, [case])


def test_in_one_batch_and_again_from_the_prefix_cache(family: Family, serve: OpenLLM) -> None:
    llm = serve(family.base)
    check(llm, family.cases)
    check(llm, tuple(reversed(family.cases)))
    assert llm.stats().num_prefix_hit_tokens > 0


def test_prompts_in_chunks_beside_others_that_decode(family: Family, serve: OpenLLM) -> None:
    check_in_chunks(family, serve, "torch")


@pytest.mark.parametrize("family", REFERENCE_FAMILIES, indirect=True)
def test_prompts_in_chunks_by_the_reference(family: Family, serve: OpenLLM) -> None:
    check_in_chunks(family, serve, "reference")


def check_in_chunks(family: Family, serve: OpenLLM, backend: str) -> None:
    check(
        serve(family.base, lora_backend=backend, max_num_batched_tokens=23, max_num_seqs=5, num_threads=1),
        family.cases,
    )


def test_with_steps_launched_ahead(llama: Family, serve: OpenLLM) -> None:
    check(serve(llama.base, look_ahead=True, max_num_batched_tokens=64), llama.cases)


def test_everything_at_once(family: Family, serve: OpenLLM) -> None:
    """Chunks, preemption, prefix cache, adapters that leave memory and are read again; all free memory holds NaN."""
    roomy = serve(family.base)
    check(roomy, family.cases)
    room = max(each.nbytes for each in roomy.engine.adapters.list_adapters()) + 64 * 1024
    block_bytes = roomy.engine._runner.kv_block_bytes
    llm = serve(
        family.base,
        kv_cache_memory_bytes=24 * block_bytes,
        max_num_batched_tokens=40,
        max_num_seqs=6,
        adapter_memory_bytes=room,
        host_memory_bytes=room + 64 * 1024,
        aging_steps=8,
    )
    llm.engine._runner._kv.fill_(math.nan)
    llm.engine.adapters._residency.tiers.host.pool.poison()
    check(llm, family.cases)
    check(llm, tuple(reversed(family.cases)))
    stats = llm.stats()
    assert stats.num_preemptions > 0
    assert stats.memory.evictions["host_room"] > 0


def test_from_the_disk_tier_of_another_life(llama: Family, serve: OpenLLM, tmp_path: Path) -> None:
    settings = {"disk_memory_bytes": 1 << 28, "disk_cache_dir": str(tmp_path)}
    first = serve(llama.base, **settings)
    check(first, llama.cases)
    first.close()
    assert any(tmp_path.iterdir())
    check(serve(llama.base, **settings), llama.cases)


def test_a_reload_in_place_takes_the_other_context_and_nothing_of_the_kv(
    llama: Family, zoo: ModelZoo, serve: OpenLLM, tmp_path: Path
) -> None:
    """Equal weights under several contexts have digests of their own, and so has their KV."""
    llm, length = serve(llama.base), 40
    written = zoo.adapter(llama.base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    oracles = {factor: zoo.base("llama", options=stretched(factor)) for factor in FACTORS} | {1.0: llama.base}
    prompt = zoo.fit_case(llama.base, written, length=length, num_tokens=NUM_TOKENS).prompt_token_ids
    digests, answers = set(), set()
    for turn, factor in enumerate((1.0, 4.0, 2.0, 1.0, 4.0)):
        fields = {} if factor == 1 else {"context_length": int(POSITIONS * factor)}
        path = with_fields(written, tmp_path / str(turn), fields)
        request = LoRARequest("tenant", 1, str(path), load_inplace=True)
        greedy = zoo.oracle(oracles[factor], written).greedy(prompt, NUM_TOKENS - 10)
        params = replace(GREEDY, max_tokens=NUM_TOKENS - 10)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, lora_request=request)
        assert output.outputs[0].token_ids == greedy.output_token_ids, factor
        digests.add(llm._front.registry.resolve("tenant").adapter_digest)
        answers.add(greedy.output_token_ids)
    assert len(digests) == len(answers) == 3
    llm.check_integrity()


@pytest.mark.parametrize("max_num_batched_tokens", [512, 30])
def test_rows_of_others_have_the_bits_of_a_server_without_adapters(
    llama: Family, serve: OpenLLM, max_num_batched_tokens: int
) -> None:
    """On the native kernels; log probabilities say each bit of the logits that matter."""
    params = replace(GREEDY, logprobs=5, max_tokens=16)
    settings = {"max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": 8}
    bare = LLM(str(llama.base), enable_lora=False, block_size=BLOCK_SIZE, **settings)
    llm = serve(llama.base, **settings)
    if llm.engine.info.backend != "native":
        pytest.skip("only the native kernels' bits do not depend on the batch")
    base, plain = llama.case("base"), llama.case("plain")
    (expected,) = ask(bare, [base], params)
    bare.close()
    (alone,) = ask(serve(llama.base, long_lora_scaling_factors=(), **settings), [plain], params)
    beside = ask(llm, [llama.case("by 4"), base, llama.case("by 2"), plain, llama.case("by 4, short")], params)
    assert beside[1].outputs[0].logprobs == expected.outputs[0].logprobs
    assert beside[3].outputs[0].logprobs == alone.outputs[0].logprobs


def test_a_linear_base_is_stretched_from_its_own_positions(zoo: ModelZoo, serve: OpenLLM, tmp_path: Path) -> None:
    """The adapter's factor is in place of the base's, and rows of the base keep theirs."""
    base = zoo.base("llama", options=stretched(2.0))
    written = zoo.adapter(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    longer = zoo.base("llama", options=stretched(4.0))
    cases = [
        Case("base", zoo.fit_case(base, length=70, num_tokens=NUM_TOKENS)),
        Case(
            "by 4",
            zoo.fit_case(longer, written, length=150, num_tokens=NUM_TOKENS),
            LoRARequest("by 4", 1, str(with_fields(written, tmp_path / "4", {"context_length": 256}))),
        ),
        Case(
            "by 2, the base's own",
            zoo.fit_case(base, written, length=80, num_tokens=NUM_TOKENS),
            LoRARequest("by 2", 2, str(with_fields(written, tmp_path / "2", {"context_length": 128}))),
        ),
    ]
    llm = serve(base, long_lora_scaling_factors=(4.0,))
    check(llm, cases)
    assert llm.engine.adapters.table.rope_factors.keys() == {_slot_of(llm, "by 4")}
    with pytest.raises(AdapterValidationError, match="less than the base's own factor, 2"):
        llm.add_lora(LoRARequest("by 1", 3, str(with_fields(written, tmp_path / "1", {"context_length": 60}))))


def _slot_of(llm: LLM, name: str) -> int | None:
    adapter_id = llm._front.registry.resolve(name).adapter_id
    return next(each.lora_slot for each in llm.engine.adapters.list_adapters() if each.adapter_id == adapter_id)


# ------------------------------------------------------------------------------------------------------------- lengths


def prompt_of(length: int) -> dict[str, Any]:
    return {"prompt_token_ids": [5 + index % 100 for index in range(length)]}


def test_the_longest_context_is_the_adapters(llama: Family, serve: OpenLLM) -> None:
    llm = serve(llama.base)
    until_full = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for name, length in (("base", 64), ("plain", 64), ("by 4", 256), ("by 4, not all of it", 200), ("by 2", 128)):
        request = llama.case(name).request
        (output,) = llm.generate([prompt_of(length - 5)], until_full, lora_request=request)
        assert len(output.outputs[0].token_ids) == 5, name
        with pytest.raises(
            PromptTooLongError, match=f"the prompt has {length} tokens and the model's length is {length}"
        ):
            llm.generate([prompt_of(length)], until_full, lora_request=request)


def test_a_request_may_have_less_of_it(llama: Family, serve: OpenLLM) -> None:
    llm = serve(llama.base)
    until_full = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    request = llama.case("by 4").request
    assert request is not None
    (output,) = llm.generate([prompt_of(90)], until_full, lora_request=replace(request, long_lora_max_len=100))
    assert len(output.outputs[0].token_ids) == 10
    with pytest.raises(PromptTooLongError, match="the model's length is 100"):
        llm.generate([prompt_of(100)], until_full, lora_request=replace(request, long_lora_max_len=100))
    with pytest.raises(InvalidRequestError, match="long_lora_max_len=257 is more than the 256 tokens"):
        llm.generate([prompt_of(5)], until_full, lora_request=replace(request, long_lora_max_len=257))


def test_a_longer_context_than_the_engine_prepared_is_refused_there(llama: Family, serve: OpenLLM) -> None:
    """No front sends it; the kernels' tables end there."""
    engine = serve(llama.base).engine
    request = Request("r", (5,) * 70, GREEDY, 8, 1)
    for more in ({}, {"max_model_len": 256}, {"adapter_id": 1}, {"adapter_id": 1, "max_model_len": 257}):
        with pytest.raises(InvalidRequestError, match=r"does not fit in 64 tokens|is longer than the longest here"):
            engine.add_request(replace(request, **more))


def test_the_kv_cache_holds_the_longest_request(llama: Family) -> None:
    def longest(**settings: Any) -> int:
        lora = LoRAConfig(long_lora_scaling_factors=settings.pop("factors", FACTORS))
        engine = build_engine(EngineConfig(model=str(llama.base), lora=lora, block_size=BLOCK_SIZE, **settings))
        engine.close()
        assert engine.info.max_model_len == POSITIONS
        assert engine.info.long_contexts is not None
        assert engine.info.num_kv_blocks * BLOCK_SIZE >= engine.info.long_contexts.longest
        return engine.info.long_contexts.longest

    block_bytes = 4 * 2 * BLOCK_SIZE * 64 // 2 * 2
    assert longest() == 256
    assert longest(max_num_seqs=1, kv_cache_memory_bytes=16 * block_bytes) == 256
    assert longest(factors=()) == 0
    with pytest.raises(ConfigError, match=r"allow requests of 256 tokens, and the KV cache of .* bytes holds 240"):
        longest(kv_cache_memory_bytes=15 * block_bytes)


@pytest.mark.parametrize("rope", ["yarn", "llama3"])
def test_other_rope_types_are_not_stretched(zoo: ModelZoo, serve: OpenLLM, rope: str, tmp_path: Path) -> None:
    more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope == "llama3" else {}
    parameters = {"rope_type": rope, "factor": 2.0, "original_max_position_embeddings": 32, "rope_theta": THETA, **more}
    base = zoo.base("llama", options={**SHORT, "rope_parameters": parameters})
    with pytest.raises(ConfigError, match=f"the model's rope_type is '{rope}', which adapters cannot stretch"):
        serve(base)
    written = zoo.adapter(base, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    path = with_fields(written, tmp_path / "long", {"context_length": 256})
    with pytest.raises(AdapterValidationError, match=f"rope_type is '{rope}': only default or linear is stretched"):
        serve(base, long_lora_scaling_factors=()).add_lora(LoRARequest("long", 1, str(path)))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"context_length": 500},
            "stretches the base's 64 positions by 8; long_lora_scaling_factors allows 2, 4: start",
        ),
        ({"vllm_long_context_scaling_factor": 3.5}, "by 3.5; long_lora_scaling_factors allows 2, 4"),
        ({"context_length": 300, "vllm_long_context_scaling_factor": 4}, "to 256, and context_length is 300"),
        ({"context_length": 256, "vllm_max_position_embeddings": 4096}, "vllm_max_position_embeddings=4096"),
    ],
)
def test_contexts_that_this_server_does_not_serve(
    llama: Family, serve: OpenLLM, tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    plain = llama.case("plain").request
    assert plain is not None
    path = with_fields(Path(plain.lora_path), tmp_path / "a", fields)
    with pytest.raises(AdapterValidationError, match=reason):
        serve(llama.base).add_lora(LoRARequest("a", 1, str(path)))


def test_a_context_within_the_bases_is_the_bases(llama: Family, serve: OpenLLM, tmp_path: Path) -> None:
    plain = llama.case("plain").request
    assert plain is not None
    path = with_fields(Path(plain.lora_path), tmp_path / "a", {"context_length": 40})
    llm = serve(llama.base, long_lora_scaling_factors=())
    check(llm, [replace(llama.case("plain"), request=LoRARequest("a", 1, str(path)))])
    assert llm.engine.adapters.table.rope_factors == {}


# ------------------------------------------------------------------------------------------------------ mixes, graphs


def test_a_mix_has_one_factor(llama: Family, zoo: ModelZoo, serve: OpenLLM) -> None:
    llm = serve(llama.base)
    first, second = llama.case("by 4"), llama.case("by 4, not all of it")
    prompt = llama.case("by 4, short").greedy.prompt_token_ids
    parts = [(case.written, weight) for case, weight in ((first, 0.7), (second, 0.5))]
    greedy = cat_oracle(zoo, zoo.base("llama", options=stretched(4.0)), parts).greedy(prompt, NUM_TOKENS)
    mix = [(first.request, 0.7), (second.request, 0.5)]
    (output,) = llm.generate([{"prompt_token_ids": prompt}], GREEDY, lora_request=mix)
    assert output.outputs[0].token_ids == greedy.output_token_ids
    for odd in ("by 2", "plain"):
        mix[1] = (llama.case(odd).request, 0.5)
        with pytest.raises(AdapterMixError, match="adapter 'by 4' has another context than others of the mix"):
            llm.generate([{"prompt_token_ids": prompt}], GREEDY, lora_request=mix)


def test_decode_steps_are_replayed_in_wider_graphs(llama: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs on a tape: each replay is compared with the same step run kernel by kernel."""
    device = TapeDevice()
    monkeypatch.setattr(build_module, "get_backend", lambda *_: MaskedBackend())
    monkeypatch.setattr(decode_graphs, "graph_device_for", lambda *_: device)
    lora = LoRAConfig(long_lora_scaling_factors=FACTORS, max_loras=8)
    driver = Driver(llama.base, lora, max_num_seqs=8, kv_cache_memory_bytes=1 << 22, block_size=BLOCK_SIZE)
    device.poisoned += driver.engine._runner._builder._buffers.host_blocks  # type: ignore[attr-defined]
    graphs = driver.engine.graphs
    assert graphs is not None
    assert [tuple(key) for key in graphs._graphs][:3] == [(8, True, True), (8, True, False), (8, False, False)]
    not_on_the_tape = (
        "by 4, own norms",
        "by 2 as a factor",
    )  # own weights are in no graph, and its kernels know no DoRA
    cases = [case for case in llama.cases if case.name not in not_on_the_tape]
    for case in cases:
        if case.request is not None:
            driver.registry.load(case.name, case.request.lora_path)
    for together in (cases, [llama.case("by 4, short"), llama.case("base")]):
        with graphs.compared() as compared:
            asked = [
                driver.submit(
                    case.greedy.prompt_token_ids, None if case.request is None else case.name, max_tokens=NUM_TOKENS
                )
                for case in together
            ]
            driver.finish()
        assert compared == {"equal": NUM_TOKENS - 1}
        for case, request_id in zip(together, asked, strict=True):
            assert driver.tokens(request_id) == case.greedy.output_token_ids, case.name
    assert set(driver.stats.eager_steps) == {"prefill"}
    driver.check_idle()
    driver.close()
