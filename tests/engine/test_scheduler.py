"""The scheduler over fakes: budgets, order, chunks, preemption, adapters that load, wait for room and age."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.core import (
    AcquireResult,
    FinishReason,
    MixPart,
    Request,
    SamplingParams,
    TokenOutput,
    WaitsFor,
    mix_digest,
)
from loraplex.engine.schedule_plan import RequestStatus, SampledToken, SchedulePlan
from loraplex.engine.scheduler import Scheduler
from loraplex.engine.waiting.compiling import NUM_LOOKS
from loraplex.engine.waiting.queue import MAX_PASSED
from loraplex.engine.waiting.service_levels import MAX_CANDIDATES, MAX_SHARED_BLOCKS, StepBudget
from loraplex.errors import AdapterUnavailableError, EngineError, InvalidRequestError
from loraplex.kvcache import allocator
from loraplex.kvcache.allocator import KVBlockAllocator
from loraplex.sampling_params import NO_CLAIM, Claim

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

    def victims_for(self, adapter_id: int, in_use: Sequence[int]) -> Sequence[int]:
        return in_use[:1] if adapter_id not in self.refs and len(self.refs) >= self.room else []

    def try_acquire_mix(self, mix: Sequence[MixPart]) -> AcquireResult:
        adapter_ids = [part.adapter_id for part in mix]
        if self.broken.intersection(adapter_ids):
            raise AdapterUnavailableError("an adapter of the mix is gone")
        if self.loading.intersection(adapter_ids):
            return AcquireResult(None, WaitsFor.LOAD)
        if len({*self.refs, *adapter_ids}) > self.room:
            return AcquireResult(None, WaitsFor.ROOM)
        for adapter_id in adapter_ids:
            self.refs[adapter_id] = self.refs.get(adapter_id, 0) + 1
        return AcquireResult(adapter_ids[0], mix_slots=tuple(adapter_ids))

    def victims_for_mix(self, adapter_ids: Sequence[int], in_use: Sequence[int]) -> Sequence[int]:
        num_lacking = len({*self.refs, *adapter_ids}) - self.room
        return [each for each in in_use if each not in adapter_ids][: max(0, num_lacking)]


class FakeGrammar:
    """Compiled when a test says so, or never."""

    def __init__(self, is_compiled: bool = False) -> None:
        self.is_compiled = is_compiled
        self.error: InvalidRequestError | None = None
        self.is_complete = False
        self.is_cancelled = False
        self.num_looks = 0

    def cancel(self) -> None:
        self.is_cancelled = True

    def is_ready(self) -> bool:
        self.num_looks += 1
        if self.error is not None:
            raise self.error
        return self.is_compiled

    def commit(self, token_id: int) -> None:
        assert self.is_compiled, "nothing is drawn for a form that is not known"


class Harness:
    """A scheduler whose model always answers token 5 (or what `script` says)."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        seqs: int = 8,
        tokens: int = 64,
        room: int = 100,
        aging_steps: int = 8,
        num_speculative_tokens: int = 0,
    ) -> None:
        self.blocks = KVBlockAllocator(num_blocks, 8)
        self.residency = FakeResidency(room)
        self.now_s = 0.0
        self.scheduler = Scheduler(
            self.blocks,
            self.residency,
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            max_model_len=num_blocks * 8,
            aging_steps=aging_steps,
            num_speculative_tokens=num_speculative_tokens,
            clock=lambda: self.now_s,
        )
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.script: dict[str, int] = {}
        self.plans: list[SchedulePlan] = []

    def add(
        self,
        request_id: str,
        length: int = 4,
        adapter: int | tuple[int, ...] | None = None,
        max_tokens: int = 4,
        claim: Claim = NO_CLAIM,
        grammar: FakeGrammar | None = None,
        cache_salt: str = "",
        **params,
    ) -> None:
        """adapter: several are a mix."""
        mix = tuple(MixPart(each, f"d{each}", 0.5) for each in adapter) if isinstance(adapter, tuple) else ()
        digest = mix_digest(mix) if mix else f"d{adapter}" if adapter else ""
        self.scheduler.add(
            Request(
                request_id=request_id,
                prompt_token_ids=tuple(range(length)),
                sampling_params=SamplingParams(max_tokens=max_tokens, **params),
                max_tokens=max_tokens,
                seed=0,
                eos_token_ids=(EOS,),
                adapter_id=adapter[0] if isinstance(adapter, tuple) else adapter,
                adapter_digest=digest,
                mix=mix,
                claim=claim,
                cache_salt=cache_salt,
            ),
            grammar=grammar,
        )

    def step(self) -> SchedulePlan:
        plan = self.scheduler.schedule()
        self.commit(plan)
        return plan

    def commit(self, plan: SchedulePlan) -> None:
        self.plans.append(plan)
        outputs = list(plan.failed)
        if plan.sequences:
            ids = [s.state.request.request_id for s in plan.sequences if s.is_sampled]
            outputs += self.scheduler.commit(plan, {i: SampledToken(self.script.get(i, 5)) for i in ids})
        self._take(outputs)

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


def steps_of(harness: Harness, request_id: str) -> list[int]:
    return [step for step, plan in enumerate(harness.plans) if request_id in ran(plan)]


