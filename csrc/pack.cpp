// From a row-major weight [out, in] into panels (panels.h).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "api.h"
#include "panels.h"
#include "rows.h"

namespace loraplex {
namespace {

template <class Element>
void pack_columns(const Element* w, long out, long in, Element* panels, bool in_pairs, int threads) {
  for_rows(panels_of(out), out * in, threads, [&](long p) {
    Element* panel = panels + p * in * kPanel;
    for (long c = 0; c < kPanel; c++) {
      const long n = p * kPanel + c, position = in_pairs ? c % 8 * 2 + c / 8 : c;
      for (long k = 0; k < in; k++) panel[k * kPanel + position] = n < out ? w[n * in + k] : Element(0);
    }
  });
}

void pack_int8(const float* w, long out, long in, int8_t* panels, float* scale, int threads) {
  const long panel_size = (in + 1) / 2 * 2 * kPanel;
  for_rows(panels_of(out), out * in, threads, [&](long p) {
    int8_t* panel = panels + p * panel_size;
    memset(panel, 0, panel_size);
    for (long c = 0; c < std::min(kPanel, out - p * kPanel); c++) {
      const float* row = w + (p * kPanel + c) * in;
      float largest = 1e-30f;
      for (long k = 0; k < in; k++) largest = std::max(largest, std::fabs(row[k]));
      scale[p * kPanel + c] = largest / 127;
      for (long k = 0; k < in; k++)
        panel[k / 2 * 2 * kPanel + 2 * c + k % 2] = (int8_t)std::lrint(row[k] * (127 / largest));
    }
  });
}

}  // namespace
}  // namespace loraplex

using namespace loraplex;

LORAPLEX_API void loraplex_pack_linear(int32_t format, const void* weight, int64_t out, int64_t in, void* panels,
                                       float* scale, int32_t threads) {
  switch (format) {
    case kF32: return pack_columns((const float*)weight, out, in, (float*)panels, false, threads);
    case kF16: return pack_columns((const uint16_t*)weight, out, in, (uint16_t*)panels, false, threads);
    case kBF16: return pack_columns((const uint16_t*)weight, out, in, (uint16_t*)panels, true, threads);
    case kInt8: return pack_int8((const float*)weight, out, in, (int8_t*)panels, scale, threads);
  }
}
