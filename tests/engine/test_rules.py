"""The rules of adapters in use, each one test or a few named after it, on a whole engine in this process.

Rule 2 (all loads of one adapter are one load) is mostly the registry's and the memory's:
tests/adapters/test_registry_concurrency.py, tests/memory/weights/test_loads.py. Rule 11 is checked after every test
here: whatever was taken has returned.
"""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from loraplex import LLM, LoRARequest, SamplingParams
from loraplex.adapters.registry import LoadStatus
from loraplex.errors import (
    AdapterConflictError,
    AdapterContentChangedError,
    AdapterError,
    AdapterFaultError,
    AdapterNoRoomError,
    AdapterNotFoundError,
    AdapterPathNotFoundError,
    AdapterTooLargeError,
    AdapterUnavailableError,
    EngineError,
    InvalidRequestError,
    PromptTooLongError,
)
from loraplex.kernels.plan import LoraSegment
from tests.engine.driver import Driver, packed_nbytes
from tests.engine.rules_bench import (
    MAX_MODEL_LEN,
    NAMES,
    NUM_TOKENS,
    PROMPT_LENGTH,
    Asked,
    Bench,
    OpenDriver,
    content_of,
    loaded,
)
from tests.fixtures import ADAPTER_OPTIONS, ModelZoo

# --------------------------------------------------------------------------------------------------------------- rule 1


def test_rule_1_an_adapter_in_use_is_never_evicted_or_overwritten(open_driver: OpenDriver, bench: Bench) -> None:
    driver = loaded(open_driver(lora={"adapter_memory_bytes": 2 * bench.nbytes, "aging_steps": 10_000}), bench)
    running = [Asked(driver, bench, name, which) for name in ("one", "two") for which in (0, 1)]
    driver.step()
    before = content_of(driver, "one"), content_of(driver, "two")
    assert {slot for slot, _ in before} == {0, 1}
    waiting = [Asked(driver, bench, name) for name in ("three", "four")]
    for _ in range(NUM_TOKENS - 2):
        driver.step()
        assert not driver.registry.evict("one")
        assert not driver.engine.adapters.deactivate_adapter(driver.registry.resolve("two").adapter_id)
        with pytest.raises(AdapterNoRoomError):
            driver.registry.preload("three")
        assert (content_of(driver, "one"), content_of(driver, "two")) == before
        driver.check_integrity()
    assert driver.stats.num_running == len(running)
    driver.finish()
    for asked in running + waiting:
        asked.check()


def test_rule_1_residue_of_a_victim_never_shows(open_driver: OpenDriver, bench: Bench, zoo: ModelZoo) -> None:
    """High rank, biases and all targets leave; low rank, no bias and few targets come to the same lora_slot and
    bytes."""
    paths = {
        field: zoo.adapter(bench.base, LoraConfig(**ADAPTER_OPTIONS[field], task_type="CAUSAL_LM"))
        for field in ("lora_bias", "rank 64", "q and v", "one layer", "patterns")
    }
    most = max(packed_nbytes(bench.base, path) for path in paths.values())
    driver = open_driver(lora={"adapter_memory_bytes": most, "host_memory_bytes": most, "max_loras": 1})
    driver.engine.adapters._residency.tiers.host.pool.poison()
    driver.engine._runner._kv.fill_(math.nan)
    for field in [*paths, *reversed(paths)]:
        driver.registry.load(field, str(paths[field]))
        case = zoo.fit_case(bench.base, paths[field], length=PROMPT_LENGTH)
        request_id = driver.submit(case.prompt_token_ids, field, max_tokens=NUM_TOKENS)
        base_case = bench.cases[None][0]
        base_id = driver.submit(base_case.prompt_token_ids, max_tokens=NUM_TOKENS)
        driver.finish()
        assert driver.tokens(request_id) == case.output_token_ids[:NUM_TOKENS]
        assert driver.tokens(base_id) == base_case.output_token_ids[:NUM_TOKENS]
    assert driver.stats.memory.evictions["host_room"] >= len(paths)


# --------------------------------------------------------------------------------------------------------------- rule 2


