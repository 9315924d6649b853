#include <ATen/Dispatch_v2.h>
#include <ATen/ExpandUtils.h>
#include <ATen/ops/_to_copy_native.h>
#include <ATen/ops/item_native.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "channel.hpp"
#include "fallback.hpp"
#include "kernels.hpp"
#include "pinned.hpp"
#include "recent_read.hpp"
#include "storage.hpp"
#include "tree.hpp"

namespace ergo::rank {
namespace {

using at::Tensor;

constexpr size_t kPullWords = 4;
// Of a transfer with pinned memory: a cut waits for one message at most.
constexpr uint64_t kPinnedChunk = uint64_t{16} << 20;
// Smaller ones cost less through the response area: one round trip.
constexpr uint64_t kLeastPinnedRead = uint64_t{256} << 10;

bool on_device(const Tensor& t) { return t.device().type() == kDeviceType; }

uint64_t byte_offset(const Tensor& t) { return static_cast<uint64_t>(t.storage_offset()) * t.itemsize(); }

// Both hold the same bytes in the same order, without gaps: one transfer does it.
bool same_bytes(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.is_non_overlapping_and_dense() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

void device_copy(const Tensor& destination, const Tensor& source, bool non_blocking) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  forward_by_handle(op, destination, source, non_blocking);
}

void host_to_device(Tensor& destination, const Tensor& source, bool non_blocking) {
  TORCH_CHECK(source.device().is_cpu(), "cannot copy to the device from ", source.device());
  // Checks that the shapes are compatible, as copy_ does.
  const Tensor expanded = source.sizes() == destination.sizes() ? source : source.expand(destination.sizes());
  if (destination.numel() == 0) return;
  if (same_bytes(destination, expanded)) {
    write_storage(handle_of(destination), byte_offset(destination), expanded.const_data_ptr(), expanded.nbytes());
    return;
  }
  const Tensor plain = expanded.resolve_conj().resolve_neg().contiguous();
  if (destination.is_contiguous() && destination.scalar_type() == plain.scalar_type() && !destination.is_conj() &&
      !destination.is_neg()) {
    write_storage(handle_of(destination), byte_offset(destination), plain.const_data_ptr(), plain.nbytes());
    return;
  }
  Tensor staged = at::empty(plain.sizes(), plain.options().device(destination.device()).pinned_memory(false));
  write_storage(handle_of(staged), 0, plain.const_data_ptr(), plain.nbytes());
  device_copy(destination, staged, non_blocking);
}

void device_to_host(Tensor& destination, const Tensor& source) {
  if (source.numel() != 0 && same_bytes(destination, source)) {
    read_storage(handle_of(source), byte_offset(source), destination.mutable_data_ptr(), destination.nbytes());
    return;
  }
  const Tensor plain = source.resolve_conj().resolve_neg().contiguous();
  Tensor staged = at::empty(plain.sizes(), plain.options().device(at::kCPU));
  if (plain.numel() != 0)
    read_storage(handle_of(plain), byte_offset(plain), staged.mutable_data_ptr(), staged.nbytes());
  destination.copy_(staged);
}

Tensor& copy_kernel(Tensor& self, const Tensor& source, bool non_blocking) {
  Channel::instance().require();
  if (self.is_same(source) || source.device().is_meta()) return self;
  if (source._is_zerotensor()) {
    (void)at::infer_size(self.sizes(), source.sizes());
    return self.zero_();
  }
  if (on_device(self) && on_device(source)) {
    device_copy(self, source, non_blocking);
  } else if (on_device(self)) {
    host_to_device(self, source, non_blocking);
  } else {
    device_to_host(self, source);
  }
  return self;
}

// A cast or a clone on the device is one message; between host and device it is torch's own.
Tensor to_copy_kernel(const Tensor& self, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                      std::optional<at::Device> target, std::optional<bool> pin_memory, bool non_blocking,
                      std::optional<at::MemoryFormat> format) {
  require_existing(target);
  if (target.has_value()) use_device(*target);
  const bool stays = !target.has_value() || target->type() == kDeviceType;
  if (on_device(self) && stays && !self._is_zerotensor()) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_to_copy", "");
    auto stack = forward_by_handle(op, self, dtype, layout, std::optional<at::Device>(), std::optional<bool>(),
                                   non_blocking, format);
    return std::move(stack[0]).toTensor();
  }
  // The copy is complete when it returns, so there is no need for pinned memory, which torch would take
  // for a non-blocking one.
  return at::native::_to_copy(self, dtype, layout, target, pin_memory, non_blocking && !on_device(self), format);
}

at::Scalar only_element(const Tensor& self) {
  alignas(16) std::array<char, 16> bytes{};  // of the largest dtype, complex double
  const auto& storage = *self.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  read_element(storage, byte_offset(self), bytes.data(), self.itemsize());
  at::Scalar result;
  AT_DISPATCH_V2(self.scalar_type(), "_local_scalar_dense",
                 AT_WRAP([&] { result = at::Scalar(*reinterpret_cast<const scalar_t*>(bytes.data())); }),
                 AT_EXPAND(AT_ALL_TYPES_AND_COMPLEX), at::kComplexHalf, at::kHalf, at::kBool, at::kBFloat16,
                 AT_EXPAND(AT_FLOAT8_TYPES), AT_EXPAND(AT_BAREBONES_UNSIGNED_TYPES));
  return result;
}

at::Scalar local_scalar_kernel(const Tensor& self) {
  if (self._is_zerotensor()) return at::_local_scalar_dense(at::zeros({}, self.options().device(at::kCPU)));
  if (self.is_conj() || self.is_neg()) return local_scalar_kernel(self.resolve_conj().resolve_neg());
  return only_element(self);
}

// torch's own goes through the dispatcher twice more. Whatever has a say below autograd (modes, functorch, fake
// tensors, layouts, lazy conjugation) has it there.
at::Scalar item_kernel(c10::DispatchKeySet keys, const Tensor& self) {
  const bool plain = (keys & c10::after_ADInplaceOrView_keyset).highestPriorityTypeId() == kDeviceKey;
  return plain && self.numel() == 1 ? only_element(self) : at::native::item(self);
}

// Storages are freed in the order of the channel, whatever stream used them.
void record_stream_kernel(Tensor&, c10::Stream) {}

// The response area in two halves: the device fills one while the other is taken out.
void pull_storage(uint64_t handle, uint64_t offset, void* destination, uint64_t bytes, uint64_t half) {
  Channel& channel = Channel::instance();
  channel.synchronize();  // interruptible, as the transfer itself is not
  GilRelease gil;
  // Held to the end: the area belongs to this transfer. Two requests at most are on their way, so the room for
  // them that there is now stays.
  Channel::Transaction t(channel, 4 * kPullWords);
  uint64_t places[2] = {0, 0};
  auto* p = static_cast<char*>(destination);
  uint64_t asked = 0, taken = 0;
  for (uint64_t turn = 0; taken < bytes; ++turn) {
    while (asked < bytes && asked < taken + 2 * half) {
      const uint64_t slot = asked / half % 2;
      const uint64_t n = std::min(half, bytes - asked);
      uint64_t* body = t.begin(Message::Pull, kPullWords);
      body[0] = handle;
      body[1] = offset + asked;
      body[2] = n;
      body[3] = slot * half;
      t.commit();
      places[slot] = channel.published();
      asked += n;
    }
    const uint64_t n = std::min(half, bytes - taken);
    channel.wait_for(places[turn % 2]);
    std::memcpy(p + taken, channel.response_area() + turn % 2 * half, n);
    taken += n;
  }
  channel.raise_asynchronous_error();
}

// Between the device and pinned memory: one copy, which the proxy makes. Complete when it returns.
void copy_pinned(Message type, uint64_t handle, uint64_t offset, uint64_t at, uint64_t bytes) {
  Channel& channel = Channel::instance();
  channel.synchronize();  // interruptible, as the transfer itself is not
  GilRelease gil;
  for (uint64_t done = 0; done < bytes; done += kPinnedChunk)
    channel.send(type, kPullWords, [&](uint64_t* body) {
      body[0] = handle;
      body[1] = offset + done;
      body[2] = std::min(kPinnedChunk, bytes - done);
      body[3] = at + done;
    });
  channel.wait_for(channel.published());
  channel.raise_asynchronous_error();
}

}  // namespace

