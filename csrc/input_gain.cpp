// x[s:e] = (1 + weight (input_gain - 1)) x[s:e] for all segments of a step, in place: before a linear that has one.
//
// BATCH INVARIANCE. An element is multiplied once for each of its segments, in their order.
#include "gain.h"
#include "lora_layout.h"
#include "operators.h"
#include "rows.h"

using namespace loraplex;

LORAPLEX_API void loraplex_scale_input(const LoraTable* table, const LoraSegments* segments, float* x,
                                       int64_t x_stride, int32_t threads) {
  constexpr long kMostPieces = 16;  // of the columns, so that segments may share rows
  const long in = table->in, vectors = vectors_of(in), pieces = std::min(vectors, kMostPieces);
  long elements = 0;
  for (long i = 0; i < segments->count; i++)
    if (table->entry(segments->slot[i], 0).input_gain != 0) elements += in * (segments->end[i] - segments->start[i]);
  if (elements == 0) return;
  for_rows(pieces, elements, threads, [&](long piece) {
    const long begin = vectors * piece / pieces * kPanel, end = std::min(vectors * (piece + 1) / pieces * kPanel, in);
    for (long i = 0; i < segments->count; i++) {
      const auto* gain = (const float*)table->entry(segments->slot[i], 0).input_gain;
      if (gain == nullptr) continue;
      for (long t = segments->start[i]; t < segments->end[i]; t++) {
        float* row = x + t * x_stride;
        for (long n = begin; n < end; n += kPanel) {
          const Vec16 factor = weighted_gain(load_first(gain + n, end - n), segments->weight[i]);
          store_first(row + n, mul(factor, load_first(row + n, end - n)), end - n);
        }
      }
    }
  });
}
