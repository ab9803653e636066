"""An engine that launches a step before it knows the tokens of the last one: clients get the same as without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from loraplex import LLM, LoRAConfig, LoRARequest, SamplingParams
from loraplex.core import TokenLogprobs
from loraplex.engine.model_runner import StepHandle
from loraplex.engine.schedule_plan import SampledToken, SchedulePlan
from loraplex.errors import AdapterFaultError, DeviceLostError, EngineError
from loraplex.kernels import device_ranking
from loraplex.metrics import MemoryMode
from tests.engine.driver import Driver
from tests.engine.rules_bench import NAMES, Asked, Bench, OpenDriver, loaded
from tests.engine.test_sampler_beside_host import NothingWaits
from tests.fixtures import VOCAB_SIZE

KV_BLOCK_BYTES = 4 * 2 * 16 * 16 * 2 * 2  # fp32, K and V, 16 tokens, head_dim 16, 2 heads, 2 layers


@pytest.fixture
def driver(open_driver: OpenDriver, bench: Bench) -> Driver:
    return loaded(open_driver(look_ahead=True), bench)


# -------------------------------------------------------------------------------------------------- any mix of requests


@dataclass(frozen=True)
class Ask:
    """A request of the property test: before which step it comes, and before which the client leaves."""

    arrival: int
    name: str | None
    prompt: tuple[int, ...]
    max_tokens: int
    params: Mapping[str, Any] = field(default_factory=dict)
    leaves_at: int | None = None


PARAMS: tuple[Mapping[str, Any], ...] = (
    {},
    {"logprobs": 2},
    {"temperature": 1.0, "seed": 3, "logprobs": 0},
    {"temperature": 1.3, "seed": 4, "top_p": 0.9},
    {"temperature": 0.8, "seed": 5, "top_k": 7, "min_p": 0.01},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 1.0, "seed": 6, "repetition_penalty": 1.4},
    {"logit_bias": {7: 3.0}, "logprobs": 1},
    {"prompt_logprobs": 1},
    {"stop_token_ids": tuple(range(0, VOCAB_SIZE, 9)), "temperature": 1.0, "seed": 8},
    {"stop_token_ids": tuple(range(0, VOCAB_SIZE, 8)), "min_tokens": 4},
    {"ignore_eos": False, "logit_bias": {1: 6.0}, "temperature": 1.0, "seed": 9},  # 1 is the end of sequence
)

ASKS = st.builds(
    Ask,
    arrival=st.integers(0, 10),
    name=st.sampled_from([None, *NAMES]),
    prompt=st.builds(
        lambda n, shift: tuple((shift * 7 + i) % 200 + 3 for i in range(n)), st.integers(1, 40), st.integers(0, 2)
    ),
    max_tokens=st.sampled_from([1, 2, 5, 12]),
    params=st.sampled_from(PARAMS),
    leaves_at=st.none() | st.none() | st.integers(1, 16),
)
HARD = [Ask(i // 2, NAMES[i % 4], tuple(range(3, 33)), 24, {}, None) for i in range(8)]
"""More than two adapters and little KV at any time: requests must be paused, and preempted where KV is little."""

Answer = tuple[tuple[int, ...], str | None, int | str | None, Any, Any]


def run(driver: Driver, asks: list[Ask]) -> dict[int, Answer | str]:
    """What each said, or its error; '' for those that left."""
    ids: dict[int, str] = {}
    for step in range(max(max(ask.arrival, ask.leaves_at or 0) for ask in asks) + 1):
        for index, ask in enumerate(asks):
            if ask.arrival == step:
                params = {**ask.params, "max_tokens": ask.max_tokens}
                params["min_tokens"] = min(ask.max_tokens, params.get("min_tokens", 0))
                ids[index] = driver.submit(ask.prompt, ask.name, **params)
            if ask.leaves_at == step and ids.get(index) in driver.running_ids:
                driver.abort(ids[index])
        driver.advance()
        driver.check_integrity()
    driver.finish(max_steps=4000)
    driver.check_idle()
    answers: dict[int, Answer | str] = {}
    for index, request_id in ids.items():
        if asks[index].leaves_at is not None:
            answers[index] = ""
        elif request_id in driver.errors:
            answers[index] = repr(driver.errors[request_id])
        else:
            output = driver.outputs[request_id]
            said = output.outputs[0]
            answers[index] = (
                said.token_ids,
                said.finish_reason,
                said.stop_reason,
                rounded(said.logprobs),
                rounded(output.prompt_logprobs),
            )
    return answers


def rounded(logprobs: tuple[TokenLogprobs | None, ...] | None) -> object:
    """Batches of other sizes may differ in the last bits where stock torch runs."""
    return logprobs and [
        each and {i: (pytest.approx(e.logprob, abs=1e-4), e.rank) for i, e in each.items()} for each in logprobs
    ]


def one_driver(bench: Bench, look_ahead: bool, num_kv_blocks: int) -> Driver:
    """Room for two of the four adapters and little KV."""
    return loaded(
        Driver(
            bench.base,
            LoRAConfig(adapter_memory_bytes=2 * bench.nbytes, aging_steps=8),
            look_ahead=look_ahead,
            max_model_len=64,
            kv_cache_memory_bytes=num_kv_blocks * KV_BLOCK_BYTES,
            max_num_seqs=4,
            max_num_batched_tokens=24,
        ),
        bench,
    )


@pytest.fixture(scope="module", params=[4, 12], ids=["little KV", "more KV"])
def both(bench: Bench, request: pytest.FixtureRequest) -> Iterator[tuple[Driver, Driver]]:
    drivers = one_driver(bench, False, request.param), one_driver(bench, True, request.param)
    yield drivers
    for driver in drivers:
        driver.close()


@pytest.mark.slow
@given(asks=st.lists(ASKS, min_size=1, max_size=9))
@example(asks=HARD)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_mix_has_the_outputs_of_a_step_at_a_time(both: tuple[Driver, Driver], asks: list[Ask]) -> None:
    plain, ahead = both
    assert run(ahead, asks) == run(plain, asks)


def test_the_mix_was_hard(both: tuple[Driver, Driver]) -> None:
    """The property test's example: requests gave way, shared prefixes, and adapters left, with look-ahead."""
    again = [Ask(arrival, NAMES[0], HARD[0].prompt, 1, {}, None) for arrival in (0, 20)]
    run(both[1], HARD)
    run(both[1], again)
    stats = both[1].stats
    assert stats.num_prefix_hit_tokens > 0
    assert sum(stats.memory.evictions.values()) > 0
    assert stats.num_pauses > 0
    if stats.memory.num_kv_blocks == 4:
        assert stats.num_preemptions > 0


