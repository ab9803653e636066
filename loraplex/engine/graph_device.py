"""What captures CUDA graphs: a protocol, and torch's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch


class CapturedGraph(Protocol):
    """What was launched in a capture, with the addresses and sizes that it had."""

    def replay(self) -> None:
        """Launch it all again, on the current stream."""
        ...


class GraphDevice(Protocol):
    """Captures functions that read and write tensors of fixed addresses. Scratch tensors of all its graphs share one memory pool."""

    def capture(self, run: Callable[[], None]) -> CapturedGraph:
        """`run` is called twice: to warm up, and to be captured. Raises what it raises; nothing of a failed capture stays."""
        ...

    def release(self) -> None:
        """Give back the memory of graphs that nobody holds any more, and what the device's allocator keeps for later."""
        ...


class CudaGraphDevice:
    """torch.cuda.CUDAGraph on one device.

    Captured on a stream of its own, which the warm-up runs on too: cuBLAS keeps its workspace by stream, and the first call makes it.
    Other threads may use the device meanwhile (capture_error_mode thread_local). Capture the largest graph first: the others find room in
    what its pool has already.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> CapturedGraph:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                self._abandon(graph)
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        return graph

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture in which something went wrong: that may have ended it, and then torch's allocator is not told so."""
        with suppress(RuntimeError):
            graph.capture_end()
        with suppress(RuntimeError):  # it was told
            torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)

    def release(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
