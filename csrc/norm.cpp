// RMS norm: y = x / sqrt(mean(x^2) + eps) * weight, row by row; layer norm: the same of x - mean(x), and a bias. The
// mean may be over all ranks' parts of a row: then their sums of squares are added in the order of ranks.
//
// A sum is four chains of Vec16, the 16 elements at k going to chain (k / 16) mod 4: the same bits for
// every width of a vector and number of threads.
#include <cmath>

#include "api.h"
#include "operators.h"
#include "rows.h"
#include "vec.h"

namespace loraplex {
namespace {

constexpr long kChains = 4;  // an FMA takes 4 cycles

// at(k, count) gives 16 elements of the row, of which `count` are real and the others 0.
template <class At>
float sum_squares(long size, At at) {
  Vec16 sum[kChains] = {zero(), zero(), zero(), zero()};
  long k = 0;
  for (; k + 16 * kChains <= size; k += 16 * kChains)
#pragma GCC unroll 4
    for (long c = 0; c < kChains; c++) {
      const Vec16 v = at(k + 16 * c, 16);
      sum[c] = fma(v, v, sum[c]);
    }
#pragma GCC unroll 4
  for (long c = 0; c < kChains; c++) {
    if (k + 16 * c >= size) break;
    const Vec16 v = at(k + 16 * c, size - k - 16 * c);
    sum[c] = fma(v, v, sum[c]);
  }
  return sum_lanes(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
}

template <class At>
float inverse_rms(long size, float eps, At at) {
  return 1.f / std::sqrt(sum_squares(size, at) / (float)size + eps);
}

float row_sum(const float* x, long size) {
  Vec16 sum[kChains] = {zero(), zero(), zero(), zero()};
  for (long k = 0, c = 0; k < size; k += 16, c = (c + 1) % kChains) sum[c] = add(sum[c], load_first(x + k, size - k));
  return sum_lanes(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
}

// bias: or null
void layer_norm_row(const float* x, const float* weight, const float* bias, long size, float eps, float* y) {
  const Vec16 mean = set1(row_sum(x, size) / (float)size);
  for (long k = 0; k < size; k += 16) store_first(y + k, sub(load_first(x + k, size - k), mean), size - k);
  const Vec16 factor = set1(inverse_rms(size, eps, [=](long k, long count) { return load_first(y + k, count); }));
  for (long k = 0; k < size; k += 16) {
    const long count = size - k;
    const Vec16 v = mul(mul(load_first(y + k, count), factor), load_first(weight + k, count));
    store_first(y + k, bias == nullptr ? v : add(v, load_first(bias + k, count)), count);
  }
}

void scale_row(const float* x, const float* weight, float factor, long size, float* y) {
  const Vec16 all = set1(factor);
  long k = 0;
  for (; k + 16 <= size; k += 16) store(y + k, mul(mul(load(x + k), all), load(weight + k)));
  if (k < size)
    store_first(y + k, mul(mul(load_first(x + k, size - k), all), load_first(weight + k, size - k)), size - k);
}

}  // namespace
}  // namespace loraplex

using namespace loraplex;

// Row r of x is at (r / inner) * outer_stride + (r % inner) * inner_stride: heads inside a fused qkv output.
// y [rows, size] is dense.
LORAPLEX_API void loraplex_rms_norm(const float* x, int64_t outer_stride, int64_t inner, int64_t inner_stride,
                                    int64_t rows, int64_t size, const float* weight, float eps, float* y,
                                    int32_t threads) {
  for_rows(rows, rows * size, threads, [=](long r) {
    const float* row = x + r / inner * outer_stride + r % inner * inner_stride;
    const float factor = inverse_rms(size, eps, [=](long k, long count) { return load_first(row + k, count); });
    scale_row(row, weight, factor, size, y + r * size);
  });
}

// Of rows of which each rank has `size` entries; sums [rows] is scratch; y [rows, size] is dense.
LORAPLEX_API void loraplex_rms_norm_ranks(RankBoard* board, const float* x, int64_t x_stride, int64_t rows,
                                          int64_t size, const float* weight, float eps, float* sums, float* y,
                                          int32_t threads) {
  for_rows(rows, rows * size, threads, [=](long r) {
    const float* row = x + r * x_stride;
    sums[r] = sum_squares(size, [=](long k, long count) { return load_first(row + k, count); });
  });
  loraplex_sum_ranks(board, sums, rows);
  const float width = float(size) * float(board->size);
  for_rows(rows, rows * size, threads, [=](long r) {
    scale_row(x + r * x_stride, weight, 1.f / std::sqrt(sums[r] / width + eps), size, y + r * size);
  });
}

// residual += scale * x, then x = rms_norm(residual): both in place.
LORAPLEX_API void loraplex_add_rms_norm(float* x, int64_t x_stride, float* residual, int64_t residual_stride,
                                        int64_t rows, int64_t size, const float* weight, float eps, float scale,
                                        int32_t threads) {
  const auto norm_rows = [=](auto scaled) {
    for_rows(rows, 2 * rows * size, threads, [=](long r) {
      float *row = x + r * x_stride, *total = residual + r * residual_stride;
      const float factor = inverse_rms(size, eps, [=](long k, long count) {
        const Vec16 v = add(scaled(load_first(row + k, count)), load_first(total + k, count));
        store_first(total + k, v, count);
        return v;
      });
      scale_row(total, weight, factor, size, row);
    });
  };
  if (scale == 1.f) norm_rows([](Vec16 v) { return v; });
  else norm_rows([by = set1(scale)](Vec16 v) { return mul(v, by); });
}

// residual += scale * x, in place.
LORAPLEX_API void loraplex_add_scaled(const float* x, int64_t x_stride, float* residual, int64_t residual_stride,
                                      int64_t rows, int64_t size, float scale, int32_t threads) {
  for_rows(rows, rows * size, threads, [=](long r) {
    const float* row = x + r * x_stride;
    float* total = residual + r * residual_stride;
    const Vec16 by = set1(scale);
    for (long k = 0; k < size; k += 16)
      store_first(total + k, add(mul(load_first(row + k, size - k), by), load_first(total + k, size - k)), size - k);
  });
}

// Layer norm of rows; bias: or null; y [rows, size] is dense.
LORAPLEX_API void loraplex_layer_norm(const float* x, int64_t x_stride, int64_t rows, int64_t size,
                                      const float* weight, const float* bias, float eps, float* y, int32_t threads) {
  for_rows(rows, 2 * rows * size, threads,
           [=](long r) { layer_norm_row(x + r * x_stride, weight, bias, size, eps, y + r * size); });
}
