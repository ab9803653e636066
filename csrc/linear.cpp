// y = x W^T + bias. x [T, in] fp32, W in panels (panels.h), y [T, out] fp32.
//
// BATCH INVARIANCE. Every element of y is one chain of fused multiply-adds over k in order from 0, and then its bias. Its bits depend
// on its own row of x and column of W alone: not on T, the tile, the chunk of k, the number of threads or the width of a vector.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "lora.h"
#include "operators.h"
#include "quantize.h"
#include "tile.h"

namespace loraplex {
namespace {

constexpr long kAheadBytes = 8192;         // of a stream that is read once: hardware prefetchers stop at 4 KiB pages
constexpr long kMostRowsAside = 32;        // with more, a product takes long enough for memory; so few are one slab
constexpr int64_t kAsideShare = 2;         // adapters of half the weight's bytes are worth reading during the product (fewer: no gain)
constexpr long kRowsBytes = 512 << 10;     // of x that are gone over together, so that they stay in the L2 cache

// How the steps of a product are cut; bits do not depend on it.
template <class Math>
struct Chunks {
  long steps, count;
  Chunks(long steps, bool is_whole) : steps(steps) {
    count = is_whole && !Math::kChunkIsExact ? 1 : (steps + Math::kMaxChunk - 1) / Math::kMaxChunk;
  }
  long begin(long chunk) const { return Math::kChunkIsExact ? std::min(steps, chunk * Math::kMaxChunk) : steps * chunk / count; }
};

// Rows of x, chunk by chunk with the stride that Prefetch::kAside has: [chunks][T][kAsideStride].
template <class Math>
const typename Math::Input* pack_rows(const typename Math::Input* x, long T, long x_stride, const Chunks<Math>& chunks) {
  static thread_local std::vector<typename Math::Input> packed;
  packed.resize(chunks.count * T * kAsideStride<Math>);
  for (long chunk = 0; chunk < chunks.count; chunk++) {
    const long first = chunks.begin(chunk) * Math::kPerStep, last = chunks.begin(chunk + 1) * Math::kPerStep;
    for (long t = 0; t < T; t++)
      std::copy(x + t * x_stride + first, x + t * x_stride + last, packed.data() + (chunk * T + t) * kAsideStride<Math>);
  }
  return packed.data();
}

// All T rows of `count` neighbouring panels; w, y and columns are those of the first. `aside` is prefetched beside the weights, while there
// is any, and x_packed has x then.
template <class Math>
void panel_group(const typename Math::Input* x, const typename Math::Input* x_packed, long T, long x_stride, const typename Math::Weight* w,
                 long steps, long count, float* y, long y_stride, long columns, LoraStream& aside) {
  constexpr long kStep = kPanel * Math::kPerStep, kStepBytes = kStep * sizeof(*w);
  const long blocks = (T + kMaxRows - 1) / kMaxRows;  // of balanced sizes: with 6 rows at most 7 = 4+3, 16 = 6+5+5, never 6+1
  const bool is_sparse = T > kMostRowsAside, is_aside = !aside.is_empty();
  const Chunks<Math> chunks(steps, blocks == 1 && !is_aside);
  for (long chunk = 0; chunk < chunks.count; chunk++) {
    const long s0 = chunks.begin(chunk), s1 = chunks.begin(chunk + 1);
    for (long b = 0; b < blocks; b++) {
      const long t0 = T * b / blocks, t1 = T * (b + 1) / blocks;
      const auto* from = w + s0 * kStep;
      Ahead ahead = {(const char*)from + kAheadBytes, kStepBytes};
      if (blocks > 1) {  // the first row blocks share the prefetch of the next chunk (after the last: of the next group's first)
        const long sharers = std::min(blocks, 4L), share = b < sharers ? kStepBytes / sharers : 0;
        const long skipped = chunk + 1 < chunks.count ? 0 : (count - 1) * steps * kStepBytes;
        ahead = {(const char*)(w + s1 * kStep) + skipped + b * share * (s1 - s0), is_sparse ? 2 * share : share};
      }
      with_constant(t1 - t0, [&](auto rows) {
        with_constant(count, [&](auto panels) {
          if constexpr (rows() <= kMaxRows && panels() <= max_panels(rows())) {
            auto run = [&](auto run_tile, const auto* rows_at, const char* lora) {
              run_tile(rows_at, x_stride, from, steps * kStep, s1 - s0, y + t0 * y_stride, y_stride, columns, chunk > 0, ahead, lora);
            };
            const auto* x_at = x + t0 * x_stride + s0 * Math::kPerStep;
            if (is_sparse) run(tile<Math, rows(), panels(), Prefetch::kEveryOtherStep>, x_at, nullptr);
            else if (!is_aside) run(tile<Math, rows(), panels(), Prefetch::kEachStep>, x_at, nullptr);
            else run(tile<Math, rows(), panels(), Prefetch::kAside>, x_packed + (chunk * T + t0) * kAsideStride<Math>,
                     aside.take(kAsideBytes * (s1 - s0)));
          }
        });
      });
    }
  }
}

// In a parallel region: f(first panel, count) for this thread's share in balanced groups of at most `limit` panels. The split is
// static: with a dynamic one the prefetch of the next group went to the other core.
template <class F>
void for_own_panels(long out, long limit, F f) {
  const long panels = panels_of(out), thread = omp_get_thread_num(), threads = omp_get_num_threads();
  const long begin = panels * thread / threads, end = panels * (thread + 1) / threads;
  const long groups = (end - begin + limit - 1) / limit;
  for (long g = 0; g < groups; g++) {
    const long first = begin + (end - begin) * g / groups, last = begin + (end - begin) * (g + 1) / groups;
    f(first, last - first);
  }
}

// This thread's part of y = x W^T, in slabs of rows; finish(row, rows, first column, columns) does the rest of each element.
template <class Math, class Finish>
void own_share(const typename Math::Input* x, long T, long x_stride, const typename Math::Weight* w, long steps, long out, float* y,
               LoraStream aside, Finish finish) {
  const long in_l2 = std::max<long>(8 * kMaxRows, kRowsBytes / (steps * Math::kPerStep * sizeof(*x)));
  const long slabs = (T + in_l2 - 1) / in_l2;
  const auto* x_packed = aside.is_empty() ? nullptr : pack_rows(x, T, x_stride, Chunks<Math>(steps, false));
  for (long slab = 0; slab < slabs; slab++) {
    const long t0 = T * slab / slabs, rows = T * (slab + 1) / slabs - t0;
    const long blocks = (rows + kMaxRows - 1) / kMaxRows;
    for_own_panels(out, max_panels((rows + blocks - 1) / blocks), [&](long first, long count) {
      const long n0 = first * kPanel;
      panel_group<Math>(x + t0 * x_stride, x_packed, rows, x_stride, w + n0 * Math::kPerStep * steps, steps, count, y + t0 * out + n0, out,
                        out - n0, aside);
      finish(t0, rows, n0, std::min(out - n0, count * kPanel));
    });
  }
}

void add_bias(const float* bias, float* y, long out, long row, long rows, long column, long columns) {
  for (long t = row; t < row + rows; t++)
    for (long n = column; n < column + columns; n += kPanel) {
      const long count = column + columns - n;
      store_first(y + t * out + n, add(load_first(y + t * out + n, count), load_first(bias + n, count)), count);
    }
}

// In a parallel region: this thread's part of a delta once its part of the product is done; `product` gets what to prefetch meanwhile.
template <class F>
void with_delta(const LoraDelta* delta, long T, int64_t weight_bytes, double* lora_seconds, F product) {
  const long thread = omp_get_thread_num(), threads = omp_get_num_threads();
  const bool is_aside = delta != nullptr && T <= kMostRowsAside && delta->bytes() * kAsideShare > weight_bytes;
  product(is_aside ? LoraStream(*delta, thread, threads) : LoraStream());
  if (delta == nullptr) return;
  const double began = omp_get_wtime();
  delta->shrink(thread, threads);
#pragma omp barrier
  delta->expand(thread, threads);
  if (lora_seconds != nullptr && thread == 0) *lora_seconds += omp_get_wtime() - began;
}

template <class Math>
void float_linear(const float* x, long x_stride, long T, long in, const void* w, long out, const float* bias, float* y,
                  const LoraDelta* delta, double* lora_seconds, int threads) {
#pragma omp parallel num_threads(threads)
  with_delta(delta, T, out * in * sizeof(typename Math::Weight), lora_seconds, [&](LoraStream aside) {
    own_share<Math>(x, T, x_stride, (const typename Math::Weight*)w, in, out, y, aside,
                    [&](long row, long rows, long column, long columns) {
                      if (bias != nullptr) add_bias(bias, y, out, row, rows, column, columns);
                    });
  });
}

// y[t, n] = sum of integers * (x_scale[t] * w_scale[n]) + bias[n].
void int8_linear(const float* x, long x_stride, long T, long in, const int8_t* w, const float* w_scale, long out, const float* bias,
                 float* y, const LoraDelta* delta, double* lora_seconds, int threads) {
  const long steps = (in + 1) / 2, q_stride = (in + kPanel - 1) / kPanel * kPanel;
  static thread_local std::vector<int16_t> q_buffer;  // the calling thread's, kept for its next call
  static thread_local std::vector<float> scale_buffer;
  q_buffer.resize(T * q_stride);
  scale_buffer.resize(T);
  int16_t* q = q_buffer.data();
  float* x_scale = scale_buffer.data();
#pragma omp parallel num_threads(threads)
  {
#pragma omp for
    for (long t = 0; t < T; t++) x_scale[t] = quantize_row(x + t * x_stride, in, q + t * q_stride);
    auto finish = [&](long row, long rows, long column, long columns) {
      for (long t = row; t < row + rows; t++) {
        const Vec16 of_row = set1(x_scale[t]);
        for (long n = column; n < column + columns; n += kPanel) {
          const long count = column + columns - n;
          const Vec16 scaled = mul(load_first(y + t * out + n, count), mul(of_row, load_first(w_scale + n, count)));
          store_first(y + t * out + n, bias == nullptr ? scaled : add(scaled, load_first(bias + n, count)), count);
        }
      }
    };
    with_delta(delta, T, out * in, lora_seconds, [&](LoraStream aside) {
      own_share<Int8>(q, T, q_stride, w, steps, out, y, aside, finish);
    });
  }
}

}  // namespace
}  // namespace loraplex

