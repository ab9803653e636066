"""Verbs on adapters: for all replicas, or those that the header X-Loraplex-Replicas names; all of them or none.

    1. the first replica says that the client may do verbs          else its refusal, and nothing has happened
    2. each replica is open, and says what the names are now        else 503, and nothing has happened
    3. the first one does it                                        else its refusal, and nothing has happened
    4. the others do it, at the same time                           else each is put back to what it was in 2

Replicas that share their names (`--database-url`) learn of a verb from each other: one of them, which is open, does it.
Where weights are, in evict and preload, is for all of them, too.

What 4 cannot put back is said: `is_restored` of each replica in the answer. Verbs of one replica run one after the
other, clients in turns. A client without an admin's key, or whose replica does not answer in 1, waits for no turn and
has none; one that goes away gives up its place until its turn has come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loraplex.errors import ConfigError, LoraplexError
from loraplex.router.connection import UNREADABLE, Headers
from loraplex.router.fleet import Fleet
from loraplex.router.keys import Keys
from loraplex.router.needs import adapters_named
from loraplex.router.relay import REPLICAS_HEADER, answer_headers, own_headers, response_of, sent_headers, target_of
from loraplex.router.replica import Replica
from loraplex.server.api_error import ApiError, ErrorBody
from loraplex.server.body import decode_object, read_body
from loraplex.server.off_loop import address_of
from loraplex.server.streaming import until_disconnect
from loraplex.server.verb_turns import VerbTurns

MAX_BODY_BYTES = 2**16
MAX_ANSWER_BYTES = 2**20
VERB_TIMEOUT_S = 300.0
LOOK_TIMEOUT_S = 10.0
"""For what a replica says of itself."""

ADMINS_PATH = b"/v1/merges"
"""A short page that an admin's key may see, and no other."""

ABSENT: dict[str, Any] = {}
STATE = ("path", "digest", "alias_of", "is_pinned")
"""Of a card: what a verb changes. Versions are numbers of each replica's own."""

