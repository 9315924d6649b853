// Which operators the device answers: every operator with a kernel for CPU or CUDA, and late comers.
#pragma once

#include <string>
#include <unordered_set>
#include <vector>

namespace ergo::rank {

enum class DeviceKind { Cpu, Cuda };

// Registers the rank's own kernels, then sweeps. Called once.
void register_operators(DeviceKind kind);

// Registers the forwarding kernel for every operator that should have it and does not: a library that is
// loaded later puts its CUDA kernels over ours. `python_kernels` names operators ("ns::op.overload") whose
// CUDA kernel is a Python function: these run in the rank, on forwarded operators. Returns how many.
size_t sweep_operators(const std::unordered_set<std::string>& python_kernels);

// Operators of torch itself that a library has given a CUDA kernel of its own, found and forwarded by a sweep.
const std::vector<std::string>& overridden_operators();

// Calls `on_new_operators` from within the dispatcher (so it must only take note) whenever a library
// defines an operator after this call.
void watch_registrations(void (*on_new_operators)());

// Forwards what operators do with the contents of sparse and nested tensors.
void register_composed_layouts();

// Raising kernels for quantized tensors, which the device proxy does not hold.
void register_quantized_layout();

}  // namespace ergo::rank
