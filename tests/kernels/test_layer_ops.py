"""linear, norms, rotary and silu_mul of every backend: the formula in float64, and Hugging Face's own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from loraplex.errors import ConfigError
from loraplex.kernels.ops import BACKENDS as NAMES
from loraplex.kernels.ops import get_backend
from tests.kernels.cases import BACKENDS, BF16, FP16, FP32, assert_close, kv_places, same_bits

pytestmark = [
    pytest.mark.parametrize(
        ("backend", "dtype"),  # of activations
        [(b, dtype) for b in BACKENDS for dtype in (FP32, FP16, BF16) if b.activation_dtype(dtype) == dtype],
        ids=lambda v: getattr(v, "name", str(v)),
    ),
    pytest.mark.parametrize("num_tokens", [1, 2, 7, 64]),
]


def draw(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("in_features", "out_features"), [(64, 64), (37, 130), (576, 51)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(
    backend: Any, dtype: torch.dtype, num_tokens: int, in_features: int, out_features: int, has_bias: bool
) -> None:
    x, weight = draw(dtype, num_tokens, in_features), draw(dtype, out_features, in_features, seed=1)
    bias = draw(dtype, out_features, seed=2) if has_bias else None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    own = backend.activation_dtype(dtype)
    x, bias = x.to(own), None if bias is None else bias.to(own)
    assert_close(backend.linear(x, weight, bias), expected, dtype)


@pytest.mark.parametrize("size", [64, 37, 576])
def test_rms_norm(backend: Any, dtype: torch.dtype, num_tokens: int, size: int) -> None:
    x, weight = draw(dtype, num_tokens, size) * 3, draw(dtype, size, seed=1)
    before, theirs = x.clone(), LlamaRMSNorm(size, eps=1e-5).to(dtype)
    theirs.weight.data.copy_(weight)
    got = backend.rms_norm(x, weight, 1e-5)
    wide = x.double()
    assert got.dtype == dtype
    assert_close(got, wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double())
    assert_close(got, theirs(x).detach())
    assert same_bits(x, before)


def test_rms_norm_of_heads(backend: Any, dtype: torch.dtype, num_tokens: int) -> None:
    """q and k norms: [T, H, D] inside a fused qkv output."""
    x = draw(dtype, num_tokens, 6 * 16)[:, 16:64].view(num_tokens, 3, 16)
    weight = draw(dtype, 16, seed=1)
    got = backend.rms_norm(x, weight, 1e-6)
    assert_close(got, backend.rms_norm(x.contiguous().view(-1, 16), weight, 1e-6).view(num_tokens, 3, 16))


@pytest.mark.parametrize("value", [0.0, 1e-6, 200.0])
def test_rms_norm_of_small_and_large_rows(backend: Any, dtype: torch.dtype, num_tokens: int, value: float) -> None:
    x, weight = torch.full((num_tokens, 64), value, dtype=dtype), torch.ones(64, dtype=dtype)
    wide = x.double()
    assert_close(backend.rms_norm(x, weight, 1e-6), wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt())


def test_add_rms_norm(backend: Any, dtype: torch.dtype, num_tokens: int) -> None:
    x, residual, weight = draw(dtype, num_tokens, 96), draw(dtype, num_tokens, 96, seed=1), draw(dtype, 96, seed=2)
    expected_total = x + residual
    normed, total = backend.add_rms_norm(x, residual, weight, 1e-5)  # which may overwrite both
    assert same_bits(total, expected_total)
    assert_close(normed, backend.rms_norm(expected_total, weight, 1e-5))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 16), (14, 2, 80)])
def test_rotary(
    backend: Any, dtype: torch.dtype, num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    qkv = draw(dtype, num_tokens, sum(sizes)).to(backend.activation_dtype(dtype))
    q, k, v = (t.view(num_tokens, -1, head_dim) for t in qkv.clone().split(sizes, dim=-1))
    config = LlamaConfig(hidden_size=num_heads * head_dim, num_attention_heads=num_heads, head_dim=head_dim)
    cos, sin = LlamaRotaryEmbedding(config)(qkv, torch.arange(5, 5 + num_tokens)[None])
    theirs = apply_rotary_pos_emb(q.clone().transpose(0, 1)[None], k.clone().transpose(0, 1)[None], cos, sin)
    kv = torch.zeros(5, 1, 2, num_kv_heads, 16, head_dim, dtype=qkv.dtype)
    kv_slots = torch.arange(3, 3 + num_tokens)
    got = backend.rotary_write_kv(q, k, v, cos[0], sin[0], kv[:, 0], kv_slots)
    assert got.dtype == qkv.dtype
    assert_close(got, theirs[0][0].transpose(0, 1), dtype)
    key_places, value_places = kv_places(backend, kv[:, 0])
    heads = kv.view(5, 2, num_kv_heads, -1)
    keys = torch.stack([heads[s // 16, 0][:, key_places[s % 16]] for s in kv_slots.tolist()])
    values = torch.stack([heads[s // 16, 1][:, value_places[s % 16]] for s in kv_slots.tolist()])
    assert_close(keys, theirs[1][0].transpose(0, 1), dtype)
    assert same_bits(values.view(num_tokens, -1), qkv[:, sum(sizes[:2]) :])


@pytest.mark.parametrize("size", [64, 37])
def test_silu_mul(backend: Any, dtype: torch.dtype, num_tokens: int, size: int) -> None:
    gate_up = draw(dtype, num_tokens, 2 * size)
    before, (gate, up) = gate_up.clone(), gate_up.double().chunk(2, dim=-1)
    got = backend.silu_mul(gate_up)
    assert got.shape == (num_tokens, size)
    assert_close(got, gate * torch.sigmoid(gate) * up, dtype)
    assert same_bits(gate_up, before)


def test_the_sum_of_add_rms_norm_has_a_scale(backend: Any, dtype: torch.dtype, num_tokens: int) -> None:
    x, residual, weight = draw(dtype, num_tokens, 96), draw(dtype, num_tokens, 96, seed=1), draw(dtype, 96, seed=2)
    expected = x.double() * 0.3 + residual.double()
    normed, total = backend.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5, 0.3)
    assert_close(total, expected, dtype)
    assert_close(normed, backend.rms_norm(total, weight, 1e-5))
    assert_close(backend.add_scaled(x, residual.clone(), 0.3), expected, dtype)


def test_a_wide_weight_is_multiplied_before_the_result_is_rounded(
    backend: Any, dtype: torch.dtype, num_tokens: int
) -> None:
    x, weight = draw(dtype, num_tokens, 64), 1 + draw(torch.float32, 64, seed=1)
    got = backend.rms_norm(x, weight, 1e-5)
    wide = x.double()
    assert got.dtype == dtype
    assert_close(got, wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double(), dtype)
    normed, _ = backend.add_rms_norm(x.clone(), torch.zeros_like(x), weight, 1e-5)
    assert_close(normed, got, dtype)


@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm(backend: Any, dtype: torch.dtype, num_tokens: int, has_bias: bool) -> None:
    x, weight = draw(dtype, num_tokens, 96) + 1, draw(dtype, 96, seed=1)
    bias = draw(dtype, 96, seed=2) if has_bias else None
    expected = F.layer_norm(x.double(), (96,), weight.double(), None if bias is None else bias.double(), 1e-5)
    assert_close(backend.layer_norm(x, weight, bias, 1e-5), expected, dtype)


@pytest.mark.parametrize("is_tanh", [False, True])
@pytest.mark.parametrize("has_up", [False, True])
def test_gelu(backend: Any, dtype: torch.dtype, num_tokens: int, is_tanh: bool, has_up: bool) -> None:
    x = 2 * draw(dtype, num_tokens, 2 * 37)
    before, (gate, *up) = x.clone(), x.double().chunk(2 if has_up else 1, dim=-1)
    expected = F.gelu(gate, approximate="tanh" if is_tanh else "none")
    assert_close(backend.gelu(x, is_tanh, has_up), expected * up[0] if up else expected, dtype)
    assert same_bits(x, before)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(32, 32), (64, 16), (80, 60), (16, 0)])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_positions_of_a_part_of_a_head_and_of_neighbours(
    backend: Any, dtype: torch.dtype, num_tokens: int, head_dim: int, rotary_dim: int, is_interleaved: bool
) -> None:
    """cos and sin are columns of wider tensors; keys are those of queries that are equal."""
    own = backend.activation_dtype(dtype)
    q = draw(dtype, num_tokens, 2, head_dim).to(own)
    angles = draw(torch.float32, num_tokens, rotary_dim // 2, seed=1).repeat(1, 2)
    cos, sin = (F.pad(t.to(own), (4, 12))[:, 4 : 4 + rotary_dim] for t in (angles.cos(), angles.sin()))
    turned = q.double()[..., :rotary_dim]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if is_interleaved else turned.chunk(2, dim=-1)
    if rotary_dim:
        c, s = (t.double()[:, None, : rotary_dim // 2] for t in (cos, sin))
        pair = a * c - b * s, b * c + a * s
        turned = torch.stack(pair, dim=-1).flatten(-2) if is_interleaved else torch.cat(pair, dim=-1)
    expected = torch.cat((turned, q.double()[..., rotary_dim:]), dim=-1)
    kv, slots = torch.zeros(5, 1, 2, 2, 16, head_dim, dtype=own), torch.arange(num_tokens)
    got = backend.rotary_write_kv(q.clone(), q.clone(), q, cos, sin, kv[:, 0], slots, is_interleaved)
    assert_close(got, expected, dtype)
    key_places, _ = kv_places(backend, kv[:, 0])
    heads = kv.view(5, 2, 2, -1)
    keys = torch.stack([heads[s // 16, 0][:, key_places[s % 16]] for s in slots.tolist()])
    assert_close(keys, got, dtype)


def test_get_backend(backend: Any, dtype: torch.dtype, num_tokens: int) -> None:
    assert get_backend(backend.name, torch.device("cpu")).name == backend.name
    assert get_backend("auto", torch.device("cpu")).name in NAMES
    with pytest.raises(ConfigError, match="'cuda-fast'"):
        get_backend("cuda-fast", torch.device("cpu"))
