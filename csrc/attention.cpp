// softmax(scale q K^T) V over the KV blocks of each sequence, causal; one operator for decode, chunked, cached prefill.
//
// BATCH INVARIANCE. The result of a query and head has the same bits whatever else is in the batch, however the prompt
// is cut, on any number of threads and any vector width. Its keys go by in blocks of 64 from position 0 (also under a
// sliding window), and
//   scores    s = (q * scale) . k, one chain of fused multiply-adds over the dimensions in order; under a soft cap c
//             s = c tanh(s / c). A cache of int8: the chain over the codes, times the key's scale, before the cap
//   maximum   m' = max(m, max s), which is exact in any order; c = e^(m - m'), 1 where the maximum stays
//   sum       l[i] = l[i] c + (((p0 + p1) + p2) + p3)[i] for lane i of the four groups' p = e^(s - m'); at the end
//             sum_lanes(l)
//   output    o = o c, then one chain over the block's keys of p v. Of int8: (p times the value's scale) times the code
// A head's sink is a score s of no key: it comes first (m = s, l = (1, 0, ...)), and into the sum alone.
// A hidden key has s = -inf, so p = 0: it adds exactly nothing, and a block of hidden keys may as well be skipped.
#include <algorithm>
#include <vector>

#include "api.h"
#include "attention_tile.h"
#include "team.h"

namespace loraplex {
namespace {

constexpr long kItemRows = 48;       // rows that go over the keys together, so that a block is read from memory once
constexpr long kParallelCost = 400000;  // of all items (Item::cost), about 20 us: less work stays on the calling thread
constexpr long kPartCost = 1000000, kMostParts = 64;

// Rows [row, row + rows) of one sequence and KV head. Row r is query r / group of the step and head
// kv_head * group + r % group.
struct Item {
  long sequence, kv_head, row, rows;
  long first_block, end_block;  // of 64 keys
  long cost, cost_before;
};

struct Call {
  const AttentionStep& step;
  const float* q;
  long q_stride;
  const void* kv;
  long window;  // a query sees so many keys, its own included
  const float* sinks;  // [heads]; null: there are none
  float* out;
  long group;   // query heads of a KV head

  long context(long sequence) const { return step.context_lens[sequence]; }
  long queries(long sequence) const { return step.q_indptr[sequence + 1] - step.q_indptr[sequence]; }
  // Row r sees keys [first_key(end), end) with this end.
  long end_key(long sequence, long r) const { return context(sequence) - queries(sequence) + r / group + 1; }
  long first_key(long end) const { return std::max(0L, end - window); }
};

// All items in order, sequence by sequence; returns the cost of all.
long make_items(const Call& call, std::vector<Item>& items) {
  long total = 0;
  items.clear();
  for (long s = 0; s < call.step.sequences; s++) {
    const long all = call.queries(s) * call.group, parts = (all + kItemRows - 1) / kItemRows;
    for (long head = 0; head < call.step.kv_heads; head++)
      for (long part = 0; part < parts; part++) {
        Item item = {s, head, all * part / parts, 0, 0, 0, 0, total};
        item.rows = all * (part + 1) / parts - item.row;
        item.first_block = call.first_key(call.end_key(s, item.row)) / kBlock;
        item.end_block = (call.end_key(s, item.row + item.rows - 1) + kBlock - 1) / kBlock;
        // 6: reading the keys
        item.cost = (item.end_block - item.first_block) * kBlock * (item.rows + 6) * call.step.head_dim;
        total += item.cost;
        items.push_back(item);
      }
  }
  return total;
}

// The 64 keys and values of one block, by groups of 16; `count` of them are in the context.
template <class Kv>
struct Pointers {
  const typename Kv::Element *keys[kGroups], *values[kGroups];
  long count;

  Pointers(const Call& call, const Item& item, long block) {
    const AttentionStep& step = call.step;
    const long size = group_size<Kv>(step.head_dim), per_block = step.block_size / kGroup;
    const long head_size = per_block * size;
    const int32_t* table = step.block_tables + item.sequence * step.table_stride;
    const auto* kv = (const typename Kv::Element*)call.kv + item.kv_head * head_size;
    count = std::min(kGroups, (call.context(item.sequence) + kGroup - 1) / kGroup - block * kGroups);
    for (long g = 0; g < kGroups; g++) {
      const long group = block * kGroups + std::min(g, count - 1);
      keys[g] = kv + table[group / per_block] * step.block_stride + group % per_block * size;
      values[g] = keys[g] + step.kv_heads * head_size;
    }
  }

