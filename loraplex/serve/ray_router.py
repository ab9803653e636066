"""Ray Serve's request router over the policies of `routing`. Serve makes one in each process that has a handle."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from loraplex.routing import Needs
from loraplex.serve.choice import Choice
from loraplex.serve.exchange import Call

NO_NEEDS = Needs()


class PolicyRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray is not there for the type checker
    """The replicas in the order of the policy, each tried alone: one that has no place is followed by the next."""

    def initialize_state(self, policy: str, max_requests: int) -> None:
        self._choice = Choice(policy, max_requests, time.monotonic)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        self._choice.see({name: each.routing_stats or {} for name, each in by_name.items()})
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # between two rounds in which none had a place
        call = _call_of(pending_request)
        needs, front, named = (NO_NEEDS, "", None) if call is None else (call.needs, call.front, call.replica)
        names = self._choice.order(needs, by_name, front)
        if named is not None and named in by_name:
            # Where it has no place another one refuses the request: all that Serve lets wait is what any can answer.
            names = [named, *(each for each in names if each != named)]
        if pending_request is not None and names:
            request_id = pending_request.metadata.internal_request_id
            self._choice.begin(names[0], request_id, needs)  # the next choice is made before this request is sent
            pending_request.future.add_done_callback(partial(self._settle, names[0], request_id, needs))
        return [[by_name[name]] for name in names]

    def _settle(self, first: str, request_id: str, needs: Needs, chosen: asyncio.Future[RunningReplica]) -> None:
        """The replica that has a place is known, or the request was called off."""
        if chosen.cancelled() or chosen.exception() is not None:
            self._choice.end(first, request_id)
        else:
            self._choice.begin(chosen.result().replica_id.unique_id, request_id, needs)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Also where the replica refused it."""
        self._choice.end(replica_id.unique_id, internal_request_id)


def _call_of(pending_request: PendingRequest | None) -> Call | None:
    first = pending_request.args[0] if pending_request is not None and pending_request.args else None
    return first if isinstance(first, Call) else None
