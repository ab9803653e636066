"""What is drafted, how much of it, and what of it is kept: without a model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.core import FinishReason, Request, SamplingParams
from loraplex.engine import speculation
from loraplex.engine.sampling_batch import SamplingState
from loraplex.engine.schedule_plan import RequestState, SampledToken, ScheduledSequence, SchedulePlan
from loraplex.engine.speculation import (
    CREDIT,
    LONGEST_REST,
    MAX_MATCH,
    MAX_ROWS,
    SHORTEST_REST,
    Drafting,
    NGramIndex,
    Speculation,
    verified,
)
from loraplex.errors import EngineError
from tests.engine.test_scheduler import EOS, Harness, ran
from tests.engine.test_scheduler_ahead import Ahead

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


# ------------------------------------------------------------------------------------------------------------ proposals


def longest_match(text: Sequence[int], end: int) -> int:
    """Tokens up to and with `end` that equal the text's last ones, up to MAX_MATCH."""
    length, most = 0, min(MAX_MATCH, end + 1)
    while length < most and text[end - length] == text[len(text) - 1 - length]:
        length += 1
    return length


def slow_proposal(text: Sequence[int], depth: int) -> tuple[int, ...]:
    """As the docstring says, over all positions."""
    ends = [end for end in range(len(text) - 1) if longest_match(text, end) >= 2]
    if not ends:
        return ()
    end = max(ends, key=lambda each: (longest_match(text, each), each))
    whole = list(text)
    for index in range(depth):
        whole.append(whole[end + 1 + index])
    return tuple(whole[len(text) :])


class TestNGramIndex:
    @given(TEXTS, st.integers(1, 12), st.data())
    @settings(max_examples=300, deadline=None)
    def test_it_proposes_what_followed_the_longest_match(
        self, text: list[int], depth: int, data: st.DataObject
    ) -> None:
        """Asked while the text grows, in strides that are drawn. All earlier places are candidates here."""
        index, num_tokens = NGramIndex(), 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(speculation, "MAX_CANDIDATES", len(text))
            while num_tokens <= len(text):
                known = text[:num_tokens]
                assert index.propose(known, depth) == slow_proposal(known, depth)
                num_tokens += data.draw(st.integers(1, 9))

    def test_a_text_of_one_token_has_no_pair(self) -> None:
        assert NGramIndex().propose([5], 4) == ()

    def test_one_equal_token_is_no_match(self) -> None:
        assert NGramIndex().propose([1, 2, 3, 2], 4) == ()

    def test_a_longer_match_goes_before_a_later_one(self) -> None:
        assert NGramIndex().propose([7, 8, 9, 1, 0, 8, 9, 2, 0, 7, 8, 9], 1) == (1,)

    def test_of_equal_matches_the_latest_counts(self) -> None:
        assert NGramIndex().propose([8, 9, 1, 8, 9, 2, 8, 9], 1) == (2,)

    def test_a_text_that_repeats_itself_is_followed_past_its_end(self) -> None:
        assert NGramIndex().propose([1, 2, 3, 1, 2], 7) == (3, 1, 2, 3, 1, 2, 3)
        assert NGramIndex().propose([4, 4, 4], 5) == (4,) * 5

    def test_only_the_last_tokens_of_a_prompt_are_looked_at(self) -> None:
        text = [1, 2, 3, *range(10, 30), 1, 2]
        assert NGramIndex().propose(text, 1) == (3,)
        assert NGramIndex(window=20).propose(text, 1) == ()

    def test_what_lies_before_the_window_may_belong_to_a_match(self) -> None:
        assert NGramIndex(window=4).propose([5, 1, 2, 3, 5, 1, 2], 1) == ()
        assert NGramIndex(window=5).propose([5, 1, 2, 3, 5, 1, 2], 1) == (3,)

    def test_of_many_places_only_the_latest_are_compared(self) -> None:
        text = [6, 1, 2, 3, *[1, 2, 4] * 50, 6, 1, 2]
        assert NGramIndex().propose(text, 1) == (4,), "the longer match is too far back"

    def test_token_ids_of_large_vocabularies_are_told_apart(self) -> None:
        large = 2**29 - 1
        assert NGramIndex().propose([large, large - 1, 5, large, large - 1], 1) == (5,)
        assert NGramIndex().propose([0, large, 5, 1, large], 1) == ()


