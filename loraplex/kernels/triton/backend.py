"""The GPU backend: Triton kernels, and stock torch (cuBLAS) for the products of the base model.

What a kernel does not cover goes to stock torch on the same device: logged once for each reason, and counted.
"""

from __future__ import annotations

import logging
from collections import Counter

import torch

from loraplex.core import LoraSlice
from loraplex.kernels.plan import LoraPlan, SlotTable
from loraplex.kernels.torch_ops import TorchBackend
from loraplex.kernels.triton.launch import Launcher, TritonLauncher
from loraplex.kernels.triton.lora import TRITON_DTYPES, LoraWorkspace, add_lora, rank_capacity
from loraplex.kernels.triton.lora_packing import GpuPacking

logger = logging.getLogger(__name__)


class TritonBackend(GpuPacking, TorchBackend):
    """Triton kernels on one device."""

    name = "triton"

    def __init__(
        self,
        device: torch.device,
        launcher: Launcher | None = None,
        *,
        block_dtype: torch.dtype | None = None,
        is_lora_fused: bool | None = None,
    ) -> None:
        """`launcher`: how kernels are run; by default on the device. Raises ConfigError where Triton cannot run.

        block_dtype: of adapters in packed blocks, int8 too; None: the model's. is_lora_fused: one launch for a decode step's shrink and
        expand, or two; None: as the shapes say.
        """
        self.launcher = launcher or TritonLauncher(device)
        major, minor = self.launcher.target.capability
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "in the interpreter"
        self.description = f"triton sm_{major}{minor}, {where}"
        self.fallbacks: Counter[str] = Counter()
        """Calls that stock torch ran, by operator and reason."""
        self.block_dtype = block_dtype
        self._is_lora_fused = is_lora_fused
        self._is_interpreted = getattr(self.launcher, "is_interpreted", False)  # it computes bfloat16 wrong
        self.lora_workspace = LoraWorkspace()

    def add_lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        plan: LoraPlan,
        table: SlotTable,
        first_row: int,
        slices: tuple[LoraSlice, ...],
    ) -> None:
        dtypes = {x.dtype, y.dtype, *table.block_dtypes}
        is_known = dtypes <= TRITON_DTYPES.keys() - ({torch.bfloat16} if self._is_interpreted else set())
        if len(table.block_dtypes) > 1 or not is_known:
            self._fall_back("add_lora", f"adapters and model in {', '.join(sorted(map(str, dtypes)))}")
            return super().add_lora(y, x, plan, table, first_row, slices)
        assert y.stride(1) == 1
        dense = x if x.stride(1) == 1 else x.contiguous()
        fused = self._is_lora_fused
        add_lora(self.launcher, self.lora_workspace, y, dense, plan, table, first_row, slices, is_fused=fused)

    def rank_capacity(self, table: SlotTable) -> int:
        """Ranks that a capture over `table` made now is good for: replay a step only if `table.largest_rank(its slots)` is no more."""
        return rank_capacity(table)

    @property
    def workspace_nbytes(self) -> int:
        return self.lora_workspace.nbytes

    def release_workspace(self) -> int:
        return self.lora_workspace.release()

    def _fall_back(self, operator: str, reason: str) -> None:
        key = f"{operator}: {reason}"
        if not self.fallbacks[key]:
            logger.warning("stock torch runs %s", key)
        self.fallbacks[key] += 1
