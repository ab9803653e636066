// Gains: factors of the columns of a linear's output or input (fp32), which a segment's weight scales.
#pragma once
#include "vec.h"

namespace loraplex {

// 1 + weight (gain - 1), which is the gain itself, to the bit, where the weight is 1.
inline Vec16 weighted_gain(Vec16 gain, float weight) { return fma(set1(weight), gain, set1(1.f - weight)); }

}  // namespace loraplex
