// Waiting without sleep.
#pragma once
#include <chrono>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace loraplex {

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  // YIELD takes no time on cores of one thread, ISB about as long as PAUSE (rust-lang/rust#84725, golang/go#69232).
  asm volatile("isb");
#endif
}

// Whether `is_true` became so within `seconds`.
template <class F>
bool spin(double seconds, F is_true) {
  const double until = now() + seconds;
  do {
    for (int i = 0; i < 32; i++) {
      if (is_true()) return true;
      relax();
    }
  } while (now() < until);
  return false;
}

}  // namespace loraplex
