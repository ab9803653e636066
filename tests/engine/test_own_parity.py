"""Files that peft writes of adapters with embeddings, heads, norms, linears and tokens of their own: in fp32, greedy,
the tokens of transformers + peft, for each family, while prompts are computed in chunks, come from the prefix cache,
are preempted, and while there are more adapters than room."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loraplex import LLM, LoRARequest, SamplingParams
from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.weights import CheckedReader, LoRAModel
from loraplex.config import LoRAConfig
from tests.engine.own_models import ask
from tests.fixtures import FAMILIES, OWN_OPTIONS, REFERENCE_FAMILIES, VOCAB_SIZE, GreedyCase, ModelZoo

pytestmark = pytest.mark.slow

NUM_TOKENS = 32
BLOCK_SIZE = 16
LENGTHS = (12, 33, 20)
MAX_MODEL_LEN = max(LENGTHS) + NUM_TOKENS
UNTIED = ("qwen2",)
"""Families whose base has a head of its own here."""


@dataclass(frozen=True)
class OwnCase:
    name: str
    path: Path | None
    greedy: GreedyCase


@dataclass(frozen=True)
class OwnFamily:
    base: Path
    cases: tuple[OwnCase, ...]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, zoo: ModelZoo) -> OwnFamily:
    base = zoo.base(request.param, options={"tie_word_embeddings": request.param not in UNTIED})
    cases = [OwnCase("base", None, zoo.fit_case(base, num_tokens=NUM_TOKENS))]
    for index, name in enumerate(OWN_OPTIONS):
        path = zoo.own_adapter(base, name, seed=60 + index)
        greedy = zoo.fit_case(base, path, length=LENGTHS[index % len(LENGTHS)], num_tokens=NUM_TOKENS)
        cases.append(OwnCase(name, path, greedy))
    return OwnFamily(base, tuple(cases))


class Server:
    """An engine with all adapters of a family, read from their files."""

    def __init__(self, family: OwnFamily, *, is_poisoned: bool = False, **settings: Any) -> None:
        self.llm = LLM(str(family.base), max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE, **settings)
        if is_poisoned:
            self.llm.engine._runner._kv.fill_(math.nan)
            self.llm.engine.adapters._residency.tiers.host.pool.poison()
        reader = CheckedReader(self.llm.engine.info.targets, LoRAConfig())
        self._models: dict[str, LoRAModel] = {}
        for number, case in enumerate(family.cases):
            if case.path is not None:
                model = reader.read(case.path, PEFTHelper.from_local_dir(case.path)).clone(number)
                self._models[case.name] = model
                self.llm.engine.adapters.add_adapter(model)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.close()

    def check(self, cases: Sequence[OwnCase]) -> None:
        """What they say in one batch is what the oracles say."""
        asked = [(self._models.get(case.name), case.greedy.prompt_token_ids) for case in cases]
        said = ask(self.llm.engine, asked, NUM_TOKENS)
        pairs = zip(cases, said, strict=True)
        assert [case.name for case, each in pairs if each.token_ids != case.greedy.output_token_ids] == []
        self.llm.check_integrity()


def test_alone(family: OwnFamily) -> None:
    with Server(family) as server:
        for case in family.cases:
            server.check([case])


def test_in_one_batch_and_again_from_the_prefix_cache(family: OwnFamily) -> None:
    with Server(family) as server:
        server.check(family.cases)
        server.check(family.cases)
        assert server.llm.stats().num_prefix_hit_tokens > 0


def test_prompts_in_chunks_beside_others_that_decode(family: OwnFamily) -> None:
    check_in_chunks(family, "torch")


@pytest.mark.parametrize("family", REFERENCE_FAMILIES, indirect=True)
def test_prompts_in_chunks_by_the_reference(family: OwnFamily) -> None:
    check_in_chunks(family, "reference")


def check_in_chunks(family: OwnFamily, backend: str) -> None:
    with Server(family, lora_backend=backend, max_num_batched_tokens=11, max_num_seqs=7, num_threads=1) as server:
        server.check(family.cases)


def test_everything_at_once(family: OwnFamily) -> None:
    """Chunks, preemption, prefix cache, adapters that leave memory and are read again; all free memory holds NaN."""
    with Server(family) as server:
        sizes = [each.nbytes for each in server.llm.engine.adapters.list_adapters()]
        block_bytes = server.llm.engine._runner.kv_block_bytes
    room = max(sizes) + 256 * 1024
    with Server(
        family,
        is_poisoned=True,
        kv_cache_memory_bytes=22 * block_bytes,
        max_num_batched_tokens=24,
        max_num_seqs=10,
        adapter_memory_bytes=room,
        host_memory_bytes=room + 64 * 1024,
        aging_steps=8,
    ) as server:
        server.check(family.cases)
        server.check(tuple(reversed(family.cases)))
        stats = server.llm.stats()
        assert stats.num_preemptions > 0
        assert stats.memory.evictions["host_room"] > 0


def test_reload_in_place(family: OwnFamily) -> None:
    """One name, another kind each time; prompts and answers within the base's vocabulary."""
    cases = {case.name: case for case in family.cases}
    names = ["saved norms", "LoRA of the head", "trained tokens", "saved linears"]
    with LLM(str(family.base), max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE) as llm:
        for name in names:
            case = cases[name]
            assert max(case.greedy.prompt_token_ids) < VOCAB_SIZE
            request = LoRARequest("tenant", 1, str(case.path), load_inplace=True)
            params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
            prompt = {"prompt_token_ids": case.greedy.prompt_token_ids}
            (output,) = llm.generate([prompt], params, lora_request=[request])
            assert output.outputs[0].token_ids == case.greedy.output_token_ids, name
