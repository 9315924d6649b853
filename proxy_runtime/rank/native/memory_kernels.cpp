#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>

#include "channel.hpp"
#include "kernels.hpp"
#include "storage.hpp"
#include "tree.hpp"

namespace ergo::rank {
namespace {

using at::IntArrayRef;
using at::Tensor;

void fill_if_deterministic(Tensor& tensor) {
  if (at::globalContext().deterministicAlgorithms() && at::globalContext().deterministicFillUninitializedMemory())
    at::native::fill_empty_deterministic_(tensor);
}

Tensor empty_kernel(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<at::Device> wanted, std::optional<bool> pin_memory,
                    std::optional<at::MemoryFormat> format) {
  require_existing(wanted);
  use_device(wanted);
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only dense CPU tensors can be pinned");
  Tensor result = at::detail::empty_generic(size, device_allocator(), c10::DispatchKeySet(kDeviceKey),
                                            c10::dtype_or_default(dtype), format);
  fill_if_deterministic(result);
  return result;
}

Tensor empty_strided_kernel(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<at::Device> wanted,
                            std::optional<bool> pin_memory) {
  require_existing(wanted);
  use_device(wanted);
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only dense CPU tensors can be pinned");
  Tensor result = at::detail::empty_strided_generic(size, stride, device_allocator(), c10::DispatchKeySet(kDeviceKey),
                                                    c10::dtype_or_default(dtype));
  fill_if_deterministic(result);
  return result;
}

// Memory that is never there: a zero tensor has no contents.
class NoMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t) override { return {nullptr, nullptr, &c10::detail::deleteNothing, own_device()}; }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "ergosphere: a zero tensor has no contents to copy");
  }
};

// Such a tensor only exists in the rank; what needs its contents gets real zeros (encoder.cpp).
Tensor efficient_zero_kernel(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                             std::optional<at::Device> wanted, std::optional<bool>) {
  require_existing(wanted);
  use_device(wanted);
  auto keys = c10::DispatchKeySet(kDeviceKey).add(c10::DispatchKey::ZeroTensor);
  static NoMemory* no_memory = new NoMemory;
  return at::detail::empty_generic(size, no_memory, keys, c10::dtype_or_default(dtype), std::nullopt);
}

Tensor as_strided_kernel(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

void grow_storage(c10::StorageImpl& storage, uint64_t bytes) {
  if (bytes <= storage.nbytes()) return;
  TORCH_CHECK(storage.resizable(), "Trying to resize storage that is not resizable");
  resize_storage(storage, bytes);
}

const Tensor& resize_kernel(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() == size && !format.has_value()) return self;
  impl->set_sizes_contiguous(size);
  if (format.has_value()) {
    TORCH_CHECK(*format != at::MemoryFormat::Preserve, "Unsupported memory format ", *format);
    impl->empty_tensor_restride(*format);
  }
  grow_storage(*impl->unsafe_storage().unsafeGetStorageImpl(),
               at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize(), impl->storage_offset()));
  return self;
}

Tensor& set_storage_kernel(Tensor& result, at::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset);
  uint64_t bytes = 0;
  if (stride.data() == nullptr) {
    impl->set_sizes_contiguous(size);
    bytes = at::detail::computeStorageNbytesContiguous(size, result.dtype().itemsize(), offset);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
    bytes = at::detail::computeStorageNbytes(size, stride, result.dtype().itemsize(), offset);
  }
  grow_storage(*storage.unsafeGetStorageImpl(), bytes);
  return result;
}

Tensor& set_whole_storage_kernel(Tensor& result, at::Storage storage) {
  const auto n = static_cast<int64_t>(storage.nbytes() / result.dtype().itemsize());
  return set_storage_kernel(result, std::move(storage), 0, {n}, {1});
}

Tensor& set_tensor_kernel(Tensor& result, const Tensor& source) {
  if (result.is_same(source)) return result;
  return set_storage_kernel(result, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_empty_kernel(Tensor& result) {
  at::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0,
                                                            device_allocator()->allocate(0), device_allocator(), true));
  return set_storage_kernel(result, std::move(storage), 0, {0}, {1});
}

}  // namespace

void register_memory_kernels(torch::Library& library) {
  library.impl("empty.memory_format", empty_kernel);
  library.impl("empty_strided", empty_strided_kernel);
  library.impl("_efficientzerotensor", efficient_zero_kernel);
  library.impl("as_strided", as_strided_kernel);
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  library.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  library.impl("resize_", resize_kernel);
  library.impl("set_.source_Storage", set_whole_storage_kernel);
  library.impl("set_.source_Storage_storage_offset", set_storage_kernel);
  library.impl("set_.source_Tensor", set_tensor_kernel);
  library.impl("set_", set_empty_kernel);
}

}  // namespace ergo::rank
