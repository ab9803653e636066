// The operators that csrc/program.cpp calls from C++.
#pragma once
#include "api.h"

LORAPLEX_API void loraplex_linear(int32_t format, const float* x, int64_t x_stride, int64_t rows, int64_t in,
                                  const void* weight, const void* weight_scale, int64_t out, const float* bias,
                                  float* y, int32_t threads);
// The same and, in the same parallel region, the delta of adapters; `lora_seconds` (or null) gets the delta's time.
LORAPLEX_API void loraplex_lora_linear(int32_t format, const float* x, int64_t x_stride, int64_t rows, int64_t in,
                                       const void* weight, const void* weight_scale, int64_t out, const float* bias,
                                       float* y, const loraplex::LoraTable* table,
                                       const loraplex::LoraSegments* segments, double* lora_seconds, int32_t threads);
LORAPLEX_API void loraplex_add_lora(const loraplex::LoraTable* table, const loraplex::LoraSegments* segments,
                                    const float* x, int64_t x_stride, float* y, int64_t y_stride, int32_t threads);
LORAPLEX_API void loraplex_scale_input(const loraplex::LoraTable* table, const loraplex::LoraSegments* segments,
                                       float* x, int64_t x_stride, int32_t threads);
LORAPLEX_API void loraplex_rms_norm(const float* x, int64_t outer_stride, int64_t inner, int64_t inner_stride,
                                    int64_t rows, int64_t size, const float* weight, float eps, float* y,
                                    int32_t threads);
LORAPLEX_API void loraplex_rms_norm_ranks(loraplex::RankBoard* board, const float* x, int64_t x_stride, int64_t rows,
                                          int64_t size, const float* weight, float eps, float* sums, float* y,
                                          int32_t threads);
LORAPLEX_API void loraplex_add_rms_norm(float* x, int64_t x_stride, float* residual, int64_t residual_stride,
                                        int64_t rows, int64_t size, const float* weight, float eps, float scale,
                                        int32_t threads);
LORAPLEX_API void loraplex_add_scaled(const float* x, int64_t x_stride, float* residual, int64_t residual_stride,
                                      int64_t rows, int64_t size, float scale, int32_t threads);
LORAPLEX_API void loraplex_layer_norm(const float* x, int64_t x_stride, int64_t rows, int64_t size,
                                      const float* weight, const float* bias, float eps, float* y, int32_t threads);
LORAPLEX_API void loraplex_rotary_write_kv(const loraplex::RotaryCall* call);
LORAPLEX_API void loraplex_paged_attention(const loraplex::AttentionStep* step, const float* q, int64_t q_stride,
                                           const void* kv, int64_t window, const float* sinks, float* out);
LORAPLEX_API void loraplex_silu_mul(const float* x, int64_t x_stride, int64_t rows, int64_t size, float* y,
                                    int32_t threads);
LORAPLEX_API void loraplex_gelu(const float* x, int64_t x_stride, int64_t rows, int64_t size, int32_t is_tanh,
                                int32_t has_up, float* y, int32_t threads);
LORAPLEX_API void loraplex_sum_ranks(loraplex::RankBoard* board, float* y, int64_t count);
LORAPLEX_API void loraplex_experts(const loraplex::ExpertsCall* call, const float* x, int64_t x_stride,
                                   const float* logits, int64_t logits_stride, int64_t rows,
                                   const loraplex::LoraSegments* segments, float* scratch, float* y);
LORAPLEX_API void loraplex_add_gated(const float* x, int64_t x_stride, const float* gate, int64_t gate_stride,
                                     int64_t rows, int64_t size, float* y, int64_t y_stride, int32_t threads);
