"""Ray Serve's request router over the policies of `routing`. Serve makes one in each process that has a handle."""

from __future__ import annotations

import time
from typing import Any

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
        if call is not None and call.replica in by_name:
            return [[by_name[call.replica]]]
        needs = NO_NEEDS if call is None else call.needs
        return [[by_name[name]] for name in self._choice.order(needs, by_name)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        call = _call_of(pending_request)
        needs = NO_NEEDS if call is None else call.needs
        self._choice.begin(replica_id.unique_id, pending_request.metadata.internal_request_id, needs)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._choice.end(replica_id.unique_id, internal_request_id)


def _call_of(pending_request: PendingRequest | None) -> Call | None:
    first = pending_request.args[0] if pending_request is not None and pending_request.args else None
    return first if isinstance(first, Call) else None
