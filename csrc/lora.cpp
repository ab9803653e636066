// y = (1 + weight (gain - 1)) y + weight * (gain * scale * (x[s:e] A^T) B^T + bias), y being y[s:e, slice], for all
// segments of a step and all slices of a linear. No gain is a gain of 1.
//
// BATCH INVARIANCE. h[t, r] is one chain of fused multiply-adds over k in order from 0, d[t, n] one chain over the rank
// from 0; then y = fma(weight * scale, d, y) and y = fma(weight, bias, y). With a gain f = fma(weight, gain, 1 -
// weight), y = fma(weight * scale * gain, d, f * y), or y = f * y where there are no A and B, and then the bias. A row
// that is in several segments gets them in their order. So its bits depend on its own x, y and adapters: not on other
// rows or segments, on how rows are cut into segments, or on the number of threads.
//
// Two phases: shrink (h = x A^T) of all segments, then expand (y += h B^T). Between them ranks exchange their parts of
// h, where A and B are cut finer than their linear (LoraTable in api.h).
#include <utility>
#include <vector>

#include "lora.h"
#include "lora_tile.h"
#include "operators.h"
#include "projections.h"
#include "ranks.h"
#include "team.h"

namespace loraplex {
namespace {

std::vector<LoraWork>& own_work() {
  static thread_local std::vector<LoraWork> work;  // the calling thread's, kept for its next call
  return work;
}

constexpr int64_t kWorthThreads = 1 << 20;  // of cost, see below: about 25 us
constexpr long kEntriesAhead = 3;               // slices of a linear
constexpr int64_t kPartCost = 1 << 19, kMostParts = 16;

// Cost of a product: weights times (rows + 4), because reading a weight takes as long as multiplying some rows by it.
int64_t cost_of(int64_t weights, long rows) { return weights * (rows + 4); }

// The units (rows or vectors of columns) of an item that are in a piece, when all items lie end to end on a line as
// long as their cost and that is cut into equal pieces.
class Piece {
 public:
  Piece(int64_t total, long piece, long pieces) : begin_(total * piece / pieces), end_(total * (piece + 1) / pieces) {}
  template <class F>
  void take(int64_t cost, long units, F f) {  // f(first unit, unit behind the last)
    auto cut = [&](int64_t at) {
      return long(std::clamp(double(at - before_) / double(cost), 0., 1.) * double(units) + .5);
    };
    const long first = cut(begin_), last = cut(end_);
    before_ += cost;
    if (first < last) f(first, last);
  }

