"""What placement knows of a runner or replica, and what a request needs of it. Frozen: a decision can be repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from loraplex.core import Tier


@dataclass(frozen=True, slots=True)
class Needs:
    """What a request needs.

    prefix_digests: of its prompt's beginnings, the shortest first, each of as many tokens more. rank: of its adapter,
    0 where it has none or the rank is not known. tenant: the client whose request it is, None where all are one.
    """

    adapter: str | None = None
    num_prompt_tokens: int = 0
    prefix_digests: Sequence[bytes] = ()
    rank: int = 0
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A runner at `seen_s`, in the caller's clock.

    num_waiting, num_running: requests in its queue and in its batch. max_requests: of both together, before it counts
    as full. num_free_kv_blocks, num_kv_blocks: of kv_block_tokens each; None where it is not known, and then it bounds
    nothing.
    tiers: where adapters are; one that is not there is at its source. prefix_digests: of prompts whose KV it probably
    has. ranks: of its requests' adapters, in all: each of their steps reads so much. num_by_tenant, num_by_adapter:
    requests of each. adapter_room: the share of its adapter memory that is free, 0 to 1.
    """

    name: str
    seen_s: float
    num_waiting: int = 0
    num_running: int = 0
    max_requests: int = 256
    num_free_kv_blocks: int | None = None
    num_kv_blocks: int | None = None
    kv_block_tokens: int = 16
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    prefix_digests: Set[bytes] = frozenset()
    ranks: int = 0
    num_by_tenant: Mapping[str, int] = field(default_factory=dict)
    num_by_adapter: Mapping[str, int] = field(default_factory=dict)
    adapter_room: float = 1.0
    is_healthy: bool = True
    is_draining: bool = False

    @property
    def num_requests(self) -> int:
        return self.num_waiting + self.num_running

    @property
    def is_open(self) -> bool:
        """Whether it may get requests at all."""
        return self.is_healthy and not self.is_draining

    def fits(self, needs: Needs) -> bool:
        """Whether it can take a request now, without a queue for memory."""
        num_blocks = -(-self.num_uncached_tokens(needs) // self.kv_block_tokens)
        has_kv = self.num_free_kv_blocks is None or num_blocks <= self.num_free_kv_blocks
        return self.is_open and self.num_requests < self.max_requests and has_kv

    def tier_of(self, adapter: str | None) -> Tier:
        """Where the weights of a request are; those of the base model are always on the device."""
        return Tier.DEVICE if adapter is None else self.tiers.get(adapter, Tier.SOURCE)

    def cached_share(self, needs: Needs) -> float:
        """Of the prompt, 0 to 1: a beginning counts where all shorter ones are there, too."""
        num_known = 0
        for digest in needs.prefix_digests:
            if digest not in self.prefix_digests:
                break
            num_known += 1
        return num_known / len(needs.prefix_digests) if needs.prefix_digests else 0.0

    def num_uncached_tokens(self, needs: Needs) -> int:
        return needs.num_prompt_tokens - int(needs.num_prompt_tokens * self.cached_share(needs))

    def num_of_tenant(self, needs: Needs) -> int:
        return 0 if needs.tenant is None else self.num_by_tenant.get(needs.tenant, 0)
