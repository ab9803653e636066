// Symmetric quantization: q = round(x / scale), scale = max |x| / largest.
#pragma once
#include <algorithm>

#include "panels.h"

namespace loraplex {

// One row of activations as int16, by this row alone; q has room for `in` rounded up to 16. With an Inf or NaN in the
// row the scale is NaN, and so is every output.
inline float quantize_row(const float* x, long in, int16_t* q) {
  Vec16 largest16 = set1(1e-30f), poison16 = zero();
  for (long k = 0; k < in; k += 16) {
    const Vec16 v = load_first(x + k, in - k);
    largest16 = max(abs(v), largest16);
    poison16 = fma(v, zero(), poison16);
  }
  const float largest = max_lanes(largest16);
  const Vec16 inverse = set1(32767.f / largest);
  for (long k = 0; k < in; k += 16) store_int16(q + k, mul(load_first(x + k, in - k), inverse));
  return largest / 32767.f + sum_lanes(poison16);
}

// The same of each group of one row, which begins at q(k) for the group's first k: scale and -zero * (sum of q).
template <class Place>
inline void quantize_groups(const float* x, long in, long group, int32_t zero_point, Place q, float* scale,
                            int32_t* sum) {
  for (long begin = 0; begin < in; begin += group, scale++, sum++) {
    const long count = std::min(group, in - begin);
    Vec16 largest16 = set1(1e-30f), poison16 = zero(), sum16 = zero();
    for (long k = 0; k < count; k += 16) {
      const Vec16 v = load_first(x + begin + k, count - k);
      largest16 = max(abs(v), largest16);
      poison16 = fma(v, zero(), poison16);
    }
    const float largest = max_lanes(largest16), poison = sum_lanes(poison16);
    const Vec16 inverse = set1(32767.f / largest);
    int16_t* to = q(begin);
    for (long k = 0; k < count; k += 16) {
      const Vec16 whole = round_even(mul(load_first(x + begin + k, count - k), inverse));
      sum16 = add(sum16, whole);  // exact: below 2^24
      store_int16(to + k, whole);
    }
    *scale = largest / 32767.f + poison;
    *sum = poison == 0 ? -zero_point * (int32_t)sum_lanes(sum16) : 0;
  }
}

}  // namespace loraplex