def test_rule_2_a_load_does_not_share_a_failure_that_is_not_its_own(
    driver: Driver, bench: Bench, own_copy: Path, tmp_path: Path
) -> None:
    """The same content is loaded from a good source while a request's load from a vanished one fails."""
    manager = driver.engine.adapters
    store, transfers = manager._residency, manager._transfers
    evict_to_source(driver, "mine")
    shutil.rmtree(own_copy)
    jobs, loader = HeldJobs(), transfers._loader
    transfers._loader = jobs
    request_id, expected = ask_mine(driver, bench)
    driver.step()
    twin = shutil.copytree(bench.versions[0], tmp_path / "twin")
    results: list[Any] = []
    load = threading.Thread(target=lambda: results.append(driver.registry.load("twin", str(twin))))
    load.start()
    digest = driver.registry.resolve("mine").adapter_digest
    while len(store.weights[digest].adapters) < 2:
        load.join(0.01)
    jobs.run()
    load.join()
    transfers._loader = loader
    assert [result.status for result in results] == [LoadStatus.LOADED]
    driver.finish()
    assert driver.tokens(request_id) == expected, "the content is in memory again, wherever it came from"


class HeldJobs:
    """A loader that begins nothing before `run`."""

    def __init__(self) -> None:
        self._jobs: list[Callable[[], None]] = []

    def submit(self, job: Callable[[], None], tenant: str = "") -> None:
        self._jobs.append(job)

    def run(self) -> None:
        for job in self._jobs:
            job()

    def close(self) -> None:
        pass


# --------------------------------------------------------------------------------------------------------------- rule 3


def test_rule_3_bad_loads_disturb_nobody(driver: Driver, bench: Bench, tmp_path: Path) -> None:
    """25 missing and 25 corrupt ones from four threads, while 20 requests run."""
    bad = [tmp_path / f"missing-{index}" for index in range(25)]
    bad += [corrupted(bench.adapters["one"], tmp_path / f"corrupt-{index}", index) for index in range(25)]
    asked = [Asked(driver, bench, name, which) for _ in range(2) for name in (None, *NAMES) for which in (0, 1)]
    assert len(asked) == 20
    before = driver.stats.memory.resident_bytes
    errors: dict[Path, Exception] = {}
    threads = [threading.Thread(target=load_all, args=(driver, bad[start::4], errors)) for start in range(4)]
    driver.step()
    for thread in threads:
        thread.start()
    driver.finish()
    for thread in threads:
        thread.join()
    for one in asked:
        one.check()
    assert len(errors) == 50
    assert all(type(errors[path]) is AdapterPathNotFoundError for path in bad[:25])
    assert all(isinstance(errors[path], AdapterError) for path in bad[25:]), errors
    assert not any(isinstance(errors[path], AdapterPathNotFoundError) for path in bad[25:])
    assert set(driver.registry.names()) == set(NAMES)
    assert driver.stats.memory.resident_bytes["host"] == before["host"]
    driver.registry.load("good", str(bench.versions[0]))
    case = bench.cases[bench.versions[0]][0]
    request_id = driver.submit(case.prompt_token_ids, "good", max_tokens=NUM_TOKENS)
    driver.finish()
    assert driver.tokens(request_id) == case.output_token_ids[:NUM_TOKENS]


def load_all(driver: Driver, paths: list[Path], errors: dict[Path, Exception]) -> None:
    for path in paths:
        try:
            driver.registry.load(path.name, str(path))
        except Exception as error:
            errors[path] = error


def corrupted(source: Path, target: Path, which: int) -> Path:
    """The adapter, broken in one of eight ways."""
    shutil.copytree(source, target)
    weights, config = target / "adapter_model.safetensors", target / "adapter_config.json"
    tensors, fields = load_file(weights), json.loads(config.read_text())
    name = sorted(tensors)[which % len(tensors)]
    match which % 8:
        case 0:
            weights.write_bytes(weights.read_bytes()[:-100])
        case 1:
            weights.write_bytes(b"not a tensor in sight" * 40)
        case 2:
            weights.unlink()
        case 3:
            config.write_text("{")
        case 4:
            save_file({**tensors, name: torch.full_like(tensors[name], math.nan)}, weights)
        case 5:
            save_file({**tensors, name: torch.zeros(3, 3)}, weights)
        case 6:
            del tensors[name]
            save_file(tensors, weights)
        case 7:
            config.write_text(json.dumps({**fields, "use_dora": True, "r": 0}))
    return target


