// How rank and proxy make sure that they speak of the same file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ergo {

// Of the contents of a library's file. Not against malice: whoever could forge it runs in the rank already.
inline uint64_t content_hash(const char* bytes, size_t n) {
  uint64_t h = 0x9E3779B97F4A7C15ull ^ n;
  for (size_t at = 0; at < n; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + at, n - at < 8 ? n - at : 8);
    h = (h ^ word) * 0xff51afd7ed558ccdull;
    h ^= h >> 32;
  }
  return h;
}

}  // namespace ergo
