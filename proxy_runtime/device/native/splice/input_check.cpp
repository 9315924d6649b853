#include "input_check.hpp"

#include <cstring>

namespace ergo::device::splice {

bool equal_bytes(DeviceBackend& backend, const c10::Storage& one, const c10::Storage& other) {
  const size_t n = one.nbytes();
  if (n == 0) return true;
  void *a = backend.host_view(one), *b = backend.host_view(other);
  if (a && b) return std::memcmp(a, b, n) == 0;
  std::vector<char> x(n), y(n);
  backend.read(one, 0, x.data(), n);
  backend.read(other, 0, y.data(), n);
  return x == y;
}

InputCheck::InputCheck(DeviceBackend& backend, const HeldCall& call, const StorageTable& storages) : backend_(backend) {
  for (uint32_t place = 0; place < call.handles.size(); place++) {
    if (call.facts->is_written[place] || !call.first_of(place)) continue;
    const PhysicalPtr& storage = storages.find(call.handles[place]);
    const size_t bytes = storage->storage.nbytes();
    kept_.push_back({place, backend_.allocate(bytes)});
    backend_.copy(storage->storage, kept_.back().before, bytes);
  }
}

std::vector<InputCheck::Change> InputCheck::changes(const HeldCall& call, const StorageTable& storages) const {
  std::vector<Change> found;
  for (const Change& kept : kept_) {
    const PhysicalPtr& storage = storages.find(call.handles[kept.place]);
    if (storage->storage.nbytes() == kept.before.nbytes() && !equal_bytes(backend_, storage->storage, kept.before))
      found.push_back(kept);
  }
  return found;
}

}  // namespace ergo::device::splice
