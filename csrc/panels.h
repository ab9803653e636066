// How the weight of a linear lies in memory, and the arithmetic of one step over it.
//
// A weight [out, in] is cut into panels of 16 output columns: [ceil(out / 16)][in][16], the last one padded with zero
// columns. A step of a panel is what one row of Vec16 needs: 16 columns of one k. Formats:
//   F32, F16   the columns in order
//   BF16       the columns in the order 0, 8, 1, 9, ... (load_bf16_pairs)
//   Int8       W8A16: int8 weights, one scale per output column, [ceil(out / 16)][ceil(in / 2)][16][2]: a step is
//              16 columns of two k; activations int16 with one scale per row (quantize.h)
//   Int4Groups W4A16 in groups of 32, 64 or 128 k (group_tile.h): [ceil(out / 16)][ceil(in / 8)][16] words of 32 bits.
//              Bits 4 i of a word are number 2 i of eight k, and bits 16 + 4 i number 2 i + 1: a shift and a mask give
//              a pair
//   Int8Groups W8A16 in groups: [ceil(out / 16)][ceil(in / 4)][16][4], the four k in the order 0, 2, 1, 3
#pragma once
#include "vec.h"

namespace loraplex {

constexpr long kPanel = 16;

constexpr long panels_of(long columns) { return (columns + kPanel - 1) / kPanel; }

// A chain of fused multiply-adds over k. A chain that is cut goes on from the stored partial sum: cuts change no bit.
struct FloatChain {
  using Input = float;
  using Sum = Vec16;
  static constexpr bool kIsGrouped = false;
  static constexpr long kPerStep = 1;         // k in a step
  static constexpr long kStepWeights = kPanel;
  static constexpr long kMaxChunk = 1024;     // steps between two stores of the partial result: 64 KB of fp32 panel
  static constexpr bool kChunkIsExact = false;
  static Vec16 input(const float* x) { return broadcast(x); }
  static void accumulate(Vec16& sum, Vec16 x, Vec16 w) { sum = fma(x, w, sum); }
  static Vec16 begin(const float* y, long columns, bool resume) { return resume ? load_first(y, columns) : zero(); }
  static void end(float* y, long columns, bool, Vec16 sum) { store_first(y, sum, columns); }
};
struct F32 : FloatChain {
  using Weight = float;
  static Vec16 weights(const float* step) { return load(step); }
};
struct F16 : FloatChain {
  using Weight = uint16_t;
  static Vec16 weights(const uint16_t* step) { return load_f16(step); }
};
struct BF16 : FloatChain {
  using Weight = uint16_t;
  static Vec16 weights(const uint16_t* step) { return load_bf16_pairs(step); }
};

// Sums of integers are exact in any order; they turn into floats, and round, every 512 k, for any number of rows.
struct Int8 {
  using Input = int16_t;
  using Weight = int8_t;
  using Sum = Int16Sums;
  static constexpr bool kIsGrouped = false;
  static constexpr long kPerStep = 2;
  static constexpr long kStepWeights = 2 * kPanel;
  static constexpr long kMaxChunk = 256;      // 512 * 32767 * 127 < 2^31
  static constexpr bool kChunkIsExact = true;
  static Int16Sums weights(const int8_t* step) { return load_int8_pairs(step); }
  static Int16Sums input(const int16_t* x) { return broadcast_pair(x); }
  static void accumulate(Int16Sums& sum, const Int16Sums& x, const Int16Sums& w) { multiply_add(sum, x, w); }
  static Int16Sums begin(const float*, long, bool) { return zero_sums(); }
  static void end(float* y, long columns, bool resume, const Int16Sums& sum) {
    const Vec16 chunk = to_float(sum);
    store_first(y, resume ? add(load_first(y, columns), chunk) : chunk, columns);
  }
};

// A step is a cache line, which kParts pairs of k come out of.
struct Grouped {
  using Input = int16_t;
  using Sum = Int16Sums;
  static constexpr bool kIsGrouped = true;
  static constexpr bool kChunkIsExact = true;
  static constexpr long kStepWeights = kPanel;
  static constexpr long kChunkDepth = 1024;   // k: of whole groups
};
struct Int4Groups : Grouped {
  using Weight = uint32_t;
  static constexpr int32_t kZero = 8;         // where there are no zero points
  static constexpr long kPerStep = 8, kParts = 4, kMaxChunk = kChunkDepth / kPerStep;
  template <int PART>
  static Int16Sums weights(const uint32_t* step) {
    return load_nibble_pairs<PART>(step);
  }
};
struct Int8Groups : Grouped {
  using Weight = uint32_t;
  static constexpr int32_t kZero = 0;
  static constexpr long kPerStep = 4, kParts = 2, kMaxChunk = kChunkDepth / kPerStep;
  template <int PART>
  static Int16Sums weights(const uint32_t* step) {
    return load_byte_pairs<PART>(step);
  }
};

}  // namespace loraplex
