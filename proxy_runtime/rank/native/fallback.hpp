// The boxed kernel that forwards any operator to the device proxy.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "encoder.hpp"

namespace ergo::rank {

// Replaces the operator's arguments on the stack by its results. A call with a known key costs one
// asynchronous message; an unknown one is executed while the rank waits, and defines the key.
void forward_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Forwards a call with one result, a tensor, and returns that. The arguments are on the stack, need no replacement
// (encoder.hpp) and stay there.
at::Tensor forward_plain(const c10::OperatorHandle& op, torch::jit::Stack& stack, EncodedCall& call);

// Forwards `name` (an aten operator) with the given arguments; returns the stack of results.
template <class... Arguments>
torch::jit::Stack forward_by_handle(const c10::OperatorHandle& op, Arguments&&... arguments) {
  torch::jit::Stack stack;
  stack.reserve(sizeof...(arguments));
  (stack.emplace_back(std::forward<Arguments>(arguments)), ...);
  forward_operator(op, &stack);
  return stack;
}

}  // namespace ergo::rank
