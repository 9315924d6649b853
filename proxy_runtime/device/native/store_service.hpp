// The rendezvous store across proxies: requests travel to the proxy that hosts rank 0.
#pragma once

#include <functional>
#include <vector>

#include "collective_bridge.hpp"
#include "rank_server.hpp"
#include "standstill.hpp"
#include "store.hpp"

namespace ergo::device {

// A control frame between proxies: what it is, whose, then request or reply bytes.
struct ControlHeader {
  uint32_t kind;
  uint32_t rank;
};
inline constexpr uint32_t kStoreRequest = 1, kStoreReply = 2, kRankLeft = 3, kRankStands = 4, kRankMoves = 5;
// Beside StoreOp (wire.hpp): a Check by a rank that does nothing else until the key is there. Its answer is 0, 1, or
// 2 and a sentence: nobody is left who could set it.
inline constexpr uint8_t kStoreAwait = 8;

class StoreService final : public StorePort {
 public:
  using Deliver = std::function<void(uint32_t rank, std::string reply)>;
  StoreService(CollectiveBridge& collectives, const Standstill& standstill, Deliver deliver)
      : collectives_(collectives), standstill_(standstill), deliver_(std::move(deliver)) {}

  std::optional<std::string> request(uint32_t rank, std::string_view bytes) override;
  // A control frame of a peer: a request of one of its ranks, or the answer to one of ours.
  void on_control(int peer, const Slice& frame);
  bool is_master() const;
  KeyValueStore& items() { return store_; }

 private:
  struct Waiting {
    std::string key;
    std::chrono::steady_clock::time_point asked;
  };
  std::string apply(uint32_t rank, std::string_view bytes);
  std::string why_nobody_sets(uint32_t rank, const std::string& key) const;

  CollectiveBridge& collectives_;
  const Standstill& standstill_;
  Deliver deliver_;
  KeyValueStore store_;
  std::map<uint32_t, Waiting> waiting_;  // ranks that do nothing but wait for a key
};

}  // namespace ergo::device
