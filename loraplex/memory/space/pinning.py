"""Host memory that stays where it is, so that a GPU reads it by itself and nobody's thread waits for a copy."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

logger = logging.getLogger(__name__)


def forget_refusal() -> None:
    """The runtime reports a call that failed once more, to who launches the thread's next kernel: that is this one."""
    with suppress(RuntimeError, AssertionError):  # the latter from a torch without CUDA
        torch.zeros(1, device="cuda")


def pin(memory: torch.Tensor, cuda: Any = torch.cuda, forget: Callable[[], None] = forget_refusal) -> bool:
    """Page-lock a tensor's memory as long as the tensor is there; False, with a warning, when the system does not allow it: copies
    hold steps up then.

    As one block, of exactly its size (torch's own pinned allocator rounds up to a power of two). The system makes every page of it
    now: about a second for 4 GiB. cuda: the module, forget: what is called after a refusal, for tests.
    """
    try:
        status = int(cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
        reason = f"error {status}"
    except RuntimeError as error:
        status, reason = -1, str(error)
    if status == 0:
        weakref.finalize(memory, _unpin, cuda, memory.data_ptr()).atexit = False
        return True
    forget()
    logger.warning(
        "%d bytes of host memory for adapters could not be page-locked (%s): cold adapters take longer and hold steps up; "
        "lower host_memory_bytes, or raise the limit of locked memory (ulimit -l)",
        memory.numel(),
        reason,
    )
    return False


def _unpin(cuda: Any, address: int) -> None:
    """Before the memory goes back: other pages may come to lie at its address, and a GPU would go on reading the old ones."""
    with suppress(RuntimeError):
        cuda.cudart().cudaHostUnregister(address)
