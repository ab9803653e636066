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

}  // namespace loraplex
