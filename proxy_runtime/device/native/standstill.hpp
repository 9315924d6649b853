// Ranks that wait for one another for ever: one in a collective that another does not join, because it waits itself.
//
// A rank whose queue has stood at one message for a second tells all proxies what it waits for and how many operations
// of each sequence it has contributed to. An edge from rank a to rank b means: a waits for a contribution of b that b,
// standing, has not made. It is exact, though proxies hear of it at different times: who stands contributes nothing
// until what it waits for is complete, so a circle of such edges never ends, and one that is not there any more is
// missing an edge at the proxy of the rank that moved, which is the one that would act.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>

#include "collective_bridge.hpp"
#include "rank_server.hpp"

namespace ergo::device {

// The collectives that the message at the head of a rank's queue waits for, by ticket.
std::set<uint64_t> awaited_by(RankServer& server);

class Standstill {
 public:
  explicit Standstill(CollectiveBridge& collectives) : collectives_(collectives) {}

  // Looks at the local ranks and tells peers of those that have come to a stand or move again.
  void notice(const std::map<uint32_t, std::unique_ptr<RankServer>>& servers);
  // Takes a peer's frame if it is one of these. Throws FabricError.
  bool on_control(int peer, const Slice& frame);

  // Local ranks in a circle, each with a sentence that names the ranks of it and what they called.
  std::map<int, std::string> circles() const;
  // Ranks of the job that stand, as far as is known here.
  const std::map<int, std::string>& standing() const { return standing_; }

 private:
  struct Standing {
    uint64_t message = 0;  // at which it stands
    std::vector<Awaited> awaited;
    std::map<SequenceId, uint64_t> contributed;
  };
  void tell(uint32_t kind, int rank, const Standing& standing);
  const Awaited* edge(int from, int to) const;
  bool circle(int from, int to, std::vector<int>& path, std::set<int>& seen) const;

  CollectiveBridge& collectives_;
  std::map<int, Standing> stands_;
  std::map<int, std::string> standing_;  // what they wait in
  std::set<int> local_;
};

}  // namespace ergo::device
