// Logical storages (what a rank's handle names) and physical storages (the bytes).
//
// They are apart from the start, because splicing lets handles of several ranks name the same bytes.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <cstdint>

#include "failure.hpp"

namespace ergo::device {

// 128-bit name of a value; equal numbers are equal bits. Zero: not numbered (full width, no splicing).
struct ValueNumber {
  uint64_t high = 0, low = 0;
  bool operator==(const ValueNumber&) const = default;
};

struct PhysicalStorage;

namespace splice {
struct Entry;
void leave(PhysicalStorage& storage);
}  // namespace splice

struct PhysicalStorage : c10::intrusive_ptr_target {
  explicit PhysicalStorage(c10::Storage bytes) : storage(std::move(bytes)) {}
  ~PhysicalStorage() override {
    if (entry) splice::leave(*this);
  }
  c10::Storage storage;
  uint32_t pending = 0;  // collectives that have been issued and will still write it
  // Where several ranks share a device (splice/): looked at with every call, so side by side.
  uint32_t place = 0;  // the first place in the last call that names it,
  uint64_t call = 0;   // and which call that was
  ValueNumber value;
  splice::Entry* entry = nullptr;  // splice/ledger.hpp
  // References per rank, indexed by the rank's slot in its proxy. Exclusive means: one entry, and one in it.
  c10::SmallVector<uint32_t, 8> references;
  uint64_t counted = 0;  // bytes: its size when it was first named, as tables count it
};
using PhysicalPtr = c10::intrusive_ptr<PhysicalStorage>;

// The handles of one rank. Handles are chosen by the rank and never used twice.
class StorageTable {
 public:
  explicit StorageTable(uint32_t slot) : slot_(slot) {}
  StorageTable(const StorageTable&) = delete;
  StorageTable& operator=(const StorageTable&) = delete;
  ~StorageTable() { clear(); }

  // Binds a new handle. Throws ProtocolError if the handle is in use.
  void bind(uint64_t handle, PhysicalPtr physical);
  // Replaces what a handle names. Throws like find().
  void rebind(uint64_t handle, PhysicalPtr physical);
  // Forgets a handle; one that never came to be (its operation failed) is ignored.
  void release(uint64_t handle);
  void clear();
  bool contains(uint64_t handle) const { return handles_.find(handle) != handles_.end(); }
  // Throws c10::Error (an error of the operation, not of the protocol): the handle may be the result of
  // an operation that failed asynchronously.
  const PhysicalPtr& find(uint64_t handle) const;
  bool is_pending(uint64_t handle) const {
    auto it = handles_.find(handle);
    return it != handles_.end() && it->second->pending != 0;
  }

  size_t size() const { return handles_.size(); }
  uint64_t logical_bytes() const;
  // The most that its handles have named at once, or what was remembered of an earlier process's. Bytes.
  uint64_t peak_bytes() const { return peak_; }
  void remember_peak(uint64_t bytes) { peak_ = std::max(peak_, bytes); }
  auto begin() const { return handles_.begin(); }
  auto end() const { return handles_.end(); }

 private:
  void reference(PhysicalStorage& physical, int change);
  uint32_t slot_;
  uint64_t bytes_ = 0, peak_ = 0;
  ska::flat_hash_map<uint64_t, PhysicalPtr> handles_;
};

}  // namespace ergo::device
