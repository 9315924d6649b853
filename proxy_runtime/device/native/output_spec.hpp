// How an operator's results relate to its arguments, and how the rank is told.
#pragma once

#include <ATen/core/stack.h>

#include "template.hpp"

namespace ergo::device {

struct Outputs {
  std::vector<ExpectedOutput> tensors;     // in the order of the returns
  std::vector<c10::Storage> new_storages;  // by reference number
};

// The tensor as it is now: what the operator does to its metadata does not show in it.
at::Tensor snapshot(const at::Tensor& tensor);

// Classifies the results and writes the OutputSpec of wire.hpp. `before` are the arguments as they were,
// `after` the same tensors now. Throws c10::NotImplementedError for results that cannot be described.
Outputs describe_outputs(const Template& t, const torch::jit::Stack& returns, const FlatTensors& before,
                         const FlatTensors& after, c10::Device device, WordWriter& spec);

// The new storages of a later execution. Throws c10::Error if a result is not what was described.
std::vector<c10::Storage> match_outputs(const Template& t, const torch::jit::Stack& returns,
                                        const FlatTensors& arguments);

}  // namespace ergo::device
