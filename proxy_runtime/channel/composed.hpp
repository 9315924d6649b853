// Tensors that are made of dense ones: sparse (COO, CSR, CSC, BSR, BSC) and nested. Between rank and device they
// travel as their components.
#pragma once

#include <ATen/ATen.h>
#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

#include "wire.hpp"

namespace ergo {

// All that such a tensor is. `geometry` are its sizes; those of a nested tensor are: how many tensors, of how many
// dimensions, then their sizes, strides and offsets.
struct Composed {
  Composition kind = Composition::Coo;
  uint8_t sparse_dim = 0;  // COO
  bool coalesced = false;  // COO
  std::vector<int64_t> geometry;
  c10::SmallVector<at::Tensor, 3> components;
};

// Indices before values.
inline size_t components_of(Composition kind) {
  return kind == Composition::Nested ? 1 : kind == Composition::Coo ? 2 : 3;
}

inline bool is_composed(const c10::TensorImpl& t) {
  return !t.key_set().has_all(c10::DispatchKeySet(c10::DispatchKey::Dense));
}

inline at::SparseTensorImpl* coo_impl(const at::Tensor& t) {
  return static_cast<at::SparseTensorImpl*>(t.unsafeGetTensorImpl());
}

inline at::SparseCsrTensorImpl* compressed_impl(const at::Tensor& t) {
  return static_cast<at::SparseCsrTensorImpl*>(t.unsafeGetTensorImpl());
}

// What a tensor is composed as; nothing for other layouts and quantized tensors, which do not travel.
inline std::optional<Composition> composition_of(const at::Tensor& t) {
  switch (t.layout()) {
    case c10::kSparse:
      return Composition::Coo;
    case c10::kSparseCsr:
      return Composition::Csr;
    case c10::kSparseCsc:
      return Composition::Csc;
    case c10::kSparseBsr:
      return Composition::Bsr;
    case c10::kSparseBsc:
      return Composition::Bsc;
    case c10::kStrided:
      if (t.is_nested()) return Composition::Nested;
      [[fallthrough]];
    default:
      return std::nullopt;
  }
}

inline c10::Layout layout_of(Composition kind) {
  switch (kind) {
    case Composition::Coo:
      return c10::kSparse;
    case Composition::Csr:
      return c10::kSparseCsr;
    case Composition::Csc:
      return c10::kSparseCsc;
    case Composition::Bsr:
      return c10::kSparseBsr;
    case Composition::Bsc:
      return c10::kSparseBsc;
    default:
      return c10::kStrided;
  }
}

inline Composed decompose(const at::Tensor& t, Composition kind) {
  Composed c;
  c.kind = kind;
  if (kind == Composition::Nested) {
    const auto* impl = at::native::get_nested_tensor_impl(t);
    const at::Tensor& sizes = impl->get_nested_sizes();
    const bool empty = sizes.dim() != 2;
    c.geometry = {empty ? 0 : sizes.size(0), empty ? 0 : sizes.size(1)};
    for (const at::Tensor& part : {sizes, impl->get_nested_strides(), impl->get_storage_offsets()}) {
      if (empty) break;
      const at::Tensor flat = part.contiguous();
      const int64_t* data = flat.const_data_ptr<int64_t>();
      c.geometry.insert(c.geometry.end(), data, data + flat.numel());
    }
    c.components = {impl->get_unsafe_storage_as_tensor()};
    return c;
  }
  c.geometry = t.sizes().vec();
  if (kind == Composition::Coo) {
    const auto* impl = coo_impl(t);
    c.sparse_dim = static_cast<uint8_t>(impl->sparse_dim());
    c.coalesced = impl->coalesced();
    c.components = {impl->indices(), impl->values()};
  } else {
    const auto* impl = compressed_impl(t);
    c.components = {impl->compressed_indices(), impl->plain_indices(), impl->values()};
  }
  return c;
}

// Throws std::runtime_error for a geometry that cannot be, c10::Error for components that do not fit it.
inline at::Tensor compose(const Composed& c) {
  const at::Tensor& values = c.components.back();
  if (c.kind == Composition::Nested) {
    const auto has = [&c](size_t n) {
      if (c.geometry.size() < n) throw std::runtime_error("ergosphere: a nested tensor of impossible geometry");
    };
    has(2);
    const int64_t n = c.geometry[0], d = c.geometry[1];
    constexpr int64_t kMost = int64_t{1} << 30;
    if (n < 0 || d < 0 || n > kMost || d > UINT8_MAX) has(SIZE_MAX);
    has(static_cast<size_t>(2 + 2 * n * d + n));
    const int64_t* at = c.geometry.data() + 2;
    const auto matrix = [&at](std::vector<int64_t> shape) {
      at::Tensor made = at::empty(shape, at::kLong);
      std::copy_n(at, made.numel(), made.mutable_data_ptr<int64_t>());
      at += made.numel();
      return made;
    };
    if (n == 0) {
      const at::Tensor none = at::empty({0}, at::kLong);
      return at::detail::make_tensor<at::native::NestedTensorImpl>(values, at::ones({}, at::kLong),
                                                                   at::ones({}, at::kLong), none);
    }
    const at::Tensor sizes = matrix({n, d}), strides = matrix({n, d}), offsets = matrix({n});
    int64_t reach = 0;
    for (int64_t i = 0; i < n; ++i) {
      int64_t last = offsets.const_data_ptr<int64_t>()[i];
      bool any = true;
      for (int64_t j = 0; j < d; ++j) {
        const int64_t size = sizes.const_data_ptr<int64_t>()[i * d + j];
        const int64_t stride = strides.const_data_ptr<int64_t>()[i * d + j];
        int64_t step = 0;
        if (size < 0 || stride < 0 || __builtin_mul_overflow(size - 1, stride, &step) ||
            __builtin_add_overflow(last, step, &last))
          has(SIZE_MAX);
        any = any && size > 0;
      }
      if (offsets.const_data_ptr<int64_t>()[i] < 0) has(SIZE_MAX);
      if (any) reach = std::max(reach, last + 1);
    }
    TORCH_CHECK(reach <= values.numel(), "ergosphere: a nested tensor reaches ", reach, " elements into a buffer of ",
                values.numel());
    return at::detail::make_tensor<at::native::NestedTensorImpl>(values, sizes, strides, offsets);
  }
  const auto dims = static_cast<int64_t>(c.geometry.size());
  if (c.kind == Composition::Coo)
    return at::_sparse_coo_tensor_with_dims_and_tensors(c.sparse_dim, dims - c.sparse_dim, c.geometry, c.components[0],
                                                        values, values.options().layout(c10::kSparse), c.coalesced);
  const auto layout = layout_of(c.kind);
  const auto key = c10::computeDispatchKey(values.scalar_type(), layout, values.device());
  at::Tensor t = at::detail::make_tensor<at::SparseCsrTensorImpl>(c10::DispatchKeySet(key), values.device(), layout,
                                                                  values.dtype());
  compressed_impl(t)->set_member_tensors(c.components[0], c.components[1], values, c.geometry);
  return t;
}

// Makes `t` what `c` says, as an operator that writes it does.
inline void become(const at::Tensor& t, const Composed& c) {
  switch (c.kind) {
    case Composition::Coo: {
      auto* impl = coo_impl(t);
      impl->raw_resize_(c.sparse_dim, static_cast<int64_t>(c.geometry.size()) - c.sparse_dim, c.geometry);
      impl->set_indices_and_values_unsafe(c.components[0], c.components[1]);
      impl->set_coalesced(c.coalesced);
      break;
    }
    case Composition::Nested:
      TORCH_CHECK_NOT_IMPLEMENTED(false, "ergosphere: a nested tensor cannot be resized on a proxied device");
    default:
      compressed_impl(t)->set_member_tensors(c.components[0], c.components[1], c.components[2], c.geometry);
  }
}

}  // namespace ergo
