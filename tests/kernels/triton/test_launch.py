"""A launch goes to Triton once for each way in which it would compile the kernel, and then to what that gave."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from loraplex.kernels.triton import launch
from loraplex.kernels.triton.launch import H100, TritonLauncher, cdiv, next_power_of_2


class Kernel:
    """Of arguments x, n, scale and constants A, B. compiled: with what it was; runs: with what that was called."""

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.runs: list[tuple[Any, ...]] = []
        self.arg_names = ["x", "n", "scale", "A", "B"]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.compiled.append((grid, args, options))
            return SimpleNamespace(run=lambda *given: self.runs.append(given), function=7, packed_metadata="packed")

        return call


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> TritonLauncher:
    """As on a GPU, whose stream has the number 5."""
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 5)
    runtime = SimpleNamespace(driver=SimpleNamespace(active=active))
    monkeypatch.setattr(launch, "triton", SimpleNamespace(runtime=runtime))
    made = TritonLauncher.__new__(TritonLauncher)
    made.is_interpreted, made.target, made._compiled = False, H100, {}
    return made


def test_what_was_compiled_is_called_with_addresses_and_constants_in_their_order(launcher: TritonLauncher) -> None:
    kernel, first, second = Kernel(), torch.empty(64), torch.empty(64)
    launcher.launch(kernel, (3, 2), first, 32, 0.5, num_warps=8, B=2, A=1)
    assert kernel.compiled == [((3, 2), (first, 32, 0.5), {"num_warps": 8, "num_stages": 2, "B": 2, "A": 1})]
    launcher.launch(kernel, (4,), second, 48, 0.25, num_warps=8, B=2, A=1)
    assert len(kernel.compiled) == 1
    assert kernel.runs == [(4, 1, 1, 5, 7, "packed", None, None, None, second.data_ptr(), 48, 0.25, 1, 2)]


@pytest.mark.parametrize(
    ("args", "constants"),
    [
        ((torch.empty(65)[1:], 32, 0.5), {"A": 1, "B": 2}),
        ((torch.empty(64, dtype=torch.float16), 32, 0.5), {"A": 1, "B": 2}),
        ((torch.empty(64), 33, 0.5), {"A": 1, "B": 2}),
        ((torch.empty(64), 1, 0.5), {"A": 1, "B": 2}),
        ((torch.empty(64), 1 << 32, 0.5), {"A": 1, "B": 2}),
        ((torch.empty(64), 32, 0.5), {"A": 2, "B": 1}),
        ((torch.empty(64), 32, 0.5), {"A": 1, "B": 2, "num_stages": 1}),
    ],
    ids=["address", "dtype", "multiple", "one", "64 bits", "constants", "stages"],
)
def test_what_triton_would_compile_again_goes_to_it(
    launcher: TritonLauncher, args: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    kernel = Kernel()
    launcher.launch(kernel, (1,), torch.empty(64), 32, 0.5, A=1, B=2)
    launcher.launch(kernel, (1,), *args, **constants)
    assert (len(kernel.compiled), kernel.runs) == (2, [])


def test_an_empty_grid_launches_nothing(launcher: TritonLauncher) -> None:
    kernel = Kernel()
    launcher.launch(kernel, (3, 0), torch.empty(64), 32, 0.5, A=1, B=2)
    assert not kernel.compiled


def test_whole_numbers_are_rounded_as_triton_rounds_them() -> None:
    for number in range(1, 700):
        assert next_power_of_2(number) == triton.next_power_of_2(number)
        assert cdiv(number, 48) == triton.cdiv(number, 48)
