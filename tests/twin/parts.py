"""A calibration of round figures, and what tests of twins share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from loraplex.twin.calibration import Calibration, ReadTime
from loraplex.twin.settings import TwinSettings
from loraplex.twin.step_model import FEATURES

ADAPTER_BYTES = 1_280_000
MIB = 1 << 20


def calibration(step_ms: float = 10.0, **changes: Any) -> Calibration:
    """A step takes `step_ms` and 0.1 ms a token; an adapter of rank 16 has ADAPTER_BYTES."""
    coefficients = {**dict.fromkeys(FEATURES, 0.0), "steps": step_ms, "tokens": 0.1}
    made = Calibration(
        model="round",
        machine="nowhere",
        device="cpu",
        backend="none",
        dtype="float32",
        num_threads=1,
        step_ms=coefficients,
        error_p50=0.0,
        error_p90=0.0,
        num_steps=1,
        step_ratios=(),
        block_bytes=1 << 14,
        block_size=16,
        max_model_len=512,
        adapter_bytes={8: ADAPTER_BYTES // 2, 16: ADAPTER_BYTES},
        num_extents=4,
        source=ReadTime(0.02, 1e-9),
        disk=ReadTime(0.002, 1e-10),
    )
    return replace(made, **changes)


def settings(**changes: Any) -> TwinSettings:
    """A small engine: room for ten adapters of rank 16."""
    small = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "kv_cache_memory_bytes": 4 * MIB,
        "adapter_memory_bytes": 10 * ADAPTER_BYTES,
        "host_memory_bytes": 40 * ADAPTER_BYTES,
        "enable_prediction": False,
    }
    return TwinSettings(**{**small, **changes})
