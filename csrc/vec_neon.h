// Vec16 as four registers of four: AArch64, with the dot products of bytes where -march has them. Included by vec.h.
#pragma once
#include <arm_neon.h>

#include <cstring>

namespace loraplex {

#if defined(__ARM_FEATURE_DOTPROD)
constexpr const char* kIsa = "neon_dotprod";
#else
constexpr const char* kIsa = "neon";
#endif
constexpr int kAccumulators = 6;  // Vec16 that a register tile may hold: 24 of the 32 registers
constexpr bool kHasFma = true;

struct Vec16 {
  float32x4_t part[4];
};

template <class F>
inline Vec16 each4(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}

inline Vec16 set1(float v) {
  const float32x4_t all = vdupq_n_f32(v);
  return {{all, all, all, all}};
}
inline Vec16 zero() { return set1(0.f); }
inline Vec16 broadcast(const float* p) {
  const float32x4_t all = vld1q_dup_f32(p);
  return {{all, all, all, all}};
}
inline Vec16 load(const float* p) {
  return each4([=](int i) { return vld1q_f32(p + 4 * i); });
}
inline void store(float* p, Vec16 v) {
  for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, v.part[i]);
}

inline float32x4_t load_first4(const float* p, long count) {
  if (count >= 4) return vld1q_f32(p);
  float32x4_t v = vdupq_n_f32(0.f);
  if (count > 0) v = vld1q_lane_f32(p, v, 0);
  if (count > 1) v = vld1q_lane_f32(p + 1, v, 1);
  if (count > 2) v = vld1q_lane_f32(p + 2, v, 2);
  return v;
}
inline Vec16 load_first(const float* p, long count) {  // lanes from `count` on are 0, and their memory is not touched
  if (count >= 16) return load(p);
  return each4([=](int i) { return load_first4(p + 4 * i, count - 4 * i); });
}
inline void store_first4(float* p, float32x4_t v, long count) {
  if (count >= 4) return vst1q_f32(p, v);
  if (count > 0) vst1q_lane_f32(p, v, 0);
  if (count > 1) vst1q_lane_f32(p + 1, v, 1);
  if (count > 2) vst1q_lane_f32(p + 2, v, 2);
}
inline void store_first(float* p, Vec16 v, long count) {
  if (count >= 16) return store(p, v);
  for (int i = 0; i < 4; i++) store_first4(p + 4 * i, v.part[i], count - 4 * i);
}

inline Vec16 fma(Vec16 a, Vec16 b, Vec16 c) {
  return each4([&](int i) { return vfmaq_f32(c.part[i], a.part[i], b.part[i]); });
}
inline Vec16 add(Vec16 a, Vec16 b) {
  return each4([&](int i) { return vaddq_f32(a.part[i], b.part[i]); });
}
inline Vec16 sub(Vec16 a, Vec16 b) {
  return each4([&](int i) { return vsubq_f32(a.part[i], b.part[i]); });
}
inline Vec16 mul(Vec16 a, Vec16 b) {
  return each4([&](int i) { return vmulq_f32(a.part[i], b.part[i]); });
}
inline Vec16 div(Vec16 a, Vec16 b) {
  return each4([&](int i) { return vdivq_f32(a.part[i], b.part[i]); });
}
inline Vec16 select_less(Vec16 a, Vec16 b, Vec16 yes, Vec16 no) {  // a < b ? yes : no
  return each4([&](int i) { return vbslq_f32(vcltq_f32(a.part[i], b.part[i]), yes.part[i], no.part[i]); });
}
// b where one is NaN or both are zeros, as on x86; FMAX would give NaN, and +0.
inline float32x4_t max4(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline Vec16 max(Vec16 a, Vec16 b) {
  return each4([&](int i) { return max4(a.part[i], b.part[i]); });
}
inline Vec16 min(Vec16 a, Vec16 b) { return select_less(a, b, a, b); }
inline Vec16 abs(Vec16 a) {
  return each4([&](int i) { return vabsq_f32(a.part[i]); });
}
inline Vec16 round_even(Vec16 a) {
  return each4([&](int i) { return vrndnq_f32(a.part[i]); });
}
inline Vec16 pow2(Vec16 n) {  // n whole, in -126..127
  return each4([&](int i) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.part[i]), vdupq_n_s32(127)), 23));
  });
}

inline uint32_t less_lanes(Vec16 a, Vec16 b) {  // bit i: a[i] < b[i]
  const uint32x4_t bits = {1, 2, 4, 8};
  uint32x4_t found = vdupq_n_u32(0);
  for (int i = 0; i < 4; i++)
    found = vorrq_u32(found, vandq_u32(vcltq_f32(a.part[i], b.part[i]), vshlq_u32(bits, vdupq_n_s32(4 * i))));
  return vaddvq_u32(found);
}

