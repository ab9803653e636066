// ||W_n + scaling (B A)_n||_2 of rows n of a weight in panels: what DoRA divides its magnitudes by.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "api.h"
#include "group_tile.h"

namespace loraplex {
namespace {

constexpr long kAtOnce = 4;  // sums that do not wait for one another

constexpr int16_t kPicked[2][2] = {{1, 0}, {0, 1}};  // of a pair

// One panel, k by k. `scale` is of int8 alone, `groups` of weights in groups of `group_size`.
template <class Math>
struct Panel {
  const typename Math::Weight* steps;
  Vec16 scale;
  PanelGroups groups;
  long group_size;

  template <int PART>
  void add_integer(const typename Math::Weight* step, long i, Int16Sums& sum) const {
    if constexpr (PART < Math::kParts)
      if (i / 2 == PART) multiply_add(sum, Math::template weights<PART>(step), broadcast_pair(kPicked[i % 2]));
  }

  Vec16 at(long k) const {
    const auto* step = steps + k / Math::kPerStep * Math::kStepWeights;
    if constexpr (std::is_same_v<Math, Int8>) {
      Int16Sums one = zero_sums();
      multiply_add(one, Math::weights(step), broadcast_pair(kPicked[k % 2]));
      return mul(to_float(one), scale);
    } else if constexpr (Math::kIsGrouped) {
      static constexpr int32_t kMinusOne = -1, kMinusZero = -Math::kZero;
      const PanelGroups group = groups.from(0, k / group_size);
      Int16Sums one = group.zero == nullptr ? broadcast_sum(&kMinusZero)
                                            : multiply(broadcast_sum(&kMinusOne), load_int8(group.zero));
      const long i = k % Math::kPerStep;
      add_integer<0>(step, i, one), add_integer<1>(step, i, one);
      add_integer<2>(step, i, one), add_integer<3>(step, i, one);
      return mul(to_float(one), group.scales(0));
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
void row_norms(const void* panels, const void* scale, long out, long in, long first, long last, const float* a,
               const float* b, long rank, float scaling, float* norms) {
  std::vector<float> a_t(in * rank), columns(rank * kPanel);
  for (long r = 0; r < rank; r++)
    for (long k = 0; k < in; k++) a_t[k * rank + r] = a[r * in + k];
  const long panel_size = (in + Math::kPerStep - 1) / Math::kPerStep * Math::kStepWeights;
  const GroupScales* grouped = Math::kIsGrouped ? (const GroupScales*)scale : nullptr;
  const PanelGroups groups = grouped == nullptr ? PanelGroups{} : PanelGroups(*grouped);
  for (long p = first / kPanel; p < panels_of(last); p++) {
    const long begin = std::max(first, p * kPanel), end = std::min(last, (p + 1) * kPanel);
    std::fill(columns.begin(), columns.end(), 0.f);
    for (long n = begin; n < end; n++)
      for (long r = 0; r < rank; r++) columns[r * kPanel + n - p * kPanel] = scaling * b[(n - first) * rank + r];
    Panel<Math> panel = {(const typename Math::Weight*)panels + p * panel_size, zero(), {}, 1};
    if (grouped != nullptr) panel.groups = groups.from(p, 0), panel.group_size = grouped->size;
    else if (scale != nullptr) panel.scale = load_first((const float*)scale + p * kPanel, out - p * kPanel);
    float found[kPanel];
    store(found, squares(panel, in, a_t.data(), columns.data(), rank));
    for (long n = begin; n < end; n++) norms[n - first] = std::sqrt(found[n - p * kPanel]);
  }
}

}  // namespace
}  // namespace loraplex

using namespace loraplex;

// norms [last - first]; a [rank, in] and b [last - first, rank] fp32, row-major; scale: as loraplex_linear has it. On
// the calling thread: it is for those beside the steps.
LORAPLEX_API void loraplex_row_norms(int32_t format, const void* panels, const void* scale, int64_t out, int64_t in,
                                     int64_t first, int64_t last, const float* a, const float* b, int64_t rank,
                                     float scaling, float* norms) {
  switch (format) {
    case kF32: return row_norms<F32>(panels, scale, out, in, first, last, a, b, rank, scaling, norms);
    case kF16: return row_norms<F16>(panels, scale, out, in, first, last, a, b, rank, scaling, norms);
    case kBF16: return row_norms<BF16>(panels, scale, out, in, first, last, a, b, rank, scaling, norms);
    case kInt8: return row_norms<Int8>(panels, scale, out, in, first, last, a, b, rank, scaling, norms);
    case kInt4: return row_norms<Int4Groups>(panels, scale, out, in, first, last, a, b, rank, scaling, norms);
    case kInt8Groups: return row_norms<Int8Groups>(panels, scale, out, in, first, last, a, b, rank, scaling, norms);
  }
}
