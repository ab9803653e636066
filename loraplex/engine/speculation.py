"""Drafts: tokens that a request may draw next, run in one step with the token before them and then verified.

    draft       what followed the last tokens where they stood before, in the request's own prompt and output
    verify      row j of 1 + k is drawn as plain decoding draws it behind the draft's first j tokens; kept are the rows
                before which each token was drawn as the draft had it (`verified`)
    depth       how long a draft may be: twice as long after one that held, no longer than what held after another

A draw depends on its logits, the request's seed and the position alone (engine/sampler.py), and with kernels whose rows
do not depend on the batch so do the logits: what is kept has the bits of plain decoding. Pure Python, without torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

from loraplex.engine.schedule_plan import Drafts, RequestState, SampledToken, ScheduledSequence

MAX_ROWS = 16
"""Decoding rows of a step, drafts counted, up to which drafts are added. Up to about here a CPU's step is bound by the
reading of weights, and a row more costs little."""

WINDOW = 16384
"""Tokens of a prompt, its last ones, in which earlier occurrences are looked for. It bounds what is kept of a request
to a few MB, and the look at a prompt to some milliseconds."""

MAX_CANDIDATES, MAX_MATCH = 8, 8
"""Latest occurrences that are compared, and tokens over which they are."""

FIRST_DEPTH = 2
CREDIT, PROBE_CREDIT, GAIN = 8, 2, 3
"""Rejected tokens until drafts rest: at the beginning, and after a rest. An accepted one is worth GAIN of them: it
saves a step, and a rejected one costs a row."""

SHORTEST_REST, LONGEST_REST = 32, 512
"""Tokens without drafts; each rest is twice as long as the one before, until drafts hold again."""


class NGramIndex:
    """Where pairs of tokens stood before in one growing text."""

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._latest: dict[int, int] = {}  # pair -> where it ended last
        self._before = array("i")  # of each position from `_first` on, where its pair ended before; -1: nowhere
        self._first = self._next = 0

    def propose(self, token_ids: Sequence[int], depth: int) -> tuple[int, ...]:
        """What followed the longest match of the text's end, the latest one of equals; () without a match of two.

        Where that reaches the end of the text it goes on with itself, so a text that repeats itself is followed
        however short its period is. `token_ids` is the same text as before, with tokens added.
        """
        self._catch_up(token_ids)
        follows = self._best_match(token_ids)
        if follows is None:
            return ()
        draft = list(token_ids[follows : follows + depth])
        while len(draft) < depth:
            draft.append(draft[len(draft) - (len(token_ids) - follows)])
        return tuple(draft)

    def _catch_up(self, token_ids: Sequence[int]) -> None:
        """All pairs that something follows."""
        if not self._next:
            self._first = self._next = max(1, len(token_ids) - self._window)
        latest, before = self._latest, self._before
        for end in range(self._next, len(token_ids) - 1):
            pair = token_ids[end - 1] << 32 | token_ids[end]
            before.append(latest.get(pair, -1))
            latest[pair] = end
        self._next = max(self._next, len(token_ids) - 1)

    def _best_match(self, token_ids: Sequence[int]) -> int | None:
        """Where what follows it begins."""
        last = len(token_ids) - 1
        end = self._latest.get(token_ids[last - 1] << 32 | token_ids[last], -1) if last else -1
        best, longest = None, 0
        for _ in range(MAX_CANDIDATES):
            if end < 0 or longest == MAX_MATCH:
                break
            length, most = 2, min(MAX_MATCH, end + 1)
            while length < most and token_ids[end - length] == token_ids[last - length]:
                length += 1
            if length > longest:
                best, longest = end + 1, length
            end = self._before[end - self._first]
        return best


class Drafting:
    """The drafts of one request, and how long they may be now."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._depth = min(FIRST_DEPTH, most)
        self._credit = CREDIT
        self._rest = SHORTEST_REST
        self._resumes_at = 0
        self._index = NGramIndex()

    def depth_at(self, num_tokens: int) -> int:
        """Tokens that a draft may have behind `num_tokens` of prompt and output; 0 while drafts rest."""
        return 0 if num_tokens < self._resumes_at else self._depth

    def propose(self, token_ids: Sequence[int], depth: int) -> tuple[int, ...]:
        """At most `depth` tokens."""
        return self._index.propose(token_ids, depth)

    def see(self, num_drafted: int, num_accepted: int, num_tokens: int) -> None:
        """A draft was verified; the text has `num_tokens` now."""
        if num_accepted < num_drafted:
            self._depth = min(self._most, num_accepted + 1)
        elif num_drafted >= self._depth:
            self._depth = min(self._most, 2 * self._depth)
        self._credit = min(CREDIT, self._credit + GAIN * num_accepted - (num_drafted - num_accepted))
        if self._credit == CREDIT:
            self._rest = SHORTEST_REST
        elif self._credit <= 0:
            self._resumes_at, self._credit = num_tokens + self._rest, PROBE_CREDIT
            self._rest = min(2 * self._rest, LONGEST_REST)


