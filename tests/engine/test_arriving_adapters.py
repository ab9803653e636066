"""A whole engine whose adapters come to a device of its own memory (on a GPU; here one plays both) during steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from loraplex.config import LoRAConfig
from loraplex.engine import build as build_module
from loraplex.engine import decode_graphs
from loraplex.errors import AdapterUnavailableError
from loraplex.memory.space.arena import Arena
from tests.engine.driver import Driver
from tests.engine.graph_tape import MaskedBackend, TapeDevice
from tests.engine.rules_bench import Asked, Bench, OpenDriver, loaded
from tests.memory.fake_copies import FakeCopies

NAMES = ("one", "two", "three", "four")


class HeldJobs:
    """A loader for landings: they are run when the test says so, so that only steps bring pieces before."""

    def __init__(self) -> None:
        self.jobs: deque[Callable[[], None]] = deque()

    def submit(self, job: Callable[[], None], tenant: str = "") -> None:
        self.jobs.append(job)

    def run(self) -> None:
        while self.jobs:
            self.jobs.popleft()()


class Apart:
    """An engine over two memories with `num_device` adapters on the device."""

    def __init__(self, open_driver: OpenDriver, bench: Bench, monkeypatch: pytest.MonkeyPatch, num_device: int) -> None:
        self.copies, self.landings = FakeCopies(), HeldJobs()

        def host_side(lora: LoRAConfig, arena: Arena) -> tuple[Arena, FakeCopies]:
            return Arena(lora.host_memory_bytes, arena.chunk_bytes, "cpu"), self.copies

        monkeypatch.setattr(build_module, "host_side", host_side)
        lora: dict[str, Any] = {
            "adapter_memory_bytes": num_device * bench.nbytes,
            "host_memory_bytes": 64 << 20,
            "scrub_bytes_per_s": 0,
            "enable_diagnosis": False,
        }
        self.driver: Driver = loaded(open_driver(lora=lora, lora_backend="torch"), bench)
        self.manager = self.driver.engine.adapters
        self.manager._transfers._loader = self.landings
        self.store = self.manager._residency

    def finish(self) -> None:
        for _ in range(400):
            if not self.driver.running_ids:
                break
            self.driver.step()
            self.manager.check_integrity()
            self.landings.run()
        self.landings.run()


@pytest.fixture
def apart(open_driver: OpenDriver, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Apart:
    return Apart(open_driver, bench, monkeypatch, num_device=2)


def test_a_cold_adapter_runs_in_the_first_step_and_is_right(apart: Apart, bench: Bench) -> None:
    """Until its pieces come, its memory holds NaN: the first step's layers have waited for each."""
    asked = Asked(apart.driver, bench, "one")
    apart.driver.step()
    assert [arrival.is_done for arrival in apart.copies.arrivals] == [True], "the step brought all layers"
    assert len(apart.store.arriving) == 1, "no poll has seen yet that it has landed"
    assert apart.driver.stats.waiting_by_cause["load"] == 0
    apart.finish()
    asked.check()
    assert apart.store.arriving == {}


def test_a_replayed_step_waits_for_all_of_an_adapter(
    open_driver: OpenDriver, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of one token is a decode step. Loads ahead of a landing are no reason to run steps by kernels."""
    monkeypatch.setattr(build_module, "get_backend", lambda *_: MaskedBackend())
    monkeypatch.setattr(decode_graphs, "graph_device_for", lambda *_: TapeDevice())
    apart = Apart(open_driver, bench, monkeypatch, num_device=2)
    request_ids = [apart.driver.submit([7], "one", max_tokens=4)]
    apart.driver.step()
    assert [arrival.is_done for arrival in apart.copies.arrivals] == [True]
    apart.driver.step()
    assert len(apart.store.arriving) == 1
    apart.finish()
    request_ids.append(apart.driver.submit([7], "one", max_tokens=4))
    apart.finish()
    first, again = (apart.driver.outputs[each].outputs[0].token_ids for each in request_ids)
    assert first == again
    assert apart.driver.stats.graph_steps == {"lora": 8}
    assert apart.driver.stats.eager_steps == {}


def test_many_adapters_over_little_room_all_answer_rightly(apart: Apart, bench: Bench) -> None:
    asked = [Asked(apart.driver, bench, name, which) for which in range(2) for name in (None, *NAMES)]
    apart.finish()
    for each in asked:
        each.check()
    assert len(apart.copies.arrivals) >= len(NAMES)


def test_what_does_not_arrive_ends_only_its_own_requests(apart: Apart, bench: Bench) -> None:
    """The failure shows while the step waits for a layer; what the step computed with it reaches no client."""
    others = [Asked(apart.driver, bench, name) for name in (None, "two")]
    apart.driver.step(2)
    apart.landings.run()
    lost = [Asked(apart.driver, bench, "one", which) for which in range(2)]
    arrival = apart.copies.arrivals[-1]

    def break_down() -> None:
        arrival.fail(RuntimeError("bad memory"))
        apart.landings.run()

    arrival.on_hold = break_down
    apart.finish()
    for each in others:
        each.check()
    for each in lost:
        with pytest.raises(AdapterUnavailableError, match="bad memory"):
            each.check()
    assert apart.manager.health.quarantined() == {}, "its weights are not to blame"
    again = Asked(apart.driver, bench, "one")
    apart.finish()
    again.check()


def test_damage_in_the_hosts_copy_ends_the_requests_that_ran_on_it(apart: Apart, bench: Bench) -> None:
    weights = apart.store.weights[apart.driver.registry.resolve("one").adapter_digest]
    assert weights.host is not None
    apart.store.tiers.host.pool.view(weights.host.extents[0])[3] ^= 1
    weights.checked_s = -math.inf
    other, lost = Asked(apart.driver, bench, "two"), Asked(apart.driver, bench, "one")
    apart.driver.step()
    apart.landings.run()
    apart.finish()
    other.check()
    with pytest.raises(AdapterUnavailableError, match="damaged when it came to the device"):
        lost.check()
    again = Asked(apart.driver, bench, "one")
    apart.finish()
    again.check()
