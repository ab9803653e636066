"""What kernels should compute, in float64, and how far a result is from it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from benchmarks.gpu.place import BF16, FP16, FP32, Place
from loraplex.core import LoraSlice, LoraTarget
from loraplex.kernels.experts import route
from loraplex.kernels.plan import LoraSegment
from loraplex.kernels.quantized_weights import FP8_MAX
from loraplex.kernels.slices import SliceWeights

Tensors = tuple[torch.Tensor, ...]

LIMITS = {FP32: 1e-5, FP16: 2e-3, BF16: 1.5e-2}
"""Largest relative error of a row, by the dtype of the result: rounding once costs up to 6e-8, 5e-4, 4e-3 of a number;
tf32 gives 3e-4."""


def row_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """max over rows of |out - expected| / |expected|; infinite where a number is not finite. Rows come first."""
    out, expected = out.double().flatten(1), expected.double().flatten(1)
    if out.numel() == 0:
        return 0.0
    if not bool(out.isfinite().all()):
        return float("inf")
    distance = (out - expected).norm(dim=1)
    return float((distance / expected.norm(dim=1).clamp_min(1e-30)).where(distance > 0, 0.0).max())


def expected_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    segments: Sequence[LoraSegment],
    adapters: Sequence[Sequence[SliceWeights | None]],
    slices: Sequence[LoraSlice],
) -> torch.Tensor:
    """KernelBackend.add_lora's formula in float64."""
    out, x = y.double(), x.double()
    for segment in segments:
        rows = slice(segment.start, segment.end)
        for s, weights in zip(slices, adapters[segment.lora_slot], strict=True):
            if weights is None:
                continue
            y_rows = out[rows, s.out_offset : s.out_offset + s.out_features]
            gain = torch.ones(s.out_features) if weights.gain is None else weights.gain
            gain = gain.to(y.device).double()
            delta = torch.zeros_like(y_rows)
            if weights.lora_a is not None and weights.lora_b is not None:
                a, b = (t.to(y.device).double() for t in (weights.lora_a, weights.lora_b))
                delta += gain * weights.scaling * ((x[rows] @ a.T) @ b.T)
            if weights.bias is not None:
                delta += weights.bias.to(y.device).double()
            y_rows.mul_(1 + segment.weight * (gain - 1)).add_(segment.weight * delta)
    return out


def expected_input(
    x: torch.Tensor, segments: Sequence[LoraSegment], adapters: Sequence[Sequence[SliceWeights | None]]
) -> torch.Tensor:
    """KernelBackend.scale_input's formula in float64."""
    out = x.double()
    for segment in segments:
        for weights in adapters[segment.lora_slot]:
            if weights is not None and weights.input_gain is not None:
                gain = weights.input_gain.to(x.device).double()
                out[segment.start : segment.end] *= 1 + segment.weight * (gain - 1)
    return out


def expected_experts(
    x: torch.Tensor,
    logits: torch.Tensor,
    top_k: int,
    weights: Sequence[torch.Tensor],
    segments: Sequence[LoraSegment],
    adapters: Sequence[Sequence[Sequence[SliceWeights | None]]],
    targets: Sequence[LoraTarget],
) -> torch.Tensor:
    """LayerOps.experts' formula in float64, factors divided by their sum. weights, targets: of gate and up and of down
    in turn; adapters[lora_slot][target]."""
    chosen, factors = route(logits, top_k, True)
    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(logits.shape[1]):
        part = x.double()
        for index in (2 * expert, 2 * expert + 1):
            product = part @ weights[index].to(x.device).double().T
            of_target = [of_slot[index] for of_slot in adapters]
            part = expected_lora(product, part, segments, of_target, targets[index].slices)
            if index % 2 == 0:
                gate, up = part.chunk(2, dim=1)
                part = gate * torch.sigmoid(gate) * up
        y += part * (factors * (chosen == expert)).sum(1, keepdim=True)
    return y


def without_ties(x: torch.Tensor) -> torch.Tensor:
    """Rows that have one rounding to float8: zeros where x * 448 / max |row| lies halfway between two of its numbers.

    Which of them a kernel takes there depends on the last bit of its quotient, and so of its division: Triton's
    multiplies by a reciprocal. One such number changes a row by up to 1 %. Elsewhere 16-bit rows are too far from
    halfway for that.
    """
    wide = x.double()
    quotients = (wide / (wide.abs().amax(-1, keepdim=True).clamp_min(1e-30) / FP8_MAX)).abs()
    steps = torch.exp2(quotients.clamp_min(2.0**-6).log2().floor() - 3)
    return x.masked_fill(((quotients / steps) % 1 - 0.5).abs() < 1e-5, 0.0)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN included."""
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Tensors that are allocated and not filled hold NaN or the largest integer: what no kernel writes shows."""
    was_on, only_warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # operators that have no deterministic form
            yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=only_warns)


def replayed(call: Callable[[], Tensors], change: Callable[[], None], place: Place) -> Tensors:
    """`call` captured in a graph, then `change` done to what it reads, then the graph replayed: what `call` gives now.

    Where there are no graphs it is called once more instead.
    """
    if not place.may_capture:
        change()
        return call()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    change()
    graph.replay()
    torch.cuda.synchronize()
    return tuple(t.clone() for t in out)
