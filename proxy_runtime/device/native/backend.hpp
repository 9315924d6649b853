// The one seam between the proxy and a kind of device.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace ergo::device {

struct DeviceInfo {
  uint64_t memory_bytes = 0;
  uint32_t major = 0, minor = 0, processors = 0;  // compute capability and multiprocessors; 0: it has none
  std::string name;
};

// Where storages live and how bytes enter and leave them. Operators need nothing of this: they are
// dispatched to the device of their storages.
class DeviceBackend {
 public:
  virtual ~DeviceBackend() = default;
  virtual c10::Device device() const = 0;
  // A resizable storage of `bytes` with undefined contents. Throws c10::OutOfMemoryError or std::bad_alloc.
  virtual c10::Storage allocate(size_t bytes) = 0;
  // Callers have checked that [offset, offset + bytes) lies inside the storage.
  virtual void read(const c10::Storage& from, size_t offset, void* to, size_t bytes) = 0;
  virtual void write(const c10::Storage& to, size_t offset, const void* from, size_t bytes) = 0;
  // The bytes themselves where the host can reach them, else null: then files go through read and write.
  virtual void* host_view(const c10::Storage&) { return nullptr; }
  // Device to device, both from the same offset.
  virtual void copy(const c10::Storage& from, const c10::Storage& to, size_t bytes, size_t offset = 0) = 0;
  // Returns when everything that was launched has finished; throws what it failed with.
  virtual void synchronize() = 0;
  // Nanoseconds of a clock that only grows, when all that was launched before has finished.
  virtual int64_t now() {
    synchronize();
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  }
  // What the device is, as far as it says so.
  virtual DeviceInfo info() = 0;
  virtual at::Generator default_generator() = 0;
  virtual at::Generator make_generator() = 0;
};

// `kind` is "cpu", or any device type of the torch build ("cuda"): everything but "cpu" goes through
// ATen's own copies and allocator. Throws ControlError("device-proxy.device-kind").
std::unique_ptr<DeviceBackend> make_backend(const std::string& kind);

// Keeps glibc from giving the memory of every large result back to the kernel: page faults cost a
// CNN step 60 % otherwise (facts/process_checkpoint.md B). The two thresholds belong together, since
// setting one turns glibc's dynamic threshold off. Call once, before the first allocation.
void keep_freed_memory();

}  // namespace ergo::device
