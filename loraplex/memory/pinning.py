"""Host memory that stays where it is, so that a GPU reads it by itself and nobody's thread waits for a copy."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

logger = logging.getLogger(__name__)


def forget_refusal() -> None:
    """CUDA reports a call that failed once more, at this thread's next launch of a kernel: let that be one that nobody needs."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


def pin(memory: torch.Tensor, cuda: Any = torch.cuda, forget: Callable[[], None] = forget_refusal) -> bool:
    """Page-lock a tensor's memory for good; False, with a warning, when the system does not allow it: copies hold steps up then.

    As one block, of exactly its size (torch's own pinned allocator rounds up to a power of two). The system makes every page of it
    now: about a second for 4 GiB. cuda: the module, forget: what is called after a refusal, for tests.
    """
    try:
        status = int(cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
        reason = f"error {status}"
        if status != 0:
            forget()
    except RuntimeError as error:
        status, reason = -1, str(error)
    if status != 0:
        logger.warning(
            "%d bytes of host memory for adapters could not be page-locked (%s): cold adapters take longer and hold steps up; "
            "lower host_memory_bytes, or raise the limit of locked memory (ulimit -l)",
            memory.numel(),
            reason,
        )
    return status == 0
