"""The requests of a front: what each has said, where it runs, and how one goes on in another runner.

    bring      its adapters are made resident on the target; where they cannot be, it stays
    withdraw   the source forgets it; all that it drew of it is here before the reply
    go on      the target gets the prompt and these tokens, and computes their KV again, as after a preemption

Draws depend on seed and position alone, and counts are the front's: tokens, log probabilities, stop strings and usage
are those of a request that never moved. A request of a runner that ends meanwhile ends with it; where the target has
ended, another one takes it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace

from loraplex.adapters.registry import LoRARef
from loraplex.core import Request, RequestOutput
from loraplex.errors import AdapterFaultError, EngineDeadError, EngineError, LoraplexError, RequestAbortedError
from loraplex.frontend import messages as msg
from loraplex.frontend.runners.runner import Placement, Runner
from loraplex.routing import Held

logger = logging.getLogger(__name__)

STAY_S = 10.0
"""How long a request stays where it is after a move that was refused."""

PlaceAgain = Callable[[msg.AddRequests, int, Runner], Placement]


class OutputStream:
    """The latest output of one request. Outputs are cumulative: a slow reader skips some, and memory is bounded.

    on_output: is given each when it comes; on_end: once, a runner that may have messages of it to read, None where it
    has ended. target: the runner that it is on its way to.
    """

    def __init__(
        self,
        request_id: str,
        refs: tuple[LoRARef, ...],
        placement: Placement,
        on_end: Callable[[Runner | None], None],
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> None:
        self.request_id = request_id
        self.refs = refs
        self.placement = placement
        self.target: Runner | None = None
        self.stays_until_s = 0.0
        self._latest: RequestOutput | None = None
        self._error: LoraplexError | None = None
        self._has_news = asyncio.Event()
        self._on_end: Callable[[Runner | None], None] | None = on_end
        self._on_output = on_output

    @property
    def rank(self) -> int:
        return max((ref.max_rank for ref in self.refs), default=0)

    def held(self, now_s: float) -> Held:
        """As consolidation sees it."""
        placement = self.placement
        return Held(
            self.request_id,
            placement.needs_again,
            placement.num_completions,
            placement.num_tokens_left,
            None if self.target is None else self.target.name,
            can_move=now_s >= self.stays_until_s,
            is_waiting=not placement.has_answered,
        )

    def put(self, output: RequestOutput) -> None:
        self._latest = output
        if self._on_output is not None:
            self._on_output(output)
        self.placement.grow(output)
        self._has_news.set()
        if output.finished:
            self.end(is_read=True)

    def fail(self, error: LoraplexError) -> None:
        self._error = error
        self._has_news.set()
        self.end()

    def end(self, *, is_read: bool = False) -> None:
        """Return what the request held, once."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            self.placement.end()
            on_end(None if is_read else self.placement.runner)

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        is_finished = False
        while not is_finished:
            await self._has_news.wait()
            self._has_news.clear()
            if self._latest is not None:
                output, self._latest = self._latest, None
                is_finished = output.finished
                yield output
            if self._error is not None and not is_finished:
                try:
                    raise self._error
                finally:
                    self._error = None  # its frames have this stream: a cycle, which has all of the request


class Mover:
    """Moves requests between runners. unfinished: of a request, as `OutputProcessor` has them; fail: ends one with an
    error, in the front too; is_forced_out: whether an adapter of it was unloaded by force."""

    def __init__(
        self,
        streams: Mapping[str, OutputStream],
        place: PlaceAgain,
        unfinished: Callable[[str], Sequence[Request]],
        is_forced_out: Callable[[OutputStream], bool],
        fail: Callable[[OutputStream, LoraplexError], None],
    ) -> None:
        self._streams = streams
        self._place = place
        self._unfinished = unfinished
        self._is_forced_out = is_forced_out
        self._fail = fail

    async def move(self, stream: OutputStream, target: Runner) -> bool:
        """Whether it goes on in `target`, or in another one where that has ended. Raises nothing."""
        source, stream.target = stream.placement.runner, target
        try:
            await self._bring(stream, target)
            withdrawn = await self._withdraw(stream, source) if target.is_serving else {}
            return bool(withdrawn) and self._is_at(stream, source) and self._go_on(stream, target, withdrawn)
        except EngineDeadError:
            return False  # the source's requests have ended with it; before the target's end nothing was changed
        except LoraplexError as error:
            stream.stays_until_s = time.monotonic() + STAY_S
            logger.info("request %r stays in runner %s: %.300s", stream.request_id, source.name, error)
            return False
        finally:
            stream.target = None

    def _is_at(self, stream: OutputStream, runner: Runner) -> bool:
        return self._streams.get(stream.request_id) is stream and stream.placement.runner is runner

    async def _bring(self, stream: OutputStream, target: Runner) -> None:
        """Raises what keeps its adapters from being used there: a source that is gone, no room, a quarantine."""
        adapter_ids = tuple(ref.adapter_id for ref in stream.refs)
        for adapter_id in adapter_ids:
            await target.call(msg.CallStore, "promote_adapter", (adapter_id,))
        found = await target.call(msg.CallStore, "list_adapters", (adapter_ids,)) if adapter_ids else ()
        error = next((each.error for each in found if each.error is not None), None)
        if error is not None:
            raise AdapterFaultError(error)

    async def _withdraw(self, stream: OutputStream, source: Runner) -> Mapping[str, int | None]:
        """An error of the source leaves open what it has forgotten: then the request ends with it."""
        ids = tuple(each.request_id for each in self._unfinished(stream.request_id))
        if not ids or not self._is_at(stream, source):
            return {}
        try:
            withdrawn: Mapping[str, int | None] = await source.call(msg.WithdrawRequests, ids)
        except EngineDeadError:
            raise
        except LoraplexError as error:
            self._end(stream, source, ids, error)
            return {}
        return withdrawn

    def _end(self, stream: OutputStream, source: Runner, ids: tuple[str, ...], error: LoraplexError) -> None:
        source.abort(ids)
        if self._is_at(stream, source):
            self._fail(stream, error)

    def _go_on(self, stream: OutputStream, target: Runner, withdrawn: Mapping[str, int | None]) -> bool:
        """Nothing waits in here: no death and no verb comes in between."""
        source = stream.placement.runner
        requests = [
            replace(each, num_cached_tokens=withdrawn[each.request_id])
            for each in self._unfinished(stream.request_id)
            if each.request_id in withdrawn
        ]
        if not requests:
            return False  # a stop string ended it meanwhile
        try:
            if self._is_forced_out(stream):
                raise RequestAbortedError("an adapter of this request was unloaded by force")
            message = msg.AddRequests.of(requests)
            placement = self._place(message, stream.rank, target)
            try:
                placement.runner.client.send(message)
            except BaseException:
                placement.end()
                raise
        except Exception as error:  # its source has forgotten it: its client would wait without end
            if not isinstance(error, LoraplexError):
                error = EngineError(f"a move failed: {type(error).__name__}: {error}")
            self._fail(stream, error)
            return False
        stream.placement.end()
        stream.placement = placement
        source.num_moved += len(requests)
        return True
