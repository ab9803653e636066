"""The waiting requests in the order of admission. A step costs what it admits and asks for, not the queue's length.

Requests of one tenant, one priority and one content (an adapter, a mix, or the base) are a line, in order of arrival;
one that ran before, or for which others were paused, is a line of its own. Only heads of lines are looked at:

    which tenant    the one that was served least, less its credit (shares.py)
    which line      the least rank of a head: arrival_step + priority * PRIORITY_STEPS, then the order of arrival
    which is next   the line's head; when its content is not there, the whole line lets others pass

A tenant that has nothing running, beside others, gets a short first step: once one of its requests is admitted, those
of tenants that run something wait for the next step (`Admission.hurry`). That keeps seats empty for a step: a quarter
of them at most, and every HURRY_STEPS steps, so that it costs no more than 1 / (4 * HURRY_STEPS) of the throughput.

So a level of priority is worth PRIORITY_STEPS steps of waiting, within the tenant: no request starves, and none of
another tenant comes later. With one tenant and one priority the order is that of arrival.

Each content that is asked for in a step and lacks room costs a walk through the memory. After MAX_LACKING of them in a
step a tenant's other lines are asked in the next steps, before those that were (`_Line.round`), and of a tenant that
comes after that, one in a step.

What a request waits for is kept in two places. `_Content.cause`: what its adapters were last found to wait for.
`_Line.passed`: up to which rank of the line others went past, since which step; a request that none went past waits for
a seat. A head was passed before those behind it, and came before them, so it is the line's furthest behind.

No look takes place while no seat and no token is free. So that a load which ends then is seen, lines that wait for one
are asked for in every step (`loading`).
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from loraplex.core import MixPart, WaitsFor
from loraplex.engine.schedule_plan import RequestState
from loraplex.engine.waiting.keyed_heap import KeyedHeap
from loraplex.engine.waiting.shares import HINT_SERVICE, TenantShare

Rank = tuple[int, int]
ContentKey = int | tuple[MixPart, ...] | None

MAX_PASSED = 16
"""Requests in a step whose prompts' log probabilities have no room in it."""

MAX_LACKING = 64
"""Contents in a step that were asked for and lack room."""

MAX_LOADING = 64
"""Lines in a step that are asked whether their load has ended."""

HURRY_STEPS = 8

URGENT_SHARE = 0.5
"""Of its target to the first token, after which a waiting request is urgent."""

SEAT = "seat"
"""What requests wait for that wait for no adapter."""


class _Content:
    """An adapter, a mix, or the base: what it was last found to wait for, and the lines of requests for it."""

    __slots__ = ("adapter_ids", "cause", "key", "lines")

    def __init__(self, key: ContentKey, adapter_ids: tuple[int, ...]) -> None:
        self.key = key
        self.adapter_ids = adapter_ids
        self.cause: WaitsFor | None = None
        self.lines: dict[_Line, None] = {}


class _Line:
    """Requests of one tenant, priority and content, by order of arrival.

    passed: (rank, step), both growing: requests before the rank were first passed in the step. counted: cause and
    length, as in the queue's counts. round: in which of its tenant it is asked next; nearly always there is one.
    """

    __slots__ = ("content", "counted", "key", "lacks_room", "lane", "members", "passed", "round")

    def __init__(self, lane: _Lane, content: _Content, key: object) -> None:
        self.lane = lane
        self.round = lane.round
        self.content = content
        self.key = key  # None: a line of its own
        self.members: OrderedDict[int, RequestState] = OrderedDict()
        self.passed: deque[tuple[Rank, int]] = deque()
        self.counted = SEAT, 0
        self.lacks_room: RequestState | None = None  # the head, while it does

    @property
    def head(self) -> RequestState:
        return next(iter(self.members.values()))

    @property
    def place(self) -> tuple[int, Rank]:
        """By which a tenant's lines are ordered: the least is next."""
        return self.round, self.head.rank

    @property
    def last(self) -> RequestState:
        return next(reversed(self.members.values()))

    def is_passed(self, state: RequestState) -> bool:
        return bool(self.passed) and state.rank < self.passed[-1][0]

    def cause_of(self, state: RequestState) -> WaitsFor | None:
        return self.content.cause if self.is_passed(state) else None

    def let_pass(self, before: Rank | None, step_id: int) -> None:
        """Others went past those before the rank; None: past all."""
        last = self.last.rank
        before = (last[0], last[1] + 1) if before is None or before > last else before
        if not self.passed or self.passed[-1][0] < before:
            self.passed.append((before, step_id))


