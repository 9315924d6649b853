// Which physical storages exist on a device of several ranks, what they hold by value number, and how many bytes.
#pragma once

#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <array>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "../buffer.hpp"
#include "value_number.hpp"

namespace ergo::device::splice {

// Ranks of one device, by their slots.
using Slots = uint64_t;
inline constexpr uint32_t kMostRanks = 64;
inline Slots slot_bit(uint32_t slot) { return Slots{1} << slot; }

// What is counted per proxy. Bytes and counts of its whole life; physical and logical bytes are those of now.
struct Counters {
  uint64_t executed = 0;           // operators that ran
  uint64_t shared = 0;             // calls that needed no run: another rank's result was the same
  uint64_t copies = 0;             // storages copied because a rank wrote to what others share
  uint64_t copied_bytes = 0;       // in those
  uint64_t merged_bytes = 0;       // of storages given up for an equal one
  uint64_t set_aside_bytes = 0;    // moved to the host while their rank waited
  uint64_t timeouts = 0;           // waits for another rank that a time limit ended
  uint64_t parks = 0;              // waits before a write, for ranks that were expected to write the same
  uint64_t lockstep_runs = 0;      // times that all ranks of a group went on together
  uint64_t lockstep_breaks = 0;    // times that they then did different things
  uint64_t verified = 0;           // results that were computed twice and compared
  uint64_t mismatches = 0;         // of those, different ones
  std::set<std::string> unshared;  // operators that are not shared any more because of those
  uint64_t physical_bytes = 0;
  uint64_t peak_bytes = 0;
  uint64_t step_peak_bytes = 0;  // the most between the last two times that all ranks of a group went on together
  uint64_t logical_bytes = 0;
};

struct Range {
  uint64_t begin = 0, end = 0;
  bool empty() const { return begin >= end; }
};

class Ledger;

// Hangs on every physical storage of such a device.
struct Entry {
  explicit Entry(Ledger& l) : ledger(l) {}
  Ledger& ledger;
  bool published = false;           // found by its number
  bool padded = false;              // its memory reaches to the next multiple of 64 bytes
  bool hollow = false;              // has no bytes: nothing has been written to it yet, or a pending collective will be
  uint8_t left = 0;                 // how often it has been on the host
  std::shared_ptr<Buffer> on_host;  // hollow: its bytes, until somebody uses it
  uint32_t readers = 0;             // lazy copies that still lack bytes of it
  uint64_t charged = 0;             // bytes
  PhysicalPtr source;               // of a lazy copy: where `holes` are still to be read
  std::vector<Range> holes;         // ascending
};

class Ledger {
 public:
  explicit Ledger(Counters& counters) : counters_(counters) {}
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  Entry& entry(PhysicalStorage& storage);
  // Its size may have changed.
  void recharge(PhysicalStorage& storage);
  // Bytes that are held without a storage.
  void hold(uint64_t bytes);
  void let_go(uint64_t bytes);
  // A new interval of Counters::step_peak_bytes.
  void met();
  // Gives it a number by which it can be found from now on.
  void publish(PhysicalStorage& storage, const ValueNumber& value);
  // It is going to be written: its number is nobody's.
  void forget(PhysicalStorage& storage);
  static constexpr uint64_t kAnySize = ~uint64_t{0};
  // A storage of this value and size that none of these ranks has a handle on, else null.
  PhysicalStorage* find(const ValueNumber& value, Slots ranks, uint64_t bytes) const;
  void gone(PhysicalStorage& storage);

 private:
  // Most numbers that are looked for are not known: what says so lies close together.
  static size_t alike(const ValueNumber& value) { return value.low >> 48 & (kAlike - 1); }
  void charge(Entry& entry, uint64_t bytes);
  uint64_t peak_since_met_ = 0;
  Counters& counters_;
  ska::flat_hash_map<ValueNumber, c10::SmallVector<PhysicalStorage*, 2>, NumberHash> known_;
  static constexpr size_t kAlike = 1 << 14;
  std::array<uint8_t, kAlike> known_alike_{};  // storages with such a number; 255: so many or more, for ever
};

// Ranks that have a handle on it.
Slots holders(const PhysicalStorage& storage);

// Handles of all ranks on it, and lazy copies that read it.
uint32_t references(const PhysicalStorage& storage);

}  // namespace ergo::device::splice
