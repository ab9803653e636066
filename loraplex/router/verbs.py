"""Verbs on adapters: for all replicas that have been there since the router's start, or those that the header
X-Loraplex-Replicas names; all of them or none.

    1. the first replica says that the client may do verbs          else its refusal, and nothing has happened
    2. each replica is open, and says what the names are now        else 503, and nothing has happened
    3. the first one does it                                        else its refusal, and nothing has happened
    4. the others do it, at the same time                           else each is put back to what it was in 2

Replicas that share their names (`--database-url`) learn of a verb from each other: one of them, which is open, does it.
Where weights are, in evict and preload, is for all of them, too.

An unload goes to the replicas that have the name. A name that one of them is to have again waits for that, and one that
means something else at each is not rolled back. What one replica writes to its own disk (merges and exports) goes to
the one that the header names.

A verb that waits for requests (`deadline_s`) goes on to the next step when it has taken effect, and its turn is over
when it has at all. What fails after that is said, and nothing is put back: another verb may have come since.

What 4 cannot put back is said: `is_restored` of each replica in the answer. Verbs of one replica run one after the
other, clients in turns. A client without an admin's key, or whose replica does not answer in 1, waits for no turn and
has none; one that goes away gives up its place until its turn has come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loraplex.errors import ConfigError, LoraplexError
from loraplex.router.connection import UNREADABLE, Headers
from loraplex.router.exchange import (
    REPLICAS_HEADER,
    Outcome,
    look,
    own_headers,
    path_of,
    response_of,
    send,
    sent_headers,
    target_of,
)
from loraplex.router.fleet import Fleet
from loraplex.router.keys import Keys
from loraplex.router.names import Card
from loraplex.router.needs import adapters_named
from loraplex.router.replica import VERB_TIMEOUT_S, Replica
from loraplex.router.restoring import load_again
from loraplex.server.api_error import ApiError, ErrorBody, clipped
from loraplex.server.body import decode_object, read_body
from loraplex.server.browser_guard import JSON_TYPE, media_type_of
from loraplex.server.streaming import until_disconnect

MAX_BODY_BYTES = 2**16

ADMINS_PATH = b"/v1/merges"
"""A short page that an admin's key may see, and no other."""

SWITCH_PATH = "/v1/adapters/switch"
UNLOAD_PATHS = (b"/v1/unload_lora_adapter", b"/unload_lora_adapter")

ABSENT: dict[str, Any] = {}
CONTENT = ("digest", "text_digest", "alias_of")
STATE = ("path", *CONTENT, "is_pinned")
"""Of a card: what a verb changes. Versions are numbers of each replica's own."""

LOOK_EVERY_S = 0.25
"""Whether a verb that waits for requests has taken effect."""

MAX_DEADLINE_S = 86400.0

Names = Callable[[Request, bytes], Sequence[str]]
Doing = Callable[[Replica], Awaitable[Outcome]]


