"""Sizes as bytes, text or share; who gets how much of the arena; and what cannot be is refused with both numbers."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loraplex.config import EngineConfig, LoRAConfig, num_bytes
from loraplex.demo.tasks import assets_path
from loraplex.engine import build as build_module
from loraplex.engine import memory_plan
from loraplex.engine.build import build_engine
from loraplex.engine.engine import EngineCore
from loraplex.engine.graph_sizes import inner_numbers
from loraplex.engine.memory_plan import DeviceMemory, MemoryPlan, device_memory, reserve_bytes
from loraplex.errors import ConfigError
from loraplex.kernels.ops import get_backend
from loraplex.layers.moe import ExpertSizes
from loraplex.memory.space.arena import Arena, Owner
from loraplex.models.config import ModelConfig
from loraplex.models.decoder import Decoder
from tests.fixtures import ModelZoo

MIB = 1 << 20
DEFAULT_LORA = LoRAConfig()
LORA = {"adapter_memory", "adapter_memory_bytes", "adapter_floor", "host_memory_bytes"}


def build(**settings: Any) -> tuple[EngineCore, Arena]:
    lora = LoRAConfig(**{name: value for name, value in settings.items() if name in LORA})
    engine = {name: value for name, value in settings.items() if name not in LORA}
    config = EngineConfig(model=str(assets_path() / "base"), load_format="dummy", num_threads=1, lora=lora, **engine)
    core = build_engine(config)
    return core, core.adapters._residency.tiers.host.pool.arena


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (7, 7),
        ("7", 7),
        ("2KiB", 2048),
        ("1.5MB", 1_500_000),
        ("4 GiB", 4 << 30),
        ("40%", 400),
        ("12.5 %", 125),
        ("100%", 1000),
    ],
)
def test_sizes(size: int | str, expected: int) -> None:
    assert num_bytes("device_memory", size, 1000) == expected


@pytest.mark.parametrize("size", [0, -1, "", "x", "-4GiB", "101%", "%", "4 XB", "1e9", "0%"])
def test_what_is_no_size_is_refused_by_name(size: int | str) -> None:
    with pytest.raises(ConfigError, match="device_memory must be bytes > 0"):
        num_bytes("device_memory", size, 1000)
    with pytest.raises(ConfigError, match="device_memory must be"):
        EngineConfig(model="m", device_memory=size)


@pytest.mark.parametrize(
    ("engine", "lora", "text"),
    [
        ({"kv_cache_memory": "1GiB", "kv_cache_memory_bytes": 7}, {}, r"kv_cache_memory \(1GiB\).*bytes \(7\)"),
        ({}, {"adapter_memory": "1GiB", "adapter_memory_bytes": 7}, r"adapter_memory \(1GiB\).*bytes \(7\)"),
        ({"kv_cache_floor": "1GiB"}, {}, "kv_cache_floor.*needs device_memory"),
        ({}, {"adapter_floor": "1GiB"}, "adapter_floor needs device_memory"),
    ],
)
def test_settings_that_contradict_each_other(engine: dict[str, Any], lora: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EngineConfig(model="m", lora=LoRAConfig(**lora), **engine)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"adapter_memory": 1}, "adapter_memory_bytes"),
        ({"adapter_memory_bytes": 1}, "adapter_memory_bytes"),
        ({"host_memory_bytes": 1}, "host_memory_bytes"),
        ({"device_memory": "64MiB", "max_model_len": 64, "adapter_memory": 1}, "adapter_memory_bytes"),
    ],
)
def test_a_budget_that_would_refuse_every_adapter_is_refused_at_the_start(settings: dict[str, Any], name: str) -> None:
    text = rf"^{name} leaves 1 bytes of \w+ memory for adapters, and the smallest .* takes \d+: .* raise {name}"
    with pytest.raises(ConfigError, match=text):
        build(**settings)


def test_a_budget_for_tiny_adapters_alone_is_said(caplog: pytest.LogCaptureFixture) -> None:
    core, _ = build(adapter_memory=2560)
    core.close()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("adapter_memory_bytes leaves 2560 bytes of device memory for adapters")
    caplog.clear()
    build()[0].close()
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_without_device_memory_nobody_contends() -> None:
    core, arena = build(kv_cache_memory="8MiB", adapter_memory="4MiB", host_memory_bytes=6 * MIB)
    assert arena.num_lent(Owner.KV) == arena.ceiling(Owner.KV) == arena.limits(Owner.KV).floor
    assert arena.ceiling(Owner.ADAPTERS) * arena.chunk_bytes >= 6 * MIB
    assert core.adapters.report().tier("device").max_bytes == 4 * MIB
    assert core.info.adapter_memory_bytes == 4 * MIB
    core.close()


def test_device_memory_is_shared_but_for_the_floors() -> None:
    core, arena = build(
        device_memory="64MiB", max_model_len=64, max_num_seqs=1000, adapter_floor="25%", max_num_batched_tokens=1000
    )
    floor, chunks = arena.limits(Owner.KV).floor, arena.num_chunks
    assert arena.num_bytes <= 64 * MIB
    assert arena.limits(Owner.ADAPTERS).floor == 16 * MIB // arena.chunk_bytes
    assert floor == arena.num_lent(Owner.KV) == 64 * MIB // 10 // arena.chunk_bytes
    assert arena.ceiling(Owner.ADAPTERS) == chunks - floor
    assert core.info.num_kv_blocks * core.memory_report().kv_block_bytes == arena.ceiling(Owner.KV) * arena.chunk_bytes
    assert core.stats().memory.num_kv_blocks == core.info.num_kv_blocks
    assert core.stats().memory.kv_cache_usage == 0
    assert core.adapters.report().tier("host").max_bytes == arena.ceiling(Owner.ADAPTERS) * arena.chunk_bytes
    core.check_integrity()
    core.close()


def test_the_floor_of_the_kv_cache_holds_the_longest_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "CHUNK_BYTES", 1)  # one block each
    core, arena = build(device_memory="2MiB", max_model_len=256, adapter_floor="256KiB")
    per_token = core.memory_report().kv_block_bytes / core.info.block_size
    assert arena.limits(Owner.KV).floor * arena.chunk_bytes >= 256 * per_token
    core.close()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"kv_cache_memory": "40%"}, "kv_cache_memory is 40%, a share of device_memory, which is not set"),
        ({"adapter_memory": "40%"}, "adapter_memory is 40%, a share of device_memory, which is not set"),
        (
            {"device_memory": "16MiB", "kv_cache_memory": "32MiB"},
            f"KV cache may have {32 * MIB}.*device_memory is {16 * MIB}",
        ),
        (
            {"device_memory": "16MiB", "adapter_memory": "32MiB"},
            f"adapters may have {32 * MIB}.*device_memory is {16 * MIB}",
        ),
        ({"device_memory": "16MiB", "adapter_memory": "2MiB", "adapter_floor": "4MiB"}, f"{4 * MIB} bytes.*{2 * MIB}"),
        (
            {"device_memory": "16MiB", "kv_cache_floor": "12MiB", "adapter_floor": "8MiB"},
            "kv_cache_floor is|floors of KV",
        ),
    ],
)
def test_sizes_that_cannot_be(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build(**settings)


def test_a_floor_below_the_longest_request_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "CHUNK_BYTES", 1)
    with pytest.raises(
        ConfigError, match=r"kv_cache_floor is 64 bytes and .* 256 tokens needs \d+; raise kv_cache_floor"
    ):
        build(device_memory="16MiB", max_model_len=256, kv_cache_floor=64)


def test_a_share_of_the_machine() -> None:
    whole = memory_plan._machine_bytes(torch.device("cpu"))
    assert whole is None or whole > 1 << 28
    assert memory_plan._machine_bytes(torch.device("meta")) is None


@pytest.mark.parametrize("size", [100_000, "1MiB"])
def test_a_memory_that_leaves_nothing_for_adapters_is_refused(size: int | str) -> None:
    with pytest.raises(
        ConfigError, match=r"device_memory of \d+ bytes leaves no room for adapters.*raise device_memory"
    ):
        build(device_memory=size)


# ---------------------------------------------------------------------------------------------------------------- a GPU

GIB = 1 << 30
META = torch.device("meta")
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "sliding_windows": (None,) * 32,
    "layer_ropes": (0,) * 32,
    "rotary_dim": 128,
}


def llama_8b() -> ModelConfig:
    return replace(ModelConfig.from_dir(assets_path() / "base"), **LLAMA_8B)


def plan_for_gpu(
    total: int = 80 * GIB, free: int = 64 * GIB, lora: LoRAConfig | None = DEFAULT_LORA, **settings: Any
) -> MemoryPlan:
    """The plan for an 8B model on a GPU that the test does not need."""
    model_config = llama_8b()
    config = EngineConfig(model="m", device="cuda", lora=lora, **settings)
    model = Decoder(model_config, get_backend("torch", META), torch.bfloat16, META, enable_lora=True)
    gpu = DeviceMemory(total, free)
    return memory_plan.plan_memory(config, model_config, model, torch.bfloat16, META, gpu)


def test_what_the_gpu_has_left_is_shared() -> None:
    plan = plan_for_gpu()
    reserve = reserve_bytes(EngineConfig(model="m"), llama_8b(), torch.bfloat16)
    assert GIB // 2 < reserve < 2 * GIB
    whole = int(0.9 * 80 * GIB) - 16 * GIB - reserve
    assert whole - plan.arena.chunk_bytes < plan.arena.num_bytes <= whole
    assert plan.lora is not None
    assert plan.lora.adapter_memory_bytes == whole, "each may have all but the other's floor"
    assert plan.arena.limits(Owner.ADAPTERS).floor == whole // 10 // plan.arena.chunk_bytes
    assert plan.arena.chunk_bytes % (2 << 20) == 0, "KV blocks of 16 tokens"
    assert 1000 < plan.arena.num_chunks <= memory_plan.MAX_GPU_CHUNKS


def test_more_graphs_leave_less() -> None:
    few, many = (reserve_bytes(EngineConfig(model="m", max_num_seqs=n), llama_8b(), torch.bfloat16) for n in (64, 256))
    assert many - few > 2 * 22 * (16 << 20), "22 sizes more, each with adapters and without"
    eager = reserve_bytes(EngineConfig(model="m", enforce_eager=True), llama_8b(), torch.bfloat16)
    assert few - eager > 2 * 11 * (16 << 20)


def test_logits_of_added_tokens_are_counted() -> None:
    """Four times in float32, as the others; without adapters there are none."""

    def reserve(extra: int | None) -> int:
        lora = None if extra is None else LoRAConfig(lora_extra_vocab_size=extra)
        return reserve_bytes(EngineConfig(model="m", max_num_seqs=64, lora=lora), llama_8b(), torch.bfloat16)

    assert reserve(1000) - reserve(0) == 4 * 64 * 1000 * 4
    table_and_graphs = memory_plan.SLOT_TABLE_BYTES + 11 * (16 << 20)
    assert reserve(0) - reserve(None) == table_and_graphs


def test_a_layer_of_experts_keeps_more_of_a_token_than_an_mlp() -> None:
    """An inner state and an output for each of the chosen ones."""
    dense, config = llama_8b(), EngineConfig(model="m", enforce_eager=True)
    sparse = replace(dense, experts=(None, ExpertSizes(64, 8, 1024, True, shared_size=512)))
    numbers = 8 * (1024 + dense.hidden_size) + 2 * 64 + 3 * 512
    assert inner_numbers(dense) == 3 * dense.intermediate_size
    assert inner_numbers(sparse) == max(numbers, 3 * dense.intermediate_size)
    small = replace(dense, intermediate_size=1024)
    more = reserve_bytes(config, replace(small, experts=sparse.experts), torch.bfloat16)
    grown = config.max_num_batched_tokens * (numbers - 3 * 1024) * 2
    assert more - reserve_bytes(config, small, torch.bfloat16) == grown


def test_other_processes_count_and_a_larger_share_gives_more() -> None:
    small = plan_for_gpu(free=40 * GIB).arena.num_bytes
    assert plan_for_gpu(free=41 * GIB).arena.num_bytes - small == pytest.approx(GIB, abs=64 * MIB)
    more = plan_for_gpu(free=40 * GIB, gpu_memory_utilization=0.95).arena.num_bytes
    assert more - small == pytest.approx(4 * GIB, abs=64 * MIB)


def test_what_is_said_wins() -> None:
    both = plan_for_gpu(kv_cache_memory="8GiB", lora=LoRAConfig(adapter_memory="4GiB"))
    assert both.arena.num_bytes == pytest.approx(12 * GIB, rel=0.01)
    assert both.arena.limits(Owner.KV).floor == both.arena.ceiling(Owner.KV), "nothing contends"
    one = plan_for_gpu(kv_cache_memory="8GiB")
    assert one.arena.num_bytes > 50 * GIB
    assert one.num_kv_blocks * 2 * MIB == pytest.approx(8 * GIB, rel=0.01)
    share = plan_for_gpu(device_memory="40%")
    assert share.arena.num_bytes == pytest.approx(32 * GIB, rel=0.01)
    base_only = plan_for_gpu(lora=None, kv_cache_memory_bytes=8 * GIB)
    assert base_only.arena.num_bytes == pytest.approx(8 * GIB, rel=0.01)


# --------------------------------------------------------------------------------------- the longest prompt plus output


def with_positions(zoo: ModelZoo, folder: Path, num_positions: int) -> Path:
    """A tiny llama whose positions go that far; its weights are drawn (load_format dummy)."""
    settings = json.loads((zoo.base("llama") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": num_positions}))
    return folder


def length_of(caplog: pytest.LogCaptureFixture, model: Path, **settings: Any) -> tuple[int, str]:
    """(max_model_len, the line of the log)."""
    lora = settings.pop("lora", None)
    config = EngineConfig(model=str(model), load_format="dummy", num_threads=1, lora=lora, **settings)
    caplog.clear()
    with caplog.at_level(logging.INFO, "loraplex"):
        core = build_engine(config)
    core.close()
    found = [text for text in map(logging.LogRecord.getMessage, caplog.records) if text.startswith("max_model_len")]
    return core.info.max_model_len, " ".join(found)


def test_the_default_length_is_the_models_own(zoo: ModelZoo, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = with_positions(zoo, tmp_path, 20_000)
    assert length_of(caplog, model) == (20_000, "max_model_len: 20000 tokens (as far as the model's positions go)")
    assert length_of(caplog, model, max_model_len=64) == (64, "")


def test_the_default_length_ends_with_the_kv_cache_and_does_not_enlarge_it(
    zoo: ModelZoo, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = with_positions(zoo, tmp_path, 1 << 20)
    length, line = length_of(caplog, model, kv_cache_memory_bytes=8 * MIB)
    assert 8192 < length < 1 << 20
    assert line == (
        f"max_model_len: {length} tokens (all that the KV cache of {8 * MIB} bytes holds; the model's positions end at "
        f"{1 << 20})"
    )
    config = EngineConfig(model=str(model), load_format="dummy", lora=None, kv_cache_memory_bytes=8 * MIB)
    core = build_engine(config)
    assert core.info.num_kv_blocks * core.memory_report().kv_block_bytes <= 8 * MIB
    core.close()
    with pytest.raises(ConfigError, match=rf"max_model_len {length + 1024} tokens does not fit in the KV cache of"):
        length_of(caplog, model, kv_cache_memory_bytes=8 * MIB, max_model_len=length + 1024)


def test_the_default_length_leaves_adapters_half_of_a_shared_memory(
    zoo: ModelZoo, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = with_positions(zoo, tmp_path, 1 << 20)
    shared: dict[str, Any] = {"device_memory": 32 * MIB, "lora": LoRAConfig(adapter_floor=12 * MIB)}
    length, line = length_of(caplog, model, **shared)
    alone, _ = length_of(caplog, model, device_memory=32 * MIB)
    assert length == pytest.approx(alone * 10 / 32, rel=0.01)
    assert line.startswith(f"max_model_len: {length} tokens (more would take from adapters' part of device_memory")
    with_floor, _ = length_of(caplog, model, **shared, kv_cache_floor=16 * MIB)
    assert with_floor == pytest.approx(alone / 2, rel=0.01)
    longer, _ = length_of(caplog, model, **shared, max_model_len=with_floor)
    assert longer == with_floor, "as asked, where it can be had"


def test_the_default_length_of_a_small_shared_memory_is_what_it_was() -> None:
    """What the rule leaves of 1.5 GiB holds 5,500 tokens; 8192 take 1 GiB."""
    assert plan_for_gpu(device_memory=3 * GIB // 2).max_model_len == 8192


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_a_length_that_was_asked_for_is_had_whatever_the_number_of_requests(
    zoo: ModelZoo, tmp_path: Path, caplog: pytest.LogCaptureFixture, max_num_seqs: int
) -> None:
    """The KV cache ends with its last whole chunk, and that of one request had been cut there."""
    model = with_positions(zoo, tmp_path, 20_000)
    assert length_of(caplog, model, max_num_seqs=max_num_seqs, max_model_len=12_345)[0] == 12_345


def test_a_length_that_the_last_part_of_a_chunk_lacks_is_refused(
    zoo: ModelZoo, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = with_positions(zoo, tmp_path, 1 << 20)
    length, _ = length_of(caplog, model, kv_cache_memory_bytes=5 * MIB // 2)
    with pytest.raises(
        ConfigError, match=rf"does not fit in the KV cache of {5 * MIB // 2} bytes, which holds {length}"
    ):
        length_of(caplog, model, kv_cache_memory_bytes=5 * MIB // 2, max_model_len=length + 16)


def test_a_gpu_without_room_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=rf"gpu_memory_utilization 0.9 of {24 * GIB} bytes.*{16 * GIB} are taken"):
        plan_for_gpu(total=24 * GIB, free=8 * GIB, max_num_batched_tokens=65536)
    with pytest.raises(ConfigError, match="needs a CUDA device, not 'cpu'"):
        EngineConfig(model="m", device="cpu", gpu_memory_utilization=0.5)
    with pytest.raises(ConfigError, match="gpu_memory_utilization must be"):
        EngineConfig(model="m", gpu_memory_utilization=1.5)


@pytest.mark.parametrize(
    ("whole", "expected"), [(32 * MIB, MIB), (GIB, 16 * MIB), (20 * GIB, 16 * MIB), (128 * GIB, 32 * MIB)]
)
def test_chunks_are_larger_on_a_gpu(whole: int, expected: int) -> None:
    assert memory_plan.chunk_size(whole, is_gpu=True) == expected
    assert memory_plan.chunk_size(whole, is_gpu=False) == MIB


def test_a_gpu_that_has_less_than_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(memory_plan, "Arena", refuse)
    with pytest.raises(ConfigError, match=rf"{64 * GIB} bytes were free; lower device_memory"):
        plan_for_gpu(device_memory="100%")


def test_the_host_has_no_gpu_memory() -> None:
    assert device_memory(torch.device("cpu")) is None


def test_the_host_tier_of_a_gpu_is_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(build_module, "Arena", lambda *args, **settings: made.append(settings))
    monkeypatch.setattr(build_module, "copies_for", lambda device: device)
    gpu = torch.device("cuda", 0)
    _, copies = build_module.host_side(LoRAConfig(), SimpleNamespace(device=gpu, chunk_bytes=1 << 20))
    build_module.host_side(LoRAConfig(), SimpleNamespace(device=META, chunk_bytes=1 << 20))
    assert made == [{"is_pinned": True}, {"is_pinned": False}]
    assert copies == gpu
