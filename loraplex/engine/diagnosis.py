"""A diagnostic prompt: fixed tokens whose likeliest successors are recorded while all is well, and asked again when
something is odd.

One forward pass of a few tokens, between steps and beside the scheduler: no request waits for it longer than for a
short prompt.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

from loraplex.core import BASE_SLOT, BlockAllocator, Request, SamplingParams

Answer = tuple[int, ...]
"""The likeliest next token after each token of the prompt."""

Ask = Callable[[Request, int], Answer | None]
"""(prompt, lora_slot) -> its answer; None when logits are not finite. ModelRunner.answer."""

PROMPT_TOKENS = 16
MAX_ANSWERS = 8192
FIRST_TOKEN_ID = 3  # those before are often special


class Diagnosis:
    """The model's answers to the prompt: the base's, and by digest those of adapters."""

    def __init__(self, ask: Ask, blocks: BlockAllocator, vocab_size: int) -> None:
        self._ask = ask
        self._blocks = blocks
        draw = random.Random(0)
        self._prompt = tuple(
            draw.randrange(min(FIRST_TOKEN_ID, vocab_size - 1), vocab_size) for _ in range(PROMPT_TOKENS)
        )
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._num_asked = 0
        self._base: Answer | None = None
        with suppress(MemoryError):
            self._base = self._answer(BASE_SLOT)

    def has(self, digest: str) -> bool:
        return digest in self._answers

    def record(self, digest: str, lora_slot: int) -> bool:
        """Remember how an adapter answers, now that nothing speaks against it; False when it has no finite answer.

        Raises MemoryError when the KV cache has no room for the prompt.
        """
        answer = self._answer(lora_slot)
        if answer is None:
            return False
        self._answers[digest] = answer
        if len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)
        return True

    def is_base_well(self) -> bool:
        """Whether it answers as at the start. Raises MemoryError as `record` does."""
        return self._base is None or self._answer(BASE_SLOT) == self._base

    def what_is_wrong(self, digest: str, lora_slot: int) -> str | None:
        """In words; None when the adapter answers as it did, or, if it was never recorded, with finite numbers."""
        answer = self._answer(lora_slot)
        if answer is None:
            return "its logits for the diagnostic prompt are not finite"
        recorded = self._answers.get(digest)
        if recorded is not None and recorded != answer:
            differing = sum(new != old for new, old in zip(answer, recorded, strict=True))
            return f"{differing} of {len(answer)} answers to the diagnostic prompt differ from those recorded"
        return None

    def _answer(self, lora_slot: int) -> Answer | None:
        """Raises MemoryError when the KV cache has no room for the prompt."""
        self._num_asked += 1
        request_id = f"diagnosis-{self._num_asked}"
        request = Request(request_id, self._prompt, SamplingParams(), 1, 0, cache_salt=request_id)
        self._blocks.start(request, self._prompt)
        try:
            if not self._blocks.reserve(request_id, len(self._prompt)):
                raise MemoryError("no KV blocks for the diagnostic prompt")
            return self._ask(request, lora_slot)
        finally:
            self._blocks.free(request_id)
