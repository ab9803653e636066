// What this library is, and what this machine can run.
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "api.h"
#include "vec.h"

// Raised by hand whenever a function's arguments change: library.py refuses another one than its own.
LORAPLEX_API int32_t loraplex_abi_version() { return 13; }

LORAPLEX_API const char* loraplex_isa() { return loraplex::kIsa; }

// The best of the instruction sets that this processor and its operating system have; what is built may be less.
LORAPLEX_API const char* loraplex_best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vnni");
  if (has_avx2 && has_avx512) return "avx512";
  if (has_avx2) return "avx2";
#elif defined(__aarch64__)
#if defined(__linux__)
  // SDOT, and what else a compiler may use with -march=armv8.2-a.
  constexpr unsigned long kWanted = HWCAP_ASIMDDP | HWCAP_ATOMICS | HWCAP_CRC32 | HWCAP_ASIMDRDM;
  if ((getauxval(AT_HWCAP) & kWanted) == kWanted) return "neon_dotprod";
#endif
  return "neon";
#endif
  return "portable";
}