class Speculation:
    """Drafts of all requests of a scheduler: added to what a step runs anyway, out of tokens and KV that it leaves.

    num_drafts, num_draft_tokens: that were verified; num_accepted_tokens: of those, the ones that requests got.
    """

    def __init__(self, most: int) -> None:
        """most: tokens of a draft; 0: no request has drafts."""
        self._most = most
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0

    def begin(self, state: RequestState) -> None:
        """A request arrives. Those with a grammar have no drafts: its mask is known for the next token alone."""
        if self._most and state.grammar is None:
            state.drafting = Drafting(self._most)

    def extend(
        self,
        scheduled: list[ScheduledSequence],
        num_tokens_left: int,
        reserve: Callable[[str, int], bool],
        max_model_len: int,
    ) -> None:
        """Give sequences that decode their drafts, as many tokens as the step has left, in even shares.

        reserve(request_id, num_tokens): KV for so many in all; without it there is no draft. max_model_len: as of
        `RequestState.num_tokens_to_come`.
        """
        if not self._most:
            return
        wanted = [
            (place, depth) for place, each in enumerate(scheduled) if (depth := _depth_for(each, max_model_len)) > 0
        ]
        room = min(num_tokens_left, MAX_ROWS - sum(not each.is_prefill for each in scheduled))
        for num_behind, (place, depth) in zip(reversed(range(len(wanted))), wanted, strict=True):
            share = -(-room // (num_behind + 1))
            if share <= 0:
                return
            sequence, state = scheduled[place], scheduled[place].state
            draft = _drafting_of(state).propose(state.token_ids, min(depth, share))
            if draft and reserve(state.request.request_id, sequence.end + len(draft)):
                scheduled[place] = sequence.with_draft(draft)
                room -= len(draft)

    def see(self, sequence: ScheduledSequence, num_tokens: int) -> None:
        """A sequence with a draft is committed; the request got `num_tokens` by it."""
        num_drafted, num_accepted = len(sequence.draft), max(0, num_tokens - 1)
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        _drafting_of(sequence.state).see(num_drafted, num_accepted, len(sequence.state.token_ids))


def _drafting_of(state: RequestState) -> Drafts:
    assert state.drafting is not None, f"request {state.request.request_id} has no drafts"
    return state.drafting


def _depth_for(sequence: ScheduledSequence, max_model_len: int) -> int:
    """Of one that decodes, whose tokens are all known: the last that it may get needs no draft."""
    state = sequence.state
    if state.drafting is None or not sequence.is_sampled or sequence.num_tokens > 1 or state.num_pending_tokens:
        return 0
    return min(state.drafting.depth_at(len(state.token_ids)), state.num_tokens_to_come(max_model_len) - 1)


def verified(rows: Sequence[ScheduledSequence], drawn: Sequence[SampledToken]) -> dict[str, SampledToken]:
    """What each request gets, by request_id, of what was drawn for rows: the first one, and in its `more` those behind
    drafts that held.

    rows: of a sequence with a draft, `ScheduledSequence.rows`.
    """
    if not any(row.draft for row in rows):
        return {row.state.request.request_id: token for row, token in zip(rows, drawn, strict=True)}
    runs: dict[str, list[SampledToken]] = {}
    for row, token in zip(rows, drawn, strict=True):
        run = runs.setdefault(row.state.request.request_id, [])
        if len(run) == len(row.draft) and (not run or (run[-1].error is None and run[-1].token_id == row.draft[-1])):
            run.append(token)
    return {
        request_id: replace(run[0], more=tuple(run[1:])) if len(run) > 1 else run[0] for request_id, run in runs.items()
    }
