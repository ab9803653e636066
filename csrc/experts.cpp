// A mixture of experts: y[t] = sum over the chosen experts e, ascending, of p[t, e] * down_e(silu(gate_e(x[t])) *
// up_e(x[t])), each of these with the deltas of its adapters. With a limit the gate is `clamp_gate`.
//
// p = softmax(logits[t]) of all experts in float32; the `top_k` largest are chosen, of equal ones the first; with
// `normalizes` they are divided by their sum. With `scales_inputs` a chosen one's factor is sigmoid(logits[t, e]), and
// an expert reads x[t] times that: its part of the sum has no factor.
//
// BATCH INVARIANCE. A row's choice depends on its logits alone. The rows of an expert are side by side in the order of
// the batch, in which rows of one adapter are neighbours: so they are sorted by (expert, adapter), and the products are
// those of linear.cpp and lora.cpp, whose bits depend on no other row. A row adds up its experts in ascending order.
#include <algorithm>
#include <cmath>
#include <vector>

#include "api.h"
#include "gate.h"
#include "lora.h"
#include "operators.h"
#include "rows.h"

namespace loraplex {
namespace {

// Which rows each expert has, with which factor, and the segments of a step among them.
struct Routes {
  std::vector<float> probabilities, factors;     // [experts rounded up to 16]; [rows * top_k] by expert
  std::vector<int32_t> chosen, rows, begin;      // [rows * top_k]; the same by expert; [experts + 1]
  std::vector<float> chosen_factors;             // [rows * top_k]
  std::vector<int32_t> start, end, slot;         // of the segments
  std::vector<float> weight;
};

Routes& own_routes() {
  static thread_local Routes routes;  // the calling thread's, kept for its next call
  return routes;
}

void softmax(const float* logits, long count, float* p) {
  float largest = logits[0];
  for (long e = 1; e < count; e++) largest = std::max(largest, logits[e]);
  for (long e = 0; e < count; e += 16) store(p + e, exp(sub(load_first(logits + e, count - e), set1(largest))));
  float sum = 0;
  for (long e = 0; e < count; e++) sum += p[e];
  for (long e = 0; e < count; e++) p[e] /= sum;
}

// The largest first. A NaN is larger than nothing: there are always top_k different experts.
void choose(const ExpertsCall& call, const float* logits, Routes& routes, int32_t* chosen, float* factors) {
  float* p = routes.probabilities.data();
  softmax(logits, call.experts, p);
  float sum = 0;
  for (long i = 0; i < call.top_k; i++) {
    long best = -1;
    for (long e = 0; e < call.experts; e++) {
      if (std::find(chosen, chosen + i, (int32_t)e) != chosen + i) continue;
      if (best < 0 || p[e] > p[best]) best = e;
    }
    chosen[i] = (int32_t)best, factors[i] = p[best];
    sum += p[best];
  }
  if (call.scales_inputs)
    for (long i = 0; i < call.top_k; i++) factors[i] = 1.f / (1.f + std::exp(-logits[chosen[i]]));
  else if (call.normalizes)
    for (long i = 0; i < call.top_k; i++) factors[i] /= sum;
}

void sort_rows(const ExpertsCall& call, const float* logits, long logits_stride, long rows, Routes& routes) {
  const long k = call.top_k;
  routes.probabilities.resize((call.experts + 15) / 16 * 16);
  for (auto* each : {&routes.chosen, &routes.rows}) each->resize(rows * k);
  for (auto* each : {&routes.chosen_factors, &routes.factors}) each->resize(rows * k);
  routes.begin.assign(call.experts + 1, 0);
  for (long t = 0; t < rows; t++) {
    choose(call, logits + t * logits_stride, routes, routes.chosen.data() + t * k,
           routes.chosen_factors.data() + t * k);
    for (long i = 0; i < k; i++) routes.begin[routes.chosen[t * k + i] + 1]++;
  }
  for (long e = 0; e < call.experts; e++) routes.begin[e + 1] += routes.begin[e];
  std::vector<int32_t>& next = routes.start;
  next.assign(routes.begin.begin(), routes.begin.end() - 1);
  for (long at = 0; at < rows * k; at++) {
    const int32_t place = next[routes.chosen[at]]++;
    routes.rows[place] = (int32_t)(at / k), routes.factors[place] = routes.chosen_factors[at];
  }
}

// The segments of the step, in their order, as rows of one expert; those that have none are left out.
LoraSegments segments_of(const LoraSegments& all, const int32_t* rows, long count, Routes& routes) {
  routes.start.clear(), routes.end.clear(), routes.slot.clear(), routes.weight.clear();
  for (long i = 0; i < all.count; i++) {
    const auto first = std::lower_bound(rows, rows + count, all.start[i]);
    const auto last = std::lower_bound(first, rows + count, all.end[i]);
    if (first == last) continue;
    routes.start.push_back((int32_t)(first - rows)), routes.end.push_back((int32_t)(last - rows));
    routes.slot.push_back(all.slot[i]), routes.weight.push_back(all.weight[i]);
  }
  return {routes.start.data(), routes.end.data(), routes.slot.data(), routes.weight.data(),
          (int64_t)routes.start.size()};
}

void product(const ExpertLinear& linear, const float* x, long rows, long in, long out, float* y,
             const LoraSegments& segments, int32_t threads) {
  if (segments.count == 0)
    return loraplex_linear(linear.format, x, in, rows, in, linear.weight, linear.scale, out, linear.bias, y, threads);
  loraplex_lora_linear(linear.format, x, in, rows, in, linear.weight, linear.scale, out, linear.bias, y, linear.table,
                       &segments, nullptr, threads);
}

// y = (u + 1) g / (1 + e^(-alpha g)) with g = min(gate, limit), u = up between -limit and limit; a NaN stays one.
void clamp_gate(const float* gate, long size, float limit, float alpha, float* y) {
  const Vec16 most = set1(limit), least = set1(-limit);
  for (long k = 0; k < size; k += 16) {
    const long count = size - k;
    const Vec16 given = load_first(gate + k, count), up = load_first(gate + size + k, count);
    const Vec16 g = select_less(most, given, most, given), low = select_less(most, up, most, up);
    const Vec16 u = select_less(low, least, least, low);
    store_first(y + k, mul(add(u, set1(1.f)), gated(g, mul(set1(alpha), g))), count);
  }
}

void activate(const ExpertsCall& call, const float* gate_up, long rows, float* y) {
  const long inner = call.inner;
  if (call.limit == 0.f) return loraplex_silu_mul(gate_up, 2 * inner, rows, inner, y, call.threads);
  for_rows(rows, 4 * rows * inner, call.threads,
           [&](long i) { clamp_gate(gate_up + 2 * i * inner, inner, call.limit, call.alpha, y + i * inner); });
}

void scale_row(const float* x, float factor, long size, float* y) {
  const Vec16 factors = set1(factor);
  for (long k = 0; k < size; k += 16) store_first(y + k, mul(factors, load_first(x + k, size - k)), size - k);
}

void add_row(const float* x, float factor, long size, float* y) {
  const Vec16 factors = set1(factor);
  for (long k = 0; k < size; k += 16) {
    const long count = size - k;
    store_first(y + k, add(load_first(y + k, count), mul(factors, load_first(x + k, count))), count);
  }
}

}  // namespace
}  // namespace loraplex

