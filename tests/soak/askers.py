"""Workers that ask: whole answers, clients that leave, aborts, bursts, prompts that cannot be. Each answer is compared
as it grows."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from random import Random
from zlib import crc32

from loraplex.adapters.registry import LoRARef, LoRARegistry
from loraplex.core import LoRARequest, RequestOutput
from loraplex.errors import (
    AdapterContentChangedError,
    AdapterNoRoomError,
    AdapterNotFoundError,
    AdapterUnavailableError,
    EngineDeadError,
    InvalidRequestError,
    LoraplexError,
    RequestAbortedError,
)
from loraplex.frontend.async_engine import AsyncEngine
from loraplex.sampling_params import SamplingParams
from tests.soak.ledger import Ledger, NameRecord
from tests.soak.world import NUM_TOKENS, World

SOURCE_ERRORS = (AdapterContentChangedError, AdapterUnavailableError)
LOAD_MARGIN_S = 10.0
"""A load that a request waits for may have begun this long before the request came."""

KINDS = ("whole",) * 10 + (
    "two completions",
    "leave",
    "leave",
    "abort",
    "burst",
    "burst",
    "bring",
    "bring",
    "too long",
    "unknown",
)

_ref: ContextVar[list[LoRARef]] = ContextVar("ref")


def watch_references(registry: LoRARegistry) -> None:
    """From now on a request's own reference is known to who asked: which version a name stood for at that instant."""
    acquire = registry.acquire

    def noted(name: str) -> LoRARef:
        ref = acquire(name)
        _ref.get().append(ref)
        return ref

    registry.acquire = noted  # type: ignore[method-assign]


@dataclass
class Asked:
    """One request, and all that its judge must know."""

    request_id: str
    name: str | None
    prompt: int
    num_tokens: int
    began_s: float = field(default_factory=time.monotonic)
    refs: list[LoRARef] = field(default_factory=list)
    is_aborted: bool = False
    num_outputs: int = 0
    brought: LoRARequest | None = None
    cache_salt: str = ""

    @property
    def digest(self) -> str:
        """Of the content that it runs on, "" for the base model."""
        return self.refs[0].adapter_digest if self.refs else ""

    def __str__(self) -> str:
        ref = self.refs[0] if self.refs else None
        version = "" if ref is None else f" -> {ref.adapter_name} id {ref.adapter_id} digest {ref.adapter_digest[:12]}"
        return f"{self.request_id} ({self.name}{version}, prompt {self.prompt}, {self.num_tokens} tokens)"


