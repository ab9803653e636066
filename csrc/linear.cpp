// y = x W^T + bias. x [T, in] fp32, W in panels (panels.h), y [T, out] fp32.
//
// BATCH INVARIANCE. Every element of y is one chain of fused multiply-adds over k in order from 0, and then its bias.
// Its bits depend on its own row of x and column of W alone: not on T, the tile, the chunk of k, the number of threads
// or the width of a vector. With weights in groups the chain is over groups (group_tile.h).
#include <algorithm>
#include <chrono>
#include <vector>

#include "group_tile.h"
#include "lora.h"
#include "operators.h"
#include "quantize.h"
#include "rows.h"

namespace loraplex {
namespace {

constexpr long kAheadBytes = 8192;          // of a stream that is read once: hardware prefetchers stop at 4 KiB pages
constexpr long kMostRowsAside = 32;         // with more, a product takes long enough for memory; so few are one slab
// Rows of a tile of more: T / ceil(T / kMaxRows) is more than kMaxRows T / (T + kMaxRows). Fewer need no such tile.
constexpr long kLeastSparseRows = kMaxRows * (kMostRowsAside + 1) / (kMostRowsAside + 1 + kMaxRows);
constexpr int64_t kAsideShare = 2;          // adapters of half the weight's bytes are worth it (fewer: no gain)
constexpr int64_t kWorthThreads = 1 << 18;  // weights times (rows + 4): about 5 us
constexpr long kRowsBytes = 512 << 10;      // of x that are gone over together, so that they stay in the L2 cache

// How the steps of a product are cut; bits do not depend on it.
template <class Math>
struct Chunks {
  long steps, count;
  Chunks(long steps, bool is_whole) : steps(steps) {
    count = is_whole && !Math::kChunkIsExact ? 1 : (steps + Math::kMaxChunk - 1) / Math::kMaxChunk;
  }
  long begin(long chunk) const {
    return Math::kChunkIsExact ? std::min(steps, chunk * Math::kMaxChunk) : steps * chunk / count;
  }
};

// Rows of x, chunk by chunk with the stride that Prefetch::kAside has: [chunks][T][kAsideStride].
template <class Math>
const typename Math::Input* pack_rows(const typename Math::Input* x, long T, long x_stride,
                                      const Chunks<Math>& chunks) {
  static thread_local std::vector<typename Math::Input> packed;
  packed.resize(chunks.count * T * kAsideStride<Math>);
  for (long chunk = 0; chunk < chunks.count; chunk++) {
    const long first = chunks.begin(chunk) * Math::kPerStep, last = chunks.begin(chunk + 1) * Math::kPerStep;
    for (long t = 0; t < T; t++)
      std::copy(x + t * x_stride + first, x + t * x_stride + last,
                packed.data() + (chunk * T + t) * kAsideStride<Math>);
  }
  return packed.data();
}

// Rows of x: one after the other or, as pack_rows has them, chunk by chunk: [chunks][all][kAsideStride].
template <class Math>
struct Rows {
  const typename Math::Input* x;
  long stride, all = 0;
  const typename Math::Input* packed = nullptr;
  RowGroups groups = {};  // of weights in groups, whose x is packed

  const typename Math::Input* in_chunk(long row, long chunk) const {
    return packed + (chunk * all + row) * kAsideStride<Math>;
  }
};

// Panels of a weight, side by side, of `steps` steps each.
template <class Math>
struct Panels {
  const typename Math::Weight* w;
  long steps;
  PanelGroups groups = {};
  long steps_per_group = 0;

