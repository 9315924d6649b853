#include "backend.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <malloc.h>
#include <unistd.h>

#include <climits>
#include <cstring>

#include "failure.hpp"
#include "reuse.hpp"

namespace ergo::device {
namespace {

c10::Storage resizable_storage(size_t bytes, c10::Allocator* allocator) {
  return c10::Storage(
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, allocator, /*resizable=*/true));
}

class CpuBackend final : public DeviceBackend {
 public:
  c10::Device device() const override { return c10::Device(c10::kCPU); }
  c10::Storage allocate(size_t bytes) override { return resizable_storage(bytes, c10::GetAllocator(c10::kCPU)); }
  void read(const c10::Storage& from, size_t offset, void* to, size_t bytes) override {
    if (bytes) std::memcpy(to, static_cast<const char*>(from.data()) + offset, bytes);
  }
  void write(const c10::Storage& to, size_t offset, const void* from, size_t bytes) override {
    if (bytes) std::memcpy(static_cast<char*>(to.mutable_data()) + offset, from, bytes);
  }
  void copy(const c10::Storage& from, const c10::Storage& to, size_t bytes, size_t offset) override {
    if (bytes)
      std::memcpy(static_cast<char*>(to.mutable_data()) + offset, static_cast<const char*>(from.data()) + offset,
                  bytes);
  }
  void* host_view(const c10::Storage& storage) override { return storage.mutable_data(); }
  void synchronize() override {}
  DeviceInfo info() override {
    const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    return {pages > 0 ? static_cast<uint64_t>(pages) * static_cast<uint64_t>(page) : 0, 0, 0, 0, ""};
  }
  at::Generator default_generator() override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator make_generator() override { return at::detail::createCPUGenerator(); }
};

// Any other device that this torch build knows. Nothing in here names CUDA: one in-order stream, the
// current one, carries operators and copies alike.
class AtenBackend final : public DeviceBackend {
 public:
  explicit AtenBackend(c10::Device device) : device_(device) {
    at::zeros({1}, at::TensorOptions().device(device_));  // creates the device's context, or fails now
    allocator_ = c10::GetAllocator(device_.type());
  }
  c10::Device device() const override { return device_; }
  c10::Storage allocate(size_t bytes) override { return resizable_storage(bytes, allocator_); }
  void read(const c10::Storage& from, size_t offset, void* to, size_t bytes) override {
    if (bytes) host(to, bytes).copy_(bytes_of(from, offset, bytes));
  }
  void write(const c10::Storage& to, size_t offset, const void* from, size_t bytes) override {
    if (bytes) bytes_of(to, offset, bytes).copy_(host(const_cast<void*>(from), bytes));
  }
  void copy(const c10::Storage& from, const c10::Storage& to, size_t bytes, size_t offset) override {
    if (bytes) bytes_of(to, offset, bytes).copy_(bytes_of(from, offset, bytes));
  }
  void synchronize() override { c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index()); }
  DeviceInfo info() override {
    DeviceInfo info;
    if (auto* allocator = dynamic_cast<c10::DeviceAllocator*>(allocator_))
      info.memory_bytes = allocator->getMemoryInfo(device_.index()).second;
    return info;
  }
  at::Generator default_generator() override { return at::globalContext().defaultGenerator(device_); }
  at::Generator make_generator() override { return at::globalContext().defaultGenerator(device_).clone(); }

 private:
  static at::Tensor host(void* data, size_t bytes) {
    return at::from_blob(data, {static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte));
  }
  at::Tensor bytes_of(const c10::Storage& storage, size_t offset, size_t bytes) {
    at::Tensor t = at::empty({0}, at::TensorOptions().dtype(at::kByte).device(device_));
    t.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
    const int64_t size = static_cast<int64_t>(bytes), stride = 1;
    t.unsafeGetTensorImpl()->set_sizes_and_strides(at::IntArrayRef(size), at::IntArrayRef(stride),
                                                   static_cast<int64_t>(offset));
    return t;
  }
  c10::Device device_;
  c10::Allocator* allocator_ = nullptr;
};

}  // namespace

std::unique_ptr<DeviceBackend> make_backend(const std::string& kind) {
  if (kind == "cpu") return std::make_unique<CpuBackend>();
  try {
    c10::Device device(kind);
    if (!device.has_index()) device.set_index(0);
    return std::make_unique<AtenBackend>(device);
  } catch (const std::exception& e) {
    const auto* torch_error = dynamic_cast<const c10::Error*>(&e);
    throw ControlError("device-proxy.device-kind",
                       "the device kind '" + kind + "' cannot be used here: " +
                           (torch_error ? torch_error->what_without_backtrace() : e.what()));
  }
}

void keep_freed_memory() {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, INT_MAX);
  mallopt(M_TOP_PAD, 64 << 20);
  reuse_freed_memory();
}

}  // namespace ergo::device
