"""Makes a replica what `Names.to_do` says, with the router's own key: one name at a time, in turns with clients' verbs.

What the replica refuses is said in the log once and given up: its files are not there, are no adapter any more, or have
another content than the other replicas loaded. (The router's key is an operator's: a tenant may have put a link to
another one's adapter there.) What does not come about for another reason is tried again: all of it, where the replica
takes the key no longer. Meanwhile the requests for those adapters go to other replicas.

A name that was switched is loaded when what answers for it is there, as its alias from the first moment on: no request
gets the weights that it was switched away from.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from loraplex.router.connection import Headers
from loraplex.router.exchange import Outcome, path_of, send, typed
from loraplex.router.names import Card
from loraplex.router.replica import Replica
from loraplex.server.api_error import clipped

_log = logging.getLogger("loraplex.router")

RETRY_S = 5.0
PASSING = frozenset({0, 408, 425, 429})
"""Of refusals; and those of 500 and more."""


async def restore(replica: Replica) -> None:
    """Until nothing is left to do, or the replica is away."""
    names = replica.names
    num_done, is_said = 0, False
    while names.to_do and replica.is_ready:
        for name, card in names.in_order():
            async with replica.verb_turns.of("the router"):
                if not replica.is_ready or name not in names.to_do or names.to_do[name] is not card:
                    continue  # a client's verb came between
                outcome = await _make(replica, name, card)
                if not outcome.is_of_key:
                    num_done += _is_done(replica, name, card, outcome)
                    continue
            if not is_said:
                text = "replica %s no longer takes the router's key, %d adapters are not restored until it does: %s"
                _log.error(text, replica.name, len(names.to_do), clipped(outcome.message))
            is_said = True
            break
        if names.to_do:
            await asyncio.sleep(RETRY_S)
    if num_done:
        _log.info("replica %s has %d adapters as before: it was started again or away", replica.name, num_done)


def _is_done(replica: Replica, name: str, card: Card | None, outcome: Outcome) -> bool:
    if outcome.is_done or (card is None and outcome.status == 404):
        replica.names.change(name, card)
        return True
    if _is_passing(outcome):
        return False
    if replica.names.to_do.get(name) is not card:
        return False  # what it is to be was learned again meanwhile
    replica.names.to_do.pop(name, None)
    what = "unloaded" if card is None else "loaded again"
    text = "adapter %r could not be %s at replica %s, requests for it go to the others: %s"
    _log.error(text, clipped(name), what, replica.name, clipped(outcome.message))
    return False


def _is_passing(outcome: Outcome) -> bool:
    return outcome.status in PASSING or outcome.status >= 500


async def _make(replica: Replica, name: str, card: Card | None) -> Outcome:
    headers = replica.own_headers
    if card is None:
        return await send("DELETE", path_of(name), headers, b"", replica)
    if card.alias_of in replica.names.to_do:
        return Outcome(replica, 0, reason=f"{clipped(card.alias_of)!r} is not there yet")
    return await load_again(replica, name, card, headers)


async def load_again(replica: Replica, name: str, card: Card, headers: Headers) -> Outcome:
    """What the card's path had; the replica refuses it where it has other weights or text by now."""
    fields: dict[str, object] = {"path": card.path, "is_pinned": card.is_pinned and card.alias_of is None}
    if card.alias_of is not None:
        fields["alias_of"] = card.alias_of
    if card.digest:
        fields["digest"] = card.digest
        if card.text_digest is not None:
            fields["text_digest"] = card.text_digest
    if card.lora_int_id is not None:
        fields["lora_int_id"] = card.lora_int_id
    return await send("PUT", path_of(name), typed(headers), msgspec.json.encode(fields), replica)