  long size() const { return steps * Math::kStepWeights; }
  Panels from(long panel) const {
    return {w + panel * size(), steps, groups.scale == nullptr ? groups : groups.from(panel, 0), steps_per_group};
  }
};

// Rows [row, row + T) of `count` neighbouring panels; w, y and columns are those of the first. `aside` is prefetched
// beside the weights, while there is any, and x is packed then.
template <class Math>
void panel_group(const Rows<Math>& x, long row, long T, const Panels<Math>& w, long count, float* y, long y_stride,
                 long columns, LoraStream& aside) {
  constexpr long kStep = Math::kStepWeights, kStepBytes = kStep * sizeof(typename Math::Weight);
  const long steps = w.steps;
  // of balanced sizes: with 6 rows at most 7 = 4+3, 16 = 6+5+5, never 6+1
  const long blocks = (T + kMaxRows - 1) / kMaxRows;
  const bool is_sparse = T > kMostRowsAside, is_aside = !aside.is_empty();
  const Chunks<Math> chunks(steps, blocks == 1 && !is_aside);
  for (long chunk = 0; chunk < chunks.count; chunk++) {
    const long s0 = chunks.begin(chunk), s1 = chunks.begin(chunk + 1);
    for (long b = 0; b < blocks; b++) {
      const long t0 = T * b / blocks, t1 = T * (b + 1) / blocks;
      const auto* from = w.w + s0 * kStep;
      Ahead ahead = {(const char*)from + kAheadBytes, kStepBytes};
      if (blocks > 1) {
        // The first row blocks share the prefetch of the next chunk (after the last: of the next group's first).
        const long sharers = std::min(blocks, 4L), share = b < sharers ? kStepBytes / sharers : 0;
        const long skipped = chunk + 1 < chunks.count ? 0 : (count - 1) * steps * kStepBytes;
        ahead = {(const char*)(w.w + s1 * kStep) + skipped + b * share * (s1 - s0), is_sparse ? 2 * share : share};
      }
      with_constant(t1 - t0, [&](auto rows) {
        with_constant(count, [&](auto panels) {
          if constexpr (rows() <= kMaxRows && panels() <= max_panels(rows())) {
            float* to = y + t0 * y_stride;
            if constexpr (Math::kIsGrouped) {
              const long group = s0 / w.steps_per_group, first = (row + t0) * x.groups.stride + group;
              auto run = [&](auto run_tile, const char* lora) {
                run_tile(x.in_chunk(row + t0, chunk), {x.groups.scale + first, x.groups.sum + first, x.groups.stride},
                         from, w.size(), w.groups.from(0, group), s1 - s0, w.steps_per_group, to, y_stride, columns,
                         chunk > 0, ahead, lora);
              };
              if constexpr (rows() >= kLeastSparseRows)
                if (is_sparse) return run(group_tile<Math, rows(), panels(), Prefetch::kEveryOtherStep>, nullptr);
              if (!is_aside) run(group_tile<Math, rows(), panels(), Prefetch::kEachStep>, nullptr);
              else run(group_tile<Math, rows(), panels(), Prefetch::kAside>, aside.take(kAsideBytes * (s1 - s0)));
            } else {
              auto run = [&](auto run_tile, const auto* rows_at, const char* lora) {
                run_tile(rows_at, x.stride, from, w.size(), s1 - s0, to, y_stride, columns, chunk > 0, ahead, lora);
              };
              const auto* x_at = x.x + (row + t0) * x.stride + s0 * Math::kPerStep;
              if constexpr (rows() >= kLeastSparseRows)
                if (is_sparse) return run(tile<Math, rows(), panels(), Prefetch::kEveryOtherStep>, x_at, nullptr);
              if (!is_aside) run(tile<Math, rows(), panels(), Prefetch::kEachStep>, x_at, nullptr);
              else run(tile<Math, rows(), panels(), Prefetch::kAside>, x.in_chunk(row + t0, chunk),
                       aside.take(kAsideBytes * (s1 - s0)));
            }
          }
        });
      });
    }
  }
}

void add_bias(const float* bias, float* y, long out, long row, long rows, long column, long columns) {
  for (long t = row; t < row + rows; t++)
    for (long n = column; n < column + columns; n += kPanel) {
      const long count = column + columns - n;
      store_first(y + t * out + n, add(load_first(y + t * out + n, count), load_first(bias + n, count)), count);
    }
}

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

long most_panels(long rows) {
  const long blocks = (rows + kMaxRows - 1) / kMaxRows;
  return max_panels((rows + blocks - 1) / blocks);
}

// y = x W^T in parts: slabs of rows, so that they stay in the cache, times balanced groups of panels. A share of them
// is neighbours: with another order the prefetch of the next group went to the other core. finish(row, rows, first
// column, columns) does the rest of each element.
template <class Math, class Finish>
struct Product {
  Rows<Math> x;
  long T;
  Panels<Math> w;
  long out;
  float* y;
  long shares;
  Finish finish;
  const LoraDelta* aside = nullptr;  // what to prefetch meanwhile; x is packed then
  long slabs = 1, groups = 1;        // groups of a share

