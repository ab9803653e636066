// How the keys and values of one head lie in a KV block.
//
// A KV block of one layer is [2][kv_heads][block_size / 16] groups of 16 tokens: keys, then values. A group is cut in
// steps of 32 elements, two vectors of 16, so that both products of attention read one stream of memory in order:
//   keys     [D / 2] steps: two dimensions of 16 tokens
//   values   [8][D / 16] steps: 16 dimensions of two tokens
// F32, F16 and int8 have the 16 lanes of the first vector before those of the second. BF16 has them in turn, first and
// second in the halves of a 32-bit word, so that one shift and one mask widen a whole step. Behind the steps a group of
// int8 has the scales of its 16 tokens, float32.
#pragma once
#include "quantize.h"
#include "vec.h"

namespace loraplex {

constexpr long kGroup = 16;  // tokens of a key step
constexpr long kStep = 32;   // elements of a step
constexpr long kMaxHeadDim = 256;

// load<0> and load<1> give the first and the second vector of a step. kScaleElements: that a token's scale takes.
struct KvF32 {
  using Element = float;
  static constexpr long kScaleElements = 0;
  template <int WHICH>
  static Vec16 load(const float* step) { return loraplex::load(step + 16 * WHICH); }
  static void store16(float* p, Vec16 v) { store(p, v); }
  static constexpr long place(long lane, long which) { return lane + 16 * which; }
};
struct KvF16 {
  using Element = uint16_t;
  static constexpr long kScaleElements = 0;
  template <int WHICH>
  static Vec16 load(const uint16_t* step) { return load_f16(step + 16 * WHICH); }
  static void store16(uint16_t* p, Vec16 v) { store_f16(p, v); }
  static constexpr long place(long lane, long which) { return lane + 16 * which; }
};
struct KvBF16 {
  using Element = uint16_t;
  static constexpr long kScaleElements = 0;
  template <int WHICH>
  static Vec16 load(const uint16_t* step) { return load_bf16_in_turn<WHICH>(step); }
  static void store16(uint16_t* p, Vec16 v) { store_bf16(p, v); }
  static constexpr long place(long lane, long which) { return 2 * lane + which; }
};
struct KvInt8 {
  using Element = int8_t;
  static constexpr long kScaleElements = sizeof(float);
  template <int WHICH>
  static Vec16 load(const int8_t* step) { return to_float(load_int8(step + 16 * WHICH)); }
  static void store16(int8_t* p, Vec16 v) {
    alignas(32) int16_t wide[16];
    store_int16(wide, v);
    for (int i = 0; i < 16; i++) p[i] = (int8_t)wide[i];
  }
  static constexpr long place(long lane, long which) { return lane + 16 * which; }
};

// Elements of a group of a head's keys or values.
template <class Kv>
constexpr long group_size(long head_dim) {
  return kGroup * (head_dim + Kv::kScaleElements);
}
// The scales of a group's tokens.
inline float* scales_of(int8_t* group, long head_dim) { return (float*)(group + kGroup * head_dim); }
inline const float* scales_of(const int8_t* group, long head_dim) { return (const float*)(group + kGroup * head_dim); }

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
  typename Kv::Element* step = keys + offset / kGroup * group_size<Kv>(head_dim) + d / 2 * kStep;
  const long first = Kv::place(offset % kGroup, 0), second = Kv::place(offset % kGroup, 1);
#pragma GCC unroll 8
  for (long i = 0; i < 16; i += 2)
    step[i / 2 * kStep + first] = stored[i], step[i / 2 * kStep + second] = stored[i + 1];
}
template <class Kv>
inline void store_value(typename Kv::Element* values, long offset, long d, long head_dim, Vec16 v) {
  alignas(64) typename Kv::Element stored[16];
  Kv::store16(stored, v);
  typename Kv::Element* step = values + offset / kGroup * group_size<Kv>(head_dim) +
                               (offset % kGroup / 2 * head_dim + d) / 16 * kStep + Kv::place(0, offset % 2);
#pragma GCC unroll 16
  for (long i = 0; i < 16; i++) step[Kv::place(i, 0)] = stored[i];
}

}  // namespace loraplex
