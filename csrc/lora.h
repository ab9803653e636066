// The LoRA delta of one linear for all segments of a step (lora.cpp), in parts that threads share.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "api.h"

namespace loraplex {

// A segment and the block that it goes through; or segments side by side that go through the same projections.
struct LoraWork {
  long row, rows, slot;
  float weight;
  int32_t format = kF32;
  const void* a = nullptr;
  const void* b = nullptr;  // of the first slice that has one; the others follow
  const char* end = nullptr;
  long a_columns = 0;       // the ranks of all slices
  float* h = nullptr;       // [rows, h_stride]
  long h_stride = 0;
  int64_t shrink_cost = 0, expand_cost = 0;
  long segment = 0, segments = 0;  // of projections: the first and how many; 0: a block
};

// The delta and the gain of every segment and slice (lora.cpp has the formula). One at a time per calling thread: the
// memory behind it is that thread's.
struct LoraDelta {
  LoraDelta(const LoraTable& table, const LoraSegments& segments, const float* x, long x_stride, float* y,
            long y_stride);

  // h = x A^T; then y += h B^T. On so many shares; or a piece of the first, of which a share has so many parts.
  void shrink(long shares) const;
  void expand(long shares) const;
  void shrink_piece(long piece, long pieces) const;
  long shrink_parts(long shares) const;
  int64_t bytes() const;  // of all blocks
  int64_t cost() const { return shrink_cost + expand_cost; }

  const LoraTable& table;
  const LoraSegments& segments;
  const float* x;
  long x_stride;
  float* y;
  long y_stride;
  std::vector<LoraWork>& work;  // empty: nothing to do
  bool overlaps = false;        // some row is in several segments
  int64_t shrink_cost = 0, expand_cost = 0;

  long entry(const LoraWork& w, long slice) const { return slice * table.capacity + w.slot; }
};

// The blocks that a delta reads, in order: a piece of them, for a product with memory bandwidth to spare to prefetch.
class LoraStream {
 public:
  LoraStream() = default;  // of nothing
  LoraStream(const LoraDelta& delta, long piece, long pieces);
  bool is_empty() const { return left_ <= 0; }
  // Where the next bytes are; so many, or as many as a block has left.
  const char* take(int64_t bytes);

 private:
  const std::vector<LoraWork>* work_ = nullptr;
  size_t index_ = 0;
  const char *at_ = nullptr, *end_ = nullptr;
  int64_t left_ = 0;
};

}  // namespace loraplex
