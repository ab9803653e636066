"""Mixtures of experts, whole: token-identical to transformers + peft over 64 tokens.

Adapters act on attention, on the router, and on experts in both forms that files have: peft's `target_parameters`, and
a module for each expert, as older versions wrote them (peft converts these when it reads them: that is the oracle).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex import LLM
from loraplex.adapters.merging.dominance import DominanceRule
from loraplex.kernels.ops import get_backend
from loraplex.models import dominant
from loraplex.models.config import ModelConfig
from loraplex.models.decoder import Decoder
from tests.engine.test_dominant import Served
from tests.engine.test_parity import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    PROMPT_LENGTHS,
    FamilyCases,
    ParityCase,
    generate,
    start,
)
from tests.fixtures import MOE_FAMILIES, NUM_TOKENS, ModelZoo, some_of

BACKENDS = ("native", "torch")
NOT_CONVERTED = ("qwen2_moe", "gpt_oss", "llama4_text")
"""Families whose older files peft does not read, or of which there are none."""
PARAMETERS: Mapping[str, Mapping[str, Any]] = {
    "attention": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "experts": {
        **{"r": 4, "lora_alpha": 8, "target_modules": ["o_proj"]},
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
    "first of experts": {"r": 5, "lora_alpha": 7, "use_rslora": True, "target_modules": []}
    | {"target_parameters": ["experts.gate_up_proj"]},
    "last of experts": {"r": 3, "lora_alpha": 7, "target_modules": [], "target_parameters": ["experts.down_proj"]},
    "router": {"r": 8, "lora_alpha": 8, "target_modules": ["v_proj"], "target_parameters": ["mlp.gate.weight"]},
    "all, in patterns": {
        **{"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
        "target_parameters": ["mlp.gate.weight", "experts.gate_up_proj", "experts.down_proj"],
        "rank_pattern": {r"layers\.0\.mlp\.experts\.gate_up_proj": 3, "experts.down_proj": 6},
        "alpha_pattern": {"experts.down_proj": 20},
    },
}


def write_older(path: Path, base: Path, modules: tuple[str, ...], seed: int) -> Path:
    """A LoRA of these linears, experts among them each a module, as peft saved it when transformers had them so."""
    meta = torch.device("meta")
    config = ModelConfig.from_dir(base)
    targets = Decoder(config, get_backend("torch", meta), torch.float32, meta, True).lora_targets()
    tensors, generator = {}, torch.Generator().manual_seed(seed)
    for target in targets:
        for s in target.slices:
            if s.module_name.rpartition(".")[2] in modules:
                name, rank = f"base_model.model.{s.module_name}", 4
                a = torch.randn(rank, target.in_features, generator=generator) / math.sqrt(target.in_features)
                b = torch.randn(s.out_features, rank, generator=generator) * 0.5 / (2 * math.sqrt(rank))
                tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(modules), "task_type": "CAUSAL_LM"}
    (path / "adapter_config.json").write_text(json.dumps(fields))
    return path


def as_parameters(path: Path, older: Path, base: Path) -> Path:
    """The same adapter as `target_parameters` have it: gate and up of an expert are one LoRA of both ranks.

    peft reads older files of most families so by itself, but not of this one.
    """
    config, tensors = ModelConfig.from_dir(base), load_file(older / "adapter_model.safetensors")
    of_expert = config.family.experts
    assert of_expert is not None
    fields = json.loads((older / "adapter_config.json").read_text())
    rank, kept = fields["r"], {name: t for name, t in tensors.items() if ".experts." not in name}
    for layer, sizes in enumerate(config.experts):
        for part, leaves in ((".base_layer", ("gate_proj", "up_proj")), ("", ("down_proj",))):
            if sizes is None:
                continue
            block, pairs = f"base_model.model.model.layers.{layer}.{of_expert.names.parameters}.experts", []
            for expert in range(sizes.num_experts):
                names = [f"{block}.{expert}.{leaf}.lora_" for leaf in leaves]
                a = torch.cat([tensors[f"{name}A.weight"] for name in names])
                b = torch.block_diag(*(tensors[f"{name}B.weight"] for name in names))
                if of_expert.names.takes_turns:  # outputs of gate and up take turns
                    b = b.unflatten(0, (len(leaves), -1)).transpose(0, 1).flatten(0, 1)
                pairs.append((b.t(), a.t()) if of_expert.names.swaps_factors else (a, b))
            kept[f"{block}{part}.lora_A.weight"] = torch.cat([a for a, _ in pairs])
            kept[f"{block}{part}.lora_B.weight"] = torch.stack([b for _, b in pairs], dim=2).flatten(1).contiguous()
    parameters, router = ["experts.gate_up_proj", "experts.down_proj"], of_expert.names.router
    if router in fields["target_modules"]:
        parameters.append(f"{of_expert.names.parameters}.{router}.weight")
    fields["target_modules"] = [name for name in fields["target_modules"] if name != router]
    fields |= {"target_parameters": parameters, "rank_pattern": {"experts.gate_up_proj": 2 * rank}}
    fields["alpha_pattern"] = {"experts.gate_up_proj": 2 * fields["lora_alpha"]}
    path.mkdir()
    save_file(kept, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(fields))
    return path


def adapters(zoo: ModelZoo, base: Path, root: Path) -> Iterator[tuple[str, Path]]:
    import peft

    of_expert = ModelConfig.from_dir(base).family.experts
    assert of_expert is not None
    router, block = of_expert.names.router, of_expert.names.parameters
    for field, options in PARAMETERS.items():
        parameters = [each.replace("mlp.gate.", f"mlp.{router}.") for each in options.get("target_parameters", ())]
        parameters = [each.replace("mlp.", f"{block}.") for each in parameters]
        ranks = {each.replace("mlp", block): rank for each, rank in options.get("rank_pattern", {}).items()}
        named = {**options, "target_parameters": parameters or None, "rank_pattern": ranks}
        yield field, zoo.adapter(base, peft.LoraConfig(**named, task_type="CAUSAL_LM"))
    yield "modules", write_older(root / "modules", base, ("q_proj", *of_expert.names.modules), 31)
    yield "modules and router", write_older(root / "router", base, (router, *of_expert.names.modules), 32)


@pytest.fixture(scope="module", params=some_of(MOE_FAMILIES, 2))
def family(request: pytest.FixtureRequest, zoo: ModelZoo, tmp_path_factory: pytest.TempPathFactory) -> FamilyCases:
    base = zoo.base(request.param)
    cases = [ParityCase("base", greedy) for greedy in zoo.fit_cases(base, count=2, length=PROMPT_LENGTHS[1])]
    for index, (field, path) in enumerate(adapters(zoo, base, tmp_path_factory.mktemp(request.param))):
        oracle = path
        if field.startswith("modules") and request.param in NOT_CONVERTED:
            oracle = as_parameters(path.with_name(f"{path.name}-converted"), path, base)
        greedy = zoo.fit_case(base, oracle, length=PROMPT_LENGTHS[index % len(PROMPT_LENGTHS)])
        cases.append(ParityCase(field, greedy, path, index + 1))
    config = ModelConfig.from_dir(base)
    kv_block_bytes = 4 * 2 * BLOCK_SIZE * config.head_dim * config.num_key_value_heads * config.num_hidden_layers
    return FamilyCases(base, tuple(cases), kv_block_bytes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_one_mixed_batch_and_again_from_the_prefix_cache(family: FamilyCases, backend: str) -> None:
    said = [case.greedy.output_token_ids for case in family.cases]
    assert len(set(said)) == len(said)
    with start(family, lora_backend=backend, num_threads=2) as llm:
        for request in filter(None, (case.lora_request for case in family.cases)):
            llm.add_lora(request)  # or a slow load would let others begin without it
        generate(llm, family.cases)
        assert llm.stats().step_times.num_steps <= NUM_TOKENS + 1, "the batch was not one batch"
        for case, output in zip(family.cases, generate(llm, family.cases), strict=True):
            assert output.num_cached_tokens == (len(case.greedy.prompt_token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert not llm.stats().kernel_fallbacks or backend == "torch"


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_chunks_and_preempted(family: FamilyCases, backend: str) -> None:
    num_blocks = 3 * len(family.cases)
    settings = {"max_num_batched_tokens": 11, "max_num_seqs": 10, "num_threads": 1, "lora_backend": backend}
    with start(family, kv_cache_memory_bytes=num_blocks * family.kv_block_bytes, **settings) as llm:
        generate(llm, family.cases)
        assert llm.stats().num_preemptions > 0


@pytest.mark.parametrize("family", MOE_FAMILIES[1:2], indirect=True)
def test_more_adapters_than_device_room(family: FamilyCases) -> None:
    room = max(max(family.adapter_bytes) + 64 * 1024, sum(family.adapter_bytes) // 3)
    with start(family, adapter_memory_bytes=room, aging_steps=8) as llm:
        generate(llm, family.cases)
        generate(llm, list(reversed(family.cases)))
        assert llm.stats().memory.evictions["device_room"] > 0
        assert llm.stats().memory.resident_bytes["device"] <= room


def test_merged_into_the_base_or_while_it_dominates(zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one with `merge_adapter`, and as the copy that the dominant adapter is merged into."""
    import peft

    base = zoo.base("qwen2_moe")
    options = {"target_parameters": ["mlp.gate.weight", "experts.gate_up_proj", "experts.down_proj"]}
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM", **options)
    path = zoo.adapter(base, config, seed=9)
    case = zoo.fit_case(base, path)
    with LLM(str(base), enable_lora=False, merge_adapter=str(path), max_model_len=MAX_MODEL_LEN) as llm:
        generate(llm, [ParityCase("merged", case)])
    monkeypatch.setattr(dominant, "DominanceRule", lambda: DominanceRule(window=4, bytes_per_s=math.inf))
    monkeypatch.setattr(dominant, "MIN_GAIN", 0.0)
    with Served(base) as served:
        served.load("a", path)
        served.merge("a")
        assert served.steps_of(case.prompt_token_ids, "a") > 0
        assert served.say(case.prompt_token_ids, "a", max_tokens=NUM_TOKENS) == case.output_token_ids
        other = zoo.fit_case(base)
        assert served.say(other.prompt_token_ids, max_tokens=NUM_TOKENS) == other.output_token_ids
