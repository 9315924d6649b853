// Copy-on-write between the ranks of a device.
//
// The one rule: a storage may be written in place where the writers' handles are all the references there are. Else it
// is copied, and only it. A write that reads nothing of the range it fills copies nothing at first: the copy remembers
// which ranges are still its source's.
#pragma once

#include "../backend.hpp"
#include "ledger.hpp"

namespace ergo::device::splice {

class Sharing {
 public:
  Sharing(DeviceBackend& backend, Ledger& ledger, Counters& counters)
      : backend_(backend), ledger_(ledger), counters_(counters) {}

  // A storage for writers that hold `of_writers` references on `from`: itself, or one of their own with the same
  // contents but for `overwritten`, which they will write and not read. `copied`: bytes that were.
  PhysicalPtr own(const PhysicalPtr& from, uint32_t of_writers, Range overwritten, uint64_t& copied);
  // Gives a lazy copy the bytes that it lacks, and a hollow storage bytes of any value.
  void materialise(PhysicalStorage& storage);
  // The range has been written.
  void fill(PhysicalStorage& storage, Range range);
  // One that takes no memory before it is used.
  PhysicalPtr hollow(uint64_t bytes);
  PhysicalPtr fresh(uint64_t bytes);
  // Its bytes are on the host until somebody uses it.
  void set_aside(PhysicalStorage& storage);

 private:
  void give_bytes(PhysicalStorage& storage);
  void copy(const c10::Storage& from, const c10::Storage& to, Range range);
  void release_source(Entry& entry);
  DeviceBackend& backend_;
  Ledger& ledger_;
  Counters& counters_;
};

}  // namespace ergo::device::splice
