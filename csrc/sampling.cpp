// From logits to a token: searches and sums over rows of a vocabulary (in stock torch: kernels/token_ranking.py).
//
// Tokens are ordered by (value, descending; id, ascending). Weights are whole numbers in floats whose row sums stay
// below 2^53, so that sums of them in doubles are exact in any order.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "api.h"
#include "rows.h"
#include "vec.h"

namespace loraplex {
namespace {

constexpr long kBlock = 1024;  // tokens between two reductions of a vector

// ---- masks of grammars

// What eight bits of a mask add to their logits.
struct BitBias {
  alignas(32) float of[256][8];
  BitBias() {
    for (int byte = 0; byte < 256; byte++)
      for (int bit = 0; bit < 8; bit++) of[byte][bit] = byte >> bit & 1 ? 0.0f : -INFINITY;
  }
};

void mask_row(float* x, long size, const uint8_t* bits, long num_bits) {
  static const BitBias bias;
  const long known = std::min(size, num_bits), whole = known / 8 * 8;
  for (long k = 0; k < whole; k += 8) {
    const float* add = bias.of[bits[k / 8]];
    for (long c = 0; c < 8; c++) x[k + c] += add[c];
  }
  for (long k = whole; k < known; k++) x[k] += bias.of[bits[k / 8]][k % 8];
  for (long k = known; k < size; k++) x[k] += -INFINITY;
}

// ---- the largest value

float block_max(const float* x, long count, Vec16& poison) {  // passes over NaN; `poison` becomes NaN for NaN and Inf
  const Vec16 lowest = set1(-INFINITY);
  Vec16 largest[4] = {lowest, lowest, lowest, lowest};
  long k = 0;
  for (; k + 64 <= count; k += 64)
#pragma GCC unroll 4
    for (long c = 0; c < 4; c++) {
      const Vec16 v = load(x + k + 16 * c);
      largest[c] = max(v, largest[c]);
      poison = fma(v, zero(), poison);
    }
  float best = max_lanes(max(max(largest[0], largest[1]), max(largest[2], largest[3])));
  for (; k < count; k += 16) poison = fma(load_first(x + k, count - k), zero(), poison);
  for (k = count / 64 * 64; k < count; k++) best = x[k] > best ? x[k] : best;
  return best;
}

bool has_nan(const float* x, long size) {
  uint32_t found = 0;
  for (long k = 0; k < size; k++) {
    uint32_t bits;
    std::memcpy(&bits, x + k, sizeof bits);
    found |= (bits & 0x7fffffffu) > 0x7f800000u;
  }
  return found != 0;
}

// The first token of the order; the first NaN where there is one.
long first_largest(const float* x, long size) {
  float best = -INFINITY;
  long start = 0;
  Vec16 poison = zero();
  for (long k = 0; k < size; k += kBlock) {
    const float value = block_max(x + k, std::min(kBlock, size - k), poison);
    if (value > best) best = value, start = k;
  }
  if (std::isnan(sum_lanes(poison)) && has_nan(x, size)) {  // masked rows have -Inf
    for (long k = 0; k < size; k++)
      if (std::isnan(x[k])) return k;
  }
  while (x[start] != best) start++;
  return start;
}

// ---- the first k of the order

// Greater for what comes first: the value's bits as an unsigned number that grows with it, then the id's complement.
uint64_t rank_key(float value, long id) {
  uint32_t bits;
  value += 0.f;  // one zero
  memcpy(&bits, &value, 4);
  bits = std::isnan(value) ? ~0u : bits ^ (bits >> 31 ? ~0u : 1u << 31);
  return (uint64_t)bits << 32 | (uint32_t)~id;
}
long id_of(uint64_t key) { return (uint32_t)~key; }

// A value that at least k tokens reach: the k-th largest of groups' maxima. 16 groups, one a lane, share a run of
// tokens.
float reached_by(const float* x, long size, long k, std::vector<float>& maxima) {
  const long runs = std::max(16L, (k + 15) / 16 * 4), vectors = size / 16;
  if (vectors < 2 * runs) return -INFINITY;
  maxima.resize(16 * runs);
  for (long r = 0; r < runs; r++) {
    Vec16 largest[2] = {set1(-INFINITY), set1(-INFINITY)};
    const long end = vectors * (r + 1) / runs;
    for (long v = vectors * r / runs; v < end; v++) largest[v % 2] = max(load(x + 16 * v), largest[v % 2]);
    store(maxima.data() + 16 * r, max(largest[0], largest[1]));
  }
  std::nth_element(maxima.begin(), maxima.begin() + (k - 1), maxima.end(), std::greater<float>());
  return maxima[k - 1];
}

// f(k) for every token whose bit test(first token, count) has.
template <class Test, class F>
void for_tokens(long size, Test test, F f) {
  for (long k = 0; k < size; k += 16) {
    const long count = std::min(16L, size - k);
    for (uint32_t bits = test(k, count) & ((1u << count) - 1); bits != 0; bits &= bits - 1) f(k + __builtin_ctz(bits));
  }
}

void first_k(const float* x, long size, long k, int64_t* ids, float* values) {
  static thread_local std::vector<float> maxima;
  static thread_local std::vector<uint64_t> keys;
  const Vec16 least = set1(reached_by(x, size, k, maxima));
  keys.clear();
  for_tokens(size, [&](long i, long count) { return ~less_lanes(load_first(x + i, count), least); },
             [&](long i) { keys.push_back(rank_key(x[i], i)); });
  if (k < (long)keys.size()) std::nth_element(keys.begin(), keys.begin() + k, keys.end(), std::greater<uint64_t>());
  std::sort(keys.begin(), keys.begin() + k, std::greater<uint64_t>());
  for (long i = 0; i < k; i++) ids[i] = id_of(keys[i]), values[i] = x[ids[i]];
}

// ---- sums of weights

double sum(const float* w, long count, float least) {  // of those that are at least `least`
  const Vec16 bound = set1(least);
  Wide16 total = wide_zero();
  long k = 0;
  for (; k + 16 <= count; k += 16) {
    const Vec16 v = load(w + k);
    accumulate(total, select_less(v, bound, zero(), v));
  }
  const Vec16 rest = load_first(w + k, count - k);
  accumulate(total, select_less(rest, bound, zero(), rest));
  return sum_lanes(total);
}

double floor_weights(float* w, long size, float scale) {  // w = floor(scale * w); their sum
  Wide16 total = wide_zero();
  for (long k = 0; k < size; k += 16) {
    const Vec16 v = mul(load_first(w + k, size - k), set1(scale)), near = round_even(v);
    const Vec16 whole = select_less(v, near, sub(near, set1(1.f)), near);
    store_first(w + k, whole, size - k);
    accumulate(total, whole);
  }
  return sum_lanes(total);
}

// The first id whose inclusive prefix sum exceeds floor(u * total), over the weights that are at least `least`; some id
// where a weight is NaN.
long invert_cdf(const float* w, long size, float least, double uniform) {
  static thread_local std::vector<double> blocks;
  blocks.clear();
  double total = 0, before = 0;
  for (long k = 0; k < size; k += kBlock)
    blocks.push_back(sum(w + k, std::min(kBlock, size - k), least)), total += blocks.back();
  const double target = std::min(std::floor(uniform * total), total - 1);
  size_t block = 0;
  while (block + 1 < blocks.size() && before + blocks[block] <= target) before += blocks[block++];
  for (long k = block * kBlock; k < size; k++) {
    if (w[k] >= least) before += w[k];
    if (before > target) return k;
  }
  return size - 1;
}

// ---- the shortest prefix of the order with a mass

float float_of(uint32_t order) {  // the inverse of rank_key's upper half
  const uint32_t bits = order >> 31 ? order ^ 1u << 31 : ~order;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// of the tokens whose value is at least `least`
double mass_from(const float* x, const float* w, long size, float least) {
  Wide16 total = wide_zero();
  for (long k = 0; k < size; k += 16)
    accumulate(total, select_less(load_first(x + k, size - k), set1(least), zero(), load_first(w + k, size - k)));
  return sum_lanes(total);
}

// The value of the prefix's last token, and the mass before the tokens of that value. By bisection over the order of
// floats; every few steps the tokens that are still in question are gathered.
float last_value(const float* x, const float* w, long size, double wanted, double& mass_above) {
  static thread_local std::vector<float> xs, ws;
  // mass from hi < wanted <= mass from lo
  uint32_t lo = rank_key(-INFINITY, 0) >> 32, hi = rank_key(INFINITY, 0) >> 32;
  // `above`: of the tokens that were left behind
  double above = 0, mass_at_hi = 0;
  for (int step = 1; hi - lo > 1; step++) {
    const uint32_t middle = lo + (hi - lo) / 2;
    const double mass = above + mass_from(x, w, size, float_of(middle));
    if (mass >= wanted) lo = middle;
    else hi = middle, mass_at_hi = mass;
    if (step % 8 != 0 || size < 256) continue;
    const Vec16 low = set1(float_of(lo)), high = set1(float_of(hi));
    std::vector<float> next_x, next_w;
    for_tokens(size,
               [&](long k, long count) {
                 const Vec16 v = load_first(x + k, count);
                 return ~less_lanes(v, low) & less_lanes(v, high);
               },
               [&](long k) { next_x.push_back(x[k]), next_w.push_back(w[k]); });
    xs.swap(next_x), ws.swap(next_w);
    x = xs.data(), w = ws.data(), size = (long)xs.size(), above = mass_at_hi;
  }
  mass_above = mass_at_hi;
  return float_of(lo);
}

// Zeroes the weights behind the shortest prefix of the order with the mass `wanted`, 0 < wanted <= the weights' sum.
void keep_prefix(const float* x, float* w, long size, double wanted) {
  double mass;
  const float last = last_value(x, w, size, wanted, mass);
  const Vec16 bound = set1(last);
  for (long k = 0; k < size; k += 16)
    store_first(w + k, select_less(load_first(x + k, size - k), bound, zero(), load_first(w + k, size - k)), size - k);
  for_tokens(size,
             [&](long k, long count) {
               const Vec16 v = load_first(x + k, count);
               return ~less_lanes(bound, v) & ~less_lanes(v, bound);
             },
             [&](long k) {
               const double weight = w[k];
               if (mass >= wanted) w[k] = 0;
               mass += weight;
             });
}

// ---- log probabilities

double log_sum_exp(const float* x, long size) {
  const float top = x[first_largest(x, size)];
  Wide16 total = wide_zero();
  long k = 0;
  for (; k + 16 <= size; k += 16) accumulate(total, exp(sub(load(x + k), set1(top))));
  float rest[16];
  std::fill(rest, rest + 16, -INFINITY);
  std::copy(x + k, x + size, rest);
  accumulate(total, exp(sub(load(rest), set1(top))));
  return std::log(sum_lanes(total)) + top;
}

long rank(const float* x, long size, long id) {  // 1 + the number of tokens before `id`
  const float chosen = x[id];
  long before = 0;
  for (long k = 0; k < id; k++) before += x[k] >= chosen;
  for (long k = id + 1; k < size; k++) before += x[k] > chosen;
  return before + 1;
}

}  // namespace
}  // namespace loraplex

using namespace loraplex;

// Everywhere x is [rows, size] with x_stride between rows, and w [rows, size] is dense.

LORAPLEX_API void loraplex_argmax(const float* x, int64_t x_stride, int64_t rows, int64_t size, int64_t* ids,
                                  float* values, int32_t threads) {
  for_rows(rows, rows * size, threads, [=](long r) {
    const float* row = x + r * x_stride;
    ids[r] = first_largest(row, size), values[r] = row[ids[r]];
  });
}

// ids and values [rows, k], k <= size.
LORAPLEX_API void loraplex_top_k(const float* x, int64_t x_stride, int64_t rows, int64_t size, int64_t k, int64_t* ids,
                                 float* values, int32_t threads) {
  for_rows(rows, 4 * rows * size, threads,
           [=](long r) { first_k(x + r * x_stride, size, k, ids + r * k, values + r * k); });
}

// z = (x - top) / temperature, z [rows, size] dense, and at least -80: the weight of what is less is 0 all the same,
// since scale * exp(-80) < 1, and torch takes four times as long for an exponential that underflows. NaN stays.
LORAPLEX_API void loraplex_scale_logits(const float* x, int64_t x_stride, int64_t rows, int64_t size, const float* top,
                                        const float* temperature, float* z, int32_t threads) {
  for_rows(rows, rows * size, threads, [=](long r) {
    const Vec16 minus = set1(top[r]), by = set1(temperature[r]), least = set1(-80);
    for (long k = 0; k < size; k += 16) {
      const Vec16 scaled = div(sub(load_first(x + r * x_stride + k, size - k), minus), by);
      store_first(z + r * size + k, max(least, scaled), size - k);
    }
  });
}

// w = floor(scale * w), in place; total [rows].
LORAPLEX_API void loraplex_floor_weights(float* w, int64_t rows, int64_t size, float scale, double* total,
                                         int32_t threads) {
  for_rows(rows, rows * size, threads, [=](long r) { total[r] = floor_weights(w + r * size, size, scale); });
}

LORAPLEX_API void loraplex_invert_cdf(const float* w, int64_t rows, int64_t size, const float* least,
                                      const double* uniform, int64_t* ids, int32_t threads) {
  for_rows(rows, rows * size, threads, [=](long r) { ids[r] = invert_cdf(w + r * size, size, least[r], uniform[r]); });
}

LORAPLEX_API void loraplex_keep_prefix(const float* x, int64_t x_stride, float* w, int64_t rows, int64_t size,
                                       const double* wanted, int32_t threads) {
  for_rows(rows, 16 * rows * size, threads,
           [=](long r) { keep_prefix(x + r * x_stride, w + r * size, size, wanted[r]); });
}

LORAPLEX_API void loraplex_log_sum_exp(const float* x, int64_t x_stride, int64_t rows, int64_t size, double* out,
                                       int32_t threads) {
  for_rows(rows, 4 * rows * size, threads, [=](long r) { out[r] = log_sum_exp(x + r * x_stride, size); });
}

LORAPLEX_API void loraplex_mask_logits(float* x, int64_t x_stride, int64_t size, const int64_t* rows,
                                       const int32_t* bitmask, int64_t num_rows, int64_t num_words, int32_t threads) {
  for_rows(num_rows, num_rows * size, threads, [=](long r) {
    const auto* bits = reinterpret_cast<const uint8_t*>(bitmask + r * num_words);
    mask_row(x + rows[r] * x_stride, size, bits, 32 * num_words);
  });
}

LORAPLEX_API void loraplex_ranks(const float* x, int64_t x_stride, int64_t rows, int64_t size, const int64_t* token_ids,
                                 int64_t* ranks, int32_t threads) {
  for_rows(rows, rows * size, threads, [=](long r) { ranks[r] = rank(x + r * x_stride, size, token_ids[r]); });
}
