#include "storage.hpp"

#include <c10/util/Exception.h>

namespace ergo::device {

void StorageTable::reference(PhysicalStorage& physical, int change) {
  if (change > 0 && std::ranges::all_of(physical.references, [](uint32_t of_rank) { return of_rank == 0; }))
    physical.counted = physical.storage.nbytes();
  if (physical.references.size() <= slot_) physical.references.resize(slot_ + 1, 0);
  physical.references[slot_] += static_cast<uint32_t>(change);
  bytes_ += change > 0 ? physical.counted : -physical.counted;
  peak_ = std::max(peak_, bytes_);
}

void StorageTable::bind(uint64_t handle, PhysicalPtr physical) {
  auto [it, inserted] = handles_.emplace(handle, std::move(physical));
  if (!inserted) throw ProtocolError("storage handle " + std::to_string(handle) + " is created a second time");
  reference(*it->second, +1);
}

void StorageTable::rebind(uint64_t handle, PhysicalPtr physical) {
  auto& named = const_cast<PhysicalPtr&>(find(handle));
  reference(*named, -1);
  reference(*physical, +1);
  named = std::move(physical);
}

void StorageTable::release(uint64_t handle) {
  auto it = handles_.find(handle);
  if (it == handles_.end()) return;
  reference(*it->second, -1);
  handles_.erase(it);
}

void StorageTable::clear() {
  for (auto& [handle, physical] : handles_) reference(*physical, -1);
  handles_.clear();
}

const PhysicalPtr& StorageTable::find(uint64_t handle) const {
  auto it = handles_.find(handle);
  TORCH_CHECK(it != handles_.end(), "ergosphere: device storage ", handle,
              " does not exist; it is the result of an operation that failed before");
  return it->second;
}

uint64_t StorageTable::logical_bytes() const {
  uint64_t bytes = 0;
  for (const auto& [handle, physical] : handles_) bytes += physical->storage.nbytes();
  return bytes;
}

}  // namespace ergo::device
