"""Calls that stock torch runs for a kernel, counted by operator and reason.

A backend with kernels counts what they do not cover. `TorchInstead` stands for a backend that is missing as a whole,
and counts every call that it would have had.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from loraplex.kernels.torch_ops import TorchBackend
from loraplex.metrics import KernelFallback

logger = logging.getLogger(__name__)

NATIVE_OPERATORS = (
    *("add_lora", "add_rms_norm", "linear", "paged_attention", "rms_norm", "rotary_write_kv", "scale_input"),
    *("silu_mul", "invert_cdf", "keep_nucleus", "log_sum_exp", "ordered_top_k", "row_argmax", "token_ranks"),
    *("token_weights", "layer_norm", "add_scaled", "gelu", "experts", "add_gated", "mask_logits"),
)
"""What has kernels in loraplex/kernels/native."""

TRITON_OPERATORS = (
    *("add_lora", "add_rms_norm", "experts", "keep_nucleus", "paged_attention"),
    *("rms_norm", "rotary_write_kv", "scale_input", "silu_mul"),
)
"""What has kernels in loraplex/kernels/triton; quantised weights have some too, and are refused without Triton."""


class FallbackCounter:
    """Of one backend, since its start."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._calls: Counter[tuple[str, str]] = Counter()

    def add(self, op: str, reason: str) -> None:
        """One more call; the first one for a reason is logged."""
        if not self._calls[op, reason]:
            logger.warning("stock torch runs %s: %s", op, reason)
        self._calls[op, reason] += 1

    def all(self) -> tuple[KernelFallback, ...]:
        """In the order in which they first happened."""
        return tuple(KernelFallback(op, self._backend, reason, n) for (op, reason), n in list(self._calls.items()))


class TorchInstead(TorchBackend):
    """Stock torch that counts: the start has already said why."""

    def __init__(self, backend: str, operators: tuple[str, ...], reason: str) -> None:
        """`backend`: the one that is missing, which has kernels for `operators`."""
        super().__init__(reason)
        self._missing, self._reason = backend, reason
        self._calls: Counter[str] = Counter()
        stock = TorchBackend(reason)  # an operator that calls another one counts as one call
        for operator in operators:
            setattr(self, operator, self._counted(operator, getattr(stock, operator)))

    def fallbacks(self) -> tuple[KernelFallback, ...]:
        return tuple(KernelFallback(op, self._missing, self._reason, n) for op, n in list(self._calls.items()))

    def _counted(self, op: str, operator: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._calls[op] += 1
            return operator(*args, **kwargs)

        return call
