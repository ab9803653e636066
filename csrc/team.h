// The threads that the work of an operator is shared among (team.cpp).
#pragma once

namespace loraplex {

using Part = void (*)(const void* context, long share, long part);
void run_shares(long shares, long parts, Part part, const void* context);

// f(share, part) once for each of `shares` x `parts`, on this thread and at most shares - 1 others. A thread goes
// through a share from part 0 on, in order, and then through what is left of the others': a thread that lost its core
// delays at most the part that it is in.
template <class F>
void in_shares(long shares, long parts, const F& f) {
  run_shares(shares, parts, [](const void* context, long share, long part) { (*(const F*)context)(share, part); }, &f);
}

}  // namespace loraplex
