// All that the proxy keeps for one rank. What is not in here, in the ring or in the store is not device state.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <unordered_map>
#include <vector>

#include "libraries.hpp"
#include "storage.hpp"
#include "template.hpp"

namespace ergo::device {

namespace splice {
struct Member;
}

struct Communicator {
  uint64_t id = 0;
  std::vector<int> members;  // global ranks in group order
};

// A collective that has been issued and not completed: the message body that issued it, and the storages
// that its tensors lie in (kept alive though their handles may be gone), in the order of the body.
struct PendingCollective {
  std::vector<uint64_t> body;
  std::vector<PhysicalPtr> storages;
  bool writes = false;  // outputs are marked pending
  // Of the outputs at the issue, where ranks share a device (splice/): their values, and what is rebound on an error.
  std::vector<PhysicalPtr> kept;
  std::vector<ValueNumber> values;
};

struct RankState {
  RankState(uint32_t global_rank, uint32_t proxy_slot) : rank(global_rank), slot(proxy_slot), storages(proxy_slot) {}

  uint32_t rank;
  uint32_t slot;
  StorageTable storages;
  TemplateTable templates;
  // Id 0 is the process's default generator, which holds this rank's state only while the rank is entered
  // (process_state.hpp); `default_state` has it at all other times.
  std::unordered_map<uint64_t, at::Generator> generators;
  at::Tensor default_state;
  std::vector<uint64_t> flags;                    // the last Flags message
  std::unordered_map<uint64_t, int64_t> marks;    // moments of the rank's timing events: DeviceBackend::now
  LibraryList libraries;                          // that its operators come from
  std::vector<Communicator> communicators;        // in creation order
  std::map<uint64_t, PendingCollective> pending;  // by the engine's ticket
  splice::Member* member = nullptr;               // while it shares its device with other ranks
  std::function<void(const Failure&)> report;     // an asynchronous error: the rank raises it at its next sync
  // What it has given to be summed since its last step, by handle, and the most of that in any step (bytes): gradients,
  // as far as they can be told from outside.
  std::unordered_map<uint64_t, uint64_t> given;
  uint64_t given_bytes = 0, gradient_bytes = 0;
  uint64_t completions = 0;  // collectives completed in this proxy: what a blocked queue waits to see change
  uint64_t executed = 0, defined = 0, messages = 0;
};

}  // namespace ergo::device