# -------------------------------------------------------------------------------------------- when what is launched


class LateRunner:
    """Stands before an engine's runner: notes launches and results in order, and may spoil them."""

    def __init__(self, driver: Driver) -> None:
        self._launch = driver.engine._runner.launch
        self.calls: list[tuple[str, int]] = []
        self.launch_errors: dict[int, list[Exception]] = {}  # step_id -> what its launches raise, one after the other
        self.result_errors: dict[int, list[Exception]] = {}
        self.spoil: Callable[[int, dict[str, SampledToken]], None] = lambda *_: None
        driver.engine._runner.launch = self.launch  # type: ignore[method-assign, assignment]

    def launch(self, plan: SchedulePlan) -> LateHandle:
        self.calls.append(("launch", plan.step_id))
        if errors := self.launch_errors.get(plan.step_id):
            raise errors.pop(0)
        return LateHandle(self, plan.step_id, self._launch(plan))


@dataclass
class LateHandle:
    runner: LateRunner
    step_id: int
    handle: StepHandle

    def result(self) -> dict[str, SampledToken]:
        self.runner.calls.append(("result", self.step_id))
        if errors := self.runner.result_errors.get(self.step_id):
            raise errors.pop(0)
        tokens = dict(self.handle.result())
        self.runner.spoil(self.step_id, tokens)
        return tokens


def test_the_next_step_is_launched_before_the_last_ones_result_is_asked_for(driver: Driver, bench: Bench) -> None:
    runner = LateRunner(driver)
    asked = [Asked(driver, bench, name) for name in (None, "one", "two")]
    while not runner.calls:  # the adapters are loaded
        driver.advance()
    driver.finish()
    for each in asked:
        each.check()
    first, last = runner.calls[0][1], runner.calls[-1][1]
    assert runner.calls == [
        ("launch", first),
        *(call for step in range(first + 1, last + 1) for call in (("launch", step), ("result", step - 1))),
        ("result", last),
    ]


