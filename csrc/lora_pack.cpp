// From an adapter's row-major tensors into the packed block of one linear (lora_layout.h).
#include <cstring>
#include <vector>

#include "api.h"
#include "lora_layout.h"

namespace loraplex {
namespace {

// ---- columns of a panel from rows of the source

typedef uint16_t Eight16 __attribute__((vector_size(16)));
typedef uint32_t Four32 __attribute__((vector_size(16)));

template <class Vector>
Vector load_vector(const void* p) {
  Vector v;
  memcpy(&v, p, sizeof(v));
  return v;
}

// Eight rows of eight, transposed: three rounds in which neighbours change places.
inline void transpose(const uint16_t* from, long from_stride, uint16_t* to, long to_stride) {
  Eight16 a[8], b[8];
  for (int i = 0; i < 8; i++) a[i] = load_vector<Eight16>(from + i * from_stride);
  auto round = [](const Eight16* in, Eight16* out) {  // out = in[0] and in[4] interleaved, in[1] and in[5], ...
    for (int i = 0; i < 4; i++) {
      out[2 * i] = __builtin_shufflevector(in[i], in[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
      out[2 * i + 1] = __builtin_shufflevector(in[i], in[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
    }
  };
  round(a, b), round(b, a), round(a, b);
  for (int i = 0; i < 8; i++) memcpy(to + i * to_stride, &b[i], sizeof(b[i]));
}
inline void transpose(const uint32_t* from, long from_stride, uint32_t* to, long to_stride) {
  for (int half = 0; half < 2; half++)
    for (int k = 0; k < 8; k += 4) {
      Four32 a[4], b[4];
      for (int i = 0; i < 4; i++) a[i] = load_vector<Four32>(from + (4 * half + i) * from_stride + k);
      auto round = [](const Four32* in, Four32* out) {
        for (int i = 0; i < 2; i++) {
          out[2 * i] = __builtin_shufflevector(in[i], in[i + 2], 0, 4, 1, 5);
          out[2 * i + 1] = __builtin_shufflevector(in[i], in[i + 2], 2, 6, 3, 7);
        }
      };
      round(a, b), round(b, a);
      for (int i = 0; i < 4; i++) memcpy(to + (k + i) * to_stride + 4 * half, &a[i], sizeof(a[i]));
    }
}

// to[k, c] = from[c, k] for `columns` rows of the source. In steps of a cache line of the source: it is read once, and
// few lines are written at a time.
template <class Element>
void copy_columns(const Element* from, long from_stride, long columns, long depth, Element* to, long to_stride) {
  constexpr long kLine = 64 / sizeof(Element);
  const long whole_columns = columns / 8 * 8, whole_depth = depth / 8 * 8;
  const long ahead = depth > columns ? 4 * kLine : 32 * from_stride;  // along long rows, or over to rows further down
  for (long line = 0; line < whole_depth; line += kLine)
    for (long c = 0; c < whole_columns; c += 8) {
      for (long i = 0; i < 8; i++) prefetch(from + (c + i) * from_stride + line + ahead);
      for (long k = line; k < std::min(line + kLine, whole_depth); k += 8)
        transpose(from + c * from_stride + k, from_stride, to + k * to_stride + c, to_stride);
    }
  for (long c = 0; c < columns; c++)
    for (long k = c < whole_columns ? whole_depth : 0; k < depth; k++)
      to[k * to_stride + c] = from[c * from_stride + k];
}

void widen(const uint16_t* from, long format, long count, float* to) {
  for (long i = 0; i < count; i += kPanel) {
    uint16_t last[kPanel] = {};
    const uint16_t* sixteen = from + i;
    if (count - i < kPanel) sixteen = (const uint16_t*)memcpy(last, sixteen, (count - i) * sizeof(*last));
    store(to + i, format == kF16 ? load_f16(sixteen) : load_bf16(sixteen));
  }
}

// ---- parts

// Writes a part from left to right: each source [columns, depth] becomes its next columns.
template <class Element>
class Part {
 public:
  Part(char* at, long depth, long columns)
      : at_((Element*)at), depth_(depth), columns_(columns), width_(part_width(columns)) {}

  void add(const void* from, long stride, int32_t format, long columns) {
    if constexpr (sizeof(Element) == sizeof(float)) {  // the one format that is wider than some of its sources
      if (format != kF32) return add_widened((const uint16_t*)from, stride, format, columns);
    }
    place((const Element*)from, stride, columns);
  }

  char* end() {  // with zeros in all that no source has
    for (long c = columns_; c < width_; c++) {
      const long first = c / kLoraPanel * kLoraPanel, width = panel_width(first, width_);
      for (long k = 0; k < depth_; k++) at_[first * depth_ + k * width + c - first] = 0;
    }
    const long size = depth_ * width_ * sizeof(Element), total = part_bytes(depth_, columns_, sizeof(Element));
    memset((char*)at_ + size, 0, total - size);
    return (char*)at_ + total;
  }

 private:
  void place(const Element* from, long stride, long columns) {
    for (long done = 0; done < columns;) {
      const long first = next_ / kLoraPanel * kLoraPanel, width = panel_width(first, width_);
      const long count = std::min(columns - done, first + width - next_);
      copy_columns(from + done * stride, stride, count, depth_, at_ + first * depth_ + next_ - first, width);
      done += count, next_ += count;
    }
  }

  void add_widened(const uint16_t* from, long stride, int32_t format, long columns) {
    const long wide_stride = round_up(depth_, kPanel);
    static thread_local std::vector<float> wide;
    wide.resize(8 * wide_stride);
    for (long c = 0; c < columns; c += 8) {
      const long count = std::min(8L, columns - c);
      for (long i = 0; i < count; i++) widen(from + (c + i) * stride, format, depth_, wide.data() + i * wide_stride);
      place((const Element*)wide.data(), wide_stride, count);
    }
  }

  Element* at_;
  long depth_, columns_, width_, next_ = 0;
};

char* pack_vector(const float* vector, long count, char* at) {
  if (vector == nullptr) return at;
  const long size = count * sizeof(float), total = round_up(size, kPartAlignment);
  memcpy(at, vector, size);
  memset(at + size, 0, total - size);
  return at + total;
}

template <class Element>
void pack(const LoraSource* slices, long num_slices, long in, char* at) {
  long a_rows = 0;
  for (long i = 0; i < num_slices; i++) a_rows += slices[i].a_rows;
  if (a_rows > 0) {
    Part<Element> a(at, in, a_rows);
    for (long i = 0; i < num_slices; i++) a.add(slices[i].a, slices[i].a_stride, slices[i].a_format, slices[i].a_rows);
    at = a.end();
  }
  for (long i = 0; i < num_slices; i++) {
    const LoraSource& s = slices[i];
    if (s.rank > 0) {
      Part<Element> b(at, s.rank, s.b_rows);
      b.add(s.b, s.b_stride, s.b_format, s.b_rows);
      at = b.end();
    }
    at = pack_vector(s.bias, s.out, at);
    at = pack_vector(s.gain, s.out, at);
    at = pack_vector(s.input_gain, in, at);
  }
}

}  // namespace
}  // namespace loraplex

using namespace loraplex;

LORAPLEX_API void loraplex_pack_lora(int32_t format, const LoraSource* slices, int64_t num_slices, int64_t in,
                                     void* block) {
  if (format == kF32) pack<uint32_t>(slices, num_slices, in, (char*)block);
  else pack<uint16_t>(slices, num_slices, in, (char*)block);
}