// Pairs (i, i+8), then (i, i+4), (i, i+2), (i, i+1): the same tree in every file.
inline float sum_lanes(Vec16 v) {
  const float32x4_t four = vaddq_f32(vaddq_f32(v.part[0], v.part[2]), vaddq_f32(v.part[1], v.part[3]));
  return vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)));
}
inline float max_lanes(Vec16 v) {
  const float32x4_t four = max4(max4(v.part[0], v.part[2]), max4(v.part[1], v.part[3]));
  const float32x4_t two = max4(four, vextq_f32(four, four, 2));
  return vgetq_lane_f32(max4(two, vdupq_laneq_f32(two, 1)), 0);
}

// ---- 16 sums of float64
struct Wide16 {
  float64x2_t part[8];
};
inline Wide16 wide_zero() {
  Wide16 out;
  for (int i = 0; i < 8; i++) out.part[i] = vdupq_n_f64(0);
  return out;
}
inline void accumulate(Wide16& sum, Vec16 v) {
  for (int i = 0; i < 4; i++) {
    sum.part[2 * i] = vaddq_f64(sum.part[2 * i], vcvt_f64_f32(vget_low_f32(v.part[i])));
    sum.part[2 * i + 1] = vaddq_f64(sum.part[2 * i + 1], vcvt_high_f64_f32(v.part[i]));
  }
}
inline double sum_lanes(const Wide16& v) {  // the tree of the floats
  const auto eight = [&](int i) { return vaddq_f64(v.part[i], v.part[i + 4]); };
  const auto four = [&](int i) { return vaddq_f64(eight(i), eight(i + 2)); };
  return vpaddd_f64(vaddq_f64(four(0), four(1)));
}

// ---- 16-bit floats, as words: no arithmetic of them
inline float32x4_t bf16_to_f32(uint16x4_t v) { return vreinterpretq_f32_u32(vshll_n_u16(v, 16)); }
inline Vec16 load_f16(const uint16_t* p) {
  return each4([=](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}
inline Vec16 load_bf16(const uint16_t* p) {
  return each4([=](int i) { return bf16_to_f32(vld1_u16(p + 4 * i)); });
}
// The low (WHICH = 0) or the high halves of the four words at p.
template <int WHICH>
inline float32x4_t bf16_half(const uint16_t* p) {
  const uint32x4_t both = vreinterpretq_u32_u16(vld1q_u16(p));
  return vreinterpretq_f32_u32(WHICH == 0 ? vshlq_n_u32(both, 16) : vandq_u32(both, vdupq_n_u32(0xFFFF0000)));
}
// Columns in the order 0, 8, 1, 9, ...
inline Vec16 load_bf16_pairs(const uint16_t* p) {
  return {{bf16_half<0>(p), bf16_half<0>(p + 8), bf16_half<1>(p), bf16_half<1>(p + 8)}};
}
// Vector 0 or 1 of two that lie lane by lane in turn: 0.0, 1.0, 0.1, 1.1, ...
template <int WHICH>
inline Vec16 load_bf16_in_turn(const uint16_t* p) {
  return each4([=](int i) { return bf16_half<WHICH>(p + 8 * i); });
}
inline void store_f16(uint16_t* p, Vec16 v) {
  for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(v.part[i])));
}
inline uint16x4_t bf16_of(float32x4_t v) {  // round to nearest even; NaN stays NaN
  const uint32x4_t bits = vreinterpretq_u32_f32(v), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet), 16);
}
inline void store_bf16(uint16_t* p, Vec16 v) {
  for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, bf16_of(v.part[i]));
}