# ---------------------------------------------------------------------------------------------------------------- depth


class TestDepth:
    def test_drafts_that_hold_get_longer(self) -> None:
        drafting, depths = Drafting(8), []
        for num_tokens in range(4):
            depths.append(drafting.depth_at(num_tokens))
            drafting.see(depths[-1], depths[-1], num_tokens)
        assert depths == [2, 4, 8, 8]

    def test_one_that_was_cut_short_for_others_says_nothing_of_longer_ones(self) -> None:
        drafting = Drafting(8)
        drafting.see(1, 1, 10)
        assert drafting.depth_at(10) == 2

    def test_after_a_wrong_token_they_are_as_long_as_what_held_and_one(self) -> None:
        drafting = Drafting(8)
        drafting.see(2, 2, 10)
        drafting.see(4, 2, 15)
        assert drafting.depth_at(15) == 3

    @pytest.mark.parametrize("most", [1, 2, 5, 32])
    def test_never_more_than_the_setting(self, most: int) -> None:
        drafting = Drafting(most)
        for _ in range(10):
            assert 1 <= drafting.depth_at(0) <= most
            drafting.see(drafting.depth_at(0), drafting.depth_at(0), 0)
        assert drafting.depth_at(0) == most

    def test_drafts_that_fail_rest_longer_and_longer(self) -> None:
        drafting, num_tokens, num_rejected, rests = Drafting(8), 0, 0, []
        while len(rests) < 6:
            depth = drafting.depth_at(num_tokens)
            num_tokens += 1
            drafting.see(depth, 0, num_tokens)
            num_rejected += depth
            if not drafting.depth_at(num_tokens):
                rests.append(next(n for n in range(LONGEST_REST + 1) if drafting.depth_at(num_tokens + n)))
                num_tokens += rests[-1]
        assert rests == [32, 64, 128, 256, 512, 512]
        assert num_rejected <= CREDIT + 1 + 2 * 5, "a few rows of more than a thousand"

    def test_drafts_that_hold_again_end_the_rests(self) -> None:
        drafting, num_tokens = Drafting(8), 0
        for _ in range(12):
            if not drafting.depth_at(num_tokens):
                num_tokens += SHORTEST_REST
            drafting.see(drafting.depth_at(num_tokens) or 1, 0, num_tokens)
        while not drafting.depth_at(num_tokens):
            num_tokens += SHORTEST_REST
        for _ in range(4):
            depth = drafting.depth_at(num_tokens)
            drafting.see(depth, depth, num_tokens)
            num_tokens += depth + 1
        while drafting.depth_at(num_tokens):
            drafting.see(drafting.depth_at(num_tokens), 0, num_tokens)
        assert drafting.depth_at(num_tokens + SHORTEST_REST)

    @given(st.lists(st.floats(0, 1), max_size=200), st.integers(1, 32))
    def test_rejected_rows_are_bounded_by_accepted_ones(self, shares: list[float], most: int) -> None:
        """Whatever share of each draft holds: rejected <= 3 x accepted + what every rest begins with."""
        drafting, num_tokens, rejected, accepted, rests = Drafting(most), 1, 0, 0, 0
        for share in shares:
            depth = drafting.depth_at(num_tokens)
            if not depth:
                num_tokens += 1
                continue
            held = round(share * depth)
            rejected, accepted, num_tokens = rejected + depth - held, accepted + held, num_tokens + held + 1
            drafting.see(depth, held, num_tokens)
            rests += not drafting.depth_at(num_tokens)
        assert rejected <= 3 * accepted + CREDIT + most + rests * (2 + most)


# ------------------------------------------------------------------------------------------------------------ verifying


