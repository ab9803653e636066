// What this machine can do at most, measured with the kernels' own vector type (csrc/vec.h). machine.py compiles it.
#include <omp.h>

#include "vec.h"

using namespace loraplex;

namespace {

constexpr int kChains = kAccumulators;

float lane_sum(const Vec16* sums, int count) {
  Vec16 total = zero();
  for (int i = 0; i < count; i++) total = add(total, sums[i]);
  return sum_lanes(total);
}

// On `STREAMS` streams at once, and without prefetches: the processor finds the streams, and is slower with them.
template <int STREAMS>
float read_part(const float* p, long count) {
  const long stream = count / STREAMS;
  Vec16 sums[STREAMS];
  for (int s = 0; s < STREAMS; s++) sums[s] = zero();
  for (long i = 0; i < stream; i += 16)
#pragma GCC unroll 8
    for (int s = 0; s < STREAMS; s++) sums[s] = add(sums[s], load(p + s * stream + i));
  return lane_sum(sums, STREAMS);
}

// noinline: the sums stay in registers.
__attribute__((noinline)) float float_chains(long steps, const float* start, Vec16 x, Vec16 y) {
  Vec16 sums[kChains];
#pragma GCC unroll 32
  for (int i = 0; i < kChains; i++) sums[i] = load(start + 16 * i);
  for (long step = 0; step < steps; step++)
#pragma GCC unroll 32
    for (int i = 0; i < kChains; i++) sums[i] = fma(sums[i], x, y);
  return lane_sum(sums, kChains);
}

__attribute__((noinline)) float int16_chains(long steps, const int16_t* pair, const int8_t* weights) {
  Int16Sums sums[kChains];
  const Int16Sums x = broadcast_pair(pair);
#pragma GCC unroll 32
  for (int i = 0; i < kChains; i++) sums[i] = load_int8_pairs(weights + 32 * i);
  for (long step = 0; step < steps; step++)
#pragma GCC unroll 32
    for (int i = 0; i < kChains; i++) multiply_add(sums[i], x, sums[i]);
  Vec16 floats[kChains];
#pragma GCC unroll 32
  for (int i = 0; i < kChains; i++) floats[i] = to_float(sums[i]);
  return lane_sum(floats, kChains);
}

}  // namespace

// Reads `count` floats once, a part of them on each thread; is_split: each thread reads four places in turn, which some
// machines like.
extern "C" float read_memory(const float* p, long count, int threads, int is_split) {
  float total = 0;
  const long part = count / threads / 64 * 64;
#pragma omp parallel num_threads(threads) reduction(+ : total)
  {
    const float* mine = p + omp_get_thread_num() * part;
    total += is_split ? read_part<4>(mine, part) : read_part<1>(mine, part);
  }
  return total;
}

// 2 * 16 * kChains * steps float operations on each thread. start: 16 * kChains floats, all different.
extern "C" float multiply_floats(long steps, int threads, const float* start, float a, float b) {
  float total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
  total += float_chains(steps, start, set1(a), set1(b));
  return total;
}

// 2 * 32 * kChains * steps integer operations on each thread: int16 products, added in pairs to int32.
// weights: 32 * kChains int8, all chains different.
extern "C" float multiply_int16(long steps, int threads, const int16_t* pair, const int8_t* weights) {
  float total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
  total += int16_chains(steps, pair, weights);
  return total;
}

extern "C" long float_operations_per_step() { return 2 * 16 * kChains; }
extern "C" long int16_operations_per_step() { return 2 * 32 * kChains; }
