// Device storages as the rank sees them: a handle, a size and an address that nobody can dereference.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>

namespace ergo::rank {

inline constexpr auto kDeviceType = c10::DeviceType::CUDA;
inline constexpr auto kDeviceKey = c10::DispatchKey::CUDA;

// Throws what CUDA throws for a device that is not there. Before anything is allocated or sent.
void require_existing(const c10::Device& wanted);
inline void require_existing(const std::optional<c10::Device>& wanted) {
  if (wanted.has_value()) require_existing(*wanted);
}

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
