// The inner loop of products with weights in groups: along k, each group of a column has a scale and a zero point.
//
//   y[t, n] = sum over groups g, in order, of  fma(integer[t, n, g] * x_scale[t, g], scale[n, g], y)
//   integer[t, n, g] = sum over k of g of x[t, k] (q[n, k] - zero[n, g])
//
// The sum of a group is of integers, and exact: 128 * 32767 * 31 < 2^31 for 4 bits and 128 * 32767 * 255 < 2^31 for 8.
// So bits depend neither on the tile nor on the chunk, which ends with a group.
#pragma once
#include "api.h"
#include "tile.h"

namespace loraplex {

// Of a row's groups: scale and, times -Math::kZero or -1, the sum of its integers; both [rows][stride].
struct RowGroups {
  const float* scale;
  const int32_t* sum;
  long stride;
};

// GroupScales, from some panel and group on.
struct PanelGroups {
  const char* scale = nullptr;
  const int8_t* zero = nullptr;
  long stride = 0;  // numbers of a panel
  bool is_f16 = false;

  PanelGroups() = default;
  PanelGroups(const GroupScales& all)
      : scale((const char*)all.scale), zero(all.zero), stride(all.count * kPanel), is_f16(all.format == kF16) {}
  long scale_bytes() const { return is_f16 ? 2 : 4; }
  Vec16 scales(long at) const {
    return is_f16 ? load_f16((const uint16_t*)scale + at) : load((const float*)scale + at);
  }
  PanelGroups from(long panel, long group) const {
    const long at = panel * stride + group * kPanel;
    PanelGroups moved = *this;
    moved.scale += at * scale_bytes();
    if (zero != nullptr) moved.zero += at;
    return moved;
  }
};

template <class Math, int PART, int ROWS, int PANELS>
__attribute__((always_inline)) inline void multiply_part(typename Math::Sum (&sum)[ROWS][PANELS],
                                                         const typename Math::Input* x,
                                                         const typename Math::Weight* w, long panel_size) {
  if constexpr (PART < Math::kParts) {
    x += PART * Math::kPartDepth;
    if constexpr (ROWS >= PANELS) {  // as in tile
      typename Math::Sum ws[PANELS];
#pragma GCC unroll 12
      for (int p = 0; p < PANELS; p++) ws[p] = Math::template weights<PART>(w + p * panel_size);
#pragma GCC unroll 12
      for (int m = 0; m < ROWS; m++) {
        const auto xm = Math::input(x + m * kAsideStride<Math>);
#pragma GCC unroll 12
        for (int p = 0; p < PANELS; p++) Math::accumulate(sum[m][p], xm, ws[p]);
      }
    } else {
      typename Math::Sum xs[ROWS];
#pragma GCC unroll 12
      for (int m = 0; m < ROWS; m++) xs[m] = Math::input(x + m * kAsideStride<Math>);
#pragma GCC unroll 12
      for (int p = 0; p < PANELS; p++) {
        const auto wp = Math::template weights<PART>(w + p * panel_size);
#pragma GCC unroll 12
        for (int m = 0; m < ROWS; m++) Math::accumulate(sum[m][p], xs[m], wp);
      }
    }
  }
}

// A tile over whole groups, as `tile`; x has rows of kAsideStride.
template <class Math, int ROWS, int PANELS, Prefetch kPrefetch>
__attribute__((noinline)) void group_tile(const typename Math::Input* x, RowGroups rows,
                                          const typename Math::Weight* w, long panel_size, PanelGroups panels,
                                          long steps, long steps_per_group, float* y, long y_stride, long columns,
                                          bool resume, Ahead ahead, const char* aside) {
  const char* prefetched = ahead.at;
  const long panel_bytes = panel_size * sizeof(*w);
  constexpr long kUnroll = kPrefetch == Prefetch::kEveryOtherStep ? 2 : 1;
  Vec16 total[ROWS][PANELS];  // in memory: registers are for sums
  for (int m = 0; m < ROWS; m++)
    for (int p = 0; p < PANELS; p++)
      total[m][p] = resume ? load_first(y + m * y_stride + kPanel * p, columns - kPanel * p) : zero();
  for (; steps > 0; steps -= steps_per_group) {
    typename Math::Sum sum[ROWS][PANELS];
    const bool is_shifted = panels.zero != nullptr;
#pragma GCC unroll 12
    for (int m = 0; m < ROWS; m++) {
      const Int16Sums begin = broadcast_sum(rows.sum + m * rows.stride);
#pragma GCC unroll 12
      for (int p = 0; p < PANELS; p++) sum[m][p] = begin;
    }
#pragma GCC unroll 12
    for (int p = 0; p < PANELS; p++) {
      prefetch_l2(panels.scale + (PANELS + p) * panels.stride * panels.scale_bytes());  // of the panels behind these
      if (!is_shifted) continue;
      const Int16Sums zeros = load_int8(panels.zero + p * panels.stride);
#pragma GCC unroll 12
      for (int m = 0; m < ROWS; m++) sum[m][p] = multiply(sum[m][p], zeros);
    }
    for (long s = 0, count = steps < steps_per_group ? steps : steps_per_group; s < count; s++) {
      if (kUnroll == 1 || s % 2 == 0) {
#pragma GCC unroll 12
        for (int p = 0; p < PANELS; p++) prefetch_l2(prefetched + p * panel_bytes);
        if constexpr (kPrefetch == Prefetch::kAside) prefetch_l2(aside), aside += kAsideBytes;
        prefetched += ahead.step;
      }
      multiply_part<Math, 0>(sum, x, w, panel_size);
      multiply_part<Math, 1>(sum, x, w, panel_size);
      multiply_part<Math, 2>(sum, x, w, panel_size);
      multiply_part<Math, 3>(sum, x, w, panel_size);
      x += Math::kPerStep;
      w += Math::kStepWeights;
    }
#pragma GCC unroll 12
    for (int p = 0; p < PANELS; p++) {
      const Vec16 scale = panels.scales(p * panels.stride);
#pragma GCC unroll 12
      for (int m = 0; m < ROWS; m++)
        total[m][p] = fma(mul(to_float(sum[m][p]), broadcast(rows.scale + m * rows.stride)), scale, total[m][p]);
    }
    rows.scale++, rows.sum++;
    panels = panels.from(0, 1);
  }
  for (int m = 0; m < ROWS; m++)
    for (int p = 0; p < PANELS; p++)
      store_first(y + m * y_stride + kPanel * p, total[m][p], columns - kPanel * p);
}

}  // namespace loraplex
