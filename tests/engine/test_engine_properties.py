"""After any sequence of requests, aborts, loads, unloads, reloads, evictions, pins and changes of the sources, nothing
is lost or mixed up.

Memory is so small that everything happens in it: two of the adapters fit on the device, hardly more into the host's
share, and four requests into the KV cache if they are short. All free memory holds NaN.
"""

from __future__ import annotations

import itertools
import math
import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from peft import LoraConfig

from loraplex import LoRAConfig
from loraplex.adapters.merging.dominance import DominanceRule
from loraplex.compat.vllm import WorkerLoRAManager
from loraplex.core import AdapterChoice, AdapterMix
from loraplex.engine import memory_plan
from loraplex.errors import (
    AdapterContentChangedError,
    AdapterMixError,
    AdapterNoRoomError,
    AdapterNotFoundError,
    AdapterPathNotFoundError,
    AdapterTooLargeError,
    AdapterUnavailableError,
    InvalidRequestError,
    RequestAbortedError,
)
from loraplex.memory.space.arena import Owner
from loraplex.models import dominant
from loraplex.models.dominant import DominantMerger
from tests.engine.alora_oracle import ActivatedOracle
from tests.engine.driver import Driver, packed_nbytes
from tests.engine.mix_oracles import active_oracle, cat_oracle
from tests.fixtures import MIN_GAP, TARGET_MODULES, VOCAB_SIZE, ModelZoo

NUM_TOKENS = 10
BLOCK_SIZE = 16
NUM_KV_BLOCKS = 9
KV_BLOCK_BYTES = 4 * 2 * BLOCK_SIZE * 16 * 2 * 2  # fp32, K and V, head_dim 16, 2 heads, 2 layers
NAMES = ("a", "b", "c", "d")
BIASED, ACTIVATED = "large", "activated"
INVOCATION = [77, 78]
CONTENT = st.integers(0, 2**16)
"""Number of a content of the world, modulo how many it has."""

MIX_WEIGHTS = (0.7, 0.3)
ASKS = st.tuples(
    st.sampled_from([None, *NAMES, *NAMES]), st.integers(0, 3), st.sampled_from([1, 4, NUM_TOKENS, NUM_TOKENS])
)
SOURCE_ERRORS = (AdapterContentChangedError, AdapterUnavailableError)


@dataclass(frozen=True)
class World:
    """What there is to play with. `expected[contents][i]` is what the model alone says to prompt i: the base, through
    one adapter, or through a mix of two with MIX_WEIGHTS; a mix that is not there is refused.

    scores: log probabilities to the bit, where an answer must have those. is_counted: room is a number of adapters.
    is_merging: the adapter that dominates is merged.
    """

    base: Path
    contents: Mapping[str, Path]
    prompts: list[list[int]]
    expected: Mapping[tuple[str, ...], list[tuple[int, ...]]]
    nbytes: Mapping[str, int]
    scores: Mapping[tuple[str, ...], list[list[dict[int, float]]]] = field(default_factory=dict)
    mix_weights: tuple[float, float] = MIX_WEIGHTS
    is_counted: bool = False
    is_merging: bool = False

    def content(self, number: int) -> str:
        return list(self.contents)[number % len(self.contents)]

    def key(self, contents: Sequence[str]) -> tuple[str, ...]:
        """Of `expected`. Weights of one content that add up to one are all of it."""
        return tuple(dict.fromkeys(contents) if sum(self.mix_weights) == 1 else contents)


@pytest.fixture(scope="module")
def world(zoo: ModelZoo) -> World:
    base = zoo.base("llama")
    everything, attention = list(TARGET_MODULES), ["q_proj", "v_proj"]
    configs = {
        "small": LoraConfig(r=4, lora_alpha=8, target_modules=attention, task_type="CAUSAL_LM"),
        "medium": LoraConfig(r=8, lora_alpha=8, target_modules=everything, task_type="CAUSAL_LM"),
        "large": LoraConfig(r=12, lora_alpha=9, target_modules=everything, lora_bias=True, task_type="CAUSAL_LM"),
        "other medium": LoraConfig(r=8, lora_alpha=8, target_modules=everything, task_type="CAUSAL_LM"),
        ACTIVATED: LoraConfig(
            r=6, target_modules=everything, alora_invocation_tokens=INVOCATION, task_type="CAUSAL_LM"
        ),
    }
    contents = {name: zoo.adapter(base, config, seed=80 + i) for i, (name, config) in enumerate(configs.items())}
    prompts, expected = find_prompts(zoo, base, contents)
    nbytes = {name: packed_nbytes(base, path) for name, path in contents.items()}
    return World(base, contents, prompts, expected, nbytes)


