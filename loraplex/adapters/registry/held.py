"""The versions of a request that is still being read.

A version's tokenizer encodes the prompt, and that version has to answer it. So it is held before the prompt is encoded,
and the engine takes it from there: a reload, rollback or switch between the two changes nothing.
"""

from __future__ import annotations

from loraplex.adapters.registry.registry import LoRARegistry
from loraplex.adapters.registry.version import LoRARef


class HeldAdapters:
    """`refs` are held until each of `num_prompts` prompts took them, or this is closed. () for the base model.

    registry: None only without refs.
    """

    def __init__(
        self, registry: LoRARegistry | None = None, refs: tuple[LoRARef, ...] = (), num_prompts: int = 1
    ) -> None:
        self._registry = registry
        self._num_left = num_prompts
        self.refs = refs

    def take(self) -> tuple[LoRARef, ...]:
        """References of one prompt, as `acquire` gives them: the caller releases them."""
        assert self._num_left > 0, "what is not held may be gone"
        for ref in self.refs:
            assert self._registry is not None
            self._registry.acquire_held(ref)
        if self._num_left == 1:
            self.close()
        else:
            self._num_left -= 1
        return self.refs

    def close(self) -> None:
        if self._num_left:
            self._num_left = 0
            for ref in self.refs:
                assert self._registry is not None
                self._registry.release(ref)
