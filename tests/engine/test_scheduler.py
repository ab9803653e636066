"""The scheduler over fakes: budgets, order, chunks, preemption, adapters that load, wait for room and age."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.core import AcquireResult, FinishReason, Request, SamplingParams, TokenOutput, WaitsFor
from loraplex.engine.schedule_plan import RequestStatus, SampledToken, SchedulePlan
from loraplex.engine.scheduler import Scheduler
from loraplex.errors import AdapterUnavailableError, EngineError
from loraplex.kvcache.allocator import KVBlockAllocator

EOS = 99


class FakeResidency:
    """`room` adapters fit; ids in `loading` are not there yet; ids in `broken` raise."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.loading: set[int] = set()
        self.broken: set[int] = set()
        self.refs: dict[int, int] = {}
        self.prefetched: list[int] = []

    def try_acquire(self, adapter_id: int) -> AcquireResult:
        if adapter_id in self.broken:
            raise AdapterUnavailableError(f"adapter {adapter_id} is gone")
        if adapter_id in self.loading:
            return AcquireResult(None, WaitsFor.LOAD)
        if adapter_id not in self.refs and len(self.refs) >= self.room:
            return AcquireResult(None, WaitsFor.ROOM)
        self.refs[adapter_id] = self.refs.get(adapter_id, 0) + 1
        return AcquireResult(adapter_id)

    def release(self, adapter_id: int) -> None:
        self.refs[adapter_id] -= 1
        if self.refs[adapter_id] == 0:
            del self.refs[adapter_id]

    def prefetch(self, adapter_id: int) -> None:
        self.prefetched.append(adapter_id)

    def victims_for(self, adapter_id: int) -> Sequence[int]:
        return list(self.refs)[:1]


class Harness:
    """A scheduler whose model always answers token 5 (or what `script` says)."""

    def __init__(
        self, *, num_blocks: int = 64, seqs: int = 8, tokens: int = 64, room: int = 100, aging_steps: int = 8
    ) -> None:
        self.blocks = KVBlockAllocator(num_blocks, 8)
        self.residency = FakeResidency(room)
        self.scheduler = Scheduler(
            self.blocks,
            self.residency,
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            max_model_len=num_blocks * 8,
            aging_steps=aging_steps,
        )
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.script: dict[str, int] = {}
        self.plans: list[SchedulePlan] = []

    def add(self, request_id: str, length: int = 4, adapter: int | None = None, max_tokens: int = 4, **params) -> None:
        self.scheduler.add(
            Request(
                request_id=request_id,
                prompt_token_ids=tuple(range(length)),
                sampling_params=SamplingParams(max_tokens=max_tokens, **params),
                max_tokens=max_tokens,
                seed=0,
                eos_token_ids=(EOS,),
                adapter_id=adapter,
                adapter_digest=f"d{adapter}" if adapter else "",
            )
        )

    def step(self) -> SchedulePlan:
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        outputs = list(plan.failed)
        if plan.sequences:
            ids = [s.state.request.request_id for s in plan.sequences if s.is_sampled]
            outputs += self.scheduler.commit(plan, {i: SampledToken(self.script.get(i, 5)) for i in ids})
        self._take(outputs)
        return plan

    def _take(self, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        self.scheduler.check_integrity()
        self.blocks.check_integrity()

    def run(self, limit: int = 1000) -> int:
        for count in range(limit):
            if not self.scheduler.has_unfinished:
                assert self.blocks.num_free_blocks == self.blocks.num_blocks
                assert self.residency.refs == {}
                return count
            self.step()
        raise AssertionError(f"not finished after {limit} steps")

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def reason(self, request_id: str) -> FinishReason | None:
        return self.outputs[request_id][-1].finish_reason


def ran(plan: SchedulePlan) -> dict[str, int]:
    return {sequence.state.request.request_id: sequence.num_tokens for sequence in plan.sequences}


class TestBudgets:
    def test_runs_to_max_tokens(self) -> None:
        harness = Harness()
        harness.add("a", max_tokens=3)
        assert harness.run() == 3
        assert harness.tokens("a") == [5, 5, 5]
        assert harness.reason("a") is FinishReason.LENGTH

    def test_a_long_prompt_is_computed_in_chunks_beside_decodes(self) -> None:
        harness = Harness(tokens=16)
        harness.add("short", 4)
        harness.step()
        harness.add("long", 40)
        sizes = [ran(harness.step()) for _ in range(3)]
        assert sizes == [{"short": 1, "long": 15}, {"short": 1, "long": 15}, {"short": 1, "long": 10}]

    def test_no_more_than_max_num_seqs(self) -> None:
        harness = Harness(seqs=2)
        for name in "abc":
            harness.add(name, max_tokens=2)
        assert set(ran(harness.step())) == {"a", "b"}
        harness.step()
        assert set(ran(harness.step())) == {"c"}

    @given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), min_size=1, max_size=12), st.integers(8, 40))
    @settings(max_examples=60, deadline=None)
    def test_any_mix_finishes_and_returns_everything(self, sizes: list[tuple[int, int]], tokens: int) -> None:
        harness = Harness(num_blocks=12, seqs=8, tokens=tokens)
        for index, (length, max_tokens) in enumerate(sizes):
            harness.add(f"r{index}", length, adapter=index % 3 or None, max_tokens=max_tokens)
        harness.run()
        for index, (_, max_tokens) in enumerate(sizes):
            assert len(harness.tokens(f"r{index}")) == max_tokens
        assert all(plan.num_tokens <= tokens for plan in harness.plans)


