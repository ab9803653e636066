// Operators whose rows are independent of one another.
#pragma once
#include <algorithm>

#include "team.h"

namespace loraplex {

constexpr long kElementsForThreads = 160 << 10;  // about 20 us
constexpr long kElementsOfPart = 64 << 10;

// f(row) for every row, in runs of neighbours; `elements` is the work of all of them, `least` what is worth threads.
template <class F>
inline void for_rows(long rows, long elements, int threads, F f, long least = kElementsForThreads) {
  const long shares = elements < least ? 1 : std::min<long>(threads, rows);
  if (shares <= 1) {
    for (long row = 0; row < rows; row++) f(row);
    return;
  }
  const long parts = std::clamp(elements / (shares * kElementsOfPart), 1L, rows / shares), all = shares * parts;
  in_shares(shares, parts, [&](long share, long part) {
    const long i = share * parts + part;
    for (long row = rows * i / all; row < rows * (i + 1) / all; row++) f(row);
  });
}

}  // namespace loraplex
