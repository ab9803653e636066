"""Verbs and their callers: a line of the log `loraplex.audit` and an event each, with the key's fingerprint alone."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from loraplex.errors import without_keys
from loraplex.events import Detail, EngineEvent, EventKind
from loraplex.frontend.event_hub import EventHub
from loraplex.logs import request_context
from loraplex.server.api_error import CLIENT_CLOSED_REQUEST, MAX_SHOWN_CHARS, status_of
from loraplex.server.auth import KEYLESS, caller_of

REFUSAL_INTERVAL_S = 1.0
"""At most one refusal of a tenant in this time becomes an event, and one 403 of all other keys: what a key may not do,
and what is not there, must not wash away the events of what was done."""

MAX_REFUSED = 4096
"""Tenants that are remembered."""

logger = logging.getLogger("loraplex.audit")


@dataclass(slots=True)
class AuditRecord:
    """status: of the answer; that of a client that left unless something else is set."""

    status: int = CLIENT_CLOSED_REQUEST


class Audit:
    """Records the verbs of one server."""

    def __init__(self, events: EventHub, clock: Callable[[], float] = time.time) -> None:
        self._events = events
        self._clock = clock
        self._last_refusals_s: OrderedDict[str, float] = OrderedDict()  # by account; the oldest first

    @contextlib.contextmanager
    def recording(self, request: Request, route: str) -> Iterator[AuditRecord]:
        """Around the call of a verb: its outcome is recorded however it ends."""
        record = AuditRecord()
        try:
            yield record
        except Exception as error:
            record.status = _status_of(error)
            raise
        finally:
            self._record(request, route, record.status)

    def _record(self, request: Request, route: str, status: int) -> None:
        names = _adapters_of(request)
        if names and (context := request_context.get()) is not None:
            context.adapter = names[0]
        caller, client = caller_of(request), _client_of(request)
        key, tenant = caller.fingerprint, caller.scope.tenant
        said = _shown(key, tenant)
        target = _target_of(request)
        subjects = [f"adapter {', '.join(map(repr, names))}"] if names else []
        subjects += [f"{kind} {name!r}" for kind, name in target.items()]
        subject = f" on {' for '.join(subjects)}" if subjects else ""
        text = f"{request.method} {route.replace(':path}', '}')}{subject} from {client} with {said}: {status}"
        logger.log(logging.WARNING if status == 403 else logging.INFO, "%s", text)
        is_bounded = status == 403 or (tenant and 400 <= status < 500)
        if is_bounded and not self._is_refusal_due(caller.account if tenant else ""):
            return
        details: dict[str, Detail] = {
            "method": request.method,
            "route": route,
            "status": status,
            "key": key,
            "client": client,
            **({"tenant": tenant} if tenant else {}),
            **{f"target_{kind}": name for kind, name in target.items()},
        }
        name = names[0] if names else None
        self._events.add(EngineEvent(EventKind.AUDIT, self._clock(), text, adapter_name=name, details=details))

    def _is_refusal_due(self, account: str) -> bool:
        now_s = self._clock()
        if now_s - self._last_refusals_s.get(account, -math.inf) < REFUSAL_INTERVAL_S:
            return False
        self._last_refusals_s[account] = now_s
        self._last_refusals_s.move_to_end(account)
        if len(self._last_refusals_s) > MAX_REFUSED:
            self._last_refusals_s.popitem(last=False)
        return True


def name_adapters(request: Request, *names: str) -> None:
    """Says which adapters a verb is about whose path does not: they are in its audit record."""
    request.state.adapters = names


def name_target(request: Request, **target: str | None) -> None:
    """Says which `tenant` or `key` a verb is about whose path does not: it is in its audit record."""
    request.state.target = {kind: name for kind, name in target.items() if name is not None}


def _target_of(request: Request) -> dict[str, str]:
    in_path = {kind: request.path_params.get(param) for kind, param in (("key", "key_id"), ("tenant", "tenant"))}
    target = {kind: name for kind, name in in_path.items() if name is not None} | getattr(request.state, "target", {})
    return {kind: _named(name) for kind, name in target.items()}


def _shown(key: str, tenant: str | None) -> str:
    return key if key == KEYLESS.fingerprint else f"key {key}" + (f" of tenant {tenant}" if tenant else "")


def _adapters_of(request: Request) -> tuple[str, ...]:
    in_path = request.path_params.get("name")
    names = getattr(request.state, "adapters", ()) if in_path is None else (in_path,)
    return tuple(map(_named, names))


def _named(name: str) -> str:
    return without_keys(name)[:MAX_SHOWN_CHARS]


def _client_of(request: Request) -> str:
    """The address; a proxy on this machine may say another one, which is believed when it is an address."""
    host = "" if request.client is None else request.client.host
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return "an unknown address"


def _status_of(error: Exception) -> int:
    if isinstance(error, HTTPException):
        return error.status_code
    return 400 if isinstance(error, RequestValidationError) else status_of(error)