  void cut() {
    const long row_bytes = w.steps * Math::kPerStep * sizeof(typename Math::Input);
    const long in_l2 = std::max<long>(8 * kMaxRows, kRowsBytes / row_bytes);
    slabs = (T + in_l2 - 1) / in_l2;
    const long limit = std::min(most_panels(T / slabs), most_panels((T + slabs - 1) / slabs));
    groups = ((panels_of(out) + shares - 1) / shares + limit - 1) / limit;
  }
  long parts() const { return slabs * groups; }
  void run(long share, long part) const {
    const long slab = part / groups, group = share * groups + part % groups;
    const long panels = panels_of(out), all = shares * groups;
    const long t0 = T * slab / slabs, rows = T * (slab + 1) / slabs - t0;
    const long first = panels * group / all, count = panels * (group + 1) / all - first, n0 = first * kPanel;
    if (count == 0) return;
    LoraStream stream = aside == nullptr ? LoraStream() : LoraStream(*aside, group, all);
    panel_group<Math>(x, t0, rows, w.from(first), count, y + t0 * out + n0, out, out - n0, stream);
    finish(t0, rows, n0, std::min(out - n0, count * kPanel));
  }
};

// A product and the delta that is added to it: its first phase beside the product, the other one when all of both is
// there. With `lora_seconds` it is not beside it, so that it can be timed.
template <class Math, class Finish>
void run_product(Product<Math, Finish> product, const LoraDelta* delta, double* lora_seconds) {
  const long shares = product.shares;
  const int64_t weight_bytes = product.out * product.w.size() / kPanel * sizeof(typename Math::Weight);
  if (delta != nullptr && product.T <= kMostRowsAside && delta->bytes() * kAsideShare > weight_bytes) {
    product.aside = delta;
    if (product.x.packed == nullptr) {
      product.x.packed = pack_rows(product.x.x, product.T, product.x.stride, Chunks<Math>(product.w.steps, false));
      product.x.all = product.T;
    }
  }
  product.cut();
  const long parts = product.parts();
  const long shrinks = delta == nullptr || lora_seconds != nullptr ? 0 : delta->shrink_parts(shares);
  in_shares(shares, parts + shrinks, [&](long share, long part) {
    if (part < parts) product.run(share, part);
    else delta->shrink_piece(share * shrinks + part - parts, shares * shrinks);
  });
  if (delta == nullptr) return;
  const double began = lora_seconds == nullptr ? 0 : seconds();
  if (shrinks == 0) delta->shrink(shares);
  delta->exchange();
  delta->expand(shares);
  if (lora_seconds != nullptr) *lora_seconds += seconds() - began;
}

template <class Math>
void float_linear(const float* x, long x_stride, long T, long in, const void* w, long out, const float* bias, float* y,
                  const LoraDelta* delta, double* lora_seconds, long shares) {
  auto finish = [&](long row, long rows, long column, long columns) {
    if (bias != nullptr) add_bias(bias, y, out, row, rows, column, columns);
  };
  Product<Math, decltype(finish)> product = {
      {x, x_stride}, T, {(const typename Math::Weight*)w, in}, out, y, shares, finish};
  run_product(product, delta, lora_seconds);
}

// y[t, n] = sum of integers * (x_scale[t] * w_scale[n]) + bias[n].
void int8_linear(const float* x, long x_stride, long T, long in, const int8_t* w, const float* w_scale, long out,
                 const float* bias, float* y, const LoraDelta* delta, double* lora_seconds, long shares) {
  const long steps = (in + 1) / 2, q_stride = (in + kPanel - 1) / kPanel * kPanel;
  static thread_local std::vector<int16_t> q_buffer;  // the calling thread's, kept for its next call
  static thread_local std::vector<float> scale_buffer;
  q_buffer.resize(T * q_stride);
  scale_buffer.resize(T);
  int16_t* q = q_buffer.data();
  float* x_scale = scale_buffer.data();
  for_rows(T, 8 * T * in, (int)shares,
           [&](long t) { x_scale[t] = quantize_row(x + t * x_stride, in, q + t * q_stride); });
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
  Product<Int8, decltype(finish)> product = {{q, q_stride}, T, {w, steps}, out, y, shares, finish};
  run_product(product, delta, lora_seconds);
}

// group_tile.h's sums, and the bias.
template <class Math>
void group_linear(const float* x, long x_stride, long T, long in, const void* w, const GroupScales& scales, long out,
                  const float* bias, float* y, const LoraDelta* delta, double* lora_seconds, long shares) {
  const long steps = (in + Math::kPerStep - 1) / Math::kPerStep, groups = scales.count;
  const Chunks<Math> chunks(steps, false);
  using Input = typename Math::Input;
  static thread_local std::vector<Input> q_buffer;  // the calling thread's, kept for its next call
  static thread_local std::vector<float> scale_buffer;
  static thread_local std::vector<int32_t> sum_buffer;
  q_buffer.resize(chunks.count * T * kAsideStride<Math>);
  scale_buffer.resize(T * groups), sum_buffer.resize(T * groups);
  Input* q = q_buffer.data();
  float* x_scale = scale_buffer.data();
  int32_t* x_sum = sum_buffer.data();
  const int32_t zero_point = scales.zero == nullptr ? Math::kZero : 1;
  for_rows(T, 8 * T * in, (int)shares, [&](long t) {
    const auto place = [&](long k) {
      return q + (k / Math::kChunkDepth * T + t) * kAsideStride<Math> + k % Math::kChunkDepth;
    };
    quantize_groups<Input>(x + t * x_stride, in, scales.size, zero_point, place, x_scale + t * groups,
                           x_sum + t * groups);
  });
  auto finish = [&](long row, long rows, long column, long columns) {
    if (bias != nullptr) add_bias(bias, y, out, row, rows, column, columns);
  };
  Product<Math, decltype(finish)> product = {
      {nullptr, 0, T, q, {x_scale, x_sum, groups}},
      T,
      {(const typename Math::Weight*)w, steps, PanelGroups(scales), scales.size / Math::kPerStep},
      out,
      y,
      shares,
      finish};
  run_product(product, delta, lora_seconds);
}

}  // namespace
}  // namespace loraplex

