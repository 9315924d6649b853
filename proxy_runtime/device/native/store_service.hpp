// The rendezvous store across proxies: requests travel to the proxy that hosts rank 0.
#pragma once

#include <functional>
#include <vector>

#include "collective_bridge.hpp"
#include "rank_server.hpp"
#include "store.hpp"

namespace ergo::device {

// A control frame between proxies: what it is, whose, then request or reply bytes.
struct ControlHeader {
  uint32_t kind;
  uint32_t rank;
};
inline constexpr uint32_t kStoreRequest = 1, kStoreReply = 2, kRankLeft = 3;

class StoreService final : public StorePort {
 public:
  using Deliver = std::function<void(uint32_t rank, std::string reply)>;
  StoreService(CollectiveBridge& collectives, Deliver deliver)
      : collectives_(collectives), deliver_(std::move(deliver)) {}

  std::optional<std::string> request(uint32_t rank, std::string_view bytes) override;
  // A control frame of a peer: a request of one of its ranks, or the answer to one of ours.
  void on_control(int peer, const Slice& frame);
  bool is_master() const;
  KeyValueStore& items() { return store_; }

 private:
  CollectiveBridge& collectives_;
  Deliver deliver_;
  KeyValueStore store_;
};

}  // namespace ergo::device