class _Waiting(msgspec.Struct):
    deadline_s: float | None = None


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
    """max_upload_bytes: of tensors, which are held in memory until all replicas have them."""

    def __init__(self, fleet: Fleet, keys: Keys, max_upload_bytes: int) -> None:
        self._fleet = fleet
        self._keys = keys
        self._max_upload_bytes = max_upload_bytes

    def routes(self) -> list[Route]:
        def verb(method: str, path: str, names: Names, max_bytes: int = MAX_BODY_BYTES) -> Route:
            return Route(path, partial(self._run, names, max_bytes), methods=[method])

        of_body = partial(_named_in, ("name", "lora_name"))
        return [
            verb("POST", "/v1/load_lora_adapter", of_body),
            verb("POST", "/v1/unload_lora_adapter", of_body),
            verb("POST", "/load_lora_adapter", of_body),
            verb("POST", "/unload_lora_adapter", of_body),
            verb("POST", "/v1/adapters", of_body),
            verb("POST", SWITCH_PATH, partial(_named_in, ("old", "old_name", "new", "new_name"))),
            Route("/v1/adapters/merge", self._run_at_one, methods=["POST"]),
            Route("/v1/adapters/{name:path}/export", self._run_at_one, methods=["POST"]),
            Route("/v1/merges", self._run_at_one, methods=["GET"]),
            Route("/v1/merges/{merge_id}", self._run_at_one, methods=["GET", "DELETE"]),
            verb("POST", "/v1/adapters/{name:path}/clone", of_body),
            *(verb("POST", f"/v1/adapters/{{name:path}}/{each}", _in_path) for each in ("pin", "unpin", "rollback")),
            *(verb("POST", f"/v1/adapters/{{name:path}}/{each}", _nothing) for each in ("evict", "preload")),
            verb("PUT", "/v1/adapters/{name:path}/tensors", _updated, self._max_upload_bytes),
            verb("PUT", "/v1/adapters/{name:path}", _in_path),
            verb("DELETE", "/v1/adapters/{name:path}", _in_path),
        ]

    async def _run(self, names_of: Names, max_bytes: int, request: Request) -> Response:
        if (unknown := await self._keys.refusal(request)) is not None:
            return unknown
        if request.headers.get("content-type", "").lower().startswith("multipart/"):
            text = "uploads are kept at one replica's disk, and are not routed: send it to each replica"
            raise ApiError(text, code="not_routed")
        body = await read_body(request, max_bytes)
        names = names_of(request, body)
        replicas = self._replicas(request, are_equal=names_of is not _nothing)
        refusal = await until_disconnect(request, _refusal(request, body, replicas[0]))
        if refusal is not None:
            return refusal
        async with AsyncExitStack() as held:
            await until_disconnect(request, self._take_turns(held, request, replicas))
            _check_open(replicas)
            _check_whole(names, replicas)
            return await self._on_all(request, body, names, replicas, held)

    async def _run_at_one(self, request: Request) -> Response:
        """What a replica writes to its own disk, and what it says of that."""
        if (unknown := await self._keys.refusal(request)) is not None:
            return unknown
        replicas = self._replicas(request, are_equal=False)
        if len(replicas) != 1 or REPLICAS_HEADER not in request.headers:
            text = f"merges and exports write files at one replica: name it in the header {REPLICAS_HEADER}, then load "
            raise ApiError(text + "the result at all replicas from a path that they share", code="not_routed")
        body = await read_body(request, MAX_BODY_BYTES) if request.method == "POST" else b""
        doing = send(request.method, target_of(request), sent_headers(request), body, replicas[0])
        outcome = await until_disconnect(request, doing)
        if outcome.status == 0:
            raise _replica_lost(outcome)
        return _answer_of(outcome, replicas)

    async def _take_turns(self, held: AsyncExitStack, request: Request, replicas: Sequence[Replica]) -> None:
        """In one order, so that no two verbs wait for each other."""
        for replica in self._fleet.replicas:
            if replica in replicas:
                await held.enter_async_context(replica.verb_turns.of(self._keys.client_of(request)))

    def _replicas(self, request: Request, are_equal: bool) -> list[Replica]:
        """are_equal: one does, of those that share their names."""
        given = request.headers.get(REPLICAS_HEADER)
        try:
            named = [name.strip() for name in given.split(",")] if given is not None else None
            there = [replica for replica in self._fleet.replicas if replica.was_open] or list(self._fleet.replicas)
            found = there if named is None else self._fleet.named(named)
        except ConfigError as error:
            raise ApiError(f"{REPLICAS_HEADER}: {error}", param=REPLICAS_HEADER) from None
        said = [replica.shares_names for replica in found if replica.shares_names is not None]
        if are_equal and said and all(said):
            found = [replica for replica in found if replica.snapshot().is_open][:1] or found
        _check_open(found)
        return found

    async def _on_all(
        self, request: Request, body: bytes, names: Sequence[str], replicas: Sequence[Replica], turns: AsyncExitStack
    ) -> Response:
        headers, own = sent_headers(request), own_headers(request)
        try:
            cards = await asyncio.gather(*(_cards(replica, names, own) for replica in replicas))
        except _AnswerError as refusal:
            return _answer_of(refusal.outcome, ())
        except LoraplexError as error:
            raise _not_begun(str(error)) from error
        if request.method == "DELETE" or target_of(request).startswith(UNLOAD_PATHS):
            having = [(replica, card) for replica, card in zip(replicas, cards, strict=True) if any(card.values())]
            if having:
                replicas, cards = [each for each, _ in having], [card for _, card in having]
        if (
            request.scope["path"].endswith("/rollback")
            and len({tuple(map(_meaning, each.values())) for each in cards}) > 1
        ):
            raise _differing(names)
        deadline_s = _deadline_of(request, body)
        do = partial(send, request.method, target_of(request), headers, body, timeout_s=VERB_TIMEOUT_S + deadline_s)
        begin = partial(_begin, do, own) if deadline_s and names else partial(_do, do)
        first = await begin(replicas[0], cards[0])
        if not first.is_done and first.status != 0:
            return _answer_of(first, replicas[:1])
        outcomes = [first]
        if first.is_done:
            outcomes += await asyncio.gather(*map(begin, replicas[1:], cards[1:]))
        is_done = all(outcome.is_done for outcome in outcomes)
        if is_done:
            self._forget(names, replicas)
            await self._note(names, replicas)
            if any(outcome.waits is not None for outcome in outcomes):
                await turns.aclose()
                outcomes = [outcome if outcome.waits is None else await outcome.waits for outcome in outcomes]
            if all(outcome.is_done for outcome in outcomes):
                return _answer_of(outcomes[0], replicas)
        restored: Sequence[bool] = [False] * len(outcomes)
        if not is_done:
            for outcome in outcomes:
                if outcome.waits is not None:
                    outcome.waits.cancel()
            restored = await asyncio.gather(
                *(_restore(each.replica, before, own) for each, before in zip(outcomes, cards, strict=False))
            )
        self._forget(names, replicas)
        for replica in replicas:
            replica.names.is_doubtful = True
        return _partial(outcomes, restored)

    async def _note(self, names: Sequence[str], replicas: Sequence[Replica]) -> None:
        """What replicas have now; those that are away get it when they are back, where all others have it."""
        first = replicas[0]
        if not names or first.shares_names or first.names.held is None:
            return
        away = [replica for replica in self._fleet.replicas if not replica.snapshot().is_open]
        is_all = {*replicas, *away} >= set(self._fleet.replicas)
        for name in names:
            try:
                found = await _card(first, name, first.own_headers)
                card = msgspec.convert(found, Card) if found else None
                card = None if card is not None and card.is_by_need else card
            except (LoraplexError, _AnswerError, msgspec.ValidationError):
                for replica in replicas:
                    replica.names.is_doubtful = True
                continue
            for replica in replicas:
                replica.names.change(name, card)
            for replica in away if is_all else ():
                if replica not in replicas:
                    replica.names.owe(name, card)

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


