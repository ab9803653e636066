"""Which form a checkpoint has, by the `quantization_config` of its config.json."""

from __future__ import annotations

from collections.abc import Mapping

from loraplex.models.checkpoints.awq import Awq
from loraplex.models.checkpoints.bitsandbytes import Bitsandbytes
from loraplex.models.checkpoints.compressed_tensors import CompressedTensors
from loraplex.models.checkpoints.gptq import Gptq
from loraplex.models.checkpoints.mxfp4 import Mxfp4
from loraplex.models.checkpoints.scaled import Fp8
from loraplex.models.checkpoints.stored import Form

FORMS: Mapping[str, type[CompressedTensors | Fp8 | Gptq | Awq | Bitsandbytes | Mxfp4]] = {
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
    "gptq": Gptq,
    "awq": Awq,
    "bitsandbytes": Bitsandbytes,
    "mxfp4": Mxfp4,
}
"""By `quant_method`."""


def form_of(settings: object) -> Form | None:
    """The form that `quantization_config` describes; None: weights are plain floats. ValueError: it is refused."""
    if not settings:
        return None
    if not isinstance(settings, Mapping):
        raise ValueError(f"quantization_config must be an object, got {settings!r}")
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in FORMS:
        raise ValueError(
            f"quantization_config: quant_method {method!r} is not supported; supported are {', '.join(FORMS)}, "
            "and GGUF files"
        )
    try:
        return FORMS[method].of(settings)
    except ValueError as e:
        raise ValueError(f"quantization_config of {method}: {e}") from e
