// What gates of MLPs have in common.
#pragma once
#include <cmath>

#include "vec.h"

namespace loraplex {

// x / (1 + e^-g). Below -88 the divisor is infinite: -0, and NaN for -inf, as where e^-g overflows (at -88.7).
inline Vec16 gated(Vec16 x, Vec16 g) {
  const Vec16 divisor = add(set1(1.f), exp(sub(zero(), g)));
  return div(x, select_less(g, set1(-88.f), set1(INFINITY), divisor));
}

}  // namespace loraplex
