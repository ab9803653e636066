"""The adapter that dominates is merged into a copy of weights while the engine runs, and let go again: tokens are those
of transformers + peft before, with and after it, and whatever else is served keeps its bits."""

from __future__ import annotations

import gc
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from loraplex import LLM, SamplingParams
from loraplex.adapters.merging.dominance import DominanceRule
from loraplex.config import EngineConfig, LoRAConfig
from loraplex.core import AdapterChoice, AdapterMix
from loraplex.engine.batch import sole_content
from loraplex.errors import ConfigError
from loraplex.events import EventKind
from loraplex.models import dominant, merged_layers
from loraplex.models.dominant import DominantMerger
from tests.engine.driver import Driver
from tests.fixtures import ADAPTER_OPTIONS, KIND_OPTIONS, GreedyCase, ModelZoo

pytestmark = pytest.mark.slow

NUM_TOKENS = 32
WINDOW = 4
LONG_S = 60.0

KINDS = {
    **{name: ("LoraConfig", options) for name, options in ADAPTER_OPTIONS.items() if name != "one layer"},
    **{name: value for name, value in KIND_OPTIONS.items() if name != "LoKr of a full factor"},
}
OWN = (
    *("LoRA of the embedding", "saved norms", "saved linears", "trained tokens", "added tokens, saved"),
    "trained tokens, LoRA of the head",
)
FAMILIES = ("llama", "qwen2", "qwen3")
"""Without biases; with biases of q, k and v; with norms of q and k."""


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps alone are enough, however long they take, and so is an adapter of one linear."""
    monkeypatch.setattr(dominant, "DominanceRule", lambda: DominanceRule(window=WINDOW, bytes_per_s=float("inf")))
    monkeypatch.setattr(dominant, "MIN_GAIN", 0.0)


class Served:
    """A driver whose dominant adapter is merged, and what it says."""

    def __init__(self, base: Path, **settings: Any) -> None:
        lora = {name: settings.pop(name) for name in list(settings) if name in LoRAConfig.__dataclass_fields__}
        config = LoRAConfig(**{"merge_dominant_adapter": True, **lora})
        self.driver = Driver(base, config, **{"max_model_len": 160, "enable_prefix_caching": False, **settings})

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.close()

    @property
    def merger(self) -> DominantMerger:
        merger = self.driver.engine._runner.merger
        assert merger is not None
        return merger

    @property
    def merged(self) -> str:
        """The names of what is merged."""
        ids = self.driver.engine.memory_report().merged
        return "+".join(name for name, ref in self.driver.registry.refs().items() if ref.adapter_id in ids)

    def load(self, name: str, path: Path) -> None:
        self.driver.registry.load(name, str(path))

    def say(self, prompt: Sequence[int], name: AdapterChoice = None, **params: Any) -> tuple[int, ...]:
        request_id = self.driver.submit(prompt, name, **{"max_tokens": NUM_TOKENS, **params})
        self.driver.finish()
        return self.driver.tokens(request_id)

    def scores(self, prompt: Sequence[int], name: AdapterChoice = None, max_tokens: int = 8) -> Any:
        """Log probabilities to the last bit, of the prompt too. Fewer tokens than WINDOW let nothing dominate."""
        request_id = self.driver.submit(prompt, name, max_tokens=max_tokens, logprobs=3, prompt_logprobs=1)
        self.driver.finish()
        output = self.driver.outputs[request_id]
        return output.outputs[0].logprobs, output.prompt_logprobs

    def steps_of(self, prompt: Sequence[int], name: AdapterChoice = None) -> int:
        """Merged steps of one request."""
        before = self.merger.num_steps
        self.say(prompt, name)
        return self.merger.num_steps - before

    def wait(self) -> None:
        """Until no copy is in the making; the next step has it."""
        job = self.merger._job
        assert job is None or job.is_done.wait(LONG_S)

    def merge(self, name: str) -> None:
        """Let an adapter dominate until it is merged; a copy for another one, in the making, ends before."""
        for _ in range(2):
            self.say(list(range(3, 12)), name, max_tokens=2 * WINDOW)
            self.wait()
        self.say(list(range(3, 12)), name, max_tokens=2)
        assert name in self.merged.split("+")

    def unmerge(self) -> None:
        """Let the base dominate."""
        self.say(list(range(3, 12)), max_tokens=2 * WINDOW)
        assert self.merged == ""


@pytest.fixture(scope="module")
def base(zoo: ModelZoo) -> Path:
    return zoo.base("llama")


@pytest.fixture(scope="module")
def paths(zoo: ModelZoo, base: Path) -> dict[str, Path]:
    options = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
    return {name: zoo.adapter(base, peft.LoraConfig(**options), seed=80 + at) for at, name in enumerate("ab")}


@pytest.fixture
def served(base: Path, paths: dict[str, Path]) -> Iterator[Served]:
    with Served(base) as served:
        for name, path in paths.items():
            served.load(name, path)
        yield served
        served.driver.engine.check_integrity()


PROMPT = list(range(40, 52))


# -------------------------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_each_kind_merged_says_what_peft_says(zoo: ModelZoo, family: str) -> None:
    """Each is the dominant one in turn: unmerged at first, merged in the middle of a request, and merged as a whole."""
    base = zoo.base(family)
    made: dict[str, Path] = {}
    for name, (config_class, options) in KINDS.items():
        made[name] = zoo.adapter(base, getattr(peft, config_class)(**options, task_type="CAUSAL_LM"))
    made |= {name: zoo.own_adapter(base, name) for name in OWN}
    with Served(base) as served:
        for name, path in made.items():
            served.load(name, path)
            case = zoo.fit_case(base, path, num_tokens=NUM_TOKENS)
            wanted = case.output_token_ids
            assert served.say(case.prompt_token_ids, name) == wanted, name
            served.wait()
            assert served.say(case.prompt_token_ids, name) == wanted, name
            served.wait()
            assert served.steps_of(case.prompt_token_ids, name) == NUM_TOKENS
            assert served.say(case.prompt_token_ids, name) == wanted, name
            assert served.merged == name
        assert served.merger.num_merges == len(made)
        case = zoo.fit_case(base, num_tokens=NUM_TOKENS)
        assert served.say(case.prompt_token_ids) == case.output_token_ids


def test_a_request_goes_on_when_its_adapter_is_merged_and_unmerged(
    zoo: ModelZoo, base: Path, paths: dict[str, Path]
) -> None:
    """Chunks of its prompt, too; base rows that come and go make steps unmerged."""
    long, short = case_of(zoo, base, paths["a"], 100), case_of(zoo, base, None, 12)
    with Served(base, max_num_batched_tokens=64) as served:
        served.load("a", paths["a"])
        ids, counts = [], []
        ids.append(served.driver.submit(long.prompt_token_ids, "a", max_tokens=NUM_TOKENS))
        for _ in range(3):
            before = served.merger.num_steps
            served.driver.step(6)
            served.wait()
            counts.append(served.merger.num_steps - before)
            ids.append(served.driver.submit(short.prompt_token_ids, max_tokens=3))
            served.driver.step(2)
        served.driver.finish()
        assert served.driver.tokens(ids[0]) == long.output_token_ids
        assert counts[0] == 0 < counts[-1]
        assert all(served.driver.tokens(each) == short.output_token_ids[:3] for each in ids[1:])
        assert served.merger.num_merges > 0


def case_of(zoo: ModelZoo, base: Path, path: Path | None, length: int) -> GreedyCase:
    return zoo.fit_case(base, path, length=length, num_tokens=NUM_TOKENS)


def test_a_step_ahead(zoo: ModelZoo, base: Path, paths: dict[str, Path]) -> None:
    case = case_of(zoo, base, paths["a"], 12)
    with Served(base, look_ahead=True) as served:
        served.load("a", paths["a"])
        served.merge("a")
        assert served.say(case.prompt_token_ids, "a") == case.output_token_ids
        served.unmerge()
        assert served.say(case.prompt_token_ids, "a") == case.output_token_ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_merged_steps_are_those_of_merge_adapter(zoo: ModelZoo, paths: dict[str, Path], dtype: str) -> None:
    """To the bit, in 16 bits too: the same numbers are rounded once."""
    base = zoo.base("llama", dtype=dtype)
    with LLM(str(base), enable_lora=False, merge_adapter=str(paths["a"]), max_model_len=160) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=1)
        (output,) = llm.generate([PROMPT], params)
    with Served(base) as served:
        served.load("a", paths["a"])
        unmerged = served.scores(PROMPT, "a", WINDOW - 1)
        served.merge("a")
        assert served.scores(PROMPT, "a") == (output.outputs[0].logprobs, output.prompt_logprobs)
        served.unmerge()
        assert served.scores(PROMPT, "a", WINDOW - 1) == unmerged, "what was unmerged is as if it had never been merged"


def test_all_else_keeps_its_bits(base: Path, paths: dict[str, Path]) -> None:
    """The base, another adapter, and a mix with the merged one, alone and in one batch with it."""
    mix = AdapterMix((("a", 1.0), ("b", 0.5)))
    found = []
    for is_on in (False, True):
        with Served(base, merge_dominant_adapter=is_on) as served:
            for name, path in paths.items():
                served.load(name, path)
            served.say(PROMPT, "a")
            if is_on:
                served.merge("a")
            alone = [served.scores(PROMPT, choice, WINDOW - 1) for choice in (None, "b", mix)]
            if is_on:
                served.merge("a")
            ids = [
                served.driver.submit(PROMPT, choice, max_tokens=8, logprobs=3) for choice in (None, "b", mix, "a", None)
            ]
            served.driver.finish()
            together = [served.driver.outputs[each].outputs[0].logprobs for each in ids]
            found.append((alone, together))
    assert found[0] == found[1], "also of the merged adapter's row, beside others"
    with_lora_off = Driver(base, is_lora_on=False, max_model_len=160, enable_prefix_caching=False)
    request_id = with_lora_off.submit(PROMPT, None, max_tokens=8, logprobs=3)
    with_lora_off.finish()
    assert with_lora_off.outputs[request_id].outputs[0].logprobs == found[1][1][0]
    with_lora_off.close()


def test_an_alora_is_merged_from_its_invocation_on(zoo: ModelZoo, base: Path) -> None:
    tokens = [17, 3000, 42]
    config = peft.LoraConfig(
        r=8, lora_alpha=16, target_modules="all-linear", alora_invocation_tokens=tokens, task_type="CAUSAL_LM"
    )
    path = zoo.adapter(base, config, seed=83)
    prompt = [*PROMPT, *tokens, 9, 8, 7]
    with Served(base) as served:
        served.load("gated", path)
        unmerged = served.say(prompt, "gated")
        served.wait()
        assert served.steps_of(prompt, "gated") == NUM_TOKENS - 1, "all but the prompt, which has base rows"
        assert served.say(prompt, "gated") == unmerged


# --------------------------------------------------------------------------------------------------- which and how long


def test_only_steps_through_one_adapter_alone_count(served: Served) -> None:
    a, b = (served.driver.registry.refs()[name] for name in "ab")
    for choice in (None, AdapterMix((("a", 0.9),)), AdapterMix((("a", 1.0), ("b", 1.0)))):
        assert contents_of(served, [choice]) == {""}
    assert contents_of(served, [AdapterMix((("a", 1.0),))]) == {a.adapter_digest}, "that is the adapter itself"
    assert contents_of(served, ["a", None]) == {""}
    assert contents_of(served, ["a", "b"]) == {""}
    assert contents_of(served, ["a", "a"]) == {a.adapter_digest}
    assert contents_of(served, ["b"]) == {b.adapter_digest}


def contents_of(served: Served, choices: Sequence[AdapterChoice]) -> set[str]:
    seen: set[str] = set()
    runner = served.driver.engine._runner
    launch = runner.launch

    def watched(plan: Any) -> Any:
        seen.add(sole_content(plan))
        return launch(plan)

    runner.launch = watched  # type: ignore[method-assign]
    for choice in choices:
        served.driver.submit(PROMPT, choice, max_tokens=3)
    served.driver.finish()
    del runner.launch
    return seen


def test_another_dominant_adapter_takes_the_place(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is never room for two: the first copy's memory is back before the second is made."""
    served.merge("a")
    assert served.merger._merged is not None
    layers, alive = weakref.ref(next(iter(served.merger._merged.changed.values()))), []
    write, run_beside = merged_layers.MergePlan.write, dominant._run_beside

    def slowly(run: Callable[..., None], *arguments: Any) -> Any:
        return run_beside(run, *arguments) if arguments else run_beside(lambda: (time.sleep(0.3), run()))

    monkeypatch.setattr(dominant, "_run_beside", slowly)

    def watched(self: Any, rest: Any) -> Any:
        alive.append(layers() is not None)
        return write(self, rest)

    monkeypatch.setattr(merged_layers.MergePlan, "write", watched)
    gc.disable()
    try:
        served.merge("b")
    finally:
        gc.enable()
    assert alive == [False]
    assert served.merged == "b"
    texts = [event.text for event in served.driver.engine.take_events() if event.kind is EventKind.MERGE]
    assert [text.split(",")[0].split(":")[0] for text in texts] == [
        "adapter 'a' is merged into a copy of the weights that it changes",
        "adapter 'a' is no longer merged",
        "adapter 'b' is merged into a copy of the weights that it changes",
    ]


