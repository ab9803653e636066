"""One request of a client as work for the engine: its prompts, their adapters, and the outputs as one stream."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from loraplex.core import (
    AdapterChoice,
    AdapterMix,
    CompletionOutput,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from loraplex.errors import (
    EngineOverloadedError,
    EngineShutdownError,
    LoraplexError,
    RequestAbortedError,
    RequestTimeoutError,
)
from loraplex.logs import request_context
from loraplex.sampling_params import NO_CLAIM, Claim
from loraplex.server.connections import hold_outputs
from loraplex.server.engine_surface import EngineSurface
from loraplex.server.latency import LatencyHistograms
from loraplex.server.model_names import Target
from loraplex.server.pacing import Turns
from loraplex.server.responses import AnswerRoom
from loraplex.server.streaming import merge
from loraplex.server.telemetry.series import RequestSeries
from loraplex.server.telemetry.tracing import current_trace
from loraplex.server.tenants.metering import Charge, billed, was_aborted
from loraplex.tenants.fair_limit import FairLimit
from loraplex.tenants.usage import OF_MIXES, Tab

_PATH = re.compile(r"'(?:~|\.{1,2})?/[^']*'|(?<![\w:/])(?!/v1/)(?:~|\.{1,2})?/[^\s'\",;:()]+")
"""In the text of an error: in quotation marks, or without them up to what ends a word."""


CHARS_A_TOKEN = 8
"""More than a token of a usual text has."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of one prompt; `text` as the client sent it, None when it sent ids."""

    token_ids: tuple[int, ...]
    text: str | None = None

    @property
    def size(self) -> int:
        """What it costs to give it back, in tokens: a tokenizer may make one of any number of characters."""
        return max(len(self.token_ids), len(self.text or "") // CHARS_A_TOKEN)


@dataclass(frozen=True, slots=True)
class GenerationItem:
    """A prompt for an adapter, a mix, or the base. `engine_request_id` is the server's: clients' ids never collide."""

    prompt: Prompt
    target: Target
    engine_request_id: str
    params: SamplingParams

    @property
    def adapter(self) -> AdapterChoice:
        return self.target.adapter


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a request must have ended, counted from its arrival. `setting` says what set it."""

    at_s: float
    seconds: float
    setting: str

    @property
    def left_s(self) -> float:
        return self.at_s - time.monotonic()

    @classmethod
    def of(cls, arrived_s: float, timeout_s: float | None, max_request_s: float | None) -> Deadline | None:
        """The earlier of the two; None when there is none."""
        limits = [(timeout_s, "timeout"), (max_request_s, "--max-request-s")]
        given = [(seconds, setting) for seconds, setting in limits if seconds is not None]
        return cls(arrived_s + min(given)[0], *min(given)) if given else None

    def error(self) -> RequestTimeoutError:
        return RequestTimeoutError(
            f"the request was not finished within {self.seconds:g} s ({self.setting}) and was aborted; allow it more "
            "time, ask for fewer tokens, or try when the server is less busy"
        )


@dataclass(frozen=True, slots=True)
class Generation:
    """What the client asked for, resolved. `model` is the name that the answer gives back.

    cache_salt: the owner's and the client's own: prefixes are shared with those of the same salt. client: whose turns
    it takes. claim: of the owner's share. shows_cached_tokens: false where a cached token may be another client's.
    hides_paths: errors name no place of this machine. clean: takes from an error what its client may not read.
    charge: what it costs its tenant; None where there are none.
    """

    response_id: str
    created: int
    model: str
    items: tuple[GenerationItem, ...]
    cache_salt: str = ""
    client: str = ""
    claim: Claim = NO_CLAIM
    shows_cached_tokens: bool = True
    hides_paths: bool = False
    clean: Callable[[LoraplexError], None] = lambda error: None
    charge: Charge | None = None
    deadline: Deadline | None = None

    @property
    def rate_headers(self) -> Mapping[str, str]:
        """What is left of its tenant's limits, once it has begun."""
        return {} if self.charge is None else self.charge.headers

    def prompt_size(self, index: int, output: RequestOutput) -> int:
        """Of a prompt, in each of the completions of its output."""
        return self.items[index].prompt.size * len(output.outputs)


class InFlight:
    """The requests that the engine works on for this server. At the end of a shutdown's grace they are aborted."""

    def __init__(self, engine: EngineSurface, max_prompt_tokens: int) -> None:
        self._engine = engine
        self._prompt_tokens = FairLimit(max_prompt_tokens, lets_one_in=True)
        self._request_ids: set[str] = set()
        self._expired: dict[str, None] = {}  # in the order in which they are aborted
        self._aborting: asyncio.Task[None] | None = None
        self.is_closing = False

    def __len__(self) -> int:
        return len(self._request_ids)

    @contextlib.contextmanager
    def track(
        self, request_id: str, num_prompt_tokens: int, deadline: Deadline | None = None, tenant: str = ""
    ) -> Iterator[None]:
        """The request is one of these inside the block, and is aborted when its deadline passes.

        Raises EngineOverloadedError where the prompts of all are too long together: each token is kept as a number in
        two processes. One alone has room.
        """
        held = self._prompt_tokens
        if not held.take(tenant, num_prompt_tokens):
            raise EngineOverloadedError(
                f"the prompts of running and waiting requests have {held.total} tokens, this one has "
                f"{num_prompt_tokens}, and {held.limit} are the limit; try again later (--max-waiting-tokens)"
            )
        timer = None
        if deadline is not None:
            timer = asyncio.get_running_loop().call_later(deadline.left_s, self._expire, request_id)
        self._request_ids.add(request_id)
        try:
            yield
        finally:
            self._request_ids.discard(request_id)
            held.give_back(tenant, num_prompt_tokens)
            self._expired.pop(request_id, None)
            if timer is not None:
                timer.cancel()

    def _expire(self, request_id: str) -> None:
        self._expired[request_id] = None
        if self._aborting is None or self._aborting.done():
            self._aborting = asyncio.ensure_future(self._abort(self._expired))

    async def _abort(self, request_ids: Iterable[str]) -> None:
        """One in each turn of the event loop: a request has a thousand prompts, and they expire together."""
        aborted: set[str] = set()
        while waiting := [each for each in request_ids if each not in aborted]:
            for request_id in waiting:
                aborted.add(request_id)
                await self._engine.abort(request_id)
                await asyncio.sleep(0)

    def has_expired(self, request_id: str) -> bool:
        return request_id in self._expired

    async def abort_all(self) -> None:
        self.is_closing = True
        await self._abort(self._request_ids)


CANDIDATE_BYTES = 100
"""A candidate of a position's log probabilities takes so much, about, with its share of the position. Its text is the
tokenizer's own."""

CHAR_BYTES = 4
"""Of a text that has one character beyond U+FFFF, an emoji."""

TOLD_BYTES = 2**18
"""A request's outputs are counted again when they have grown by so much."""


class OutputMeter:
    """Counts what the outputs of one request have in memory, finished or not, read or not: log probabilities, and texts
    where they are longer than CHARS_A_TOKEN for each token, as an adapter's tokens may be."""

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        """Of each prompt."""
        self._hold = hold_outputs.get()
        self._candidates = [(_num_candidates(each.prompt_logprobs), _num_candidates(each.logprobs)) for each in params]
        self._bytes = [0] * len(params)
        self._total = self._told = 0

    @property
    def is_needed(self) -> bool:
        return self._hold is not None

    def see(self, index: int, output: RequestOutput) -> None:
        of_prompt, of_output = self._candidates[index]
        num_tokens = sum(len(each.token_ids) for each in output.outputs)
        num_chars = sum(each.num_chars for each in output.outputs) - CHARS_A_TOKEN * num_tokens
        num = of_prompt * len(output.prompt_logprobs or ()) + of_output * num_tokens
        num_bytes = CANDIDATE_BYTES * num + CHAR_BYTES * max(0, num_chars)
        self._total += num_bytes - self._bytes[index]
        self._bytes[index] = num_bytes
        if self._hold is not None and self._total - self._told >= TOLD_BYTES:
            self._told = self._total
            self._hold(self._total)


def _num_candidates(num_logprobs: int | None) -> int:
    """The drawn token's is one more."""
    return 0 if num_logprobs is None else num_logprobs + 1


class Generator:
    """Runs generations on the engine."""

    def __init__(
        self, engine: EngineSurface, in_flight: InFlight, histograms: LatencyHistograms, series: RequestSeries
    ) -> None:
        self._engine = engine
        self._in_flight = in_flight
        self._histograms = histograms
        self._series = series
        self._begins = Turns(is_open=lambda: not engine.is_behind)

    async def run(self, generation: Generation) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Cumulative outputs with the index of their prompt. Closing it aborts what is not finished.

        Raises what the engine raises, TenantLimitError, RequestAbortedError for a request that something else aborted,
        EngineShutdownError for one that this server's shutdown did, and RequestTimeoutError for one whose deadline has
        passed.
        """
        meter = OutputMeter([each.params for each in generation.items])
        outputs = merge([self._outputs(index, generation, meter) for index in range(len(generation.items))])
        charge = generation.charge
        try:
            if charge is not None:
                charge.begin()
            async with contextlib.aclosing(outputs):
                async for each in outputs:
                    yield each
        except LoraplexError as error:
            if charge is not None:
                charge.fail(error)
            raise
        finally:
            if charge is not None:
                charge.end()
            for item in generation.items:
                item.target.held.close()  # of prompts that did not begin

    async def run_to_end(self, generation: Generation) -> list[RequestOutput]:
        """The last output of each prompt. Raises InvalidRequestError, and ends the others, once their texts are longer
        than an answer may be."""
        last: dict[int, RequestOutput] = {}
        room, num_chars = AnswerRoom(), [0] * len(generation.items)
        async with contextlib.aclosing(self.run(generation)) as outputs:
            async for index, output in outputs:
                last[index] = output
                before, num_chars[index] = num_chars[index], sum(each.num_chars for each in output.outputs)
                room.take(num_chars[index] - before)
        return [last[index] for index in range(len(generation.items))]

    async def _outputs(
        self, index: int, generation: Generation, meter: OutputMeter
    ) -> AsyncGenerator[RequestOutput, None]:
        item, charge = generation.items[index], generation.charge
        is_finished = False
        clock = self._histograms.clock()
        if len(generation.items) * item.params.n > 1:
            # a prompt of 128 completions takes 8 ms here and in the engine: one at a time, of all, as the engine reads
            await self._begins.next(generation.client)
        if self._in_flight.is_closing:
            raise _shutting_down()
        if generation.deadline is not None and generation.deadline.left_s <= 0:
            raise generation.deadline.error()
        num_prompt_tokens = len(item.prompt.token_ids)
        with (
            self._recorded(index, generation) as tab,
            self._in_flight.track(
                item.engine_request_id, num_prompt_tokens, generation.deadline, generation.claim.tenant
            ),
        ):
            see = tab.see if charge is None else partial(charge.see, index)
            source = self._engine.generate(
                item.prompt.token_ids,
                item.params,
                item.engine_request_id,
                model=item.target.address,
                cache_salt=generation.cache_salt,
                claim=generation.claim,
                held=item.target.held,
                on_output=partial(_see_both, see, partial(meter.see, index)) if meter.is_needed else see,
            )
            try:
                async for output in source:
                    is_finished = output.finished
                    if was_aborted(output):
                        raise self._aborted(item, generation)
                    clock.see(output)
                    yield output
            except RequestAbortedError:
                raise self._aborted(item, generation) from None
            except LoraplexError as error:
                if generation.hides_paths:
                    error.args = (_PATH.sub("(a path of this server)", error.message),)
                raise
            finally:
                if not is_finished:
                    await self._engine.abort(item.engine_request_id)
                if isinstance(source, AsyncGenerator):
                    await source.aclose()
            if not is_finished:
                raise self._aborted(item, generation)

    @contextlib.contextmanager
    def _recorded(self, index: int, generation: Generation) -> Iterator[Tab]:
        """What a prompt costs, which series and trace are told however it ends."""
        item, charge = generation.items[index], generation.charge
        if charge is None:
            tab = Tab("", "", billed(item.adapter), len(item.prompt.token_ids), time.monotonic())
        else:
            tab = charge.tabs[index]
        if (context := request_context.get()) is not None and tab.adapter != OF_MIXES:
            context.adapter = tab.adapter
        failure: LoraplexError | None = None
        self._series.open(tab)
        try:
            yield tab
        except LoraplexError as error:
            tab.has_failed, failure = True, error
            raise
        finally:
            self._series.end(tab)
            if (trace := current_trace.get()) is not None:
                trace.see(generation, item.params, tab, failure)

    def _aborted(self, item: GenerationItem, generation: Generation) -> LoraplexError:
        if self._in_flight.is_closing:
            return _shutting_down()
        if generation.deadline is not None and self._in_flight.has_expired(item.engine_request_id):
            return generation.deadline.error()
        what = "mix" if isinstance(item.adapter, AdapterMix) else "adapter"
        subject = "the base model" if item.adapter is None else f"{what} {str(item.adapter)!r}"
        return RequestAbortedError(f"this request on {subject} was aborted by the server before it was finished")


def _see_both(
    first: Callable[[RequestOutput], None], second: Callable[[RequestOutput], None], output: RequestOutput
) -> None:
    first(output)
    second(output)


def _shutting_down() -> EngineShutdownError:
    return EngineShutdownError("the server is shutting down and ended this request; send it again")


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in one completion since the last look. `logprobs` is parallel to `token_ids`, or None."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] | None
    is_first: bool

    def followed_by(self, other: Delta) -> Delta:
        both = self.logprobs is not None and other.logprobs is not None
        logprobs = (*(self.logprobs or ()), *(other.logprobs or ())) if both else None
        return Delta(self.text + other.text, self.token_ids + other.token_ids, logprobs, self.is_first)


class Cursor:
    """How much of one completion was sent. `text_offset`: length of the tokens whose logprobs were sent, as strings."""

    def __init__(self) -> None:
        self._num_chars = 0
        self._num_tokens = 0
        self.text_offset = 0
        self.has_started = False
        self.has_finished = False

    def is_behind(self, output: CompletionOutput) -> bool:
        return len(output.token_ids) > self._num_tokens or output.num_chars > self._num_chars

    def advance(self, output: CompletionOutput) -> Delta:
        logprobs = None if output.logprobs is None else tuple(output.logprobs[self._num_tokens :])
        delta = Delta(
            output.text_from(self._num_chars),
            tuple(output.token_ids[self._num_tokens :]),
            logprobs,
            not self.has_started,
        )
        self._num_chars = output.num_chars
        self._num_tokens = len(output.token_ids)
        self.has_started = True
        return delta
