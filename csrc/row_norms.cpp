// ||W_n + scaling (B A)_n||_2 of rows n of a weight in panels: what DoRA divides its magnitudes by.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "api.h"
#include "panels.h"

namespace loraplex {
namespace {

constexpr long kAtOnce = 4;  // sums that do not wait for one another

// One panel, k by k. `scale` is of int8 alone.
template <class Math>
struct Panel {
  const typename Math::Weight* steps;
  Vec16 scale;

  Vec16 at(long k) const {
    const auto* step = steps + k / Math::kPerStep * Math::kPerStep * kPanel;
    if constexpr (std::is_same_v<Math, Int8>) {
      static constexpr int16_t kPicked[2][2] = {{1, 0}, {0, 1}};
      Int16Sums one = zero_sums();
      multiply_add(one, Math::weights(step), broadcast_pair(kPicked[k % 2]));
      return mul(to_float(one), scale);
    } else {
      return Math::weights(step);
    }
  }
};

// Of 16 rows. a_t [in][rank]; b [rank][16], already scaled.
template <class Math>
Vec16 squares(const Panel<Math>& panel, long in, const float* a_t, const float* b, long rank) {
  Vec16 sums[kAtOnce] = {zero(), zero(), zero(), zero()}, v[kAtOnce];
  const auto add_columns = [&](long k, auto count) {
    for (long i = 0; i < count; i++) v[i] = panel.at(k + i);
    for (long r = 0; r < rank; r++) {
      const Vec16 column = load(b + r * kPanel);
      for (long i = 0; i < count; i++) v[i] = fma(broadcast(a_t + (k + i) * rank + r), column, v[i]);
    }
    for (long i = 0; i < count; i++) sums[i] = fma(v[i], v[i], sums[i]);
  };
  long k = 0;
  for (; k + kAtOnce <= in; k += kAtOnce) add_columns(k, std::integral_constant<long, kAtOnce>());
  for (; k < in; k++) add_columns(k, std::integral_constant<long, 1>());
  return add(add(sums[0], sums[1]), add(sums[2], sums[3]));
}

template <class Math>
void row_norms(const void* panels, const float* scale, long out, long in, long first, long last, const float* a,
               const float* b, long rank, float scaling, float* norms) {
  std::vector<float> a_t(in * rank), columns(rank * kPanel);
  for (long r = 0; r < rank; r++)
    for (long k = 0; k < in; k++) a_t[k * rank + r] = a[r * in + k];
  const long panel_size = (in + Math::kPerStep - 1) / Math::kPerStep * Math::kPerStep * kPanel;
  for (long p = first / kPanel; p < panels_of(last); p++) {
    const long begin = std::max(first, p * kPanel), end = std::min(last, (p + 1) * kPanel);
    std::fill(columns.begin(), columns.end(), 0.f);
    for (long n = begin; n < end; n++)
      for (long r = 0; r < rank; r++) columns[r * kPanel + n - p * kPanel] = scaling * b[(n - first) * rank + r];
    const Vec16 scales = scale == nullptr ? zero() : load_first(scale + p * kPanel, out - p * kPanel);
    const Panel<Math> panel = {(const typename Math::Weight*)panels + p * panel_size, scales};
    float found[kPanel];
    store(found, squares(panel, in, a_t.data(), columns.data(), rank));
    for (long n = begin; n < end; n++) norms[n - first] = std::sqrt(found[n - p * kPanel]);
  }
}

}  // namespace
}  // namespace loraplex

using namespace loraplex;

// norms [last - first]; a [rank, in] and b [last - first, rank] fp32, row-major; scale: of int8, else null. On the
// calling thread: it is for those beside the steps.
LORAPLEX_API void loraplex_row_norms(int32_t format, const void* panels, const float* scale, int64_t out, int64_t in,
                                     int64_t first, int64_t last, const float* a, const float* b, int64_t rank,
                                     float scaling, float* norms) {
  switch (format) {
    case kF32: return row_norms<F32>(panels, scale, out, in, first, last, a, b, rank, scaling, norms);
    case kF16: return row_norms<F16>(panels, scale, out, in, first, last, a, b, rank, scaling, norms);
    case kBF16: return row_norms<BF16>(panels, scale, out, in, first, last, a, b, rank, scaling, norms);
    case kInt8: return row_norms<Int8>(panels, scale, out, in, first, last, a, b, rank, scaling, norms);
  }
}
