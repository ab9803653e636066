"""One engine process of a front, as placement sees it: its requests, their KV, and what its memory has."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from loraplex.config import EngineConfig
from loraplex.core import AdapterSpec, RequestOutput
from loraplex.events import EngineEvent, EventKind
from loraplex.frontend import messages as msg
from loraplex.frontend.client import EngineClient
from loraplex.frontend.supervisor import EngineSupervisor
from loraplex.routing import KnownMemory, Needs, RunnerState, Snapshot, prefix_digests

BLOCK_TOKENS = 64
"""Of a prompt: what one digest stands for."""

MAX_BLOCKS = 64
TOKEN_BYTES = array("i").itemsize
OF_MEMORY = {EventKind.LOAD, EventKind.EVICT, EventKind.DROP}
"""Events that say where an adapter is."""


class Runner:
    """Belongs to one event loop. Only requests of this front are there, so that nothing has to be asked for.

    is_member: its process knows the adapters that are registered, and is told of every change. num_moved: requests that
    went on in another one. specs: what is registered, by adapter_id.
    """

    def __init__(self, number: int, config: EngineConfig, specs: Mapping[int, AdapterSpec]) -> None:
        self.number = number
        self.config = config
        self.name = str(number)
        self.is_member = False
        self.state = RunnerState.OPEN
        self.num_moved = 0
        self.memory = KnownMemory()
        self.supervisor: EngineSupervisor  # which calls back
        self._num_requests = 0
        self._num_tokens = self._ranks = 0
        self._num_by_tenant: Counter[str] = Counter()
        self._num_by_adapter: Counter[str] = Counter()
        self._specs = specs
        self._sizes_in_use: dict[str, int] = {}
        self._bytes_in_use = 0

    @property
    def client(self) -> EngineClient:
        return self.supervisor.client

    @property
    def is_serving(self) -> bool:
        return self.supervisor.death is None

    async def call(self, message_type: type, *values: Any) -> Any:
        """Call its process; raises what it answers with."""
        return await self.client.call(message_type, *values)

    def abort(self, request_ids: tuple[str, ...]) -> None:
        """End requests that it runs, unless its process has ended."""
        if request_ids and self.client.is_alive:
            self.client.send(msg.AbortRequests(request_ids))

    def hear(self, event: EngineEvent) -> None:
        """What its process tells of its memory."""
        if event.kind in OF_MEMORY and event.adapter_id is not None:
            self.memory.learn_event(event.kind.value, str(event.adapter_id), event.details.get("tier"))

    def lose_process(self) -> None:
        self.is_member = False
        self.memory.forget()

    @property
    def num_requests(self) -> int:
        return self._num_requests

    def snapshot(self, now_s: float, *, is_draining: bool | None = None) -> Snapshot:
        """Of now; one whose loop is silent is as old as the silence. is_draining: None: as its state says."""
        info, max_running = self.supervisor.info, self.config.max_num_seqs
        num_used_blocks = -(-self._num_tokens // info.block_size)
        return Snapshot(
            name=self.name,
            seen_s=now_s - self.client.silence_s,
            num_waiting=max(0, self._num_requests - max_running),
            num_running=min(self._num_requests, max_running),
            max_requests=max_running,
            num_free_kv_blocks=max(0, info.num_kv_blocks - num_used_blocks),
            num_kv_blocks=info.num_kv_blocks,
            kv_block_tokens=info.block_size,
            tiers=self.memory.tiers,
            prefix_digests=self.memory.prefixes.keys(),
            ranks=self._ranks,
            num_by_tenant=self._num_by_tenant,
            num_by_adapter=self._num_by_adapter,
            adapter_room=1.0 - min(1.0, self._bytes_in_use / max(1, info.adapter_memory_bytes)),
            is_healthy=self.is_serving,
            is_draining=self.state is RunnerState.DRAINING if is_draining is None else is_draining,
        )

    def count(self, needs: Needs, num_requests: int, num_tokens: int) -> None:
        """Requests that came, or with negative numbers went; tokens that their KV has."""
        self._num_requests += num_requests
        self._num_tokens += num_tokens
        self._ranks += num_requests * needs.rank
        for key, counts in ((needs.tenant, self._num_by_tenant), (needs.adapter, self._num_by_adapter)):
            if key is not None and num_requests:
                counts[key] += num_requests
                if not counts[key]:
                    del counts[key]
        if needs.adapter is not None and num_requests:
            self._note_use(needs.adapter)

    def _note_use(self, adapter: str) -> None:
        """What requests use cannot be freed."""
        if adapter not in self._num_by_adapter:
            self._bytes_in_use -= self._sizes_in_use.pop(adapter, 0)
        elif adapter not in self._sizes_in_use:
            spec = self._specs.get(int(adapter))
            self._sizes_in_use[adapter] = 0 if spec is None else spec.nbytes
            self._bytes_in_use += self._sizes_in_use[adapter]


class Placement:
    """The completions of one prompt at a runner, which counts them until `end`. num_tokens_left: the most that one of
    them may still get. has_answered: this runner, with a token of any."""

    def __init__(self, runner: Runner, needs: Needs, message: msg.AddRequests) -> None:
        self.runner = runner
        self.num_completions = len(message.requests)
        self._needs = needs
        lengths = [len(each.output_token_ids) for each in message.requests]
        self._max_tokens = message.requests[0].max_tokens
        self.num_tokens_left = self._max_tokens - min(lengths)
        self._num_tokens = needs.num_prompt_tokens + sum(lengths)
        self.has_answered = False
        runner.count(needs, self.num_completions, self._num_tokens)

    @property
    def needs_again(self) -> Needs:
        """Of a runner that computes all of it again, without a cache."""
        return replace(self._needs, num_prompt_tokens=self._num_tokens, prefix_digests=())

    def grow(self, output: RequestOutput) -> None:
        """It has answered so far."""
        growing = [len(each.token_ids) for each in output.outputs if each.finish_reason is None]
        self.num_tokens_left = self._max_tokens - min(growing, default=self._max_tokens)
        num_tokens = self._needs.num_prompt_tokens + sum(len(each.token_ids) for each in output.outputs)
        self.runner.count(self._needs, 0, num_tokens - self._num_tokens)
        self._num_tokens = num_tokens
        if not self.has_answered:
            self.has_answered = True
            self.runner.memory.learn_served(self._needs)

    def end(self) -> None:
        """To be called once."""
        self.runner.count(self._needs, -self.num_completions, -self._num_tokens)


def needs_of(message: msg.AddRequests, rank: int) -> Needs:
    """Of the completions of one prompt. rank: of its adapter.

    Prompts of one adapter and salt share their KV. A tenant's requests are spread among equals, whatever their salts.
    """
    request = message.requests[0]
    return Needs(
        adapter=None if request.adapter_id is None else str(request.adapter_id),
        num_prompt_tokens=len(message.prompt) // TOKEN_BYTES,
        prefix_digests=prefix_digests(
            message.prompt, f"{request.cache_salt} {request.adapter_digest}", BLOCK_TOKENS * TOKEN_BYTES, MAX_BLOCKS
        ),
        rank=rank,
        tenant=request.claim.tenant or None,
    )
