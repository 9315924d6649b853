#include "storage.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "channel.hpp"
#include "memory.hpp"
#include "tree.hpp"

namespace ergo::rank {
namespace {

// Addresses are handed out once and never reused; bits 56 and up make them non-canonical, so that any
// dereference faults, while pointer arithmetic and comparisons behave.
constexpr uint64_t kFirstAddress = uint64_t{1} << 56;
// An allocation of so many bytes is waited for: where it fails, the script hears of it there, and can try fewer.
constexpr uint64_t kAwaitedBytes = uint64_t{1} << 30;

void delete_storage(void* opaque) {
  auto* holding = static_cast<Holding*>(opaque);
  if (holding == nullptr) return;
  count_release(holding->bytes);
  Channel::instance().release(holding);
}

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    Channel& channel = Channel::instance();
    channel.require();
    require_memory(in_blocks(bytes));
    uint64_t handle = 0;
    {
      Channel::Transaction t(channel, 2);
      handle = t.next_handle();
      t.take_handles(1);
      uint64_t* body = t.begin(Message::Alloc, 2);
      body[0] = handle;
      body[1] = bytes;
      t.commit();
    }
    if (bytes >= kAwaitedBytes) channel.synchronize();
    return wrap_handle(handle, bytes);
  }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "ergosphere: device memory cannot be copied by address");
  }
};

Holding& holding_of(const c10::StorageImpl& storage) {
  const c10::DataPtr& pointer = storage.data_ptr();
  TORCH_CHECK(pointer.get_deleter() == &delete_storage && pointer.get_context() != nullptr,
              "ergosphere: a CUDA tensor whose memory was not allocated through torch's dispatcher cannot be used on "
              "the device proxy (its address comes from native code in this process)");
  return *static_cast<Holding*>(pointer.get_context());
}

}  // namespace

void require_existing(const c10::Device& wanted) {
  if (wanted.type() != kDeviceType || wanted.index() <= 0) return;
  // torch's own guard asks the CUDA runtime, and raises what it raises for an ordinal that is not there.
  const c10::impl::VirtualGuardImpl guard(kDeviceType);
  const c10::Device before = guard.getDevice();
  guard.setDevice(wanted);
  guard.setDevice(before);
}

c10::Allocator* device_allocator() {
  static DeviceAllocator* allocator = new DeviceAllocator;
  return allocator;
}

c10::DataPtr wrap_handle(uint64_t handle, uint64_t bytes) {
  const uint64_t before = count_allocation(bytes);
  void* const address = bytes != 0 ? reinterpret_cast<void*>(kFirstAddress + before) : nullptr;
  return {address, new Holding{handle, bytes}, &delete_storage, own_device()};
}

c10::Storage make_storage(uint64_t handle, uint64_t bytes) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                            wrap_handle(handle, bytes), device_allocator(),
                                                            /*resizable=*/true));
}

uint64_t handle_of(const c10::StorageImpl& storage) { return holding_of(storage).handle; }

uint64_t handle_of(const at::Tensor& tensor) {
  return handle_of(*tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}

void adopt_size(c10::StorageImpl& storage, uint64_t bytes) {
  Holding& holding = holding_of(storage);
  const uint64_t handle = holding.handle;
  auto old = storage.set_data_ptr(wrap_handle(handle, bytes));
  // The handle lives on in the new pointer: only the bookkeeping of the old one goes.
  count_release(holding.bytes);
  delete static_cast<Holding*>(old.release_context());
  storage.set_nbytes(bytes);
}

void resize_storage(c10::StorageImpl& storage, uint64_t bytes) {
  const uint64_t handle = handle_of(storage);
  Channel& channel = Channel::instance();
  channel.require();
  if (bytes > storage.nbytes()) require_memory(in_blocks(bytes) - in_blocks(storage.nbytes()));
  channel.send(Message::Resize, 2, [&](uint64_t* body) {
    body[0] = handle;
    body[1] = bytes;
  });
  adopt_size(storage, bytes);
}

}  // namespace ergo::rank
