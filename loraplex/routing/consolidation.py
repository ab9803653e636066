"""As few runners as the load needs (Punica, section 5): which ones drain, end and come back, and what moves off them.

    OPEN      -- the others have room for all that is there    --> DRAINING  (gets nothing new; its requests move off)
    DRAINING  -- more is wanted                                --> OPEN
    DRAINING  -- empty for idle_s                              --> RELEASED  (its process ends)
    RELEASED  -- more is wanted                                --> STARTING, and OPEN when it serves

More is wanted where the load, or what a growing one will be when a process has started, takes more than `high` of the
open places or of their KV, or fewer than min_runners serve. A runner drains where its load and that of the others
took at most `low` of their places for `calm_s`. The gap between the two is what keeps a steady load where it is.

What came while one was away may be more than the others have places for: those that have no token yet move to one that
is back.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from loraplex.routing.policies import Policy, place
from loraplex.routing.snapshot import Needs, Snapshot


class RunnerState(enum.StrEnum):
    OPEN = "open"
    DRAINING = "draining"
    RELEASED = "released"
    STARTING = "starting"


@dataclass(frozen=True, slots=True)
class Rules:
    """low, high: shares of the places and of the KV. max_moving: requests on their way to one runner at a time: each
    is computed there again, beside those that run. min_tokens_left: a request that may get no more stays to its end.
    """

    min_runners: int = 1
    idle_s: float = 60.0
    low: float = 0.75
    high: float = 0.9
    calm_s: float = 1.0
    max_moving: int = 4
    min_tokens_left: int = 16


@dataclass(frozen=True, slots=True)
class Held:
    """A prompt's completions at a runner. needs.num_prompt_tokens: all that is to be computed again, without a cache.

    num_tokens_left: the most that one of them may still get. target: the runner that they are on their way to.
    is_waiting: they have no token of this runner yet.
    """

    key: str
    needs: Needs
    num_completions: int = 1
    num_tokens_left: int = 1 << 30
    target: str | None = None
    can_move: bool = True
    is_waiting: bool = False


@dataclass(frozen=True, slots=True)
class Member:
    """A runner. Its snapshot says whether it serves (`is_healthy`), its state whether it may get requests.

    empty_since_s: when its last request ended or moved; None while it has some.
    """

    snapshot: Snapshot
    state: RunnerState = RunnerState.OPEN
    held: tuple[Held, ...] = ()
    empty_since_s: float | None = None

    @property
    def name(self) -> str:
        return self.snapshot.name

    @property
    def is_open(self) -> bool:
        return self.state is RunnerState.OPEN and self.snapshot.is_healthy

    @property
    def is_starting(self) -> bool:
        return self.state is RunnerState.STARTING


@dataclass(frozen=True, slots=True)
class Move:
    key: str
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Decision:
    """Names of runners whose state is to change, and requests that are to move."""

    drain: tuple[str, ...] = ()
    reopen: tuple[str, ...] = ()
    release: tuple[str, ...] = ()
    start: tuple[str, ...] = ()
    moves: tuple[Move, ...] = ()


class Load:
    """Requests of all runners over the last seconds. Times are the caller's and do not fall."""

    WINDOW_S = 2.0

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def note(self, now_s: float, num_requests: int) -> None:
        self._samples.append((now_s, num_requests))
        while len(self._samples) > 2 and self._samples[1][0] <= now_s - self.WINDOW_S:
            self._samples.popleft()

    def peak(self, seconds: float) -> float:
        """The most in the last seconds; infinite while there are no samples of so long ago."""
        if not self._samples or self._samples[0][0] > self._samples[-1][0] - seconds:
            return float("inf")
        begin_s = self._samples[-1][0] - seconds
        return max(number for at_s, number in self._samples if at_s >= begin_s)

    def expected(self, seconds: float) -> float:
        """How many there will be so many seconds from now: growth goes on that both halves of the window had."""
        if not self._samples:
            return 0.0
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        if last_s - first_s < self.WINDOW_S / 2:
            return last
        middle_s, middle = min(self._samples, key=lambda each: abs(each[0] - (first_s + last_s) / 2))
        if not first_s < middle_s < last_s:
            return last
        growth = min((middle - first) / (middle_s - first_s), (last - middle) / (last_s - middle_s))
        return last + max(0.0, growth) * seconds


def decide(
    members: Sequence[Member], load: Load, start_s: float, rules: Rules, policy: Policy, now_s: float
) -> Decision:
    """What to do now. start_s: what a start of a process takes. policy: which of the runners takes what moves.

    One kind of change at a time: what more load asks for goes before what less load allows.
    """
    members = sorted(members, key=lambda member: member.name)
    reopen, start = _wanted(members, load.expected(start_s), rules)
    if reopen or start:
        return Decision(reopen=reopen, start=start)
    release = _released(members, rules, now_s)
    is_changing = release or any(each.is_starting for each in members)
    drain = () if is_changing else _drained(members, load, rules, policy, now_s)
    draining = [each for each in members if each.state is RunnerState.DRAINING or each.name in drain]
    targets = [each for each in members if each.is_open and each not in draining]
    leaving = {each.name: each.held for each in draining} | {each.name: _beyond_places(each) for each in targets}
    return Decision(drain, release=release, moves=_moves(leaving, targets, rules, policy, now_s))