def state_of(request_id: str = "a", length: int = 4) -> RequestState:
    request = Request(request_id, tuple(range(length)), SamplingParams(), 50, 0)
    return RequestState(request, 0, [*request.prompt_token_ids, 7])


def drawn(*token_ids: int) -> list[SampledToken]:
    return [SampledToken(token_id) for token_id in token_ids]


class TestVerified:
    def test_rows_are_the_sequence_behind_each_token_of_the_draft(self) -> None:
        sequence = ScheduledSequence(state_of(), 4, 1, is_sampled=True)
        assert sequence.rows() == (sequence,)
        rows = sequence.with_draft((8, 9)).rows()
        assert rows[0] == sequence
        assert [(row.end, row.draft) for row in rows] == [(5, ()), (6, (8,)), (7, (8, 9))]

    @given(st.lists(st.integers(0, 2), max_size=6), st.data())
    def test_what_is_kept_is_what_one_by_one_would_have_drawn(self, draft: list[int], data: st.DataObject) -> None:
        tokens = data.draw(st.lists(st.integers(0, 2), min_size=len(draft) + 1, max_size=len(draft) + 1))
        sequence = ScheduledSequence(state_of(), 4, 1, is_sampled=True).with_draft(tuple(draft))
        (token,) = verified(sequence.rows(), drawn(*tokens)).values()
        kept = [each.token_id for each in token.run]
        assert kept == tokens[: len(kept)]
        assert kept[:-1] == draft[: len(kept) - 1]
        assert len(kept) == len(tokens) or kept[-1] != draft[len(kept) - 1]

    def test_requests_side_by_side(self) -> None:
        with_draft = ScheduledSequence(state_of("a"), 4, 1, is_sampled=True).with_draft((8, 9))
        plain, wrong = (ScheduledSequence(state_of(name), 4, 1, is_sampled=True) for name in "bc")
        rows = [*with_draft.rows(), plain, *wrong.with_draft((5,)).rows()]
        tokens = verified(rows, drawn(8, 9, 3, 4, 6, 2))
        assert {name: [each.token_id for each in token.run] for name, token in tokens.items()} == {
            "a": [8, 9, 3],
            "b": [4],
            "c": [6],
        }

    def test_nothing_follows_an_error_whose_token_is_the_drafts(self) -> None:
        sequence = ScheduledSequence(state_of(), 4, 1, is_sampled=True).with_draft((0, 0))
        failed = SampledToken(0, error=EngineError("NaN"), has_odd_logits=True)
        (token,) = verified(sequence.rows(), [SampledToken(0), failed, SampledToken(0)]).values()
        assert token.more == (failed,)

    def test_counts_behind_a_draft_are_those_of_an_output_with_it(self) -> None:
        params = SamplingParams(repetition_penalty=1.5)
        counts = SamplingState(params, (3, 4), (5, 5))
        behind = counts.followed_by((4, 6))
        whole = SamplingState(params, (3, 4), (5, 5, 4, 6))
        assert dict(zip(behind.token_ids, behind.counts, strict=True)) == dict(
            zip(whole.token_ids, whole.counts, strict=True)
        )
        assert behind.seen_ids.tolist() == whole.seen_ids.tolist() == [3, 4, 5, 6]
        assert counts.seen_ids.tolist() == [3, 4, 5]
        assert (counts.token_ids.tolist(), counts.counts.tolist()) == ([5], [2])


# --------------------------------------------------------------------------------------------------------- the schedule


