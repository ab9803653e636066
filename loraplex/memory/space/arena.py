"""One flat piece of memory in chunks, lent to the KV cache and to adapters by demand.

The KV cache takes chunks from the front, adapters from the back. The floor of an owner is kept free for it as long as
it has less; its ceiling is the most that it may have. A chunk that turned out bad is fenced: it is not lent again. What
free memory holds is undefined: `poison()` of its owner fills it with 0xFF (NaN in every float dtype), so that a test
sees reads and writes of memory that is not lent.
"""

from __future__ import annotations

import ctypes
import enum
import logging
import math
import mmap
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from loraplex.kernels.slices import ALIGNMENT

POISON = 0xFF
"""The byte of poisoned memory: all ones is NaN in float32, float16 and bfloat16."""


class Owner(enum.StrEnum):
    """The borrower of a chunk; `fenced`: none, and none to come."""

    KV = "kv"
    ADAPTERS = "adapters"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True)
class Limits:
    """Chunks that are kept for an owner, and the most that it may have (None: all that others' floors leave)."""

    floor: int = 0
    ceiling: int | None = None


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [offset, offset + nbytes) of an arena; both are multiples of ALIGNMENT."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class Arena:
    """A flat uint8 tensor `memory` of `num_chunks` chunks of `chunk_bytes`; `num_bytes` is rounded up to whole chunks.

    Thread-safe. `is_pinned`: page-locked host memory, for copies to a GPU, where the system allows it. Other memory is
    not touched before it is written. allocate: makes memory that other processes map, too.
    An owner without limits has no floor and no ceiling.
    """

    def __init__(
        self,
        num_bytes: int,
        chunk_bytes: int,
        device: torch.device | str,
        *,
        is_pinned: bool = False,
        limits: Mapping[Owner, Limits] | None = None,
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        if num_bytes < 1 or chunk_bytes < 1 or chunk_bytes % ALIGNMENT:
            raise ValueError(
                f"an arena needs bytes and chunks of a multiple of {ALIGNMENT} bytes, got {num_bytes} and {chunk_bytes}"
            )
        self.chunk_bytes = chunk_bytes
        self.num_chunks = math.ceil(num_bytes / chunk_bytes)
        self.device = torch.device(device)
        num_bytes = self.num_chunks * chunk_bytes
        self._is_shared = allocate is not None
        self.memory = (
            torch.empty(num_bytes, dtype=torch.uint8, device=self.device) if allocate is None else allocate(num_bytes)
        )
        assert self.memory.data_ptr() % ALIGNMENT == 0, "the allocator of this device aligns to less than 64 bytes"
        self._unpin = pin(self.memory) if is_pinned else None
        if self.device.type == "cpu" and not is_pinned:
            advise_huge_pages(self.memory.data_ptr(), self.memory.numel())
        self._limits = dict(limits or {})
        assert sum(limit.floor for limit in self._limits.values()) <= self.num_chunks, "the floors exceed the arena"
        self._owners: list[Owner | None] = [None] * self.num_chunks
        self._num_of: dict[Owner | None, int] = {None: self.num_chunks, **dict.fromkeys(Owner, 0)}
        self._fence_pending: set[int] = set()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self.num_chunks * self.chunk_bytes

    @property
    def num_free_chunks(self) -> int:
        return self._num_of[None]

    def num_lent(self, owner: Owner) -> int:
        """Chunks of `owner`; a chunk that is to be fenced is its owner's until that gives it back."""
        return self._num_of[owner]

    def limits(self, owner: Owner) -> Limits:
        return self._limits.get(owner, Limits())

    def ceiling(self, owner: Owner) -> int:
        """The most chunks that `owner` could ever have."""
        others = sum(limit.floor for each, limit in self._limits.items() if each is not owner)
        ceiling, most = self.limits(owner).ceiling, self.num_chunks - others
        return most if ceiling is None else min(ceiling, most)

    @property
    def is_kv_scattered(self) -> bool:
        """Whether KV chunks lie behind free ones, so that less of those is adjacent than could be."""
        with self._lock:
            first_free = next((chunk for chunk, owner in enumerate(self._owners) if owner is None), self.num_chunks)
            return Owner.KV in self._owners[first_free:]

    def chunks_of(self, owner: Owner) -> list[int]:
        """The chunks lent to `owner`, ascending."""
        with self._lock:
            return [chunk for chunk, has in enumerate(self._owners) if has is owner]

    def owners(self) -> list[Owner | None]:
        """Who has which chunk, in order; None is free."""
        with self._lock:
            return self._owners.copy()

    def lend(self, owner: Owner, num_chunks: int = 1) -> range | None:
        """`num_chunks` adjacent free chunks, lent to `owner`; None when there are none within the limits.

        KV gets the first ones, adapters the last.
        """
        with self._lock:
            is_allowed = num_chunks <= self._num_lendable(owner)
            chunks = self._find(num_chunks, from_end=owner is Owner.ADAPTERS) if is_allowed else None
            for chunk in chunks or ():
                self._set(chunk, owner)
            return chunks

    def lend_at(self, owner: Owner, chunks: range) -> bool:
        """Lend these, if all of them are free and within the limits."""
        with self._lock:
            is_free = chunks.start >= 0 and all(each is None for each in self._owners[chunks.start : chunks.stop])
            if not is_free or chunks.stop > self.num_chunks or len(chunks) > self._num_lendable(owner):
                return False
            for chunk in chunks:
                self._set(chunk, owner)
            return True

    def lend_lower(self, owner: Owner, chunk: int) -> int | None:
        """The first free chunk before `chunk`, which `owner` moves there and gives back next: no limit counts."""
        with self._lock:
            lower = next((each for each in range(chunk) if self._owners[each] is None), None)
            if lower is not None:
                self._set(lower, owner)
            return lower

    def give_back(self, owner: Owner, chunks: Iterable[int]) -> None:
        """The chunks are free again; those with a fence are fenced."""
        with self._lock:
            for chunk in chunks:
                assert self._owners[chunk] is owner, f"chunk {chunk} belongs to {self._owners[chunk]}, not to {owner}"
                self._set(chunk, Owner.FENCED if chunk in self._fence_pending else None)
                self._fence_pending.discard(chunk)

    def fence(self, chunk: int) -> Owner | None:
        """Never lend `chunk` again. Returns the owner that must give it back (`fence` of its pool does); None: done."""
        with self._lock:
            owner = self._owners[chunk]
            if owner is None or owner is Owner.FENCED:
                self._set(chunk, Owner.FENCED)
                return None
            self._fence_pending.add(chunk)
            return owner

    def bytes_of(self, chunks: range) -> torch.Tensor:
        """The memory of adjacent chunks, uint8."""
        return self.memory[chunks.start * self.chunk_bytes : chunks.stop * self.chunk_bytes]

    def view(self, extent: Extent) -> torch.Tensor:
        """The memory of an extent, uint8."""
        return self.memory[extent.offset : extent.end]

    @property
    def is_pinned(self) -> bool:
        return self._unpin is not None

    def unlock(self) -> None:
        """Page-locked memory becomes usual memory, whose free pages can go back to the system; for good, since to lock
        it again would take all of it back. Nothing for other memory. No copy may begin meanwhile."""
        if self._unpin is not None:
            torch.cuda.synchronize()  # copies under way read the locked pages
            self._unpin()
            self._unpin = None
            logger.warning(
                "%d bytes of host memory for adapters are no longer page-locked, since the machine is short of memory: "
                "cold adapters take longer and hold steps up until the engine starts again; lower host_memory_bytes",
                self.num_bytes,
            )

    def release_pages(self) -> int:
        """Give the pages of free chunks back to the operating system until they are written again; returns the bytes.

        Those of fenced chunks too. 0 where that cannot be: another device, pinned memory, not Linux.
        """
        if self.device.type != "cpu" or self.is_pinned:
            return 0
        with self._lock:  # or a chunk would be lent, and written, in between
            free = [chunk for chunk, owner in enumerate(self._owners) if owner in (None, Owner.FENCED)]
            start = self.memory.data_ptr()
            return sum(
                release_pages(start + run.start * self.chunk_bytes, len(run) * self.chunk_bytes, self._is_shared)
                for run in _runs(free)
            )

    def check_integrity(self) -> None:
        """Assert that the counts are true, no owner exceeds its ceiling, and only lent chunks wait for a fence."""
        with self._lock:
            for owner, count in self._num_of.items():
                assert count == self._owners.count(owner), (
                    f"{owner} has {self._owners.count(owner)} chunks, not {count}"
                )
            for owner in self._limits:
                assert self._num_of[owner] <= self.ceiling(owner), f"{owner} has more chunks than its ceiling"
            for chunk in self._fence_pending:
                assert self._owners[chunk] in (Owner.KV, Owner.ADAPTERS), f"chunk {chunk} is not lent"

    def _num_lendable(self, owner: Owner) -> int:
        """Free chunks that `owner` may have now: within its ceiling, and beside what is kept for others."""
        kept = sum(max(0, each.floor - self._num_of[other]) for other, each in self._limits.items() if other != owner)
        return max(0, min(self._num_of[None] - kept, self.ceiling(owner) - self._num_of[owner]))

    def _find(self, num_chunks: int, from_end: bool) -> range | None:
        if num_chunks == 1:
            return self._find_one(from_end)
        order = range(self.num_chunks - 1, -1, -1) if from_end else range(self.num_chunks)
        length = 0
        for chunk in order:
            length = length + 1 if self._owners[chunk] is None else 0
            if length == num_chunks:
                start = chunk if from_end else chunk - num_chunks + 1
                return range(start, start + num_chunks)
        return None

    def _find_one(self, from_end: bool) -> range | None:
        """The usual case, without a loop of its own: a large arena has thousands of chunks."""
        if not self._num_of[None]:
            return None
        chunk = self.num_chunks - 1 - self._owners[::-1].index(None) if from_end else self._owners.index(None)
        return range(chunk, chunk + 1)

    def _set(self, chunk: int, owner: Owner | None) -> None:
        self._num_of[self._owners[chunk]] -= 1
        self._num_of[owner] += 1
        self._owners[chunk] = owner


class KVShare:
    """What the KV cache sees of the arena (kvcache.block_pool.ChunkLender)."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    @property
    def floor(self) -> int:
        return self._arena.limits(Owner.KV).floor

    @property
    def ceiling(self) -> int:
        return self._arena.ceiling(Owner.KV)

    def lend(self) -> int | None:
        chunks = self._arena.lend(Owner.KV)
        return None if chunks is None else chunks.start

    def lend_lower(self, chunk: int) -> int | None:
        return self._arena.lend_lower(Owner.KV, chunk)

    def give_back(self, chunk: int) -> None:
        self._arena.give_back(Owner.KV, [chunk])

    def fence(self, chunk: int) -> bool:
        return self._arena.fence(chunk) is Owner.KV


def _runs(chunks: Iterable[int]) -> list[range]:
    """Ascending numbers as ranges of adjacent ones."""
    runs: list[range] = []
    for chunk in chunks:
        if runs and runs[-1].stop == chunk:
            runs[-1] = range(runs[-1].start, chunk + 1)
        else:
            runs.append(range(chunk, chunk + 1))
    return runs


# --------------------------------------------------------------------------------------------------------------- pages


def release_pages(address: int, nbytes: int, is_shared: bool = False) -> int:
    """Drop the whole pages inside [address, address + nbytes): they hold zeros, and cost nothing until the next write.

    Returns the bytes dropped; 0 where the system is not Linux or refuses. The memory must be writable, and
    private unless `is_shared`: other processes that map it lose them, too.
    """
    if not sys.platform.startswith("linux"):
        return 0
    start, length = _whole_pages(address, nbytes)
    advice = mmap.MADV_REMOVE if is_shared else mmap.MADV_DONTNEED
    return length if length > 0 and _madvise(start, length, advice) else 0


def advise_huge_pages(address: int, nbytes: int) -> bool:
    """Ask for pages of 2 MiB inside [address, address + nbytes), where the system has them: kernels read adapters and
    keys as streams, which stop at each page that its tables are walked for. False where it does not know them."""
    if not sys.platform.startswith("linux"):
        return False
    start, length = _whole_pages(address, nbytes)
    return length > 0 and _madvise(start, length, mmap.MADV_HUGEPAGE)


def _whole_pages(address: int, nbytes: int) -> tuple[int, int]:
    """(where the first whole page begins, bytes of all of them)"""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    return start, max(0, (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start)


def _madvise(start: int, length: int, advice: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    return not libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(advice))


# ------------------------------------------------------------------------------------------------------------- pinning


logger = logging.getLogger(__name__)


def forget_refusal() -> None:
    """The runtime reports a call that failed once more, to who launches the thread's next kernel: that is this one."""
    with suppress(RuntimeError, AssertionError):  # the latter from a torch without CUDA
        torch.zeros(1, device="cuda")


def pin(
    memory: torch.Tensor, cuda: Any = torch.cuda, forget: Callable[[], None] = forget_refusal
) -> Callable[[], object] | None:
    """Page-lock a tensor's memory as long as the tensor is there, or until what this returns is called; None, with a
    warning, when the system does not allow it: copies hold steps up then.

    As one block, of exactly its size (torch's own pinned allocator rounds up to a power of two). The system makes every
    page of it now: about a second for 4 GiB. cuda: the module, forget: what is called after a refusal, for tests.
    """
    try:
        status = int(cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
        reason = f"error {status}"
    except RuntimeError as error:
        status, reason = -1, str(error)
    if status == 0:
        unpin = weakref.finalize(memory, _unpin, cuda, memory.data_ptr())
        unpin.atexit = False
        return unpin
    forget()
    logger.warning(
        "%d bytes of host memory for adapters could not be page-locked (%s): cold adapters take longer and hold steps "
        "up; lower host_memory_bytes, or raise the limit of locked memory (ulimit -l)",
        memory.numel(),
        reason,
    )
    return None


def _unpin(cuda: Any, address: int) -> None:
    """Before the memory goes back: other pages may come to its address, and a GPU would read the old ones."""
    with suppress(RuntimeError):
        cuda.cudart().cudaHostUnregister(address)
