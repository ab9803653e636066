// The sums of loraplex/kernels/checksum.py in one pass over the bytes, which stay in the cache from piece to piece.
#include <array>
#include <cstring>

#include "api.h"

namespace loraplex {
namespace {

constexpr int64_t kRowWords = 512;  // ROW_WORDS of checksum.py
constexpr int kStride = 8;          // bytes that the CRC takes at a time

using Tables = std::array<std::array<uint32_t, 256>, kStride>;

// tables[k][b]: CRC-32 (that of zlib, reflected) of the byte b with k zero bytes behind it.
constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t b = 0; b < 256; b++) {
    uint32_t crc = b;
    for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? crc >> 1 ^ 0xEDB88320u : crc >> 1;
    tables[0][b] = crc;
  }
  for (int k = 1; k < kStride; k++)
    for (uint32_t b = 0; b < 256; b++) tables[k][b] = tables[k - 1][b] >> 8 ^ tables[0][tables[k - 1][b] & 0xFF];
  return tables;
}
constexpr Tables kTables = make_tables();

// A CRC-32 of words in the order of their bytes on a little-endian machine; it begins and ends inverted, as zlib's.
struct Crc32 {
  uint32_t state = ~0u;

  void add(uint64_t word) {
    word ^= state;
    state = 0;
    for (int k = 0; k < kStride; k++) state ^= kTables[kStride - 1 - k][word >> 8 * k & 0xFF];
  }
  uint64_t value() const { return ~state; }
};

uint64_t checksum(const uint8_t* data, int64_t nbytes) {
  alignas(64) uint64_t columns[kRowWords] = {};
  const int64_t words = nbytes / 8;
  const uint64_t* word = (const uint64_t*)data;
  Crc32 rows, sums;
  int64_t done = 0;
  for (; done + kRowWords <= words; done += kRowWords, word += kRowWords) {
    uint64_t row = 0;
    for (int64_t i = 0; i < kRowWords; i++) columns[i] += word[i], row += word[i];
    rows.add(row);
  }
  for (; done < words; done++) rows.add(*word++);
  rows.add((uint64_t)nbytes);
  for (const uint64_t column : columns) sums.add(column);
  return sums.value() << 32 | (uint32_t)rows.value();
}

}  // namespace
}  // namespace loraplex

// `sizes` are multiples of 64, and the pieces aligned to 8 bytes.
LORAPLEX_API void loraplex_checksums(const uint8_t* const* pieces, const int64_t* sizes, int64_t count, uint64_t* out) {
  for (int64_t i = 0; i < count; i++) out[i] = loraplex::checksum(pieces[i], sizes[i]);
}
