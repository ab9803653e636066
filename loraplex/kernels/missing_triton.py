"""Stock torch on a GPU where Triton is missing: each call that a kernel would have had is counted, as the Triton backend counts its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from loraplex.kernels.torch_ops import TorchBackend

TRITON_OPERATORS = (
    "add_lora",
    "add_rms_norm",
    "keep_nucleus",
    "paged_attention",
    "rms_norm",
    "rotary_write_kv",
    "silu_mul",
)
"""What has kernels in loraplex/kernels/triton; the rest is stock torch's there too, and quantised weights are refused here."""


class TorchWithoutTriton(TorchBackend):
    """Stock torch that counts."""

    def __init__(self, reason: str) -> None:
        """`reason`: why there is no Triton."""
        super().__init__(reason)
        self._fallbacks: Counter[str] = Counter()
        stock = TorchBackend(reason)  # an operator that calls another one counts as one call
        for operator in TRITON_OPERATORS:
            setattr(self, operator, self._counted(getattr(stock, operator), f"{operator}: {reason}"))

    @property
    def fallbacks(self) -> Mapping[str, int]:
        return self._fallbacks

    def _counted(self, operator: Callable[..., Any], key: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._fallbacks[key] += 1
            return operator(*args, **kwargs)

        return call
