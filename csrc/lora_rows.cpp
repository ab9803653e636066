// y[s:e] += scale * x[s:e] W^T for the segments of a step, W row-major as callers keep it: [rank, in], one per slot.
//
// The operators of compat/punica_ops.py. A piece of work takes some rows of W, packs them into panels (lora_layout.h)
// in memory of its thread that stays in the cache, and multiplies with them as lora.cpp does: the same chain over k, so
// the same batch invariance.
#include <algorithm>
#include <vector>

#include "api.h"
#include "lora_tile.h"
#include "rows.h"

LORAPLEX_API void loraplex_pack_lora(int32_t format, const loraplex::LoraSource* slices, int64_t num_slices, int64_t in,
                                     void* block);

namespace loraplex {
namespace {

constexpr long kPanelBytes = 256 << 10;  // of a piece
constexpr long kRunRows = 256;           // of x in a piece: packing for them again is little beside their product

struct Run {
  long segment, row, rows, column, columns;
};

// Rows of W in a piece.
long run_columns(long in) {
  return std::clamp<long>(kPanelBytes / (in * sizeof(float)) / kPanel * kPanel, kPanel, kLoraPanel);
}

}  // namespace
}  // namespace loraplex

using namespace loraplex;

// Of entries a, rank, scale and format are read, and one slice.
LORAPLEX_API void loraplex_add_rows(const LoraTable* table, const LoraSegments* segments, const float* x,
                                    int64_t x_stride, float* y, int64_t y_stride, int32_t threads) {
  const long in = table->in, most_columns = run_columns(in);
  std::vector<Run> runs;
  long elements = 0;
  for (long i = 0; i < segments->count; i++) {
    const long rank = table->entry(segments->slot[i], 0).rank, end = segments->end[i];
    for (long row = segments->start[i]; row < end; row += kRunRows)
      for (long column = 0; column < rank; column += most_columns)
        runs.push_back({i, row, std::min(kRunRows, end - row), column, std::min(most_columns, rank - column)});
    elements += rank * in;
  }
  for_rows(runs.size(), elements, threads, [&](long i) {
    static thread_local std::vector<float> part;
    const Run& r = runs[i];
    const LoraEntry& entry = table->entry(segments->slot[r.segment], 0);
    const int32_t format = entry.format;
    auto run = [&](auto math) {
      using Math = decltype(math);
      using Weight = typename Math::Weight;
      const LoraSource source = {.a = (const Weight*)entry.a + r.column * in, .b = nullptr, .bias = nullptr,
                                 .gain = nullptr, .input_gain = nullptr,
                                 .a_stride = in, .b_stride = 0, .a_format = format, .b_format = format,
                                 .rank = 0, .out = 0, .a_rows = r.columns, .b_rows = 0};
      part.resize(part_bytes(in, most_columns, sizeof(float)) / sizeof(float));
      loraplex_pack_lora(format, &source, 1, in, part.data());
      run_product<Math>({.x = x + r.row * x_stride, .x_stride = x_stride, .rows = r.rows,
                         .w = (const Weight*)part.data(), .depth = in, .width = part_width(r.columns),
                         .y = y + r.row * y_stride + r.column, .y_stride = y_stride, .columns = r.columns,
                         .adds = true, .scale = segments->weight[r.segment] * entry.scale},
                        0, vectors_of(r.columns));
    };
    switch (format) {
      case kF32: return run(F32());
      case kF16: return run(F16());
      case kBF16: return run(PlainBF16());
    }
  });
}
