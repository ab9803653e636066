// The C ABI, as loraplex/kernels/native/library.py declares it to ctypes. Functions do not check their arguments: the Python side does.
#pragma once
#include <cstdint>

#define LORAPLEX_API extern "C" __attribute__((visibility("default")))

namespace loraplex {

enum Format : int32_t { kF32 = 0, kF16 = 1, kBF16 = 2, kInt8 = 3 };

}  // namespace loraplex
