// Device storages as the rank sees them: a handle, a size and an address that nobody can dereference.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>

namespace ergo::rank {

inline constexpr auto kDeviceType = c10::DeviceType::CUDA;
inline constexpr auto kDeviceKey = c10::DispatchKey::CUDA;
inline c10::Device device() { return {kDeviceType, 0}; }

// Logical bytes of this rank on its device; the same at every placement. Sizes count in blocks of 512
// bytes, as torch's CUDA allocator counts them.
struct MemoryStats {
  uint64_t allocated = 0, peak = 0, allocations = 0, releases = 0;
};
MemoryStats memory_stats();
void reset_peak_memory();

// The allocator registered for the device: allocates by a message, owns nothing in this process.
c10::Allocator* device_allocator();

// A data pointer for a handle that the proxy already knows (or will, when it reaches the message).
c10::DataPtr wrap_handle(uint64_t handle, uint64_t bytes);
c10::Storage make_storage(uint64_t handle, uint64_t bytes);

// The handle behind a storage. Throws when the storage is not the proxy's: memory that native code
// allocated for itself, whose contents no proxy could know.
uint64_t handle_of(const c10::StorageImpl& storage);
uint64_t handle_of(const at::Tensor& tensor);

// Changes the size of a storage, keeping contents up to the smaller size; the handle stays.
void resize_storage(c10::StorageImpl& storage, uint64_t bytes);
// The same, when an operation on the device already did it.
void adopt_size(c10::StorageImpl& storage, uint64_t bytes);

}  // namespace ergo::rank
