"""A few seconds of the soak with everything in it, and that it would find what it looks for."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from loraplex import LLM, LoRARequest
from loraplex.errors import AdapterLoadError
from loraplex.frontend.async_engine import AsyncEngine
from tests.fixtures import ModelZoo
from tests.soak.askers import Asker
from tests.soak.ledger import Ledger, Timeline
from tests.soak.names import Names
from tests.soak.orders import FAULTS, GROUPS, Order, give
from tests.soak.soak import Plan, Soak
from tests.soak.world import BROKEN, Answer, Source, World, make_world

SMALL = Plan(seconds=3, num_askers=4, num_operators=2, num_names_each=4, num_device=3, num_host=5)


@pytest.fixture(scope="module")
def world(zoo: ModelZoo) -> World:
    return make_world(zoo, num_families=4, num_versions=2, num_prompts=6)


@pytest.mark.slow
async def test_a_short_soak_finds_nothing(world: World, tmp_path: Path) -> None:
    """The engine is killed once on the way."""
    report = await Soak(replace(SMALL, kill_period_s=1.5), world, tmp_path).run()
    assert not report.findings, "\n".join(report.findings)
    assert report.ledger.num_compared > 0
    assert report.num_kills > 0
    assert sum(report.ledger.actions.values()) > 20


async def test_it_finds_wrong_weights(world: World, tmp_path: Path) -> None:
    """Bytes of the adapters on the device flip again and again, and nothing says so."""
    soak = Soak(replace(SMALL, seconds=60, kill_period_s=None), world, tmp_path)
    damaging = asyncio.create_task(damage(soak, tmp_path / "sockets"))
    report = await soak.run()
    damaging.cancel()
    assert report.ledger.num_wrong > 0


async def damage(soak: Soak, folder: Path) -> None:
    while not soak.ledger.has_enough:
        await asyncio.sleep(0.01)
        for path in folder.glob("orders-*"):
            pid = int(path.name.removeprefix("orders-"))
            for adapter_id in range(1, 60):
                await give(folder, pid, Order("flip_device", adapter_id, seed=adapter_id))


# ---------------------------------------------------------------------------------------------------- what it judges by


def test_a_timeline_knows_what_was() -> None:
    timeline = Timeline("a")
    began_s = time.monotonic()
    timeline.set("b")
    timeline.set("b")
    timeline.set("c")
    assert timeline.now == "c"
    assert timeline.since(began_s) == ["a", "b", "c"]
    assert timeline.since(time.monotonic()) == ["c"]


def test_an_answer_is_compared_up_to_a_near_tie() -> None:
    answer = Answer((5, 6, 7, 8), num_sure=2)
    assert answer.is_said_by(())
    assert answer.is_said_by((5,))
    assert answer.is_said_by((5, 6, 9, 9))
    assert not answer.is_said_by((5, 7))
    assert not answer.is_said_by((5, 6, 7, 8, 9))


def test_names_follow_the_verbs() -> None:
    names = Names().with_load("a", "A").with_load("b", "B").with_switch("a", "b")
    assert (names.content("a"), names.content("b")) == ("B", "B")
    assert names.with_unload("b").content("a") is None
    assert names.with_switch("b", "a").content("b") == "A"
    assert names.with_load("a", "A2").content("a") == "A2"


def test_a_name_and_its_source_are_judged_over_time() -> None:
    ledger = Ledger()
    ledger.add_names(["a"])
    record, began_s = ledger.names["a"], time.monotonic()
    record.stands.set(frozenset([None, "A"]))
    record.stands.set(frozenset(["A"]))
    record.source.set(frozenset(["A"]))
    assert record.stood_since(began_s) == {None, "A"}
    assert record.was_elsewhere_since(began_s, "A")
    later_s = time.monotonic()
    assert record.stood_since(later_s) == {"A"}
    assert not record.was_elsewhere_since(later_s, "A")


@pytest.mark.parametrize("how", BROKEN)
def test_every_spoilt_source_is_refused(world: World, tmp_path: Path, how: str) -> None:
    content = next(iter(world.contents.values()))
    source = Source(tmp_path / "source")
    with LLM(str(world.base), max_model_len=32, num_threads=1, kv_cache_memory_bytes=1 << 22) as llm:
        source.spoil(how, content)
        with pytest.raises(AdapterLoadError):
            llm.add_lora(LoRARequest("a", 1, str(source.path)))
        source.write(content)
        assert llm.add_lora(LoRARequest("a", 1, str(source.path)))
        assert llm.adapters()[0].ref.adapter_digest == content.digest


def test_workers_do_the_same_for_the_same_seed(world: World, tmp_path: Path) -> None:
    """What the n-th action is depends on nothing that happened before."""
    ledger = Ledger()
    ledger.add_names(["a", "b"])
    first, second = (Asker("asker", 5, cast(AsyncEngine, None), world, ledger) for _ in range(2))
    plans = [
        [(*asker.plan(number)[:2], asker.plan(number)[2].random()) for number in range(50)] for asker in (first, second)
    ]
    assert plans[0] == plans[1]
    assert len({kind for kind, _, _ in plans[0]}) > 3


def test_faults_belong_to_a_group() -> None:
    assert {fault.group for fault in FAULTS.values()} <= set(GROUPS)