# --------------------------------------------------------------------------------------------------------------- rule 4


@pytest.fixture
def own_copy(driver: Driver, bench: Bench, tmp_path: Path) -> Path:
    """The source of an adapter named `mine`, which the test may break."""
    path = Path(shutil.copytree(bench.versions[0], tmp_path / "mine"))
    driver.registry.load("mine", str(path))
    return path


def ask_mine(driver: Driver, bench: Bench, version: int = 0, which: int = 0) -> tuple[str, tuple[int, ...]]:
    """A request for `mine`, and what it should say if it has the content of `version`."""
    case = bench.cases[bench.versions[version]][which]
    request_id = driver.submit(case.prompt_token_ids, "mine", max_tokens=NUM_TOKENS)
    return request_id, case.output_token_ids[:NUM_TOKENS]


def evict_to_source(driver: Driver, name: str) -> None:
    while driver.registry.evict(name):
        pass
    assert driver.registry.describe(name).tier == "source"


def test_rule_4_a_vanished_source_keeps_serving_while_a_copy_is_left(
    driver: Driver, bench: Bench, own_copy: Path
) -> None:
    shutil.rmtree(own_copy)
    for tier in ("host", "device", "host"):
        if tier == "host" and driver.registry.describe("mine").tier == "device":
            assert driver.registry.evict("mine")
        request_id, expected = ask_mine(driver, bench)
        driver.finish()
        assert driver.tokens(request_id) == expected


def test_rule_4_a_vanished_source_fails_its_own_requests_only(driver: Driver, bench: Bench, own_copy: Path) -> None:
    hidden = own_copy.rename(own_copy.with_name("hidden"))
    evict_to_source(driver, "mine")
    others = [Asked(driver, bench, name) for name in (None, *NAMES)]
    driver.step(2)
    mine = [ask_mine(driver, bench)[0] for _ in range(3)]
    driver.finish()
    for asked in others:
        asked.check()
    for request_id in mine:
        with pytest.raises(AdapterUnavailableError, match=r"'mine'.*source.*cannot be read"):
            driver.tokens(request_id)
    assert "mine" in driver.registry.names()
    hidden.rename(own_copy)
    request_id, expected = ask_mine(driver, bench)
    driver.finish()
    assert driver.tokens(request_id) == expected


def test_rule_4_a_changed_source_is_never_served_unnoticed(driver: Driver, bench: Bench, own_copy: Path) -> None:
    shutil.copytree(bench.versions[1], own_copy, dirs_exist_ok=True)
    request_id, expected = ask_mine(driver, bench)
    driver.finish()
    assert driver.tokens(request_id) == expected, "it is in memory: the change does not matter yet"
    evict_to_source(driver, "mine")
    request_id, _ = ask_mine(driver, bench)
    other = Asked(driver, bench, "one")
    driver.finish()
    other.check()
    with pytest.raises(AdapterContentChangedError, match=r"'mine'.*has changed since it was loaded.*reload it"):
        driver.tokens(request_id)
    assert driver.registry.load("mine", str(own_copy), load_inplace=True).status is LoadStatus.RELOADED
    request_id, expected = ask_mine(driver, bench, version=1)
    driver.finish()
    assert driver.tokens(request_id) == expected


# --------------------------------------------------------------------------------------------------------------- rule 5


class LogitsOfSteps:
    """Records the logits of every step of an engine, whose rows are those of the step's requests, base rows first."""

    def __init__(self, driver: Driver) -> None:
        self.steps: list[torch.Tensor] = []
        model = driver.engine._runner._model
        compute_logits = model.compute_logits

        def recording(hidden: torch.Tensor, segments: Sequence[LoraSegment] = ()) -> torch.Tensor:
            logits = compute_logits(hidden, segments)
            self.steps.append(logits.clone())
            return logits

        model.compute_logits = recording  # type: ignore[method-assign]

    def take(self) -> list[torch.Tensor]:
        steps, self.steps = self.steps, []
        return steps


