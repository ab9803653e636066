// SiLU or GELU of the gate times up, and GELU alone.
#include "api.h"
#include "gate.h"
#include "rows.h"

namespace loraplex {
namespace {

inline Vec16 silu(Vec16 g) { return gated(g, g); }

// 0.5 x (1 + tanh(u)) = x / (1 + e^(-2 u)) with u = sqrt(2 / pi) (x + 0.044715 x^3).
inline Vec16 gelu_tanh(Vec16 x) {
  const Vec16 cube = mul(mul(x, x), x);
  return gated(x, mul(set1(1.59576912f), fma(set1(0.044715f), cube, x)));
}

inline Vec16 gelu_erf(Vec16 x) {
  return mul(mul(set1(0.5f), x), add(set1(1.f), erf(mul(x, set1(0.70710678f)))));
}

// y = f(x), times what lies `size` behind x where HAS_UP.
template <bool HAS_UP, class F>
inline void activate_row(const float* x, long size, float* y, F f) {
  for (long k = 0; k < size; k += 16) {
    const long count = size - k;
    const Vec16 v = f(load_first(x + k, count));
    store_first(y + k, HAS_UP ? mul(v, load_first(x + size + k, count)) : v, count);
  }
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

// y[t] = gelu(x[t, :size]), times x[t, size:] where there is an up; y [rows, size] is dense.
LORAPLEX_API void loraplex_gelu(const float* x, int64_t x_stride, int64_t rows, int64_t size, int32_t is_tanh,
                                int32_t has_up, float* y, int32_t threads) {
  for_rows(rows, 4 * rows * size, threads, [=](long t) {
    const float* row = x + t * x_stride;
    float* out = y + t * size;
    const auto activate = [&](auto f) {
      if (has_up) activate_row<true>(row, size, out, f);
      else activate_row<false>(row, size, out, f);
    };
    if (is_tanh) activate([](Vec16 v) { return gelu_tanh(v); });
    else activate([](Vec16 v) { return gelu_erf(v); });
  });
}
