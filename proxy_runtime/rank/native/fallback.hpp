// The boxed kernel that forwards any operator to the device proxy.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>

#include "encoder.hpp"

namespace ergo::rank {

// Replaces the operator's arguments on the stack by its results. A call with a known key costs one
// asynchronous message; an unknown one is executed while the rank waits, and defines the key.
void forward_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Of a call whose key is known: sends it and makes its only result, a tensor; the arguments stay on the stack. Nothing
// where it cannot be done so, and nothing has happened then.
std::optional<at::Tensor> forward_known(const c10::OperatorHandle& op, torch::jit::Stack& stack, EncodedCall& call);

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
