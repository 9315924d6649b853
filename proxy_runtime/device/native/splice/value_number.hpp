// Value numbers: 128-bit names such that equal numbers mean equal bits.
//
// Two kinds of hash. *Contents* (of storages at a load, of what the host writes) may be chosen by whoever wrote the
// script, and the bits of a job depend on them; so they are hashed with a universal hash under a key that this process
// has drawn and tells nobody: for any two different contents the chance that they collide is at most 2^-121, whoever
// chose them. *Names of calls* (operator, arguments, numbers of inputs) are mixed by two 64-bit lanes of bijections
// from that same key; at 10^10 calls in a process's life a collision has a chance of about 10^-18.
// Numbers mean nothing outside the process that made them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "../storage.hpp"

namespace ergo::device::splice {

// What a number is the name of: keeps the kinds apart.
enum class Domain : uint64_t { Call = 1, New, Written, Contents, Part, Resized, Uninitialised, Random, Flags, Fresh };

class Mixer {
 public:
  explicit Mixer(Domain domain);
  Mixer& word(uint64_t w) { return number({w, w}); }
  // One step for both halves, each of which tells numbers apart as well as the other.
  Mixer& number(const ValueNumber& v) {
    a_ = step(a_ ^ v.high, 0xff51afd7ed558ccdull, 0xc4ceb9fe1a85ec53ull);
    b_ = step((b_ + v.low) ^ (a_ >> 7), 0x9e3779b97f4a7c15ull, 0xbf58476d1ce4e5b9ull);
    return *this;
  }
  Mixer& words(const uint64_t* begin, size_t n) {
    for (size_t i = 0; i < n; i++) word(begin[i]);
    return *this;
  }
  // Never the number that stands for "none".
  ValueNumber done() const { return {a_ ^ (b_ << 32 | b_ >> 32), b_ | 1}; }

 private:
  static uint64_t step(uint64_t x, uint64_t c, uint64_t d) {
    x *= c;
    x ^= x >> 29;
    x *= d;
    return x ^ (x >> 32);
  }
  uint64_t a_, b_;
};

// A number that nothing else has.
ValueNumber fresh_number();
ValueNumber number_of_contents(const void* bytes, size_t n);
ValueNumber number_of_uninitialised(uint64_t bytes);

inline bool is_numbered(const ValueNumber& v) { return v.high != 0 || v.low != 0; }

struct NumberHash {
  size_t operator()(const ValueNumber& v) const { return v.high; }
};

}  // namespace ergo::device::splice
