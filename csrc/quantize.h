// Symmetric quantization: q = round(x / scale), scale = max |x| / most.
#pragma once
#include <algorithm>

#include "panels.h"

namespace loraplex {

struct Scale {
  float scale;  // NaN with an Inf or NaN in x
  Vec16 inverse;
};
inline Scale scale_of(const float* x, long count, float most) {
  Vec16 largest16 = set1(1e-30f), poison16 = zero();
  for (long k = 0; k < count; k += 16) {
    const Vec16 v = load_first(x + k, count - k);
    largest16 = max(abs(v), largest16);
    poison16 = fma(v, zero(), poison16);
  }
  const float largest = max_lanes(largest16);
  return {largest / most + sum_lanes(poison16), set1(most / largest)};
}

// One row of activations as int16, by this row alone; q has room for `in` rounded up to 16. With an Inf or NaN in the
// row every output is NaN.
inline float quantize_row(const float* x, long in, int16_t* q) {
  const auto [scale, inverse] = scale_of(x, in, 32767.f);
  for (long k = 0; k < in; k += 16) store_int16(q + k, mul(load_first(x + k, in - k), inverse));
  return scale;
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
    const auto [group_scale, inverse] = scale_of(x + begin, count, kMost);
    Vec16 sum16 = zero();
    Integer* to = place(begin);
    for (long k = 0; k < count; k += 16) {
      const Vec16 whole = round_even(mul(load_first(x + begin + k, count - k), inverse));
      sum16 = add(sum16, whole);  // exact: below 2^24
      store_steps(to + k, whole);
    }
    *scale = group_scale;
    *sum = group_scale == group_scale ? -zero_point * (int32_t)sum_lanes(sum16) : 0;
  }
}

}  // namespace loraplex