def find_prompts(
    zoo: ModelZoo, base: Path, contents: Mapping[str, Path]
) -> tuple[list[list[int]], dict[tuple[str, ...], list[tuple[int, ...]]]]:
    """Four prompts of three lengths, two of which begin alike, on which no oracle is near a tie. All but the shortest
    have the invocation of an aLoRA; the second has it where the first has it, too, and once more."""
    oracles: dict[tuple[str, ...], Any] = {(): zoo.oracle(base)}
    for name, path in contents.items():
        activated = ActivatedOracle(zoo, base, path) if name == ACTIVATED else None
        oracles[(name,)] = activated or zoo.oracle(base, path)
    for pair in itertools.combinations(sorted(set(contents) - {ACTIVATED}), 2):
        oracles[pair] = (active_oracle if BIASED in pair else cat_oracle)(
            zoo, base, [(contents[each], weight) for each, weight in zip(pair, MIX_WEIGHTS, strict=True)]
        )
    prompts: list[list[int]] = []
    expected: dict[tuple[str, ...], list[tuple[int, ...]]] = {name: [] for name in oracles}
    generator = torch.Generator().manual_seed(3)
    for length, num_shared, invoked_at in ((20, 0, 11), (36, BLOCK_SIZE, 30), (9, 0, None), (33, 0, BLOCK_SIZE)):
        shared = prompts[0][:num_shared] if num_shared else []
        fresh = torch.randint(3, VOCAB_SIZE, (16, length - num_shared), generator=generator).tolist()
        candidates = [shared + each for each in fresh]
        for each in candidates if invoked_at is not None else ():
            each[invoked_at : invoked_at + len(INVOCATION)] = INVOCATION
        cases = {name: oracle.greedy_batch(candidates, NUM_TOKENS) for name, oracle in oracles.items()}
        fit = next(i for i in range(16) if all(case[i].min_gap >= MIN_GAP for case in cases.values()))
        prompts.append(candidates[fit])
        for name, case in cases.items():
            expected[name].append(case[fit].output_token_ids)
    return prompts, expected


@dataclass
class Asked:
    """A request that runs: what it should say, and what may go wrong with it because of what was done meanwhile."""

    request_id: str
    parts: tuple[tuple[str, str], ...]  # (name, content) of its adapters; expected: None for a mix that is refused
    expected: tuple[int, ...] | None
    scores: list[dict[int, float]] | None = None
    may_miss_source: bool = False
    may_lack_room: bool = False


@dataclass
class Names:
    """What the names should stand for: a model of the registry, in a few dictionaries."""

    loaded: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    def content(self, name: str) -> str | None:
        return self.loaded.get(self.aliases.get(name, name))

    def load(self, name: str, content: str) -> None:
        self.loaded[name] = content
        self.aliases.pop(name, None)

    def unload(self, name: str) -> None:
        del self.loaded[name]
        self.aliases.pop(name, None)

    def switch(self, old: str, new: str) -> None:
        self.aliases.pop(new, None)
        if old in self.loaded:
            self.aliases |= {name: new for name, target in self.aliases.items() if target == old}
            self.aliases[old] = new