 private:
  int64_t begin_, end_, before_ = 0;
};

template <class F>
void with_format(int32_t format, F f) {
  switch (format) {
    case kF32: return f(F32());
    case kF16: return f(F16());
    case kBF16: return f(PlainBF16());
  }
}

// Of a part that is read soon: what the part before it does not prefetch.
void prefetch_start(const void* part, long nbytes = kLoraAheadBytes) {
  for (long i = 0; i < nbytes; i += 64) prefetch((const char*)part + i);
}

// ---- the two products

// h = x A^T for rows [t0, t1) of a segment.
template <class Math>
LoraProduct<Math> shrink_product(const LoraDelta& delta, const LoraWork& w, long t0, long t1) {
  return {.x = delta.x + (w.row + t0) * delta.x_stride, .x_stride = delta.x_stride, .rows = t1 - t0,
          .w = (const typename Math::Weight*)w.a, .depth = delta.table.in, .width = part_width(w.a_columns),
          .y = w.own + t0 * w.own_stride, .y_stride = w.own_stride, .columns = w.a_columns, .adds = false, .scale = 0,
          .is_one_panel = w.segments > 0};
}

// vectors [v0, v1) of the columns of A
void shrink(const LoraDelta& delta, const LoraWork& w, long t0, long t1, long v0, long v1) {
  with_format(w.format, [&](auto math) { run_product(shrink_product<decltype(math)>(delta, w, t0, t1), v0, v1); });
}

void apply_gain(const float* gain, float weight, float* y, long y_stride, long rows, long begin, long end) {
  for (long t = 0; t < rows; t++)
    for (long n = begin; n < end; n += kPanel) {
      float* to = y + t * y_stride + n;
      const Vec16 factors = weighted_gain(load_first(gain + n, end - n), weight);
      store_first(to, mul(factors, load_first(to, end - n)), end - n);
    }
}

void add_bias(const float* bias, float weight, float* y, long y_stride, long rows, long begin, long end) {
  const Vec16 weights = set1(weight);
  for (long t = 0; t < rows; t++)
    for (long n = begin; n < end; n += kPanel) {
      float* to = y + t * y_stride + n;
      store_first(to, fma(weights, load_first(bias + n, end - n), load_first(to, end - n)), end - n);
    }
}

// Gain, h B^T and bias for rows [t0, t1) of a segment and vectors [v0, v1) of a slice; its h begins at h_column. Where
// B has some of the outputs alone, the vectors are of these, and the first ones bring gain and bias of the others.
void expand(const LoraDelta& delta, const LoraWork& w, long slice, long h_column, long t0, long t1, long v0, long v1) {
  const LoraTable& table = delta.table;
  if (w.segments > 0)
    return with_format(w.format, [&](auto math) { expand_shared<decltype(math)>(delta, w, slice, t0, t1, v0, v1); });
  const LoraEntry& entry = delta.entry(w, slice);
  const long rank = entry.rank, begin = delta.first_output(entry, slice), columns = delta.b_rows(entry, slice);
  float* y = delta.y + (w.row + t0) * delta.y_stride + table.out_offset[slice] + begin;
  const auto* gain = entry.gain == 0 ? nullptr : (const float*)entry.gain + begin;
  const auto* bias = entry.bias == 0 ? nullptr : (const float*)entry.bias + begin;
  const long first = v0 * kPanel, last = std::min(v1 * kPanel, columns);
  if (rank > 0) {
    with_format(w.format, [&](auto math) {
      using Math = decltype(math);
      const LoraProduct<Math> product = {.x = w.h + t0 * w.h_stride + h_column,
                                         .x_stride = w.h_stride, .rows = t1 - t0,
                                         .w = (const typename Math::Weight*)entry.b, .depth = rank,
                                         .width = part_width(columns), .y = y, .y_stride = delta.y_stride,
                                         .columns = columns, .adds = true, .scale = w.weight * entry.scale};
      if (gain == nullptr) return run_product(product, v0, v1);
      run_product(product, v0, v1, Gain{gain, w.weight});
    });
  } else if (gain != nullptr) {
    apply_gain(gain, w.weight, y, delta.y_stride, t1 - t0, first, last);
  }
  if (bias != nullptr) add_bias(bias, w.weight, y, delta.y_stride, t1 - t0, first, last);
  if (columns == table.out[slice] || first > 0 || last == 0) return;
  using Outputs = std::pair<long, long>;
  for (const auto& [from, to] : {Outputs(-begin, 0), Outputs(columns, table.out[slice] - begin)}) {
    if (gain != nullptr) apply_gain(gain, w.weight, y, delta.y_stride, t1 - t0, from, to);
    if (bias != nullptr) add_bias(bias, w.weight, y, delta.y_stride, t1 - t0, from, to);
  }
}

// f(slice, first column of its h, its cost) for each slice of a segment's adapter.
template <class F>
void for_slices(const LoraDelta& delta, const LoraWork& w, F f) {
  long h_column = 0;
  for (long slice = 0; slice < delta.table.num_slices; slice++) {
    if (w.segments > 0) {
      f(slice, 0, cost_of((w.a_columns + 1) * delta.table.out[slice], w.rows));
      continue;
    }
    const LoraEntry& entry = delta.entry(w, slice);
    if (entry.rank > 0 || entry.bias != 0 || entry.gain != 0)
      f(slice, h_column, cost_of((entry.rank + 1) * delta.b_rows(entry, slice), w.rows));
    h_column += entry.rank;
  }
}

// ---- pieces

// Segments of one row and one vector of columns of A, until there are enough to run at the same time.
class Narrow {
 public:
  explicit Narrow(const LoraDelta& delta) : delta_(delta) {}
  ~Narrow() { flush(); }
  void add(const LoraWork& w) {
    if (count_ > 0 && waiting_[0]->format != w.format) flush();
    waiting_[count_++] = &w;
    if (count_ < kNarrow) return;
    with_format(w.format, [&](auto math) {
      LoraProduct<decltype(math)> products[kNarrow];
      for (int i = 0; i < kNarrow; i++) products[i] = shrink_product<decltype(math)>(delta_, *waiting_[i], 0, 1);
      run_narrow(products);
    });
    count_ = 0;
  }

