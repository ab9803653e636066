"""The GPU that is not there sees each kind of wait, says where it was, and takes nothing else for one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from loraplex.kernels.device_copies import Download, upload
from loraplex.memory.space.arena import Arena
from tests.engine.fake_gpu import GPU, FakeGpu, fake_gpu


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with fake_gpu() as gpu:
        yield gpu


@pytest.fixture
def there(gpu: FakeGpu) -> Tensor:
    return torch.ones((3, 4), device="cuda")


def pinned(*shape: int) -> Tensor:
    return torch.zeros(shape, pin_memory=True)


def whats(gpu: FakeGpu) -> list[str]:
    return [wait.what for wait in gpu.host.waits]


def ids(value: object) -> str | None:
    return value if isinstance(value, str) else None


HOST_MASK = torch.tensor([True, False, True])

WAITS: list[tuple[str, str, Callable[[Tensor], object]]] = [
    ("the device", "synchronize", lambda _: torch.cuda.synchronize()),
    ("a stream", "Stream.synchronize", lambda _: torch.cuda.current_stream().synchronize()),
    ("another stream", "Stream.synchronize", lambda _: torch.cuda.Stream().synchronize()),
    ("an event", "Event.synchronize", lambda _: torch.cuda.current_stream().record_event().synchronize()),
    ("memory goes back", "empty_cache", lambda _: torch.cuda.empty_cache()),
    ("cpu", "cpu", lambda x: x.cpu()),
    ("to a name", "to", lambda x: x.to("cpu")),
    ("to a device", "to", lambda x: x.to(torch.device("cpu"))),
    ("to by keyword", "to", lambda x: x.to(device="cpu")),
    ("to with a dtype", "to", lambda x: x.to("cpu", torch.float64)),
    ("to another's place", "to", lambda x: x.to(torch.zeros(1))),
    ("to, blocking by position", "to", lambda x: x.to("cpu", torch.float64, False)),
    ("download to pinned memory, blocking", "copy_", lambda x: pinned(3, 4).copy_(x)),
    ("download to other memory", "copy_", lambda x: torch.zeros(3, 4).copy_(x)),
    ("download to other memory, non_blocking", "copy_", lambda x: torch.zeros(3, 4).copy_(x, non_blocking=True)),
    ("download to scattered memory", "copy_", lambda x: pinned(4, 3).T.copy_(x, non_blocking=True)),
    ("download by an index", "__setitem__", lambda x: operator.setitem(torch.zeros(2, 3, 4), 0, x)),
    ("upload of pinned memory, blocking", "to", lambda _: pinned(4).to("cuda")),
    ("upload of other memory", "to", lambda _: torch.zeros(4).to("cuda")),
    ("upload of other memory, non_blocking", "to", lambda _: torch.zeros(4).to("cuda", non_blocking=True)),
    ("upload of a copy of pinned memory", "to", lambda _: pinned(4).clone().to("cuda", non_blocking=True)),
    ("upload by cuda", "cuda", lambda _: torch.zeros(4).cuda()),
    ("upload by copy_", "copy_", lambda x: x.copy_(torch.zeros(3, 4))),
    ("upload by copy_, non_blocking", "copy_", lambda x: x.copy_(torch.zeros(3, 4), non_blocking=True)),
    ("upload by copy_ of pinned memory, blocking", "copy_", lambda x: x.copy_(pinned(3, 4))),
    ("upload of scattered memory", "copy_", lambda x: x.copy_(pinned(4, 3).T, non_blocking=True)),
    ("upload by an index", "copy_", lambda x: operator.setitem(x, 0, torch.zeros(4))),
    ("a tensor of a list", "tensor", lambda _: torch.tensor([1, 2], device="cuda")),
    ("a tensor of a number", "tensor", lambda _: torch.tensor(1, device=GPU)),
    ("as_tensor of a list", "as_tensor", lambda _: torch.as_tensor([1, 2], device="cuda")),
    ("as_tensor of a host tensor", "to", lambda _: torch.as_tensor(torch.zeros(2), device="cuda")),
    ("new_tensor", "new_tensor", lambda x: x.new_tensor([1, 2])),
    ("item", "item", lambda x: x.sum().item()),
    ("tolist", "tolist", lambda x: x.tolist()),
    ("bool", "__bool__", lambda x: bool((x > 0).all())),
    ("int", "__int__", lambda x: int(x.sum())),
    ("float", "__float__", lambda x: float(x.sum())),
    ("an index of a list", "__index__", lambda x: [1, 2][x.sum().long()]),
    ("equal", "equal", lambda x: torch.equal(x, x)),
    ("an index on the host", "index", lambda x: x[torch.tensor([0, 2])]),
    ("a list as an index", "index", lambda x: x[[0, 2]]),
    ("written at a list", "index", lambda x: operator.setitem(x, [0, 2], 1.0)),
]

NO_SIZE: list[tuple[str, Callable[[Tensor], object]]] = [
    ("nonzero", lambda x: x.nonzero()),
    ("where", lambda x: torch.where(x > 0)),
    ("argwhere", lambda x: x.argwhere()),
    ("masked_select", lambda x: x.masked_select(x > 0)),
    ("mask", lambda x: x[x > 0]),
    ("mask", lambda x: x[HOST_MASK]),
    ("mask", lambda x: operator.setitem(x, x > 0, x[0])),
    ("unique", lambda x: x.unique()),
    ("bincount", lambda x: x[0].long().bincount()),
    ("repeat_interleave", lambda x: x.repeat_interleave(x[:, 0].long(), dim=0)),
]


@pytest.mark.parametrize(("name", "what", "call"), WAITS, ids=ids)
def test_what_waits(gpu: FakeGpu, there: Tensor, name: str, what: str, call: Callable[[Tensor], object]) -> None:
    call(there)
    assert whats(gpu) == [what]


@pytest.mark.parametrize(("what", "call"), NO_SIZE, ids=ids)
def test_sizes_that_depend_on_values(gpu: FakeGpu, there: Tensor, what: str, call: Callable[[Tensor], object]) -> None:
    with pytest.raises((RuntimeError, AssertionError)):
        call(there)
    assert whats(gpu) == [what]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: upload(np.arange(4), GPU),
        lambda x: pinned(4).to("cuda", non_blocking=True),
        lambda x: pinned(4).to("cuda", torch.float64, True),
        lambda x: torch.zeros(4).pin_memory()[1:].to(GPU, non_blocking=True),
        lambda x: torch.from_numpy(pinned(4).numpy()[1:]).to(GPU, non_blocking=True),
        lambda x: torch.zeros(0).to(GPU),
        lambda x: x.copy_(pinned(2, 3, 4)[1], non_blocking=True),
        lambda x: pinned(2, 3, 4)[1].copy_(x, non_blocking=True),
        lambda x: torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True),
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: x.copy_(x.clone()),
        lambda x: x.to(torch.float64),
        lambda x: torch.zeros(3).to(torch.float64),
        lambda x: torch.zeros(3).copy_(torch.ones(3)),
        lambda x: torch.tensor([1, 2]).tolist(),
        lambda x: torch.full((2,), 7, device="cuda"),
        lambda x: torch.arange(3, device="cuda"),
        lambda x: torch.zeros_like(torch.zeros(3), device="cuda"),
        lambda x: operator.setitem(x, 0, 1.0),
        lambda x: operator.setitem(x, (slice(1, 3), 0), x[0, :2]),
        lambda x: operator.setitem(x, x > 0, 1.0),
        lambda x: operator.setitem(x, torch.arange(2, device="cuda"), 1.0),
        lambda x: x[torch.arange(2, device="cuda"), 1:],
        lambda x: x[..., None, 0],
        lambda x: torch.where(x > 0, x, -x),
        lambda x: x.repeat_interleave(x[:, 0].long(), dim=0, output_size=5),
        lambda x: x.repeat_interleave(2),
        lambda x: torch.cuda.Event().synchronize(),
        lambda x: torch.cuda.current_stream().record_event().query(),
        lambda x: torch.cuda.current_stream().wait_stream(torch.cuda.Stream()),
        lambda x: torch.cuda.current_stream().wait_event(torch.cuda.Stream().record_event()),
        lambda x: Download([x, x + 1]),
    ],
)
def test_what_does_not_wait(gpu: FakeGpu, there: Tensor, call: Callable[[Tensor], object]) -> None:
    call(there)
    assert gpu.host.waits == []


class TestCopies:
    def test_what_comes_is_zeros_of_the_right_kind(self, gpu: FakeGpu, there: Tensor) -> None:
        for host in (there.cpu(), there.to("cpu", non_blocking=True), torch.ones(3, 4).copy_(there)):
            assert host.tolist() == [[0.0] * 4] * 3
        assert there.to("cpu", torch.int64).dtype == torch.int64
        assert there.long().cpu().dtype == torch.int64
        assert torch.zeros(4).to("cuda", torch.float64).dtype == torch.float64
        assert torch.as_tensor([1, 2], device="cuda").device == GPU
        with pytest.raises(RuntimeError):
            torch.ones(3).copy_(there)

    def test_a_copy_between_host_tensors_copies(self, gpu: FakeGpu) -> None:
        source = torch.arange(3.0)
        assert torch.zeros(3).copy_(source).tolist() == [0, 1, 2]
        assert source.pin_memory().tolist() == [0, 1, 2]
        assert torch.as_tensor(source).data_ptr() == source.data_ptr()

    def test_pinned_memory(self, gpu: FakeGpu) -> None:
        x = torch.zeros(8, pin_memory=True)
        assert x.is_pinned()
        assert x.pin_memory() is x
        assert not torch.zeros(8).is_pinned()
        arena = Arena(1 << 20, 1 << 20, "cpu", is_pinned=True)
        assert arena.is_pinned
        assert arena.memory[64:128].is_pinned()

    def test_a_download_is_waited_for_once(self, gpu: FakeGpu, there: Tensor) -> None:
        download = Download([there, there.long()])
        assert gpu.host.waits == []
        for _ in range(2):
            assert [tensor.dtype for tensor in download.result()] == [torch.float32, torch.int64]
        assert repr(gpu.host.waits) == "[Event.synchronize in Download.result]"


class TestStreams:
    def test_an_event_is_not_waited_for_when_it_is_known_to_be_done(self, gpu: FakeGpu, there: Tensor) -> None:
        first, second = torch.cuda.Event(), torch.cuda.Event()
        first.record()
        second.record()
        second.synchronize()
        first.synchronize()
        assert whats(gpu) == ["Event.synchronize"]
        first.record()
        there.cpu()
        first.synchronize()
        first.record()
        torch.cuda.synchronize()
        first.synchronize()
        assert whats(gpu) == ["Event.synchronize", "cpu", "synchronize"]

    def test_a_stream_says_nothing_of_another(self, gpu: FakeGpu, there: Tensor) -> None:
        copies = torch.cuda.Stream()
        with torch.cuda.stream(copies):
            assert torch.cuda.current_stream() is copies
            event = torch.cuda.Event()
            event.record()
        there.tolist()
        event.synchronize()
        assert whats(gpu) == ["tolist", "Event.synchronize"]

    def test_nothing_waits_in_a_capture(self, gpu: FakeGpu, there: Tensor) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        assert torch.cuda.is_current_stream_capturing()
        there.add_(1)
        with pytest.raises(RuntimeError, match="capturing: tolist"):
            there.tolist()
        graph.capture_end()
        there.tolist()


class TestPlaces:
    def test_a_wait_says_who_waited(self, gpu: FakeGpu, there: Tensor) -> None:
        Download([there]).result()
        there.tolist()
        assert [wait.place for wait in gpu.host.waits] == ["Download.result", "a test"]
        assert gpu.host.waits_in("Download.result") == gpu.host.waits[:1]
        assert gpu.host.waits_elsewhere("Download.result") == gpu.host.waits[1:]

    def test_devices_are_not_mixed(self, gpu: FakeGpu, there: Tensor) -> None:
        with pytest.raises(RuntimeError, match="device"):
            torch.add(there, torch.zeros(3, 4))

    def test_its_memory_is_none(self, gpu: FakeGpu) -> None:
        assert Arena(1 << 40, 1 << 20, "cuda").memory.device == GPU