class TestEnds:
    def test_eos_stops(self) -> None:
        harness = Harness()
        harness.add("a")
        harness.script["a"] = EOS
        harness.run()
        assert harness.reason("a") is FinishReason.STOP
        assert harness.outputs["a"][-1].stop_token_id is None

    def test_ignore_eos_and_min_tokens_go_on(self) -> None:
        harness = Harness()
        harness.add("ignores", ignore_eos=True)
        harness.add("minimum", min_tokens=3)
        harness.script.update(ignores=EOS, minimum=EOS)
        harness.run()
        assert len(harness.tokens("ignores")) == 4
        assert len(harness.tokens("minimum")) == 3

    def test_a_stop_token_is_named(self) -> None:
        harness = Harness()
        harness.add("a", stop_token_ids=(5,))
        harness.run()
        assert harness.outputs["a"][-1].stop_token_id == 5

    def test_the_models_length_ends_a_request(self) -> None:
        harness = Harness(num_blocks=2)
        harness.add("a", length=14, max_tokens=50)
        harness.run()
        assert len(harness.tokens("a")) == 2

    def test_abort_waiting_running_and_in_flight(self) -> None:
        """What a step in flight runs ends for its client at once, and keeps its memory until the commit."""
        harness = Harness(seqs=1)
        for name in "ab":
            harness.add(name, adapter=1)
        plan = harness.scheduler.schedule()
        for name in "ab":
            ended = harness.scheduler.abort(name)
            assert ended is not None
            assert ended.finish_reason is FinishReason.ABORT
        assert not harness.scheduler.has_unfinished
        assert harness.residency.refs == {1: 1}
        assert harness.blocks.num_free_blocks < harness.blocks.num_blocks
        harness.scheduler.check_integrity()
        assert harness.scheduler.commit(plan, {"a": SampledToken(5)}) == []
        assert harness.residency.refs == {}
        assert harness.blocks.num_free_blocks == harness.blocks.num_blocks
        assert harness.scheduler.abort("unknown") is None

    def test_a_failed_step_ends_its_requests_only(self) -> None:
        harness = Harness(seqs=1)
        for name in "ab":
            harness.add(name, adapter=1)
        plan = harness.scheduler.schedule()
        (failed,) = harness.scheduler.fail(plan, EngineError("out of memory"))
        assert failed.request_id == "a"
        assert failed.error is not None
        assert "out of memory" in failed.error["message"]
        harness.run()
        assert harness.tokens("b") == [5] * 4

    def test_a_failed_row_ends_its_request_only(self) -> None:
        harness = Harness()
        for name in "ab":
            harness.add(name)
        plan = harness.scheduler.schedule()
        outputs = harness.scheduler.commit(plan, {"a": SampledToken(0, error=EngineError("NaN")), "b": SampledToken(5)})
        assert [output.finish_reason for output in outputs] == [FinishReason.ERROR, None]
        harness.run()


class TestPreemption:
    def test_the_newest_gives_way_when_kv_runs_out_and_resumes(self) -> None:
        harness = Harness(num_blocks=4)
        harness.add("a", length=12, max_tokens=12)
        harness.add("b", length=12, max_tokens=12)
        harness.run()
        assert harness.scheduler.num_preemptions > 0
        assert len(harness.tokens("a")) == len(harness.tokens("b")) == 12

    def test_the_prefix_cache_makes_recomputing_cheap(self) -> None:
        harness = Harness(num_blocks=6)
        harness.add("a", length=12, max_tokens=20)
        harness.add("b", length=20, max_tokens=8)
        harness.run()
        assert harness.blocks.num_hit_tokens > 0


