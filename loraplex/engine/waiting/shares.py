"""What each tenant was served: the virtual token counters of fair scheduling.

    served of a tenant := sum over its requests of
        (PROMPT_COST * prompt tokens computed + OUTPUT_COST * tokens generated) / weight

The tenant that was served least is admitted from next (Sheng et al., "Fairness in Serving Large Language Models", OSDI
2024). A tenant that comes back, with nothing waiting, is lifted: to the least served tenant that waits, or where none
waits to the one that ceased to wait last. So time away is no credit. Of two tenants that wait all the time, for
requests that could run, the difference of what they were served in any interval is at most

    2 * max(PROMPT_COST * longest prompt, OUTPUT_COST * tokens that running requests may come to have) / least weight

Prompt tokens from the prefix cache are free, and a preempted request is not charged for its prompt again. A request
that is admitted is charged for its prompt at once, and for each token when it is known.

A tenant with a target to its first token stands at `served - credit` while its next request has waited for half of
that. The credit is HINT_SERVICE / weight, so with targets the bound is

    2 * (max(...) + HINT_SERVICE) / least weight
"""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.sampling_params import Claim

PROMPT_COST, OUTPUT_COST = 1.0, 2.0
"""Of one token; a generated one takes about as much as two of a prompt (the paper's weights)."""

HINT_SERVICE = 512.0
"""Weighted tokens that a tenant may be served before others for the sake of its target to the first token."""

MAX_IDLE_TENANTS = 4096
"""Tenants without a request whose counters are kept, before those that were served least are forgotten."""


@dataclass(slots=True, eq=False)
class TenantShare:
    """One tenant: its weight, what it was served (tokens times cost over weight) and how many requests have not ended.

    num_running: of them, in the batch.
    num_prompt_tokens: that were computed for it; num_generated_tokens: that it got. ttft_target_s, itl_target_s: None:
    it has none. credit: how much less it counts as served, while its next request is urgent.
    """

    name: str = ""
    weight: float = 1.0
    served: float = 0.0
    num_requests: int = 0
    num_running: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    ttft_target_s: float | None = None
    itl_target_s: float | None = None
    credit: float = 0.0

    @property
    def place(self) -> float:
        """By which tenants are ordered: the least is next."""
        return self.served - self.credit

    def charge_prompt(self, num_tokens: int) -> None:
        self.served += PROMPT_COST * num_tokens / self.weight
        self.num_prompt_tokens += num_tokens

    def charge_output(self) -> None:
        """For one token."""
        self.served += OUTPUT_COST / self.weight
        self.num_generated_tokens += 1


class TenantShares:
    """The tenants with requests, and those that may come back."""

    def __init__(self, max_idle: int = MAX_IDLE_TENANTS) -> None:
        self._max_idle = self._limit = max_idle
        self._shares: dict[str, TenantShare] = {}

    def __len__(self) -> int:
        return len(self._shares)

    def active(self) -> list[TenantShare]:
        """Those with requests that have not ended."""
        return [share for share in self._shares.values() if share.num_requests]

    def enter(self, claim: Claim) -> TenantShare:
        """A request of the tenant comes; the newest weight and targets count."""
        share = self._shares.get(claim.tenant)
        if share is None:
            if len(self._shares) >= self._limit:
                self._forget()
            share = self._shares[claim.tenant] = TenantShare(claim.tenant)
        share.weight = claim.weight
        share.ttft_target_s, share.itl_target_s = _seconds(claim.ttft_target_ms), _seconds(claim.itl_target_ms)
        share.num_requests += 1
        return share

    def _forget(self) -> None:
        """The half of the idle that were served least: coming back, they are lifted soonest in any case."""
        idle = sorted((each for each in self._shares.values() if not each.num_requests), key=lambda each: each.served)
        for share in idle[: (len(idle) + 1) // 2]:
            del self._shares[share.name]
        self._limit = max(self._max_idle, 2 * len(self._shares))


def _seconds(target_ms: int | None) -> float | None:
    return None if target_ms is None else target_ms / 1000
