"""Activated LoRA through a server's engine: its requests, its answers, and what of it outlives the process."""

from __future__ import annotations

from pathlib import Path

from peft import LoraConfig

from loraplex import AsyncEngine, EngineConfig, LoRAConfig, SamplingParams
from loraplex.adapters.registry import LoRARegistry
from tests.engine.alora_oracle import ActivatedOracle
from tests.fixtures import GreedyCase, ModelZoo
from tests.frontend.processes import within

NUM_TOKENS = 16
FIRST, SECOND = [71, 72], [80]


async def said(engine: AsyncEngine, name: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, n=2)
    async for output in engine.generate(prompt, params, name, model=name):
        first, second = (each.token_ids for each in output.outputs)
    assert first == second
    return tuple(first)


async def test_a_server_that_starts_again_knows_what_activates_its_adapters(zoo: ModelZoo, tmp_path: Path) -> None:
    """The current version, the kept one, and a clone; --no-adapter-text leaves it on: it is about the weights."""
    base = zoo.base("llama")
    paths: list[Path] = []
    cases: list[GreedyCase] = []
    for invocation, starts in ((FIRST, (3, 9)), (SECOND, (6,))):
        config = LoraConfig(r=8, target_modules="all-linear", alora_invocation_tokens=invocation, task_type="CAUSAL_LM")
        paths.append(zoo.adapter(base, config, seed=90))
        cases.append(ActivatedOracle(zoo, base, paths[-1]).fit_case(invocation, starts, 20, NUM_TOKENS))
    lora = LoRAConfig(adapter_text=False, adapter_memory_bytes=1 << 26, host_memory_bytes=1 << 26)
    settings = EngineConfig(model=str(base), max_model_len=64, kv_cache_memory_bytes=1 << 24, lora=lora)
    engine = await within(AsyncEngine.start(settings, state_dir=tmp_path))
    try:
        await engine.load_adapter("own", str(paths[1]))
        await engine.load_adapter("own", str(paths[0]), load_inplace=True)
        await engine.on_registry(LoRARegistry.clone, "own", "copy")
    finally:
        await within(engine.shutdown())
    engine = await within(AsyncEngine.start(settings, state_dir=tmp_path))
    try:
        for name, case in {"own": cases[0], "own@1": cases[1], "copy": cases[0]}.items():
            assert await within(said(engine, name, case.prompt_token_ids)) == case.output_token_ids
    finally:
        await within(engine.shutdown())
