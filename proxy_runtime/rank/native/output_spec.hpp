// What a call returns, as the device told it once for a key (channel/wire.hpp, "Response of Define").
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "composed.hpp"
#include "encoder.hpp"
#include "wire.hpp"

namespace ergo::rank {

struct OutputTensor {
  OutKind kind = OutKind::Undefined;
  uint32_t reference = 0;  // an argument's tensor, or a new storage
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  uint8_t flags = 0;  // TensorFlag
  int64_t offset = 0;
  std::vector<int64_t> sizes, strides;
  // Composed: what but its components' tensors, and these.
  std::optional<Composed> composed;
  std::vector<OutputTensor> components;
};

struct OutputValue {
  enum class Kind : uint8_t { Tensor, TensorList, Constant };
  Kind kind = Kind::Constant;
  std::vector<OutputTensor> tensors;
  c10::IValue constant;
};

// An argument whose storage or geometry the call changes (out= resized, in-place restride).
struct ArgumentUpdate {
  uint32_t argument = 0;
  uint64_t storage_bytes = 0;
  OutputTensor geometry;
};

// What torch warned of on the device: a Python warning of the call, as natively.
struct CallWarning {
  bool deprecation = false;
  uint32_t line = 0;
  const char* file = nullptr;  // torch's, for ever
  std::string text;
};

struct OutputSpec {
  std::vector<uint64_t> new_bytes;  // sizes of the storages that the call makes
  uint64_t new_memory = 0;          // what they count as together (memory.hpp)
  std::vector<OutputValue> returns;
  std::vector<ArgumentUpdate> updates;
  std::vector<CallWarning> warnings;

  // Of what later calls of the template warn, too: the others said so once, or what they say depends on contents.
  void keep_repeated_warnings();
  void warn() const;
};

// Throws when the response is malformed or names an argument that the call does not have.
OutputSpec parse_output_spec(const char* data, size_t length, size_t n_arguments);

// Replaces the last `n_arguments` values of the stack by the call's results. New storages take the
// handles from `base_handle`.
void push_outputs(const OutputSpec& spec, const EncodedCall& call, uint64_t base_handle, torch::jit::Stack& stack,
                  size_t n_arguments);

// The same for a call with one result, a tensor, and arguments that the caller keeps.
at::Tensor only_output(const OutputSpec& spec, const EncodedCall& call, uint64_t base_handle);

}  // namespace ergo::rank