def last_step(harness: Harness, request_id: str) -> int:
    return steps_of(harness, request_id)[-1]


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

    def test_a_short_prompt_does_not_wait_for_a_long_one(self) -> None:
        """A prompt of 30,000 tokens held up another client's of 4 for 6 s, and several of them one after another."""
        harness = Harness(num_blocks=512, tokens=16)
        for index in range(3):
            harness.add(f"long{index}", 200, max_tokens=1, cache_salt=f"{index}")
        harness.step()
        harness.add("short", 4, max_tokens=3, cache_salt="s")
        sizes = [ran(harness.step()) for _ in range(5)]
        assert sizes[0] == {"long0": 12, "long1": 4}
        assert sizes[1] == {"long0": 12, "long2": 4}
        assert sizes[2] == {"long0": 12, "short": 4}
        assert sizes[3] == {"long0": 15, "short": 1}
        harness.run()
        assert [last_step(harness, f"long{index}") for index in range(3)] == sorted(
            last_step(harness, f"long{index}") for index in range(3)
        ), "long ones one after another"

    def test_long_prompts_on_all_seats_hold_up_no_other_tenant(self) -> None:
        """The seat that another tenant takes has tokens in the step, too."""
        harness = Harness(num_blocks=512, tokens=16, seqs=4)
        for index in range(4):
            harness.add(f"long{index}", 160, max_tokens=1, cache_salt=f"{index}", claim=Claim("a"))
        for _ in range(6):
            harness.step()
        harness.add("short", 4, max_tokens=1, cache_salt="s", claim=Claim("b"))
        for _ in range(3):
            harness.step()
        assert harness.reason("short") is FinishReason.LENGTH
        harness.run()

    @pytest.mark.parametrize("num_rows", [2, 4, 8])
    def test_a_tenant_gives_kv_as_it_gives_seats(self, num_rows: int) -> None:
        """A long prompt that came first waited for the ends of another tenant's requests, and held up a third's."""
        harness = Harness(num_blocks=16 * num_rows, tokens=64, seqs=2 * num_rows)
        for index in range(num_rows):
            harness.add(f"a{index}", 64, max_tokens=60, cache_salt=f"{index}", claim=Claim("a"))
        while harness.blocks.num_free_blocks > num_rows:
            harness.step()
        harness.add("long", 16 * num_rows * 4, max_tokens=2, cache_salt="l", claim=Claim("b"))
        harness.add("short", 4, max_tokens=2, cache_salt="s", claim=Claim("c"))
        before = len(harness.plans)
        harness.run()
        assert last_step(harness, "short") - before < 8
        assert last_step(harness, "long") - before < 4 * num_rows
        assert max(last_step(harness, f"a{index}") for index in range(num_rows)) > last_step(harness, "long")
        assert {len(harness.tokens(f"a{index}")) for index in range(num_rows)} == {60}

    @staticmethod
    def _with_a_long_prompt_that_lacks_kv() -> Harness:
        """`long` is of the tenant that was served most, so it takes no KV from the one that has it."""
        harness = Harness(num_blocks=64, tokens=512, seqs=16)
        for index in range(4):
            harness.add(f"a{index}", 40, max_tokens=80, cache_salt=f"a{index}", claim=Claim("a"))
        harness.step()
        for index in range(5):
            harness.add(f"b{index}", 240, max_tokens=1, cache_salt=f"b{index}", claim=Claim("b"))
            harness.step()
        harness.add("long", 400, max_tokens=2, cache_salt="l", claim=Claim("b"))
        harness.step()
        assert harness.scheduler.num_waiting == 1
        return harness

    def test_what_is_too_little_kv_for_one_is_used_by_others(self) -> None:
        """A third tenant's second request waited for the end of the first tenant's."""
        harness = self._with_a_long_prompt_that_lacks_kv()
        for index in range(10):
            name = f"c{index}"
            harness.add(name, 4, max_tokens=4, cache_salt=name, claim=Claim("c"))
            for _ in range(4):
                harness.step()
            assert harness.reason(name) is FinishReason.LENGTH
        assert "long" not in harness.outputs
        harness.run()

    def test_and_is_given_back_when_it_is_enough(self) -> None:
        harness = self._with_a_long_prompt_that_lacks_kv()
        for name in ("first", "last"):  # the first is charged, and the last goes past the long one
            harness.add(name, 80, max_tokens=100, cache_salt=name, claim=Claim("c"))
        harness.step()
        assert harness.scheduler.num_waiting == 1
        for index in range(4):
            harness.scheduler.abort(f"a{index}")
        harness.step()
        assert "long" in ran(harness.step())
        assert harness.scheduler.num_preemptions == 1
        harness.run()
        assert len(harness.tokens("last")) == 100

    def test_short_prompts_leave_half_of_a_step_to_a_long_one(self) -> None:
        harness = Harness(num_blocks=512, tokens=16)
        harness.add("long", 160, max_tokens=1, cache_salt="l")
        harness.step()
        for index in range(200):
            harness.add(f"short{index}", 12, max_tokens=1, cache_salt=f"{index}")
        while "long" not in harness.outputs:
            harness.step()
        sizes = [ran(plan)["long"] for plan in harness.plans]
        assert min(sizes[:-1]) >= 8
        assert sum(sizes) == 160

    def test_what_is_kept_for_others_and_not_used_is_the_long_prompts(self) -> None:
        harness = Harness(num_blocks=64, tokens=16)
        harness.add("long", 200, max_tokens=1, cache_salt="l")
        harness.step()
        harness.add("too large", 400, max_tokens=1, cache_salt="t")  # there is no KV for it now
        assert [ran(harness.step()) for _ in range(3)] == [{"long": 16}] * 3

    def test_prompts_of_a_step_come_one_after_another(self) -> None:
        """Of those that a step has room for, none is cut for the next."""
        harness = Harness(num_blocks=512, tokens=16)
        for name in "abc":
            harness.add(name, 14, max_tokens=1, cache_salt=name)
        assert [ran(harness.step()) for _ in range(3)] == [{"a": 14, "b": 2}, {"b": 12, "c": 4}, {"c": 10}]

    def test_log_probabilities_of_prompts_take_few_tokens_of_a_step(self) -> None:
        """They cost more than the forward pass of a small model: 2,048 positions with 20 each took half a second."""
        harness = Harness(num_blocks=400, tokens=2048)
        harness.add("short", max_tokens=40)
        harness.step()
        for name in "ab":
            harness.add(name, 600, max_tokens=2, prompt_logprobs=20, cache_salt=name)
        harness.add("plain", 900, max_tokens=2)
        first = ran(harness.step())
        most = MAX_CANDIDATES // 21
        assert first == {"short": 1, "a": most, "plain": 900}, "one without them does not wait for those of another"
        while harness.scheduler.has_unfinished:
            plan = harness.step()
            scored = [
                each.num_tokens
                for each in plan.sequences
                if each.num_tokens > 1 and each.state.request.sampling_params.prompt_logprobs is not None
            ]
            assert sum(scored) <= most
            assert "short" in ran(plan) or harness.reason("short") is not None
        assert len(steps_of(harness, "a")) == -(-600 // most) + 1
        assert {len(harness.tokens(name)) for name in ("a", "b", "plain")} == {2}

    @pytest.mark.parametrize("num_scored", [2, 3 * MAX_PASSED])
    def test_prompts_with_log_probabilities_hold_up_no_other_tenant(self, num_scored: int) -> None:
        """The first of them takes all the candidates of its steps; those behind it ended the look through the queue."""
        harness = Harness(num_blocks=8192, tokens=512, seqs=64)
        for index in range(num_scored):
            salt, claim = f"s{index}", Claim("scored")
            harness.add(f"s{index}", 1500, max_tokens=1, prompt_logprobs=20, cache_salt=salt, claim=claim)
        harness.step()
        harness.add("other", 8, max_tokens=1, claim=Claim("other"))
        harness.add("own", 8, max_tokens=1, claim=Claim("scored"))
        steps = [ran(harness.step()) for _ in range(3)]
        assert "other" in steps[0]
        assert ("own" in steps[0]) == (num_scored <= MAX_PASSED), "its own wait where many are before it"
        assert {max(step.values()) for step in steps} == {MAX_CANDIDATES // 21}
        harness.run()

    def test_a_position_may_have_more_candidates_than_a_step(self) -> None:
        harness = Harness()
        harness.add("a", 5, max_tokens=1)
        state = harness.scheduler._states["a"]
        budget = StepBudget(64, 64)
        with patch.object(type(state), "num_candidates_a_token", MAX_CANDIDATES + 1):
            assert budget.fit(state) == 1
            budget.take(1, state)
            assert budget.fit(state) == 0

    def test_completions_of_a_cached_prompt_hash_it_once_and_begin_in_several_steps(self) -> None:
        """Each has one token to compute, but a look-up for every block of its prompt."""
        num_blocks, num_completions = 2000, 40
        harness = Harness(num_blocks=2 * num_blocks, seqs=num_completions, tokens=512)
        prompt = tuple(range(num_blocks * 8 + 1))
        first = Request("first", prompt, SamplingParams(), 1, 0)
        harness.blocks.start(first, prompt)
        assert harness.blocks.reserve("first", len(prompt))
        harness.blocks.commit("first", prompt, len(prompt))
        harness.blocks.free("first")
        same = (*prompt,)
        for index in range(num_completions):
            harness.scheduler.add(Request(f"c{index}", same, SamplingParams(), 1, 0))
        begun, num_most = [], -(-MAX_SHARED_BLOCKS // num_blocks)
        with patch.object(allocator, "next_key", wraps=allocator.next_key) as next_key:
            while harness.scheduler.has_unfinished:
                step = ran(harness.step())
                assert set(step.values()) == {1}
                assert len(step) <= num_most
                begun += step
                assert next_key.call_count == num_blocks
        assert begun == [f"c{index}" for index in range(num_completions)]
        assert len(harness.plans) == -(-num_completions // num_most)

    def test_completions_of_a_cached_prompt_hold_up_no_other_tenant(self) -> None:
        """They cost their tenant next to nothing, so it came first in each step, and used up the step's cached blocks:
        the look through the queue ended there."""
        harness = Harness(num_blocks=512, seqs=16)
        harness.add("first", 65, max_tokens=1, cache_salt="a", claim=Claim("a"))
        harness.run()
        names = (f"copy{index}" for index in itertools.count())
        with patch.object(harness.scheduler.levels, "budget", lambda _: StepBudget(64, 64, num_shared_blocks=8)):
            for step in range(6):
                while sum(name.startswith("copy") for name in harness.scheduler._states) < 4:
                    harness.add(next(names), 65, max_tokens=1, cache_salt="a", claim=Claim("a"))
                if step == 0:
                    for name in ("b0", "b1"):
                        harness.add(name, 60, max_tokens=1, cache_salt=name, claim=Claim("b"))
                harness.step()
        assert {"b0", "b1"} <= set(harness.outputs)

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


def num_segments(plan: SchedulePlan) -> int:
    """Of the batch: one for each adapter of each mix, and of the others for each adapter."""
    routes = {s.state.request.mix or s.state.request.adapter_ids for s in plan.sequences}
    return sum(map(len, routes))


class TestMixes:
    def test_a_mix_waits_for_all_of_its_adapters_and_lets_others_pass(self) -> None:
        harness = Harness()
        harness.residency.loading.add(2)
        harness.add("mix", adapter=(1, 2))
        harness.add("single", adapter=1)
        assert harness.residency.prefetched == [1, 2, 1]
        assert ran(harness.step()) == {"single": 4}
        assert harness.scheduler.waiting_by_cause()["load"] == 1
        harness.residency.loading.clear()
        assert set(ran(harness.step())) == {"mix", "single"}
        assert harness.residency.refs == {1: 2, 2: 1}
        assert harness.scheduler.adapters_of(RequestStatus.RUNNING) == {1, 2}
        harness.run()

    def test_the_first_request_of_a_mix_takes_a_seat_for_each_adapter(self) -> None:
        harness = Harness(seqs=4)
        for index in range(3):
            harness.add(f"same-{index}", adapter=(1, 2))
        harness.add("other", adapter=(3, 4))
        harness.add("base")
        assert set(ran(harness.step())) == {"same-0", "same-1", "same-2"}
        harness.scheduler.abort("same-1")
        harness.scheduler.abort("same-2")
        assert set(ran(harness.step())) == {"same-0", "other"}
        harness.run()

    @pytest.mark.parametrize("num_seats", [2, 4, 8])
    @pytest.mark.parametrize("flood", [None, 1, (1, 2), (1, 2, 3)])
    @pytest.mark.parametrize("light", [None, 4, (4, 5)])
    def test_a_tenant_gives_seats_whatever_its_requests_go_through(
        self, flood: int | tuple[int, ...] | None, light: int | tuple[int, ...] | None, num_seats: int
    ) -> None:
        """The seats of a mix are more than its requests, and a mix may need several: no tenant waits for an end."""
        harness = Harness(seqs=num_seats, num_blocks=2048)
        for index in range(4 * num_seats):
            harness.add(f"flood{index}", adapter=flood, max_tokens=200, claim=Claim("a"))
        for _ in range(4):
            harness.step()
        harness.add("light", adapter=light, max_tokens=3, claim=Claim("b"))
        num_needed = len(light) if isinstance(light, tuple) else 1
        is_one = isinstance(flood, tuple) and len(flood) >= num_seats  # a pause of it gives all seats
        most = len(flood) if isinstance(flood, tuple) and is_one else num_seats - num_needed + 1
        for _ in range(10):
            harness.step()
        ended = [output for output in harness.outputs.get("light", ()) if output.finish_reason is not None]
        assert bool(ended) == (most > num_needed), "a seat is given by a tenant that has more of them even then"
        for index in range(4 * num_seats):
            harness.scheduler.abort(f"flood{index}")
        harness.run()

    @pytest.mark.parametrize("num_given", [1, 2])
    def test_no_seat_is_given_that_would_stand_empty(self, num_given: int) -> None:
        """A mix that needs more seats than others may give has one of theirs only when enough of them end."""
        harness = Harness(seqs=4, num_blocks=2048)
        for index in range(4):
            harness.add(f"flood{index}", adapter=1, max_tokens=200, claim=Claim("a"))
        harness.step()
        mix = tuple(range(2, 2 + 4 - num_given))
        harness.add("light", adapter=mix, max_tokens=3, claim=Claim("b"))
        for _ in range(10):
            harness.step()
        assert harness.scheduler.num_running == 4
        assert bool(harness.scheduler.num_pauses) == ("light" in harness.outputs) == (num_given >= len(mix))
        for index in range(3):
            harness.scheduler.abort(f"flood{index}")
        harness.run()

    def test_a_mix_of_more_adapters_than_seats_runs_alone(self) -> None:
        harness = Harness(seqs=2)
        harness.add("first")
        harness.add("large", adapter=(1, 2, 3, 4))
        harness.add("last")
        harness.run()
        steps = [set(steps_of(harness, name)) for name in ("first", "large", "last")]
        assert not steps[0] & steps[1]
        assert not steps[1] & steps[2]

    @pytest.mark.parametrize("num_seats", [4, 8])
    @pytest.mark.parametrize("num_mixes", [1, 2])
    def test_a_mix_that_cannot_be_seated_empties_no_batch(self, num_seats: int, num_mixes: int) -> None:
        """While a request of another tenant ran, which may take minutes, no other one was admitted."""
        harness = Harness(seqs=num_seats, num_blocks=2048)
        harness.add("long", max_tokens=100, claim=Claim("c"))
        harness.step()
        for index in range(num_mixes):
            harness.add(f"mix{index}", adapter=tuple(range(1, 9)), max_tokens=10, claim=Claim(f"a{index}"))
        for index in range(20):
            harness.add(f"short{index}", max_tokens=2, claim=Claim("b"))
            harness.step()
            harness.step()
            harness.step()
            assert f"short{index}" in harness.outputs, "it waits for the end of another tenant's request"
        assert "long" in ran(harness.step())
        assert not steps_of(harness, "mix0")
        harness.run()

    def test_a_mix_comes_when_what_ran_before_it_has_ended_however_many_others_come(self) -> None:
        """Requests that went past it are paused for it as soon as that is enough, and go on when it was served."""
        harness = Harness(seqs=4, num_blocks=2048)
        harness.add("long", max_tokens=40, claim=Claim("c"))
        harness.step()
        harness.add("mix", adapter=tuple(range(1, 9)), max_tokens=10, claim=Claim("a"))
        for index in range(60):
            harness.add(f"other{index}", max_tokens=30, claim=Claim("b"))
            harness.step()
        assert harness.reason("long") is FinishReason.LENGTH
        (begun, *_) = steps_of(harness, "mix")
        assert begun == last_step(harness, "long") + 1
        assert harness.scheduler.num_pauses > 0
        assert harness.scheduler.num_preemptions == 0
        harness.run()
        assert len(harness.tokens("mix")) == 10
        assert all(len(harness.tokens(f"other{index}")) == 30 for index in range(60))

    def test_a_tenant_is_given_a_seat_while_a_mix_waits_for_more(self) -> None:
        """The mix comes next, and gets none."""
        harness = Harness(seqs=4, num_blocks=2048)
        for index in range(8):
            harness.add(f"flood{index}", max_tokens=200, claim=Claim("c"))
        for _ in range(4):
            harness.step()
        harness.add("mix", adapter=tuple(range(1, 9)), max_tokens=10, claim=Claim("a"))
        harness.step()
        for name in ("light", "second"):
            harness.add(name, max_tokens=3, claim=Claim("b"))
            for _ in range(5):
                harness.step()
            assert harness.reason(name) is FinishReason.LENGTH
        assert not steps_of(harness, "mix")
        harness.run(limit=3000)

    @pytest.mark.parametrize("adapter_id", [1, 2])
    def test_what_befalls_one_adapter_befalls_its_mixes(self, adapter_id: int) -> None:
        harness = Harness()
        harness.add("mix", adapter=(1, 2), max_tokens=30)
        harness.add("others", adapter=(3, 4), max_tokens=5)
        harness.step()
        (ended,) = harness.scheduler.fail_adapter(adapter_id, EngineError("gone"))
        assert (ended.request_id, ended.finish_reason) == ("mix", FinishReason.ERROR)
        harness.run()

    def test_a_mix_gets_its_turn_among_single_adapters(self) -> None:
        harness = Harness(room=2, aging_steps=16, num_blocks=512)
        harness.add("one", adapter=1, max_tokens=120)
        harness.add("two", adapter=2, max_tokens=120)
        harness.step()
        harness.add("mix", adapter=(2, 3), max_tokens=5)
        harness.run()
        assert last_step(harness, "mix") < last_step(harness, "one")
        assert harness.scheduler.num_pauses > 0
        assert harness.scheduler.num_preemptions == 0

    @given(
        st.lists(
            st.one_of(
                st.none(),
                st.integers(1, 5),
                st.lists(st.integers(1, 5), min_size=1, max_size=4, unique=True).map(tuple),
            ),
            min_size=1,
            max_size=10,
        ),
        st.integers(1, 6),
        st.integers(4, 6),
    )
    @settings(max_examples=100, deadline=None)
    def test_any_requests_finish_within_the_segments_of_a_batch(
        self, adapters: list[int | tuple[int, ...] | None], seqs: int, room: int
    ) -> None:
        harness = Harness(num_blocks=12, seqs=seqs, tokens=20, room=room)
        for index, adapter in enumerate(adapters):
            harness.add(f"r{index}", 1 + 7 * index % 30, adapter, max_tokens=1 + index % 6)
        harness.run()
        for index in range(len(adapters)):
            assert len(harness.tokens(f"r{index}")) == 1 + index % 6
        assert all(num_segments(plan) <= max(seqs, 4) for plan in harness.plans)


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


class TestGrammars:
    def test_a_request_arrives_when_its_grammar_is_compiled(self) -> None:
        harness, grammar = Harness(seqs=1), FakeGrammar()
        harness.add("form", grammar=grammar)
        harness.add("plain", max_tokens=3)
        assert harness.scheduler.num_waiting == 2
        assert ran(harness.step()) == {"plain": 4}
        harness.step()
        grammar.is_compiled = True
        harness.run()
        assert steps_of(harness, "form")[0] == last_step(harness, "plain") + 1
        assert len(harness.tokens("form")) == 4

    def test_a_grammar_that_cannot_be_ends_its_request_alone(self) -> None:
        harness, grammar = Harness(), FakeGrammar()
        harness.add("form", adapter=1, grammar=grammar)
        harness.add("plain")
        grammar.error = InvalidRequestError("no form", param="structured_outputs")
        harness.run()
        assert harness.reason("form") is FinishReason.ERROR
        assert len(harness.tokens("plain")) == 4

    def test_one_that_is_compiled_is_aborted_like_any_other(self) -> None:
        harness, grammars = Harness(), [FakeGrammar(), FakeGrammar()]
        harness.add("form", adapter=1, grammar=grammars[0])
        harness.add("other", adapter=2, grammar=grammars[1])
        harness.step()
        assert harness.scheduler.adapters_of(RequestStatus.WAITING) == {1, 2}
        harness._take(harness.scheduler.abort_adapter(1))
        assert harness.scheduler.abort("other") is not None
        assert not harness.scheduler.has_unfinished
        assert all(grammar.is_cancelled for grammar in grammars)

    def test_one_that_is_compiled_behind_many_others_is_found(self) -> None:
        harness, grammar = Harness(), FakeGrammar(is_compiled=True)
        for number in range(3 * NUM_LOOKS):
            harness.add(f"form{number}", grammar=FakeGrammar())
        harness.add("last", grammar=grammar)
        for _ in range(8):
            harness.step()
        assert len(harness.tokens("last")) == 4
        for number in range(3 * NUM_LOOKS):
            harness.scheduler.abort(f"form{number}")

    def test_a_step_looks_at_few_that_are_not_compiled_and_takes_no_seat_for_them(self) -> None:
        """The seat of another tenant would be empty in every second step."""
        harness, grammars = Harness(seqs=1), [FakeGrammar() for _ in range(500)]
        harness.add("runs", max_tokens=20, claim=Claim("heavy"))
        for number, grammar in enumerate(grammars):
            harness.add(f"form{number}", grammar=grammar, claim=Claim("light"))
        for _ in range(10):
            assert "runs" in ran(harness.step())
        assert harness.scheduler.num_pauses == 0
        assert sum(grammar.num_looks for grammar in grammars) <= 10 * NUM_LOOKS
        for grammar in grammars:
            grammar.is_compiled = True
        harness.run(5000)

    def test_what_memory_breaks_off_loses_no_request_and_no_end(self) -> None:
        """Lines that were looked at in the step are looked at again, and what failed in it is told in the next."""
        harness, left = Harness(), [1]
        start = harness.blocks.start

        def failing(request: Request, token_ids: Sequence[int]) -> int:
            if request.request_id == "breaks" and left:
                left.pop()
                raise MemoryError("no memory")
            return start(request, token_ids)

        harness.blocks.start, grammar = failing, FakeGrammar()
        grammar.error = InvalidRequestError("no form", param="structured_outputs")
        harness.residency.loading.add(3)
        harness.add("waits", adapter=3, claim=Claim("light"))
        harness.add("fails", grammar=grammar)
        harness.add("breaks")
        with pytest.raises(MemoryError):
            harness.step()
        harness.scheduler.check_integrity()
        harness.residency.loading.clear()
        harness.run()
        assert harness.reason("fails") is FinishReason.ERROR
        assert len(harness.tokens("waits")) == len(harness.tokens("breaks")) == 4

    def test_an_adapter_is_asked_for_when_its_request_can_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where the tokens of prompts were used up, the head of the queue was one use of its adapter in every step."""
        harness, asked = Harness(num_blocks=512, tokens=64), []
        try_acquire = harness.residency.try_acquire
        monkeypatch.setattr(harness.residency, "try_acquire", lambda each: (asked.append(each), try_acquire(each))[1])
        ticks = (0.5 * number for number in itertools.count())
        monkeypatch.setattr(harness.scheduler, "_clock", lambda: next(ticks))  # each step is too slow for the target
        harness.add("chat", length=4, max_tokens=400, claim=Claim("chat", itl_target_ms=1))
        for _ in range(3):
            harness.step()
        harness.add("long", length=2000, max_tokens=2, claim=Claim("b"))
        for _ in range(3):
            harness.step()
        harness.add("short", length=20, adapter=7, max_tokens=2, claim=Claim("c"))
        while not asked:
            harness.step()
        assert "short" in ran(harness.plans[-1])
        harness.run(1000)
        assert asked == [7]


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

    @pytest.mark.parametrize(("seqs", "adapter"), [(4, 1), (8, (1, 2, 3))])
    @pytest.mark.parametrize("is_alone", [False, True])
    def test_who_waits_for_a_load_is_given_a_seat_after_it_and_others_during_it(
        self, seqs: int, adapter: int | tuple[int, ...], is_alone: bool
    ) -> None:
        """No seat was given while the next request waited for its adapter, and no look at it was taken without one."""
        harness = Harness(seqs=seqs, num_blocks=2048)
        for index in range(2 * seqs):
            harness.add(f"flood{index}", max_tokens=200, claim=Claim("a"))
        for _ in range(4):
            harness.step()
        harness.residency.loading = {1}
        harness.add("cold", adapter=adapter, max_tokens=3, claim=Claim("b"))
        for name in ("s0", "s1") if not is_alone else ():
            for _ in range(3):
                harness.step()
            harness.add(name, max_tokens=3, claim=Claim("c"))
        for _ in range(6):
            harness.step()
        assert is_alone or {"s0", "s1"} <= set(harness.outputs)
        harness.residency.loading.clear()
        for _ in range(6):
            harness.step()
        assert "cold" in harness.outputs

    @pytest.mark.parametrize("is_loading", [False, True])
    def test_a_short_prompt_behind_a_load_waits_for_no_long_one(self, is_loading: bool) -> None:
        """The long one took all tokens of each step, and no look through the queue was taken."""
        harness = Harness(num_blocks=512, tokens=16)
        harness.residency.loading = {1}
        harness.add("cold", adapter=1, max_tokens=1)
        harness.add("long", 200, max_tokens=1, cache_salt="l")
        harness.step()
        harness.residency.loading = {1} if is_loading else set()
        for name in () if is_loading else ("cold",):
            harness.step()
            harness.step()
            assert name in harness.outputs
        harness.add("short", 4, max_tokens=1, cache_salt="s")
        for _ in range(3):
            harness.step()
        assert "short" in harness.outputs

    def test_a_load_that_fails_while_no_seat_is_free_ends_its_requests(self) -> None:
        harness = Harness(seqs=1)
        harness.residency.loading = {1}
        harness.add("cold", adapter=1)
        harness.add("base", max_tokens=50)
        harness.step()
        harness.add("behind", adapter=1)
        harness.residency.broken = {1}
        harness.step()
        assert [harness.reason(name) for name in ("cold", "behind")] == [FinishReason.ERROR] * 2

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

    def test_newcomers_of_a_hot_adapter_join_it_and_pause_with_their_kv(self) -> None:
        """Nothing is computed twice, and no request is kept from a free place: the hot adapter goes on afterwards."""
        harness = Harness(room=1, aging_steps=64, num_blocks=512)
        harness.add("hot-0", adapter=1, max_tokens=120)
        harness.step()
        harness.add("cold", adapter=2, max_tokens=4)
        for number in range(1, 6):
            harness.step()
            harness.add(f"hot-{number}", adapter=1, max_tokens=120)
        harness.run()
        assert harness.scheduler.num_preemptions == 0
        assert harness.scheduler.num_pauses > 0
        ends = {name: last_step(harness, name) for name in ("hot-0", "cold", "hot-5")}
        assert ends["cold"] < 40
        assert ends["cold"] < ends["hot-0"] < ends["hot-5"]
        computed = sum(plan.num_tokens for plan in harness.plans)
        assert computed == 6 * (4 + 119) + (4 + 3)

    def test_who_is_furthest_behind_is_next(self) -> None:
        """Two wait; the one that came first has run for long, so that the other has waited more than its share."""
        harness = Harness(room=1, aging_steps=64, num_blocks=512)
        harness.add("first", adapter=1, max_tokens=200)
        for _ in range(20):
            harness.step()
        for number in (2, 3):
            harness.add(f"late-{number}", adapter=number, max_tokens=60)
        harness.run()
        first, second, third = (steps_of(harness, name) for name in ("first", "late-2", "late-3"))
        assert second[0] < third[0], "first come, first served among equals"
        assert harness.scheduler.num_preemptions == 0
        gaps = [after - before for steps in (first, second, third) for before, after in itertools.pairwise(steps)]
        assert max(gaps) <= 40, "none is left alone for long while the others take their turns"
        assert second[-1] < first[-1] > third[-1]

    def test_who_was_called_and_still_lacks_room_is_admitted_once(self) -> None:
        """It lacks the room of two, which come to have had their turns one after the other."""
        harness = Harness(room=2, aging_steps=8, num_blocks=512)
        for number in (1, 2):
            harness.add(f"small-{number}", adapter=number, max_tokens=60)
            harness.step()
        taken: list[int] = []
        harness.residency.victims_for = lambda adapter_id, in_use: in_use[:1]
        try_acquire = harness.residency.try_acquire

        def lacks_all(adapter_id: int) -> AcquireResult:
            lacks = adapter_id == 3 and any(other != 3 for other in harness.residency.refs)
            taken.append(adapter_id)
            return AcquireResult(None, WaitsFor.ROOM) if lacks else try_acquire(adapter_id)

        harness.residency.try_acquire = lacks_all
        harness.add("large", adapter=3, max_tokens=5)
        harness.run()
        assert len(harness.tokens("large")) == 5
        assert {len(harness.tokens(f"small-{number}")) for number in (1, 2)} == {60}

    def test_an_adapter_in_the_way_whose_requests_are_leaving_needs_no_pause(self) -> None:
        """Memory names every id that is in use: also one whose last request has ended, and waits for its step."""
        harness = Harness(room=1, aging_steps=8)
        harness.residency.victims_for = lambda adapter_id, in_use: [*in_use[:1], 77]
        harness.add("hog", adapter=1, max_tokens=30)
        harness.step()
        harness.add("late", adapter=2, max_tokens=3)
        harness.run()
        assert [len(harness.tokens(name)) for name in ("hog", "late")] == [30, 3]
        assert harness.scheduler.num_pauses > 0

    def test_a_paused_request_loses_its_kv_before_a_running_one(self) -> None:
        harness = Harness(room=1, aging_steps=8, num_blocks=8)
        harness.add("hog", length=24, adapter=1, max_tokens=16)
        harness.step()
        harness.add("late", length=24, adapter=2, max_tokens=20)
        harness.run()
        assert harness.scheduler.num_pauses > 0
        assert harness.scheduler.num_preemptions > 0
        assert [len(harness.tokens(name)) for name in ("hog", "late")] == [16, 20]

    def test_who_was_called_takes_the_kv_of_those_who_were_paused_for_it(self) -> None:
        """Although they came before it, and something else runs on."""
        harness = Harness(num_blocks=64, room=1, aging_steps=8)
        harness.add("base", max_tokens=150)
        harness.add("old", length=240, adapter=1, max_tokens=200)
        for _ in range(6):
            harness.step()
        harness.add("caller", length=240, adapter=2, max_tokens=4)
        harness.add("later", max_tokens=4)
        harness.run()
        assert steps_of(harness, "caller")[0] < 30
        assert max(after - before for before, after in itertools.pairwise(steps_of(harness, "old"))) < 30

    def test_paused_kv_goes_when_the_room_that_was_called_for_does_not_come(self) -> None:
        """KV and adapters share one memory, and other requests run on: adapter 2 needs more than pausing alone
        gives."""
        harness = Harness(num_blocks=64, room=1, aging_steps=8)
        try_acquire = harness.residency.try_acquire

        def needs_blocks(adapter_id: int) -> AcquireResult:
            is_short = adapter_id == 2 and harness.blocks.num_free_blocks < 40
            return AcquireResult(None, WaitsFor.ROOM) if is_short else try_acquire(adapter_id)

        harness.residency.try_acquire = needs_blocks
        harness.add("base", max_tokens=150)
        harness.add("old", length=200, adapter=1, max_tokens=100)
        for _ in range(6):
            harness.step()
        harness.add("caller", adapter=2, max_tokens=4)
        harness.run()
        assert steps_of(harness, "caller")[0] < 40
        assert len(harness.tokens("old")) == 100

    def test_a_request_that_finds_no_memory_for_its_block_table_returns_its_adapter(self) -> None:
        harness = Harness()
        start, left = harness.blocks.start, [1]

        def failing(request: Request, token_ids: Sequence[int]) -> int:
            if left:
                left.pop()
                raise MemoryError("no memory")
            return start(request, token_ids)

        harness.blocks.start = failing
        harness.add("a", adapter=1)
        with pytest.raises(MemoryError):
            harness.step()
        assert harness.residency.refs == {}
        harness.run()
        assert len(harness.tokens("a")) == 4

    def test_what_a_damaged_adapter_computed_for_a_paused_request_is_forgotten(self) -> None:
        harness = Harness(room=1, aging_steps=8)
        harness.add("hog", length=20, adapter=1, max_tokens=30)
        harness.step()
        harness.add("late", adapter=2, max_tokens=3)
        while "late" not in ran(harness.step()):
            pass
        num_tokens = 20 + len(harness.tokens("hog"))
        harness.scheduler.forget_kv("d2")
        assert harness.scheduler.num_preemptions == 0
        harness.scheduler.forget_kv("d1")
        assert harness.scheduler.num_preemptions == 1
        while "hog" not in ran(plan := harness.step()):
            pass
        assert ran(plan)["hog"] == num_tokens, "all of it is computed again"
        harness.run()
        assert len(harness.tokens("hog")) == 30

    def test_a_paused_request_that_is_aborted_returns_its_kv(self) -> None:
        harness = Harness(room=1, aging_steps=8)
        harness.add("hog", adapter=1, max_tokens=100)
        harness.step()
        harness.add("late", adapter=2, max_tokens=50)
        while "late" not in ran(harness.step()):
            pass
        assert harness.scheduler.num_pauses == 1
        assert harness.scheduler.abort("hog") is not None
        harness.run()
        assert len(harness.tokens("late")) == 50

    def test_kv_of_paused_requests_is_dropped_when_an_adapter_could_not_come_beside_it(self) -> None:
        """Nothing runs, and an adapter lacks room although none is in use: what is paused has the memory."""
        harness = Harness(room=1, aging_steps=8)
        harness.add("hog", adapter=1, max_tokens=100)
        harness.step()
        harness.add("late", adapter=2, max_tokens=3)
        while "late" not in ran(harness.step()):
            pass
        while "late" in ran(harness.step()):
            harness.residency.room = 0
        assert harness.scheduler.num_preemptions == 1
        harness.residency.room = 1
        harness.run()
        assert len(harness.tokens("hog")) == 100

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
        assert harness.scheduler.num_preemptions == 0

    def test_a_turn_lasts_at_least_a_sixteenth_of_the_bound(self) -> None:
        harness = Harness(room=1, aging_steps=64)
        for adapter in range(1, 5):
            harness.add(f"r{adapter}", adapter=adapter, max_tokens=60)
        harness.run(2000)
        assert 0 < harness.scheduler.num_pauses <= 4 * 60 / (64 // 16)

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
