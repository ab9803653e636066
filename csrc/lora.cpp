// y[s:e, slice] += weight * (scale * (x[s:e] A^T) B^T + bias) for all segments of a step and all slices of a linear.
//
// BATCH INVARIANCE. h[t, r] is one chain of fused multiply-adds over k in order from 0, d[t, n] one chain over the rank from 0; then
// y = fma(weight * scale, d, y) and y = fma(weight, bias, y). A row that is in several segments gets them in their order. So its bits
// depend on its own x, y and adapters: not on other rows or segments, on how rows are cut into segments, or on the number of threads.
//
// Two phases: shrink (h = x A^T) of all segments, a barrier, expand (y += h B^T).
#include <omp.h>

#include <vector>

#include "api.h"
#include "lora_tile.h"

namespace loraplex {
namespace {

constexpr int64_t kWorthThreads = 1 << 20;  // of cost, see below: about 25 us

// Cost of a product: weights times (rows + 4), because reading a weight takes as long as multiplying some rows by it.
int64_t cost_of(int64_t weights, long rows) { return weights * (rows + 4); }

// A segment and the block that it goes through.
struct Work {
  long row, rows, slot;
  float weight;
  int32_t format = kF32;
  const void* a = nullptr;
  const void* b = nullptr;  // of the first slice that has one; the others follow
  long a_columns = 0;       // the ranks of all slices
  float* h = nullptr;       // [rows, h_stride]
  long h_stride = 0;
  int64_t shrink_cost = 0, expand_cost = 0;
};

struct Call {
  const LoraTable& table;
  const float* x;
  long x_stride;
  float* y;
  long y_stride;
  std::vector<Work>& work;
  bool overlaps;  // some row is in several segments
  int64_t shrink_cost = 0, expand_cost = 0;