class EngineMachine(RuleBasedStateMachine):
    """`world` is set by the test. Rules never wait for requests; `teardown` runs all to the end and counts the rest.

    Loads run in threads, so what is drawn must not depend on how far they are: rules take any name and know what to
    expect.
    """

    world: ClassVar[World]

    @initialize(
        is_prefix_caching=st.booleans(),
        num_device=st.integers(1, 2),
        aging_steps=st.sampled_from([2, 20]),
        look_ahead=st.booleans(),
    )
    def start(self, is_prefix_caching: bool, num_device: int, aging_steps: int, look_ahead: bool) -> None:
        largest = max(self.world.nbytes.values())
        self.device_bytes = 2**25 if self.world.is_counted else num_device * largest
        self.max_loras = num_device if self.world.is_counted else None
        lora = LoRAConfig(
            adapter_memory_bytes=self.device_bytes,
            host_memory_bytes=self.device_bytes + min(self.world.nbytes.values()),
            max_loras=self.max_loras,
            max_cpu_loras=None if self.max_loras is None else self.max_loras + 1,
            aging_steps=aging_steps,
            merge_dominant_adapter=self.world.is_merging,
        )
        self.driver = Driver(
            self.world.base,
            lora,
            max_model_len=64,
            block_size=BLOCK_SIZE,
            kv_cache_memory_bytes=NUM_KV_BLOCKS * KV_BLOCK_BYTES,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            enable_prefix_caching=is_prefix_caching,
            look_ahead=look_ahead,
        )
        self.driver.engine._runner._kv.fill_(math.nan)
        self.pool = self.driver.engine.adapters._residency.tiers.host.pool
        self.pool.poison()
        self.directory = TemporaryDirectory()
        self.sources: dict[str, str | None] = {}
        self.names = Names()
        self.asked: list[Asked] = []
        for number, name in enumerate(NAMES[:3]):
            self.load(name, number, load_inplace=False, is_pinned=False)

    # ------------------------------------------------------------------------------------------------------ the sources

    def path(self, name: str) -> Path:
        return Path(self.directory.name) / name

    @rule(name=st.sampled_from(NAMES), number=CONTENT)
    def write_source(self, name: str, number: int) -> None:
        content = self.world.content(number)
        shutil.copytree(self.world.contents[content], self.path(name), dirs_exist_ok=True)
        self.sources[name] = content
        self._note_sources()

    @rule(name=st.sampled_from(NAMES))
    def remove_source(self, name: str) -> None:
        shutil.rmtree(self.path(name), ignore_errors=True)
        self.sources.pop(name, None)
        self._note_sources()

    def _note_sources(self) -> None:
        """Requests whose content is not at its source now may find it neither in memory nor there."""
        for asked in self._live():
            asked.may_miss_source |= not all(self._has_source(*part) for part in asked.parts)

    def _has_source(self, name: str, content: str) -> bool:
        return self.sources.get(self.names.aliases.get(name, name)) == content

    def _live(self) -> Iterator[Asked]:
        ended = self.driver.outputs.keys() | self.driver.errors.keys()
        return (asked for asked in self.asked if asked.request_id not in ended)

    # -------------------------------------------------------------------------------------------------------- the verbs

    @rule(
        name=st.sampled_from(NAMES),
        number=CONTENT,
        load_inplace=st.booleans(),
        is_pinned=st.integers(0, 4).map(lambda n: n == 0),
    )
    def load(self, name: str, number: int, load_inplace: bool, is_pinned: bool) -> None:
        if name not in self.sources or load_inplace:
            self.write_source(name, number)
        self._load(name, load_inplace, is_pinned)

    @rule(name=st.sampled_from(NAMES))
    def reload_whatever_is_there(self, name: str) -> None:
        self._load(name, load_inplace=True, is_pinned=False)

    def _load(self, name: str, load_inplace: bool, is_pinned: bool) -> None:
        was_there = name in self.names.loaded
        try:
            self.driver.registry.load(name, str(self.path(name)), load_inplace=load_inplace, is_pinned=is_pinned)
        except AdapterPathNotFoundError:
            assert name not in self.sources
        except AdapterNotFoundError:
            assert self.names.aliases[name] not in self.names.loaded, "it was switched to one that is gone"
        except AdapterNoRoomError:
            pass
        except SOURCE_ERRORS:
            is_just_pinned = was_there and is_pinned and not load_inplace
            assert is_just_pinned, "only a pin of what is loaded reads its source again"
        else:
            if load_inplace or not was_there:
                self.names.load(name, self.sources[name])
        self._note_sources()

    @rule(name=st.sampled_from(NAMES), force=st.booleans())
    def unload(self, name: str, force: bool) -> None:
        if name not in self.names.loaded:
            with pytest.raises(AdapterNotFoundError):
                self.driver.registry.unload(name, force=force)
            return
        result = self.driver.registry.unload(name, force=force)
        assert result.is_drained or not force
        self.names.unload(name)
        self._note_sources()

    @rule(names=st.permutations(NAMES))
    def switch(self, names: list[str]) -> None:
        old, new = names[:2]
        try:
            self.driver.registry.switch(old, new)
        except AdapterNotFoundError:
            assert new not in self.names.loaded
        except (AdapterNoRoomError, *SOURCE_ERRORS):
            pass
        else:
            self.names.switch(old, new)
        self._note_sources()

    @rule(
        name=st.sampled_from(NAMES),
        verb=st.sampled_from(["pin", "unpin", "unpin", "evict", "evict", "evict", "preload"]),
    )
    def move(self, name: str, verb: str) -> None:
        try:
            getattr(self.driver.registry, verb)(name)
        except AdapterNotFoundError:
            assert self.names.content(name) is None
        except (AdapterNoRoomError, *SOURCE_ERRORS):
            assert verb in ("pin", "preload")

    # ----------------------------------------------------------------------------------------------------- the requests

    @rule(asks=st.lists(ASKS, min_size=1, max_size=4))
    def submit(self, asks: list[tuple[str | None, int, int]]) -> None:
        for name, prompt, num_tokens in asks:
            content = None if name is None else self.names.content(name)
            try:
                request_id = self._submit(prompt, name, num_tokens)
            except AdapterNotFoundError:
                assert name is not None
                assert content is None
            else:
                parts = () if name is None or content is None else ((name, content),)
                self._note_asked(request_id, parts, prompt, num_tokens)
        self._note_sources()

    def _submit(self, prompt: int, choice: AdapterChoice, num_tokens: int) -> str:
        scored = {"logprobs": 2} if self.world.scores else {}
        return self.driver.submit(self.world.prompts[prompt], choice, max_tokens=num_tokens, **scored)

    def _note_asked(self, request_id: str, parts: tuple[tuple[str, str], ...], prompt: int, num_tokens: int) -> None:
        key = self.world.key([content for _, content in parts])
        expected, scores = self.world.expected.get(key), self.world.scores.get(key)
        self.asked.append(
            Asked(
                request_id,
                parts,
                None if expected is None else expected[prompt][:num_tokens],
                None if scores is None else scores[prompt][:num_tokens],
            )
        )

    @rule(names=st.permutations(NAMES), prompt=st.integers(0, 3), num_tokens=st.sampled_from([1, NUM_TOKENS]))
    def submit_mix(self, names: list[str], prompt: int, num_tokens: int) -> None:
        """Of two names, in the order of their contents: the oracle of a pair is for that."""
        pair = sorted(names[:2], key=lambda name: self.names.content(name) or "")
        mix = AdapterMix(tuple(zip(pair, self.world.mix_weights, strict=True)))
        parts = tuple((name, content) for name in pair if (content := self.names.content(name)) is not None)
        try:
            request_id = self._submit(prompt, mix, num_tokens)
        except AdapterNotFoundError:
            assert len(parts) < 2
        except InvalidRequestError:
            is_one = len({self.names.aliases.get(name, name) for name in pair}) == 1
            assert is_one or ACTIVATED in (content for _, content in parts)
        else:
            self._note_asked(request_id, parts, prompt, num_tokens)
        self._note_sources()

    @rule(which=st.integers(0, 9))
    def abort(self, which: int) -> None:
        running_ids = self.driver.running_ids
        if running_ids:
            self.driver.abort(running_ids[which % len(running_ids)])

    @rule(num_steps=st.integers(1, 5))
    def step(self, num_steps: int) -> None:
        self.driver.step(num_steps)

    @rule()
    def finish(self) -> None:
        self.driver.finish(max_steps=5000)

    # ---------------------------------------------------------------------------------------------- what is always true

    @invariant()
    def everything_is_consistent(self) -> None:
        self.driver.check_integrity()
        resolving = {name for name in self.names.loaded if self.names.content(name) is not None}
        assert set(self.driver.registry.names()) == resolving
        if any(info.is_pinned for info in self.driver.registry.list_adapters()):
            for asked in self._live():
                asked.may_lack_room = True

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        try:
            self.driver.finish(max_steps=5000)
            for asked in self.asked:
                self._check(asked)
            self._check_that_all_returns()
        finally:
            self.driver.close()
            self.directory.cleanup()

    def _check(self, asked: Asked) -> None:
        error = self.driver.errors.get(asked.request_id)
        if error is None:
            output = self.driver.outputs[asked.request_id].outputs[0]
            assert output.finish_reason in ("length", "abort")
            expected = asked.expected or ()  # a mix that would have been refused may be aborted before it is judged
            num_tokens = len(expected) if output.finish_reason == "length" else len(output.token_ids)
            assert output.token_ids == expected[:num_tokens], f"{asked} said something else"
            assert asked.expected is not None or output.finish_reason == "abort", f"{asked} was not refused"
            if asked.scores is not None:
                found = [{i: each[i].logprob for i in each} for each in output.logprobs or ()]
                assert found == asked.scores[:num_tokens], f"{asked} has other bits"
        elif isinstance(error, SOURCE_ERRORS):
            assert asked.may_miss_source, f"{asked} failed: {error}"
        elif isinstance(error, AdapterNoRoomError):
            assert asked.may_lack_room, f"{asked} failed: {error}"
        elif isinstance(error, AdapterMixError):
            assert asked.expected is None, f"{asked} failed: {error}"
        elif isinstance(error, AdapterTooLargeError):
            contents = {content for _, content in asked.parts}
            is_too_large = sum(self.world.nbytes[each] for each in contents) > self.device_bytes
            assert is_too_large or len(contents) > (self.max_loras or math.inf), f"{asked} failed: {error}"
        else:
            assert isinstance(error, RequestAbortedError), f"{asked} failed: {error!r}"

    def _check_that_all_returns(self) -> None:
        driver = self.driver
        driver.check_idle()
        for name in list(self.names.loaded):
            assert driver.registry.unload(name).is_drained
        driver.step()
        driver.check_idle()
        for _ in range(100):  # a load that is no longer wanted ends in its thread
            if not driver.engine.adapters.report().num_loading:
                break
            driver.engine.adapters.wait_for_change(0.05)
        driver.step()  # tells the KV cache of contents that went with such a load
        stats = driver.engine.adapters.report()
        assert (stats.num_adapters, stats.num_loading, stats.retiring_bytes, stats.pinned_bytes) == (0, 0, 0, 0)
        assert stats.tier("device").used_bytes == stats.tier("host").used_bytes == self.pool.used_bytes == 0
        assert self.pool.arena.chunks_of(Owner.ADAPTERS) == []
        assert set(WorkerLoRAManager(driver.engine.adapters).lora_index_to_id) == {None}
        cache = driver.engine._blocks._cache
        assert cache is None or cache._blocks_of_digest.keys() <= {""}, "KV of an adapter that is gone"
        assert driver.engine.memory_report().tier("merged").num_adapters == 0, "a copy of an adapter that is gone"


