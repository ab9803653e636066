// What ranks of a model add up and put together within a step, over memory that their processes share (ranks.cpp).
#pragma once
#include <algorithm>
#include <cstring>

#include "api.h"

namespace loraplex {

// Whether every rank has arrived at `epoch`; false, and the board is lost, when one has ended or is silent.
bool wait_for_ranks(RankBoard& board, uint32_t epoch);
void arrive(RankBoard& board, uint32_t epoch);
float* part_of(const RankBoard& board, uint32_t epoch, int32_t rank);

// Each rank's `own` [count] becomes known to the others, in pieces: visit(first, n, parts), where parts(rank) are
// floats [first, first + n) of that rank's. Without `reads` it waits for none of them.
//
// A piece lies in one of two halves of the board in turn. A rank writes to a half when all have arrived at the piece
// before: they have read what was there.
template <class F>
void exchange(RankBoard& board, const float* own, int64_t count, bool reads, F visit) {
  for (int64_t first = 0; first < count && board.is_lost == 0; first += board.capacity) {
    const int64_t n = std::min(count - first, board.capacity);
    const uint32_t epoch = ++board.epoch;
    if (!wait_for_ranks(board, epoch - 1)) return;
    std::memcpy(part_of(board, epoch, board.rank), own + first, n * sizeof(float));
    arrive(board, epoch);
    if (!reads) continue;
    if (!wait_for_ranks(board, epoch)) return;
    visit(first, n, [&](int32_t rank) { return (const float*)part_of(board, epoch, rank); });
  }
}

}  // namespace loraplex
