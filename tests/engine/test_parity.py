"""Whole models in fp32, greedy: token-identical to transformers + peft over 64 tokens.

For each family and each honoured PEFT field, alone and in one mixed batch with the base model, while prompts are
computed in chunks, come from the prefix cache, are preempted, and while there are more adapters than room. The oracle
is fit for it (tests/fixtures.py).
"""

from __future__ import annotations

import copy
import json
import math
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex import LLM, LoRARequest, RequestOutput, SamplingParams
from loraplex.adapters.fields import CONTEXT_FIELDS, HONOURED
from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.weights import CheckedReader
from loraplex.config import LoRAConfig
from loraplex.engine import memory_plan
from loraplex.kernels.ops import get_backend
from loraplex.memory.space.arena import Owner
from loraplex.models.config import ModelConfig
from loraplex.models.decoder import Decoder
from tests.fixtures import (
    ADAPTER_OPTIONS,
    FAMILIES,
    KIND_OPTIONS,
    MIN_DISTINCT,
    MIN_GAP,
    NUM_TOKENS,
    OWN_OPTIONS,
    REFERENCE_FAMILIES,
    GreedyCase,
    ModelZoo,
    Oracle,
    some_of,
)

BLOCK_SIZE = 16
PROMPT_LENGTHS = (12, 40, 17, 33)
MAX_MODEL_LEN = max(PROMPT_LENGTHS) + NUM_TOKENS
OWN_NAMES = ("saved norms", "saved linears")
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@dataclass(frozen=True)
class ParityCase:
    """What the engine must say to one prompt through one adapter (None: the base model). `field`: what the adapter is
    for."""

    field: str
    greedy: GreedyCase
    adapter: Path | None = None
    lora_int_id: int = 0

    @property
    def lora_request(self) -> LoRARequest | None:
        return None if self.adapter is None else LoRARequest(self.field, self.lora_int_id, str(self.adapter))


@dataclass(frozen=True)
class FamilyCases:
    """One base model, and a case for each field; `kv_block_bytes` and `adapter_bytes` are for tests short of memory."""

    base: Path
    cases: tuple[ParityCase, ...]
    kv_block_bytes: int

    @property
    def adapter_bytes(self) -> list[int]:
        """Bytes of the tensors of each adapter, converted, as the engine packs them in fp32."""
        meta = torch.device("meta")
        base = Decoder(ModelConfig.from_dir(self.base), get_backend("torch", meta), torch.float32, meta, True)
        reader = CheckedReader(base.lora_targets(), LoRAConfig())
        paths = [case.adapter for case in self.cases if case.adapter is not None]
        return [reader.read(path, PEFTHelper.from_local_dir(path)).nbytes for path in paths]


