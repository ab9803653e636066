// How one adapter's weights for one (fused) linear lie in memory: its packed block.
//
//   A     of all slices side by side, in the order of the slices: they share x. Column c is one row of some slice's A.
//   then for each slice B, its columns being the slice's output columns, then in fp32 its bias [out], its gain [out]
//   and its input gain [in] (what of these it has)
//
// A and B are matrices [depth][width] (A: in x the sum of the ranks, B: rank x out) in panels of at most kLoraPanel
// columns, each panel [depth][columns of this panel]. The width is rounded up to 8 with zeros, so that ranks below 16
// waste no memory traffic; the last vector of such a panel reads on into the next row of it, and what comes of those
// columns is dropped. Behind the last row there is room for that. Parts begin on multiples of 64 bytes; a gap is zero.
//
// A panel is as wide as a tile with few rows of activations: a decode step reads a part, and so the block, as one
// sequential stream. (Panels of one vector, several at a time, are many short streams in B: 1.3-1.6 times slower.
// Panels of twelve vectors are read in bursts, between which a tile adds to y: 1.2 times slower.)
#pragma once
#include <algorithm>

#include "panels.h"

namespace loraplex {

constexpr long kLoraVectors = kAccumulators < 4 ? kAccumulators : 4;
constexpr long kLoraPanel = kPanel * kLoraVectors;
constexpr long kPartAlignment = 64;

constexpr long ceil_div(long n, long by) { return (n + by - 1) / by; }
constexpr long round_up(long n, long multiple) { return ceil_div(n, multiple) * multiple; }
constexpr long part_width(long columns) { return round_up(columns, 8); }
constexpr long vectors_of(long columns) { return ceil_div(columns, kPanel); }

// Columns of the panel that begins at column `first` of a part of this width.
constexpr long panel_width(long first, long width) { return std::min(kLoraPanel, width - first); }

constexpr long part_bytes(long depth, long columns, long element_size) {
  const long width = part_width(columns), overread = width % kPanel;
  return round_up((depth * width + overread) * element_size, kPartAlignment);
}

// bf16 in plain order: panels of linears interleave their columns, which 8 columns at the end of a part do not allow.
struct PlainBF16 : FloatChain {
  using Weight = uint16_t;
  static Vec16 weights(const uint16_t* step) { return load_bf16(step); }
};

}  // namespace loraplex
