// One argument of an operator: parsed once from a template's key, completed per call with handles and payload.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "backend.hpp"
#include "composed.hpp"
#include "storage.hpp"
#include "wire.hpp"

namespace ergo::device {

using FlatTensors = c10::SmallVector<at::Tensor, 8>;

// A tensor as the key describes it: everything but its bytes.
struct TensorMeta {
  at::ScalarType dtype = at::kFloat;
  uint8_t flags = 0;  // TensorFlag
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;   // elements
  uint64_t bytes = 0;   // numel * item size
  uint64_t extent = 0;  // bytes of storage that it reaches into, from the storage's start
};

struct Value {
  Tag tag = Tag::None;
  ListElement element = ListElement::Other;
  c10::IValue constant;                            // all that the key decides
  TensorMeta tensor;                               // Tensor, CpuTensor
  std::vector<Value> children;                     // List; Composed: its components
  std::shared_ptr<const ergo::Composed> composed;  // all else of it
  uint64_t same_as = 0;                            // SameTensor: its number
};

// Parses one encoded value. Throws ProtocolError.
Value parse_value(WordReader& key, c10::Device device, int depth = 0);
// Header word, sizes, and strides of a Tensor-tagged key. Throws ProtocolError.
TensorMeta parse_tensor(uint64_t header, WordReader& key, bool may_have_strides);
// Throws ProtocolError unless a value of this shape may be given for an argument of this type, and
// c10::NotImplementedError where no value of this type can be sent at all.
void check_type(const c10::Type& type, const Value& value, const c10::Argument& argument);

// What a call adds to its template.
struct CallContext {
  const StorageTable& storages;
  const std::unordered_map<uint64_t, at::Generator>& generators;
  WordReader handles;
  WordReader payload;
  c10::DispatchKeySet keys;  // of a dense tensor on the device
  FlatTensors flat;          // the Tensor-tagged arguments in order, composed ones after their components
};

// Throws ProtocolError for a malformed call, c10::Error for a handle of a failed operation.
c10::IValue materialise(const Value& value, CallContext& call);
// Throws c10::Error if the storage is smaller than the tensor reaches.
at::Tensor tensor_on(const TensorMeta& meta, const c10::Storage& storage, c10::DispatchKeySet keys);

}  // namespace ergo::device
