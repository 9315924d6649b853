// What the engine keeps. Internal to collectives.cpp and collectives_cut.cpp.
#pragma once

#include <algorithm>

#include "collective_plan.hpp"
#include "collectives.hpp"

namespace ergo {

struct CollectiveEngine::Group {
  uint64_t comm;
  std::vector<int> members;  // global ranks
  Roster roster;

  std::optional<uint32_t> group_rank(int rank) const {
    auto found = std::find(members.begin(), members.end(), rank);
    if (found == members.end()) return std::nullopt;
    return static_cast<uint32_t>(found - members.begin());
  }
};

struct CollectiveEngine::Operation {
  uint64_t ticket;
  int rank;
  uint64_t number;
  SequenceId sequence;
  Descriptor descriptor;
  Slice input;
  OnComplete on_complete;
  std::list<std::shared_ptr<Operation>>::iterator place;  // in operations_[rank]
};

// What one member has sent for one instance to this proxy.
struct CollectiveEngine::Contribution {
  FrameHeader first;                                     // kind, op, root, signature, parts
  std::map<uint32_t, std::pair<uint64_t, Slice>> parts;  // part -> offset, payload
  bool complete() const { return parts.size() == first.parts; }
  Slice payload(uint32_t part) const {
    auto found = parts.find(part);
    return found == parts.end() ? Slice() : found->second.second;
  }
};

struct CollectiveEngine::Instance {
  struct Chunk {
    uint64_t offset;
    Slice payload;  // reduced, or the sentence why it could not be
    bool failed;
  };
  std::map<uint32_t, Contribution> contributions;             // by group rank
  std::map<uint32_t, Chunk> chunks;                           // by owner index
  std::map<uint32_t, std::shared_ptr<Operation>> operations;  // of local members
  bool ready = false;
  std::map<uint32_t, CollectiveResult> results;  // of local members, once ready
};

struct CollectiveEngine::Sequence {
  SequenceId id;
  const Group* group = nullptr;  // null: frames arrived before the communicator was defined
  Roster roster;
  std::map<uint32_t, MemberCounts> counts;  // of local members
  std::map<uint64_t, Instance> instances;

  uint64_t completed() const { return counts.empty() ? 0 : counts.begin()->second.completed; }
};

struct CollectiveEngine::Completion {
  std::shared_ptr<Operation> operation;
  CollectiveResult result;
};

}  // namespace ergo
