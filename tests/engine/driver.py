"""An engine stepped by hand, with a front before it: requests are submitted, aborted and watched between any two steps.

driver = Driver(base, adapter_memory_bytes=...)
request_id = driver.submit(prompt_token_ids, "sql", max_tokens=8)
driver.step(3)
driver.finish()
driver.outputs[request_id].outputs[0].token_ids
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from loraplex.adapters.registry import LoRARef, LoRARegistry
from loraplex.config import EngineConfig, LoRAConfig
from loraplex.core import AdapterChoice, RequestOutput, SamplingParams, TokenOutput
from loraplex.engine.build import build_engine
from loraplex.errors import LoraplexError, RequestAbortedError
from loraplex.frontend.frontend import adapter_ref, make_front
from loraplex.frontend.store import store_of
from loraplex.metrics import EngineStats

MAX_STALLS = 400  # of 50 ms each


class Driver:
    """outputs and errors: of the requests that ended, by request_id. `lora` None turns LoRA off."""

    def __init__(self, base: Path, lora: LoRAConfig | None = None, *, is_lora_on: bool = True, **settings: Any) -> None:
        lora = (lora or LoRAConfig()) if is_lora_on else None
        config = EngineConfig(model=str(base), lora=lora, **settings)
        self.engine = build_engine(config)
        store = store_of(self.engine, self._take_all) if is_lora_on else None
        self._front = make_front(config, self.engine.info, store, lambda job: job(), served_model_name="base")
        self._request_ids = itertools.count()
        self._refs: dict[str, tuple[LoRARef, ...]] = {}
        self.outputs: dict[str, RequestOutput] = {}
        self.errors: dict[str, LoraplexError] = {}

    @property
    def registry(self) -> LoRARegistry:
        assert self._front.registry is not None
        return self._front.registry

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats()

    @property
    def running_ids(self) -> list[str]:
        """Requests that have not ended."""
        return list(self._front.outputs._generations)

    def submit(self, prompt: Sequence[int], name: AdapterChoice = None, cache_salt: str = "", **params: Any) -> str:
        """Greedy to `max_tokens`, past the end of sequence, unless `params` say otherwise. Raises as to a client."""
        request_id = f"r{next(self._request_ids)}"
        refs = self._front.acquire(name)
        try:
            chosen = SamplingParams(**{"temperature": 0, "ignore_eos": True, **params})
            adapter = adapter_ref(refs, name)
            text = self._front.text_for(refs)
            prepared = self._front.inputs.prepare(
                request_id, prompt, chosen, adapter=adapter, cache_salt=cache_salt, text=text
            )
        except BaseException:
            self._front.release(refs)
            raise
        self._refs[request_id] = refs
        self._front.outputs.add(prepared)
        for request in prepared.children:
            assert self.engine.add_request(request) == []
        return request_id

    def abort(self, request_id: str) -> None:
        """What a disconnect does."""
        self.engine.abort(self._front.outputs.remove(request_id))
        self._end(request_id, RequestAbortedError("the client left"))

    def move(self, request_id: str) -> None:
        """Withdraw a request, and add what its client has of it, as a front that moves it does."""
        requests = self._front.outputs.unfinished(request_id)
        withdrawn = self.engine.withdraw([each.request_id for each in requests])
        assert list(withdrawn) == [each.request_id for each in requests]
        for request in requests:
            assert self.engine.add_request(replace(request, num_cached_tokens=withdrawn[request.request_id])) == []

    def step(self, num_steps: int = 1) -> None:
        """With look-ahead no step is left in flight: verbs in this thread would wait for its memory."""
        for _ in range(num_steps):
            self.advance()
        self._take_all(self.engine.settle())

    def advance(self) -> None:
        """One step, which with look-ahead is left in flight."""
        self._take_all(self.engine.step())

    def finish(self, max_steps: float = math.inf) -> None:
        """Step until nothing is left to do; loads are waited for, but not without end."""
        num_steps = num_stalls = 0
        while self.engine.has_unfinished:
            self.advance()
            num_steps += 1
            assert num_steps <= max_steps, f"requests still wait after {num_steps} steps: {self.stats}"
            if self.engine.is_stalled and self.engine.has_unfinished:
                num_stalls += 1
                assert num_stalls <= MAX_STALLS, f"the engine is stuck: {self.stats}"
                self.engine.wait_for_change(0.05)
            else:
                num_stalls = 0

    def tokens(self, request_id: str) -> tuple[int, ...]:
        """What a finished request said; raises its error."""
        if request_id in self.errors:
            raise self.errors[request_id]
        return self.outputs[request_id].outputs[0].token_ids

    def _take_all(self, outputs: Iterable[TokenOutput]) -> None:
        for output in outputs:
            self._take(output)

    def _take(self, token_output: TokenOutput) -> None:
        processed = self._front.outputs.process(token_output)
        if processed is None:
            return
        self.engine.abort(processed.abort_ids)
        if processed.is_last:
            self._end(processed.request_id, processed.error or processed.output)

    def _end(self, request_id: str, result: RequestOutput | LoraplexError | None) -> None:
        if isinstance(result, RequestOutput):
            self.outputs[request_id] = result
        elif isinstance(result, LoraplexError):
            self.errors[request_id] = result
        self._front.release(self._refs.pop(request_id, ()))

    def check_integrity(self) -> None:
        if self._front.registry is not None:
            self._front.registry.check_integrity()
        self.engine.check_integrity()

    def check_idle(self) -> None:
        """Every reference has returned: of requests, KV blocks and adapters."""
        assert not self.engine.has_unfinished
        assert not self._refs
        assert len(self._front.outputs) == 0
        self.check_integrity()
        if self._front.registry is not None:
            assert self._front.registry.num_references == 0

    def close(self) -> None:
        self.engine.close()


def packed_nbytes(base: Path, adapter: Path) -> int:
    """Bytes that the adapter takes on the device, as an engine with plenty of room has them."""
    driver = Driver(base, max_model_len=32)
    try:
        driver.registry.load("measured", str(adapter))
        driver.submit([3], "measured", max_tokens=1)
        driver.finish()
        return driver.stats.memory.resident_bytes["device"]
    finally:
        driver.close()