class _Lane:
    """A tenant's lines: all, and those whose heads wait for nothing, a load, room. round: of the last one looked at."""

    __slots__ = ("lines", "loads", "num_waiting", "ready", "room", "round", "share")

    def __init__(self, share: TenantShare) -> None:
        self.share = share
        self.num_waiting = self.round = 0
        self.lines: KeyedHeap[_Line] = KeyedHeap()
        self.ready: KeyedHeap[_Line] = KeyedHeap()
        self.loads: OrderedDict[_Line, None] = OrderedDict()
        self.room = _RoomWaiters()


class _RoomWaiters:
    """Lines whose heads wait for room, by how far these are behind.

    Lags all grow by one a step, so their order is that of `starting_lag`. Those that are `aging_steps` behind or more
    are equal, and the one that waits longest is first.
    """

    __slots__ = ("_old", "_young")

    def __init__(self) -> None:
        self._young: KeyedHeap[_Line] = KeyedHeap()
        self._old: KeyedHeap[_Line] = KeyedHeap()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def put(self, line: _Line, head: RequestState) -> None:
        self._old.discard(line)
        self._young.put(line, (head.starting_lag, line.passed[0][1], head.arrival_index))

    def discard(self, line: _Line) -> None:
        self._young.discard(line)
        self._old.discard(line)

    def furthest_behind(self, step_id: int, aging_steps: int) -> RequestState | None:
        while (line := self._young.first()) is not None and self._young.key(line)[0] <= step_id - aging_steps:
            self._old.put(line, self._young.key(line)[1:])
            self._young.discard(line)
        line = self._old.first() or line
        return None if line is None else line.head


