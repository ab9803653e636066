"""--kv-cache-dtype int8: an answer to the bit, whatever is beside it in batch and memory; its error and its bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex import LLM, LoRAConfig
from loraplex.config import EngineConfig
from loraplex.engine import build, memory_plan
from loraplex.errors import ConfigError
from loraplex.kernels.native.choice import open_library
from loraplex.kernels.native.library import NativeLibrary
from loraplex.kernels.ops import get_backend
from loraplex.models.config import ModelConfig
from loraplex.models.loader import load_model
from tests.engine.driver import Driver
from tests.fixtures import VOCAB_SIZE, ModelZoo
from tests.models.paged_runner import PagedRunner

CPU = torch.device("cpu")
needs_native = pytest.mark.skipif(not isinstance(open_library(), NativeLibrary), reason="no native kernels are built")
SETTINGS: dict[str, Any] = {
    **{"kv_cache_dtype": "int8", "num_threads": 1, "max_model_len": 128, "block_size": 16},
    **{"kv_cache_memory_bytes": 4 << 20, "packed_cache_dir": "none"},
}
LORA = LoRAConfig(disk_memory_bytes=0, adapter_memory_bytes=16 << 20, host_memory_bytes=16 << 20)
LENGTHS = (40, 40, 17, 70, 33, 5)
NUM_TOKENS = 12

Said = tuple[tuple[int, ...], list[float]]
"""Tokens of an answer, and their log probabilities."""


@dataclass(frozen=True)
class Bench:
    """A model, an adapter of it, and what each prompt gets alone: of the base and through the adapter."""

    base: Path
    adapter: Path
    prompts: list[list[int]]
    alone: list[Said]

    @property
    def names(self) -> list[str | None]:
        return [None if index % 2 else "sql" for index in range(len(self.prompts))]


@contextmanager
def opened(base: Path, adapter: Path, lora: LoRAConfig = LORA, **settings: Any) -> Iterator[Driver]:
    driver = Driver(base, lora, **{**SETTINGS, **settings})
    try:
        driver.engine._runner._kv.view(torch.uint8).fill_(0xFF)  # all of the arena: every scale is NaN
        driver.registry.load("sql", str(adapter))
        yield driver
        driver.check_idle()
    finally:
        driver.close()


def submit(driver: Driver, name: str | None, prompt: Sequence[int]) -> str:
    return driver.submit(prompt, name, max_tokens=NUM_TOKENS, logprobs=0)


def said(driver: Driver, request_id: str) -> Said:
    (completion,) = driver.outputs[request_id].outputs
    assert completion.logprobs is not None
    scores = zip(completion.token_ids, completion.logprobs, strict=True)
    return tuple(completion.token_ids), [entry[token].logprob for token, entry in scores]


def answers(driver: Driver, bench: Bench) -> list[Said]:
    ids = [submit(driver, name, prompt) for name, prompt in zip(bench.names, bench.prompts, strict=True)]
    driver.finish()
    return [said(driver, request_id) for request_id in ids]


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma2", "gpt_oss"])
def bench(request: pytest.FixtureRequest, zoo: ModelZoo) -> Bench:
    """Of a family without and with sliding windows, with soft caps, with sinks."""
    from peft import LoraConfig

    base = zoo.base(request.param)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj"], task_type="CAUSAL_LM")
    adapter, generator = zoo.adapter(base, config), torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]
    prompts[1][:32] = prompts[0][:32]
    made, alone = Bench(base, adapter, prompts, []), []
    with opened(base, adapter, enable_prefix_caching=False) as driver:
        for name, prompt in zip(made.names, prompts, strict=True):
            request_id = submit(driver, name, prompt)
            driver.finish()
            alone.append(said(driver, request_id))
    return Bench(base, adapter, prompts, alone)


@needs_native
@pytest.mark.parametrize(
    "settings",
    [
        *({}, {"num_threads": 2}, {"max_num_batched_tokens": 16, "max_num_seqs": 8}, {"block_size": 32}),
        *({"look_ahead": True}, {"speculative": "n-gram"}),
    ],
    ids=str,
)
def test_batches_chunks_threads_and_drafts_change_no_bit(bench: Bench, settings: dict[str, Any]) -> None:
    with opened(bench.base, bench.adapter, **settings) as driver:
        assert answers(driver, bench) == bench.alone
        hits = driver.stats.num_prefix_hit_tokens
        assert answers(driver, bench) == bench.alone
        assert driver.stats.num_prefix_hit_tokens >= hits + 96


@needs_native
def test_preemption_changes_no_bit(bench: Bench) -> None:
    with opened(bench.base, bench.adapter) as driver:
        block_bytes = driver.engine._runner.kv_block_bytes
    with opened(bench.base, bench.adapter, kv_cache_memory_bytes=9 * block_bytes) as driver:
        assert answers(driver, bench) == bench.alone
        assert driver.stats.num_preemptions > 0


@needs_native
def test_moved_blocks_change_no_bit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunk with the first blocks of a request that runs is never to be used again."""
    with opened(bench.base, bench.adapter) as driver:
        block_bytes = driver.engine._runner.kv_block_bytes
    monkeypatch.setattr(memory_plan, "CHUNK_BYTES", 4 * block_bytes)
    with opened(bench.base, bench.adapter) as driver:
        request_id = submit(driver, bench.names[3], bench.prompts[3])
        driver.step(4)
        blocks, (child,) = driver.engine._blocks, driver.engine._blocks._tables
        before = list(blocks.block_table(child))
        blocks.fence(before[0] // 4)
        driver.engine.vacate_kv(0)
        assert not {*before[:4]} & {*blocks.block_table(child)}
        driver.finish()
        assert said(driver, request_id) == bench.alone[3]


@needs_native
@pytest.mark.ranks
def test_ranks_have_the_scales_of_their_heads(bench: Bench) -> None:
    """Sums over ranks are in another order, so log probabilities may move."""
    with opened(bench.base, bench.adapter, tensor_parallel_size=2) as driver:
        for got, expected in zip(answers(driver, bench), bench.alone, strict=True):
            assert got[0] == expected[0]
            assert got[1] == pytest.approx(expected[1], abs=0.05)


# ------------------------------------------------------------------------------------------------------ error and bytes


@pytest.mark.parametrize("backend", ["reference", "torch", pytest.param("native", marks=needs_native)])
def test_a_random_models_logits_move_little(zoo: ModelZoo, backend: str) -> None:
    base, tokens = zoo.base("qwen2"), list(range(3, 63))
    config = ModelConfig.from_dir(base)
    model = load_model(base, config, torch.float32, CPU, "auto", 0, get_backend(backend, CPU), False)
    exact, got = (
        PagedRunner(model, block_size=16, kv_dtype=dtype).step([("a", tokens)])[0].float()
        for dtype in (torch.float32, torch.int8)
    )
    error = (got - exact).square().mean().sqrt() / exact.std()
    assert 0 < error <= 0.03


@needs_native
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_block_is_a_little_more_than_a_quarter_of_float32s(zoo: ModelZoo, head_dim: int) -> None:
    base = zoo.base("qwen3", options={"head_dim": head_dim, "num_hidden_layers": 1})
    settings = {"max_model_len": 128, "kv_cache_memory_bytes": 1 << 20, "max_num_seqs": 256}
    sizes = {}
    for dtype in ("float32", "bfloat16", "int8"):
        with LLM(str(base), kv_cache_dtype=dtype, **settings) as llm:
            report, info = llm.memory_report(), llm.engine.info
            sizes[dtype] = report.kv_block_bytes, info.num_kv_blocks
            assert info.kv_cache_dtype == dtype
    wide, half, narrow = (sizes[dtype][0] for dtype in ("float32", "bfloat16", "int8"))
    assert narrow * 4 == wide * (head_dim + 4) // head_dim
    assert half * 2 == wide
    assert sizes["int8"][1] >= math.floor(3.7 * sizes["float32"][1])


def test_a_gpu_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "get_backend", lambda *_: get_backend("torch", CPU))
    config = EngineConfig(model="m", kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match=r"kv_cache_dtype int8 is not supported on cuda:1 yet.*use auto, or float16"):
        build._backend(config, torch.device("cuda", 1), None)
    assert build._backend(config, CPU, None).name == "torch"
