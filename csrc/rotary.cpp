// Rotary positions of q and k, new keys and values into their KV blocks (attention.h): in one go over the fused qkv.
//
// For the halves a, b of a head's first `rotary_dim` dimensions (interleaved: its even and its odd ones): a' = a cos -
// b sin, b' = b cos + a sin. The product with cos is rounded, the other one is fused with the sum, in every instruction
// set: fma(-b, sin, a cos), fma(a, sin, b cos). Dimensions behind them stay.
#include <algorithm>

#include "api.h"
#include "attention.h"
#include "rows.h"

namespace loraplex {
namespace {

constexpr long kParallelElements = 400000;  // of q, k and v, about 50 us

void rotate_halves(const float* x, const float* cos, const float* sin, long half, float* out) {
  for (long i = 0; i < half; i += 16) {
    const long count = half - i;
    const Vec16 a = load_first(x + i, count), b = load_first(x + half + i, count);
    const Vec16 to_a = fma(sub(zero(), b), load_first(sin + i, count), mul(a, load_first(cos + i, count)));
    const Vec16 to_b = fma(a, load_first(sin + half + i, count), mul(b, load_first(cos + half + i, count)));
    store_first(out + i, to_a, count);
    store_first(out + half + i, to_b, count);
  }
}

void rotate_pairs(const float* x, const float* cos, const float* sin, long half, float* out) {
  for (long i = 0; i < half; i += 16) {
    const long count = std::min(16L, half - i);
    alignas(64) float a[16] = {}, b[16] = {};
    for (long j = 0; j < count; j++) a[j] = x[2 * (i + j)], b[j] = x[2 * (i + j) + 1];
    const Vec16 cosines = load_first(cos + i, count), sines = load_first(sin + i, count);
    const Vec16 even = load(a), odd = load(b);
    store(a, fma(sub(zero(), odd), sines, mul(even, cosines)));
    store(b, fma(even, sines, mul(odd, cosines)));
    for (long j = 0; j < count; j++) out[2 * (i + j)] = a[j], out[2 * (i + j) + 1] = b[j];
  }
}

void rotate(const RotaryCall& call, long t, const float* x, float* out) {
  const long half = call.rotary_dim / 2;
  const float *cos = call.cos + t * call.rope_stride, *sin = call.sin + t * call.rope_stride;
  if (call.is_interleaved) rotate_pairs(x, cos, sin, half, out);
  else rotate_halves(x, cos, sin, half, out);
  if (out != x) std::copy(x + call.rotary_dim, x + call.head_dim, out + call.rotary_dim);
}

// out = x / its scale; returns the scale.
float divide_by_scale(const float* x, long head_dim, float* out) {
  const float scale = scale_of(x, head_dim, 127.f).scale;
  for (long d = 0; d < head_dim; d += 16) store(out + d, div(load(x + d), set1(scale)));
  return scale;
}

template <class Kv>
void write_token(const RotaryCall& call, long t) {
  const long head_dim = call.head_dim, head_size = call.block_size / kGroup * group_size<Kv>(head_dim);
  const long block = call.kv_slots[t] / call.block_size, offset = call.kv_slots[t] % call.block_size;
  alignas(64) float rotated[kMaxHeadDim], divided[kMaxHeadDim];
  for (long h = 0; h < call.kv_heads; h++) {
    auto* keys = (typename Kv::Element*)call.kv + block * call.block_stride + h * head_size;
    rotate(call, t, call.k + t * call.k_stride + h * head_dim, rotated);
    auto* values = keys + call.kv_heads * head_size;
    const float* v = call.v + t * call.v_stride + h * head_dim;
    if constexpr (Kv::kScaleElements > 0) {
      const long group = offset / kGroup * group_size<Kv>(head_dim);
      scales_of(keys + group, head_dim)[offset % kGroup] = divide_by_scale(rotated, head_dim, rotated);
      scales_of(values + group, head_dim)[offset % kGroup] = divide_by_scale(v, head_dim, divided);
      v = divided;
    }
    for (long d = 0; d < head_dim; d += 16) {
      store_key<Kv>(keys, offset, d, head_dim, load(rotated + d));
      store_value<Kv>(values, offset, d, head_dim, load(v + d));
    }
  }
}

// The lines that a token's keys go to, those of each step of its group, are not in a cache in a decode step.
template <class Kv>
void prefetch_keys(const RotaryCall& call, long t) {
  if (t > 0 && call.kv_slots[t] / kGroup == call.kv_slots[t - 1] / kGroup) return;
  const long size = group_size<Kv>(call.head_dim), head_size = call.block_size / kGroup * size;
  const long block = call.kv_slots[t] / call.block_size, offset = call.kv_slots[t] % call.block_size;
  auto* step = (const typename Kv::Element*)call.kv + block * call.block_stride + offset / kGroup * size;
  for (long h = 0; h < call.kv_heads; h++, step += head_size)
    for (long at = 0; at < size; at += kStep) prefetch_step<Kv>(step + at);
}

template <class Kv>
void rotary_write_kv(const RotaryCall& call) {
  const long elements = call.tokens * (call.heads + 2 * call.kv_heads) * call.head_dim;
  auto token = [&](long t) {
    prefetch_keys<Kv>(call, t);
    for (long h = 0; h < call.heads && call.rotary_dim > 0; h++) {
      float* head = call.q + t * call.q_stride + h * call.head_dim;
      rotate(call, t, head, head);
    }
    write_token<Kv>(call, t);
  };
  for_rows(call.tokens, elements, call.threads, token, kParallelElements);
}

}  // namespace
}  // namespace loraplex

using namespace loraplex;

LORAPLEX_API void loraplex_rotary_write_kv(const RotaryCall* call) {
  switch (call->format) {
    case kF32: return rotary_write_kv<KvF32>(*call);
    case kF16: return rotary_write_kv<KvF16>(*call);
    case kBF16: return rotary_write_kv<KvBF16>(*call);
    case kInt8: return rotary_write_kv<KvInt8>(*call);
  }
}
