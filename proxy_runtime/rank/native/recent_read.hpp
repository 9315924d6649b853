// The last small storage that was read from the device.
#pragma once

#include <c10/core/StorageImpl.h>

#include <cstdint>

namespace ergo::rank {

// Copies `bytes` bytes at `offset` of a device storage to `destination`, after everything that was sent before.
// A small storage is fetched as a whole and kept until anything else is sent: nothing can have changed it, so the
// elements that a loop in Python reads one by one (and the loss that is printed twice) cost one round trip together.
void read_element(const c10::StorageImpl& storage, uint64_t offset, void* destination, uint64_t bytes);

}  // namespace ergo::rank