class WaitingQueue:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._lanes: dict[TenantShare, _Lane] = {}  # of tenants that wait
        self._order: KeyedHeap[_Lane] = KeyedHeap()  # by their place, or less: between two looks it only grows
        self._urgent_at: KeyedHeap[_Lane] = KeyedHeap()  # when their next request becomes urgent
        self._now_s = 0.0
        self._rooms: dict[_Lane, None] = {}  # in which heads wait for room
        self._loads: OrderedDict[_Lane, None] = OrderedDict()  # in which heads wait for a load
        self._lines: dict[object, _Line] = {}  # to which requests that arrive are added
        self._line_of: dict[RequestState, _Line] = {}
        self._contents: dict[ContentKey, _Content] = {}
        self._contents_of: dict[int, dict[_Content, None]] = {}  # by adapter
        self._arrivals: OrderedDict[int, RequestState] = OrderedDict()  # those that did not run yet
        self._returned: list[RequestState] = []  # those that did, by arrival
        self._by_cause: Counter[str] = Counter()
        self._last_left: TenantShare | None = None
        self.hurried_at = -HURRY_STEPS

    def __len__(self) -> int:
        return len(self._line_of)

    def __contains__(self, state: RequestState) -> bool:
        return state in self._line_of

    def __iter__(self) -> Iterator[RequestState]:
        """By arrival; walks the queue."""
        return iter(sorted(self._line_of, key=arrival_index))

    # ------------------------------------------------------------------------------------------------- come and go

    def arrive(self, state: RequestState) -> None:
        """A request comes. Its tenant is lifted when it has no other here; of equals it is then the first."""
        least = None
        if state.share not in self._lanes:
            least = self._least_served()
            state.share.served = max(state.share.served, self._floor(least))
        key = state.share, state.request.claim.priority, _content_key(state)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = self._open(state, key)
        if least is not None:
            self._order.put(least, least.share.place)  # behind it in the heap
        self._arrivals[state.arrival_index] = state
        self._join(line, state)

    def put_back(self, state: RequestState) -> None:
        """A request that ran waits again, at its place."""
        insort(self._returned, state, key=arrival_index)
        self._join(self._open(state, None), state)

    def remove(self, state: RequestState) -> WaitsFor | None:
        """It is admitted, or ended; returns what it waited for, None for a seat."""
        line = self._line_of[state]
        cause = line.cause_of(state)
        del self._line_of[state]
        self._leave(line, state)
        if self._arrivals.pop(state.arrival_index, None) is None:
            self._returned.remove(state)
        return cause

    def set_apart(self, state: RequestState) -> None:
        """It gets a line of its own, since it goes before its line, or is passed over alone."""
        line = self._line_of[state]
        if line.key is None:
            return
        since = next((step_id for before, step_id in line.passed if state.rank < before), None)
        own = self._open(state, None)
        self._join(own, state)
        if since is not None:
            own.let_pass(None, since)
            self._look(own)
        self._leave(line, state)

    def tell_time(self, now_s: float) -> None:
        """Requests that have waited for long enough become urgent."""
        self._now_s = now_s
        while (lane := self._urgent_at.first()) is not None and self._urgent_at.key(lane) <= now_s:
            self._weigh(lane)

    def _weigh(self, lane: _Lane) -> None:
        """Its next request is another one, or its time has come: give the tenant credit, or take it."""
        share = lane.share
        if share.ttft_target_s is None and not share.credit and lane not in self._urgent_at:
            return
        line = lane.lines.first()
        state = None if line is None else line.head
        self._urgent_at.discard(lane)
        credit = 0.0
        if state is not None and share.ttft_target_s is not None and not state.num_output_tokens:
            urgent_s = state.arrival_s + URGENT_SHARE * share.ttft_target_s
            if urgent_s <= self._now_s:
                credit = HINT_SERVICE / share.weight
            else:
                self._urgent_at.put(lane, urgent_s)
        if credit != share.credit:
            share.credit = credit
            if lane in self._order:
                self._order.put(lane, share.place)

    def _floor(self, least: _Lane | None) -> float:
        if least is not None:
            return least.share.served
        return 0.0 if self._last_left is None else self._last_left.served

    def _least_served(self) -> _Lane | None:
        while (lane := self._order.first()) is not None and self._order.key(lane) < lane.share.place:
            self._order.put(lane, lane.share.place)
        return lane

    def _open(self, state: RequestState, key: object) -> _Line:
        lane = self._lanes.get(state.share)
        if lane is None:
            lane = self._lanes[state.share] = _Lane(state.share)
            self._order.put(lane, state.share.place)
        content_key = _content_key(state)
        content = self._contents.get(content_key)
        if content is None:
            content = self._contents[content_key] = _Content(content_key, state.request.adapter_ids)
            for adapter_id in content.adapter_ids:
                self._contents_of.setdefault(adapter_id, {})[content] = None
        line = _Line(lane, content, key)
        content.lines[line] = None
        return line

    def _join(self, line: _Line, state: RequestState) -> None:
        self._line_of[state] = line
        line.members[state.arrival_index] = state
        line.lane.num_waiting += 1
        self._count(line)
        if len(line.members) == 1:
            line.lane.lines.put(line, line.place)
            self._sort(line)
        self._weigh(line.lane)

    def _leave(self, line: _Line, state: RequestState) -> None:
        is_head = line.head is state
        del line.members[state.arrival_index]
        line.lane.num_waiting -= 1
        if not line.members:
            self._close(line)
        elif is_head:
            line.lane.lines.put(line, line.place)
            self._weigh(line.lane)
            self._look(line)
        else:
            self._count(line)

    def _close(self, line: _Line) -> None:
        lane, content = line.lane, line.content
        lane.lines.discard(line)
        self._weigh(lane)
        if line.key is not None:
            del self._lines[line.key]
        self._look(line)
        del content.lines[line]
        if not content.lines:
            del self._contents[content.key]
            for adapter_id in content.adapter_ids:
                del self._contents_of[adapter_id][content]
                if not self._contents_of[adapter_id]:
                    del self._contents_of[adapter_id]
        if not lane.num_waiting:
            del self._lanes[lane.share]
            self._order.discard(lane)
            self._last_left = lane.share

    def _look(self, line: _Line) -> None:
        """The head is another, or was passed, or waits for something else."""
        head = line.head if line.members else None
        while head is not None and line.passed and line.passed[0][0] <= head.rank:
            line.passed.popleft()
        lacking = head if head is not None and line.cause_of(head) is WaitsFor.ROOM else None
        if lacking is not line.lacks_room:
            line.lacks_room, room = lacking, line.lane.room
            if lacking is not None:
                room.put(line, lacking)
                self._rooms[line.lane] = None
            else:
                room.discard(line)
                if not room:
                    del self._rooms[line.lane]
        self._count(line)
        self._sort(line)

    def _count(self, line: _Line) -> None:
        cause, length = line.counted
        self._by_cause[cause] -= length
        waits_for = line.cause_of(line.head) if line.members else None
        cause = SEAT if waits_for is None else waits_for.value
        line.counted = cause, len(line.members)
        self._by_cause[cause] += len(line.members)

    def _sort(self, line: _Line) -> None:
        """By what its head waits for."""
        lane, (cause, length) = line.lane, line.counted
        if not length or cause != SEAT:
            lane.ready.discard(line)
        elif line not in lane.ready or lane.ready.key(line) != line.place:
            lane.ready.put(line, line.place)
        if length and cause == WaitsFor.LOAD.value:
            lane.loads[line] = self._loads[lane] = None
        elif line in lane.loads:
            del lane.loads[line]
            if not lane.loads:
                del self._loads[lane]

    # --------------------------------------------------------------------------------------------------- what waits

    @property
    def lacks_room(self) -> bool:
        """Whether a request waits for room on the device."""
        return bool(self._rooms)

    def waits_for_room(self, state: RequestState) -> bool:
        line = self._line_of.get(state)
        return line is not None and line.cause_of(state) is WaitsFor.ROOM

    def furthest_behind(self, step_id: int, aging_steps: int) -> RequestState | None:
        """What lacks room and is furthest behind, of the tenant that was served least; see AdapterTurns."""
        lane = min(self._rooms, key=lambda each: each.share.served, default=None)
        return None if lane is None else lane.room.furthest_behind(step_id, aging_steps)

    def next_ready(self, lets_pass: Callable[[RequestState], bool]) -> RequestState | None:
        """The request that comes next of those that wait for no adapter. `lets_pass`: then of another tenant."""
        found, passed = None, list[_Lane]()
        while found is None and (lane := self._least_served()) is not None:
            line = lane.ready.first()
            if line is not None and not lets_pass(line.head):
                found = line.head
            else:
                self._order.discard(lane)
                passed.append(lane)
        for lane in passed:
            self._order.put(lane, lane.share.place)
        return found

    def is_missing(self, state: RequestState) -> bool:
        """Whether its adapter was not there when it was last asked for."""
        return self._line_of[state].cause_of(state) is not None

    def loading(self) -> Iterator[RequestState]:
        """Requests that wait for a load, one of a line, and after one that ends meanwhile the next. Tenants take turns,
        and so do their lines, in this call and the next."""
        for _ in range(min(MAX_LOADING, sum(len(lane.loads) for lane in self._loads))):
            if not self._loads:
                return
            lane = next(iter(self._loads))
            line = next(iter(lane.loads))
            self._loads.move_to_end(lane)
            lane.loads.move_to_end(line)
            while line.members and (state := line.head):
                yield state
                if state in self:
                    break

    def by_cause(self) -> Mapping[str, int]:
        """How many wait for what; a line waits for what its head does."""
        return {cause: self._by_cause[cause] for cause in (SEAT, WaitsFor.LOAD.value, WaitsFor.ROOM.value)}

    def adapter_ids(self) -> set[int]:
        return set(self._contents_of)

    def states_of(self, adapter_id: int) -> list[RequestState]:
        """Requests through an adapter, in no order."""
        contents = self._contents_of.get(adapter_id, ())
        return [state for content in contents for line in content.lines for state in line.members.values()]

    def first(self, num_states: int) -> list[RequestState]:
        """Of the first that came, those that wait for no adapter."""
        ahead = self._returned[:num_states]
        for state, _ in zip(self._arrivals.values(), range(num_states), strict=False):
            ahead.append(state)
        if self._returned:
            ahead.sort(key=arrival_index)
        return [state for state in ahead[:num_states] if self._line_of[state].cause_of(state) is None]

    # ---------------------------------------------------------------------------------------------------- admission

    def admission(self, called: Sequence[RequestState], step_id: int) -> Admission:
        """A look through the queue; `called` come first."""
        return Admission(self, called, step_id)

    def found(self, state: RequestState, cause: WaitsFor | None) -> None:
        """What the request's adapters wait for; None: they are there."""
        content = self._line_of[state].content
        if content.cause is not cause:
            content.cause = cause
            for each in content.lines:
                self._look(each)

    def check_integrity(self) -> None:
        """Assert that every request is in one line, and that counts and heads are those of the lines."""
        lines = {line: None for content in self._contents.values() for line in content.lines}
        members = {state: line for line in lines for state in line.members.values()}
        assert members == self._line_of
        assert {line for line in lines if line.key is not None} == set(self._lines.values())
        assert sorted([*self._arrivals, *map(arrival_index, self._returned)]) == sorted(map(arrival_index, members))
        for line in lines:
            assert line.members, "a line is empty"
            assert list(line.members) == sorted(line.members), "a line is out of order"
            assert line in line.lane.lines
            assert line.lane.lines.key(line) == line.place
            assert (line.lacks_room is line.head) == (line.cause_of(line.head) is WaitsFor.ROOM)
        assert len(self._urgent_at) == sum(lane in self._urgent_at for lane in self._lanes.values())
        for share, lane in self._lanes.items():
            assert not share.credit or share.ttft_target_s is not None, "credit without a target"
            assert lane.num_waiting == sum(state.share is share for state in members) > 0
            assert lane in self._order
            num_lacking = sum(line.lacks_room is not None for line in lines if line.lane is lane)
            assert (len(lane.room), lane in self._rooms) == (num_lacking, num_lacking > 0)
            causes = {line: line.cause_of(line.head) for line in lines if line.lane is lane}
            assert all(lane.ready.key(line) == line.place for line, cause in causes.items() if cause is None)
            assert len(lane.ready) == list(causes.values()).count(None)
            assert set(lane.loads) == {line for line, cause in causes.items() if cause is WaitsFor.LOAD}
            assert (lane in self._loads) == bool(lane.loads)
        assert sum(self._by_cause.values()) == len(members)