def test_a_copy_is_made_only_after_traffic_that_is_worth_it(
    base: Path, paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dominant, "DominanceRule", lambda: DominanceRule(window=WINDOW, bytes_per_s=1.0))
    with Served(base) as served:
        served.load("a", paths["a"])
        served.say(PROMPT, "a")
        assert served.merger._job is None
        assert served.merger._needed_s > 1e6


def test_a_copy_in_the_making_ends_when_its_adapter_dominates_no_more(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, write = threading.Event(), merged_layers.MergePlan.write

    def slow(self: Any, rest: Callable[[], None]) -> None:
        begun.set()
        while True:
            rest()

    monkeypatch.setattr(merged_layers.MergePlan, "write", slow)
    served.say(PROMPT, "a")
    assert begun.wait(LONG_S)
    assert served.driver.engine.memory_report().tier("merged").used_bytes > 0, "what it takes counts from the start"
    served.say(PROMPT, "b", max_tokens=3)
    served.wait()
    monkeypatch.setattr(merged_layers.MergePlan, "write", write)
    assert served.merger.num_merges == 0
    served.merge("b")


def test_an_engine_that_ends_waits_for_no_copy(base: Path, paths: dict[str, Path]) -> None:
    served = Served(base)
    served.load("a", paths["a"])
    served.say(PROMPT, "a")
    served.driver.close()
    assert served.merger._job is None or served.merger._job.is_done.is_set()


# -------------------------------------------------------------------------------------------------------------- memory


def test_its_bytes_are_known_counted_and_bounded(base: Path, paths: dict[str, Path], served: Served) -> None:
    linears = served.merger._model.linears
    nbytes = sum(4 * each.target.in_features * sum(s.out_features for s in each.target.slices) for each in linears)
    empty = served.driver.engine.memory_report()
    assert (empty.tier("merged").used_bytes, empty.tier("merged").num_adapters, empty.merged) == (0, 0, ())
    served.merge("a")
    report = served.driver.engine.memory_report()
    assert report.tier("merged").used_bytes == nbytes
    assert report.tier("merged").num_adapters == 1
    assert report.merged == (served.driver.registry.refs()["a"].adapter_id,)
    assert report.count("merges") == 1
    assert report.count("merged_steps") > 0
    served.unmerge()
    assert served.driver.engine.memory_report().tier("merged").used_bytes == 0
    with Served(base, merged_memory_bytes=nbytes - 1) as tight:
        tight.load("a", paths["a"])
        for _ in range(4):
            tight.say(PROMPT, "a")
            tight.wait()
        texts = [event.text for event in tight.driver.engine.take_events() if event.kind is EventKind.MERGE]
        assert texts == [
            f"adapter 'a' is not merged: its copy would take {nbytes} bytes, and merged_memory_bytes is {nbytes - 1}"
        ], "it is said once"
        assert tight.merged == ""


def test_a_machine_without_room_is_asked_again_later(
    base: Path, paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dominant, "has_room", lambda nbytes, share: False)
    with Served(base) as served:
        began_s = now_s = served.merger._clock()
        served.merger._clock = lambda: now_s
        served.load("a", paths["a"])
        for _ in range(3):
            served.say(PROMPT, "a")
            served.wait()
        monkeypatch.setattr(dominant, "has_room", lambda nbytes, share: True)
        served.say(PROMPT, "a")
        assert served.merger._job is None, "not before a minute is over"
        now_s = began_s + dominant.RETRY_S + 1
        served.merge("a")
        texts = [event.text for event in served.driver.engine.take_events() if event.kind is EventKind.MERGE]
        assert ["has no room for a copy" in text for text in texts] == [True, False], "it is said once"


def test_low_memory_takes_the_copy(served: Served) -> None:
    served.merge("a")
    nbytes = served.driver.engine.memory_report().tier("merged").used_bytes
    served.driver.engine._caretaker.monitor.alarm("a test")
    served.say(PROMPT, "a")
    assert served.merged == ""
    assert served.driver.engine.memory_report().mode.value == "low_memory"
    (event,) = [each for each in served.driver.engine.take_events() if each.kind is EventKind.MODE]
    assert event.details["released_bytes"] >= nbytes
    served.say(PROMPT, "a")
    assert served.merger._job is None, "not while memory is short"


def test_without_a_thread_no_request_fails(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = served.say(PROMPT, "a")
    served.merge("a")

    def fail(_thread: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    served.unmerge()
    assert served.say(PROMPT, "a") == expected
    assert served.merger._job is None
    monkeypatch.undo()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", ["lora_bias", "saved norms", "IA3", "q and v"])
def test_the_bytes_that_were_planned_are_those_that_it_takes(zoo: ModelZoo, family: str, kind: str) -> None:
    base = zoo.base(family)
    if kind == "saved norms":
        path = zoo.own_adapter(base, kind)
    else:
        config_class, options = KINDS[kind]
        path = zoo.adapter(base, getattr(peft, config_class)(**options, task_type="CAUSAL_LM"))
    with Served(base) as served:
        served.load("a", path)
        served.merge("a")
        assert served.merger._merged is not None
        own = {id(each.weight): each for each in (*served.merger._model.linears, *served.merger._model.norms)}
        biases = {id(each.bias) for each in served.merger._model.linears}
        taken = 0
        for each in served.merger._merged.changed.values():
            weight = each.weight.panels if hasattr(each.weight, "panels") else each.weight
            taken += 0 if id(each.weight) in own else -(-weight.nbytes // 64) * 64
            bias = getattr(each, "bias", None)
            taken += 0 if bias is None or id(bias) in biases else bias.nbytes
        assert taken == served.driver.engine.memory_report().tier("merged").used_bytes > 0


def test_memory_that_cannot_be_had_costs_no_request(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no memory for the copy")

    monkeypatch.setattr(merged_layers.MergePlan, "write", fail)
    expected = served.say(PROMPT, "a")
    served.wait()
    assert served.say(PROMPT, "a") == expected
    (event,) = [each for each in served.driver.engine.take_events() if each.kind is EventKind.MERGE]
    assert event.text == "adapter 'a' is not merged: no memory for the copy"


# --------------------------------------------------------------------------------------------------------------- verbs


def test_unload_takes_the_copy_and_a_clone_keeps_it(served: Served, paths: dict[str, Path]) -> None:
    expected = served.say(PROMPT, "a")
    served.merge("a")
    served.driver.registry.clone("a", "again")
    assert served.merged == "a+again"
    served.driver.registry.unload("a")
    assert served.steps_of(PROMPT, "again") == NUM_TOKENS
    assert served.say(PROMPT, "again") == expected
    served.driver.registry.unload("again")
    served.driver.step()
    served.say(PROMPT, max_tokens=1)
    assert served.driver.engine.memory_report().tier("merged").used_bytes == 0
    served.load("a", paths["a"])
    assert served.say(PROMPT, "a") == expected


def test_unload_while_a_merged_request_runs(served: Served) -> None:
    expected = served.say(PROMPT, "a")
    served.merge("a")
    request_id = served.driver.submit(PROMPT, "a", max_tokens=NUM_TOKENS)
    served.driver.step(3)
    thread = threading.Thread(target=served.driver.registry.unload, args=("a",))
    thread.start()
    served.driver.finish()
    thread.join(LONG_S)
    assert served.driver.tokens(request_id) == expected


def test_reload_in_place_answers_from_the_new_weights(served: Served, paths: dict[str, Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(paths["a"], tmp_path / "x"))
    served.load("x", path)
    old, new = served.say(PROMPT, "x"), served.say(PROMPT, "b")
    served.merge("x")
    request_id = served.driver.submit(PROMPT, "x", max_tokens=NUM_TOKENS)
    served.driver.step(3)
    shutil.copytree(paths["b"], path, dirs_exist_ok=True)
    served.driver.registry.load("x", str(path), load_inplace=True)
    later = served.driver.submit(PROMPT, "x", max_tokens=NUM_TOKENS)
    served.driver.finish()
    assert (served.driver.tokens(request_id), served.driver.tokens(later)) == (old, new)
    served.merge("x")
    assert served.say(PROMPT, "x") == new
    served.driver.registry.move("x")
    assert served.say(PROMPT, "x") == old
    served.merge("x")
    assert served.say(PROMPT, "x") == old


def test_eviction_and_pin_leave_the_copy(served: Served) -> None:
    expected = served.say(PROMPT, "a")
    served.merge("a")
    for verb in ("evict", "evict", "preload", "pin", "unpin"):
        getattr(served.driver.registry, verb)("a")
        assert served.merged == "a"
        assert served.say(PROMPT, "a") == expected
    assert served.steps_of(PROMPT, "a") == NUM_TOKENS


def test_a_vanished_source_is_served_unmerged(served: Served, paths: dict[str, Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(paths["a"], tmp_path / "x"))
    served.load("x", path)
    expected = served.say(PROMPT, "a")
    served.unmerge()
    served.driver.registry.unload("a")
    shutil.rmtree(path)
    for _ in range(3):
        assert served.say(PROMPT, "x") == expected
        served.wait()
    assert served.merged == ""
    texts = [event.text for event in served.driver.engine.take_events() if "is not merged" in event.text]
    assert len(texts) == 1
    assert "adapter 'x' is not merged: " in texts[0]


def test_odd_results_end_the_copy_for_good(served: Served) -> None:
    """A copy that gives NaN costs one request; the adapter itself answers the diagnosis and is served on, unmerged."""
    expected = served.say(PROMPT, "a")
    served.merge("a")
    merged = served.merger._merged
    assert merged is not None
    with torch.inference_mode():
        next(iter(merged.changed.values())).weight.panels.fill_(torch.nan)
    request_id = served.driver.submit(PROMPT, "a", max_tokens=NUM_TOKENS)
    served.driver.finish()
    assert "NaN" in str(served.driver.errors[request_id])
    assert served.merged == ""
    for _ in range(3):
        assert served.say(PROMPT, "a") == expected
        served.wait()
    assert served.merger.num_merges == 1
    assert not served.driver.engine.memory_report().quarantined


def test_quarantine_takes_the_copy(served: Served) -> None:
    served.merge("a")
    adapter_id = served.driver.registry.refs()["a"].adapter_id
    served.driver.engine.adapters.health.quarantine(adapter_id, "a test")
    served.driver.step()
    assert served.merger._merged is None


# ------------------------------------------------------------------------------------------------------------- settings


def test_what_cannot_have_it_is_refused_by_name(base: Path) -> None:
    with pytest.raises(ConfigError, match=r"merge_dominant_adapter needs the base weights as they are.*int8"):
        EngineConfig(model=str(base), quantization="int8", lora=LoRAConfig(merge_dominant_adapter=True))
    for backend in ("torch", "reference"):
        with pytest.raises(ConfigError, match="merge_dominant_adapter needs the native kernels of a CPU"):
            Served(base, lora_backend=backend)
    with pytest.raises(ConfigError, match="merged_memory_bytes must be > 0, got 0"):
        LoRAConfig(merged_memory_bytes=0)


def test_an_adapter_of_few_linears_is_not_worth_a_copy(
    zoo: ModelZoo, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dominant, "MIN_GAIN", 0.01)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], layers_to_transform=[0])
    with Served(base) as served:
        served.load("q", zoo.adapter(base, config, seed=84))
        served.say(PROMPT, "q")
        served.wait()
        served.say(PROMPT, "q")
        (event,) = [each for each in served.driver.engine.take_events() if each.kind is EventKind.MERGE]
        assert event.text == "adapter 'q' is not merged: it changes 12% of the linears, which is too few to gain much"


def test_a_profile_times_the_operators_of_merged_steps(served: Served) -> None:
    served.merge("a")
    seconds = served.driver.engine._profiler.seconds
    assert "gemm" not in seconds
    served.driver.engine.start_profile()
    assert served.steps_of(PROMPT, "a") == NUM_TOKENS
    seconds = served.driver.engine._profiler.seconds
    assert seconds["gemm"] > 0
    assert seconds["lora"] == 0, "merged steps have no operators of LoRA"
    served.driver.engine.stop_profile()
    served.say(PROMPT, "a")
    assert served.driver.engine._profiler.seconds["gemm"] == seconds["gemm"]


def test_off_is_off(base: Path, paths: dict[str, Path]) -> None:
    with Served(base, merge_dominant_adapter=False) as served:
        served.load("a", paths["a"])
        served.say(PROMPT, "a")
        assert served.driver.engine._runner.merger is None
        report = served.driver.engine.memory_report()
        assert "merged" not in [tier.tier for tier in report.tiers]
        assert "merges" not in report.counters