Names = Callable[[Request, bytes], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replica said; status 0: it was lost, and may have done it or not."""

    replica: Replica
    status: int
    body: bytes = b""
    headers: Headers = ()
    reason: str = ""

    @property
    def is_done(self) -> bool:
        return 200 <= self.status < 300

    @property
    def message(self) -> str:
        if self.reason:
            return self.reason
        try:
            return str(msgspec.json.decode(self.body)["error"]["message"])
        except (*UNREADABLE, KeyError, TypeError):
            return self.body[:200].decode(errors="replace")


class ReplicaCard(msgspec.Struct, frozen=True, omit_defaults=True):
    """status: of its answer, 0 where it was lost. is_restored: it is what it was before the verb."""

    replica: str
    status: int
    is_restored: bool
    message: str = ""


class PartialReply(msgspec.Struct, frozen=True):
    error: ErrorBody
    replicas: list[ReplicaCard]


class AdapterVerbs:
    def __init__(self, fleet: Fleet, keys: Keys) -> None:
        self._fleet = fleet
        self._keys = keys
        self._turns = {replica: VerbTurns("verbs", 1, 1, VERB_TIMEOUT_S) for replica in fleet.replicas}

    def routes(self) -> list[Route]:
        def verb(method: str, path: str, names: Names) -> Route:
            return Route(path, partial(self._run, names), methods=[method])

        of_body = partial(_named_in, ("name", "lora_name"))
        return [
            verb("POST", "/v1/load_lora_adapter", of_body),
            verb("POST", "/v1/unload_lora_adapter", of_body),
            verb("POST", "/v1/adapters", of_body),
            verb("POST", "/v1/adapters/switch", partial(_named_in, ("old", "old_name", "new", "new_name"))),
            Route("/v1/adapters/merge", _refuse, methods=["POST"]),
            Route("/v1/adapters/{name:path}/export", _refuse, methods=["POST"]),
            verb("POST", "/v1/adapters/{name:path}/clone", of_body),
            *(verb("POST", f"/v1/adapters/{{name:path}}/{each}", _in_path) for each in ("pin", "unpin", "rollback")),
            *(verb("POST", f"/v1/adapters/{{name:path}}/{each}", _nothing) for each in ("evict", "preload")),
            verb("PUT", "/v1/adapters/{name:path}", _in_path),
            verb("DELETE", "/v1/adapters/{name:path}", _in_path),
        ]

    async def _run(self, names_of: Names, request: Request) -> Response:
        if (unknown := await self._keys.refusal(request)) is not None:
            return unknown
        body = await read_body(request, MAX_BODY_BYTES)
        names = names_of(request, body)
        replicas = self._replicas(request, are_equal=names_of is not _nothing)
        refusal = await until_disconnect(request, _refusal(request, body, replicas[0]))
        if refusal is not None:
            return refusal
        async with AsyncExitStack() as held:
            await until_disconnect(request, self._take_turns(held, request, replicas))
            _check_open(replicas)
            return await self._on_all(request, body, names, replicas)

    async def _take_turns(self, held: AsyncExitStack, request: Request, replicas: Sequence[Replica]) -> None:
        """In one order, so that no two verbs wait for each other."""
        for replica, turns in self._turns.items():
            if replica in replicas:
                await held.enter_async_context(turns.of(address_of(request)))

    def _replicas(self, request: Request, are_equal: bool) -> list[Replica]:
        """are_equal: one does, of those that share their names."""
        given = request.headers.get(REPLICAS_HEADER)
        try:
            named = [name.strip() for name in given.split(",")] if given is not None else None
            found = list(self._fleet.replicas) if named is None else self._fleet.named(named)
        except ConfigError as error:
            raise ApiError(f"{REPLICAS_HEADER}: {error}", param=REPLICAS_HEADER) from None
        said = [replica.shares_names for replica in found if replica.shares_names is not None]
        if are_equal and said and all(said):
            found = [replica for replica in found if replica.snapshot().is_open][:1] or found
        _check_open(found)
        return found

    async def _on_all(
        self, request: Request, body: bytes, names: Sequence[str], replicas: Sequence[Replica]
    ) -> Response:
        headers, own = sent_headers(request), own_headers(request)
        try:
            cards = await asyncio.gather(*(_cards(replica, names, own) for replica in replicas))
        except _AnswerError as refusal:
            return _answer_of(refusal.outcome, ())
        except LoraplexError as error:
            raise _not_begun(str(error)) from error
        send = partial(_send, request.method, target_of(request), headers, body)
        first = await send(replicas[0])
        if not first.is_done and first.status != 0:
            return _answer_of(first, replicas[:1])
        outcomes = [first]
        if first.is_done:
            outcomes += await asyncio.gather(*map(send, replicas[1:]))
        if all(outcome.is_done for outcome in outcomes):
            self._forget(names, replicas)
            return _answer_of(first, replicas)
        restored = await asyncio.gather(
            *(_restore(each.replica, before, own) for each, before in zip(outcomes, cards, strict=False))
        )
        self._forget(names, replicas)
        return _partial(outcomes, restored)

    @staticmethod
    def _forget(names: Sequence[str], replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            for name in names:
                replica.known.tiers.pop(name, None)


# ---------------------------------------------------------------------------------------------------------- which names


def _named_in(fields: Sequence[str], request: Request, body: bytes) -> list[str]:
    return adapters_named(body or b"{}", fields)


def _in_path(request: Request, body: bytes) -> list[str]:
    return [request.path_params["name"]]


def _nothing(request: Request, body: bytes) -> list[str]:
    """Where weights are is each replica's own, and comes back by itself."""
    return []


async def _refuse(request: Request) -> Response:
    text = "merges and exports write files on one machine: send them to a replica, and load the result through here"
    raise ApiError(text, code="not_routed")


# ------------------------------------------------------------------------------------------------------------- replicas


class _AnswerError(Exception):
    """A replica refuses to say what is there: the client may not know."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


def _check_open(replicas: Sequence[Replica]) -> None:
    for replica in replicas:
        if not replica.snapshot().is_open:
            raise _not_begun(f"replica {replica.name} is not available; name the others in {REPLICAS_HEADER}")


async def _refusal(request: Request, body: bytes, replica: Replica) -> Response | None:
    """The answer to a client that may do no verb; None for one that may. Raises ApiError where it is not known."""
    seen = await _look(replica, ADMINS_PATH, own_headers(request))
    if seen.status == 0:
        raise _not_begun(seen.message)
    if seen.status == 403:  # the replica's refusal of the verb names it, and leaves an audit record
        seen = await _send(request.method, target_of(request), sent_headers(request), body, replica)
    elif seen.is_done:
        return None
    return _answer_of(seen, ())


async def _look(replica: Replica, path: bytes, headers: Headers) -> Outcome:
    return await _send("GET", path, headers, b"", replica, LOOK_TIMEOUT_S)


async def _send(
    method: str, target: bytes, headers: Headers, body: bytes, replica: Replica, timeout_s: float = VERB_TIMEOUT_S
) -> Outcome:
    try:
        async with asyncio.timeout(timeout_s):
            answer = await replica.send(method, target, headers, body, timeout_s)
            answered = await answer.read(MAX_ANSWER_BYTES)
    except TimeoutError:
        return Outcome(replica, 0, reason=f"replica {replica.name} did not answer within {timeout_s:g} s")
    except LoraplexError as error:
        return Outcome(replica, 0, reason=str(error))
    return Outcome(replica, answer.status, answered, answer_headers(answer))


def _path_of(name: str, verb: str = "") -> bytes:
    return f"/v1/adapters/{quote(name, safe='')}{verb}".encode()


async def _card(replica: Replica, name: str, headers: Headers) -> dict[str, Any]:
    """What a replica has under a name; ABSENT: nothing. Raises LoraplexError."""
    outcome = await _look(replica, _path_of(name), headers)
    if outcome.status == 404:
        return ABSENT
    if outcome.status == 0:
        raise LoraplexError(outcome.message)
    if not outcome.is_done:
        raise _AnswerError(outcome)
    return decode_object(outcome.body)


async def _cards(replica: Replica, names: Sequence[str], headers: Headers) -> dict[str, dict[str, Any]]:
    return {name: await _card(replica, name, headers) for name in names}


async def _restore(replica: Replica, before: dict[str, dict[str, Any]], headers: Headers) -> bool:
    """Make the names what they were. Whether they are."""
    try:
        for name, card in reversed(before.items()):
            await _put_back(replica, name, card, headers)
        now = await _cards(replica, tuple(before), headers)
    except LoraplexError:
        return False
    return all(_state(now[name]) == _state(card) for name, card in before.items())


async def _put_back(replica: Replica, name: str, card: dict[str, Any], headers: Headers) -> None:
    typed = [*headers, (b"content-type", b"application/json")]
    now = await _card(replica, name, headers)
    if not card:
        if now:
            await _send("DELETE", _path_of(name), headers, b"", replica)
        return
    if not now:
        fields = {"name": name, "path": card["path"], "is_pinned": card["is_pinned"]}
        if card.get("lora_int_id") is not None:
            fields["lora_int_id"] = card["lora_int_id"]
        await _send("POST", b"/v1/adapters", typed, msgspec.json.encode(fields), replica)
        return
    if (now.get("alias_of"), now.get("digest")) != (card.get("alias_of"), card.get("digest")):
        await _send("POST", _path_of(name, "/rollback"), headers, b"", replica)
    if now.get("is_pinned") != card.get("is_pinned"):
        await _send("POST", _path_of(name, "/pin" if card["is_pinned"] else "/unpin"), headers, b"", replica)


def _state(card: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(card.get(field) for field in STATE)


# -------------------------------------------------------------------------------------------------------------- answers


def _not_begun(reason: str) -> ApiError:
    text = f"nothing was changed: {reason}"
    return ApiError(text, status=503, kind="unavailable_error", code="replica_unavailable")


def _answer_of(outcome: Outcome, replicas: Sequence[Replica]) -> Response:
    response = response_of(outcome.status, outcome.headers, outcome.body)
    response.headers[REPLICAS_HEADER] = ", ".join(each.name for each in replicas or [outcome.replica])
    return response


def _partial(outcomes: Sequence[Outcome], restored: Sequence[bool]) -> Response:
    failed = [outcome for outcome in outcomes if not outcome.is_done]
    left = [each.replica.name for each, is_restored in zip(outcomes, restored, strict=True) if not is_restored]
    undone = f"{', '.join(left)} could not be put back: look at it" if left else "all are what they were before"
    text = f"{len(failed)} of {len(outcomes)} replicas failed, first {failed[0].replica.name}: {failed[0].message}"
    is_clients = not left and all(400 <= outcome.status < 500 for outcome in failed)
    kind = "conflict_error" if is_clients else "server_error"
    cards = [
        ReplicaCard(each.replica.name, each.status, is_restored, "" if each.is_done else each.message[:1000])
        for each, is_restored in zip(outcomes, restored, strict=True)
    ]
    reply = PartialReply(ErrorBody(f"{text}; {undone}", kind, None, "replicas_disagree"), cards)
    return Response(msgspec.json.encode(reply), 409 if is_clients else 502, media_type="application/json")
