// Sums over ranks, and their parts side by side. A rank says that its part is there by a number in memory that all of
// them share; the others spin for it, then sleep until it changes (a futex).
//
// A sum adds the parts in the order of ranks: so its bits depend on their number, and on nothing else of a batch.
//
// HOW A RANK IS LOST. While one sleeps it looks at its pipes to the other processes: the end of a process closes them.
// From then on nothing is waited for, and what a call leaves is not a result: the caller asks `is_lost`.
#include "ranks.h"

#include <poll.h>

#include <atomic>
#include <climits>
#include <ctime>

#include "operators.h"
#include "spin.h"
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace loraplex {
namespace {

constexpr double kSpinS = 100e-6;     // longer than ranks are apart that both have their cores
constexpr long kLookNs = 20'000'000;  // from look to look at the other processes
constexpr int64_t kHeadBytes = 4096;  // of the board: its lines, 64 ranks at most

struct alignas(64) Line {
  std::atomic<uint32_t> arrived, sleepers;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

Line& line_of(const RankBoard& board, int32_t rank) { return ((Line*)board.memory)[rank]; }

bool is_there(const Line& line, uint32_t epoch) {
  return int32_t(line.arrived.load(std::memory_order_acquire) - epoch) >= 0;
}

// Until `at` is no longer `seen`, or a while.
void sleep_on(std::atomic<uint32_t>& at, uint32_t seen) {
#if defined(__linux__)
  const timespec most = {0, kLookNs};
  syscall(SYS_futex, &at, FUTEX_WAIT, seen, &most, nullptr, 0);
#else
  const timespec most = {0, 100'000};
  if (at.load() == seen) nanosleep(&most, nullptr);
#endif
}

bool has_ended(const RankBoard& board) {
  for (int32_t i = 0; i < board.num_watched; i++) {
    pollfd each = {board.watched[i], 0, 0};  // the end alone, not what is there to read
    if (poll(&each, 1, 0) > 0) return true;
  }
  return false;
}

}  // namespace

float* part_of(const RankBoard& board, uint32_t epoch, int32_t rank) {
  return (float*)((char*)board.memory + kHeadBytes) + (int64_t(epoch & 1) * board.size + rank) * board.capacity;
}

void arrive(RankBoard& board, uint32_t epoch) {
  Line& own = line_of(board, board.rank);
  own.arrived.store(epoch, std::memory_order_seq_cst);
#if defined(__linux__)
  if (own.sleepers.load(std::memory_order_seq_cst) != 0)
    syscall(SYS_futex, &own.arrived, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

bool wait_for_ranks(RankBoard& board, uint32_t epoch) {
  for (int32_t rank = 0; rank < board.size; rank++) {
    Line& line = line_of(board, rank);
    if (rank == board.rank || is_there(line, epoch) || spin(kSpinS, [&] { return is_there(line, epoch); })) continue;
    const double until = now() + board.timeout_s;
    line.sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (board.is_lost == 0) {
      const uint32_t seen = line.arrived.load(std::memory_order_seq_cst);
      if (int32_t(seen - epoch) >= 0) break;
      sleep_on(line.arrived, seen);
      if (line.arrived.load(std::memory_order_acquire) == seen && (has_ended(board) || now() > until))
        board.is_lost = 1;
    }
    line.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
  return board.is_lost == 0;
}

}  // namespace loraplex

using namespace loraplex;

// y [count] becomes the sum of all ranks' y.
LORAPLEX_API void loraplex_sum_ranks(RankBoard* board, float* y, int64_t count) {
  exchange(*board, y, count, true, [&](int64_t first, int64_t n, auto parts) {
    float* sum = y + first;
    std::memcpy(sum, parts(0), n * sizeof(float));
    for (int32_t rank = 1; rank < board->size; rank++) {
      const float* part = parts(rank);
      for (int64_t i = 0; i < n; i++) sum[i] += part[i];
    }
  });
}

// y [rows, size * width]: each rank's part [rows, width], in the order of ranks. A rank whose y is null only gives its
// part, and waits for none.
LORAPLEX_API void loraplex_join_ranks(RankBoard* board, const float* part, int64_t rows, int64_t width, float* y) {
  exchange(*board, part, rows * width, y != nullptr, [&](int64_t first, int64_t n, auto parts) {
    for (int32_t rank = 0; rank < board->size; rank++) {
      const float* from = parts(rank);
      for (int64_t at = first, left = n; left > 0;) {  // row by row
        const int64_t row = at / width, column = at % width, here = std::min(left, width - column);
        std::memcpy(y + (row * board->size + rank) * width + column, from, here * sizeof(float));
        at += here, from += here, left -= here;
      }
    }
  });
}
