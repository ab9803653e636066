// Vec16 as four vectors of four, in GCC's and Clang's vector extension: SSE2, NEON, or whatever the target has.
// Included by vec.h.
#pragma once
#include <cmath>
#include <cstring>

namespace loraplex {

constexpr const char* kIsa = "portable";
constexpr int kAccumulators = 3;  // 12 registers of four
#ifdef __FP_FAST_FMAF
constexpr bool kHasFma = true;
#else
// a product is rounded before it is added: other bits than the rest, but the same for every row
constexpr bool kHasFma = false;
#endif

typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));

struct Vec16 {
  Float4 part[4];
};

template <class F>
inline Vec16 each4(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}
template <class F>
inline Vec16 each_lane(F f) {  // f(lane) for the functions that have no vector form here
  Vec16 out;
  for (int i = 0; i < 16; i++) out.part[i / 4][i % 4] = f(i);
  return out;
}
inline float lane(const Vec16& v, int i) { return v.part[i / 4][i % 4]; }

inline Vec16 set1(float v) {
  return each4([&](int) { return Float4{v, v, v, v}; });
}
inline Vec16 zero() { return set1(0.f); }
inline Vec16 broadcast(const float* p) { return set1(*p); }
inline Vec16 load(const float* p) {
  Vec16 out;
  memcpy(&out, p, sizeof(out));
  return out;
}
inline void store(float* p, Vec16 v) { memcpy(p, &v, sizeof(v)); }
inline Vec16 load_first(const float* p, long count) {  // lanes from `count` on are 0, and their memory is not touched
  if (count >= 16) return load(p);
  Vec16 out = zero();
  if (count > 0) memcpy(&out, p, count * sizeof(float));
  return out;
}
inline void store_first(float* p, Vec16 v, long count) {
  if (count > 0) memcpy(p, &v, (count < 16 ? count : 16) * sizeof(float));
}

inline Float4 fma4(Float4 a, Float4 b, Float4 c) {
#ifdef __FP_FAST_FMAF
  for (int i = 0; i < 4; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}
inline Vec16 fma(Vec16 a, Vec16 b, Vec16 c) {
  return each4([&](int i) { return fma4(a.part[i], b.part[i], c.part[i]); });
}
inline Vec16 add(Vec16 a, Vec16 b) {
  return each4([&](int i) { return a.part[i] + b.part[i]; });
}
inline Vec16 sub(Vec16 a, Vec16 b) {
  return each4([&](int i) { return a.part[i] - b.part[i]; });
}
inline Vec16 mul(Vec16 a, Vec16 b) {
  return each4([&](int i) { return a.part[i] * b.part[i]; });
}
inline Vec16 div(Vec16 a, Vec16 b) {
  return each4([&](int i) { return a.part[i] / b.part[i]; });
}
inline Float4 select4(Int4 mask, Float4 yes, Float4 no) { return (Float4)(((Int4)yes & mask) | ((Int4)no & ~mask)); }
inline Vec16 select_less(Vec16 a, Vec16 b, Vec16 yes, Vec16 no) {  // a < b ? yes : no
  return each4([&](int i) { return select4(a.part[i] < b.part[i], yes.part[i], no.part[i]); });
}
inline Vec16 max(Vec16 a, Vec16 b) {  // b where one is NaN
  return each4([&](int i) { return select4(a.part[i] > b.part[i], a.part[i], b.part[i]); });
}
inline Vec16 min(Vec16 a, Vec16 b) { return select_less(a, b, a, b); }
inline Vec16 abs(Vec16 a) {
  return each4([&](int i) { return (Float4)((Int4)a.part[i] & 0x7FFFFFFF); });
}
inline Vec16 round_even(Vec16 a) {
  return each_lane([&](int i) { return std::nearbyintf(lane(a, i)); });
}
inline Vec16 pow2(Vec16 n) {  // n whole, in -126..127
  return each4([&](int i) { return (Float4)((__builtin_convertvector(n.part[i], Int4) + 127) << 23); });
}

inline uint32_t less_lanes(Vec16 a, Vec16 b) {  // bit i: a[i] < b[i]
  uint32_t bits = 0;
  for (int i = 0; i < 16; i++) bits |= (uint32_t)(lane(a, i) < lane(b, i)) << i;
  return bits;
}

// Pairs (i, i+8), then (i, i+4), (i, i+2), (i, i+1): the same tree in every file.
template <class Value = float, class Lanes, class F>
inline Value tree(const Lanes& v, F f) {
  Value values[16];
  memcpy(values, &v, sizeof(values));
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; i++) values[i] = f(values[i], values[i + width]);
  return values[0];
}
inline float sum_lanes(Vec16 v) {
  return tree(v, [](float a, float b) { return a + b; });
}
inline float max_lanes(Vec16 v) {
  return tree(v, [](float a, float b) { return a > b ? a : b; });
}