class Copier(Ahead):
    """A scheduler with drafts over a model that draws `period` tokens again and again; `is_ahead`: launched ahead."""

    def __init__(self, *, period: int = 4, is_ahead: bool = False, num_speculative_tokens: int = 8, **settings) -> None:
        super().__init__(is_ahead=is_ahead, num_speculative_tokens=num_speculative_tokens, **settings)
        self.period = period

    def token(self, name: str, position: int) -> int:
        end_position, end_token = self.ends.get(name, (-1, 0))
        return end_token if position == end_position else 10 + position % self.period

    def land(self) -> None:
        plan = self.flights.pop(0)
        rows = [row for each in plan.sequences if each.is_sampled for row in each.rows()]
        tokens = []
        for row in rows:
            name, position = row.state.request.request_id, row.end - row.state.num_prompt_tokens
            error = EngineError("NaN") if self.errors.get(name) == position else None
            tokens.append(SampledToken(0 if error else self.token(name, position), error=error))
        self._take(self.scheduler.commit(plan, verified(rows, tokens)))

    def _check_pending(self, plan: SchedulePlan) -> None:
        for sequence in plan.sequences:
            state = sequence.state
            assert sequence.end - len(sequence.draft) <= len(state.token_ids) + (len(self.flights) > 1)
            assert sequence.end < state.num_prompt_tokens + state.request.max_tokens or not sequence.draft
            assert len(self.blocks.block_table(state.request.request_id)) * self.blocks.block_size >= sequence.end

    def expected(self, name: str, num_tokens: int) -> list[int]:
        return [self.token(name, position) for position in range(num_tokens)]


@pytest.mark.parametrize("is_ahead", [False, True], ids=["one step", "look-ahead"])
class TestSchedule:
    def test_a_text_that_repeats_itself_takes_far_fewer_steps(self, is_ahead: bool) -> None:
        harness = Copier(is_ahead=is_ahead)
        harness.add("a", max_tokens=100)
        assert harness.run() < 30
        assert harness.tokens("a") == harness.expected("a", 100)
        assert harness.reason("a") is FinishReason.LENGTH
        counted = harness.scheduler.speculation
        assert counted.num_accepted_tokens == counted.num_draft_tokens > 70
        assert harness.scheduler.num_generated_tokens == 100

    def test_a_text_that_never_repeats_has_no_drafts(self, is_ahead: bool) -> None:
        harness = Copier(period=1000, is_ahead=is_ahead)
        harness.add("a", max_tokens=60)
        harness.run()
        assert harness.scheduler.speculation.num_drafts == 0
        assert harness.tokens("a") == harness.expected("a", 60)

    def test_an_end_inside_a_draft_ends_the_request_there(self, is_ahead: bool) -> None:
        harness = Copier(is_ahead=is_ahead)
        harness.ends["a"] = (37, EOS)
        harness.add("a", max_tokens=100)
        harness.run()
        assert harness.tokens("a") == [*harness.expected("a", 37), EOS]
        assert harness.reason("a") is FinishReason.STOP
        assert len(harness.tokens("a")) == harness.scheduler.num_generated_tokens

    def test_a_stop_token_that_was_drafted_drops_what_was_accepted_behind_it(self, is_ahead: bool) -> None:
        harness = Copier(is_ahead=is_ahead)
        harness.add("a", max_tokens=100, stop_token_ids=[11], min_tokens=40)
        harness.run()
        assert harness.tokens("a") == harness.expected("a", 42)
        assert harness.reason("a") is FinishReason.STOP

    def test_an_error_behind_a_draft_ends_what_reaches_it(self, is_ahead: bool) -> None:
        harness = Copier(is_ahead=is_ahead)
        harness.errors["a"] = 37
        harness.add("a", max_tokens=100)
        harness.run()
        assert harness.tokens("a") == harness.expected("a", 37)
        assert harness.reason("a") is FinishReason.ERROR

    def test_only_verified_tokens_enter_the_prefix_cache(self, is_ahead: bool) -> None:
        harness = Copier(is_ahead=is_ahead)
        harness.ends["a"] = (20, 77)  # what is drafted there is wrong, so rows behind it were written
        harness.add("a", length=4, max_tokens=28)
        harness.run()
        (states,) = [{s.state for plan in harness.plans for s in plan.sequences}]
        (state,) = states
        assert list(state.token_ids[4:]) == harness.expected("a", 28)
        again = Request("b", tuple(state.token_ids), SamplingParams(), 1, 0)
        assert harness.blocks.start(again, again.prompt_token_ids) == 24, "whole blocks before the last token"
        harness.blocks.free("b")
        wrong = (*state.token_ids[:24], 10, 11, 12, 13, 10, 11, 12, 13)
        assert harness.blocks.start(Request("c", wrong, SamplingParams(), 1, 0), wrong) == 24
        harness.blocks.free("c")

    @given(
        sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=10),
        tokens=st.integers(8, 40),
        most=st.integers(1, 12),
        period=st.integers(1, 30),
        leaves=st.dictionaries(st.integers(0, 9), st.integers(0, 30), max_size=3),
    )
    @settings(max_examples=60, deadline=None)
    def test_any_mix_finishes_with_its_tokens_and_returns_everything(
        self,
        is_ahead: bool,
        sizes: list[tuple[int, int, int]],
        tokens: int,
        most: int,
        period: int,
        leaves: dict[int, int],
    ) -> None:
        harness = Copier(
            is_ahead=is_ahead, period=period, num_blocks=12, room=2, tokens=tokens, num_speculative_tokens=most
        )
        for index, (length, max_tokens, end) in enumerate(sizes):
            harness.ends[f"r{index}"] = (end * 4, EOS)
            harness.add(f"r{index}", length, adapter=index % 4 or None, max_tokens=max_tokens)
        for step in range(31):
            for index in [index for index, at in leaves.items() if at == step]:
                harness.scheduler.abort(f"r{index}")
            harness.step()
        harness.run()
        for index, (_, max_tokens, end) in enumerate(sizes):
            if index not in leaves:
                assert harness.tokens(f"r{index}") == harness.expected(f"r{index}", min(max_tokens, end * 4 + 1))
        assert all(plan.num_tokens <= tokens for plan in harness.plans)


