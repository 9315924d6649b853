// Templates: an operator with all that decides its kernels and results' shapes. Kept per rank under ids
// that the rank chooses; rebuilt after a load from the words they were defined with.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "value.hpp"

namespace ergo::device {

// A result as the first execution returned it; later executions must return the same.
struct ExpectedOutput {
  OutKind kind = OutKind::Undefined;
  uint32_t reference = 0;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  // Composed: those of its components. Only in one-off calls.
  std::vector<ExpectedOutput> components;
};

namespace splice {
struct OpFacts;
}

struct Template : std::enable_shared_from_this<Template> {
  explicit Template(c10::OperatorHandle handle) : op(std::move(handle)) {}
  c10::OperatorHandle op;
  mutable splice::OpFacts* facts = nullptr;  // found at the first call that may be shared
  uint64_t globals = 0;                      // wire.hpp globals_word
  std::vector<Value> arguments;
  std::vector<ExpectedOutput> expected;  // tensors in the order of the returns
  uint32_t new_storages = 0;
  std::string name;           // with overload, as sent
  std::vector<uint64_t> key;  // as sent, globals word included
};

// Throws ProtocolError for a malformed key, c10::NotImplementedError for an operator unknown here.
std::shared_ptr<Template> parse_template(std::string name, const uint64_t* key, size_t n, c10::Device device);

class TemplateTable {
 public:
  // A bound for the proxy's memory; the rank sends one-off definitions when its own table is full.
  static constexpr uint64_t kLimit = uint64_t{1} << 20;
  // Throws ProtocolError unless `id` is the next one.
  void check_next(uint64_t id) const;
  void add(std::shared_ptr<Template> t) { templates_.push_back(std::move(t)); }
  Template& at(uint64_t id) const;  // throws ProtocolError
  size_t size() const { return templates_.size(); }
  const std::vector<std::shared_ptr<Template>>& all() const { return templates_; }

 private:
  std::vector<std::shared_ptr<Template>> templates_;
};

}  // namespace ergo::device