def base_prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, 8000, (count, PROMPT_LENGTH), generator=generator).tolist()


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_rule_5_base_rows_of_a_mixed_batch_are_bit_identical(
    open_driver: OpenDriver, bench: Bench, zoo: ModelZoo, backend: str
) -> None:
    """Four base rows beside eight rows of adapters (one so strong that one stray product would show), with chunked
    prefill."""
    settings = {"lora_backend": backend, "max_num_batched_tokens": 100}
    strong = LoraConfig(r=16, lora_alpha=64, target_modules="all-linear", lora_bias=True, task_type="CAUSAL_LM")
    with_lora = loaded(open_driver(**settings), bench)
    with_lora.registry.load("strong", str(zoo.adapter(bench.base, strong, strength=1e4)))
    without_lora = open_driver(is_lora_on=False, **settings)
    recorded = [logits_of_twelve(with_lora, [*NAMES, "strong"]), logits_of_twelve(without_lora, [None])]
    assert len(recorded[0]) == len(recorded[1]) > NUM_TOKENS
    for mixed, pure in zip(*recorded, strict=True):
        assert mixed.shape == pure.shape
        assert torch.equal(mixed[:4], pure[:4])
        assert len(mixed) == 4 or not torch.equal(mixed[4:], pure[4:])


def logits_of_twelve(driver: Driver, names: Sequence[str | None]) -> list[torch.Tensor]:
    """The base answers four prompts and ends last, so that its rows are the first four of each step; `names` answer
    eight."""
    logits = LogitsOfSteps(driver)
    for row, prompt in enumerate(base_prompts(12)):
        is_base = row < 4
        driver.submit(prompt, None if is_base else names[row % len(names)], max_tokens=NUM_TOKENS + 4 * is_base)
    driver.finish()
    return logits.take()


def test_rule_5_the_base_after_any_sequence_of_adapters_is_bit_identical(open_driver: OpenDriver, bench: Bench) -> None:
    with_lora = loaded(open_driver(enable_prefix_caching=False), bench)
    without_lora = open_driver(is_lora_on=False, enable_prefix_caching=False)
    recorders = LogitsOfSteps(with_lora), LogitsOfSteps(without_lora)
    registry = with_lora.registry
    sequence: list[Callable[[], object]] = [
        lambda: None,
        lambda: [Asked(with_lora, bench, name) for name in NAMES],
        lambda: registry.evict("one"),
        lambda: registry.load("one", str(bench.versions[0]), load_inplace=True),
        lambda: [registry.pin("two"), registry.unload("three")],
        lambda: registry.switch("one", "four"),
        lambda: with_lora.submit(base_prompts(1)[0], "one", max_tokens=4),
        lambda: [registry.unload(name) for name in ("one", "two", "four")],
    ]
    for act in sequence:
        act()
        with_lora.finish()
        recorders[0].take()
        for driver in (with_lora, without_lora):
            for prompt in base_prompts(3):
                driver.submit(prompt, max_tokens=8)
            driver.finish()
        steps = [recorder.take() for recorder in recorders]
        assert len(steps[0]) == 8
        assert all(torch.equal(*pair) for pair in zip(*steps, strict=True))


# --------------------------------------------------------------------------------------------------------------- rule 6


def test_rule_6_two_names_with_one_content_share_memory_and_kv(driver: Driver, bench: Bench, tmp_path: Path) -> None:
    twin = shutil.copytree(bench.adapters["one"], tmp_path / "twin")
    before = driver.stats
    driver.registry.load("twin", str(twin))
    assert driver.registry.resolve("twin").adapter_digest == driver.registry.resolve("one").adapter_digest
    assert driver.registry.resolve("twin").adapter_id != driver.registry.resolve("one").adapter_id
    first = Asked(driver, bench, "one")
    driver.finish()
    second = driver.submit(first.case.prompt_token_ids, "twin", max_tokens=NUM_TOKENS)
    driver.finish()
    assert driver.tokens(second) == driver.tokens(first.request_id)
    assert driver.outputs[second].num_cached_tokens == 16
    assert driver.stats.memory.resident_bytes["host"] == before.memory.resident_bytes["host"]
    assert driver.stats.memory.resident_bytes["device"] == bench.nbytes
    assert driver.registry.describe("twin").lora_slot == driver.registry.describe("one").lora_slot
    driver.registry.unload("one")
    third = driver.submit(first.case.prompt_token_ids, "twin", max_tokens=NUM_TOKENS)
    driver.finish()
    assert driver.tokens(third) == driver.tokens(first.request_id)
    assert driver.outputs[third].num_cached_tokens == 16, "its other name still has the content"


