"""Placement: which runner or replica takes a request, which ones the load needs, and where adapters are copied to.

All of it is decided from snapshots alone. No clock, no I/O, no torch.
"""

from loraplex.routing.breaker import Breaker, BreakerState
from loraplex.routing.consolidation import Decision, Held, Load, Member, Move, Rules, RunnerState, decide
from loraplex.routing.hot_adapters import Copies, Copy, HotAdapters, HotRules
from loraplex.routing.known import KnownMemory, prefix_digests
from loraplex.routing.policies import POLICIES, Costs, Policy, order, place
from loraplex.routing.snapshot import Needs, Snapshot

__all__ = [
    "POLICIES",
    "Breaker",
    "BreakerState",
    "Copies",
    "Copy",
    "Costs",
    "Decision",
    "Held",
    "HotAdapters",
    "HotRules",
    "KnownMemory",
    "Load",
    "Member",
    "Move",
    "Needs",
    "Policy",
    "Rules",
    "RunnerState",
    "Snapshot",
    "decide",
    "order",
    "place",
    "prefix_digests",
]
