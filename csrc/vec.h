// Sixteen floats: the one vector type that every kernel is written in, and the width of a panel.
//
// Each instruction set has its own file with the same functions. What they compute is the same bit for bit where the
// set has a fused multiply-add (AVX2, AVX-512, NEON): the lanes are independent, and `sum_lanes` and `max_lanes` fix
// the order of a reduction.
//
//   load, load_first(p, n), load_f16, load_bf16, ...   store, store_first(p, v, n), store_f16, store_bf16
//   zero, set1, fma(a, b, c) = a b + c (one rounding), add, sub, mul, div, max, min, round_even, pow2(n) = 2^n,
//   select_less, less_lanes (a bit a lane); Wide16, 16 sums of float64: wide_zero, accumulate, sum_lanes
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(LORAPLEX_PORTABLE)
#include "vec_portable.h"
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__AVX512VNNI__)
#include "vec_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "vec_avx2.h"
#elif defined(__aarch64__) && defined(__ARM_NEON)
#include "vec_neon.h"
#else
#include "vec_portable.h"
#endif

namespace loraplex {

// e^x by Cephes' polynomial. |error| < 2e-7 relative in [-87, 88]; 0 below (also -inf), e^88 above, NaN for NaN.
inline Vec16 exp(Vec16 x) {
  // min and max give their second argument for a NaN: it goes through
  const Vec16 clamped = max(set1(-87.f), min(set1(88.f), x));
  const Vec16 n = round_even(mul(clamped, set1(1.44269504f)));
  Vec16 r = fma(n, set1(-0.693359375f), clamped);
  r = fma(n, set1(2.12194440e-4f), r);
  Vec16 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, set1(1.f)));
  return select_less(x, set1(-87.f), zero(), mul(p, pow2(n)));
}

// By Cephes' polynomial below 0.625, else 1 - 2 / (e^(2 |x|) + 1). |error| < 2e-7 relative; NaN for NaN.
inline Vec16 tanh(Vec16 x) {
  const Vec16 square = mul(x, x), size = abs(x);
  Vec16 p = set1(-5.70498872745e-3f);
  p = fma(p, square, set1(2.06390887954e-2f));
  p = fma(p, square, set1(-5.37397155531e-2f));
  p = fma(p, square, set1(1.33314422036e-1f));
  p = fma(p, square, set1(-3.33332819422e-1f));
  const Vec16 near = fma(mul(p, square), x, x);
  const Vec16 far = sub(set1(1.f), div(set1(2.f), add(exp(add(size, size)), set1(1.f))));
  return select_less(size, set1(0.625f), near, select_less(x, zero(), sub(zero(), far), far));
}

// erf(x) by Abramowitz and Stegun's 7.1.26. |error| < 2e-7; NaN for NaN.
inline Vec16 erf(Vec16 x) {
  const Vec16 size = abs(x), t = div(set1(1.f), fma(set1(0.3275911f), size, set1(1.f)));
  Vec16 p = set1(1.061405429f);
  p = fma(p, t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  const Vec16 far = sub(set1(1.f), mul(mul(p, t), exp(sub(zero(), mul(size, size)))));
  return select_less(x, zero(), sub(zero(), far), far);
}

}  // namespace loraplex