@pytest.mark.slow
def test_nothing_is_lost_or_mixed_up(world: World) -> None:
    play(world, max_examples=60)


@pytest.mark.slow
def test_nothing_is_mixed_up_while_the_adapter_that_dominates_is_merged(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy is awaited in the step after the one that began it, so that many steps are merged."""
    monkeypatch.setattr(dominant, "DominanceRule", lambda: DominanceRule(window=2, bytes_per_s=math.inf))
    monkeypatch.setattr(dominant, "MIN_GAIN", 0.0)
    look_at, close, used = DominantMerger._look_at, DominantMerger.close, Counter[str]()

    def awaited(merger: DominantMerger, job: Any) -> None:
        assert job.is_done.wait(60)
        look_at(merger, job)

    def counted(merger: DominantMerger) -> None:
        used.update(copies=merger.num_merges, steps=merger.num_steps)
        close(merger)

    monkeypatch.setattr(DominantMerger, "_look_at", awaited)
    monkeypatch.setattr(DominantMerger, "close", counted)
    play(replace(world, is_merging=True), max_examples=30)
    assert used["steps"] > 0 < used["copies"], "what is drawn dominates now and then"


def play(world: World, max_examples: int) -> None:
    class Machine(EngineMachine):
        pass

    Machine.world = world
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


# ----------------------------------------------------------------------------------------------- verbs in other threads


@pytest.mark.parametrize("is_contended", [False, True])
def test_verbs_in_threads_beside_the_steps(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_contended: bool
) -> None:
    """Three threads load, reload, move and unload adapters of their own while requests for all of them run."""
    largest = max(world.nbytes.values())
    lora = LoRAConfig(adapter_memory_bytes=2 * largest, host_memory_bytes=3 * largest, aging_steps=8)
    shared: dict[str, object] = {}
    if is_contended:  # one memory that is too small for the KV cache and the adapters together
        monkeypatch.setattr(memory_plan, "CHUNK_BYTES", 2 * KV_BLOCK_BYTES)
        lora = replace(lora, adapter_floor=largest)
        shared = {"device_memory": 3 * largest + 12 * KV_BLOCK_BYTES, "block_size": BLOCK_SIZE}
    driver = Driver(world.base, lora, max_model_len=64, max_num_seqs=6, max_num_batched_tokens=24, **shared)
    driver.engine.adapters._residency.tiers.host.pool.poison()
    content_of = {digest_of(driver, path): name for name, path in world.contents.items()}
    errors: list[BaseException] = []
    threads = [threading.Thread(target=churn, args=(driver, world, tmp_path, i, errors)) for i in range(3)]
    for thread in threads:
        thread.start()
    rng, asked = Random(0), []
    while any(thread.is_alive() for thread in threads):
        with suppress(AdapterNotFoundError):
            asked.append(ask_at_random(driver, world, content_of, rng))
        driver.step(rng.randint(1, 3))
        driver.check_integrity()
    driver.finish(max_steps=5000)
    assert errors == []
    failed = [driver.errors[one.request_id] for one in asked if one.request_id in driver.errors]
    assert all(isinstance(error, (AdapterNoRoomError, *SOURCE_ERRORS)) for error in failed), failed
    served = [one for one in asked if one.request_id not in driver.errors]
    assert len(served) > len(asked) // 4
    for one in served:
        assert driver.tokens(one.request_id) == one.expected, f"{one} said something else"
    for name in driver.registry.names():
        driver.registry.unload(name)
    driver.step()
    driver.check_idle()
    assert driver.engine.adapters.report().tier("host").used_bytes == 0
    driver.close()


def digest_of(driver: Driver, path: Path) -> str:
    driver.registry.load("probe", str(path))
    digest = driver.registry.resolve("probe").adapter_digest
    driver.registry.unload("probe")
    return digest


def ask_at_random(driver: Driver, world: World, content_of: Mapping[str, str], rng: Random) -> Asked:
    name = rng.choice([None, *(f"{i}-{j}" for i in range(3) for j in range(2))])
    prompt, num_tokens = rng.randrange(4), rng.randint(1, NUM_TOKENS)
    request_id = driver.submit(world.prompts[prompt], name, max_tokens=num_tokens)
    parts = () if name is None else ((name, content_of[driver._refs[request_id][0].adapter_digest]),)
    expected = world.expected[tuple(content for _, content in parts)][prompt]
    return Asked(request_id, parts, expected[:num_tokens])


def churn(driver: Driver, world: World, root: Path, index: int, errors: list[BaseException]) -> None:
    """What one operator does to two names, in an order of its own."""
    rng = Random(index)
    registry = driver.registry
    try:
        for _ in range(100):
            name = f"{index}-{rng.randrange(2)}"
            shutil.copytree(world.contents[rng.choice(list(world.contents))], root / name, dirs_exist_ok=True)
            with suppress(AdapterNoRoomError):
                registry.load(name, str(root / name), load_inplace=True)
            for verb in rng.sample(["preload", "evict", "evict", "pin", "unpin", "unload"], k=2):
                with suppress(AdapterNoRoomError, AdapterNotFoundError, *SOURCE_ERRORS):
                    getattr(registry, verb)(name)
    except BaseException as error:
        errors.append(error)