  long entry(const Work& w, long slice) const { return slice * table.capacity + w.slot; }
};

// The units (rows or vectors of columns) of an item that are a thread's, when all items lie end to end on a line as long as their
// cost and each thread takes an equal piece of it.
class Share {
 public:
  Share(int64_t total, long thread, long threads) : begin_(total * thread / threads), end_(total * (thread + 1) / threads) {}
  template <class F>
  void take(int64_t cost, long units, F f) {  // f(first unit, unit behind the last)
    auto cut = [&](int64_t at) { return long(std::clamp(double(at - before_) / double(cost), 0., 1.) * double(units) + .5); };
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

// ---------------------------------------------------------------------------------------------------------------- the two products

// h = x A^T for rows [t0, t1) of a segment.
template <class Math>
LoraProduct<Math> shrink_product(const Call& call, const Work& w, long t0, long t1) {
  return {.x = call.x + (w.row + t0) * call.x_stride, .x_stride = call.x_stride, .rows = t1 - t0,
          .w = (const typename Math::Weight*)w.a, .depth = call.table.in, .width = part_width(w.a_columns),
          .y = w.h + t0 * w.h_stride, .y_stride = w.h_stride, .columns = w.a_columns, .adds = false, .scale = 0};
}

void shrink(const Call& call, const Work& w, long t0, long t1, long v0, long v1) {  // vectors [v0, v1) of the columns of A
  with_format(w.format, [&](auto math) { run_product(shrink_product<decltype(math)>(call, w, t0, t1), v0, v1); });
}

void add_bias(const float* bias, float weight, float* y, long y_stride, long rows, long begin, long end) {
  const Vec16 weights = set1(weight);
  for (long t = 0; t < rows; t++)
    for (long n = begin; n < end; n += kPanel) {
      float* to = y + t * y_stride + n;
      store_first(to, fma(weights, load_first(bias + n, end - n), load_first(to, end - n)), end - n);
    }
}

// y += h B^T and the bias for rows [t0, t1) of a segment and vectors [v0, v1) of a slice whose h begins at column h_column.
void expand(const Call& call, const Work& w, long slice, long h_column, long t0, long t1, long v0, long v1) {
  const LoraTable& table = call.table;
  const long at = call.entry(w, slice), rank = table.rank[at], columns = table.out[slice];
  float* y = call.y + (w.row + t0) * call.y_stride + table.out_offset[slice];
  if (rank > 0) {
    with_format(w.format, [&](auto math) {
      using Math = decltype(math);
      run_product<Math>({.x = w.h + t0 * w.h_stride + h_column, .x_stride = w.h_stride, .rows = t1 - t0,
                         .w = (const typename Math::Weight*)table.b_addr[at], .depth = rank, .width = part_width(columns),
                         .y = y, .y_stride = call.y_stride, .columns = columns, .adds = true, .scale = w.weight * table.scale[at]},
                        v0, v1);
    });
  }
  if (table.bias_addr[at] != 0) {
    add_bias((const float*)table.bias_addr[at], w.weight, y, call.y_stride, t1 - t0, v0 * kPanel, std::min(v1 * kPanel, columns));
  }
}

// f(slice, first column of its h, its cost) for each slice of a segment's adapter.
template <class F>
void for_slices(const Call& call, const Work& w, F f) {
  long h_column = 0;
  for (long slice = 0; slice < call.table.num_slices; slice++) {
    const long at = call.entry(w, slice), rank = call.table.rank[at];
    if (rank > 0 || call.table.bias_addr[at] != 0) f(slice, h_column, cost_of((rank + 1) * call.table.out[slice], w.rows));
    h_column += rank;
  }
}

// ------------------------------------------------------------------------------------------------------------------ shares of threads

// Segments of one row and one vector of columns of A, until there are enough to run at the same time.
class Narrow {
 public:
  explicit Narrow(const Call& call) : call_(call) {}
  ~Narrow() { flush(); }
  void add(const Work& w) {
    if (count_ > 0 && waiting_[0]->format != w.format) flush();
    waiting_[count_++] = &w;
    if (count_ < kNarrow) return;
    with_format(w.format, [&](auto math) {
      LoraProduct<decltype(math)> products[kNarrow];
      for (int i = 0; i < kNarrow; i++) products[i] = shrink_product<decltype(math)>(call_, *waiting_[i], 0, 1);
      run_narrow(products);
    });
    count_ = 0;
  }

 private:
  void flush() {
    for (int i = 0; i < count_; i++) shrink(call_, *waiting_[i], 0, 1, 0, 1);
    count_ = 0;
  }
  const Call& call_;
  const Work* waiting_[kNarrow];
  int count_ = 0;
};

// Few rows are cut by columns, so that each thread reads weights of its own; many by rows.
void shrink_share(const Call& call, long thread, long threads) {
  const std::vector<Work>& work = call.work;
  Share share(call.shrink_cost, thread, threads);
  Narrow narrow(call);
  for (size_t i = 0; i < work.size(); i++) {
    const Work& w = work[i];
    if (w.a_columns == 0) continue;
    const long vectors = vectors_of(w.a_columns);
    const bool by_columns = vectors > 1 && w.rows <= kMaxRows;
    share.take(w.shrink_cost, by_columns ? vectors : w.rows, [&](long first, long last) {
      if (vectors == 1 && w.rows == 1) {
        if (i + kNarrow < work.size()) prefetch_start(work[i + kNarrow].a, kLoraAheadBytes / kNarrow);
        return narrow.add(w);
      }
      prefetch_start(i + 1 < work.size() ? work[i + 1].a : work[0].b);
      if (by_columns) shrink(call, w, 0, w.rows, first, last);
      else shrink(call, w, first, last, 0, vectors);
    });
  }
}

void expand_share(const Call& call, long thread, long threads) {
  Share share(call.expand_cost, thread, threads);
  for (size_t i = 0; i < call.work.size(); i++) {
    const Work& w = call.work[i];
    for_slices(call, w, [&](long slice, long h_column, int64_t cost) {
      const long vectors = vectors_of(call.table.out[slice]);
      const bool by_columns = w.rows <= 4 * kMaxRows;
      share.take(cost, by_columns ? vectors : w.rows, [&](long first, long last) {
        if (slice + 1 == call.table.num_slices && i + 1 < call.work.size()) prefetch_start(call.work[i + 1].b);
        if (by_columns) expand(call, w, slice, h_column, 0, w.rows, first, last);
        else expand(call, w, slice, h_column, first, last, 0, vectors);
      });
    });
  }
}

// Each thread has the same columns in all segments, and takes the segments in their order.
void expand_overlapping_share(const Call& call, long thread, long threads) {
  for (const Work& w : call.work)
    for_slices(call, w, [&](long slice, long h_column, int64_t) {
      const long vectors = vectors_of(call.table.out[slice]);
      expand(call, w, slice, h_column, 0, w.rows, vectors * thread / threads, vectors * (thread + 1) / threads);
    });
}

void run_share(const Call& call, long thread, long threads) {
  shrink_share(call, thread, threads);
  if (threads > 1) {
#pragma omp barrier
  }
  if (call.overlaps) expand_overlapping_share(call, thread, threads);
  else expand_share(call, thread, threads);
}

// -------------------------------------------------------------------------------------------------------------------- what there is to do

// Fills call.work; returns how many floats h takes.
long collect(const LoraSegments& segments, Call& call) {
  const LoraTable& table = call.table;
  long h_size = 0, last_end = 0;
  for (long i = 0; i < segments.count; i++) {
    Work w = {.row = segments.start[i], .rows = segments.end[i] - segments.start[i], .slot = segments.slot[i], .weight = segments.weight[i]};
    bool has_bias = false;
    for (long slice = 0; slice < table.num_slices; slice++) {
      const long at = call.entry(w, slice);
      has_bias |= table.bias_addr[at] != 0;
      if (table.rank[at] == 0) continue;
      w.format = table.format[at];
      w.a = (const void*)table.a_addr[at];
      if (w.b == nullptr) w.b = (const void*)table.b_addr[at];
      w.a_columns += table.rank[at];
    }
    if (w.a_columns == 0 && !has_bias) continue;
    call.overlaps |= w.row < last_end;
    last_end = std::max(last_end, w.row + w.rows);
    w.h_stride = vectors_of(w.a_columns) * kPanel;
    h_size += w.rows * w.h_stride;
    w.shrink_cost = cost_of(w.a_columns * table.in, w.rows);
    for_slices(call, w, [&](long, long, int64_t cost) { w.expand_cost += cost; });
    call.shrink_cost += w.shrink_cost;
    call.expand_cost += w.expand_cost;
    call.work.push_back(w);
  }
  return h_size;
}

}  // namespace
}  // namespace loraplex

using namespace loraplex;

LORAPLEX_API void loraplex_add_lora(const LoraTable* table, const LoraSegments* segments, const float* x, int64_t x_stride, float* y,
                                    int64_t y_stride, int32_t threads) {
  static thread_local std::vector<Work> work;  // the calling thread's, kept for its next call
  static thread_local std::vector<float> h_buffer;
  work.clear();
  Call call = {.table = *table, .x = x, .x_stride = x_stride, .y = y, .y_stride = y_stride, .work = work, .overlaps = false};
  const size_t h_size = collect(*segments, call);
  if (work.empty()) return;
  if (h_buffer.size() < h_size) h_buffer.resize(h_size);
  float* h = h_buffer.data();
  for (Work& w : work) w.h = h, h += w.rows * w.h_stride;
  if (threads == 1 || call.shrink_cost + call.expand_cost < kWorthThreads) return run_share(call, 0, 1);
#pragma omp parallel num_threads(threads)  // all or one: OpenMP ends the threads that a smaller team has no use for
  run_share(call, omp_get_thread_num(), omp_get_num_threads());
}
