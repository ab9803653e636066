// The C ABI, as loraplex/kernels/native/library.py declares it to ctypes. Functions do not check their arguments: the
// Python side does.
#pragma once
#include <cstdint>

#define LORAPLEX_API extern "C" __attribute__((visibility("default")))

namespace loraplex {

enum Format : int32_t { kF32 = 0, kF16 = 1, kBF16 = 2, kInt8 = 3 };

// What paged attention needs of a step, the same for all layers (AttentionStep in attention.py). Strides are elements.
struct AttentionStep {
  const int32_t* q_indptr;      // [sequences + 1]
  const int32_t* context_lens;  // [sequences], at least one query each
  const int32_t* block_tables;  // [sequences][table_stride]
  int64_t sequences, table_stride;
  int64_t block_stride;         // from KV block to KV block of one layer
  int32_t format, block_size, heads, kv_heads, head_dim, threads;
  float scale;
};

// Arguments of loraplex_rotary_write_kv (RotaryCall in attention.py). Strides are elements, from token to token and
// from block to block.
struct RotaryCall {
  float* q;  // [tokens, heads, head_dim], rotated in place
  const float *k, *v, *cos, *sin;
  const int64_t* kv_slots;  // [tokens]
  void* kv;
  int64_t q_stride, k_stride, v_stride, block_stride, tokens;
  int32_t format, block_size, heads, kv_heads, head_dim, threads;
};

// The rows of one linear in the slot table (loraplex/kernels/plan.py), each of `capacity` slots; one row and one output
// slice per slice.
struct LoraTable {
  const int64_t *a_addr, *b_addr, *bias_addr, *gain_addr, *input_gain_addr;  // 0: no such part. a_addr: of all slices
  const int64_t *scales_addr;  // where there are such, A and B are projections (projections.h), which slots may share
  const int32_t *rank;
  const float* scale;
  const int32_t* format;
  int64_t capacity, num_slices, in;
  const int64_t *out_offset, *out;  // [num_slices]
};

// Rows [start, end) of x go through the adapter in `slot`, times `weight`, in this order.
struct LoraSegments {
  const int32_t *start, *end, *slot;
  const float* weight;
  int64_t count;
};

// One slice of an adapter, row-major: a [rank, in], b [out, rank]; bias [out], gain [out] and input_gain [in] fp32 or
// null. Strides: of rows, elements.
struct LoraSource {
  const void *a, *b;
  const float *bias, *gain, *input_gain;
  int64_t a_stride, b_stride, a_format, b_format, rank, out;
};

// What the threads of all calls (team.h) have seen since the process began; seconds.
struct TeamStats {
  double computed, waited;  // of calling threads in parallel regions: at work, waiting for parts of other threads
  double left_out;          // of threads that were not used because their cores were taken
  int64_t threads, active;  // that the last region asked for, and that it had
};

// The operators that a program (loraplex/kernels/native/program.py) is made of, as `name` of Operator there.
enum Operator : int32_t {
  kLinear, kAddLora, kRmsNorm, kAddRmsNorm, kRotaryWriteKv, kPagedAttention, kSiluMul, kScaleInput,
  kOperators
};

// One call of a program: what does not change from step to step. What `at` and `size` are is program.cpp's.
struct ProgramCall {
  int32_t op, threads;
  float eps;
  void* at[6];
  int64_t size[4];
};

// What does: the rows of all tensors, and the batch.
struct ProgramStep {
  int64_t rows;
  const float *cos, *sin;
  const int64_t* kv_slots;
  const AttentionStep* attention;
  const LoraSegments* segments;  // null: no adapters
};

}  // namespace loraplex
