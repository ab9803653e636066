"""Triton's norms, rotary embedding with the KV write, and SiLU-mul in the interpreter, beside the reference."""

from __future__ import annotations

import pytest
import torch

from loraplex.kernels.reference import ReferenceBackend
from loraplex.kernels.triton import glue
from loraplex.kernels.triton.backend import TritonBackend
from tests.kernels.cases import FP16, FP32, assert_close, same_bits
from tests.kernels.test_attention import LAYER, NUM_LAYERS, draw, poisoned_kv

REFERENCE = ReferenceBackend()
BLOCK_SIZE = 16

pytestmark = pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)


@pytest.fixture
def backend() -> TritonBackend:
    return TritonBackend(torch.device("cpu"))


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("num_tokens", [1, 7])
@pytest.mark.parametrize("size", [16, 37, 576, 5000])
def test_rms_norm(
    backend: TritonBackend, generator: torch.Generator, dtype: torch.dtype, num_tokens: int, size: int
) -> None:
    x = 3 * draw(generator, dtype, num_tokens, size + 3)[:, 1:-2]
    weight, before = draw(generator, dtype, size), x.clone()
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    got = backend.rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert_close(got, expected)
    assert same_bits(x, before)
    assert not backend.fallbacks()


@pytest.mark.parametrize("num_tokens", [1, 50])
def test_rms_norm_of_heads(
    backend: TritonBackend, generator: torch.Generator, dtype: torch.dtype, num_tokens: int
) -> None:
    """q and k norms: [T, H, D] inside a fused qkv output, more rows than programs."""
    x = draw(generator, dtype, num_tokens, 6, 16)[:, 1:4]
    weight = draw(generator, dtype, 16)
    got = backend.rms_norm(x, weight, 1e-6)
    assert got.shape == x.shape
    assert_close(got, REFERENCE.rms_norm(x, weight, 1e-6))
    assert not backend.fallbacks()


@pytest.mark.parametrize("value", [0.0, 1e-6, 200.0])
def test_rms_norm_of_small_and_large_rows(backend: TritonBackend, dtype: torch.dtype, value: float) -> None:
    x, weight = torch.full((3, 64), value, dtype=dtype), torch.ones(64, dtype=dtype)
    assert_close(backend.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x.double(), weight.double(), 1e-6))


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("is_dense", [False, True])
def test_add_rms_norm(
    backend: TritonBackend, generator: torch.Generator, dtype: torch.dtype, num_tokens: int, is_dense: bool
) -> None:
    """The sum is rounded to the dtype, is what is normed, and takes the residual's place."""
    x, residual = draw(generator, dtype, 2, num_tokens, 2 * 96)[..., :: 1 if is_dense else 2]
    x, residual = x[:, :96], residual[:, :96]
    if is_dense:
        x, residual = x.contiguous(), residual.contiguous()
    else:
        x, residual = (torch.nn.functional.pad(t, (0, 8))[:, :96] for t in (x, residual))
    weight, total = draw(generator, dtype, 96), x + residual
    normed, got = backend.add_rms_norm(x, residual, weight, 1e-5)
    assert same_bits(got, total)
    assert got.data_ptr() == residual.data_ptr()
    assert (normed.data_ptr() == x.data_ptr()) == is_dense or num_tokens == 1
    assert_close(normed, REFERENCE.rms_norm(total, weight, 1e-5))
    assert not backend.fallbacks()


def test_a_scaled_sum_and_a_wide_weight(backend: TritonBackend, generator: torch.Generator, dtype: torch.dtype) -> None:
    x, residual = draw(generator, dtype, 2, 5, 96)
    weight = draw(generator, FP32, 96)
    expected, total = REFERENCE.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5, 0.3)
    normed, got = backend.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5, 0.3)
    assert normed.dtype == dtype
    assert_close(got, total)
    assert_close(normed, expected)
    assert_close(backend.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    assert not backend.fallbacks()


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(32, 32), (64, 16), (80, 60), (24, 0)])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_positions_of_a_part_of_a_head_and_of_neighbours(
    backend: TritonBackend,
    generator: torch.Generator,
    dtype: torch.dtype,
    head_dim: int,
    rotary_dim: int,
    is_interleaved: bool,
) -> None:
    q, k, v = draw(generator, dtype, 7, 5, head_dim).split_with_sizes([3, 1, 1], dim=1)
    angles = draw(generator, FP32, 7, rotary_dim // 2).repeat(1, 2)
    cos, sin = (torch.nn.functional.pad(t.to(dtype), (3, 9))[:, 3:-9] for t in (angles.cos(), angles.sin()))
    kv = poisoned_kv(2, 1, BLOCK_SIZE, head_dim, dtype)
    expected_kv, slots = kv.clone(), torch.randperm(2 * BLOCK_SIZE, generator=generator)[:7]
    place = expected_kv[:, LAYER], slots, is_interleaved
    expected = REFERENCE.rotary_write_kv(q.clone(), k.clone(), v, cos, sin, *place)
    got = backend.rotary_write_kv(q.clone(), k.clone(), v, cos, sin, kv[:, LAYER], slots, is_interleaved)
    assert not backend.fallbacks()
    assert_close(got, expected)
    written = expected_kv.isfinite()
    assert same_bits(written, kv.isfinite())
    assert_close(kv[written], expected_kv[written], dtype)


@pytest.mark.parametrize("size", [37, 64, 2100])
def test_silu_mul(backend: TritonBackend, generator: torch.Generator, dtype: torch.dtype, size: int) -> None:
    gate_up = 4 * draw(generator, dtype, 3, 2 * size + 4)[:, :-4]
    before, (gate, up) = gate_up.clone(), gate_up.double().chunk(2, dim=-1)
    got = backend.silu_mul(gate_up)
    assert got.shape == (3, size)
    assert_close(got, gate * torch.sigmoid(gate) * up, dtype)
    assert_close(got, REFERENCE.silu_mul(gate_up))
    assert same_bits(gate_up, before)
    assert not backend.fallbacks()


def test_silu_mul_of_large_gates(backend: TritonBackend, dtype: torch.dtype) -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 0.0, 2.0, 2.0, 2.0]], dtype=dtype)
    assert_close(backend.silu_mul(gate_up), REFERENCE.silu_mul(gate_up))