  // What tile t prefetches of `next`, in the place of these groups: a share, so that memory is read all the time that
  // tiles compute. The rest points at what is in the cache already.
  Pointers share(const Pointers& next, long tile, long tiles) const {
    Pointers mixed = *this;
    const long sharers = std::min(tiles, kGroups);
    for (long g = 0; g < kGroups; g++)
      if (g * sharers / kGroups == tile) mixed.keys[g] = next.keys[g], mixed.values[g] = next.values[g];
    return mixed;
  }
};

// What one item needs beside its keys.
struct State {
  alignas(64) float q[kItemRows * kMaxHeadDim];
  alignas(64) float out[kItemRows * kMaxHeadDim];
  alignas(64) float sum[kItemRows * 16];
  alignas(64) float scores[kTileRows * kBlock];
  alignas(64) float factor[16];
  float max[kItemRows];
  long end_key[kItemRows];

  void begin(const Call& call, const Item& item) {
    const long head_dim = call.step.head_dim;
    const Vec16 scale = set1(call.step.scale);
    for (long m = 0; m < item.rows; m++) {
      const long query = (item.row + m) / call.group, head = item.kv_head * call.group + (item.row + m) % call.group;
      const float* from = call.q + (call.step.q_indptr[item.sequence] + query) * call.q_stride + head * head_dim;
      for (long d = 0; d < head_dim; d += 16) {
        store(q + m * head_dim + d, mul(load(from + d), scale));
        store(out + m * head_dim + d, zero());
      }
      store(sum + 16 * m, zero());
      max[m] = -__FLT_MAX__;  // finite: where only hidden keys went by, e^(m - m) has to be 1
      if (call.sinks != nullptr) max[m] = std::max(max[m], call.sinks[head]), sum[16 * m] = 1.f;
      end_key[m] = call.end_key(item.sequence, item.row + m);
    }
  }