using namespace loraplex;

namespace loraplex {
namespace {

void linear(int32_t format, const float* x, int64_t x_stride, int64_t rows, int64_t in, const void* weight, const float* weight_scale,
            int64_t out, const float* bias, float* y, const LoraDelta* delta, double* lora_seconds, int32_t threads) {
  switch (format) {
    case kF32: return float_linear<F32>(x, x_stride, rows, in, weight, out, bias, y, delta, lora_seconds, threads);
    case kF16: return float_linear<F16>(x, x_stride, rows, in, weight, out, bias, y, delta, lora_seconds, threads);
    case kBF16: return float_linear<BF16>(x, x_stride, rows, in, weight, out, bias, y, delta, lora_seconds, threads);
    case kInt8:
      return int8_linear(x, x_stride, rows, in, (const int8_t*)weight, weight_scale, out, bias, y, delta, lora_seconds, threads);
  }
}

}  // namespace
}  // namespace loraplex

LORAPLEX_API void loraplex_linear(int32_t format, const float* x, int64_t x_stride, int64_t rows, int64_t in, const void* weight,
                                  const float* weight_scale, int64_t out, const float* bias, float* y, int32_t threads) {
  linear(format, x, x_stride, rows, in, weight, weight_scale, out, bias, y, nullptr, nullptr, threads);
}

LORAPLEX_API void loraplex_lora_linear(int32_t format, const float* x, int64_t x_stride, int64_t rows, int64_t in, const void* weight,
                                       const float* weight_scale, int64_t out, const float* bias, float* y, const LoraTable* table,
                                       const LoraSegments* segments, double* lora_seconds, int32_t threads) {
  const LoraDelta delta(*table, *segments, x, x_stride, y, out);
  linear(format, x, x_stride, rows, in, weight, weight_scale, out, bias, y, delta.work.empty() ? nullptr : &delta, lora_seconds, threads);
}
