#include "value_number.hpp"

#include <sys/random.h>

#include <array>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace ergo::device::splice {
namespace {

constexpr size_t kBlockWords = 128;  // 1 KiB: what one level turns into one digest of 32 bytes
constexpr size_t kLevels = 9;        // 32^9 KiB is more than a storage can have
using Wide = unsigned __int128;

struct Keys {
  Keys() {
    auto* at = reinterpret_cast<char*>(this);
    for (size_t done = 0; done < sizeof *this;) {
      const ssize_t n = getrandom(at + done, std::min<size_t>(sizeof *this - done, 256), 0);
      if (n <= 0) throw std::runtime_error("no random numbers from the kernel");
      done += static_cast<size_t>(n);
    }
  }
  // Per level two rows of NH keys, and one pair per word of the last digest.
  std::array<std::array<std::array<uint64_t, kBlockWords>, 2>, kLevels> level;
  std::array<uint64_t, 2> seed;
};

const Keys& keys() {
  static const Keys k;
  return k;
}

// NH (Black et al., UMAC, 1999): the sum of (a + k)(b + k') is 2^-64-universal over words of 64 bits.
Wide nh(const uint64_t* words, size_t n, const uint64_t* key) {
  Wide sum = 0;
  for (size_t i = 0; i < n; i += 2) sum += Wide{words[i] + key[i]} * (words[i + 1] + key[i + 1]);
  return sum;
}

// Digests of all blocks, four words each; the last block is padded with zeros (the length is mixed in at the end).
std::vector<uint64_t> digests(const char* bytes, size_t n, size_t level) {
  constexpr size_t kBlock = kBlockWords * sizeof(uint64_t);
  const auto& rows = keys().level[level];
  std::vector<uint64_t> out;
  out.reserve((n + kBlock - 1) / kBlock * 4);
  std::array<uint64_t, kBlockWords> block;
  for (size_t at = 0; at < n; at += kBlock) {
    const size_t size = std::min(kBlock, n - at);
    size_t words = kBlockWords;
    if (size < kBlock) {
      words = (size + 15) / 16 * 2;
      block[words - 1] = block[words - 2] = 0;
    }
    std::memcpy(block.data(), bytes + at, size);
    if (size % sizeof(uint64_t)) std::memset(reinterpret_cast<char*>(block.data()) + size, 0, words * 8 - size);
    for (const auto& row : rows) {
      const Wide sum = nh(block.data(), words, row.data());
      out.push_back(static_cast<uint64_t>(sum));
      out.push_back(static_cast<uint64_t>(sum >> 64));
    }
  }
  return out;
}

}  // namespace

Mixer::Mixer(Domain domain) : a_(keys().seed[0]), b_(keys().seed[1]) { word(static_cast<uint64_t>(domain)); }

ValueNumber fresh_number() {
  static uint64_t next = 0;
  return Mixer(Domain::Fresh).word(next++).done();
}

ValueNumber number_of_contents(const void* bytes, size_t n) {
  Mixer mixer(Domain::Contents);
  mixer.word(n);
  if (n <= 64) {  // a scalar: its words as they are
    std::array<uint64_t, 8> words{};
    if (n) std::memcpy(words.data(), bytes, n);
    return mixer.words(words.data(), (n + 7) / 8).done();
  }
  std::vector<uint64_t> level = digests(static_cast<const char*>(bytes), n, 0);
  for (size_t i = 1; level.size() > 4; i++)
    level = digests(reinterpret_cast<const char*>(level.data()), level.size() * sizeof(uint64_t), i);
  return mixer.words(level.data(), level.size()).done();
}

ValueNumber number_of_uninitialised(uint64_t bytes) { return Mixer(Domain::Uninitialised).word(bytes).done(); }

}  // namespace ergo::device::splice
