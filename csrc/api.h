// The C ABI, as loraplex/kernels/native/library.py declares it to ctypes. Functions do not check their arguments: the Python side does.
#pragma once
#include <cstdint>

#define LORAPLEX_API extern "C" __attribute__((visibility("default")))

namespace loraplex {

enum Format : int32_t { kF32 = 0, kF16 = 1, kBF16 = 2, kInt8 = 3 };

// What paged attention needs to know of a step, the same for all layers (AttentionStep in attention.py). Strides are elements.
struct AttentionStep {
  const int32_t* q_indptr;      // [sequences + 1]
  const int32_t* context_lens;  // [sequences], at least one query each
  const int32_t* block_tables;  // [sequences][table_stride]
  int64_t sequences, table_stride;
  int64_t block_stride;         // from KV block to KV block of one layer
  int32_t format, block_size, heads, kv_heads, head_dim, threads;
  float scale;
};

// Arguments of loraplex_rotary_write_kv (RotaryCall in attention.py). Strides are elements, from token to token and from block to block.
struct RotaryCall {
  float* q;  // [tokens, heads, head_dim], rotated in place
  const float *k, *v, *cos, *sin;
  const int64_t* kv_slots;  // [tokens]
  void* kv;
  int64_t q_stride, k_stride, v_stride, block_stride, tokens;
  int32_t format, block_size, heads, kv_heads, head_dim, threads;
};

}  // namespace loraplex
