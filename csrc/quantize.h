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

inline void store_steps(int16_t* p, Vec16 v) { store_int16(p, v); }
inline void store_steps(int8_t* p, Vec16 v) { store_int8_steps(p, v); }

// The same of each group of one row, as int16 or int8; a group begins at place(its first k). Scale and -zero * (sum
// of q).
template <class Integer, class Place>
inline void quantize_groups(const float* x, long in, long group, int32_t zero_point, Place place, float* scale,
                            int32_t* sum) {
  constexpr float kMost = sizeof(Integer) == 1 ? 127.f : 32767.f;
  for (long begin = 0; begin < in; begin += group, scale++, sum++) {
    const long count = std::min(group, in - begin);
    Vec16 largest16 = set1(1e-30f), poison16 = zero(), sum16 = zero();
    for (long k = 0; k < count; k += 16) {
      const Vec16 v = load_first(x + begin + k, count - k);
      largest16 = max(abs(v), largest16);
      poison16 = fma(v, zero(), poison16);
    }
    const float largest = max_lanes(largest16), poison = sum_lanes(poison16);
    const Vec16 inverse = set1(kMost / largest);
    Integer* to = place(begin);
    for (long k = 0; k < count; k += 16) {
      const Vec16 whole = round_even(mul(load_first(x + begin + k, count - k), inverse));
      sum16 = add(sum16, whole);  // exact: below 2^24
      store_steps(to + k, whole);
    }
    *scale = largest / kMost + poison;
    *sum = poison == 0 ? -zero_point * (int32_t)sum_lanes(sum16) : 0;
  }
}

}  // namespace loraplex
