// The C ABI, as loraplex/kernels/native/library.py declares it to ctypes. Functions do not check their arguments: the
// Python side does.
#pragma once
#include <cstdint>

#define LORAPLEX_API extern "C" __attribute__((visibility("default")))

namespace loraplex {

enum Format : int32_t { kF32 = 0, kF16 = 1, kBF16 = 2, kInt8 = 3, kInt4 = 4, kInt8Groups = 5, kInt4Bytes = 6 };

// What a weight in groups (kInt4, kInt8Groups; kInt4Bytes is kInt4 with activations in 8 bits) has in the place of a
// scale per column; both [panels][groups][16].
struct GroupScales {
  const void* scale;    // of `format`: kF32 or kF16
  const int8_t* zero;   // null: 8 in 4 bits, 0 in 8
  int64_t size, count;  // k of a group: 32, 64 or 128; groups of a column
  int32_t format;
};

// What paged attention needs of a step, the same for all layers (AttentionStep in attention.py). Strides are elements.
struct AttentionStep {
  const int32_t* q_indptr;      // [sequences + 1]
  const int32_t* context_lens;  // [sequences], at least one query each
  const int32_t* block_tables;  // [sequences][table_stride]
  int64_t sequences, table_stride;
  int64_t block_stride;         // from KV block to KV block of one layer
  int32_t format, block_size, heads, kv_heads, head_dim, threads;
  float scale, softcap;  // scores are softcap * tanh(score / softcap); 0: as they are
};

// Arguments of loraplex_rotary_write_kv (RotaryCall in attention.py). Strides are elements, from token to token and
// from block to block.
struct RotaryCall {
  float* q;  // [tokens, heads, head_dim], rotated in place
  const float *k, *v, *cos, *sin;
  const int64_t* kv_slots;  // [tokens]
  void* kv;
  int64_t q_stride, k_stride, v_stride, block_stride, rope_stride, tokens;
  int32_t format, block_size, heads, kv_heads, head_dim, threads, rotary_dim, is_interleaved;
};

// What an adapter has for one slice of one linear: an entry of the slot table (loraplex/kernels/plan.py), a cache line.
struct LoraEntry {
  int64_t a, b, bias, gain, input_gain;  // addresses; 0: no such part. a: of all slices
  int64_t scales;  // where there are such, A and B are projections (projections.h), which slots may share
  int32_t rank;
  float scale;
  int32_t format;
  int32_t is_exchanged;  // over ranks, between the two products: see LoraTable
};
static_assert(sizeof(LoraEntry) == 64);

// Memory that all ranks of a model share, as one of them has it (board.py). Zeros, when the first one begins.
struct RankBoard {
  void* memory;
  int64_t capacity;        // floats of a rank's part
  const int32_t* watched;  // file descriptors of pipes from or to other ranks' processes
  double timeout_s;        // of a rank that is silent
  int32_t num_watched, rank, size, is_lost;
  uint32_t epoch;          // of the exchanges so far
};

// The rows of one linear in the slot table, one per slice: entries[slot * slot_stride + slice].
//
// What of an adapter is exchanged is cut finer than the linear is. Of a linear that is cut by its outputs, each rank
// has rank / size rows of A, and x A^T of all ranks side by side goes through its B. Of one that is cut by its inputs,
// each has out / size rows of B: x A^T is a sum over ranks, and the rank adds to its own outputs.
struct LoraTable {
  const LoraEntry* entries;
  int64_t slot_stride, num_slices, in;
  const int64_t *out_offset, *out;  // [num_slices]
  RankBoard* board;                 // null: nothing is exchanged
  int64_t is_cut_by_inputs;

  const LoraEntry& entry(int64_t slot, int64_t slice) const { return entries[slot * slot_stride + slice]; }
};

// Rows [start, end) of x go through the adapter in `slot`, times `weight`, in this order.
struct LoraSegments {
  const int32_t *start, *end, *slot;
  const float* weight;
  int64_t count;
};

// One slice of an adapter, row-major: a [a_rows, in], b [b_rows, rank]; bias [out], gain [out] and input_gain [in] fp32
// or null. a_rows is the rank and b_rows is out, unless it is exchanged over ranks. Strides: of rows, elements.
struct LoraSource {
  const void *a, *b;
  const float *bias, *gain, *input_gain;
  int64_t a_stride, b_stride, a_format, b_format, rank, out, a_rows, b_rows;
};

// A linear of one expert. table: of its adapters; null: there are none.
struct ExpertLinear {
  const void *weight, *scale;
  const float* bias;
  const LoraTable* table;
  int64_t format;
};

// What experts.cpp needs of a layer, the same for all steps. inner: of one expert, what this rank has of it.
struct ExpertsCall {
  const ExpertLinear* linears;  // [experts][2]: gate and up, down
  int64_t experts, top_k, hidden, inner;
  int32_t normalizes, threads;
  float limit, alpha;  // of a clamped gate; limit 0: it is silu(gate) * up
  int32_t scales_inputs, unused;  // factors are sigmoid(logit), of what an expert reads in place of what it says
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
  kSumRanks, kLayerNorm, kAddScaled, kGelu, kExperts, kAddGated, kRmsNormRanks,
  kOperators
};

// One call of a program: what does not change from step to step. What `at` and `size` are is program.cpp's.
struct ProgramCall {
  int32_t op, threads;
  float eps, scale;
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
