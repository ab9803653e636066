// The products of the LoRA delta: y (+)= scale * x W for W in the panels of lora_layout.h.
#pragma once
#include <algorithm>
#include <type_traits>

#include "gain.h"
#include "lora_layout.h"
#include "tile.h"

namespace loraplex {

// y[t, c] = sum over k of x[t, k] w[k, c], in a chain of fused multiply-adds from k = 0; with `adds`
// y[t, c] = fma(scale, that sum, y[t, c]).
template <class Math>
struct LoraProduct {
  const float* x;
  long x_stride, rows;
  const typename Math::Weight* w;  // the whole part
  long depth, width;
  float* y;  // for column 0 of the part; without `adds` it has room for whole vectors
  long y_stride, columns;
  bool adds;
  float scale;
  bool is_one_panel = false;  // w is [depth][width], however wide
};

// With gains y[t, c] = fma(scale * gain[c], that sum, (1 + weight (gain[c] - 1)) * y[t, c]). Products without them are
// code of their own, which has no registers for them.
struct NoGain {
  NoGain from(long) const { return {}; }
};
struct Gain {
  const float* at;
  float weight;
  Gain from(long column) const { return {at + column, weight}; }
};

constexpr int max_vectors(int rows) {
  return kAccumulators / rows < kLoraVectors ? kAccumulators / rows : (int)kLoraVectors;
}

constexpr long kLoraChunk = 512;           // steps of k that all rows go through together
constexpr long kSpan = 3 * kLoraVectors;   // vectors of columns that all rows go through together
constexpr long kGainAheadBytes = 1024;     // of gains, which are read more slowly than B
constexpr long kLoraAheadBytes = 4096;     // prefetch distance of a stream; hardware prefetchers stop at 4 KiB pages

// Steps [0, depth) of the chains of ROWS rows x VECTORS vectors, from vector `w` of a panel on. `resumes`: they go on
// from what y holds. noinline: inlined, GCC 12 keeps the sums on the stack (2 times slower): look at the disassembly.
template <class Math, int ROWS, int VECTORS, class Gains>
__attribute__((noinline)) void lora_tile(const float* x, long x_stride, const typename Math::Weight* w, long w_stride,
                                         long depth, float* y, long y_stride, long columns, bool resumes, bool adds,
                                         float scale, Gains gains) {
  constexpr bool kHasGain = std::is_same_v<Gains, Gain>;
  Vec16 sum[ROWS][VECTORS];
#pragma GCC unroll 12
  for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 12
    for (int v = 0; v < VECTORS; v++) sum[m][v] = resumes ? load(y + m * y_stride + kPanel * v) : zero();
  if (adds && ROWS > 4) {  // what the next tile but one adds to; a few rows are still in the cache
#pragma GCC unroll 12
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 12
      for (int v = 0; v < VECTORS; v++) prefetch(y + m * y_stride + kPanel * (v + 2 * VECTORS));
  }
  if constexpr (kHasGain) {
#pragma GCC unroll 12
    for (int v = 0; v < VECTORS; v++) prefetch((const char*)(gains.at + kPanel * v) + kGainAheadBytes);
  }
  for (long k = 0; k < depth; k++) {
#pragma GCC unroll 12
    for (int v = 0; v < VECTORS; v += 4 / sizeof(*w)) prefetch((const char*)(w + kPanel * v) + kLoraAheadBytes);
    if constexpr (ROWS >= VECTORS) {  // hold the smaller of the two sides in registers
      Vec16 ws[VECTORS];
#pragma GCC unroll 12
      for (int v = 0; v < VECTORS; v++) ws[v] = Math::weights(w + kPanel * v);
#pragma GCC unroll 12
      for (int m = 0; m < ROWS; m++) {
        const Vec16 xm = broadcast(x + m * x_stride);
#pragma GCC unroll 12
        for (int v = 0; v < VECTORS; v++) sum[m][v] = fma(xm, ws[v], sum[m][v]);
      }
    } else {
      Vec16 xs[ROWS];
#pragma GCC unroll 12
      for (int m = 0; m < ROWS; m++) xs[m] = broadcast(x + m * x_stride);
#pragma GCC unroll 12
      for (int v = 0; v < VECTORS; v++) {
        const Vec16 wv = Math::weights(w + kPanel * v);
#pragma GCC unroll 12
        for (int m = 0; m < ROWS; m++) sum[m][v] = fma(xs[m], wv, sum[m][v]);
      }
    }
    x++;
    w += w_stride;
  }
  const Vec16 scales = set1(scale);
  auto finish = [&](auto f) {
#pragma GCC unroll 12
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 12
      for (int v = 0; v < VECTORS; v++) f(y + m * y_stride + kPanel * v, columns - kPanel * v, sum[m][v]);
  };
  if constexpr (kHasGain) {
    auto finish_gained = [&](auto load_some, auto store_some) {
#pragma GCC unroll 12
      for (int v = 0; v < VECTORS; v++) {
        const long count = columns - kPanel * v;
        const Vec16 gain = load_some(gains.at + kPanel * v, count), factor = weighted_gain(gain, gains.weight);
        const Vec16 scaled = mul(scales, gain);
#pragma GCC unroll 12
        for (int m = 0; m < ROWS; m++) {
          float* to = y + m * y_stride + kPanel * v;
          store_some(to, fma(scaled, sum[m][v], mul(factor, load_some(to, count))), count);
        }
      }
    };
    if (columns >= kPanel * VECTORS)
      finish_gained([](const float* p, long) { return load(p); }, [](float* p, Vec16 v, long) { store(p, v); });
    else
      finish_gained([](const float* p, long count) { return count > 0 ? load_first(p, count) : zero(); },
                    [](float* p, Vec16 v, long count) { if (count > 0) store_first(p, v, count); });
    return;
  }
  if (!adds) finish([](float* to, long, Vec16 chain) { store(to, chain); });
  else if (columns >= kPanel * VECTORS)
    finish([&](float* to, long, Vec16 chain) { store(to, fma(scales, chain, load(to))); });
  else
    finish([&](float* to, long count, Vec16 chain) {
      if (count > 0) store_first(to, fma(scales, chain, load_first(to, count)), count);
    });
}

// Products of one row and one vector of columns each, of one depth, at the same time: one alone waits for its chain.
constexpr int kNarrow = kAccumulators < 4 ? kAccumulators : 4;
template <class Math>
__attribute__((noinline)) void run_narrow(const LoraProduct<Math> (&p)[kNarrow]) {
  const float* x[kNarrow];
  const typename Math::Weight* w[kNarrow];
  Vec16 sum[kNarrow];
  for (int i = 0; i < kNarrow; i++) x[i] = p[i].x, w[i] = p[i].w, sum[i] = zero();
  for (long k = 0; k < p[0].depth; k++)
#pragma GCC unroll 4
    for (int i = 0; i < kNarrow; i++) {
      prefetch((const char*)w[i] + kLoraAheadBytes / kNarrow);
      sum[i] = fma(broadcast(x[i] + k), Math::weights(w[i]), sum[i]);
      w[i] += p[i].width;
    }
  for (int i = 0; i < kNarrow; i++) store(p[i].y, sum[i]);
}

// Blocks of rows, of balanced sizes, for which rows x vectors take the fewest tiles: on AVX-512 16 = 6+5+5 with four
// vectors, 8+8 with three.
inline long row_blocks(long rows, long vectors) {
  long best = rows, best_tiles = rows * ceil_div(vectors, max_vectors(1));
  for (int of = 2; of <= kMaxRows; of++) {
    const long blocks = ceil_div(rows, of), tiles = blocks * ceil_div(vectors, max_vectors(of));
    if (tiles <= best_tiles) best = blocks, best_tiles = tiles;
  }
  return best;
}

// Vectors [begin, end) of all columns of a product, all its rows. gains: NoGain or a Gain of all columns.
template <class Math, class Gains = NoGain>
void run_product(const LoraProduct<Math>& p, long begin, long end, Gains gains = {}) {
  const long blocks = p.rows <= 1 ? p.rows : row_blocks(p.rows, std::min(kLoraVectors, end - begin));
  if (blocks == 0) return;
  const long limit = max_vectors(ceil_div(p.rows, blocks)), chunk = blocks > 1 && !p.adds ? kLoraChunk : p.depth;
  auto run_tile = [&](long t0, long t1, long k, long v, long count) {
    const long first = v / kLoraVectors * kLoraPanel, width = panel_width(first, p.width), column = v * kPanel;
    const long w_stride = p.is_one_panel ? p.width : width;
    const auto* w = p.is_one_panel ? p.w + k * p.width + column : p.w + first * p.depth + k * width + column - first;
    with_constant(t1 - t0, [&](auto rows) {
      with_constant(count, [&](auto vectors) {
        if constexpr (rows() <= kMaxRows && vectors() <= max_vectors(rows()))
          lora_tile<Math, rows(), vectors()>(p.x + t0 * p.x_stride + k, p.x_stride, w, w_stride,
                                             std::min(chunk, p.depth - k), p.y + t0 * p.y_stride + column, p.y_stride,
                                             p.columns - column, k > 0, p.adds, p.scale, gains.from(column));
      });
    });
  };
  for (long span = begin / kSpan * kSpan; span < end; span += kSpan)
    for (long k = 0; k < p.depth; k += chunk)
      for (long b = 0; b < blocks; b++) {
        const long last = std::min(span + kSpan, end);
        for (long v = std::max(span, begin), count; v < last; v += count) {  // balanced groups of vectors of one panel
          const long left = std::min(last, v / kLoraVectors * kLoraVectors + kLoraVectors) - v;
          count = ceil_div(left, ceil_div(left, limit));
          run_tile(p.rows * b / blocks, p.rows * (b + 1) / blocks, k, v, count);
        }
      }
}

}  // namespace loraplex
