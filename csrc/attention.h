// How the keys and values of one head lie in a KV block.
//
// A KV block of one layer is [2][kv_heads][block_size * D] elements: keys, then values. What is inside a head is cut in
// steps of 32 elements, two vectors of 16, so that both products of attention read one stream of memory in order:
//   keys     [block_size / 16][D / 2] steps: two dimensions of 16 tokens
//   values   [block_size / 2][D / 16] steps: 16 dimensions of two tokens
// F32 and F16 have the 16 lanes of the first vector before those of the second. BF16 has them in turn, first and second
// in the halves of a 32-bit word, so that one shift and one mask widen a whole step.
#pragma once
#include "vec.h"

namespace loraplex {

constexpr long kGroup = 16;  // tokens of a key step
constexpr long kStep = 32;   // elements of a step
constexpr long kMaxHeadDim = 256;

// load<0> and load<1> give the first and the second vector of a step.
struct KvF32 {
  using Element = float;
  template <int WHICH>
  static Vec16 load(const float* step) { return loraplex::load(step + 16 * WHICH); }
  static void store16(float* p, Vec16 v) { store(p, v); }
  static constexpr long place(long lane, long which) { return lane + 16 * which; }
};
struct KvF16 {
  using Element = uint16_t;
  template <int WHICH>
  static Vec16 load(const uint16_t* step) { return load_f16(step + 16 * WHICH); }
  static void store16(uint16_t* p, Vec16 v) { store_f16(p, v); }
  static constexpr long place(long lane, long which) { return lane + 16 * which; }
};
struct KvBF16 {
  using Element = uint16_t;
  template <int WHICH>
  static Vec16 load(const uint16_t* step) { return load_bf16_in_turn<WHICH>(step); }
  static void store16(uint16_t* p, Vec16 v) { store_bf16(p, v); }
  static constexpr long place(long lane, long which) { return 2 * lane + which; }
};

template <class Kv>
inline void prefetch_step(const typename Kv::Element* step) {
  prefetch_l2(step);
  if constexpr (sizeof(*step) == 4) prefetch_l2(step + kStep / 2);
}

// Sixteen dimensions of the token at `offset` of its block, from `d` on, into the head's keys or values.
template <class Kv>
inline void store_key(typename Kv::Element* keys, long offset, long d, long head_dim, Vec16 v) {
  alignas(64) typename Kv::Element stored[16];
  Kv::store16(stored, v);
  typename Kv::Element* step = keys + (offset / kGroup * head_dim + d) / 2 * kStep;
  const long first = Kv::place(offset % kGroup, 0), second = Kv::place(offset % kGroup, 1);
#pragma GCC unroll 8
  for (long i = 0; i < 16; i += 2)
    step[i / 2 * kStep + first] = stored[i], step[i / 2 * kStep + second] = stored[i + 1];
}
template <class Kv>
inline void store_value(typename Kv::Element* values, long offset, long d, long head_dim, Vec16 v) {
  alignas(64) typename Kv::Element stored[16];
  Kv::store16(stored, v);
  typename Kv::Element* step = values + (offset / 2 * head_dim + d) / 16 * kStep + Kv::place(0, offset % 2);
#pragma GCC unroll 16
  for (long i = 0; i < 16; i++) step[Kv::place(i, 0)] = stored[i];
}

}  // namespace loraplex
