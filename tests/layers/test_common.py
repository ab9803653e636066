"""Norm, rotary embedding and attention glue against transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from loraplex.errors import ModelWeightError
from loraplex.kernels.ops import get_backend
from loraplex.layers.common import ROPE_RULES, LayerSetup, RMSNorm, RotaryEmbedding, WeightPart, whole
from loraplex.models.config import ROPE_KEYS, ModelConfig

CPU = torch.device("cpu")

ROPES: dict[str, Mapping[str, Any]] = {
    "default": {"rope_type": "default"},
    "default, theta 1e6": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn, its context implied": {"rope_type": "yarn", "factor": 2.5},
    "yarn, factor null": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 4096},
    "yarn, attention_factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.75},
    "yarn, mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn, betas, no truncation": {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
    "longrope": {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 131072},
    "longrope, attention_factor": {
        "rope_type": "longrope",
        "attention_factor": 1.25,
        "original_max_position_embeddings": 131072,
    },
    "yarn, ramp of no width": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4},
}


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("rope", ROPES)
def test_cos_and_sin_are_those_of_transformers_bit_for_bit(rope: str, head_dim: int) -> None:
    """At far positions too, where one rounding of a frequency would show."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    sizes = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "max_position_embeddings": 131072}
    parameters = dict(ROPES[rope])
    if parameters["rope_type"] == "longrope":
        parameters |= {f"{part}_factor": [1 + i / 7 for i in range(head_dim // 2)] for part in ("short", "long")}
    hf_config = LlamaConfig(**sizes, rope_parameters=dict(parameters))
    config = ModelConfig.from_dict(
        {**sizes, "model_type": "llama", "intermediate_size": 8, "num_hidden_layers": 1}
        | {"vocab_size": 8, "rope_parameters": parameters}
    )
    positions = torch.tensor([0, 1, 2, 77, 4095, 4096, 8191, 32767, 131071])
    for dtype in (torch.float32, torch.bfloat16):
        setup = LayerSetup(get_backend("torch", CPU), dtype, CPU)
        want = LlamaRotaryEmbedding(hf_config)(torch.zeros(1, dtype=dtype), positions[None])
        got = RotaryEmbedding(head_dim, config.ropes, setup).forward(positions)
        for g, w in zip(got, want, strict=True):
            assert g.dtype == dtype
            assert torch.equal(g, w[0])


def test_every_rope_rule_is_read_and_tested() -> None:
    assert {str(rope["rope_type"]) for rope in ROPES.values()} == set(ROPE_RULES) == set(ROPE_KEYS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_rms_norm(backend: str, dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = RMSNorm("n", 24, 1e-5, LayerSetup(get_backend(backend, CPU), dtype, CPU))
    torch.manual_seed(0)
    norm.weight.normal_(1, 0.1)
    oracle = LlamaRMSNorm(24, 1e-5).to(dtype)
    oracle.load_state_dict({"weight": norm.weight})
    x, residual = torch.randn(5, 24).to(dtype), torch.randn(5, 24).to(dtype)
    total = x + residual
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(norm.forward(x), oracle(x).detach(), rtol=tolerance, atol=tolerance)
    normed, added = norm.forward_add(x.clone(), residual.clone())
    assert torch.equal(added, total)
    torch.testing.assert_close(normed, oracle(total).detach(), rtol=tolerance, atol=tolerance)


def test_a_weight_of_another_shape_is_named_with_both_shapes() -> None:
    part = WeightPart("model.norm.weight", (4,), torch.zeros(4), whole)
    with pytest.raises(ModelWeightError, match=r"model\.norm\.weight has shape \(5,\).*\(4,\)"):
        part.load(torch.zeros(5))


def test_a_quantized_weight_is_refused() -> None:
    part = WeightPart("model.norm.weight", (4,), torch.zeros(4), whole)
    with pytest.raises(ModelWeightError, match=r"model\.norm\.weight has dtype torch\.int8; quantized"):
        part.load(torch.zeros(4, dtype=torch.int8))
