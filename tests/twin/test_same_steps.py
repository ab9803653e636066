"""A twin schedules what the engine schedules: on the same requests, plan by plan, with pauses and preemptions.

Both get each request before the same step. The policies are those that heed no seconds: an engine's are real ones.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from loraplex.adapters.weights import LoRALayerWeights, LoRAModel
from loraplex.config import EngineConfig, LoRAConfig
from loraplex.core import AdapterSpec, LoraTarget, Request, SamplingParams
from loraplex.demo.tasks import assets_path
from loraplex.engine.build import build_engine
from loraplex.engine.engine import EngineCore
from loraplex.engine.schedule_plan import SchedulePlan
from loraplex.twin.engine import TwinEngine
from loraplex.twin.settings import TwinSettings
from tests.fixtures import some_of
from tests.twin.parts import MIB, calibration

NUM_ADAPTERS = 6
RANK = 8
KV_BLOCKS = 10
MAX_STEPS = 3000
Plan = tuple[tuple[str, int, int, bool], ...]


class Came(NamedTuple):
    """A request that comes `gap` steps after the one before it; adapter 0 is the base model."""

    gap: int
    adapter: int
    prompt_len: int
    max_tokens: int
    prompt_seed: int


CAME = st.builds(
    Came, st.integers(0, 6), st.integers(0, NUM_ADAPTERS), st.integers(1, 40), st.integers(1, 20), st.integers(0, 2)
)


def digest_of(adapter: int) -> str:
    return f"{adapter:064x}"


def request_of(number: int, came: Came) -> Request:
    prompt = tuple(3 + (came.prompt_seed * 7 + index) % 20 for index in range(came.prompt_len))
    adapter_id = came.adapter or None
    digest = "" if adapter_id is None else digest_of(came.adapter)
    params = SamplingParams(temperature=0, max_tokens=came.max_tokens, ignore_eos=True)
    return Request(f"r{number}", prompt, params, came.max_tokens, 0, adapter_id=adapter_id, adapter_digest=digest)


def weights_of(targets: Sequence[LoraTarget]) -> dict[str, LoRALayerWeights]:
    draw = torch.Generator().manual_seed(0)
    layers = {}
    for target, part in ((t, s) for t in targets if t.is_linear for s in t.slices):
        a = torch.randn(RANK, target.in_features, generator=draw)
        b = torch.zeros(part.out_features, RANK)
        layers[part.module_name] = LoRALayerWeights(part.module_name, RANK, 8.0, a, b)
    return layers


@contextmanager
def both(policy: str, look_ahead: bool, room: int, kv_blocks: int) -> Iterator[tuple[EngineCore, TwinEngine]]:
    """An engine on the demo's model and its twin; the device has room for so many adapters and KV blocks."""
    common = {"enable_prediction": False, "aging_steps": 32, "eviction_policy": policy}
    sized = {"max_num_seqs": 4, "max_num_batched_tokens": 32}

    def config(adapter_bytes: int, kv_bytes: int) -> EngineConfig:
        lora = LoRAConfig(
            **common,
            adapter_memory_bytes=adapter_bytes,
            host_memory_bytes=64 * MIB,
            enable_diagnosis=False,
            scrub_bytes_per_s=0,
            disk_memory_bytes=0,
        )
        model = str(assets_path() / "base")
        return EngineConfig(
            model=model, lora=lora, kv_cache_memory_bytes=kv_bytes, max_model_len=80, look_ahead=look_ahead, **sized
        )

    nbytes, block_bytes = SIZES[0] or measured_sizes(config(MIB, MIB))
    SIZES[0] = (nbytes, block_bytes)
    engine = build_engine(config(room * nbytes, kv_blocks * block_bytes))
    try:
        assert engine.info.num_kv_blocks == kv_blocks
        extents = len({target.layer for target in engine.info.targets if target.is_linear})
        measured = calibration(
            1.0,
            adapter_bytes={RANK: nbytes},
            num_extents=extents,
            block_bytes=block_bytes,
            max_model_len=80,
            look_ahead=look_ahead,
        )
        assert measured.nbytes_of(RANK) == nbytes
        same = TwinSettings(
            **common,
            **sized,
            kv_cache_memory_bytes=kv_blocks * block_bytes,
            adapter_memory_bytes=room * nbytes,
            host_memory_bytes=64 * MIB,
        )
        twin = TwinEngine.build(measured, same, dict.fromkeys(range(1, NUM_ADAPTERS + 1), RANK), seed=0)
        layers = weights_of(engine.info.targets)
        for adapter in range(1, NUM_ADAPTERS + 1):
            engine.adapters.add_adapter(LoRAModel(digest_of(adapter), RANK, layers, adapter))
            twin.register(AdapterSpec(adapter, str(adapter), 1, digest_of(adapter), "", nbytes, RANK), is_loaded=True)
        yield engine, twin
        engine.check_integrity()
        twin.scheduler.check_integrity()
        twin.blocks.check_integrity()
    finally:
        engine.close()


