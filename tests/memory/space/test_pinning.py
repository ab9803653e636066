"""Host memory is page-locked as one block, or used as it is with a warning."""

from __future__ import annotations

import pytest
import torch

from loraplex.memory.space.arena import Arena, pin


class FakeCuda:
    """torch.cuda with a runtime that answers `status`."""

    def __init__(self, status: int, error: Exception | None = None) -> None:
        self.status, self.error = status, error
        self.registered: list[tuple[int, int, int]] = []
        self.unregistered: list[int] = []

    def cudart(self) -> FakeCuda:
        if self.error is not None:
            raise self.error
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.registered.append((address, nbytes, flags))
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.unregistered.append(address)
        return 0


def _never() -> None:
    raise AssertionError("nothing was refused")


def test_all_of_it_is_locked_at_once() -> None:
    memory, cuda = torch.empty(4096, dtype=torch.uint8), FakeCuda(0)
    assert pin(memory, cuda, _never)
    assert cuda.registered == [(memory.data_ptr(), 4096, 0)]


def test_memory_is_locked_as_long_as_it_is_there() -> None:
    """Or the next block at this address could not be locked, and a GPU would read the pages that were there before."""
    memory, cuda = torch.empty(4096, dtype=torch.uint8), FakeCuda(0)
    address = memory.data_ptr()
    assert pin(memory, cuda)
    view = memory[64:128]
    del memory
    assert cuda.unregistered == []
    assert len(view) == 64
    del view
    assert cuda.unregistered == [address]


def test_a_refusal_is_not_left_for_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA keeps an error until it is asked for; torch asks after every launch of a kernel."""
    launched: list[str] = []

    def launch(_size: int, device: str) -> None:
        launched.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "zeros", launch)
    memory = torch.empty(4096, dtype=torch.uint8)
    assert not pin(memory, FakeCuda(2))
    assert launched == ["cuda"]


@pytest.mark.parametrize("cuda", [FakeCuda(2), FakeCuda(0, RuntimeError("no driver"))], ids=["refused", "no driver"])
def test_what_cannot_be_locked_is_told(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    forgotten: list[int] = []
    assert not pin(torch.empty(4096, dtype=torch.uint8), cuda, lambda: forgotten.append(cuda.status))
    assert len(forgotten) == 1  # a refusal does not come back at the next launch
    assert "4096 bytes of host memory for adapters could not be page-locked" in caplog.text


@pytest.mark.parametrize("is_possible", [False, True])
def test_pages_that_are_locked_are_not_given_back(monkeypatch: pytest.MonkeyPatch, is_possible: bool) -> None:
    monkeypatch.setattr("loraplex.memory.space.arena.pin", lambda memory: print if is_possible else None)
    arena = Arena(1 << 16, 1 << 13, "cpu", is_pinned=True)
    assert arena.is_pinned is is_possible
    assert (arena.release_pages() == 0) is is_possible


def test_memory_that_is_unlocked_gives_its_pages_back_and_is_unlocked_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda, waits = FakeCuda(0), []
    monkeypatch.setattr("loraplex.memory.space.arena.pin", lambda memory: pin(memory, cuda, _never))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(len(cuda.unregistered)))
    arena = Arena(1 << 16, 1 << 13, "cpu", is_pinned=True)
    address = arena.memory.data_ptr()
    for _ in range(2):
        arena.unlock()
    assert (arena.is_pinned, cuda.unregistered) == (False, [address])
    assert waits == [0], "copies under way read the locked pages"
    assert arena.release_pages() > 1 << 15, "whole pages"
    assert f"{1 << 16} bytes of host memory for adapters are no longer page-locked" in caplog.text
    del arena
    assert cuda.unregistered == [address]


def test_other_memory_is_not_unlocked(caplog: pytest.LogCaptureFixture) -> None:
    Arena(1 << 16, 1 << 13, "cpu").unlock()
    assert caplog.text == ""
