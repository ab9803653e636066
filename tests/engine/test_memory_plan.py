"""Sizes as bytes, text or share; who gets how much of the arena; and what cannot be is refused with both numbers."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.config import EngineConfig, LoRAConfig, num_bytes
from loraplex.demo.tasks import assets_path
from loraplex.engine import memory_plan
from loraplex.engine.engine import EngineCore, build_engine
from loraplex.errors import ConfigError
from loraplex.memory.arena import Arena, Owner

MIB = 1 << 20
LORA = {"adapter_memory", "adapter_memory_bytes", "adapter_floor", "host_memory_bytes"}


def build(**settings: Any) -> tuple[EngineCore, Arena]:
    lora = LoRAConfig(**{name: value for name, value in settings.items() if name in LORA})
    engine = {name: value for name, value in settings.items() if name not in LORA}
    config = EngineConfig(model=str(assets_path() / "base"), load_format="dummy", num_threads=1, lora=lora, **engine)
    core = build_engine(config)
    return core, core.adapters._store.host.pool.arena


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


def test_without_device_memory_nobody_contends() -> None:
    core, arena = build(kv_cache_memory="8MiB", adapter_memory="4MiB", host_memory_bytes=6 * MIB)
    assert arena.num_lent(Owner.KV) == arena.ceiling(Owner.KV) == arena.limits(Owner.KV).floor
    assert arena.ceiling(Owner.ADAPTERS) * arena.chunk_bytes >= 6 * MIB
    assert core.adapters.stats().device.max_bytes == 4 * MIB
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
    assert core.stats().num_kv_blocks == core.info.num_kv_blocks
    assert core.stats().kv_cache_usage == 0
    assert core.adapters.stats().host.max_bytes == arena.ceiling(Owner.ADAPTERS) * arena.chunk_bytes
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
    import torch

    whole = memory_plan._machine_bytes(torch.device("cpu"))
    assert whole is None or whole > 1 << 28
    assert memory_plan._machine_bytes(torch.device("meta")) is None


@pytest.mark.parametrize("size", [100_000, "1MiB"])
def test_a_memory_that_leaves_nothing_for_adapters_is_refused(size: int | str) -> None:
    with pytest.raises(
        ConfigError, match=r"device_memory of \d+ bytes leaves no room for adapters.*raise device_memory"
    ):
        build(device_memory=size)
