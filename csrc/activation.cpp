// SiLU of the gate times up.
#include <cmath>

#include "api.h"
#include "rows.h"
#include "vec.h"

namespace loraplex {
namespace {

// g / (1 + e^-g). Below -88 the divisor is infinite: -0, and NaN for -inf, as where e^-g overflows (at -88.7).
inline Vec16 silu(Vec16 g) {
  const Vec16 divisor = add(set1(1.f), exp(sub(zero(), g)));
  return div(g, select_less(g, set1(-88.f), set1(INFINITY), divisor));
}

}  // namespace
}  // namespace loraplex

using namespace loraplex;

// y[t] = silu(x[t, :size]) * x[t, size:]; y [rows, size] is dense.
LORAPLEX_API void loraplex_silu_mul(const float* x, int64_t x_stride, int64_t rows, int64_t size, float* y,
                                    int32_t threads) {
  for_rows(rows, 4 * rows * size, threads, [=](long t) {
    const float *gate = x + t * x_stride, *up = gate + size;
    float* out = y + t * size;
    long k = 0;
    for (; k + 16 <= size; k += 16) store(out + k, mul(silu(load(gate + k)), load(up + k)));
    if (k < size)
      store_first(out + k, mul(silu(load_first(gate + k, size - k)), load_first(up + k, size - k)), size - k);
  });
}
