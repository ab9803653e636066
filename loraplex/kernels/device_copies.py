"""Copies between host and device that wait for nothing else: an upload is there in the device's order, a download says
when it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array on a device, without waiting for what runs there; on a CPU it is the array's own memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda" and array.size:
        tensor = tensor.pin_memory()  # from other memory the copy would wait
    return tensor.to(device, non_blocking=True)


class Download:
    """Tensors of one device on their way to the host. `result` waits for them, and for nothing launched after them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [_download(tensor) for tensor in tensors]
        self._event: torch.cuda.Event | None = None
        if tensors and tensors[0].device.type == "cuda":
            self._event = torch.cuda.current_stream(tensors[0].device).record_event()

    def result(self) -> list[Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return [tensor.cpu() for tensor in self._tensors]


def _download(tensor: Tensor) -> Tensor:
    """On devices that have no pinned memory the copy is made when it is asked for."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
