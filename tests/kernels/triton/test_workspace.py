"""Memory between launches: when it grows, what it keeps, and what is zero again after a launch that was aborted."""

from __future__ import annotations

import pytest
import torch

from loraplex.kernels.triton.workspace import Workspace

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FP32, INT32 = torch.float32, torch.int32


def test_it_keeps_what_a_capture_uses_until_it_is_released() -> None:
    workspace = Workspace("LoRA")
    first = workspace.take("partial", 100, FP32, CPU)
    assert first.numel() == 128
    assert not first.any()
    assert workspace.take("partial", 128, FP32, CPU) is first
    assert workspace.take("partial", 1, INT32, CPU) is not first
    second = workspace.take("partial", 129, FP32, CPU)
    assert second.numel() == 256
    assert workspace.nbytes == 4 * (128 + 256 + 1)
    assert workspace.release() == 4 * (128 + 256 + 1)
    assert workspace.nbytes == 0


def test_it_does_not_grow_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made there belongs to the graph's pool, whose memory the next graph uses again."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    workspace = Workspace("attention")
    held = workspace.buffers["sums", FP32] = torch.zeros(8)
    assert workspace.take("sums", 8, FP32, CUDA) is held
    for name in ("sums", "softmax"):
        with pytest.raises(AssertionError, match=f"attention workspace {name} is too small in a capture"):
            workspace.take(name, 9, FP32, CUDA)
    assert workspace.nbytes == held.nbytes


def test_a_reset_zeroes_counters_those_of_captures_too_and_nothing_else() -> None:
    workspace = Workspace("LoRA")
    with torch.inference_mode():  # as in a step; the engine recovers outside of it
        outgrown = workspace.take("counters", 2, INT32, CPU).fill_(5)
        counters = workspace.take("counters", 3, INT32, CPU).fill_(5)
        partial = workspace.take("partial", 2, FP32, CPU).fill_(5)
    workspace.reset()
    assert not outgrown.any()
    assert not counters.any()
    assert partial.tolist() == [5, 5]
