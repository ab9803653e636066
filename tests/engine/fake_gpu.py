"""A GPU that is not there: what torch and the host do with one, but no numbers.

Tensors on `cuda:0` have shape, dtype and device, and no memory (torch's FakeTensorMode): an operator that mixes devices, or shapes, fails.
Streams, events and graphs are there and do nothing; kernels are not launched, but their arguments are looked at. `waits` has where
the host looked at a value on the device, which is to wait for it. Sampled tokens are all 0, and so is every sum.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from loraplex.engine import sampler
from loraplex.kernels.triton import backend
from loraplex.kernels.triton.launch import H100
from loraplex.memory import arena, damage, manager

GPU = torch.device("cuda", 0)
aten = torch.ops.aten


class FakeGpu(TorchFunctionMode):
    """Within it `cuda` is such a device. `loader` does what the loader's threads would, when a test says so."""

    WAITING = ("item", "cpu", "numpy", "nonzero", "masked_select", "__bool__", "__int__", "__float__")

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.loader = Loader()
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        options = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
        if name == "pin_memory":
            return first
        if name == "to" and not isinstance(first, FakeTensor) and any(map(_is_gpu, (*args[1:], *options.values()))):
            with self._mode:
                return self._mode.from_tensor(first.clone()).to(*args[1:], **options)
        if isinstance(first, FakeTensor) and first.device == GPU:
            if name == "data_ptr":
                return 1 << 20
            if name in self.WAITING:
                return self._waited(name, first)
            if name in _BINDINGS:
                return _BINDINGS[name](*args)
        with self._mode if _is_gpu(options.get("device")) else nullcontext():
            return func(*args, **options)

    def _waited(self, name: str, tensor: Tensor) -> Any:
        self.waits.append(f"{name}\n" + "".join(traceback.format_stack(limit=8)))
        return True if name == "__bool__" else torch.zeros(tensor.shape, dtype=tensor.dtype)

    def tolist(self, tensor: Tensor) -> Any:
        """Of FakeTensor, which has it in Python."""
        return self._waited("tolist", tensor).tolist()


def _is_gpu(value: Any) -> bool:
    return isinstance(value, torch.device | str) and torch.device(value).type == "cuda"


def _get(x: Tensor, index: Any) -> Tensor:
    index = index if isinstance(index, tuple) else (index,)
    missing = x.dim() - sum(each is not None and each is not Ellipsis for each in index)
    at = [one for each in index for one in ([slice(None)] * missing if each is Ellipsis else [each])]
    indices: dict[int, Tensor] = {}
    dim = 0
    for each in at:
        if each is None:
            x = x.unsqueeze(dim)
        elif isinstance(each, slice):
            x = aten.slice.Tensor(x, dim, each.start, each.stop, each.step or 1)
        elif isinstance(each, Tensor):
            assert each.dtype != torch.bool, "a mask as an index waits for the device"
            indices[dim] = each
        else:
            x = aten.select.int(x, dim, each)
            continue
        dim += 1
    return aten.index.Tensor(x, [indices.get(i) for i in range(max(indices) + 1)]) if indices else x


def _set(x: Tensor, index: Any, value: Any) -> None:
    if isinstance(index, Tensor):
        aten.index_put_(x, [index], value)
    elif isinstance(value, Tensor):
        aten.copy_(_get(x, index), value)
    else:
        aten.fill_.Scalar(_get(x, index), value)


_BINDINGS: dict[str, Callable[..., Any]] = {
    "__getitem__": _get,
    "__setitem__": _set,
    "__invert__": aten.bitwise_not,
    "copy_": lambda x, source, *_: aten.copy_(x, source),
}
"""Python's bindings of these ask CUDA for the device before any operator is called."""


class Stream:
    """Stream and event."""

    device_index = 0

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        pass

    def nothing(self, *_arguments: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = record = nothing

    def record_event(self, event: Stream | None = None) -> Stream:
        return event or Stream()

    def elapsed_time(self, _end: Stream) -> float:
        """Milliseconds."""
        return 1.0


class Graph:
    def nothing(self, **_options: Any) -> None:
        pass

    capture_begin = capture_end = replay = nothing


class ArgumentLauncher:
    """Looks at what a kernel gets: tensors of the device, and an argument for each of its names."""

    is_interpreted = False

    def __init__(self, device: torch.device) -> None:
        assert device == GPU
        self.target = H100

    def launch(
        self, kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, num_stages: int = 2, **constants: Any
    ) -> None:
        places = {a.device for a in args if isinstance(a, Tensor)}
        assert places == {GPU}, f"{kernel.__name__} gets tensors of {places}"
        names = [name for name in kernel.arg_names if name not in constants]
        assert len(names) == len(args), f"{kernel.__name__} takes {names}, got {len(args)} arguments"
        assert constants.keys() <= set(kernel.arg_names)


class Loader:
    """memory.loading.Loader: jobs wait until `run`."""

    def __init__(self, _num_threads: int = 0) -> None:
        self._jobs: list[Callable[[], None]] = []

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)

    def run(self) -> None:
        while self._jobs:
            self._jobs.pop(0)()

    def close(self) -> None:
        pass


class ZeroDownload:
    """engine.device_copies.Download: what comes is zeros."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        assert all(tensor.device == GPU for tensor in tensors)
        self._arrays = [np.zeros(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors]

    def result(self) -> list[Tensor]:
        return [torch.from_numpy(array) for array in self._arrays]


def _set_device(device: torch.device) -> None:
    assert device.index is not None, "as torch.cuda.set_device says"


@contextmanager
def fake_gpu(total_bytes: int = 1 << 34) -> Iterator[FakeGpu]:
    gpu, current = FakeGpu(), Stream()
    cuda: dict[str, Any] = {
        "Stream": Stream,
        "Event": Stream,
        "CUDAGraph": Graph,
        "current_stream": lambda *_: current,
        "stream": lambda _: nullcontext(),
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda _: (total_bytes, total_bytes),
        "graph_pool_handle": lambda: (0, 0),
        "is_current_stream_capturing": lambda: False,
        "set_device": _set_device,
        "get_device_name": lambda _: "none",
    }
    with (
        patch.multiple(torch.cuda, **cuda),
        patch.object(FakeTensor, "tolist", lambda tensor: gpu.tolist(tensor)),
        patch.object(backend, "TritonLauncher", ArgumentLauncher),
        patch.object(sampler, "Download", ZeroDownload),
        patch.object(manager, "LoaderThreads", lambda _: gpu.loader),
        patch.object(arena, "pin", lambda _: True),
        patch.object(damage, "FRESH_S", float("inf")),
        gpu,
    ):
        yield gpu