using namespace loraplex;

namespace loraplex {
namespace {

void linear(int32_t format, const float* x, int64_t x_stride, int64_t rows, int64_t in, const void* weight,
            const void* weight_scale, int64_t out, const float* bias, float* y, const LoraDelta* delta,
            double* lora_seconds, int32_t threads) {
  if (rows == 0) return;
  const long shares = in * out * (rows + 4) + (delta == nullptr ? 0 : delta->cost()) < kWorthThreads ? 1 : threads;
  switch (format) {
    case kF32: return float_linear<F32>(x, x_stride, rows, in, weight, out, bias, y, delta, lora_seconds, shares);
    case kF16: return float_linear<F16>(x, x_stride, rows, in, weight, out, bias, y, delta, lora_seconds, shares);
    case kBF16: return float_linear<BF16>(x, x_stride, rows, in, weight, out, bias, y, delta, lora_seconds, shares);
    case kInt8:
      return int8_linear(x, x_stride, rows, in, (const int8_t*)weight, (const float*)weight_scale, out, bias, y, delta,
                         lora_seconds, shares);
    case kInt4:
      return group_linear<Int4Groups>(x, x_stride, rows, in, weight, *(const GroupScales*)weight_scale, out, bias, y,
                                      delta, lora_seconds, shares);
    case kInt4Bytes:
      return group_linear<Int4Bytes>(x, x_stride, rows, in, weight, *(const GroupScales*)weight_scale, out, bias, y,
                                     delta, lora_seconds, shares);
    case kInt8Groups:
      return group_linear<Int8Groups>(x, x_stride, rows, in, weight, *(const GroupScales*)weight_scale, out, bias, y,
                                      delta, lora_seconds, shares);
  }
}

}  // namespace
}  // namespace loraplex

LORAPLEX_API void loraplex_linear(int32_t format, const float* x, int64_t x_stride, int64_t rows, int64_t in,
                                  const void* weight, const void* weight_scale, int64_t out, const float* bias,
                                  float* y, int32_t threads) {
  linear(format, x, x_stride, rows, in, weight, weight_scale, out, bias, y, nullptr, nullptr, threads);
}

LORAPLEX_API void loraplex_lora_linear(int32_t format, const float* x, int64_t x_stride, int64_t rows, int64_t in,
                                       const void* weight, const void* weight_scale, int64_t out, const float* bias,
                                       float* y, const LoraTable* table, const LoraSegments* segments,
                                       double* lora_seconds, int32_t threads) {
  const LoraDelta delta(*table, *segments, x, x_stride, y, out);
  linear(format, x, x_stride, rows, in, weight, weight_scale, out, bias, y, delta.work.empty() ? nullptr : &delta,
         lora_seconds, threads);
}