// ---- 16 sums of float64
struct Wide16 {
  double lane[16];
};
inline Wide16 wide_zero() { return {}; }
inline void accumulate(Wide16& sum, Vec16 v) {
  for (int i = 0; i < 16; i++) sum.lane[i] += lane(v, i);
}
inline double sum_lanes(const Wide16& v) {  // the tree of the floats
  return tree<double>(v, [](double a, double b) { return a + b; });
}

// ---- 16-bit floats
inline float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline float f16_to_f32(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7FFF;
  if (magnitude >= 0x7C00) return float_of_bits(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);  // Inf, NaN
  // As the bits of a float this is the value times 2^-112, also for subnormal numbers.
  return float_of_bits(sign | bits_of(float_of_bits(magnitude << 13) * 0x1p112f));
}
inline uint16_t f16_of(float value) {  // round to nearest even
  const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return (uint16_t)(sign | 0x7E00 | (magnitude >> 13 & 0x3FF));
  if (magnitude >= 0x477FF000) return (uint16_t)(sign | 0x7C00);  // rounds to 2^16 or is infinite
  if (magnitude < 0x38800000) {  // subnormal: adding 0.5 rounds at the last place of f16
    return (uint16_t)(sign | (bits_of(float_of_bits(magnitude) + 0.5f) - bits_of(0.5f)));
  }
  return (uint16_t)(sign | (magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13);
}
inline float bf16_to_f32(uint16_t h) { return float_of_bits((uint32_t)h << 16); }
inline uint16_t bf16_of(float value) {  // round to nearest even; NaN stays NaN
  const uint32_t bits = bits_of(value);
  if (value != value) return (uint16_t)((bits | 0x400000) >> 16);
  return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline Vec16 load_f16(const uint16_t* p) {
  return each_lane([&](int i) { return f16_to_f32(p[i]); });
}
inline Vec16 load_bf16(const uint16_t* p) {
  return each_lane([&](int i) { return bf16_to_f32(p[i]); });
}
inline Vec16 load_bf16_pairs(const uint16_t* p) {  // columns in the order 0, 8, 1, 9, ...
  return each_lane([&](int i) { return bf16_to_f32(p[i % 8 * 2 + i / 8]); });
}
// Vector 0 or 1 of two that lie lane by lane in turn: 0.0, 1.0, 0.1, 1.1, ...
template <int WHICH>
inline Vec16 load_bf16_in_turn(const uint16_t* p) {
  return each_lane([&](int i) { return bf16_to_f32(p[2 * i + WHICH]); });
}
inline void store_f16(uint16_t* p, Vec16 v) {
  for (int i = 0; i < 16; i++) p[i] = f16_of(lane(v, i));
}
inline void store_bf16(uint16_t* p, Vec16 v) {
  for (int i = 0; i < 16; i++) p[i] = bf16_of(lane(v, i));
}

// ---- 16 sums of int32: acc[i] += a[2i] b[2i] + a[2i+1] b[2i+1], int16 x int16
struct Int16Sums {
  int32_t even[16], odd[16];  // as operands: the two halves of each pair; as sums: `even` alone
};
inline Int16Sums zero_sums() { return {}; }
inline Int16Sums broadcast_pair(const int16_t* p) {
  Int16Sums out;
  for (int i = 0; i < 16; i++) out.even[i] = p[0], out.odd[i] = p[1];
  return out;
}
inline Int16Sums load_int8_pairs(const int8_t* p) {
  Int16Sums out;
  for (int i = 0; i < 16; i++) out.even[i] = p[2 * i], out.odd[i] = p[2 * i + 1];
  return out;
}
// Of 16 words: bits 4 PART and 16 + 4 PART as pairs of 0..15.
template <int PART>
inline Int16Sums load_nibble_pairs(const uint32_t* p) {
  Int16Sums out;
  for (int i = 0; i < 16; i++) out.even[i] = p[i] >> 4 * PART & 15, out.odd[i] = p[i] >> (16 + 4 * PART) & 15;
  return out;
}
// Of 16 words of four int8: those in bytes PART and 2 + PART as pairs.
template <int PART>
inline Int16Sums load_byte_pairs(const uint32_t* p) {
  Int16Sums out;
  for (int i = 0; i < 16; i++)
    out.even[i] = (int8_t)(p[i] >> 8 * PART), out.odd[i] = (int8_t)(p[i] >> (16 + 8 * PART));
  return out;
}
// Of 16 words: the low or the high halves of their bytes, as four numbers of 0..15; and four of int8 for all lanes.
// Operands of multiply_add_bytes are words, in `even`.
template <int PART>
inline Int16Sums load_nibble_bytes(const uint32_t* p) {
  Int16Sums out = {};
  for (int i = 0; i < 16; i++) out.even[i] = p[i] >> 4 * PART & 0x0F0F0F0F;
  return out;
}
inline Int16Sums broadcast_four(const int8_t* p) {
  int32_t four;
  memcpy(&four, p, 4);
  Int16Sums out = {};
  for (int i = 0; i < 16; i++) out.even[i] = four;
  return out;
}
// acc[i] += the sum of four products, x int8 and w 0..15.
inline void multiply_add_bytes(Int16Sums& acc, const Int16Sums& x, const Int16Sums& w) {
  for (int i = 0; i < 16; i++)
    for (int b = 0; b < 32; b += 8) acc.even[i] += (int8_t)(x.even[i] >> b) * (w.even[i] >> b & 15);
}
// Sums themselves: one for all lanes, 16 of int8, and their products.
inline Int16Sums broadcast_sum(const int32_t* p) {
  Int16Sums out = {};
  for (int i = 0; i < 16; i++) out.even[i] = *p;
  return out;
}
inline Int16Sums load_int8(const int8_t* p) {
  Int16Sums out = {};
  for (int i = 0; i < 16; i++) out.even[i] = p[i];
  return out;
}
inline Int16Sums multiply(const Int16Sums& a, const Int16Sums& b) {
  Int16Sums out = {};
  for (int i = 0; i < 16; i++) out.even[i] = a.even[i] * b.even[i];
  return out;
}
inline void multiply_add(Int16Sums& acc, const Int16Sums& a, const Int16Sums& b) {
  for (int i = 0; i < 16; i++) acc.even[i] += a.even[i] * b.even[i] + a.odd[i] * b.odd[i];
}
inline Vec16 to_float(const Int16Sums& v) {
  return each_lane([&](int i) { return (float)v.even[i]; });
}
inline void store_int16(int16_t* p, Vec16 v) {  // rounded to nearest even, saturated
  for (int i = 0; i < 16; i++) {
    const float whole = std::nearbyintf(lane(v, i));
    p[i] = (int16_t)(whole > 32767.f ? 32767.f : whole > -32768.f ? whole : -32768.f);
  }
}

// As int8, with numbers 0, 4, 1, 5, 2, 6, 3, 7 of each eight side by side: what load_nibble_bytes goes with.
inline void store_int8_steps(int8_t* p, Vec16 v) {
  int16_t wide[16];
  store_int16(wide, v);
  for (int i = 0; i < 16; i++) p[i / 8 * 8 + i % 4 * 2 + i / 4 % 2] = (int8_t)wide[i];
}

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
inline void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace loraplex
