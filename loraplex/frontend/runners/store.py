"""The adapters of several runners as one store: a verb reaches all of them or none.

    members := runners whose process knows all that is registered
    a call goes to the members of the moment; one whose process dies meanwhile is no member, and its part does not count
    a call that fails on one is undone on the others (UNDO), and its error is the caller's
    a new process joins: it is told of all that is registered, and is a member from the same moment on

What is registered is noted before a call is sent. So a process that joins in the middle of one learns of it either from
the note or from the call, whatever waits for what. All of this runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from loraplex.adapter_store import AddOutcome
from loraplex.core import AdapterResidency, AdapterSpec, Tier
from loraplex.errors import AdapterNotFoundError, EngineDeadError, EngineTimeoutError, LoraplexError
from loraplex.frontend import messages as msg
from loraplex.frontend.runners.runner import Runner

logger = logging.getLogger(__name__)

UNDO = {
    "add_adapter": "drop_adapter",
    "promote_adapter": "evict_adapter",
    "pin_adapter": "unpin_adapter",
    "unpin_adapter": "pin_adapter",
}
"""What takes back what a call changed. One that frees memory is not taken back: it goes on where it can."""

NEAREST = {tier: number for number, tier in enumerate(Tier)}


class StoreOfRunners:
    """`core.AdapterStore` by method and arguments, as `frontend.store.RemoteStore` calls it."""

    def __init__(
        self, runners: Sequence[Runner], death: Callable[[], EngineDeadError], specs: dict[int, AdapterSpec]
    ) -> None:
        """specs: where it notes what is registered."""
        self._runners = runners
        self._death = death
        self._specs = specs
        self._pinned: set[int] = set()
        self._pinning: set[asyncio.Task[None]] = set()

    async def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Raises the first error of a runner; EngineDeadError when no runner is left."""
        was_pinned = not self._pinned.isdisjoint(each for each in arguments if isinstance(each, int))
        self._note(method, arguments)
        members = [runner for runner in self._runners if runner.is_member]
        if method == "open_adapter":
            return await self._open(members, arguments)
        asked = await asyncio.gather(*(_ask(runner, method, arguments) for runner in members))
        answers = {runner: answer for runner, answer in zip(members, asked, strict=True) if not _is_lost(answer)}
        errors = [each for each in answers.values() if isinstance(each, BaseException)]
        if method == "list_adapters":  # of those that answer in time
            answers = {runner: each for runner, each in answers.items() if not isinstance(each, EngineTimeoutError)}
            errors = [] if answers else errors
        if errors or not answers:
            if method in UNDO:
                await self._undo(method, arguments[0], was_pinned, members, answers)
            raise errors[0] if errors else self._death()
        return _together(list(answers.values()))

    async def join(self, runner: Runner) -> None:
        """Its process is new. Pinned adapters are promoted while it serves already."""
        runner.is_member = True
        if not self._specs:
            return
        await runner.call(msg.CallStore, "attach_adapters", (tuple(self._specs.values()),))
        task = asyncio.get_running_loop().create_task(self._pin_again(runner, tuple(self._pinned)))
        self._pinning.add(task)
        task.add_done_callback(self._pinning.discard)

    async def _open(self, members: Sequence[Runner], arguments: tuple[Any, ...]) -> Any:
        """One runner opens files for all; the next one does when its process dies meanwhile."""
        for runner in members:
            answer = await _ask(runner, "open_adapter", arguments)
            if _is_lost(answer):
                continue
            if isinstance(answer, BaseException):
                raise answer
            return answer
        raise self._death()

    def _note(self, method: str, arguments: tuple[Any, ...]) -> None:
        match method, arguments:
            case "add_adapter", (spec,):
                self._specs[spec.adapter_id] = spec
            case "attach_adapters", (specs,):
                self._specs.update({spec.adapter_id: spec for spec in specs})
            case "drop_adapter", (adapter_id,):
                self._specs.pop(adapter_id, None)
                self._pinned.discard(adapter_id)
            case "pin_adapter", (adapter_id,):
                self._pinned.add(adapter_id)
            case "unpin_adapter", (adapter_id,):
                self._pinned.discard(adapter_id)

    async def _undo(
        self,
        method: str,
        argument: AdapterSpec | int,
        was_pinned: bool,
        members: Sequence[Runner],
        answers: Mapping[Runner, Any],
    ) -> None:
        """Where it changed something; and where a process joined meanwhile, which had the note."""
        undo = UNDO[method]
        adapter_id = argument.adapter_id if isinstance(argument, AdapterSpec) else argument
        changed = [runner for runner, each in answers.items() if not isinstance(each, BaseException) and each]
        joined = [runner for runner in self._runners if runner.is_member and runner not in members]
        if method == "add_adapter" or was_pinned != (adapter_id in self._pinned):
            self._note(undo, (adapter_id,))
        asked = await asyncio.gather(
            *(_ask(runner, undo, (adapter_id,)) for runner in {*changed, *joined} if runner.is_member)
        )
        for error in asked:
            if isinstance(error, BaseException) and not isinstance(error, AdapterNotFoundError | EngineDeadError):
                logger.warning("adapter_id %d: undoing %s on a runner failed too: %s", adapter_id, method, error)

    async def _pin_again(self, runner: Runner, adapter_ids: Sequence[int]) -> None:
        for adapter_id in adapter_ids:
            if adapter_id in self._pinned:
                error = await _ask(runner, "pin_adapter", (adapter_id,))
                if isinstance(error, LoraplexError) and not isinstance(error, AdapterNotFoundError | EngineDeadError):
                    logger.error(
                        "runner %s: adapter_id %d could not be pinned again: %s", runner.name, adapter_id, error
                    )
            if adapter_id not in self._pinned:  # lifted meanwhile
                await _ask(runner, "unpin_adapter", (adapter_id,))


async def _ask(runner: Runner, method: str, arguments: tuple[Any, ...]) -> Any:
    """The answer, or the error that came instead."""
    asking: Coroutine[Any, Any, Any] = runner.call(msg.CallStore, method, arguments)
    try:
        return await asking
    except Exception as error:
        return error


def _is_lost(answer: Any) -> bool:
    return isinstance(answer, EngineDeadError)


def _together(answers: Sequence[Any]) -> Any:
    """One answer of all: an outcome of each, whether something changed anywhere, a number, or a list by adapter."""
    first = answers[0]
    if len(answers) == 1:
        return first
    if isinstance(first, AddOutcome):
        evicted = dict.fromkeys(name for each in answers for name in each.evicted)
        return AddOutcome(any(answers), tuple(evicted))
    if isinstance(first, bool):
        return any(answers)
    if isinstance(first, int):
        return sum(answers)
    if first is None:
        return None
    found: dict[int, AdapterResidency] = {}
    for each in (residency for answer in answers for residency in answer):
        known = found.get(each.adapter_id)
        found[each.adapter_id] = each if known is None else _both(known, each)
    return list(found.values())


def _both(one: AdapterResidency, other: AdapterResidency) -> AdapterResidency:
    """Where it is nearest; requests of both."""
    near, far = sorted((one, other), key=lambda each: NEAREST[each.tier])
    return replace(
        near,
        num_running=near.num_running + far.num_running,
        is_pinned=near.is_pinned or far.is_pinned,
        is_loading=near.is_loading or far.is_loading,
        last_used_s=max(near.last_used_s, far.last_used_s),
        error=near.error or far.error,
    )
