// What the header of a shared ring has besides: processes of one tree use it one after another (docs/design/0003).
#pragma once

#include "messages.hpp"
#include "ring.hpp"

namespace ergo {

struct SharedWords {
  std::atomic<uint32_t> shared;      // 1: it is a shared ring
  std::atomic<uint32_t> claimant;    // pid, in the tree's namespace, of the process that has it; 0: nobody
  std::atomic<uint64_t> dropped_to;  // what lies before it was left by a claimant that is gone: it is not executed
};
inline constexpr size_t kSharedWordsOffset = 4096;
static_assert(sizeof(RingHeader) <= kSharedWordsOffset);
static_assert(kSharedWordsOffset + sizeof(SharedWords) <= kHeaderBytes);

inline SharedWords& shared_words(RingHeader& header) {
  return *reinterpret_cast<SharedWords*>(reinterpret_cast<char*>(&header) + kSharedWordsOffset);
}

inline const SharedWords& shared_words(const RingHeader& header) {
  return shared_words(const_cast<RingHeader&>(header));
}

// A message without a body: another process begins; what the one before it had on the device is freed.
inline constexpr Message kResetMessage = static_cast<Message>(32);

}  // namespace ergo
