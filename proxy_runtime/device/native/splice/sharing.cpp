#include "sharing.hpp"

#include <c10/core/Allocator.h>

#include "../buffer.hpp"

namespace ergo::device::splice {

PhysicalPtr Sharing::fresh(uint64_t bytes) {
  PhysicalPtr storage = hollow(bytes);
  give_bytes(*storage);
  return storage;
}

PhysicalPtr Sharing::hollow(uint64_t bytes) {
  c10::Storage nothing(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                             c10::DataPtr(nullptr, backend_.device()),
                                                             c10::GetAllocator(backend_.device().type()), true));
  auto storage = c10::make_intrusive<PhysicalStorage>(std::move(nothing));
  storage->entry = new Entry(ledger_);
  storage->entry->hollow = true;
  return storage;
}

PhysicalPtr Sharing::own(const PhysicalPtr& from, uint32_t of_writers, Range overwritten, uint64_t& copied) {
  give_bytes(*from);
  if (references(*from) == of_writers) {
    ledger_.forget(*from);
    return from;
  }
  const uint64_t bytes = from->storage.nbytes();
  auto storage = fresh(bytes);
  storage->value = from->value;
  if (overwritten.begin == 0 && overwritten.end == bytes) return storage;
  if (!overwritten.empty()) {
    Entry& source = ledger_.entry(*from);
    Entry& entry = *storage->entry;
    // Of a copy that lacks bytes itself: so does this one, and both read them from the same place.
    if (source.source) materialise(*from);
    entry.source = from;
    source.readers++;
    entry.holes = {{0, bytes}};
    return storage;
  }
  materialise(*from);
  copy(from->storage, storage->storage, {0, bytes});
  copied = bytes;
  return storage;
}

void Sharing::copy(const c10::Storage& from, const c10::Storage& to, Range range) {
  backend_.copy(from, to, range.end - range.begin, range.begin);
}

void Sharing::release_source(Entry& entry) {
  entry.source->entry->readers--;
  entry.source.reset();
  entry.holes.clear();
}

void Sharing::give_bytes(PhysicalStorage& storage) {
  if (!storage.entry || !storage.entry->hollow) return;
  c10::StorageImpl* impl = storage.storage.unsafeGetStorageImpl();
  // So many that a collective can take them as its packed input.
  impl->set_data_ptr_noswap(c10::GetAllocator(backend_.device().type())->allocate(align_up(impl->nbytes())));
  if (const auto& bytes = storage.entry->on_host) backend_.write(storage.storage, 0, bytes->data(), bytes->size());
  storage.entry->on_host.reset();
  storage.entry->hollow = false;
  ledger_.recharge(storage);
  storage.entry->padded = true;
}

void Sharing::set_aside(PhysicalStorage& storage) {
  Entry& entry = ledger_.entry(storage);
  auto bytes = Buffer::allocate(storage.storage.nbytes());
  backend_.read(storage.storage, 0, bytes->data(), bytes->size());
  storage.storage.unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(nullptr, backend_.device()));
  counters_.set_aside_bytes += bytes->size();
  entry.on_host = std::move(bytes);
  entry.hollow = true;
  entry.left++;
  ledger_.recharge(storage);
}

void Sharing::materialise(PhysicalStorage& storage) {
  if (!storage.entry) return;
  give_bytes(storage);
  Entry& entry = *storage.entry;
  if (!entry.source) return;
  uint64_t bytes = 0;
  for (const Range& hole : entry.holes) {
    copy(entry.source->storage, storage.storage, hole);
    bytes += hole.end - hole.begin;
  }
  counters_.copies++;
  counters_.copied_bytes += bytes;
  release_source(entry);
}

void Sharing::fill(PhysicalStorage& storage, Range range) {
  Entry& entry = *storage.entry;
  if (!entry.source) return;
  std::vector<Range> left;
  for (const Range& hole : entry.holes) {
    const Range before{hole.begin, std::min(hole.end, range.begin)}, after{std::max(hole.begin, range.end), hole.end};
    if (!before.empty()) left.push_back(before);
    if (!after.empty()) left.push_back(after);
  }
  entry.holes = std::move(left);
  if (entry.holes.empty()) release_source(entry);
}

}  // namespace ergo::device::splice
