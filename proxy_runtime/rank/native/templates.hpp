// The calls that the device knows: (operator, key) -> template id and output specification.
#pragma once

#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "op_info.hpp"
#include "output_spec.hpp"

namespace ergo::rank {

struct Template {
  uint64_t id = 0;
  const OpInfo* op = nullptr;
  std::vector<uint64_t> key;
  OutputSpec outputs;
  // It returns a composed tensor, whose components depend on contents: every such call is a one-off.
  bool one_off = false;
};

// Guarded by the channel lock: ids are consecutive in the order of Define messages.
class TemplateTable {
 public:
  // A job with ever new shapes must not grow without bound: beyond this many, calls are one-off.
  static constexpr size_t kCapacity = 1 << 16;

  static TemplateTable& instance();
  static uint64_t hash(const OpInfo& op, const std::vector<uint64_t>& key);

  const Template* find(uint64_t hash, const OpInfo& op, const std::vector<uint64_t>& key) const;
  bool full() const { return all_.size() >= kCapacity; }
  uint64_t next_id() const { return all_.size(); }
  // Takes a template whose id is next_id().
  const Template* insert(uint64_t hash, std::unique_ptr<Template> made);
  size_t size() const { return all_.size(); }

 private:
  const Template* search(uint64_t hash, const OpInfo& op, const std::vector<uint64_t>& key) const;

  // Templates that were found, by the low bits of their hash: a step of training makes the same calls again.
  static constexpr size_t kRecent = 1024;
  mutable std::array<const Template*, kRecent> recent_{};
  ska::flat_hash_map<uint64_t, c10::SmallVector<const Template*, 1>> by_hash_;
  std::vector<std::unique_ptr<Template>> all_;
};

}  // namespace ergo::rank
