// Vec16 as two registers of eight. Included by vec.h.
#pragma once
#include <immintrin.h>

namespace loraplex {

constexpr const char* kIsa = "avx2";
constexpr int kAccumulators = 6;  // Vec16 that a register tile may hold: 12 of the 16 registers
constexpr bool kHasFma = true;

struct Vec16 {
  __m256 lo, hi;
};

inline Vec16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec16 set1(float v) {
  const __m256 all = _mm256_set1_ps(v);
  return {all, all};
}
inline Vec16 broadcast(const float* p) {
  const __m256 all = _mm256_broadcast_ss(p);
  return {all, all};
}
inline Vec16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Vec16 v) { _mm256_storeu_ps(p, v.lo), _mm256_storeu_ps(p + 8, v.hi); }

inline __m256i first_lanes(long count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vec16 load_first(const float* p, long count) {  // lanes from `count` on are 0, and their memory is not touched
  if (count >= 16) return load(p);
  if (count >= 8) return {_mm256_loadu_ps(p), _mm256_maskload_ps(p + 8, first_lanes(count - 8))};
  return {_mm256_maskload_ps(p, first_lanes(count)), _mm256_setzero_ps()};
}
inline void store_first(float* p, Vec16 v, long count) {
  if (count >= 16) return store(p, v);
  if (count >= 8) _mm256_storeu_ps(p, v.lo), _mm256_maskstore_ps(p + 8, first_lanes(count - 8), v.hi);
  else _mm256_maskstore_ps(p, first_lanes(count), v.lo);
}

inline Vec16 fma(Vec16 a, Vec16 b, Vec16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Vec16 add(Vec16 a, Vec16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec16 sub(Vec16 a, Vec16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec16 mul(Vec16 a, Vec16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec16 div(Vec16 a, Vec16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
// b where one is NaN
inline Vec16 max(Vec16 a, Vec16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Vec16 min(Vec16 a, Vec16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Vec16 abs(Vec16 a) {
  const __m256 sign = _mm256_set1_ps(-0.f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
inline Vec16 round_even(Vec16 a) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, kNearest), _mm256_round_ps(a.hi, kNearest)};
}
inline __m256 pow2_8(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline Vec16 pow2(Vec16 n) { return {pow2_8(n.lo), pow2_8(n.hi)}; }  // n whole, in -126..127
inline Vec16 select_less(Vec16 a, Vec16 b, Vec16 yes, Vec16 no) {  // a < b ? yes : no
  return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}

inline uint32_t less_lanes(Vec16 a, Vec16 b) {  // bit i: a[i] < b[i]
  return (uint32_t)(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)) |
                    _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)) << 8);
}

// Pairs (i, i+8), then (i, i+4), (i, i+2), (i, i+1): the same tree in every file.
inline float sum_lanes(Vec16 v) {
  const __m256 eight = _mm256_add_ps(v.lo, v.hi);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float max_lanes(Vec16 v) {
  const __m256 eight = _mm256_max_ps(v.lo, v.hi);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// ---- 16 sums of float64
struct Wide16 {
  __m256d part[4];
};
inline Wide16 wide_zero() {
  return {{_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()}};
}
inline void accumulate(Wide16& sum, Vec16 v) {
  sum.part[0] = _mm256_add_pd(sum.part[0], _mm256_cvtps_pd(_mm256_castps256_ps128(v.lo)));
  sum.part[1] = _mm256_add_pd(sum.part[1], _mm256_cvtps_pd(_mm256_extractf128_ps(v.lo, 1)));
  sum.part[2] = _mm256_add_pd(sum.part[2], _mm256_cvtps_pd(_mm256_castps256_ps128(v.hi)));
  sum.part[3] = _mm256_add_pd(sum.part[3], _mm256_cvtps_pd(_mm256_extractf128_ps(v.hi, 1)));
}
inline double sum_lanes(const Wide16& v) {  // the tree of the floats
  const __m256d four = _mm256_add_pd(_mm256_add_pd(v.part[0], v.part[2]), _mm256_add_pd(v.part[1], v.part[3]));
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

// ---- 16-bit floats
inline __m256 bf16_to_f32(__m128i v) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16)); }
inline Vec16 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline Vec16 load_bf16(const uint16_t* p) {
  return {bf16_to_f32(_mm_loadu_si128((const __m128i*)p)), bf16_to_f32(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
// Columns in the order 0, 8, 1, 9, ...: one shift and one mask widen them, without a shuffle.
inline Vec16 load_bf16_pairs(const uint16_t* p) {
  const __m256i both = _mm256_loadu_si256((const __m256i*)p);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32((int)0xFFFF0000)))};
}
// Vector 0 or 1 of two that lie lane by lane in turn: 0.0, 1.0, 0.1, 1.1, ...
template <int WHICH>
inline __m256 bf16_half(__m256i both) {
  // Two shifts, where a mask would take a register that sums need.
  return _mm256_castsi256_ps(_mm256_slli_epi32(WHICH == 0 ? both : _mm256_srli_epi32(both, 16), 16));
}
template <int WHICH>
inline Vec16 load_bf16_in_turn(const uint16_t* p) {
  return {bf16_half<WHICH>(_mm256_loadu_si256((const __m256i*)p)),
          bf16_half<WHICH>(_mm256_loadu_si256((const __m256i*)(p + 16)))};
}
inline void store_f16(uint16_t* p, Vec16 v) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v.lo, kNearest));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(v.hi, kNearest));
}
inline __m128i bf16_of(__m256 v) {  // round to nearest even; NaN stays NaN
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}
inline void store_bf16(uint16_t* p, Vec16 v) {
  _mm_storeu_si128((__m128i*)p, bf16_of(v.lo)), _mm_storeu_si128((__m128i*)(p + 8), bf16_of(v.hi));
}