def test_rule_6_one_name_with_changed_content_shares_nothing(driver: Driver, bench: Bench, own_copy: Path) -> None:
    ask_mine(driver, bench)
    driver.finish()
    old_slot, old_bytes = content_of(driver, "mine")
    held = [ask_mine(driver, bench) for _ in range(2)]
    driver.step(3)
    shutil.copytree(bench.versions[1], own_copy, dirs_exist_ok=True)
    driver.registry.load("mine", str(own_copy), load_inplace=True)
    prompt = bench.cases[bench.versions[0]][0].prompt_token_ids  # known to the old version's KV
    new = driver.submit(prompt, "mine", max_tokens=NUM_TOKENS)
    driver.step(2)
    new_slot, new_bytes = content_of(driver, "mine")
    assert new_slot != old_slot
    assert new_bytes != old_bytes
    driver.finish()
    assert driver.outputs[new].num_cached_tokens == 0
    assert driver.tokens(new) != held[0][1]
    assert all(driver.tokens(request_id) == expected for request_id, expected in held)


# --------------------------------------------------------------------------------------------------------------- rule 7


@pytest.mark.parametrize("is_pinned", [False, True])
def test_rule_7_reload_in_place_while_requests_run(
    driver: Driver, bench: Bench, own_copy: Path, is_pinned: bool
) -> None:
    """Old ones (running and waiting for a seat alike) end as they began, new ones answer from the new weights."""
    if is_pinned:
        driver.registry.pin("mine")
    before = driver.stats.memory.resident_bytes["host"]
    old = [ask_mine(driver, bench, which=which) for which in (0, 1, 0)]
    driver.step(5)
    old.append(ask_mine(driver, bench, which=1))  # acquired, not yet scheduled
    shutil.copytree(bench.versions[1], own_copy, dirs_exist_ok=True)
    results: list[Any] = []
    reload = threading.Thread(
        target=lambda: results.append(driver.registry.load("mine", str(own_copy), load_inplace=True))
    )
    reload.start()
    while reload.is_alive():
        driver.step()
    reload.join()
    assert results[0].status is LoadStatus.RELOADED
    assert results[0].ref.adapter_version == 2
    new = [ask_mine(driver, bench, version=1, which=which) for which in (0, 1)]
    driver.finish()
    for request_id, expected in old + new:
        assert driver.tokens(request_id) == expected
    assert driver.registry.describe("mine").is_pinned is is_pinned
    assert driver.registry.describe("mine").num_draining == 0
    assert driver.stats.memory.num_adapters == len(NAMES) + 2, "the old version is kept for a rollback"
    for _ in range(100):  # it leaves in a thread of its own, after its last request
        if driver.stats.memory.resident_bytes["host"] == before:
            break
        driver.engine.adapters.wait_for_change(0.05)
    assert driver.stats.memory.resident_bytes["host"] == before, "the old version is out of memory"


@pytest.mark.parametrize("max_versions_kept", [1, 2])
def test_rule_7_no_kv_of_the_old_version_is_used(
    open_driver: OpenDriver, bench: Bench, tmp_path: Path, max_versions_kept: int
) -> None:
    """Not even when the old content comes back after it was dropped. While it is kept, its KV is as good as before."""
    driver, own_copy = open_driver(lora={"max_versions_kept": max_versions_kept}), tmp_path / "mine"
    num_back = 0 if max_versions_kept == 1 else 16
    for version, num_cached in ((0, (0, 16)), (1, (0, 16)), (0, (num_back, 16))):
        shutil.copytree(bench.versions[version], own_copy, dirs_exist_ok=True)
        driver.registry.load("mine", str(own_copy), load_inplace=True)
        for expected_cached in num_cached:
            request_id, expected = ask_mine(driver, bench, version=version)
            driver.finish()
            assert driver.tokens(request_id) == expected
            assert driver.outputs[request_id].num_cached_tokens == expected_cached


