"""Files that peft writes of activated LoRA: in fp32, greedy, the tokens of transformers + peft, for each family, alone
and beside the base and other kinds, wherever a chunk ends, from the prefix cache in both directions, and while there
are more adapters than room."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig

from loraplex import LLM, LoRARequest, SamplingParams
from loraplex.errors import InvalidRequestError
from tests.engine.alora_oracle import ActivatedCase, ActivatedOracle
from tests.fixtures import FAMILIES, TARGET_MODULES, ModelZoo

pytestmark = pytest.mark.slow

NUM_TOKENS = 32
BLOCK_SIZE = 16
LENGTH = 43
MAX_MODEL_LEN = LENGTH + NUM_TOKENS
FIRST, SECOND = [71, 72, 71], [80]
STARTS: dict[str, tuple[int, ...]] = {
    "in the middle": (22,),
    "twice": (4, 35),
    "at the border of a block": (2 * BLOCK_SIZE,),
    "at the beginning": (0,),
    "at the end": (LENGTH - len(FIRST),),
    "overlapping itself": (19, 21),
    "nowhere": (),
}


@dataclass(frozen=True)
class Family:
    base: Path
    first: Path
    second: Path
    first_oracle: ActivatedOracle
    cases: tuple[ActivatedCase, ...]

    def case(self, name: str) -> ActivatedCase:
        return next(each for each in self.cases if each.name == name)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, zoo: ModelZoo) -> Family:
    base, targets = zoo.base(request.param), list(TARGET_MODULES)
    first_config = LoraConfig(
        r=8, lora_alpha=16, target_modules=targets, alora_invocation_tokens=FIRST, task_type="CAUSAL_LM"
    )
    second_config = LoraConfig(
        r=5,
        lora_alpha=7,
        use_rslora=True,
        lora_bias=True,
        target_modules="all-linear",
        rank_pattern={"q_proj": 3},
        alora_invocation_tokens=SECOND,
        task_type="CAUSAL_LM",
    )
    first, second = zoo.adapter(base, first_config, seed=70), zoo.adapter(base, second_config, seed=71)
    oracles = ActivatedOracle(zoo, base, first), ActivatedOracle(zoo, base, second)
    others = {
        "base": None,
        "LoRA": zoo.adapter(base, LoraConfig(r=8, lora_alpha=16, target_modules=targets), seed=72),
        "DoRA": zoo.adapter(base, LoraConfig(r=4, lora_alpha=8, target_modules=targets, use_dora=True), seed=73),
        "IA3": zoo.adapter(
            base, IA3Config(target_modules=["k_proj", "o_proj"], feedforward_modules=["o_proj"]), seed=74
        ),
    }
    cases = []
    for name, path in others.items():
        cases.append(ActivatedCase(name, path, zoo.fit_case(base, path, length=20, num_tokens=NUM_TOKENS)))
    for name, starts in STARTS.items():
        greedy = oracles[0].fit_case(FIRST, starts, LENGTH, NUM_TOKENS)
        cases.append(ActivatedCase(name, first, greedy, max(starts, default=None)))
    cases.append(ActivatedCase("another", second, oracles[1].fit_case(SECOND, (29,), LENGTH, NUM_TOKENS), 29))
    return Family(base, first, second, oracles[0], tuple(cases))


class Server:
    """An engine to which each case brings its adapter, by file."""

    def __init__(self, family: Family, **settings: Any) -> None:
        self.llm = LLM(str(family.base), max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE, **settings)
        self._ids: dict[Path, int] = {}

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.close()

    def request_of(self, path: Path | None) -> LoRARequest | None:
        if path is None:
            return None
        number = self._ids.setdefault(path, len(self._ids) + 1)
        return LoRARequest(f"a{number}", number, str(path))

    def ask(self, cases: Sequence[ActivatedCase], **options: Any) -> list[Any]:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, **options)
        prompts = [{"prompt_token_ids": case.greedy.prompt_token_ids} for case in cases]
        return self.llm.generate(prompts, params, lora_request=[self.request_of(case.path) for case in cases])

    def check(self, cases: Sequence[ActivatedCase]) -> list[int]:
        """What they say in one batch is what the oracles say; returns how many tokens came from the cache."""
        outputs = self.ask(cases)
        pairs = zip(cases, outputs, strict=True)
        wrong = [case.name for case, each in pairs if each.outputs[0].token_ids != case.greedy.output_token_ids]
        assert wrong == []
        self.llm.check_integrity()
        return [each.num_cached_tokens for each in outputs]


def test_alone(family: Family) -> None:
    with Server(family) as server:
        for case in family.cases:
            server.check([case])


def test_in_one_batch_and_again_from_the_prefix_cache(family: Family) -> None:
    with Server(family) as server:
        assert not any(server.check(family.cases))
        assert all(server.check(family.cases))


def test_the_oracle_computes_what_peft_generates(family: Family) -> None:
    for name in ("twice", "nowhere"):
        greedy = family.case(name).greedy
        said = family.first_oracle.generated(greedy.prompt_token_ids, NUM_TOKENS)
        assert said == greedy.output_token_ids[: len(said)]


def test_an_invocation_that_is_generated_activates_nothing(family: Family, tmp_path: Path, zoo: ModelZoo) -> None:
    """In peft neither: it looks for the invocation once, in the prompt."""
    base = family.case("base")
    invoked = shutil.copytree(family.first, tmp_path / "invoked")
    config = json.loads((invoked / "adapter_config.json").read_text())
    config["alora_invocation_tokens"] = list(base.greedy.output_token_ids[3:5])
    (invoked / "adapter_config.json").write_text(json.dumps(config))
    said = ActivatedOracle(zoo, family.base, invoked).generated(base.greedy.prompt_token_ids, NUM_TOKENS)
    assert said == base.greedy.output_token_ids[: len(said)]
    with Server(family) as server:
        server.check([ActivatedCase("generated", invoked, base.greedy)])


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
def test_a_prompt_may_be_cut_anywhere(family: Family, backend: str) -> None:
    """In chunks of each length, of which some end before, at, and behind the first token of the invocation."""
    case = family.case("in the middle")
    lengths = range(1, LENGTH + 1) if backend == "auto" else (11, 21, 22, 23)
    with Server(family, lora_backend=backend, enable_prefix_caching=False) as server:
        for length in lengths:
            server.llm.engine._scheduler._max_num_batched_tokens = length
            server.check([case])


def test_prompts_in_chunks_beside_others_that_decode(family: Family) -> None:
    with Server(family, max_num_batched_tokens=17, max_num_seqs=7, num_threads=1) as server:
        server.check(family.cases)


def test_everything_at_once(family: Family) -> None:
    """Chunks, preemption, prefix cache, adapters that leave memory and are read again; free KV memory holds NaN."""
    with Server(family) as server:
        server.check(family.cases)
        sizes = [each.nbytes for each in server.llm.engine.adapters.list_adapters()]
        block_bytes = server.llm.engine._runner.kv_block_bytes
    room = max(sizes)
    with Server(
        family,
        kv_cache_memory_bytes=22 * block_bytes,
        max_num_batched_tokens=24,
        max_num_seqs=10,
        adapter_memory_bytes=room,
        host_memory_bytes=room,
        aging_steps=8,
    ) as server:
        server.llm.engine._runner._kv.fill_(math.nan)
        server.check(family.cases)
        server.check(tuple(reversed(family.cases)))
        stats = server.llm.stats()
        assert stats.num_preemptions > 0
        assert stats.memory.evictions["host_room"] > 0


@pytest.mark.parametrize("name", ["in the middle", "twice", "at the border of a block", "at the end", "nowhere"])
def test_blocks_before_the_invocation_are_shared_with_the_base(family: Family, name: str, zoo: ModelZoo) -> None:
    case, prompt = family.case(name), family.case(name).greedy.prompt_token_ids
    base = ActivatedCase("base", None, zoo.oracle(family.base).greedy(prompt, NUM_TOKENS))
    start = LENGTH if case.start is None else case.start
    shared = min(start, LENGTH - 1) // BLOCK_SIZE * BLOCK_SIZE
    for first, second in ((base, case), (case, base)):
        with Server(family) as server:
            assert server.check([first]) == [0]
            assert server.check([second]) == [shared]
            whole = (LENGTH - 1) // BLOCK_SIZE * BLOCK_SIZE
            assert server.check([first, second]) == [whole, whole], "each its own behind"


def test_two_adapters_share_what_lies_before_both_invocations(family: Family, zoo: ModelZoo) -> None:
    """And nothing across salts."""
    oracle = ActivatedOracle(zoo, family.base, family.second)
    prompt = [*family.case("in the middle").greedy.prompt_token_ids]
    prompt[33] = SECOND[0]
    first = ActivatedCase("first", family.first, *family.first_oracle.greedy_batch([prompt], NUM_TOKENS))
    second = ActivatedCase("second", family.second, *oracle.greedy_batch([prompt], NUM_TOKENS))
    with Server(family) as server:
        assert server.check([first]) == [0]
        assert server.check([second]) == [BLOCK_SIZE]
        params = SamplingParams(temperature=0, max_tokens=1)
        asked, request = [{"prompt_token_ids": prompt}], server.request_of(family.first)
        (salted,) = server.llm.generate(asked, params, lora_request=request, cache_salt="other")
        assert salted.num_cached_tokens == 0


@pytest.mark.parametrize("chunk", [7, 64])
def test_logprobs_of_prompts(family: Family, chunk: int) -> None:
    cases = [family.case(name) for name in ("in the middle", "twice", "nowhere")]
    with Server(family, max_num_batched_tokens=chunk, max_num_seqs=4) as server:
        for case, output in zip(cases, server.ask(cases, prompt_logprobs=1), strict=True):
            prompt = case.greedy.prompt_token_ids
            expected = torch.log_softmax(family.first_oracle.logits(prompt), -1)
            for position, scored in enumerate(output.prompt_logprobs[1:]):
                token = prompt[position + 1]
                assert scored[token].logprob == pytest.approx(float(expected[position, token]), abs=2e-4)


def test_reload_in_place(family: Family) -> None:
    """One name: a LoRA, an aLoRA, another one, and back by a rollback."""
    with LLM(str(family.base), max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE) as llm:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

        def check(name: str, request: LoRARequest) -> None:
            prompt = {"prompt_token_ids": family.case(name).greedy.prompt_token_ids}
            (output,) = llm.generate([prompt], params, lora_request=[request])
            assert output.outputs[0].token_ids == family.case(name).greedy.output_token_ids, name

        for name in ("LoRA", "in the middle", "another"):
            check(name, LoRARequest("tenant", 1, str(family.case(name).path), load_inplace=True))
        llm.rollback_lora(1)
        check("twice", LoRARequest("tenant", 1, str(family.first)))


def test_a_mix_is_refused_by_name(family: Family) -> None:
    with Server(family) as server:
        request = server.request_of(family.first)
        assert request is not None
        case = family.case("in the middle")
        prompt = {"prompt_token_ids": case.greedy.prompt_token_ids}
        with pytest.raises(InvalidRequestError, match=r"adapter 'a1' .*alora_invocation_tokens.* in no mix"):
            server.llm.generate([prompt], SamplingParams(max_tokens=1), lora_request=[[(request, 0.5)]])
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        (output,) = server.llm.generate([prompt], params, lora_request=[[(request, 1.0)]])
        assert output.outputs[0].token_ids == case.greedy.output_token_ids, "a weight of 1 alone is no mix"
