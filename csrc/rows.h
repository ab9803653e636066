// Operators whose rows are independent of one another.
#pragma once
#include <omp.h>

namespace loraplex {

constexpr long kElementsForThreads = 160 << 10;  // about 20 us; a parallel region costs 3

// f(row) for every row, in equal runs of rows a thread; `elements` is the work of all of them.
template <class F>
inline void for_rows(long rows, long elements, int threads, F f) {
  if (threads == 1 || rows == 1 || elements < kElementsForThreads) {
    for (long row = 0; row < rows; row++) f(row);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long row = 0; row < rows; row++) f(row);
}

}  // namespace loraplex