# --------------------------------------------------------------------------------------------------------------- rule 8


def test_rule_8_an_adapter_larger_than_the_budget_is_refused_with_both_numbers(
    open_driver: OpenDriver, bench: Bench
) -> None:
    tensors = load_file(bench.adapters["one"] / "adapter_model.safetensors").values()
    for budget, setting, nbytes in (
        ({"adapter_memory_bytes": bench.nbytes - 64}, "device", bench.nbytes),
        ({"host_memory_bytes": 4096}, "host", sum(tensor.nbytes for tensor in tensors)),
    ):
        driver = open_driver(lora={"adapter_memory_bytes": 4096, **budget}, max_model_len=32)
        limit = next(iter(budget.values()))
        with pytest.raises(AdapterTooLargeError, match=rf"{nbytes} bytes.*{setting}.*{limit} bytes"):
            driver.registry.load("one", str(bench.adapters["one"]))
        assert driver.registry.names() == ()
        assert driver.stats.memory.resident_bytes == {"device": 0, "host": 0}
        assert driver.stats.memory.num_adapters == 0


def test_rule_8_pins_beyond_the_budget_are_refused(open_driver: OpenDriver, bench: Bench) -> None:
    nbytes = bench.nbytes
    driver = loaded(open_driver(lora={"adapter_memory_bytes": 2 * nbytes + 64}), bench)
    driver.registry.pin("one")
    driver.registry.pin("two")
    with pytest.raises(AdapterNoRoomError, match=rf"needs {nbytes} bytes.*{2 * nbytes} of the {2 * nbytes + 64} bytes"):
        driver.registry.pin("three")
    assert not driver.registry.describe("three").is_pinned
    waits_in_vain = Asked(driver, bench, "three")
    pinned = Asked(driver, bench, "one")
    driver.finish()
    pinned.check()
    with pytest.raises(AdapterNoRoomError, match="unpin or evict another"):
        driver.tokens(waits_in_vain.request_id)
    driver.registry.unpin("two")
    served = Asked(driver, bench, "three")
    driver.finish()
    served.check()


# --------------------------------------------------------------------------------------------------------------- rule 9


@pytest.mark.parametrize("aging_steps", [4, 12])
def test_rule_9_a_request_for_a_full_device_waits_and_gets_in_within_the_aging_bound(
    open_driver: OpenDriver, bench: Bench, aging_steps: int
) -> None:
    """Three wait behind two adapters whose requests run for long; the bound is in steps and for each of them."""
    lora = {"adapter_memory_bytes": bench.nbytes, "aging_steps": aging_steps}
    driver = loaded(open_driver(lora=lora), bench)
    running = Asked(driver, bench, "one", num_tokens=60)
    driver.step()
    waiting = [Asked(driver, bench, name) for name in ("two", "three", "four")]
    driver.step()
    assert driver.stats.waiting_by_cause == {"seat": 0, "load": 0, "room": 3}
    assert len(driver.stats.waiting_adapter_ids) == 3
    assert driver.engine.adapters.report().num_waiting["room"] == 3
    first_step_of: dict[str, int] = {}
    for step in range(1, 400):
        driver.step()
        for asked in waiting:
            generation = driver._front.outputs._generations.get(asked.request_id)
            has_begun = asked.request_id in driver.outputs or (generation and generation.first_token_s is not None)
            if has_begun:
                first_step_of.setdefault(asked.request_id, step)
        if not driver.engine.has_unfinished:
            break
    steps = [first_step_of[asked.request_id] for asked in waiting]
    assert steps == sorted(steps), "first come, first served"
    for position, step in enumerate(steps):
        assert step <= aging_steps + position * max(1, aging_steps / 4) + 2
    for asked in (running, *waiting):
        asked.check()
    assert driver.stats.num_pauses >= 1
    assert driver.stats.waiting_by_cause == {"seat": 0, "load": 0, "room": 0}