class TestShares:
    def test_drafts_fill_a_step_up_to_so_many_rows(self) -> None:
        harness = Copier(period=2, num_blocks=200, seqs=32)
        for index in range(5):
            harness.add(f"r{index}", max_tokens=60)
        harness.run()
        rows = [plan.num_tokens for plan in harness.plans[1:]]
        assert max(rows) == MAX_ROWS
        shared = [sorted(ran(plan).values()) for plan in harness.plans if plan.num_tokens == MAX_ROWS]
        assert shared[0] == [3, 3, 3, 3, 4]

    def test_where_many_decode_there_are_no_drafts(self) -> None:
        harness = Copier(period=2, num_blocks=200, seqs=MAX_ROWS)
        for index in range(MAX_ROWS):
            harness.add(f"r{index}", max_tokens=20)
        assert harness.run() == 20
        assert harness.scheduler.speculation.num_drafts == 0

    def test_prompts_get_their_tokens_first(self) -> None:
        harness = Copier(period=2, tokens=16)
        harness.add("a", max_tokens=60)
        for _ in range(8):
            harness.step()
        assert max(map(len, (each.draft for plan in harness.plans for each in plan.sequences))) == 8
        harness.add("b", length=40)
        sizes = [ran(harness.step()) for _ in range(3)]
        assert sizes == [{"a": 1, "b": 15}, {"a": 1, "b": 15}, {"a": 6, "b": 10}]

    def test_without_kv_for_it_there_is_no_draft(self) -> None:
        asked: list[tuple[str, int]] = []

        def reserve(request_id: str, num_tokens: int) -> bool:
            asked.append((request_id, num_tokens))
            return request_id == "b"

        all_drafts, states = Speculation(2), [state_of("a"), state_of("b")]
        for state in states:
            state.token_ids = [1, 2, 3, 1, 2]
            state.num_scheduled_tokens = 4
            all_drafts.begin(state)
        scheduled = [ScheduledSequence.next_of(state, 1) for state in states]
        all_drafts.extend(scheduled, 20, reserve, 100)
        assert asked == [("a", 7), ("b", 7)]
        assert [each.draft for each in scheduled] == [(), (3, 1)]

    def test_without_the_setting_a_request_has_none(self) -> None:
        harness = Harness()
        harness.add("a", max_tokens=30)
        assert harness.run() == 30
        assert all(each.state.drafting is None for plan in harness.plans for each in plan.sequences)