def test_without_look_ahead_each_result_is_asked_for_at_once(open_driver: OpenDriver, bench: Bench) -> None:
    driver = loaded(open_driver(), bench)  # a CPU's default
    runner = LateRunner(driver)
    Asked(driver, bench, None)
    driver.finish()
    steps = sorted({step for _, step in runner.calls})
    assert runner.calls == [call for step in steps for call in (("launch", step), ("result", step))]


def test_memory_is_told_of_every_step_in_flight(driver: Driver, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    in_flight: set[int] = set()
    most = 0
    adapters = driver.engine.adapters
    launched, committed = adapters.step_launched, adapters.step_committed

    def launch(step_id: int) -> None:
        nonlocal most
        in_flight.add(step_id)
        most = max(most, len(in_flight))
        launched(step_id)

    def commit(step_id: int) -> None:
        in_flight.remove(step_id)
        committed(step_id)

    monkeypatch.setattr(adapters, "step_launched", launch)
    monkeypatch.setattr(adapters, "step_committed", commit)
    Asked(driver, bench, "one")
    Asked(driver, bench, None)
    driver.finish()
    assert (most, in_flight) == (2, set())


def test_without_memory_to_move_kv_a_step_runs_later(
    driver: Driver, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = Asked(driver, bench, None)

    def vacate(num_chunks: int, _: object) -> int:
        monkeypatch.setattr(driver.engine._blocks, "_num_owed", 0)
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")

    monkeypatch.setattr(driver.engine._blocks, "_num_owed", 1)
    monkeypatch.setattr(driver.engine._blocks, "vacate", vacate)
    driver.finish()
    each.check()


def test_kv_is_moved_only_while_no_step_is_in_flight(
    driver: Driver, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = Asked(driver, bench, None)
    driver.advance()
    assert len(driver.engine._flights) == 1
    with pytest.raises(AssertionError, match="in flight"):
        driver.engine.vacate_kv(1)
    vacated: list[int] = []
    monkeypatch.setattr(driver.engine._blocks, "_num_owed", 1)

    def vacate(num_chunks: int, _: object) -> int:
        assert len(driver.engine._flights) == 0
        monkeypatch.setattr(driver.engine._blocks, "_num_owed", 0)
        vacated.append(num_chunks)
        return 0

    monkeypatch.setattr(driver.engine._blocks, "vacate", vacate)
    driver.advance()
    assert vacated == [1]
    driver.finish()
    each.check()


def test_moved_kv_is_what_it_was(driver: Driver) -> None:
    """All blocks are read before any is written."""
    runner = driver.engine._runner
    before = runner._kv[:4].normal_().clone()
    runner.move_kv_blocks([0, 1, 3], [1, 2, 0])
    assert torch.equal(runner._kv[:4], before[[3, 0, 1, 3]])


def test_care_waits_for_the_step_in_flight(driver: Driver, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    each, caretaker = Asked(driver, bench, None), driver.engine._caretaker
    driver.advance()
    num_in_flight: list[int] = []
    monkeypatch.setattr(caretaker.monitor, "tick", lambda: num_in_flight.append(len(driver.engine._flights)))
    monkeypatch.setattr(type(caretaker), "is_due", False)
    driver.advance()
    assert num_in_flight == []
    monkeypatch.setattr(type(caretaker), "is_due", True)
    driver.advance()
    assert num_in_flight == [0]
    driver.finish()
    each.check()


def test_an_alarm_makes_care_due(driver: Driver, bench: Bench) -> None:
    each = Asked(driver, bench, None)
    driver.advance()
    driver.engine._caretaker.monitor.alarm("a test")
    assert driver.engine._caretaker.is_due
    driver.advance()
    assert driver.engine.memory_report().mode is MemoryMode.LOW_MEMORY
    driver.finish()
    each.check()


@pytest.mark.parametrize("is_beside_host", [False, True])
def test_a_launch_looks_at_no_value(bench: Bench, monkeypatch: pytest.MonkeyPatch, is_beside_host: bool) -> None:
    """Stock torch on CPU tensors, as if they were beside the host: prompts, chunks, adapters, pending tokens, all
    draws."""
    driver = loaded(
        Driver(bench.base, look_ahead=True, lora_backend="torch", max_model_len=128, max_num_batched_tokens=64), bench
    )
    launch = driver.engine._runner.launch

    def watched(plan: SchedulePlan) -> StepHandle:
        with NothingWaits():
            return launch(plan)

    if is_beside_host:
        monkeypatch.setattr(device_ranking, "runs_beside_host", lambda _: True)
        monkeypatch.setattr(driver.engine._runner, "launch", watched)
    asked = [Asked(driver, bench, name) for name in (None, "one", "two")]
    for index, params in enumerate(PARAMS):
        driver.submit([3 + index] * (index + 1), (None, "one")[index % 2], **{"max_tokens": 6, **params})
    driver.finish()
    for each in asked:
        each.check()
    driver.check_idle()
    driver.close()


# ----------------------------------------------------------------------------------------------------- steps that fail


@pytest.mark.parametrize("where", ["launch", "result"])
@pytest.mark.parametrize("which", [1, 3, 15])
def test_a_step_without_memory_runs_again_and_so_does_the_next(
    driver: Driver, bench: Bench, where: str, which: int
) -> None:
    """Also for requests that draw at random, with log probabilities."""
    runner = LateRunner(driver)
    asked = [Asked(driver, bench, name) for name in (None, "one")]
    drawn = driver.submit([5, 6, 7], None, temperature=1.0, seed=3, logprobs=1, prompt_logprobs=0, max_tokens=12)
    driver.advance()
    errors = runner.launch_errors if where == "launch" else runner.result_errors
    errors[driver.engine._scheduler._turns.step_id + which] = [MemoryError("no memory")]
    driver.finish()
    for each in asked:
        each.check()
    again = driver.submit([5, 6, 7], None, temperature=1.0, seed=3, logprobs=1, prompt_logprobs=0, max_tokens=12)
    driver.finish()
    first, second = driver.outputs[drawn], driver.outputs[again]
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert rounded(first.prompt_logprobs) == rounded(second.prompt_logprobs)
    assert rounded(first.outputs[0].logprobs) == rounded(second.outputs[0].logprobs)
    assert not errors.pop(next(iter(errors)))
    assert driver.engine.memory_report().mode is MemoryMode.LOW_MEMORY


@pytest.mark.parametrize("where", ["launch", "result"])
def test_a_broken_step_ends_its_requests_after_the_tokens_before_it(driver: Driver, bench: Bench, where: str) -> None:
    runner = LateRunner(driver)
    asked = Asked(driver, bench, None)
    for _ in range(4):
        driver.advance()
    errors = runner.launch_errors if where == "launch" else runner.result_errors
    errors[driver.engine._scheduler._turns.step_id + 1] = [RuntimeError("broken")]
    driver.advance()  # launches it, and commits the fourth step
    late = Asked(driver, bench, None, which=1)
    driver.finish()
    assert isinstance(driver.errors[asked.request_id], EngineError)
    assert "broken" in str(driver.errors[asked.request_id])
    late.check()


@pytest.mark.parametrize("error", [RuntimeError("broken"), MemoryError("no memory")])
def test_after_a_step_that_failed_the_kernels_begin_anew(
    driver: Driver, bench: Bench, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the device has ended all that was launched, and before anything else is."""
    runner, calls = driver.engine._runner, LateRunner(driver)
    told: list[tuple[str, int]] = []
    monkeypatch.setattr(runner, "wait", lambda: told.append(("wait", len(calls.calls))))
    monkeypatch.setattr(runner._model._ops, "reset_workspace", lambda: told.append(("reset", len(calls.calls))))
    Asked(driver, bench, None)
    driver.advance()
    calls.launch_errors[driver.engine._scheduler._turns.step_id + 1] = [error]
    assert not told
    driver.finish()
    failed = 3  # launches, and the result of the first
    assert told == [("wait", failed), ("reset", failed)]


def test_a_lost_device_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(bench.base, look_ahead=True, max_model_len=64)
    runner = LateRunner(driver)
    driver.submit([3, 4, 5], max_tokens=8)
    driver.advance()
    monkeypatch.setattr("loraplex.engine.engine.is_device_lost", lambda _: True)
    runner.result_errors[driver.engine._scheduler._turns.step_id] = [RuntimeError("gone")]
    with pytest.raises(DeviceLostError, match="gone"):
        driver.advance()
    waits: list[str] = []
    monkeypatch.setattr(driver.engine._runner, "wait", lambda: waits.append("for what was launched"))
    driver.close()
    assert waits, "before it lets go of memory"


def test_an_adapter_at_fault_ends_its_requests_although_its_next_step_runs(driver: Driver, bench: Bench) -> None:
    runner = LateRunner(driver)
    for name in (None, "one", "two"):  # from here on all are on the device
        Asked(driver, bench, name)
    driver.finish()
    good = [Asked(driver, bench, name) for name in (None, "two")]
    bad = [Asked(driver, bench, "one"), Asked(driver, bench, "one", which=1)]
    for _ in range(3):
        driver.advance()
    fault = SampledToken(0, error=AdapterFaultError("NaN"), has_odd_logits=True)

    def spoil(_: int, tokens: dict[str, SampledToken]) -> None:
        tokens.update({name: fault for name in tokens if name.startswith(bad[0].request_id)})

    runner.spoil = spoil
    diagnosis = driver.engine._caretaker._diagnosis
    diagnosis.what_is_wrong = lambda digest, lora_slot: "it is odd"  # type: ignore[method-assign]
    driver.advance()
    driver.check_integrity()
    assert [each.request_id in driver.errors for each in bad] == [True, False], (
        "the other goes on until it was diagnosed"
    )
    driver.advance()
    driver.check_integrity()
    assert {type(driver.errors[each.request_id]) for each in bad} == {AdapterFaultError}
    driver.finish()
    for each in good:
        each.check()


# --------------------------------------------------------------------------------------------------------------- fronts


@pytest.fixture
def llm(bench: Bench) -> Iterator[LLM]:
    with LLM(str(bench.base), max_model_len=160, look_ahead=True) as llm:
        yield llm
        assert not llm.engine.has_unfinished
        llm.check_integrity()


def test_generate_leaves_nothing_in_flight(llm: LLM, bench: Bench) -> None:
    prompt = bench.cases[None][0].prompt_token_ids
    one = LoRARequest("one", 1, str(bench.adapters["one"]))
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([list(prompt)] * 2, greedy, lora_request=[None, one])
    assert [output.outputs[0].token_ids for output in outputs] == [
        case.output_token_ids[:12] for case in (bench.cases[None][0], bench.cases[bench.adapters["one"]][0])
    ]
    assert not llm.engine.has_unfinished
    text = outputs[0].outputs[0].text
    stopped = llm.generate(
        [list(prompt)], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop=[text[2:4]])
    )
    assert stopped[0].outputs[0].finish_reason == "stop"
    assert not llm.engine.has_unfinished
    llm.pin_lora(1)
    assert llm.remove_lora(1)


def test_step_by_step_nothing_is_in_flight_for_whose_memory_a_verb_would_wait(llm: LLM, bench: Bench) -> None:
    prompt = list(bench.cases[None][0].prompt_token_ids)
    llm.submit(prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    while llm.has_unfinished:
        llm.step()
        assert len(llm.engine._flights) == 0


def test_a_profile_counts_every_token_once(driver: Driver, bench: Bench) -> None:
    Asked(driver, bench, None)
    driver.finish()
    driver.engine.start_profile()
    before = driver.stats.num_generated_tokens
    for name in (None, "one"):
        Asked(driver, bench, name)
    driver.finish()
    profile = driver.engine.stop_profile()
    assert sum(sums.num_tokens for sums in profile.sums) == driver.stats.num_generated_tokens - before
    seconds = driver.stats.step_times.seconds
    for part in ("forward", "commit"):
        assert 0 < sum(sums.seconds[part] for sums in profile.sums) <= seconds[part]


def test_a_client_leaves_while_a_step_runs_for_it(driver: Driver, bench: Bench) -> None:
    """Its references return with the commit, and no other request notices."""
    staying, leaving = Asked(driver, bench, "two"), Asked(driver, bench, "one")
    while driver.stats.num_running < 2:
        driver.advance()
    driver.abort(leaving.request_id)
    driver.check_integrity()
    driver.advance()
    driver.check_integrity()
    driver.finish()
    staying.check()
