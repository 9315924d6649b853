// Writes the arguments of a call as key, payload and handles (channel/wire.hpp).
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <vector>

#include "op_info.hpp"
#include "wire.hpp"

namespace ergo::rank {

// A call on its way. `tensors` points into the stack the call was encoded from, in the order in which
// output specifications refer to them: all Tensor-tagged arguments.
struct EncodedCall {
  std::vector<uint64_t> key, payload, handles;
  std::vector<const at::Tensor*> tensors;
  bool has_mask = false;  // a bool or byte tensor is among the arguments after the first tensor

  void clear() {
    key.clear();
    payload.clear();
    handles.clear();
    tensors.clear();
    has_mask = false;
  }
};

// Encodes the last `info.kinds.size()` values of the stack. Arguments that only exist in the rank are
// replaced on the stack first: ZeroTensors by zeros, large CPU tensors by copies on the device.
// Throws c10::Error naming the operator for an argument that cannot be forwarded.
void encode_call(const OpInfo& info, torch::jit::Stack& stack, EncodedCall& call);

// One tensor's key words, appended to `key`.
void encode_tensor_metadata(const at::Tensor& tensor, std::vector<uint64_t>& key);

}  // namespace ergo::rank
