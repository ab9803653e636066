"""A GPU that is not there: what torch and the host do with one, but no numbers.

Tensors on `cuda:0` have shape, dtype and device, and no memory (torch's FakeTensorMode): an operator that mixes
devices, or shapes, fails. Streams, events and graphs are those of fake_streams.py; kernels are not launched, but their
arguments are looked at. What comes to the host is 0: so are sampled tokens, and every sum.

`host.waits` has where the host waited for the device:

    synchronize                       of the device, of a stream, of an event that is not known to be done; empty_cache
    copies between host and device    blocking ones, and all whose host side is not page-locked and contiguous
    tensors of Python's numbers       torch.tensor, as_tensor, new_tensor on the device; lists, host tensors as an index
    looking at values                 item, tolist, bool, int, float, equal, ...
    sizes that depend on values       nonzero, masks as an index, unique, repeat_interleave without output_size, ...

An operator that needs a value and is not among these fails: FakeTensors have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from loraplex.kernels.triton import backend
from loraplex.kernels.triton.launch import H100
from loraplex.memory import manager
from loraplex.memory.care import damage
from loraplex.memory.space import arena
from tests.engine.fake_streams import Host

GPU = torch.device("cuda", 0)
aten = torch.ops.aten


class FakeGpu(TorchFunctionMode):
    """Within it `cuda` is such a device. `loader` does what the loader's threads would, when a test says so."""

    VALUES: Mapping[str, Any] = {
        "item": 0,
        "is_nonzero": False,
        "equal": True,
        "allclose": True,
        "__bool__": True,
        "__int__": 0,
        "__float__": 0.0,
        "__index__": 0,
    }
    """What is there when the host looks."""

    SIZES = ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "histogram")
    """The size of what comes is on the device. They wait, and then there is no tensor to go on with: they raise."""

    def __init__(self) -> None:
        super().__init__()
        self.host = Host()
        self.loader = Loader()
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._calls: dict[str, Callable[..., Any]] = {
            "to": self._to,
            "cpu": self._to,
            "cuda": self._to,
            "copy_": self._copy,
            "tensor": self._from_numbers,
            "as_tensor": self._from_numbers,
            "asarray": self._from_numbers,
            "new_tensor": self._from_numbers,
            "where": self._where,
            "repeat_interleave": self._repeat,
            "pin_memory": self._pinned_copy,
            "is_pinned": lambda _, tensor: self.host.pinned.covers(tensor),
            "__getitem__": lambda func, x, index: self._get(x, index) if _is_there(x) else func(x, index),
            "__setitem__": self._set,
            "__invert__": lambda func, x: aten.bitwise_not(x) if _is_there(x) else func(x),
        }
        """By name. Python's bindings of most of them ask CUDA for the device before any operator is called."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, options = getattr(func, "__name__", ""), dict(kwargs or {})
        is_pinned = options.pop("pin_memory", False)
        if name in self._calls:
            result = self._calls[name](func, *args, **options)
        elif any(map(_is_there, args)) and name in ("data_ptr", *self.VALUES, *self.SIZES):
            result = self._looked(name, func, *args, **options)
        else:
            result = self._other(name, func, *args, **options)
        if is_pinned:
            self.pin(result)
        return result

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """memory.pinning.pin"""
        assert not _is_there(memory), "only the host's memory is page-locked"
        self.host.pinned.add(memory)
        return lambda: self.host.pinned.remove(memory)

    def _other(self, name: str, func: Callable[..., Any], *args: Any, **options: Any) -> Any:
        device = options.get("device")
        if name.endswith("_like") and _is_there(args[0]) and device is not None and not _is_gpu(device):
            args = (torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:])
        with self._mode if _is_gpu(device) else nullcontext():
            return func(*args, **options)

    # ----------------------------------------------------------------------------------------------------------- copies

    def _copied(self, what: str, on_host: Tensor, is_asynchronous: bool) -> None:
        """Between this memory and the device."""
        is_direct = on_host.is_contiguous() and self.host.pinned.covers(on_host)  # or it goes through other memory
        if on_host.numel() and not (is_asynchronous and is_direct):
            self.host.wait_for_current(what)

    def _to(self, func: Callable[..., Any], x: Tensor, *args: Any, **options: Any) -> Any:
        """Also cpu and cuda."""
        device, dtype, is_asynchronous = _destination(func.__name__, x, *args, **options)
        if _is_there(x) == (device.type == "cuda"):
            return func(x, *args, **options)
        if not _is_there(x):
            self._copied(func.__name__, x, is_asynchronous)
            with self._mode:
                return self._mode.from_tensor(x.clone()).to(GPU, dtype)
        arrived = torch.zeros(x.shape, dtype=dtype)
        if is_asynchronous:
            self.pin(arrived)  # torch makes it so
        self._copied(func.__name__, arrived, is_asynchronous)
        return arrived

    def _copy(self, func: Callable[..., Any], x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not _is_there(x) and not _is_there(source):
            return func(x, source, non_blocking)
        if not (_is_there(x) and _is_there(source)):
            self._copied("copy_", source if _is_there(x) else x, non_blocking)
        if _is_there(x):
            return aten.copy_(x, source)
        assert torch.broadcast_shapes(x.shape, source.shape) == x.shape
        return x.zero_()

    def _from_numbers(self, func: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """tensor, as_tensor, asarray; new_tensor, whose first argument says where."""
        name, data = func.__name__, args[-1]
        device = options.get("device", args[0].device if name == "new_tensor" else None)
        if isinstance(data, Tensor) and device is not None and _is_there(data) != _is_gpu(device):
            return self._to(torch.Tensor.to, data, device=device, dtype=options.get("dtype"))
        if _is_gpu(device) and not isinstance(data, Tensor):
            self.host.wait_for_current(name)
            with self._mode:
                return torch.tensor(data, dtype=options.get("dtype"), device=device)
        return func(*args, **options)

    def _pinned_copy(self, _func: Callable[..., Any], x: Tensor) -> Tensor:
        if not self.host.pinned.covers(x):
            x = x.clone()
            self.pin(x)
        return x

    # ------------------------------------------------------------------------------------------------- values and sizes

    def _looked(self, name: str, func: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if name == "data_ptr":
            return 1 << 20
        self.host.wait_for_current(name)
        return self.VALUES[name] if name in self.VALUES else func(*args, **options)

    def tolist(self, x: Tensor) -> Any:
        """Of FakeTensor, which has it in Python."""
        self.host.wait_for_current("tolist")
        return torch.zeros(x.shape, dtype=x.dtype).tolist()

    def _where(self, func: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if len(args) + len(options) == 1 and _is_there(args[0]):  # nonzero
            self.host.wait_for_current("where")
        return func(*args, **options)

    def _repeat(self, func: Callable[..., Any], x: Tensor, *args: Any, **options: Any) -> Any:
        repeats = options.get("repeats", args[0] if args else x)
        if _is_there(repeats) and options.get("output_size") is None:
            self.host.wait_for_current("repeat_interleave")
        return func(x, *args, **options)

    # ---------------------------------------------------------------------------------------------------------- indices

    def _index(self, index: Any) -> Any:
        """One of a tuple; lists and tensors of the host are sent to the device, and masks come from there."""
        if isinstance(index, list):
            index = torch.tensor(index)
        if not isinstance(index, Tensor):
            return index
        if index.dtype == torch.bool or not _is_there(index):
            self.host.wait_for_current("mask" if index.dtype == torch.bool else "index")
        assert index.dtype != torch.bool, "how much a mask selects is on the device"
        return index

    def _get(self, x: Tensor, index: Any) -> Tensor:
        index = index if isinstance(index, tuple) else (index,)
        missing = x.dim() - sum(each is not None and each is not Ellipsis for each in index)
        at = [one for each in index for one in ([slice(None)] * missing if each is Ellipsis else [each])]
        indices: dict[int, Tensor] = {}
        dim = 0
        for each in map(self._index, at):
            if each is None:
                x = x.unsqueeze(dim)
            elif isinstance(each, slice):
                x = aten.slice.Tensor(x, dim, each.start, each.stop, each.step or 1)
            elif isinstance(each, Tensor):
                indices[dim] = each
            else:
                x = aten.select.int(x, dim, each)
                continue
            dim += 1
        return aten.index.Tensor(x, [indices.get(i) for i in range(max(indices) + 1)]) if indices else x

    def _set(self, func: Callable[..., Any], x: Tensor, index: Any, value: Any) -> None:
        is_scalar = not isinstance(value, Tensor) or (value.dim() == 0 and not _is_there(value))
        if not _is_there(x):
            if _is_there(value):
                self.host.wait_for_current("__setitem__")
                value = torch.zeros(value.shape, dtype=value.dtype)
            func(x, index, value)
        elif isinstance(index, Tensor) and index.dtype == torch.bool and is_scalar:
            aten.masked_fill_.Scalar(x, index, 0)  # a mask that waits for nothing
        elif isinstance(index, Tensor | list):
            aten.index_put_(x, [self._index(index)], x.new_zeros(()) if is_scalar else value)
        elif is_scalar:
            aten.fill_.Scalar(self._get(x, index), 0)
        else:
            self._copy(torch.Tensor.copy_, self._get(x, index), value)


def _is_there(value: Any) -> bool:
    """Whether it is a tensor on the device."""
    return isinstance(value, FakeTensor) and value.device == GPU


def _is_gpu(device: Any) -> bool:
    return isinstance(device, torch.device | str) and torch.device(device).type == "cuda"


def _destination(name: str, x: Tensor, *args: Any, **options: Any) -> tuple[torch.device, torch.dtype, bool]:
    """Device, dtype and non_blocking of a call of to, cpu or cuda."""
    device = {"cpu": torch.device("cpu"), "cuda": GPU}.get(name, x.device)
    dtype, flags = x.dtype, []
    for value in (*args, options.get("device"), options.get("dtype"), options.get("other")):
        if isinstance(value, Tensor):
            device, dtype = value.device, value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, torch.device | str):
            device = torch.device(value)
        elif isinstance(value, bool):
            flags.append(value)  # non_blocking, copy
    return device, dtype, options.get("non_blocking", flags[0] if flags else False)


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

    def submit(self, job: Callable[[], None], tenant: str = "") -> None:
        self._jobs.append(job)

    def run(self) -> None:
        while self._jobs:
            self._jobs.pop(0)()

    def close(self) -> None:
        pass


def _set_device(device: torch.device) -> None:
    assert device.index is not None, "as torch.cuda.set_device says"


@contextmanager
def fake_gpu(total_bytes: int = 1 << 34) -> Iterator[FakeGpu]:
    gpu = FakeGpu()
    host = gpu.host
    cuda: dict[str, Any] = {
        "Stream": host.new_stream,
        "Event": host.new_event,
        "CUDAGraph": host.new_graph,
        "current_stream": lambda *_: host.current,
        "stream": host.on_stream,
        "synchronize": lambda *_: host.synchronize(),
        "empty_cache": lambda: host.synchronize("empty_cache"),  # memory goes back when nothing uses it any more
        "mem_get_info": lambda _: (total_bytes, total_bytes),
        "graph_pool_handle": lambda: (0, 0),
        "is_current_stream_capturing": lambda: host.is_capturing,
        "set_device": _set_device,
        "get_device_name": lambda _: "none",
    }
    with (
        patch.multiple(torch.cuda, **cuda),
        patch.object(FakeTensor, "tolist", lambda tensor: gpu.tolist(tensor)),
        patch.object(backend, "TritonLauncher", ArgumentLauncher),
        patch.object(manager, "LoaderThreads", lambda _: gpu.loader),
        patch.object(arena, "pin", gpu.pin),
        patch.object(damage, "FRESH_S", float("inf")),
        gpu,
    ):
        yield gpu