// ---- 16 sums of int32: acc[i] += a[2i] b[2i] + a[2i+1] b[2i+1], int16 x int16
//
// Pairs as operands are kept apart, since SMLAL multiplies lane by lane: parts 0 and 1 are the first of each of 16
// pairs, 2 and 3 the second, as int16.
struct Int16Sums {
  int32x4_t part[4];
};
inline Int16Sums zero_sums() {
  const int32x4_t all = vdupq_n_s32(0);
  return {{all, all, all, all}};
}
inline Int16Sums pairs_of(int16x8_t first0, int16x8_t first1, int16x8_t second0, int16x8_t second1) {
  return {{vreinterpretq_s32_s16(first0), vreinterpretq_s32_s16(first1), vreinterpretq_s32_s16(second0),
           vreinterpretq_s32_s16(second1)}};
}
inline Int16Sums broadcast_pair(const int16_t* p) {
  const int16x8_t first = vld1q_dup_s16(p), second = vld1q_dup_s16(p + 1);
  return pairs_of(first, first, second, second);
}
inline Int16Sums load_int8_pairs(const int8_t* p) {  // 32 int8, widened to 16 pairs of int16
  const int8x16_t low = vld1q_s8(p), high = vld1q_s8(p + 16);
  const int8x16_t first = vuzp1q_s8(low, high), second = vuzp2q_s8(low, high);
  return pairs_of(vmovl_s8(vget_low_s8(first)), vmovl_high_s8(first), vmovl_s8(vget_low_s8(second)),
                  vmovl_high_s8(second));
}
// Of 16 words: f of their low halves as the first of pairs, f of their high halves as the second.
template <class F>
inline Int16Sums pairs_of_words(const uint32_t* p, F f) {
  const auto halves = [=](int i) { return vreinterpretq_u16_u32(vld1q_u32(p + 4 * i)); };
  const uint16x8_t a = halves(0), b = halves(1), c = halves(2), d = halves(3);
  return pairs_of(f(vuzp1q_u16(a, b)), f(vuzp1q_u16(c, d)), f(vuzp2q_u16(a, b)), f(vuzp2q_u16(c, d)));
}
// Of 16 words: bits 4 PART and 16 + 4 PART as pairs of 0..15.
template <int PART>
inline Int16Sums load_nibble_pairs(const uint32_t* p) {
  return pairs_of_words(p, [](uint16x8_t halves) {
    const uint16x8_t moved = vshlq_u16(halves, vdupq_n_s16(-4 * PART));
    return vreinterpretq_s16_u16(PART == 3 ? moved : vandq_u16(moved, vdupq_n_u16(15)));
  });
}
// Of 16 words of four int8: those in bytes PART and 2 + PART as pairs.
template <int PART>
inline Int16Sums load_byte_pairs(const uint32_t* p) {
  return pairs_of_words(p, [](uint16x8_t halves) {
    return vshrq_n_s16(vreinterpretq_s16_u16(PART == 0 ? vshlq_n_u16(halves, 8) : halves), 8);
  });
}
// Of 16 words: the low or the high halves of their bytes, as four numbers of 0..15; and four of int8 for all lanes.
template <int PART>
inline Int16Sums load_nibble_bytes(const uint32_t* p) {
  const auto part = [=](int i) {
    const uint8x16_t bytes = vreinterpretq_u8_u32(vld1q_u32(p + 4 * i));
    return vreinterpretq_s32_u8(PART == 0 ? vandq_u8(bytes, vdupq_n_u8(15)) : vshrq_n_u8(bytes, 4));
  };
  return {{part(0), part(1), part(2), part(3)}};
}
inline Int16Sums broadcast_four(const int8_t* p) {
  int32_t four;
  memcpy(&four, p, 4);
  const int32x4_t all = vdupq_n_s32(four);
  return {{all, all, all, all}};
}
// acc[i] += the sum of four products, x int8 and w 0..15: without dot products, two of them are in 16 bits.
inline void multiply_add_bytes(Int16Sums& acc, const Int16Sums& x, const Int16Sums& w) {
  for (int i = 0; i < 4; i++) {
    const int8x16_t a = vreinterpretq_s8_s32(x.part[i]), b = vreinterpretq_s8_s32(w.part[i]);
#if defined(__ARM_FEATURE_DOTPROD)
    acc.part[i] = vdotq_s32(acc.part[i], a, b);
#else
    const int16x8_t twos = vpaddq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b));
    acc.part[i] = vpadalq_s16(acc.part[i], twos);
#endif
  }
}
// Sums themselves: one for all lanes, 16 of int8, and their products.
inline Int16Sums broadcast_sum(const int32_t* p) {
  const int32x4_t all = vld1q_dup_s32(p);
  return {{all, all, all, all}};
}
inline Int16Sums load_int8(const int8_t* p) {
  const int8x16_t bytes = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
  return {{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)}};
}
inline Int16Sums multiply(const Int16Sums& a, const Int16Sums& b) {
  const auto part = [&](int i) { return vmulq_s32(a.part[i], b.part[i]); };
  return {{part(0), part(1), part(2), part(3)}};
}
inline void multiply_add(Int16Sums& acc, const Int16Sums& a, const Int16Sums& b) {
  for (int i = 0; i < 4; i++) {  // the first and then the second of each pair
    const int16x8_t x = vreinterpretq_s16_s32(a.part[i]), y = vreinterpretq_s16_s32(b.part[i]);
    int32x4_t *low = &acc.part[i % 2 * 2], *high = low + 1;
    *low = vmlal_s16(*low, vget_low_s16(x), vget_low_s16(y));
    *high = vmlal_high_s16(*high, x, y);
  }
}
inline Vec16 to_float(const Int16Sums& v) {
  return each4([&](int i) { return vcvtq_f32_s32(v.part[i]); });
}
inline int16x4_t int16_of(float32x4_t v) { return vqmovn_s32(vcvtnq_s32_f32(v)); }  // to nearest even, saturated
inline void store_int16(int16_t* p, Vec16 v) {
  for (int i = 0; i < 4; i++) vst1_s16(p + 4 * i, int16_of(v.part[i]));
}

// As int8, with numbers 0, 4, 1, 5, 2, 6, 3, 7 of each eight side by side: what load_nibble_bytes goes with.
inline void store_int8_steps(int8_t* p, Vec16 v) {
  for (int i = 0; i < 4; i += 2) {
    const int16x4_t low = int16_of(v.part[i]), high = int16_of(v.part[i + 1]);
    vst1_s8(p + 4 * i, vqmovn_s16(vcombine_s16(vzip1_s16(low, high), vzip2_s16(low, high))));
  }
}

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
inline void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace loraplex