using namespace loraplex;

// scratch: [rows, 2 hidden + 3 inner] floats, in any order.
LORAPLEX_API void loraplex_experts(const ExpertsCall* call, const float* x, int64_t x_stride, const float* logits,
                                   int64_t logits_stride, int64_t rows, const LoraSegments* segments, float* scratch,
                                   float* y) {
  const long hidden = call->hidden, inner = call->inner;
  Routes& routes = own_routes();
  sort_rows(*call, logits, logits_stride, rows, routes);
  std::fill(y, y + rows * hidden, 0.f);
  float *own = scratch, *out = own + rows * hidden, *gate_up = out + rows * hidden, *mid = gate_up + rows * 2 * inner;
  for (long e = 0; e < call->experts; e++) {
    const int32_t* const at = routes.rows.data() + routes.begin[e];
    const float* const factors = routes.factors.data() + routes.begin[e];
    const long count = routes.begin[e + 1] - routes.begin[e];
    if (count == 0) continue;
    const LoraSegments here =
        segments == nullptr ? LoraSegments{} : segments_of(*segments, at, count, routes);
    for_rows(count, count * hidden, call->threads, [&](long i) {
      const float* const row = x + at[i] * x_stride;
      if (call->scales_inputs) return scale_row(row, factors[i], hidden, own + i * hidden);
      std::copy_n(row, hidden, own + i * hidden);
    });
    product(call->linears[2 * e], own, count, hidden, 2 * inner, gate_up, here, call->threads);
    activate(*call, gate_up, count, mid);
    product(call->linears[2 * e + 1], mid, count, inner, hidden, out, here, call->threads);
    for_rows(count, 2 * count * hidden, call->threads,
             [&](long i) {
               add_row(out + i * hidden, call->scales_inputs ? 1.f : factors[i], hidden, y + at[i] * hidden);
             });
  }
}

// y[t] += sigmoid(gate[t]) * x[t]: a part of the sum that has its own factor.
LORAPLEX_API void loraplex_add_gated(const float* x, int64_t x_stride, const float* gate, int64_t gate_stride,
                                     int64_t rows, int64_t size, float* y, int64_t y_stride, int32_t threads) {
  for_rows(rows, 2 * rows * size, threads, [=](long t) {
    add_row(x + t * x_stride, 1.f / (1.f + std::exp(-gate[t * gate_stride])), size, y + t * y_stride);
  });
}