  void end(const Call& call, const Item& item) const {
    const long head_dim = call.step.head_dim;
    for (long m = 0; m < item.rows; m++) {
      const long query = (item.row + m) / call.group, head = item.kv_head * call.group + (item.row + m) % call.group;
      float* to = call.out + ((call.step.q_indptr[item.sequence] + query) * call.step.heads + head) * head_dim;
      const Vec16 inverse = set1(1.f / sum_lanes(load(sum + 16 * m)));
      for (long d = 0; d < head_dim; d += 16) store(to + d, mul(load(out + m * head_dim + d), inverse));
    }
  }
};

// -inf where key 16 g + i of the block is not in [first, end).
void hide(float* scores, long groups, long first, long end) {
  alignas(64) static constexpr float kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Vec16 hidden = set1(-__builtin_inff());
  for (long g = 0; g < groups; g++) {
    const Vec16 seen = select_less(load(kLanes), set1((float)(end - 16 * g)), load(scores + 16 * g), hidden);
    store(scores + 16 * g, select_less(load(kLanes), set1((float)(first - 16 * g)), hidden, seen));
  }
}

void cap(float* scores, long groups, float softcap) {
  for (long g = 0; g < groups; g++)
    store(scores + 16 * g, mul(tanh(div(load(scores + 16 * g), set1(softcap))), set1(softcap)));
}

// Scores become weights, in place; rows' maxima and sums go on; state.factor is what the outputs are multiplied with.
void softmax(State& state, long row, long rows, long groups) {
  alignas(64) float largest[16] = {};
  for (long m = 0; m < rows; m++) {
    const float* s = state.scores + m * kBlock;
    Vec16 most = load(s);
    for (long g = 1; g < groups; g++) most = max(most, load(s + 16 * g));
    const float block_max = max_lanes(most), before = state.max[row + m];
    largest[m] = before > block_max ? before : block_max;
  }
  store(state.factor, exp(sub(load_first(state.max + row, rows), load(largest))));
  for (long m = 0; m < rows; m++) {
    float* s = state.scores + m * kBlock;
    const Vec16 top = set1(largest[m]);
    Vec16 sum = zero();
    for (long g = 0; g < groups; g++) {
      const Vec16 p = exp(sub(load(s + 16 * g), top));
      store(s + 16 * g, p);
      sum = add(sum, p);
    }
    float* total = state.sum + 16 * (row + m);
    store(total, fma(load(total), broadcast(state.factor + m), sum));
    state.max[row + m] = largest[m];
  }
}

// Scores or weights times the scales of their keys or values; those of `next` are needed soon.
template <class Kv>
void multiply_scales(float* scores, long rows, long groups, long head_dim, const typename Kv::Element* const* at,
                     const typename Kv::Element* const* next) {
  if constexpr (Kv::kScaleElements > 0)
    for (long g = 0; g < groups; g++) {
      const Vec16 scales = load(scales_of(at[g], head_dim));
      prefetch_l2(scales_of(next[g], head_dim));
      for (long m = 0; m < rows; m++) {
        float* s = scores + m * kBlock + 16 * g;
        store(s, mul(load(s), scales));
      }
    }
}

// Rows [row, row + rows) of an item over one block, whose first key is `base`; prefetches `next` meanwhile.
template <class Kv>
void attend_tile(const Call& call, long base, long row, long rows, const Pointers<Kv>& at, const Pointers<Kv>& next,
                 State& state) {
  const long head_dim = call.step.head_dim;
  // rows are in the order of their queries
  const long *end = state.end_key + row, keys = std::min(kBlock, end[rows - 1] - base);
  if (keys <= 0 || call.first_key(end[0]) >= base + kBlock) return;
  const long groups = (keys + kGroup - 1) / kGroup;
  with_tile_rows(rows, [&](auto r) {
    in_widths<tile_width(r())>(groups, [&](auto width, long g) {
      score_tile<Kv, r(), width()>(state.q + row * head_dim, head_dim, at.keys + g, next.keys + g,
                                   state.scores + 16 * g);
    });
  });
  multiply_scales<Kv>(state.scores, rows, groups, head_dim, at.keys, next.keys);
  if (call.step.softcap != 0.f)
    for (long m = 0; m < rows; m++) cap(state.scores + m * kBlock, groups, call.step.softcap);
  if (end[0] - base < kGroup * groups || call.first_key(end[rows - 1]) > base)
    for (long m = 0; m < rows; m++)
      hide(state.scores + m * kBlock, groups, call.first_key(end[m]) - base, end[m] - base);
  softmax(state, row, rows, groups);
  multiply_scales<Kv>(state.scores, rows, groups, head_dim, at.values, next.values);
  with_tile_rows(rows, [&](auto r) {
    in_widths<tile_width(r())>(head_dim / 16, [&](auto width, long panel) {
      const typename Kv::Element *values[kGroups], *ahead[kGroups];
      for (long g = 0; g < kGroups; g++)
        values[g] = at.values[g] + panel * kStep, ahead[g] = next.values[g] + panel * kStep;
      value_tile<Kv, r(), width()>(state.scores, keys, values, ahead, state.factor, head_dim,
                                   state.out + row * head_dim + 16 * panel);
    });
  });
}

// What the tiles of a block with `keys` keys did not prefetch of the next block.
template <class Kv>
void prefetch_rest(const Pointers<Kv>& next, long keys, long head_dim) {
  for (long g = (keys + kGroup - 1) / kGroup; g < next.count; g++)
    for (long i = 0; i < group_size<Kv>(head_dim); i += kStep) prefetch_step<Kv>(next.keys[g] + i);
  for (long g = keys / kGroup; g < next.count; g++)
    for (long i = 0; i < group_size<Kv>(head_dim); i += kStep) prefetch_step<Kv>(next.values[g] + i);
}

template <class Kv>
void attend_items(const Call& call, const Item* item, const Item* end) {
  if (item == end) return;
  State state;
  for (Pointers<Kv> at(call, *item, item->first_block); item < end; item++) {
    state.begin(call, *item);
    const long tiles = (item->rows + kTileRows - 1) / kTileRows;
    for (long block = item->first_block; block < item->end_block; block++) {
      Pointers<Kv> next = at;
      if (block + 1 < item->end_block) next = Pointers<Kv>(call, *item, block + 1);
      else if (item + 1 < end) next = Pointers<Kv>(call, item[1], item[1].first_block);
      for (long tile = 0; tile < tiles; tile++) {
        const long row = item->rows * tile / tiles, rows = item->rows * (tile + 1) / tiles - row;
        attend_tile<Kv>(call, block * kBlock, row, rows, at, at.share(next, tile, tiles), state);
      }
      const long keys = state.end_key[item->rows / tiles - 1] - block * kBlock;
      if (keys < kBlock) prefetch_rest<Kv>(next, std::max(0L, keys), call.step.head_dim);
      at = next;
    }
    state.end(call, *item);
  }
}

template <class Kv>
void attention(const Call& call) {
  static thread_local std::vector<Item> own;
  const long total = make_items(call, own);
  const std::vector<Item>& items = own;  // the calling thread's, in every thread
  const long shares = total < kParallelCost ? 1 : std::clamp<long>(items.size(), 1, call.step.threads);
  const long parts = std::clamp<long>(std::min<long>(total / kPartCost, items.size()) / shares, 1, kMostParts);
  const long all = shares * parts;
  // An item belongs to the part in whose piece of the cost its middle lies.
  auto first_of = [&](long part) {
    return std::partition_point(items.begin(), items.end(), [&](const Item& item) {
             return (item.cost_before + item.cost / 2) * all < total * part;
           }) - items.begin();
  };
  in_shares(shares, parts, [&](long share, long part) {
    const long i = share * parts + part;
    attend_items<Kv>(call, items.data() + first_of(i), items.data() + first_of(i + 1));
  });
}

}  // namespace
}  // namespace loraplex

using namespace loraplex;

LORAPLEX_API void loraplex_paged_attention(const AttentionStep* step, const float* q, int64_t q_stride, const void* kv,
                                           int64_t window, const float* sinks, float* out) {
  const Call call = {*step, q, q_stride, kv, window, sinks, out, step->heads / step->kv_heads};
  switch (step->format) {
    case kF32: return attention<KvF32>(call);
    case kF16: return attention<KvF16>(call);
    case kBF16: return attention<KvBF16>(call);
    case kInt8: return attention<KvInt8>(call);
  }
}