class TestAdapters:
    def test_a_loading_adapter_lets_others_pass(self) -> None:
        harness = Harness()
        harness.residency.loading = {1}
        harness.add("cold", adapter=1)
        harness.add("warm", adapter=2)
        harness.add("base")
        assert set(ran(harness.step())) == {"warm", "base"}
        assert harness.scheduler.waiting_by_cause() == {"seat": 0, "load": 1, "room": 0}
        harness.residency.loading.clear()
        assert "cold" in ran(harness.step())
        harness.run()

    def test_an_adapter_that_cannot_be_served_fails_its_own_requests(self) -> None:
        harness = Harness()
        harness.residency.broken = {1}
        harness.add("bad", adapter=1)
        harness.add("good", adapter=2)
        harness.run()
        error = harness.outputs["bad"][-1].error
        assert error is not None
        assert error["error"] == "AdapterUnavailableError"
        assert len(harness.tokens("good")) == 4

    def test_adapters_are_prefetched_on_arrival(self) -> None:
        harness = Harness()
        harness.add("a", adapter=3)
        assert harness.residency.prefetched == [3]

    def test_requests_of_one_adapter_keep_their_order(self) -> None:
        harness = Harness(room=1)
        harness.add("x", adapter=1, max_tokens=6)
        harness.step()
        harness.add("old", adapter=2)
        harness.add("young", adapter=2)
        harness.run()
        first = {
            name: next(i for i, plan in enumerate(harness.plans) if name in ran(plan)) for name in ("old", "young")
        }
        assert first["old"] <= first["young"]

    def test_a_waiting_adapter_gets_in_within_the_aging_bound(self) -> None:
        harness = Harness(room=1, aging_steps=8)
        harness.add("hog", adapter=1, max_tokens=400)
        harness.step()
        harness.add("late", adapter=2, max_tokens=2)
        num_steps = next(count for count in range(1, 12) if "late" in ran(harness.step()))
        assert num_steps <= 10
        assert "hog" not in ran(harness.plans[-1])
        harness.run()
        assert len(harness.tokens("hog")) == 400

    def test_those_behind_one_that_lacks_room_do_not_keep_its_way_busy(self) -> None:
        """The hot adapter finishes what it runs, and leaves: nobody is preempted, and it comes back afterwards."""
        harness = Harness(room=1, aging_steps=800, num_blocks=512)
        harness.add("hot-0", adapter=1, max_tokens=120)
        harness.step()
        harness.add("cold", adapter=2, max_tokens=4)
        for number in range(1, 12):
            for _ in range(15):
                harness.step()
            harness.add(f"hot-{number}", adapter=1, max_tokens=120)
        harness.run()
        assert harness.scheduler.num_preemptions == 0
        steps = {}
        for step, plan in enumerate(harness.plans):
            for sequence in plan.sequences:
                steps[sequence.state.request.request_id] = step
        assert steps["cold"] < 100 + 120 + 20, "after the hold began, only what ran already went before"
        assert steps["cold"] < steps["hot-9"]

    def test_newcomers_of_a_hot_adapter_cannot_starve_another(self) -> None:
        harness = Harness(room=1, aging_steps=8, seqs=4)
        harness.add("hot0", adapter=1, max_tokens=3)
        harness.step()
        harness.add("late", adapter=2, max_tokens=2)
        for index in range(1, 40):
            harness.add(f"hot{index}", adapter=1, max_tokens=3)
            harness.step()
            if harness.outputs.get("late"):
                break
        assert index <= 12
        harness.run()

    def test_many_waiting_adapters_take_turns(self) -> None:
        harness = Harness(room=1, aging_steps=8)
        for adapter in range(1, 7):
            harness.add(f"r{adapter}", adapter=adapter, max_tokens=60)
        harness.run(2000)
        first = [next(i for i, plan in enumerate(harness.plans) if f"r{a}" in ran(plan)) for a in range(1, 7)]
        assert max(first) <= 8 + 6 * (8 // 4) + 6
        assert harness.scheduler.num_preemptions < 6 * 60 / 2  # a turn lasts at least aging_steps / 4 steps

    def test_abort_adapter_ends_all_its_requests(self) -> None:
        harness = Harness(seqs=1)
        for name in "ab":
            harness.add(name, adapter=1)
        harness.add("c", adapter=2)
        harness.step()
        ended = harness.scheduler.abort_adapter(1)
        assert {output.request_id for output in ended} == {"a", "b"}
        harness.run()
        assert len(harness.tokens("c")) == 4


@pytest.mark.parametrize("status", [RequestStatus.RUNNING, RequestStatus.WAITING])
def test_adapters_of(status: RequestStatus) -> None:
    harness = Harness(seqs=1)
    harness.add("a", adapter=1)
    harness.add("b", adapter=2)
    harness.step()
    assert harness.scheduler.adapters_of(status) == ({1} if status is RequestStatus.RUNNING else {2})
