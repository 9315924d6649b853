// Finds what an operator wrote though its schema does not say so: inputs are compared with what they were.
#pragma once

#include "../backend.hpp"
#include "member.hpp"

namespace ergo::device::splice {

class InputCheck {
 public:
  // Keeps the bytes of every input that the call is not known to write.
  InputCheck(DeviceBackend& backend, const HeldCall& call, const StorageTable& storages);

  struct Change {
    uint32_t place;
    c10::Storage before;
  };
  std::vector<Change> changes(const HeldCall& call, const StorageTable& storages) const;

 private:
  DeviceBackend& backend_;
  std::vector<Change> kept_;
};

// Of storages of one size.
bool equal_bytes(DeviceBackend& backend, const c10::Storage& one, const c10::Storage& other);

}  // namespace ergo::device::splice
