// A Collective message under construction (channel/messages.hpp).
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "messages.hpp"

namespace ergo::rank {

struct CollectiveCall {
  CollectiveKind kind = CollectiveKind::Barrier;
  ReduceOp reduce = ReduceOp::Sum;
  int64_t root = 0;
  std::vector<at::Tensor> inputs = {}, outputs = {};
  std::vector<int64_t> extra = {};
};

// Host tensors that a collective writes, each with its stand-in on the device.
using HostResults = std::vector<std::pair<at::Tensor, at::Tensor>>;

// Sends the message. Host tensors are staged on the device, inputs with their contents; the outputs among them are
// returned: they have their results once somebody copies them back. Throws for tensors that are not dense.
HostResults send_collective(uint64_t communicator, const CollectiveCall& call);

// Whether no collective is going to write these device tensors any more. Does not wait for any.
bool collectives_done(const std::vector<at::Tensor>& tensors);

}  // namespace ergo::rank
