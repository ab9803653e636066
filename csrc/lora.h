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
  long a_columns = 0;       // the ranks of all slices, or this rank's share of them
  float* h = nullptr;       // [rows, h_stride], of all slices
  long h_stride = 0;
  float* own = nullptr;     // [rows, own_stride]: what is made of A here; h, unless ranks put theirs side by side
  long own_stride = 0;
  bool is_exchanged = false;
  int64_t shrink_cost = 0, expand_cost = 0;
  long segment = 0, segments = 0;  // of projections: the first and how many; 0: a block
};

// The delta and the gain of every segment and slice (lora.cpp has the formula). One at a time per calling thread: the
// memory behind it is that thread's.
struct LoraDelta {
  LoraDelta(const LoraTable& table, const LoraSegments& segments, const float* x, long x_stride, float* y,
            long y_stride);

  // h = x A^T; then y += h B^T. On so many shares; or a piece of the first, of which a share has so many parts. Between
  // them, once and on the calling thread, what ranks exchange.
  void shrink(long shares) const;
  void exchange() const;
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
  long own_size = 0;            // floats that ranks exchange; they begin at `exchanged`
  float* exchanged = nullptr;
  int64_t shrink_cost = 0, expand_cost = 0;

  const LoraEntry& entry(const LoraWork& w, long slice) const { return table.entry(w.slot, slice); }
  // Of a slice: the rows of B that this rank has, and the output that the first one is of.
  long b_rows(const LoraEntry& entry, long slice) const {
    return table.out[slice] / (entry.is_exchanged != 0 && table.is_cut_by_inputs != 0 ? table.board->size : 1);
  }
  long first_output(const LoraEntry& entry, long slice) const {
    return b_rows(entry, slice) < table.out[slice] ? b_rows(entry, slice) * table.board->rank : 0;
  }
  // The columns of A.
  long a_columns_of(const LoraEntry& entry) const {
    return entry.rank / (entry.is_exchanged != 0 && table.is_cut_by_inputs == 0 ? table.board->size : 1);
  }

 private:
  void place(long h_size);
  void gather(const LoraWork& w, const float* all) const;
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