@pytest.mark.parametrize("num_device", [1, 2])
@pytest.mark.parametrize("aging_steps", [1, 2, 8])
def test_rule_9_waiting_requests_do_not_evict_each_others_loads_for_ever(
    open_driver: OpenDriver, bench: Bench, num_device: int, aging_steps: int
) -> None:
    """Host memory holds hardly more than the device, so that every turn reads a source; each request gets its turn."""
    nbytes = bench.nbytes
    lora = {"adapter_memory_bytes": num_device * nbytes, "host_memory_bytes": num_device * nbytes + 4096}
    driver = loaded(open_driver(lora={**lora, "aging_steps": aging_steps}), bench)
    asked = [Asked(driver, bench, name, which) for which in (0, 1) for name in NAMES]
    driver.finish(max_steps=2000)
    for one in asked:
        one.check()


@pytest.mark.parametrize("aging_steps", [1, 4, 16])
def test_rule_9_a_turn_is_long_enough_for_a_prompt(open_driver: OpenDriver, bench: Bench, aging_steps: int) -> None:
    """Four adapters take turns on a device with room for one. A prompt takes five steps: none ends before its first
    token."""
    lora = {"adapter_memory_bytes": bench.nbytes, "aging_steps": aging_steps}
    driver = loaded(
        open_driver(lora=lora, max_num_batched_tokens=4, max_num_seqs=4, enable_prefix_caching=False), bench
    )
    asked = [Asked(driver, bench, name) for name in NAMES]
    driver.finish(max_steps=3000)
    for one in asked:
        one.check()
    num_tokens = driver.stats.num_generated_tokens
    assert 0 < driver.stats.num_pauses <= num_tokens / max(1, aging_steps // 16)


# -------------------------------------------------------------------------------------------------------------- rule 10


def test_rule_10_a_known_number_with_another_name_or_path_is_refused(bench: Bench) -> None:
    one, two = str(bench.adapters["one"]), str(bench.adapters["two"])
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompt = {"prompt_token_ids": bench.cases[bench.adapters["one"]][0].prompt_token_ids}
    with LLM(str(bench.base), max_model_len=MAX_MODEL_LEN) as llm:
        assert llm.add_lora(LoRARequest("one", 7, one)) is True
        assert llm.add_lora(LoRARequest("one", 7, one)) is False, "a no-op that says so"
        for wrong in (LoRARequest("other", 7, one), LoRARequest("one", 7, two), LoRARequest("one", 8, one)):
            for call in (llm.add_lora, lambda wrong: llm.generate(prompt, params, lora_request=wrong)):
                with pytest.raises(AdapterConflictError, match="'one'"):
                    call(wrong)
        assert llm.list_loras() == {7}
        expected = bench.cases[bench.adapters["one"]][0].output_token_ids[:4]
        output = llm.generate(prompt, params, lora_request=LoRARequest("one", 7, one))[0]
        assert output.outputs[0].token_ids == expected
        llm.check_integrity()


def test_rule_10_two_tenants_never_meet_through_a_number(bench: Bench) -> None:
    """A number that was given back and taken by another leads to the other's weights and KV, for all requests."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(bench.base), max_model_len=MAX_MODEL_LEN) as llm:
        for name in ("one", "two", "one"):
            path = bench.adapters[name]
            for case in bench.cases[path]:
                prompt = {"prompt_token_ids": case.prompt_token_ids}
                output = llm.generate(prompt, params, lora_request=LoRARequest(f"{name}'s", 1, str(path)))[0]
                assert output.outputs[0].token_ids == case.output_token_ids[:NUM_TOKENS]
                assert output.num_cached_tokens == 0
            assert llm.remove_lora(1) is True
            assert llm.remove_lora(1) is False
            assert llm.list_loras() == set()
        llm.check_integrity()


# -------------------------------------------------------------------------------------------------------------- rule 11


def test_rule_11_a_client_that_leaves_at_any_point(open_driver: OpenDriver, bench: Bench) -> None:
    """Waiting for a seat, for room or for a load; in the middle of a prompt; while tokens come; after a preemption."""
    lora = {"adapter_memory_bytes": 2 * bench.nbytes, "aging_steps": 3}
    for num_steps in (0, 1, 2, 3, 5, 9, 14, 21):
        driver = loaded(open_driver(lora=lora, max_num_batched_tokens=16, max_num_seqs=5), bench)
        evict_to_source(driver, "four")
        leaving = [Asked(driver, bench, name, which) for name in (*NAMES, None) for which in (0, 1)]
        staying = [Asked(driver, bench, name) for name in (*NAMES, None)]
        driver.step(num_steps)
        for asked in leaving:
            if asked.request_id not in driver.outputs:
                driver.abort(asked.request_id)
                driver.check_integrity()
        driver.finish()
        for asked in staying:
            asked.check()
        driver.check_idle()


def test_rule_11_requests_that_are_refused(driver: Driver, bench: Bench) -> None:
    staying = Asked(driver, bench, "one")
    refused: list[tuple[type[Exception], list[int], str, dict[str, Any]]] = [
        (PromptTooLongError, [5] * MAX_MODEL_LEN, "one", {}),
        (InvalidRequestError, [], "one", {}),
        (InvalidRequestError, [10**6], "one", {}),
        (InvalidRequestError, [5], "one", {"top_p": 0}),
        (InvalidRequestError, [5], "one", {"stop_token_ids": [10**6]}),
        (AdapterNotFoundError, [5], "unknown", {}),
    ]
    for error, prompt, name, params in refused:
        with pytest.raises(error):
            driver.submit(prompt, name, **params)
        assert driver.registry.num_references == 1
    driver.finish()
    staying.check()


def test_rule_11_a_step_that_fails(driver: Driver, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests end with an error; those that come after are served."""
    failing = [Asked(driver, bench, name) for name in (None, "one", "two")]
    driver.step(2)
    with monkeypatch.context() as patch:
        patch.setattr(driver.engine._runner, "launch", lambda plan: 1 / 0)
        driver.step()
    assert not driver.engine.has_unfinished
    for asked in failing:
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            driver.tokens(asked.request_id)
    driver.check_idle()
    again = Asked(driver, bench, "one")
    driver.finish()
    again.check()


def test_rule_11_logits_that_cannot_be_used(driver: Driver, bench: Bench) -> None:
    """NaN in one adapter's rows: its own requests end with an error, the others of the batch do not notice."""
    healthy = [Asked(driver, bench, name) for name in (None, "two")]
    sick = Asked(driver, bench, "one")
    driver.step(2)
    store = driver.engine.adapters._residency
    host = store.weights[driver.registry.resolve("one").adapter_digest].host
    assert host is not None
    for extent in host.extents:
        store.tiers.host.pool.view(extent).fill_(0xFF)
    driver.finish()
    with pytest.raises(AdapterFaultError, match="NaN"):
        driver.tokens(sick.request_id)
    for asked in healthy:
        asked.check()


def test_rule_11_an_unload_with_force(driver: Driver, bench: Bench) -> None:
    doomed = [Asked(driver, bench, "one", which) for which in (0, 1)]
    staying = Asked(driver, bench, "two")
    driver.step(3)
    result = driver.registry.unload("one", force=True)
    assert (result.num_aborted, result.is_drained) == (2, True)
    driver.finish()
    staying.check()
    for asked in doomed:
        output = driver.outputs[asked.request_id].outputs[0]
        assert output.finish_reason == "abort"
        assert output.token_ids == asked.case.output_token_ids[: len(output.token_ids)]
    assert driver.stats.memory.num_adapters == len(NAMES) - 1


def test_an_unload_drops_the_pin_although_requests_still_run(driver: Driver, bench: Bench) -> None:
    """A request that needs its room waits for those requests, and is not refused because of the pin."""
    adapter_id = driver.registry.resolve("one").adapter_id
    driver.registry.pin("one")
    running = Asked(driver, bench, "one")
    driver.step(2)
    driver.registry.unload("one")
    where = {each.adapter_id: each.is_pinned for each in driver.engine.adapters.list_adapters()}
    assert where.get(adapter_id) is False
    driver.finish()
    running.check()
    assert adapter_id not in {each.adapter_id for each in driver.engine.adapters.list_adapters()}
