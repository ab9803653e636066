// A step's operators in a row: all layers of a model in one call.
#include <chrono>

#include "api.h"
#include "operators.h"

namespace loraplex {
namespace {

void run_call(const ProgramCall& c, const ProgramStep& step, double* seconds) {
  const auto& [op, threads, eps, scale, at, size] = c;
  const auto in = [&](int i) { return (const float*)at[i]; };
  const auto out = [&](int i) { return (float*)at[i]; };
  switch (op) {
    case kLinear:  // x, panels, their scale, bias, y, table (or null); stride of x, in, out, format
      if (at[5] != nullptr) {
        double lora_seconds = 0;
        loraplex_lora_linear(size[3], in(0), size[0], step.rows, size[1], at[1], at[2], size[2], in(3), out(4),
                             (const LoraTable*)at[5], step.segments, &lora_seconds, threads);
        if (seconds != nullptr) seconds[kAddLora] += lora_seconds, seconds[kLinear] -= lora_seconds;
        return;
      }
      return loraplex_linear(size[3], in(0), size[0], step.rows, size[1], at[1], at[2], size[2], in(3), out(4),
                             threads);
    case kAddLora:  // table, x, y; strides of x and y
      return loraplex_add_lora((const LoraTable*)at[0], step.segments, in(1), size[0], out(2), size[1], threads);
    case kRmsNorm:  // x, weight, y; stride from token to token, rows of a token, stride between them, size
      return loraplex_rms_norm(in(0), size[0], size[1], size[2], step.rows * size[1], size[3], in(1), eps, out(2),
                               threads);
    case kAddRmsNorm:  // x, residual, weight; their strides, size
      return loraplex_add_rms_norm(out(0), size[0], out(1), size[1], step.rows, size[2], in(2), eps, scale, threads);
    case kRotaryWriteKv: {  // a RotaryCall, without what the step has; where the layer's angles begin in a row of them
      RotaryCall call = *(const RotaryCall*)at[0];
      call.cos = step.cos + size[0], call.sin = step.sin + size[0];
      call.kv_slots = step.kv_slots, call.tokens = step.rows;
      return loraplex_rotary_write_kv(&call);
    }
    case kPagedAttention:  // q, kv, out, sinks (or null); stride of q, window
      return loraplex_paged_attention(step.attention, in(0), size[0], at[1], size[1], in(3), out(2));
    case kSiluMul:  // gate and up, y; stride, size
      return loraplex_silu_mul(in(0), size[0], step.rows, size[1], out(1), threads);
    case kScaleInput:  // table, x; stride of x
      return loraplex_scale_input((const LoraTable*)at[0], step.segments, out(1), size[0], threads);
    case kSumRanks:  // board, y; width
      return loraplex_sum_ranks((RankBoard*)at[0], out(1), step.rows * size[0]);
    case kLayerNorm:  // x, weight, bias (or null), y; stride, size
      return loraplex_layer_norm(in(0), size[0], step.rows, size[1], in(1), in(2), eps, out(3), threads);
    case kAddScaled:  // x, residual; their strides, size
      return loraplex_add_scaled(in(0), size[0], out(1), size[1], step.rows, size[2], scale, threads);
    case kGelu:  // x, y; stride, size, is_tanh, has_up
      return loraplex_gelu(in(0), size[0], step.rows, size[1], size[2], size[3], out(1), threads);
    case kExperts:  // an ExpertsCall, x, logits, scratch, y; strides of x and logits
      return loraplex_experts((const ExpertsCall*)at[0], in(1), size[0], in(2), size[1], step.rows, step.segments,
                              out(3), out(4));
    case kAddGated:  // x, gate, y; their strides, size
      return loraplex_add_gated(in(0), size[0], in(1), size[1], step.rows, size[3], out(2), size[2], threads);
    case kRmsNormRanks:  // board, x, weight, scratch of a float a row, y; stride, size
      return loraplex_rms_norm_ranks((RankBoard*)at[0], in(1), size[0], step.rows, size[1], in(2), eps, out(3), out(4),
                                     threads);
  }
}

}  // namespace
}  // namespace loraplex

using namespace loraplex;

// `seconds` [kOperators]: the time of each operator is added to it; null: no times are taken.
LORAPLEX_API void loraplex_run_program(const ProgramCall* calls, int64_t count, const ProgramStep* step,
                                       double* seconds) {
  if (seconds == nullptr) {
    for (int64_t i = 0; i < count; i++) run_call(calls[i], *step, seconds);
    return;
  }
  auto began = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < count; i++) {
    run_call(calls[i], *step, seconds);
    const auto ended = std::chrono::steady_clock::now();
    seconds[calls[i].op] += std::chrono::duration<double>(ended - began).count();
    began = ended;
  }
}