def _updated(request: Request, body: bytes) -> list[str]:
    """JSON is for a tenant's adapter that is called `tensors`, as at a replica."""
    name: str = request.path_params["name"]
    return [f"{name}/tensors" if media_type_of(request.headers) == JSON_TYPE else name]


def _nothing(request: Request, body: bytes) -> list[str]:
    """Where weights are is each replica's own, and comes back by itself."""
    return []


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


def _check_whole(names: Sequence[str], replicas: Sequence[Replica]) -> None:
    for replica in replicas:
        for name in names:
            if name in replica.names.to_do:
                raise _not_begun(f"replica {replica.name} was started again and is yet to load {clipped(name)!r}")


def _differing(names: Sequence[str]) -> ApiError:
    what = ", ".join(repr(clipped(name)) for name in names)
    text = f"nothing was changed: {what} is not the same at all replicas; load it at all with PUT, and roll back then"
    return ApiError(text, status=409, kind="conflict_error", code="replicas_disagree")


async def _refusal(request: Request, body: bytes, replica: Replica) -> Response | None:
    """The answer to a client that may do no verb, or that the replica lets do some (a tenant): a refusal, or what came
    of it. None for one that may. Raises ApiError where it is not known."""
    seen = await look(replica, ADMINS_PATH, own_headers(request))
    if seen.status == 0:
        raise _not_begun(seen.message)
    if seen.status == 403:  # the replica's refusal of the verb names it, and leaves an audit record
        timeout_s = VERB_TIMEOUT_S + _deadline_of(request, body)
        seen = await send(request.method, target_of(request), sent_headers(request), body, replica, timeout_s=timeout_s)
        if seen.status == 0:
            raise _replica_lost(seen)
    elif seen.is_done:
        return None
    return _answer_of(seen, ())