class Admission:
    """One look through the queue: `next`, and then `pass_over`, `block` or the queue's `remove` of what it gave.

    Close it: what let others pass is marked then.
    """

    def __init__(self, queue: WaitingQueue, called: Sequence[RequestState], step_id: int) -> None:
        """called: these are first."""
        self._queue = queue
        self._called = deque(called)
        self._step_id = step_id
        self._aside: list[_Line] = []
        self._empty: list[_Lane] = []
        self._reached: dict[_Lane, Rank | None] = {}  # those before it were looked at; None: all
        self._blocked: list[tuple[_Line, bool]] = []
        self._num_passed = 0
        self._whole: set[_Lane] = set()  # all lines of these were looked at
        self._asked: set[_Content] = set()  # and lack room
        self._lacking: dict[_Lane, list[_Line]] = {}  # of these
        self._is_short = False

    def next(self) -> RequestState | None:
        """The request that comes next, until it is removed or set aside; None when there is none."""
        queue = self._queue
        while self._called:
            if self._called[0] in queue:
                return self._called[0]
            self._called.popleft()
        while (lane := queue._least_served()) is not None:
            line = lane.lines.first()
            if line is not None and not (self._is_short and lane.share.num_running):
                lane.round, rank = line.round, line.head.rank
                self._reached[lane] = max(rank, self._reached.get(lane) or rank)
                return line.head
            if line is None:
                self._reached[lane] = None
                self._whole.add(lane)
            self._end(lane)
        return None

    def hurry(self) -> None:
        """What was admitted is all that its tenant runs: prompts of tenants that run something begin a step later,
        unless that was so less than HURRY_STEPS ago."""
        if self._queue.hurried_at <= self._step_id - HURRY_STEPS:
            self._queue.hurried_at, self._is_short = self._step_id, True

    def pass_over(self, state: RequestState) -> None:
        """It does not run in this step, whatever room there is, and waits as before."""
        self._queue.set_apart(state)
        self._set_aside(state)

    def pass_some(self, state: RequestState) -> None:
        """As `pass_over`, MAX_PASSED times in a look, and then as `pass_tenant`: a step looks at few requests."""
        self._num_passed += 1
        (self.pass_over if self._num_passed <= MAX_PASSED else self.pass_tenant)(state)

    def pass_tenant(self, state: RequestState) -> None:
        """Nor do others of its tenant."""
        if self._called and self._called[0] is state:
            self._called.popleft()
        self._end(self._queue._line_of[state].lane)

    def _end(self, lane: _Lane) -> None:
        self._queue._order.discard(lane)
        self._empty.append(lane)

    def block(self, state: RequestState, cause: WaitsFor) -> None:
        """Its adapter is not there: it and those behind it in its line let others pass."""
        line, is_called = self._set_aside(state)
        self._blocked.append((line, is_called))
        self._queue.found(state, cause)
        if cause is WaitsFor.ROOM and not is_called:
            self._asked.add(line.content)
            self._lacking.setdefault(line.lane, []).append(line)
            if len(self._asked) >= MAX_LACKING:
                self._ask_later(line.lane)

    def _ask_later(self, lane: _Lane) -> None:
        """The next look at the tenant begins behind what was found to lack room in this one."""
        self._reached[lane] = None
        for line in self._lacking[lane]:
            line.round = lane.round + 1
        self._end(lane)

    def _set_aside(self, state: RequestState) -> tuple[_Line, bool]:
        is_called = bool(self._called) and self._called[0] is state
        if is_called:
            self._called.popleft()
        line = self._queue._line_of[state]
        line.lane.lines.discard(line)
        self._queue._weigh(line.lane)
        self._aside.append(line)
        return line, is_called

    def close(self) -> None:
        queue = self._queue
        for line, is_called in self._blocked:
            line.let_pass(None if is_called else self._reached[line.lane], self._step_id)
            queue._look(line)
        for line in self._aside:
            if line.lane in self._whole:
                line.round = line.lane.round
            line.lane.lines.put(line, line.place)
            queue._weigh(line.lane)
            queue._sort(line)
        for lane in self._empty:
            if lane.num_waiting:
                queue._order.put(lane, lane.share.place)


def _content_key(state: RequestState) -> ContentKey:
    return state.request.mix or state.request.adapter_id


def arrival_index(state: RequestState) -> int:
    return state.arrival_index