SIZES: list[tuple[int, int] | None] = [None]
"""Bytes of an adapter and of a KV block of the demo's model, once they are measured."""


def measured_sizes(config: EngineConfig) -> tuple[int, int]:
    engine = build_engine(config)
    try:
        engine.adapters.add_adapter(LoRAModel(digest_of(1), RANK, weights_of(engine.info.targets), 1))
        return engine.adapters.list_adapters()[0].nbytes, engine.memory_report().kv_block_bytes
    finally:
        engine.close()


def plans_of(core: EngineCore, trace: Sequence[Came]) -> tuple[list[Plan], Counter[str]]:
    """What each step runs, and how requests ended. Events are taken as a server takes them."""
    plans: list[Plan] = []
    ends: Counter[str] = Counter()

    def see(plan: SchedulePlan) -> None:
        plans.append(tuple((s.state.request.request_id, s.start, s.num_tokens, s.is_sampled) for s in plan.sequences))

    core.watch_steps(see)
    due = list(zip(itertools.accumulate(came.gap for came in trace), trace, strict=True))
    step = number = 0
    while number < len(due) or core.has_unfinished:
        while number < len(due) and due[number][0] <= step:
            assert core.add_request(request_of(number, due[number][1])) == []
            number += 1
        ends.update(f"{o.request_id} {o.finish_reason}" for o in core.step() if o.finish_reason is not None)
        core.take_events()
        step += 1
        assert step < MAX_STEPS, "requests wait without end"
    return plans, ends


@pytest.mark.parametrize("look_ahead", [False, True], ids=["one step", "look-ahead"])
@pytest.mark.parametrize("policy", some_of(["lru", "lfu", "fifo"], 1))
@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(trace=st.lists(CAME, min_size=1, max_size=24), room=st.integers(1, 4), kv_blocks=st.integers(6, 12))
def test_a_twin_runs_the_same_plans(
    policy: str, look_ahead: bool, trace: list[Came], room: int, kv_blocks: int
) -> None:
    with both(policy, look_ahead, room, kv_blocks) as (engine, twin):
        expected, ended = plans_of(engine, trace)
        found, twin_ended = plans_of(twin.core, trace)
        note(f"{len(expected)} steps, {twin.scheduler.num_pauses} pauses, {twin.scheduler.num_preemptions} preemptions")
        assert found == expected
        assert twin_ended == ended
        assert memory_of(twin.core) == memory_of(engine)


def test_such_traces_have_pauses_evictions_and_preemptions() -> None:
    """Else the property would be one of easy cases only."""
    trace = [Came(index % 3, 1 + index % NUM_ADAPTERS, 20 + index % 17, 16, index % 3) for index in range(24)]
    with both("lru", False, 2, 6) as (engine, twin):
        assert plans_of(engine, trace) == plans_of(twin.core, trace)
        assert twin.scheduler.num_pauses > 0
        assert twin.scheduler.num_preemptions > 0
        assert memory_of(twin.core) == memory_of(engine)
        assert memory_of(twin.core)["evictions_device_room"] > 5


def memory_of(core: EngineCore) -> dict[str, float]:
    """Counts of what happened to adapters."""
    counters = core.memory_report().counters
    return {name: counters.get(name, 0) for name in ("hits", "misses", "promotions", "evictions_device_room")}
