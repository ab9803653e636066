"""The one place where a backend is chosen."""

from __future__ import annotations

import logging

import torch

from loraplex.errors import ConfigError
from loraplex.kernels.fallbacks import NATIVE_OPERATORS, TRITON_OPERATORS, TorchInstead
from loraplex.kernels.native.backend import NativeBackend
from loraplex.kernels.native.choice import open_library
from loraplex.kernels.native.library import NativeLibrary
from loraplex.kernels.protocols import KernelBackend as KernelBackend
from loraplex.kernels.reference import ReferenceBackend
from loraplex.kernels.torch_ops import TorchBackend
from loraplex.metrics import KernelFallback as KernelFallback  # the profile's report reads it without torch

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "native", "triton", "torch", "reference")


def get_backend(name: str, device: torch.device, lora_dtype: str = "auto", attention: str = "auto") -> KernelBackend:
    """The backend of that name for a device; `auto`: the fastest that covers it, native on a CPU where it is built.

    lora_dtype; attention: lora_dtype and attention_backend of the settings. CPU kernels run on torch's number of
    threads at this moment. Raises ConfigError: no such backend, not here, or it has no blocks of that dtype, or no such
    attention.
    """
    backend = _find_backend(name, device, lora_dtype, attention)
    wanted = ["lora_dtype int8"] if lora_dtype == "int8" else []
    wanted += [f"attention_backend {attention}"] if attention != "auto" else []
    if wanted and backend.name != "triton":
        needs = "needs" if len(wanted) == 1 else "need"
        text = f"{' and '.join(wanted)} {needs} triton kernels on a GPU, and these run: {backend.description}"
        raise ConfigError(text)
    return backend


def _find_backend(name: str, device: torch.device, lora_dtype: str, attention: str) -> KernelBackend:
    if name == "reference":
        return ReferenceBackend()
    if name == "torch":
        return TorchBackend("asked for with lora_backend torch")
    if name == "triton" or (name == "auto" and device.type == "cuda"):
        return _triton_backend(device, lora_dtype, attention, is_wanted=name == "triton")
    if name == "auto" and device.type != "cpu":
        return TorchBackend(f"there are no kernels of our own for {device}")
    if name not in BACKENDS or device.type != "cpu":
        raise ConfigError(f"lora_backend must be one of {BACKENDS}, got {name!r} for device {device}")
    library = open_library()
    if isinstance(library, NativeLibrary):
        return NativeBackend(library, torch.get_num_threads())
    if name == "native":
        raise ConfigError(f"there are no native kernels here: {library.reason}")
    if library.is_wanted:
        return TorchBackend(library.reason)
    logger.warning("no native kernels, stock torch runs, and loraplex:kernel_fallbacks counts it: %s", library.reason)
    return TorchInstead("native", NATIVE_OPERATORS, library.reason)


def _triton_backend(device: torch.device, lora_dtype: str, attention: str, is_wanted: bool) -> KernelBackend:
    """Triton comes with torch for CUDA; without it stock torch runs, unless Triton is asked for by name."""
    try:
        from loraplex.kernels.triton.backend import TritonBackend
    except ImportError as error:
        if is_wanted:
            raise ConfigError(f"lora_backend is triton, which is not installed here: {error}") from error
        reason = f"Triton is not installed: {error}"
        logger.warning("%s; stock torch runs on the GPU, and loraplex:kernel_fallbacks counts it", reason)
        return TorchInstead("triton", TRITON_OPERATORS, reason)
    block_dtype = None if lora_dtype == "auto" else getattr(torch, lora_dtype)
    return TritonBackend(device, block_dtype=block_dtype, attention=attention)
