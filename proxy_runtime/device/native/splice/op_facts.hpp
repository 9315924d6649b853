// What is known of an operator with its template: what it writes, what of that it overwrites without reading, and
// whether equal calls of two ranks have equal results.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "../template.hpp"
#include "ledger.hpp"

namespace ergo::device::splice {

struct OpFacts {
  // In the first calls all inputs are compared with what they were: an operator that writes without saying so in its
  // schema (batch norm's running statistics) is found by what it does.
  static constexpr uint32_t kChecked = 2;

  std::string name;                // the operator's
  ValueNumber identity;            // operator and key, without the number that the rank gives its flags
  std::vector<uint32_t> written;   // handles by their place in the call, ascending
  std::vector<bool> is_written;    // per place
  std::vector<Range> overwritten;  // per place: bytes of the storage that are written and not read; empty: none
  bool random = false;             // uses the rank's default generator: runs for every rank
  bool shareable = false;          // equal inputs, equal bits
  bool uninitialised = false;      // results are bytes that nobody has written
  bool always_checked = false;     // not one of torch's own: its schema is not believed
  uint32_t checks = kChecked;      // calls whose inputs are still to be compared

  // Names of calls begin with operator and flags, which seldom change.
  const Mixer& named(const ValueNumber& flags) {
    if (flags != named_for_) {
      named_for_ = flags;
      name_ = Mixer(Domain::Call).number(identity).number(flags);
    }
    return name_;
  }

  // The one template that runs for all ranks whose own differs in nothing: what it needs is in the processor's cache.
  const Template& common(const Template& t);

  // Of the last definition: what another rank's definition with the same key gets without a run.
  std::vector<uint64_t> spec;
  ValueNumber spec_key;
  std::vector<ExpectedOutput> expected;
  uint32_t new_storages = 0;
  std::vector<uint64_t> new_bytes;

  void found_written(uint32_t place);

 private:
  std::optional<ValueNumber> named_for_;
  Mixer name_{Domain::Call};
  std::shared_ptr<const Template> common_;
};

class OpBook {
 public:
  // The same facts for every rank's template of the same operator and key.
  OpFacts& of(const Template& t);

 private:
  std::unordered_map<ValueNumber, std::unique_ptr<OpFacts>, NumberHash> facts_;
};

}  // namespace ergo::device::splice
