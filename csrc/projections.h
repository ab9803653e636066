// Projections: one pair of A and B that adapters share, each with two vectors of its own (VeRA).
//
//   y[t, slice] += weight * scale * out_scale * ((rank_scale * (x[t] A^T)) B^T)
//
// A [in][rank], its width rounded up to 8 with zeros and a vector of them behind the last row; B in panels of
// kLoraPanel columns [rank][kLoraPanel], the last one filled up with zeros. So a linear with fewer inputs or outputs
// than the widest one reads the beginning of either. At `scales`: rank_scale [rank], out_scale [out] on the next
// multiple of 64 bytes.
//
// Rows side by side that share their projections are one product, whatever their slots: A and B are read once for
// all of them, and for all slices of a linear x A^T is the same.
//
// BATCH INVARIANCE. As in lora.cpp: a chain over k, one over the rank, then y = fma(weight * scale * out_scale, d, y).
#pragma once
#include <vector>

#include "lora.h"
#include "lora_tile.h"

namespace loraplex {

// What one row's adapter has for a slice; null: no such part. bias: of a weight of the adapter's own.
struct SharedRow {
  const float *rank_scale, *out_scale, *bias;
  float factor, weight;
};

inline long shared_slice_of(const LoraTable& table, long slot) {  // the first one, or -1
  for (long slice = 0; slice < table.num_slices; slice++)
    if (table.entry(slot, slice).scales != 0) return slice;
  return -1;
}

inline const float* out_scale_of(const float* scales, long rank) {
  return scales + round_up(rank, kPartAlignment / (long)sizeof(float));
}

// Rows [t0, t1) of a work of projections, for one slice; whether any adapter has that slice.
inline bool gather_rows(const LoraDelta& delta, const LoraWork& w, long slice, long t0, long t1, SharedRow* rows) {
  const LoraSegments& segments = delta.segments;
  bool has_any = false;
  for (long i = w.segment; i < w.segment + w.segments; i++) {
    const LoraEntry& entry = delta.table.entry(segments.slot[i], slice);
    const auto* scales = (const float*)entry.scales;
    const long begin = std::max(segments.start[i] - w.row, t0), end = std::min(segments.end[i] - w.row, t1);
    const auto* bias = (const float*)entry.bias;
    const float weight = segments.weight[i];
    for (long t = begin; t < end; t++)
      rows[t - t0] = {scales, scales == nullptr ? nullptr : out_scale_of(scales, w.a_columns), bias,
                      weight * entry.scale, weight};
    has_any |= (scales != nullptr || bias != nullptr) && begin < end;
  }
  return has_any;
}

// y += ... of rows [t0, t1) and vectors [v0, v1) of a slice.
template <class Math>
void expand_shared(const LoraDelta& delta, const LoraWork& w, long slice, long t0, long t1, long v0, long v1) {
  constexpr long kRows = 16, kWidth = (kSpan + kLoraVectors) * kPanel;
  const long rank = w.a_columns, columns = delta.table.out[slice];
  static thread_local std::vector<float> inner;
  inner.resize(kRows * rank);
  float product[kRows * kWidth];
  for (long first = t0; first < t1; first += kRows) {
    const long rows = std::min(kRows, t1 - first);
    SharedRow scales[kRows];
    if (!gather_rows(delta, w, slice, first, first + rows, scales)) continue;
    for (long t = 0; t < rows; t++) {
      const float* h = w.h + (first + t) * w.h_stride;
      float* scaled = inner.data() + t * rank;
      if (scales[t].rank_scale == nullptr) std::fill(scaled, scaled + rank, 0.f);
      else for (long r = 0; r < rank; r++) scaled[r] = scales[t].rank_scale[r] * h[r];
    }
    for (long v = v0; v < v1; v += kSpan) {
      const long last = std::min(v + kSpan, v1), panel = v / kLoraVectors * kLoraVectors, begin = panel * kPanel;
      const LoraProduct<Math> through_b = {.x = inner.data(), .x_stride = rank, .rows = rows,
                                           .w = (const typename Math::Weight*)w.b + begin * rank, .depth = rank,
                                           .width = round_up(columns - begin, kLoraPanel), .y = product,
                                           .y_stride = kWidth, .columns = columns - begin, .adds = false, .scale = 0};
      run_product(through_b, v - panel, last - panel);
      for (long t = 0; t < rows; t++) {
        const auto& [rank_scale, out_scale, bias, factor, weight] = scales[t];
        float* y = delta.y + (w.row + first + t) * delta.y_stride + delta.table.out_offset[slice];
        const long end = std::min(last * kPanel, columns);
        for (long n = v * kPanel; out_scale != nullptr && n < end; n += kPanel) {
          const Vec16 scale = mul(set1(factor), load_first(out_scale + n, columns - n));
          const Vec16 sum = fma(scale, load(product + t * kWidth + n - begin), load_first(y + n, columns - n));
          store_first(y + n, sum, columns - n);
        }
        for (long n = v * kPanel; bias != nullptr && n < end; n += kPanel)
          store_first(y + n, fma(set1(weight), load_first(bias + n, columns - n), load_first(y + n, columns - n)),
                      columns - n);
      }
    }
  }
}

}  // namespace loraplex
