"""FlashAttention 3 in place of Triton's prefill kernel, where it is installed, whatever an engine would choose."""

from __future__ import annotations

import torch

from benchmarks.gpu.inputs import BLOCK_SIZE
from benchmarks.gpu.place import Place
from loraplex.kernels.ops import KernelBackend
from loraplex.kernels.triton.flash_attention import flash_attention_absence


def flash_absence(place: Place) -> str | None:
    """Why it is not here; None: it is."""
    from loraplex.kernels.triton.launch import GpuTarget

    return flash_attention_absence(GpuTarget.of(place.device).capability)


def flash_backend(
    place: Place, heads: tuple[int, int, int], dtype: torch.dtype, window: int | None = None
) -> KernelBackend:
    """Kernels of which it runs prompts; heads: H, KH, D. Raises ConfigError where it cannot, or its trial fails."""
    num_heads, kv_heads, dim = heads
    backend = place.lora_backend(attention="flash_attn")
    kv = torch.empty((1, 1, 2, kv_heads, BLOCK_SIZE, dim), dtype=dtype, device=place.device)
    backend.choose_attention(num_heads, dtype, kv, (window,))
    return backend