void write_storage(uint64_t handle, uint64_t offset, const void* source, uint64_t bytes) {
  Channel& channel = Channel::instance();
  channel.require();
  // What is larger than the queue waits for the device anyway; of the rest the buffer is free at once.
  if (bytes >= 2 * channel.ring_capacity())
    if (const auto at = pinned_offset(source, bytes))
      return copy_pinned(Message::PushPinned, handle, offset, *at, bytes);
  const uint64_t chunk = channel.write_chunk();
  const auto* p = static_cast<const char*>(source);
  while (bytes != 0) {
    const uint64_t n = std::min(bytes, chunk);
    channel.send(Message::Write, 3 + (n + 7) / 8, [&](uint64_t* body) {
      body[0] = handle;
      body[1] = offset;
      body[2] = n;
      if (n % 8 != 0) body[3 + n / 8] = 0;
      std::memcpy(body + 3, p, n);
    });
    p += n;
    offset += n;
    bytes -= n;
  }
}

void read_storage(uint64_t handle, uint64_t offset, void* destination, uint64_t bytes) {
  Channel& channel = Channel::instance();
  if (bytes >= kLeastPinnedRead)
    if (const auto at = pinned_offset(destination, bytes))
      return copy_pinned(Message::PullPinned, handle, offset, *at, bytes);
  const uint64_t half = channel.response_capacity() / 2;
  if (bytes > half) return pull_storage(handle, offset, destination, bytes, half);
  if (bytes == 0) return;
  channel.call(
      Message::Read, 3,
      [&](uint64_t* body) {
        body[0] = handle;
        body[1] = offset;
        body[2] = bytes;
      },
      [&](const char* data, size_t length) {
        TORCH_CHECK(length == bytes, "ergosphere: the device proxy answered a read of ", bytes, " bytes with ", length);
        std::memcpy(destination, data, bytes);
      });
}

void register_copy_kernels(torch::Library& library, torch::Library& autograd) {
  autograd.impl("item", item_kernel);
  library.impl("copy_", copy_kernel);
  library.impl("_to_copy", to_copy_kernel);
  library.impl("_local_scalar_dense", local_scalar_kernel);
  library.impl("record_stream", record_stream_kernel);
}

}  // namespace ergo::rank