def _wanted(members: Sequence[Member], expected: float, rules: Rules) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(which to open again, which to start): the fullest of those that drain, then those that ended."""
    ready = [each for each in members if each.is_open or each.is_starting]
    drains = [each for each in members if each.state is RunnerState.DRAINING and each.snapshot.is_healthy]
    drains.sort(key=lambda each: (-each.snapshot.num_requests, each.name))
    spare = [*drains, *(each for each in members if each.state is RunnerState.RELEASED)]
    used_kv = sum(map(_used_kv, members))
    taken = []
    for member in spare:
        if len(ready) >= rules.min_runners and not _is_short(ready, expected, used_kv, rules):
            break
        ready.append(member)
        taken.append(member)
    return (
        tuple(each.name for each in taken if each in drains),
        tuple(each.name for each in taken if each not in drains),
    )


def _is_short(ready: Sequence[Member], num_requests: float, used_kv: int, rules: Rules) -> bool:
    return num_requests > rules.high * _places(ready) or used_kv > rules.high * _kv_blocks(ready)


def _released(members: Sequence[Member], rules: Rules, now_s: float) -> tuple[str, ...]:
    num_open = sum(each.is_open for each in members)
    ready = [
        each.name
        for each in members
        if each.state is RunnerState.DRAINING
        and each.snapshot.is_healthy
        and not each.held
        and each.empty_since_s is not None
        and now_s - each.empty_since_s >= rules.idle_s
    ]
    return tuple(ready) if num_open >= rules.min_runners else ()


def _drained(members: Sequence[Member], load: Load, rules: Rules, policy: Policy, now_s: float) -> tuple[str, ...]:
    """The quietest ones, as long as the others have room for what those have; of equals the last."""
    left = [each for each in members if each.is_open]
    quiet = left[::-1]
    quiet.sort(key=lambda each: each.snapshot.num_requests)
    drained: list[Member] = []
    for member in quiet:
        others = [each for each in left if each is not member]
        if len(others) < max(1, rules.min_runners) or not _have_room(others, members, load, rules):
            break
        tried = [*drained, member]
        if not _fit(tried, others, policy, now_s):
            break
        left, drained = others, tried
    return tuple(each.name for each in drained)


def _have_room(others: Sequence[Member], members: Sequence[Member], load: Load, rules: Rules) -> bool:
    used_kv = sum(map(_used_kv, members))
    return load.peak(rules.calm_s) <= rules.low * _places(others) and used_kv <= rules.low * _kv_blocks(others)


def _fit(drained: Sequence[Member], others: Sequence[Member], policy: Policy, now_s: float) -> bool:
    """Whether others can take all that is there, one after the other."""
    snapshots = [each.snapshot for each in others]
    for held in (each for member in drained for each in member.held):
        target = _target(held, snapshots, policy, now_s)
        if target is None:
            return False
        snapshots = _with(snapshots, target, held)
    return True


def _beyond_places(member: Member) -> tuple[Held, ...]:
    """What waits there, as far as it has no place; what is on its way elsewhere is among it."""
    excess = member.snapshot.num_requests - member.snapshot.max_requests
    waiting = [each for each in member.held if each.target is not None or each.is_waiting]
    waiting.sort(key=lambda each: (each.target is None, each.needs.num_prompt_tokens, each.key))
    leaving = []
    for held in waiting:
        if held.target is None and held.num_completions > excess:
            continue
        excess -= held.num_completions
        leaving.append(held)
    return tuple(leaving)


def _moves(
    leaving: Mapping[str, Sequence[Held]], targets: Sequence[Member], rules: Rules, policy: Policy, now_s: float
) -> tuple[Move, ...]:
    """leaving: what is to leave a runner, or is on its way already, by its name."""
    room = {each.name: rules.max_moving for each in targets}
    snapshots = [each.snapshot for each in targets]
    for held in (each for of_runner in leaving.values() for each in of_runner):
        if held.target in room:
            room[held.target] -= 1
            snapshots = _with(snapshots, held.target, held)
    moves = []
    for name, of_runner in leaving.items():
        for held in sorted(of_runner, key=lambda each: (each.needs.num_prompt_tokens, each.key)):
            stays = held.target is not None or not held.can_move or held.num_tokens_left <= rules.min_tokens_left
            if stays or not any(number > 0 for number in room.values()):
                continue
            target = _target(held, [each for each in snapshots if room[each.name] > 0], policy, now_s)
            if target is not None:
                room[target] -= 1
                snapshots = _with(snapshots, target, held)
                moves.append(Move(held.key, name, target))
    return tuple(moves)


def _target(held: Held, snapshots: Sequence[Snapshot], policy: Policy, now_s: float) -> str | None:
    """The runner that takes it, where it fits as a whole."""
    return place(held.needs, [each for each in snapshots if _takes(each, held)], policy, now_s)


def _takes(snapshot: Snapshot, held: Held) -> bool:
    num_requests = snapshot.num_requests + held.num_completions
    return snapshot.fits(held.needs) and num_requests <= snapshot.max_requests


def _with(snapshots: Sequence[Snapshot], name: str, held: Held) -> list[Snapshot]:
    """As they will be when it is there."""
    return [_grown(each, held) if each.name == name else each for each in snapshots]


def _grown(snapshot: Snapshot, held: Held) -> Snapshot:
    num_blocks = -(-held.needs.num_prompt_tokens // snapshot.kv_block_tokens)
    free = snapshot.num_free_kv_blocks
    return replace(
        snapshot,
        num_running=snapshot.num_running + held.num_completions,
        num_free_kv_blocks=None if free is None else max(0, free - num_blocks),
    )


def _places(members: Sequence[Member]) -> int:
    return sum(each.snapshot.max_requests for each in members)


def _kv_blocks(members: Sequence[Member]) -> float:
    """Infinite where one does not say."""
    counts = [each.snapshot.num_kv_blocks for each in members]
    return float("inf") if None in counts else float(sum(each or 0 for each in counts))


def _used_kv(member: Member) -> int:
    free, total = member.snapshot.num_free_kv_blocks, member.snapshot.num_kv_blocks
    return 0 if free is None or total is None else total - free