@pytest.fixture(scope="module", params=some_of(FAMILIES, 2))
def family(request: pytest.FixtureRequest, zoo: ModelZoo, tmp_path_factory: pytest.TempPathFactory) -> FamilyCases:
    base = zoo.base(request.param)
    adapters = [*_written_by_peft(zoo, base), *_rewritten(zoo, base, tmp_path_factory.mktemp(request.param))]
    cases = [ParityCase("base", greedy) for greedy in zoo.fit_cases(base, count=3, length=PROMPT_LENGTHS[1])]
    for index, (field, path, oracle) in enumerate(adapters):
        greedy = zoo.fit_case(base, oracle, length=PROMPT_LENGTHS[index % len(PROMPT_LENGTHS)])
        cases.append(ParityCase(field, greedy, path, index + 1))
    config = json.loads((base / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kv_block_bytes = 4 * 2 * BLOCK_SIZE * head_dim * config["num_key_value_heads"] * config["num_hidden_layers"]
    return FamilyCases(base, tuple(cases), kv_block_bytes)


def _written_by_peft(zoo: ModelZoo, base: Path) -> Iterator[tuple[str, Path, Path]]:
    """(field, adapter, the adapter that the oracle has) for each of ADAPTER_OPTIONS and KIND_OPTIONS, and some that
    have more than deltas: those that are no larger (test_own_parity.py has them all)."""
    import peft
    from peft import LoraConfig

    for field, options in ADAPTER_OPTIONS.items():
        path = zoo.adapter(base, LoraConfig(**options, task_type="CAUSAL_LM"))
        yield field, path, path
    for kind, (config_class, options) in KIND_OPTIONS.items():
        path = zoo.adapter(base, getattr(peft, config_class)(**options, task_type="CAUSAL_LM"))
        yield kind, path, path
    for name in OWN_NAMES:
        path = zoo.own_adapter(base, name)
        yield name, path, path


def _rewritten(zoo: ModelZoo, base: Path, root: Path) -> Iterator[tuple[str, Path, Path]]:
    """The same, for what PEFT's `save_pretrained` does not write by itself. The seeds make each content another one."""
    from peft import LoraConfig

    rewriters = {"fan_in_fan_out": _set_fan_in_fan_out, "bin file": _write_bin, "sharded safetensors": _write_shards}
    for seed, (field, rewrite) in enumerate(rewriters.items(), start=20):
        original = zoo.adapter(
            base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"), seed=seed
        )
        path = Path(shutil.copytree(original, root / field.replace(" ", "-")))
        rewrite(path)
        yield field, path, path if field == "fan_in_fan_out" else original  # what PEFT makes of it is asked of PEFT


def _set_fan_in_fan_out(path: Path) -> None:
    file = path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "fan_in_fan_out": True}))


def _write_bin(path: Path) -> None:
    torch.save(load_file(path / "adapter_model.safetensors"), path / "adapter_model.bin")
    (path / "adapter_model.safetensors").unlink()


def _write_shards(path: Path) -> None:
    tensors = load_file(path / "adapter_model.safetensors")
    (path / "adapter_model.safetensors").unlink()
    file_of = {
        name: f"adapter_model-{index % 2 + 1:05}-of-00002.safetensors" for index, name in enumerate(sorted(tensors))
    }
    for file in set(file_of.values()):
        save_file({name: tensor for name, tensor in tensors.items() if file_of[name] == file}, path / file)
    index = {"metadata": {}, "weight_map": file_of}
    (path / "adapter_model.safetensors.index.json").write_text(json.dumps(index))


# ------------------------------------------------------------------------------------------------------ run and compare


def start(family: FamilyCases, **settings: Any) -> LLM:
    return LLM(str(family.base), max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE, **settings)


def generate(llm: LLM, cases: Sequence[ParityCase]) -> list[RequestOutput]:
    """All cases in one call; each answer must be the oracle's."""
    prompts = [{"prompt_token_ids": case.greedy.prompt_token_ids} for case in cases]
    outputs = llm.generate(prompts, GREEDY, lora_request=[case.lora_request for case in cases])
    wrong = [_difference(case, output) for case, output in zip(cases, outputs, strict=True)]
    assert not any(wrong), "\n".join(filter(None, wrong))
    llm.check_integrity()
    return outputs


def _difference(case: ParityCase, output: RequestOutput) -> str:
    said, expected = output.outputs[0].token_ids, case.greedy.output_token_ids
    if said == expected:
        return ""
    same = next(
        (index for index, pair in enumerate(zip(said, expected, strict=False)) if pair[0] != pair[1]), len(said)
    )
    gap = f"its least gap is {case.greedy.min_gap:.4f}"
    return f"{case.field}: {len(said)} tokens, the first {same} are the oracle's, {gap}"


def evictions(llm: LLM) -> Mapping[str, int]:
    return llm.stats().memory.evictions


def test_the_oracles_are_fit(family: FamilyCases) -> None:
    said = [case.greedy.output_token_ids for case in family.cases]
    assert len(set(said)) == len(said)
    for case in family.cases:
        assert len(case.greedy.output_token_ids) == NUM_TOKENS
        assert case.greedy.num_distinct >= MIN_DISTINCT, case.field
        assert case.greedy.min_gap >= MIN_GAP, case.field