@pytest.mark.parametrize("kv_dtype", [FP32, FP16], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim"),
    [(1, 4, 4, 16), (3, 9, 3, 64), (40, 14, 2, 80), (5, 8, 1, 24)],
)
def test_rotary_write_kv(
    backend: TritonBackend,
    generator: torch.Generator,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    """q, k and v inside one fused output; rows with kv slot -1 write nothing; the rest of the cache stays as it is."""
    fused = draw(generator, dtype, num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    angles = draw(generator, FP32, num_tokens, head_dim // 2).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    kv = poisoned_kv(5, num_kv_heads, BLOCK_SIZE, head_dim, kv_dtype)
    slots = torch.randperm(5 * BLOCK_SIZE, generator=generator)[:num_tokens]
    is_padding = torch.arange(num_tokens) % 4 == 3
    expected_kv, before = kv.clone(), fused.clone()
    q, k, v = fused.clone().split_with_sizes([num_heads, num_kv_heads, num_kv_heads], dim=1)
    rows = ~is_padding
    REFERENCE.rotary_write_kv(q[rows], k[rows], v[rows], cos[rows], sin[rows], expected_kv[:, LAYER], slots[rows])
    expected_q = REFERENCE.rotary_write_kv(q, k, v, cos, sin, torch.zeros_like(kv[:, LAYER]), slots)

    q, k, v = fused.split_with_sizes([num_heads, num_kv_heads, num_kv_heads], dim=1)
    got = backend.rotary_write_kv(q, k, v, cos, sin, kv[:, LAYER], slots.masked_fill(is_padding, -1))
    assert not backend.fallbacks()
    assert_close(got, expected_q)
    assert same_bits(fused[:, num_heads:], before[:, num_heads:])
    is_written = torch.zeros(5, NUM_LAYERS, 2, num_kv_heads, BLOCK_SIZE, head_dim, dtype=torch.bool)
    is_written[slots[rows] // BLOCK_SIZE, LAYER, :, :, slots[rows] % BLOCK_SIZE] = True
    assert same_bits(kv[~is_written], expected_kv[~is_written])
    assert_close(kv[is_written], expected_kv[is_written], min(dtype, kv_dtype, key=lambda d: d.itemsize))
    assert same_bits(kv[:, LAYER, 1], expected_kv[:, LAYER, 1])  # values are copied


def test_keys_are_rounded_as_activations_first(
    backend: TritonBackend, generator: torch.Generator, dtype: torch.dtype
) -> None:
    k = draw(generator, dtype, 4, 1, 16)
    angles = draw(generator, FP32, 4, 8).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    caches = [torch.zeros(1, 2, 1, BLOCK_SIZE, 16, dtype=kv_dtype) for kv_dtype in (FP32, dtype)]
    for cache in caches:
        backend.rotary_write_kv(k.clone(), k, k, cos, sin, cache, torch.arange(4))
    assert same_bits(caches[0].to(dtype), caches[1])
    assert same_bits(caches[0], caches[1].float())


def test_what_is_not_covered_is_counted(backend: TritonBackend, generator: torch.Generator, dtype: torch.dtype) -> None:
    x, weight = draw(generator, dtype, 2, 3, 4, 16), draw(generator, dtype, 16)
    assert_close(backend.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))
    transposed = draw(generator, dtype, 8, 3).T
    assert_close(backend.silu_mul(transposed), REFERENCE.silu_mul(transposed))
    flat = draw(generator, dtype, 2, 3, 16)
    normed, _ = backend.add_rms_norm(flat.clone(), flat.clone(), weight, 1e-6)
    assert_close(normed, REFERENCE.rms_norm(2 * flat, weight, 1e-6))
    assert [each.op for each in backend.fallbacks()] == ["rms_norm", "silu_mul", "add_rms_norm"]
    assert {each.calls for each in backend.fallbacks()} == {1}
    assert glue.rotary_write_kv_gap(x[0], x[0], x[0], weight.double(), weight, x) is not None