async def _card(replica: Replica, name: str, headers: Headers) -> dict[str, Any]:
    """What a replica has under a name; ABSENT: nothing. Raises LoraplexError, _AnswerError."""
    outcome = await look(replica, path_of(name), headers)
    if outcome.status == 404:
        return ABSENT
    if outcome.status == 0:
        raise LoraplexError(outcome.message)
    if not outcome.is_done:
        raise _AnswerError(outcome)
    return decode_object(outcome.body)


async def _cards(replica: Replica, names: Sequence[str], headers: Headers) -> dict[str, dict[str, Any]]:
    return {name: await _card(replica, name, headers) for name in names}


async def _do(do: Doing, replica: Replica, before: dict[str, dict[str, Any]]) -> Outcome:
    return await do(replica)


async def _begin(do: Doing, headers: Headers, replica: Replica, before: dict[str, dict[str, Any]]) -> Outcome:
    """Of a verb that waits for requests: what came of it, or that it has taken effect. What does not show that within
    VERB_TIMEOUT_S has no longer a turn than any verb."""
    doing = asyncio.ensure_future(do(replica))
    (name, card), loop = next(iter(before.items())), asyncio.get_running_loop()
    until_s = loop.time() + VERB_TIMEOUT_S
    while not (await asyncio.wait((doing,), timeout=LOOK_EVERY_S))[0]:
        has_begun = loop.time() >= until_s
        with suppress(LoraplexError, _AnswerError):
            now = await _card(replica, name, headers)
            has_begun |= now.get("alias_of") in before or _effect(now) != _effect(card)
        if has_begun and not doing.done():
            return Outcome(replica, 200, waits=doing)
    return doing.result()


def _deadline_of(request: Request, body: bytes) -> float:
    """How long an unload or a switch may wait for requests; 0 for other verbs, and for what the replica refuses."""
    deadline_s = 0.0
    with suppress(*UNREADABLE, ValueError):
        if request.method == "DELETE":
            deadline_s = float(request.query_params.get("deadline_s", 0))
        elif request.scope["path"] == SWITCH_PATH:
            deadline_s = msgspec.json.decode(body, type=_Waiting).deadline_s or 0.0
    return deadline_s if 0 < deadline_s <= MAX_DEADLINE_S else 0.0


async def _restore(replica: Replica, before: dict[str, dict[str, Any]], headers: Headers) -> bool:
    """Make the names what they were. Whether they are."""
    try:
        for name, card in reversed(before.items()):
            await _put_back(replica, name, card, headers)
        now = await _cards(replica, tuple(before), headers)
    except (LoraplexError, _AnswerError, msgspec.ValidationError):
        return False
    return all(_state(now[name]) == _state(card) for name, card in before.items())


async def _put_back(replica: Replica, name: str, card: dict[str, Any], headers: Headers) -> None:
    now = await _card(replica, name, headers)
    if not card:
        if now:
            await send("DELETE", path_of(name), headers, b"", replica)
        return
    if not now:
        await load_again(replica, name, msgspec.convert(card, Card), headers)
        return
    if any(now.get(field) != card.get(field) for field in CONTENT):
        await send("POST", path_of(name, "/rollback"), headers, b"", replica)
    if now.get("is_pinned") != card.get("is_pinned"):
        await send("POST", path_of(name, "/pin" if card["is_pinned"] else "/unpin"), headers, b"", replica)


def _state(card: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(card.get(field) for field in STATE)


def _effect(card: dict[str, Any]) -> tuple[Any, ...]:
    """A name that was unloaded may be there again by need, and be what it was."""
    return *_state(card), card.get("loaded_time")


def _meaning(card: dict[str, Any]) -> tuple[Any, ...]:
    return card.get("digest"), card.get("alias_of")


# -------------------------------------------------------------------------------------------------------------- answers


def _not_begun(reason: str) -> ApiError:
    text = f"nothing was changed: {reason}"
    return ApiError(text, status=503, kind="unavailable_error", code="replica_unavailable")


def _replica_lost(outcome: Outcome) -> ApiError:
    return ApiError(outcome.message, status=502, kind="server_error", code="replica_lost")


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
