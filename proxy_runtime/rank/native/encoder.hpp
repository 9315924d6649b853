// Writes the arguments of a call as key, payload and handles (channel/wire.hpp).
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <deque>
#include <vector>

#include "composed.hpp"
#include "op_info.hpp"
#include "wire.hpp"

namespace ergo::rank {

// A call on its way. `tensors` points into the stack the call was encoded from, in the order in which
// output specifications refer to them: all Tensor-tagged arguments, and composed ones after their components.
struct EncodedCall {
  std::vector<uint64_t> key, payload, handles;
  std::vector<const at::Tensor*> tensors;
  // Of composed arguments: `tensors` points to these too.
  std::deque<at::Tensor> components;
  uint32_t flags = 0;         // the number of its flags (flags.hpp)
  bool has_mask = false;      // a bool or byte tensor is among the arguments after the first tensor, or any on the host
  bool has_composed = false;  // results depend on contents: nothing about this call may be remembered

  void clear() {
    key.clear();
    payload.clear();
    handles.clear();
    tensors.clear();
    if (!components.empty()) components.clear();
    has_mask = false;
    has_composed = false;
  }
};

// Encodes the last `info.kinds.size()` values of the stack. Arguments that only exist in the rank are
// replaced on the stack first: ZeroTensors by zeros, large CPU tensors by copies on the device.
// Throws c10::Error naming the operator for an argument that cannot be forwarded.
void encode_call(const OpInfo& info, torch::jit::Stack& stack, EncodedCall& call);

// One tensor's key words, appended to `key`.
void encode_tensor_metadata(const at::Tensor& tensor, std::vector<uint64_t>& key);

}  // namespace ergo::rank
