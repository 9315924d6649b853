// Ranks that will contribute to no further collective: they have ended, or are about to. Everybody who waits for
// them hears of it, from proxy to proxy, in the order of the contributions that went before.
#pragma once

#include <map>
#include <memory>
#include <set>

#include "collective_bridge.hpp"
#include "rank_server.hpp"

namespace ergo::device {

class Departures {
 public:
  explicit Departures(CollectiveBridge& collectives) : collectives_(collectives) {}

  // Tells engine and peers of each local rank that is gone by now, once.
  void notice(const std::map<uint32_t, std::unique_ptr<RankServer>>& servers);
  // Takes a peer's frame if it is one of these.
  bool on_control(const Slice& frame);

 private:
  CollectiveBridge& collectives_;
  std::set<uint32_t> told_;
};

}  // namespace ergo::device
