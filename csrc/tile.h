// The inner loop of every matrix product: a tile of ROWS rows x PANELS panels, all sums in registers.
#pragma once
#include <type_traits>

#include "panels.h"

namespace loraplex {

// Rows of a tile: as many as leave room for a weight and an input beside one panel's sums (two, if registers allow).
constexpr int kMaxRows = kAccumulators <= 6 ? kAccumulators : kAccumulators / 2;
constexpr int kMaxPanels = 8;

// Panels that go together with so many rows. With few rows the independent chains (an FMA takes 4 cycles and two start
// in each) come from several panels at once, never from a split of k; several streams from memory are also faster.
constexpr int max_panels(int rows) { return kAccumulators / rows < kMaxPanels ? kAccumulators / rows : kMaxPanels; }

// f(constant n) for n in 1..12.
template <class F>
inline void with_constant(long n, F f) {
  switch (n) {
#define LORAPLEX_CASE(n) \
  case n:                \
    return f(std::integral_constant<int, n>());
    LORAPLEX_CASE(1) LORAPLEX_CASE(2) LORAPLEX_CASE(3) LORAPLEX_CASE(4) LORAPLEX_CASE(5) LORAPLEX_CASE(6)
    LORAPLEX_CASE(7) LORAPLEX_CASE(8) LORAPLEX_CASE(9) LORAPLEX_CASE(10) LORAPLEX_CASE(11) LORAPLEX_CASE(12)
#undef LORAPLEX_CASE
  }
}

// What a tile prefetches while it computes: one address per panel and step, `step` bytes apart.
struct Ahead {
  const char* at;
  long step;         // 0: the same line again
};

// How often, and whether of a second stream.
enum class Prefetch {
  kEachStep,        // one address per panel and step
  kEveryOtherStep,  // one per panel and two steps, for many rows (4 % faster at 256 rows, 10 % slower at 16)
  kAside,           // one per panel and step, and a line of `aside`
};
constexpr long kAsideBytes = 64;

// Of rows of x for kAside, in elements: known here, it leaves registers for the second stream. Not a power of two: rows
// would share cache sets.
template <class Math>
constexpr long kAsideStride = Math::kMaxChunk * Math::kPerStep + 64 / sizeof(typename Math::Input);

// `steps` steps of the chains: y[m, 16 p ...] (+)= x[m] w[p]; `resume` goes on from what y holds. `columns` of y are
// real. noinline: inlined, GCC 12 keeps the sums on the stack (2 times slower). After a change look at the disassembly.
template <class Math, int ROWS, int PANELS, Prefetch kPrefetch>
__attribute__((noinline)) void tile(const typename Math::Input* x, long x_stride, const typename Math::Weight* w,
                                    long panel_size, long steps, float* y, long y_stride, long columns, bool resume,
                                    Ahead ahead, const char* aside) {
  typename Math::Sum sum[ROWS][PANELS];
#pragma GCC unroll 12
  for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 12
    for (int p = 0; p < PANELS; p++)
      sum[m][p] = Math::begin(y + m * y_stride + kPanel * p, columns - kPanel * p, resume);
  const char* prefetched = ahead.at;
  if constexpr (kPrefetch == Prefetch::kAside) x_stride = kAsideStride<Math>;
  const long panel_bytes = panel_size * sizeof(*w);
  // As few pointers as possible: there are 16 registers for addresses, and one in memory costs 8 %.
  constexpr long kUnroll = kPrefetch == Prefetch::kEveryOtherStep ? 2 : 1;
  for (long s = 0; s < steps; s++) {
    if (kUnroll == 1 || s % 2 == 0) {
#pragma GCC unroll 12
      for (int p = 0; p < PANELS; p++) prefetch_l2(prefetched + p * panel_bytes);
      if constexpr (kPrefetch == Prefetch::kAside) prefetch_l2(aside), aside += kAsideBytes;
      prefetched += ahead.step;
    }
    if constexpr (ROWS >= PANELS) {  // hold the smaller of the two sides in registers
      typename Math::Sum ws[PANELS];
#pragma GCC unroll 12
      for (int p = 0; p < PANELS; p++) ws[p] = Math::weights(w + p * panel_size);
#pragma GCC unroll 12
      for (int m = 0; m < ROWS; m++) {
        const auto xm = Math::input(x + m * x_stride);
#pragma GCC unroll 12
        for (int p = 0; p < PANELS; p++) Math::accumulate(sum[m][p], xm, ws[p]);
      }
    } else {
      typename Math::Sum xs[ROWS];
#pragma GCC unroll 12
      for (int m = 0; m < ROWS; m++) xs[m] = Math::input(x + m * x_stride);
#pragma GCC unroll 12
      for (int p = 0; p < PANELS; p++) {
        const auto wp = Math::weights(w + p * panel_size);
#pragma GCC unroll 12
        for (int m = 0; m < ROWS; m++) Math::accumulate(sum[m][p], xs[m], wp);
      }
    }
    x += Math::kPerStep;
    w += Math::kStepWeights;
  }
#pragma GCC unroll 12
  for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 12
    for (int p = 0; p < PANELS; p++) Math::end(y + m * y_stride + kPanel * p, columns - kPanel * p, resume, sum[m][p]);
}

}  // namespace loraplex
