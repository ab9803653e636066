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

// Words of `bits` a number: number i of a step's k, of column c, at bit i / 2 * bits + i % 2 * 16 of word c.
void pack_words(const uint8_t* q, long out, long in, long bits, uint32_t* panels, int threads) {
  const long per_step = 32 / bits, steps = (in + per_step - 1) / per_step;
  for_rows(panels_of(out), out * in, threads, [&](long p) {
    uint32_t* panel = panels + p * steps * kPanel;
    memset(panel, 0, steps * kPanel * sizeof(*panel));
    for (long c = 0; c < std::min(kPanel, out - p * kPanel); c++) {
      const uint8_t* row = q + (p * kPanel + c) * in;
      for (long k = 0; k < in; k++) {
        const long i = k % per_step;
        panel[k / per_step * kPanel + c] |= (uint32_t)row[k] << (i / 2 * bits + i % 2 * 16);
      }
    }
  });
}

// One group in 4 bits: scale * (q - 8), q 0..15.
class Int4Group {
 public:
  Int4Group(const float* w, long count, bool is_f16) : count_((count + 15) / 16), is_f16_(is_f16) {
    Vec16 largest16 = zero(), poison16 = zero();
    for (long i = 0; i < count_; i++) {
      w_[i] = load_first(w + 16 * i, count - 16 * i);
      largest16 = max(abs(w_[i]), largest16);
      poison16 = fma(w_[i], zero(), poison16);
    }
    const float largest = max_lanes(largest16), lowest = max_lanes(max16([](Vec16 v) { return sub(zero(), v); }));
    furthest_ = lowest == largest ? -largest : largest;
    poison_ = sum_lanes(poison16);
  }

  // The scale of the least squared error among those that take the furthest number to -8 or a little less or more far,
  // and the one that fits its integers best.
  float best_scale() const {
    if (furthest_ == 0 || poison_ != 0) return poison_;
    float best = rounded(furthest_ / -8), least = error(best);
    const auto consider = [&](float scale) {
      const float found = error(scale);
      if (found < least) least = found, best = scale;
    };
    for (const float steps : kFurthestSteps) consider(rounded(furthest_ / -steps));
    consider(rounded(fitted(best)));
    return best;
  }

  void write(float scale, uint8_t* q, long count) const {
    int16_t whole[kMost];
    for (long i = 0; i < count_; i++)
      store_int16(whole + 16 * i, scale == 0 || poison_ != 0 ? zero() : steps_of(i, 1 / scale));
    for (long k = 0; k < count; k++) q[k] = (uint8_t)(whole[k] + 8);
  }

 private:
  static constexpr long kMost = 128;
  static constexpr float kFurthestSteps[] = {7.f, 7.25f, 7.5f, 7.75f, 8.25f, 8.5f, 8.75f, 9.f, 9.5f, 10.f};

  template <class F>
  Vec16 max16(F f) const {
    Vec16 found = zero();
    for (long i = 0; i < count_; i++) found = max(f(w_[i]), found);
    return found;
  }
  float rounded(float scale) const {
    if (!is_f16_) return scale;
    uint16_t half[16];
    store_f16(half, set1(scale));
    float one[16];
    store(one, load_f16(half));
    return one[0];
  }
  Vec16 steps_of(long i, float inverse) const {
    return max(set1(-8), min(set1(7), round_even(mul(w_[i], set1(inverse)))));
  }
  float error(float scale) const {
    if (scale == 0) return INFINITY;
    Vec16 sum = zero();
    for (long i = 0; i < count_; i++) {
      const Vec16 off = fma(steps_of(i, 1 / scale), set1(-scale), w_[i]);
      sum = fma(off, off, sum);
    }
    return sum_lanes(sum);
  }
  float fitted(float scale) const {  // sum w q / sum q^2, for the q of `scale`
    if (scale == 0) return 0;
    Vec16 above = zero(), below = zero();
    for (long i = 0; i < count_; i++) {
      const Vec16 q = steps_of(i, 1 / scale);
      above = fma(w_[i], q, above), below = fma(q, q, below);
    }
    return sum_lanes(above) / sum_lanes(below);
  }

  Vec16 w_[kMost / 16];
  long count_;
  bool is_f16_;
  float furthest_, poison_;
};

}  // namespace
}  // namespace loraplex

using namespace loraplex;

// q [out, in] of 0..15 (kInt4) or int8 (kInt8Groups), row-major, into panels.
LORAPLEX_API void loraplex_pack_groups(int32_t format, const uint8_t* q, int64_t out, int64_t in, uint32_t* panels,
                                       int32_t threads) {
  pack_words(q, out, in, format == kInt4 ? 4 : 8, panels, threads);
}

// A weight in 4 bits: q [out, in] of 0..15 and scale [out, groups], whose numbers are those of `scale_format`.
LORAPLEX_API void loraplex_round_int4(const float* weight, int64_t out, int64_t in, int64_t group_size,
                                      int32_t scale_format, uint8_t* q, float* scale, int32_t threads) {
  const long groups = (in + group_size - 1) / group_size;
  for_rows(out, 16 * out * in, threads, [&](long n) {
    for (long g = 0; g < groups; g++) {
      const long begin = n * in + g * group_size, count = std::min<long>(group_size, in - g * group_size);
      const Int4Group group(weight + begin, count, scale_format == kF16);
      const float best = group.best_scale();
      scale[n * groups + g] = best;
      group.write(best, q + begin, count);
    }
  });
}

LORAPLEX_API void loraplex_pack_linear(int32_t format, const void* weight, int64_t out, int64_t in, void* panels,
                                       float* scale, int32_t threads) {
  switch (format) {
    case kF32: return pack_columns((const float*)weight, out, in, (float*)panels, false, threads);
    case kF16: return pack_columns((const uint16_t*)weight, out, in, (uint16_t*)panels, false, threads);
    case kBF16: return pack_columns((const uint16_t*)weight, out, in, (uint16_t*)panels, true, threads);
    case kInt8: return pack_int8((const float*)weight, out, in, (int8_t*)panels, scale, threads);
  }
}
