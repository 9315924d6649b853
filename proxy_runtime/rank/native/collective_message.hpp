// A Collective message under construction (channel/messages.hpp).
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
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

// Sends the message. Host tensors are staged on the device: inputs are copied there first, and results
// back after, which waits. Throws for tensors that are not dense.
void send_collective(uint64_t communicator, const CollectiveCall& call);

}  // namespace ergo::rank