 private:
  void flush() {
    for (int i = 0; i < count_; i++) shrink(delta_, *waiting_[i], 0, 1, 0, 1);
    count_ = 0;
  }
  const LoraDelta& delta_;
  const LoraWork* waiting_[kNarrow];
  int count_ = 0;
};

// Few rows are cut by columns, so that each piece reads weights of its own; many by rows.
void shrink_piece(const LoraDelta& delta, long piece, long pieces) {
  const std::vector<LoraWork>& work = delta.work;
  Piece own(delta.shrink_cost, piece, pieces);
  Narrow narrow(delta);
  for (size_t i = 0; i < work.size(); i++) {
    const LoraWork& w = work[i];
    if (w.a_columns == 0) continue;
    const long vectors = vectors_of(w.a_columns);
    const bool by_columns = vectors > 1 && w.rows <= kMaxRows;
    own.take(w.shrink_cost, by_columns ? vectors : w.rows, [&](long first, long last) {
      if (vectors == 1 && w.rows == 1) {
        if (i + kNarrow < work.size()) prefetch_start(work[i + kNarrow].a, kLoraAheadBytes / kNarrow);
        return narrow.add(w);
      }
      prefetch_start(i + 1 < work.size() ? work[i + 1].a : work[0].b);
      if (by_columns) shrink(delta, w, 0, w.rows, first, last);
      else shrink(delta, w, first, last, 0, vectors);
    });
  }
}

// Of a slice of item i, if there is one: gains are a stream beside that of the blocks.
void prefetch_gain(const LoraDelta& delta, size_t i, long slice) {
  if (i == delta.work.size()) return;
  prefetch_start((const void*)delta.entry(delta.work[i], slice).gain, kGainAheadBytes);
}

void expand_piece(const LoraDelta& delta, long piece, long pieces) {
  Piece own(delta.expand_cost, piece, pieces);
  for (size_t i = 0; i < delta.work.size(); i++) {
    const LoraWork& w = delta.work[i];
    for_slices(delta, w, [&](long slice, long h_column, int64_t cost) {
      const long vectors = vectors_of(delta.b_rows(delta.entry(w, slice), slice));
      const bool by_columns = w.rows <= 4 * kMaxRows;
      own.take(cost, by_columns ? vectors : w.rows, [&](long first, long last) {
        const bool is_last = slice + 1 == delta.table.num_slices;
        if (is_last && i + 1 < delta.work.size()) prefetch_start(delta.work[i + 1].b);
        if (delta.entry(w, slice).gain != 0)
          prefetch_gain(delta, is_last ? i + 1 : i, is_last ? 0 : slice + 1);
        if (by_columns) expand(delta, w, slice, h_column, 0, w.rows, first, last);
        else expand(delta, w, slice, h_column, first, last, 0, vectors);
      });
    });
  }
}

// A piece has the same columns in all segments, and takes the segments in their order.
void expand_overlapping_piece(const LoraDelta& delta, long piece, long pieces) {
  for (const LoraWork& w : delta.work)
    for_slices(delta, w, [&](long slice, long h_column, int64_t) {
      const long vectors = vectors_of(delta.b_rows(delta.entry(w, slice), slice));
      expand(delta, w, slice, h_column, 0, w.rows, vectors * piece / pieces, vectors * (piece + 1) / pieces);
    });
}

// Of a share.
long parts_of(int64_t cost, long shares) {
  return shares == 1 ? 1 : std::clamp<int64_t>(cost / (shares * kPartCost), 1, kMostParts);
}

}  // namespace

// ---- what there is to do

LoraDelta::LoraDelta(const LoraTable& table, const LoraSegments& segments, const float* x, long x_stride, float* y,
                     long y_stride)
    : table(table), segments(segments), x(x), x_stride(x_stride), y(y), y_stride(y_stride), work(own_work()) {
  long h_size = 0, last_end = 0;
  work.clear();
  for (long i = 0; i < segments.count; i++) {
    LoraWork w = {.row = segments.start[i], .rows = segments.end[i] - segments.start[i], .slot = segments.slot[i],
                  .weight = segments.weight[i]};
    bool has_more = false;
    long h_columns = 0;
    if (const long slice = shared_slice_of(table, w.slot); slice >= 0) {
      const LoraEntry& at = entry(w, slice);
      w.a = (const void*)at.a, w.b = (const void*)at.b, w.end = (const char*)w.a;
      w.format = at.format, w.a_columns = at.rank, w.segment = i, w.segments = 1;
      for (; i + 1 < segments.count && segments.start[i + 1] == w.row + w.rows; i++, w.segments++) {
        const long next = shared_slice_of(table, segments.slot[i + 1]);
        if (next < 0 || (const void*)table.entry(segments.slot[i + 1], next).a != w.a) break;
        w.rows += segments.end[i + 1] - segments.start[i + 1];
      }
    }
    for (long slice = w.segments > 0 ? table.num_slices : 0; slice < table.num_slices; slice++) {
      const LoraEntry& at = entry(w, slice);
      has_more |= at.bias != 0 || at.gain != 0;
      if (at.rank == 0) continue;
      w.format = at.format;
      w.a = (const void*)at.a;
      if (w.b == nullptr) w.b = (const void*)at.b;
      w.end = (const char*)at.b + part_bytes(at.rank, b_rows(at, slice), w.format == kF32 ? 4 : 2);
      if (at.gain != 0) w.end = (const char*)((const float*)at.gain + table.out[slice]);
      w.a_columns += a_columns_of(at);
      h_columns += at.rank;
      w.is_exchanged |= at.is_exchanged != 0;
    }
    for (long ahead = 0; ahead < kEntriesAhead; ahead++)  // of the linear that comes next
      prefetch(&entry(w, table.num_slices + ahead));
    if (w.a_columns == 0 && !has_more) continue;
    overlaps |= w.row < last_end;
    last_end = std::max(last_end, w.row + w.rows);
    w.own_stride = vectors_of(w.a_columns) * kPanel;
    w.h_stride = std::max(w.own_stride, vectors_of(h_columns) * kPanel);
    h_size += w.rows * w.h_stride;
    if (w.is_exchanged) own_size += w.rows * w.own_stride;
    w.shrink_cost = cost_of(w.a_columns * table.in, w.rows);
    for_slices(*this, w, [&](long, long, int64_t cost) { w.expand_cost += cost; });
    shrink_cost += w.shrink_cost;
    expand_cost += w.expand_cost;
    work.push_back(w);
  }
  place(h_size);
}

// Each work's h and its own part of it. What ranks exchange lies together.
void LoraDelta::place(long h_size) {
  static thread_local std::vector<float> buffer;  // the calling thread's, kept for its next call
  if ((long)buffer.size() < own_size + h_size) buffer.resize(own_size + h_size);
  float *own = buffer.data(), *h = own + own_size;
  exchanged = own;
  for (LoraWork& w : work) {
    w.h = h, h += w.rows * w.h_stride;
    w.own = w.is_exchanged ? own : w.h;
    if (!w.is_exchanged) continue;
    own += w.rows * w.own_stride;
    if (table.is_cut_by_inputs != 0) w.h = w.own;  // the sum is in place
  }
}

void LoraDelta::exchange() const {
  if (own_size == 0) return;
  RankBoard& board = *table.board;
  if (table.is_cut_by_inputs != 0) return loraplex_sum_ranks(&board, exchanged, own_size);
  static thread_local std::vector<float> all;  // [ranks, own_size]
  all.resize(board.size * own_size);
  loraplex::exchange(board, exchanged, own_size, true, [&](int64_t first, int64_t n, auto parts) {
    for (int32_t rank = 0; rank < board.size; rank++)
      std::copy(parts(rank), parts(rank) + n, all.data() + rank * own_size + first);
  });
  for (const LoraWork& w : work)
    if (w.is_exchanged) gather(w, all.data());
}

// h of a work, of what all ranks have: of each slice their columns side by side, in the order of ranks.
void LoraDelta::gather(const LoraWork& w, const float* all) const {
  const RankBoard& board = *table.board;
  for (long t = 0; t < w.rows; t++) {
    const float* from = w.own + t * w.own_stride;
    float* to = w.h + t * w.h_stride;
    for (long slice = 0; slice < table.num_slices; slice++) {
      const LoraEntry& at = entry(w, slice);
      const long columns = a_columns_of(at);
      if (at.is_exchanged == 0) {
        to = std::copy(from, from + columns, to);
      } else {
        for (int32_t rank = 0; rank < board.size; rank++) {
          const float* part = all + rank * own_size + (from - exchanged);
          to = std::copy(part, part + columns, to);
        }
      }
      from += columns;
    }
  }
}

int64_t LoraDelta::bytes() const {
  int64_t total = 0;
  for (const LoraWork& w : work) total += w.end - (const char*)w.a;
  return total;
}

long LoraDelta::shrink_parts(long shares) const { return parts_of(shrink_cost, shares); }

void LoraDelta::shrink_piece(long piece, long pieces) const { loraplex::shrink_piece(*this, piece, pieces); }

void LoraDelta::shrink(long shares) const {
  const long parts = shrink_parts(shares);
  in_shares(shares, parts, [&](long share, long part) { shrink_piece(share * parts + part, shares * parts); });
}

void LoraDelta::expand(long shares) const {
  const long parts = parts_of(expand_cost, shares);
  in_shares(shares, parts, [&](long share, long part) {
    if (overlaps) expand_overlapping_piece(*this, share * parts + part, shares * parts);
    else expand_piece(*this, share * parts + part, shares * parts);
  });
}

LoraStream::LoraStream(const LoraDelta& delta, long piece, long pieces) : work_(&delta.work) {
  const int64_t total = delta.bytes();
  int64_t before = total * piece / pieces;
  left_ = total * (piece + 1) / pieces - before;
  for (; index_ < work_->size(); index_++) {  // to the block where the share begins
    const LoraWork& w = (*work_)[index_];
    at_ = (const char*)w.a + before, end_ = w.end;
    if (at_ < end_) break;
    before = at_ - end_;
  }
}

const char* LoraStream::take(int64_t bytes) {
  while (left_ > 0 && at_ == end_ && index_ + 1 < work_->size())
    at_ = (const char*)(*work_)[++index_].a, end_ = (*work_)[index_].end;
  const char* const taken = at_;
  bytes = std::min({bytes, left_, int64_t(end_ - at_)});
  at_ += bytes, left_ -= bytes;
  return taken;
}

}  // namespace loraplex

using namespace loraplex;

LORAPLEX_API void loraplex_add_lora(const LoraTable* table, const LoraSegments* segments, const float* x,
                                    int64_t x_stride, float* y, int64_t y_stride, int32_t threads) {
  const LoraDelta delta(*table, *segments, x, x_stride, y, y_stride);
  if (delta.work.empty()) return;
  const long shares = delta.cost() < kWorthThreads ? 1 : threads;
  delta.shrink(shares);
  delta.exchange();
  delta.expand(shares);
}