def test_alone(family: FamilyCases) -> None:
    with start(family) as llm:
        for case in family.cases:
            generate(llm, [case])
        assert llm.stats().num_prefix_hit_tokens == 0


def test_in_one_mixed_batch_and_again_from_the_prefix_cache(family: FamilyCases) -> None:
    with start(family) as llm:
        first = generate(llm, family.cases)
        num_steps = llm.stats().step_times.num_steps
        assert num_steps <= NUM_TOKENS + 1, "the batch was not one batch"
        again = generate(llm, family.cases)
        assert llm.stats().step_times.num_steps <= 2 * num_steps
    assert [output.num_cached_tokens for output in first] == [0] * len(first)
    for case, output in zip(family.cases, again, strict=True):
        assert output.num_cached_tokens == (len(case.greedy.prompt_token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_prompts_in_chunks_beside_others_that_decode(family: FamilyCases) -> None:
    check_in_chunks(family, "torch")


@pytest.mark.parametrize("family", REFERENCE_FAMILIES, indirect=True)
def test_prompts_in_chunks_by_the_reference(family: FamilyCases) -> None:
    check_in_chunks(family, "reference")


def check_in_chunks(family: FamilyCases, backend: str) -> None:
    with start(family, lora_backend=backend, max_num_batched_tokens=11, max_num_seqs=7, num_threads=1) as llm:
        assert llm.engine.info.backend == backend
        generate(llm, family.cases)
        num_tokens = sum(len(case.greedy.prompt_token_ids) + NUM_TOKENS - 1 for case in family.cases)
        assert llm.stats().step_times.num_steps >= num_tokens / 11


@pytest.mark.parametrize("is_prefix_caching", [True, False])
def test_preemption(family: FamilyCases, is_prefix_caching: bool) -> None:
    """Room for all prompts, not for all outputs."""
    num_blocks = 4 * len(family.cases)
    with start(
        family,
        kv_cache_memory_bytes=num_blocks * family.kv_block_bytes,
        enable_prefix_caching=is_prefix_caching,
    ) as llm:
        assert llm.engine.info.num_kv_blocks <= num_blocks
        generate(llm, family.cases)
        assert llm.stats().num_preemptions >= 3
        assert is_prefix_caching or llm.stats().num_prefix_hit_tokens == 0


def test_more_adapters_than_device_room(family: FamilyCases) -> None:
    """The device holds less than half of them; each request gets its turn, and what was evicted comes back as it was.

    Requests that are paused go on with the KV they have.
    """
    room = max(max(family.adapter_bytes) + 64 * 1024, sum(family.adapter_bytes) // 3)
    with start(family, adapter_memory_bytes=room, aging_steps=8) as llm:
        generate(llm, family.cases)
        stats = llm.stats()
        assert stats.memory.evictions["device_room"] >= len(family.adapter_bytes) // 2
        assert stats.memory.counters["promotions"] > len(family.adapter_bytes)
        assert stats.memory.resident_bytes["device"] <= room
        assert stats.num_pauses > 0
        generate(llm, list(reversed(family.cases)))


def test_everything_at_once(family: FamilyCases) -> None:
    """Chunks, preemption, prefix cache, adapters that leave memory and are read again; all free memory holds NaN."""
    room = max(family.adapter_bytes) + 128 * 1024
    with start(
        family,
        kv_cache_memory_bytes=22 * family.kv_block_bytes,
        max_num_batched_tokens=24,
        max_num_seqs=10,
        adapter_memory_bytes=room,
        host_memory_bytes=room + 64 * 1024,
        aging_steps=8,
    ) as llm:
        llm.engine._runner._kv.fill_(math.nan)
        llm.engine.adapters._residency.tiers.host.pool.poison()
        generate(llm, family.cases)
        generate(llm, family.cases[:6])
        stats = llm.stats()
        assert stats.num_preemptions > 0
        assert stats.num_pauses > 0
        assert stats.num_prefix_hit_tokens > 0
        assert stats.memory.evictions["host_room"] > 0
        assert stats.memory.loads["request"] + stats.memory.loads["prefetch"] > 0


def test_kv_cache_and_adapters_share_too_little(family: FamilyCases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thirds of what both want: chunks change hands all the time, KV blocks and extents move, and tokens stay."""
    monkeypatch.setattr(memory_plan, "CHUNK_BYTES", 4 * family.kv_block_bytes)
    longest = -(-MAX_MODEL_LEN // BLOCK_SIZE) * family.kv_block_bytes
    wanted, floor = sum(family.adapter_bytes) + len(family.cases) * longest, 2 * max(family.adapter_bytes)
    with start(
        family, device_memory=max(2 * wanted // 3, floor + 4 * longest), adapter_floor=floor, aging_steps=8
    ) as llm:
        arena, blocks = llm.engine.adapters._residency.tiers.host.pool.arena, llm.engine._blocks
        assert arena.num_bytes < wanted
        llm.engine._runner._kv.fill_(math.nan)
        llm.engine.adapters._residency.tiers.host.pool.poison()
        shares: list[tuple[int, int]] = []
        step = llm.engine.step

        def step_and_look() -> Any:
            outputs = step()
            shares.append((arena.num_lent(Owner.KV), arena.num_lent(Owner.ADAPTERS)))
            if len(shares) % 8 == 0:
                llm.check_integrity()
                llm.engine.adapters.compact(1 << 18, math.inf)
            return outputs

        monkeypatch.setattr(llm.engine, "step", step_and_look)
        generate(llm, family.cases)
        assert len({kv for kv, _ in shares}) >= 2
        assert len({adapters for _, adapters in shares}) >= 2
        assert llm.stats().num_preemptions + evictions(llm)["kv_pressure"] + evictions(llm)["host_room"] > 0
        assert blocks.num_free_blocks == blocks.num_blocks == llm.engine.info.num_kv_blocks


# ------------------------------------------------------------------------------------------------- what the cases cover


def test_the_cases_cover_every_honoured_field(family: FamilyCases) -> None:
    """A field that is honoured from now on needs a case here, with a value that is not PEFT's default."""
    from peft import LoraConfig

    default = LoraConfig().to_dict()
    covered = set()
    for case in family.cases:
        if case.adapter is not None:
            config = json.loads((case.adapter / "adapter_config.json").read_text())
            covered |= {name for name, value in config.items() if value != default.get(name)}
    covered |= {name for _, options, _ in OWN_OPTIONS.values() for name in options}  # test_own_parity.py
    covered |= {"alora_invocation_tokens"}  # test_alora_parity.py
    covered |= {"target_parameters"}  # test_moe_parity.py
    covered |= {"use_bdlora"}  # tests/adapters/test_block_diagonal.py, tests/ranks/test_kinds.py
    covered |= {*CONTEXT_FIELDS, "vllm_lora_scaling_factor"}  # test_long_context.py
    assert HONOURED - covered == {"init_lora_weights"}, "it changes no inference"


@pytest.mark.parametrize("field", ["bias all", "bias lora_only"])
def test_the_oracle_of_replaced_biases_is_unmerged_peft(zoo: ModelZoo, field: str) -> None:
    """Merging folds the biases in; what PEFT says before that decides."""
    import peft

    base = zoo.base("qwen2")
    adapter = zoo.adapter(base, peft.LoraConfig(**ADAPTER_OPTIONS[field], task_type="CAUSAL_LM"))
    case = zoo.fit_case(base, adapter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(copy.deepcopy(zoo.oracle(base).model), adapter)
    unmerged = Oracle(model).greedy(case.prompt_token_ids)
    assert unmerged.output_token_ids == case.output_token_ids
    assert any(".bias" in name for name in load_file(adapter / "adapter_model.safetensors"))
    with LLM(str(base), max_model_len=MAX_MODEL_LEN) as llm:
        generate(llm, [ParityCase(field, unmerged, adapter, 1)])