// ---- 16 sums of int32: acc[i] += a[2i] b[2i] + a[2i+1] b[2i+1], int16 x int16
struct Int16Sums {
  __m256i lo, hi;
};
inline Int16Sums zero_sums() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Int16Sums broadcast_pair(const int16_t* p) {
  int pair;
  __builtin_memcpy(&pair, p, 4);
  const __m256i all = _mm256_set1_epi32(pair);
  return {all, all};
}
inline Int16Sums load_int8_pairs(const int8_t* p) {  // 32 int8, widened to 16 pairs of int16
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + 16)))};
}
// Of 16 words: bits 4 PART and 16 + 4 PART as pairs of 0..15.
template <int PART>
inline Int16Sums load_nibble_pairs(const uint32_t* p) {
  auto half = [&](const uint32_t* at) {
    const __m256i moved = _mm256_srli_epi16(_mm256_loadu_si256((const __m256i*)at), 4 * PART);
    return PART == 3 ? moved : _mm256_and_si256(moved, _mm256_set1_epi32(0x000F000F));
  };
  return {half(p), half(p + 8)};
}
// Of 16 words of four int8: those in bytes PART and 2 + PART as pairs.
template <int PART>
inline Int16Sums load_byte_pairs(const uint32_t* p) {
  auto half = [&](const uint32_t* at) {
    const __m256i words = _mm256_loadu_si256((const __m256i*)at);
    return _mm256_srai_epi16(PART == 0 ? _mm256_slli_epi16(words, 8) : words, 8);
  };
  return {half(p), half(p + 8)};
}
// Of 16 words: the low or the high halves of their bytes, as four numbers of 0..15; and four of int8 for all lanes.
template <int PART>
inline Int16Sums load_nibble_bytes(const uint32_t* p) {
  auto half = [&](const uint32_t* at) {
    const __m256i words = _mm256_loadu_si256((const __m256i*)at);
    return _mm256_and_si256(PART == 0 ? words : _mm256_srli_epi16(words, 4), _mm256_set1_epi32(0x0F0F0F0F));
  };
  return {half(p), half(p + 8)};
}
inline Int16Sums broadcast_four(const int8_t* p) {
  int four;
  __builtin_memcpy(&four, p, 4);
  const __m256i all = _mm256_set1_epi32(four);
  return {all, all};
}
// acc[i] += the sum of four products, x int8 and w 0..15: two of them are in 16 bits.
inline void multiply_add_bytes(Int16Sums& acc, Int16Sums x, Int16Sums w) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i lo = _mm256_madd_epi16(_mm256_maddubs_epi16(w.lo, x.lo), ones);
  __m256i hi = _mm256_madd_epi16(_mm256_maddubs_epi16(w.hi, x.hi), ones);
  asm("vpaddd %1, %0, %0" : "+x"(acc.lo) : "x"(lo));
  asm("vpaddd %1, %0, %0" : "+x"(acc.hi) : "x"(hi));
}
// Sums themselves: one for all lanes, 16 of int8, and their products.
inline Int16Sums broadcast_sum(const int32_t* p) {
  const __m256i all = _mm256_set1_epi32(*p);
  return {all, all};
}
inline Int16Sums load_int8(const int8_t* p) {
  return {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)),
          _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
inline Int16Sums multiply(Int16Sums a, Int16Sums b) {
  return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)};
}
inline void multiply_add(Int16Sums& acc, Int16Sums a, Int16Sums b) {
  // asm for the addition: with the intrinsic GCC 12 keeps the sums on the stack, 1.5 times slower.
  __m256i lo = _mm256_madd_epi16(a.lo, b.lo), hi = _mm256_madd_epi16(a.hi, b.hi);
  asm("vpaddd %1, %0, %0" : "+x"(acc.lo) : "x"(lo));
  asm("vpaddd %1, %0, %0" : "+x"(acc.hi) : "x"(hi));
}
inline Vec16 to_float(Int16Sums v) { return {_mm256_cvtepi32_ps(v.lo), _mm256_cvtepi32_ps(v.hi)}; }
inline void store_int16(int16_t* p, Vec16 v) {  // rounded to nearest even, saturated
  auto pack8 = [](__m256 x) {
    const __m256i whole = _mm256_cvtps_epi32(x);
    return _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  };
  _mm_storeu_si128((__m128i*)p, pack8(v.lo)), _mm_storeu_si128((__m128i*)(p + 8), pack8(v.hi));
}

// As int8, with numbers 0, 4, 1, 5, 2, 6, 3, 7 of each eight side by side: what load_nibble_bytes goes with.
inline void store_int8_steps(int8_t* p, Vec16 v) {
  const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  int16_t wide[16];
  store_int16(wide, v);
  const __m128i bytes = _mm_packs_epi16(_mm_loadu_si128((__m128i*)wide), _mm_loadu_si128((__m128i*)(wide + 8)));
  _mm_storeu_si128((__m128i*)p, _mm_shuffle_epi8(bytes, order));
}

inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
inline void prefetch_l2(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

}  // namespace loraplex
