#include "ledger.hpp"

#include <algorithm>
#include <limits>

namespace ergo::device {

// Declared in storage.hpp: the end of a storage that has an entry.
void splice::leave(PhysicalStorage& storage) { storage.entry->ledger.gone(storage); }

namespace splice {
namespace {

constexpr uint8_t kMany = std::numeric_limits<uint8_t>::max();

}  // namespace

void Ledger::charge(Entry& entry, uint64_t bytes) {
  let_go(entry.charged);
  hold(bytes);
  entry.charged = bytes;
}

void Ledger::hold(uint64_t bytes) {
  counters_.physical_bytes += bytes;
  counters_.peak_bytes = std::max(counters_.peak_bytes, counters_.physical_bytes);
  peak_since_met_ = std::max(peak_since_met_, counters_.physical_bytes);
}

void Ledger::met() {
  counters_.step_peak_bytes = peak_since_met_;
  peak_since_met_ = counters_.physical_bytes;
}

void Ledger::let_go(uint64_t bytes) { counters_.physical_bytes -= bytes; }

Entry& Ledger::entry(PhysicalStorage& storage) {
  if (!storage.entry) {
    storage.entry = new Entry(*this);
    charge(*storage.entry, storage.storage.nbytes());
  }
  return *storage.entry;
}

void Ledger::recharge(PhysicalStorage& storage) {
  Entry& e = entry(storage);
  const uint64_t bytes = e.hollow ? 0 : storage.storage.nbytes();
  if (bytes != e.charged) e.padded = false;
  charge(e, bytes);
}

void Ledger::publish(PhysicalStorage& storage, const ValueNumber& value) {
  forget(storage);
  storage.value = value;
  entry(storage).published = true;
  known_[value].push_back(&storage);
  if (uint8_t& n = known_alike_[alike(value)]; n < kMany) n++;
}

void Ledger::forget(PhysicalStorage& storage) {
  Entry& e = entry(storage);
  if (!e.published) return;
  e.published = false;
  auto found = known_.find(storage.value);
  auto& list = found->second;
  list.erase(std::find(list.begin(), list.end(), &storage));
  if (list.empty()) known_.erase(found);
  if (uint8_t& n = known_alike_[alike(storage.value)]; n < kMany) n--;
}

PhysicalStorage* Ledger::find(const ValueNumber& value, Slots ranks, uint64_t bytes) const {
  if (known_alike_[alike(value)] == 0) return nullptr;
  const auto found = known_.find(value);
  if (found == known_.end()) return nullptr;
  for (PhysicalStorage* storage : found->second)
    if ((bytes == kAnySize || storage->storage.nbytes() == bytes) && !(holders(*storage) & ranks)) return storage;
  return nullptr;
}

void Ledger::gone(PhysicalStorage& storage) {
  Entry& e = *storage.entry;
  forget(storage);
  charge(e, 0);
  if (e.source) e.source->entry->readers--;
  storage.entry = nullptr;
  delete &e;
}

Slots holders(const PhysicalStorage& storage) {
  Slots found = 0;
  for (uint32_t slot = 0; slot < storage.references.size(); slot++)
    if (storage.references[slot]) found |= slot_bit(slot);
  return found;
}

uint32_t references(const PhysicalStorage& storage) {
  uint32_t n = storage.entry ? storage.entry->readers : 0;
  for (uint32_t of_rank : storage.references) n += of_rank;
  return n;
}

}  // namespace splice
}  // namespace ergo::device