class Asker:
    """One client. Its n-th action is drawn from the seed, its name and n alone."""

    def __init__(self, worker: str, seed: int, engine: AsyncEngine, world: World, ledger: Ledger) -> None:
        self.worker = worker
        self._seed = seed
        self._engine = engine
        self._world = world
        self._ledger = ledger
        self._request_ids = itertools.count()

    def plan(self, number: int) -> tuple[str, str | None, Random]:
        """The n-th action: its kind, the name it asks for, and where the rest is drawn from."""
        rng = Random(f"{self._seed}/{self.worker}/{number}")
        return rng.choice(KINDS), rng.choice([None, *self._ledger.names, *self._ledger.names]), rng

    async def act(self, number: int) -> None:
        kind, name, rng = self.plan(number)
        self._ledger.actions[f"ask: {kind}"] += 1
        self._ledger.note(f"{self.worker} #{number} {kind} {name}")
        match kind:
            case "burst":
                await asyncio.gather(*(self._ask(self._drawn(rng, name)) for _ in range(rng.randint(4, 12))))
            case "leave":
                await self._ask(self._drawn(rng, name), leave_after=rng.randint(0, 6))
            case "abort":
                await self._ask(self._drawn(rng, name), abort_after_s=rng.choice([0.0, 0.002, 0.02, 0.1]))
            case "two completions":
                await self._ask(self._drawn(rng, name), num_completions=2)
            case "bring":
                await self._bring(rng, f"of-{self.worker}")
            case "too long":
                await self._expect(InvalidRequestError, [3] * 500, name)
            case "unknown":
                await self._expect(AdapterNotFoundError, [3], f"unknown {number}")
            case _:
                await self._ask(self._drawn(rng, name))

    def _drawn(self, rng: Random, name: str | None) -> Asked:
        num_tokens = rng.choice([1, 3, NUM_TOKENS // 2, rng.randint(1, NUM_TOKENS), NUM_TOKENS])
        request_id = f"{self.worker}-{next(self._request_ids)}"
        asked = Asked(request_id, name, rng.randrange(len(self._world.prompts)), num_tokens)
        asked.cache_salt = rng.choice(["", "", "tenant"])
        return asked

    async def _bring(self, rng: Random, name: str) -> None:
        """Requests with an adapter of their own, from a source that never changes; it is unloaded after them."""
        content = rng.choice(list(self._world.contents.values()))
        record = self._ledger.brought.setdefault(name, NameRecord())
        record.stands.set(frozenset([content.digest]))
        record.source.set(frozenset([content.digest]))
        drawn = [self._drawn(rng, name) for _ in range(rng.randint(1, 3))]
        for asked in drawn:
            asked.brought = LoRARequest(name, 1 + crc32(name.encode()), str(content.path))
        await asyncio.gather(*map(self._ask, drawn))
        is_there = self._engine.has_adapter(name)
        while self._engine.has_adapter(name):
            try:
                await self._engine.unload_adapter(name)
            except EngineDeadError:
                await asyncio.sleep(0.05)
        self._ledger.count("unload of a brought one", "done" if is_there else "was never there")

    async def _ask(
        self,
        asked: Asked,
        *,
        leave_after: int | None = None,
        abort_after_s: float | None = None,
        num_completions: int = 1,
    ) -> None:
        _ref.set(asked.refs)
        params = SamplingParams(temperature=0, max_tokens=asked.num_tokens, ignore_eos=True, n=num_completions)
        prompt = self._world.prompts[asked.prompt]
        model = asked.name if asked.brought is None else None
        stream = self._engine.generate(
            prompt, params, asked.request_id, model=model, lora_request=asked.brought, cache_salt=asked.cache_salt
        )
        aborting = None if abort_after_s is None else asyncio.create_task(self._abort(asked, abort_after_s))
        outcome = "left"
        try:
            while asked.num_outputs != leave_after:
                output = await anext(stream)
                asked.num_outputs += 1
                self._compare(asked, output)
                outcome = self._end_of(output) if output.finished else outcome
        except StopAsyncIteration:
            pass
        except LoraplexError as error:
            outcome = type(error).__name__
            self._judge(asked, error)
        finally:
            await stream.aclose()  # type: ignore[attr-defined]
            if aborting is not None:
                await aborting
        self._ledger.count("ask", outcome)

    async def _abort(self, asked: Asked, after_s: float) -> None:
        await asyncio.sleep(after_s)
        asked.is_aborted = True
        await self._engine.abort(asked.request_id)

    async def _expect(self, expected: type[LoraplexError], prompt: Sequence[int], name: str | None) -> None:
        """A request that cannot be is refused, with `expected` unless its name happens to stand for nothing."""
        asked = Asked(f"{self.worker}-{next(self._request_ids)}", name, 0, 1)
        _ref.set(asked.refs)
        try:
            async for _ in self._engine.generate(prompt, SamplingParams(max_tokens=1), asked.request_id, model=name):
                self._ledger.find(f"{asked}: a prompt of {len(prompt)} tokens was answered")
        except expected as error:
            self._ledger.count("ask", f"refused: {type(error).__name__}")
        except LoraplexError as error:
            self._judge(asked, error)

    # -------------------------------------------------------------------------------------------------------- judgement

    def _compare(self, asked: Asked, output: RequestOutput) -> None:
        """What has been said so far is how the answer of that content alone begins; the last output has all of it."""
        if asked.num_outputs == 1:
            self._check_version(asked)
        for completion in output.outputs:
            token_ids = completion.token_ids
            is_cut = completion.finish_reason == "abort" and self._may_be_aborted(asked)
            if output.finished and len(token_ids) != asked.num_tokens and not is_cut:
                self._ledger.find(f"{asked} ended after {len(token_ids)} tokens: {completion.finish_reason}")
            answer = self._world.answers.get(asked.digest, [None] * len(self._world.prompts))[asked.prompt]
            if answer is not None and not answer.is_said_by(token_ids) and not self._is_tainted(asked):
                self._ledger.num_wrong += 1
                sayers = self._sayers(asked, token_ids)
                self._ledger.find(f"{asked} said {token_ids}, alone it is {answer}; those that say so: {sayers}")
            if output.finished and answer is not None:
                self._ledger.num_compared += 1
                self._ledger.num_compared_tokens += len(token_ids)
                self._ledger.num_sure_tokens += min(len(token_ids), answer.num_sure)

    @staticmethod
    def _end_of(output: RequestOutput) -> str:
        is_cut = any(completion.finish_reason == "abort" for completion in output.outputs)
        return "cut short by an unload" if is_cut else "answered"

    def _may_be_aborted(self, asked: Asked) -> bool:
        """Whether a forced verb on its adapter, or its client, may have ended it."""
        names = [ref.adapter_name for ref in asked.refs]
        return asked.is_aborted or any(any(self._ledger.record(name).aborted.since(asked.began_s)) for name in names)

    def _sayers(self, asked: Asked, token_ids: Sequence[int]) -> list[str]:
        answers = self._world.answers.items()
        return [digest[:12] or "base" for digest, said in answers if said[asked.prompt].is_said_by(token_ids)]

    def _check_version(self, asked: Asked) -> None:
        """The version is one that the name could stand for when it was asked."""
        if asked.name is None:
            return
        stood = self._ledger.record(asked.name).stood_since(asked.began_s)
        if asked.digest not in stood:
            self._ledger.find(f"{asked}: the name could only stand for {sorted(map(str, stood))}")

    def _is_tainted(self, asked: Asked) -> bool:
        return self._ledger.may_be_tainted(asked.digest, asked.began_s)

    def _judge(self, asked: Asked, error: LoraplexError) -> None:
        if not self._is_allowed(asked, error):
            self._ledger.find(f"{asked} failed: {type(error).__name__}: {error}")

    def _is_allowed(self, asked: Asked, error: LoraplexError) -> bool:
        ledger, began_s = self._ledger, asked.began_s
        if isinstance(error, EngineDeadError):
            return ledger.was_down_since(began_s)
        if ledger.is_excused_by_faults(error, began_s):
            return True
        if isinstance(error, RequestAbortedError):
            return self._may_be_aborted(asked)
        if asked.name is None:
            return False
        if not asked.refs:
            if asked.brought is not None and isinstance(error, AdapterNoRoomError):
                return True  # of its load
            record = ledger.record(asked.name)
            may_be_absent = isinstance(error, AdapterNotFoundError) and None in record.stood_since(began_s)
            return may_be_absent
        record = ledger.record(asked.refs[0].adapter_name)
        if isinstance(error, SOURCE_ERRORS):
            return record.was_elsewhere_since(began_s - LOAD_MARGIN_S, asked.digest)
        has_pins = ledger.had_pins_since(began_s) or _names_bytes(error, "pinned")
        # a new engine has its pins before the ledger hears of it; and in so small an arena a few fences leave no room
        return isinstance(error, AdapterNoRoomError) and (has_pins or _names_bytes(error, "are fenced"))


def _names_bytes(error: BaseException, what: str) -> bool:
    """Whether an error says that so much is not there to be had; that it is right in that is checked at the end."""
    found = re.search(rf"(\d+) bytes {what}", str(error))
    return found is not None and int(found[1]) > 0
