// Vec16 as one register. Included by vec.h.
#pragma once
#include <immintrin.h>

namespace loraplex {

constexpr const char* kIsa = "avx512";
constexpr int kAccumulators = 24;  // of the 32 registers
constexpr bool kHasFma = true;

struct Vec16 {
  __m512 v;
};

inline Vec16 zero() { return {_mm512_setzero_ps()}; }
inline Vec16 set1(float v) { return {_mm512_set1_ps(v)}; }
inline Vec16 broadcast(const float* p) { return {_mm512_set1_ps(*p)}; }
inline Vec16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Vec16 v) { _mm512_storeu_ps(p, v.v); }

inline __mmask16 first_lanes(long count) { return count >= 16 ? 0xFFFF : (__mmask16)((1u << count) - 1); }
inline Vec16 load_first(const float* p, long count) {  // lanes from `count` on are 0, and their memory is not touched
  return {_mm512_maskz_loadu_ps(first_lanes(count), p)};
}
inline void store_first(float* p, Vec16 v, long count) { _mm512_mask_storeu_ps(p, first_lanes(count), v.v); }

inline Vec16 fma(Vec16 a, Vec16 b, Vec16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec16 add(Vec16 a, Vec16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec16 sub(Vec16 a, Vec16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec16 mul(Vec16 a, Vec16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec16 div(Vec16 a, Vec16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec16 max(Vec16 a, Vec16 b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where one is NaN
inline Vec16 min(Vec16 a, Vec16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec16 abs(Vec16 a) { return {_mm512_abs_ps(a.v)}; }
inline Vec16 round_even(Vec16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec16 pow2(Vec16 n) {  // n whole, in -126..127
  return {
      _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}
inline Vec16 select_less(Vec16 a, Vec16 b, Vec16 yes, Vec16 no) {  // a < b ? yes : no
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}

inline uint32_t less_lanes(Vec16 a, Vec16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }  // bit i: a[i] < b[i]

inline __m256 low(Vec16 v) { return _mm512_castps512_ps256(v.v); }
inline __m256 high(Vec16 v) { return _mm512_extractf32x8_ps(v.v, 1); }
inline Vec16 joined(__m256 lo, __m256 hi) { return {_mm512_insertf32x8(_mm512_castps256_ps512(lo), hi, 1)}; }

// Pairs (i, i+8), then (i, i+4), (i, i+2), (i, i+1): the same tree in every file.
inline float sum_lanes(Vec16 v) {
  const __m256 eight = _mm256_add_ps(low(v), high(v));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float max_lanes(Vec16 v) {
  const __m256 eight = _mm256_max_ps(low(v), high(v));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// ---- 16 sums of float64
struct Wide16 {
  __m512d lo, hi;
};
inline Wide16 wide_zero() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
inline void accumulate(Wide16& sum, Vec16 v) {
  sum.lo = _mm512_add_pd(sum.lo, _mm512_cvtps_pd(low(v)));
  sum.hi = _mm512_add_pd(sum.hi, _mm512_cvtps_pd(high(v)));
}
inline double sum_lanes(const Wide16& v) {  // the tree of the floats
  const __m512d eight = _mm512_add_pd(v.lo, v.hi);
  const __m256d four = _mm256_add_pd(_mm512_castpd512_pd256(eight), _mm512_extractf64x4_pd(eight, 1));
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

// ---- 16-bit floats
inline Vec16 load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
inline Vec16 load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
// Columns in the order 0, 8, 1, 9, ...: the order of the AVX2 file, whose panels these are too.
inline Vec16 load_bf16_pairs(const uint16_t* p) {
  const __m256i both = _mm256_loadu_si256((const __m256i*)p);
  return joined(_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)),
                _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32((int)0xFFFF0000))));
}
// Vector 0 or 1 of two that lie lane by lane in turn: 0.0, 1.0, 0.1, 1.1, ...
template <int WHICH>
inline Vec16 load_bf16_in_turn(const uint16_t* p) {
  const __m512i both = _mm512_loadu_si512(p);
  return {_mm512_castsi512_ps(WHICH == 0 ? _mm512_slli_epi32(both, 16)
                                         : _mm512_and_si512(both, _mm512_set1_epi32((int)0xFFFF0000)))};
}
inline void store_f16(uint16_t* p, Vec16 v) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_bf16(uint16_t* p, Vec16 v) {  // round to nearest even; NaN stays NaN
  const __m512i bits = _mm512_castps_si512(v.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(v.v, v.v, _CMP_UNORD_Q);
  _mm256_storeu_si256((__m256i*)p,
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(is_nan, rounded, quiet), 16)));
}

// ---- 16 sums of int32: acc[i] += a[2i] b[2i] + a[2i+1] b[2i+1], int16 x int16
struct Int16Sums {
  __m512i v;
};
inline Int16Sums zero_sums() { return {_mm512_setzero_si512()}; }
inline Int16Sums broadcast_pair(const int16_t* p) {
  int pair;
  __builtin_memcpy(&pair, p, 4);
  return {_mm512_set1_epi32(pair)};
}
inline Int16Sums load_int8_pairs(const int8_t* p) {  // 32 int8, widened to 16 pairs of int16
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p))};
}
// Of 16 words: bits 4 PART and 16 + 4 PART as pairs of 0..15.
template <int PART>
inline Int16Sums load_nibble_pairs(const uint32_t* p) {
  const __m512i moved = _mm512_srli_epi16(_mm512_loadu_si512(p), 4 * PART);
  return {PART == 3 ? moved : _mm512_and_si512(moved, _mm512_set1_epi32(0x000F000F))};
}
// Of 16 words of four int8: those in bytes PART and 2 + PART as pairs.
template <int PART>
inline Int16Sums load_byte_pairs(const uint32_t* p) {
  const __m512i words = _mm512_loadu_si512(p);
  return {_mm512_srai_epi16(PART == 0 ? _mm512_slli_epi16(words, 8) : words, 8)};
}
// Of 16 words: the low or the high halves of their bytes, as four numbers of 0..15; and four of int8 for all lanes.
template <int PART>
inline Int16Sums load_nibble_bytes(const uint32_t* p) {
  const __m512i words = _mm512_loadu_si512(p), moved = PART == 0 ? words : _mm512_srli_epi16(words, 4);
  return {_mm512_and_si512(moved, _mm512_set1_epi32(0x0F0F0F0F))};
}
inline Int16Sums broadcast_four(const int8_t* p) {
  int four;
  __builtin_memcpy(&four, p, 4);
  return {_mm512_set1_epi32(four)};
}
// acc[i] += the sum of four products, x int8 and w 0..15.
inline void multiply_add_bytes(Int16Sums& acc, Int16Sums x, Int16Sums w) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc.v) : "v"(w.v), "v"(x.v));
}
// Sums themselves: one for all lanes, 16 of int8, and their products.
inline Int16Sums broadcast_sum(const int32_t* p) { return {_mm512_set1_epi32(*p)}; }
inline Int16Sums load_int8(const int8_t* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
inline Int16Sums multiply(Int16Sums a, Int16Sums b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline void multiply_add(Int16Sums& acc, Int16Sums a, Int16Sums b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(acc.v) : "v"(a.v), "v"(b.v));  // the intrinsic: GCC 12 puts the sums on the stack
}
inline Vec16 to_float(Int16Sums v) { return {_mm512_cvtepi32_ps(v.v)}; }
inline void store_int16(int16_t* p, Vec16 v) {  // rounded to nearest even, saturated
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(v.v)));
}

// As int8, with numbers 0, 4, 1, 5, 2, 6, 3, 7 of each eight side by side: what load_nibble_bytes goes with.
inline void store_int8_steps(int8_t* p, Vec16 v) {
  const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  _mm_storeu_si128((__m128i*)p, _mm_shuffle_epi8(_mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v.v)), order));
}

inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
inline void prefetch_l2(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

}  // namespace loraplex
