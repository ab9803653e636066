// The two inner loops of attention: scores = q K^T and out += weights V, for a tile of rows, all sums in registers.
#pragma once
#include "attention.h"
#include "tile.h"

namespace loraplex {

constexpr long kBlock = 64;               // keys that go through the softmax together, from position 0 on
constexpr long kGroups = kBlock / kGroup;
constexpr int kTileRows = kAccumulators < 6 ? kAccumulators : 6;

// Vectors side by side that go with so many rows: a power of two, of which four groups and any panels are made.
constexpr int tile_width(int rows) { return kAccumulators / rows >= 4 ? 4 : kAccumulators / rows >= 2 ? 2 : 1; }

// f(constant rows) for rows in 1..kTileRows.
template <class F>
inline void with_tile_rows(long rows, F f) {
  with_constant(rows, [&](auto n) {
    if constexpr (n() <= kTileRows) f(n);
  });
}

// f(constant width, first) over [0, count) in powers of two, the largest first.
template <int WIDTH, class F>
inline void in_widths(long count, F f) {
  long first = 0;
  for (; count - first >= WIDTH; first += WIDTH) f(std::integral_constant<int, WIDTH>(), first);
  if constexpr (WIDTH > 2)
    if (count - first >= 2) f(std::integral_constant<int, 2>(), first), first += 2;
  if constexpr (WIDTH > 1)
    if (count > first) f(std::integral_constant<int, 1>(), first);
}

// sum[m][p] += x[m] * the first or second vector of the step at(p).
template <class Kv, int WHICH, int ROWS, int WIDTH, class At>
inline __attribute__((always_inline)) void multiply_add(Vec16 (&sum)[ROWS][WIDTH], const float* x, long x_stride,
                                                        At at) {
  if constexpr (kAccumulators >= 24) {
    Vec16 held[WIDTH];
#pragma GCC unroll 4
    for (int p = 0; p < WIDTH; p++) held[p] = Kv::template load<WHICH>(at(p));
#pragma GCC unroll 6
    for (int m = 0; m < ROWS; m++) {
      const Vec16 xm = broadcast(x + m * x_stride);
#pragma GCC unroll 4
      for (int p = 0; p < WIDTH; p++) sum[m][p] = fma(xm, held[p], sum[m][p]);
    }
  } else {
    // One step at a time, its broadcasts loaded again (asm: x may have changed): kept, they would take sums' registers.
#pragma GCC unroll 4
    for (int p = 0; p < WIDTH; p++) {
      const Vec16 w = Kv::template load<WHICH>(at(p));
      asm("" : "+r"(x));
#pragma GCC unroll 6
      for (int m = 0; m < ROWS; m++) sum[m][p] = fma(broadcast(x + m * x_stride), w, sum[m][p]);
    }
  }
}

// scores[m][16 g + i] = the chain over d of q[m][d] * key i of group g. `next` are groups that are needed soon.
// noinline: inlined into its caller, GCC 12 keeps the sums on the stack. After a change look at the disassembly.
template <class Kv, int ROWS, int GROUPS>
__attribute__((noinline)) void score_tile(const float* q, long head_dim, const typename Kv::Element* const* groups,
                                          const typename Kv::Element* const* next, float* scores) {
  Vec16 sum[ROWS][GROUPS];
#pragma GCC unroll 6
  for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) sum[m][g] = zero();
  const typename Kv::Element *keys[GROUPS], *ahead[GROUPS];
#pragma GCC unroll 4
  for (int g = 0; g < GROUPS; g++) keys[g] = groups[g], ahead[g] = next[g];
  const long end = head_dim / 2 * kStep;
  for (long at = 0; at < end; at += kStep) {
    auto step = [&](int g) { return keys[g] + at; };
    multiply_add<Kv, 0>(sum, q, head_dim, step);
    multiply_add<Kv, 1>(sum, q + 1, head_dim, step);
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) prefetch_step<Kv>(ahead[g] + at);
    q += 2;
  }
#pragma GCC unroll 6
  for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) store(scores + m * kBlock + 16 * g, sum[m][g]);
}

// out[m][16 p + i] = out * factor[m], then the chain over the block's first `keys` keys of weights[m][key] * value; a
// key behind them is not touched. `groups` and `next` point to this tile's first panel.
template <class Kv, int ROWS, int PANELS>
__attribute__((noinline)) void value_tile(const float* weights, long keys, const typename Kv::Element* const* groups,
                                          const typename Kv::Element* const* next, const float* factor, long head_dim,
                                          float* out) {
  Vec16 sum[ROWS][PANELS];
#pragma GCC unroll 6
  for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++) sum[m][p] = mul(load(out + m * head_dim + 16 * p), broadcast(factor + m));
  const long row = head_dim / 16 * kStep;
  for (; keys > 0; keys -= kGroup, groups++, next++) {
    const typename Kv::Element *values = *groups, *ahead = *next;
    auto step = [&](int p) { return values + p * kStep; };
    const long pairs = (keys < kGroup ? keys : kGroup) / 2;
#pragma GCC unroll 1
    for (long i = 0; i < pairs; i++, values += row, ahead += row, weights += 2) {
      multiply_add<Kv, 0>(sum, weights, kBlock, step);
      multiply_add<Kv, 1>(sum, weights + 1, kBlock, step);
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; p++) prefetch_step<Kv>(ahead + p * kStep);
    }
    // The last key's partner in its step lies past the context, where anything may be.
    if (keys < kGroup && keys % 2 != 0) multiply_add<Kv, 0>(sum, weights, kBlock, step);
  }
#pragma GCC unroll 6
  for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++) store(out + m * head_dim + 16 * p, sum[m][p]);
}

}  // namespace loraplex
