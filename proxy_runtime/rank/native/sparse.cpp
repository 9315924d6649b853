// Sparse COO tensors. In the rank they are what they are everywhere in torch: two dense tensors, indices
// and values, with sizes and a flag. Operators that need the contents are forwarded, the arguments as their
// components (encoder.cpp); the rest is torch's own code on the components.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <array>
#include <string>
#include <string_view>

#include "fallback.hpp"
#include "registration.hpp"

namespace ergo::rank {
namespace {

// torch's kernels for these only touch metadata, or are made of operators on the components.
constexpr std::array<std::string_view, 26> kTorchsOwn{"aten::_nnz",
                                                      "aten::_dimI",
                                                      "aten::_dimV",
                                                      "aten::sparse_dim",
                                                      "aten::dense_dim",
                                                      "aten::_indices",
                                                      "aten::_values",
                                                      "aten::indices",
                                                      "aten::values",
                                                      "aten::is_coalesced",
                                                      "aten::_coalesced_",
                                                      "aten::_sparse_coo_tensor_with_dims",
                                                      "aten::_sparse_coo_tensor_with_dims_and_tensors",
                                                      "aten::empty.memory_format",
                                                      "aten::empty_like",
                                                      "aten::clone",
                                                      "aten::copy_",
                                                      "aten::copy_sparse_to_sparse_",
                                                      "aten::resize_as_sparse_",
                                                      "aten::sparse_resize_",
                                                      "aten::sparse_resize_and_clear_",
                                                      "aten::zero_",
                                                      "aten::zeros.out",
                                                      "aten::sspaddmm.out",  // which says that CUDA has none
                                                      "aten::is_pinned",
                                                      "aten::_pin_memory"};

bool is_torchs_own(std::string_view name) {
  for (auto candidate : kTorchsOwn)
    if (candidate == name) return true;
  return false;
}

void raise_no_kernel(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "ergosphere: torch has no kernel of ", op.operator_name(),
                              " for sparse CUDA tensors; use tensor.to_dense()");
}

}  // namespace

size_t register_sparse_layout() {
  constexpr auto key = c10::DispatchKey::SparseCUDA;
  static auto* fallback = new torch::Library(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
  static auto* aten = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  fallback->fallback(torch::CppFunction::makeFromBoxedFunction<&raise_no_kernel>());
  size_t n = 0;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    const auto op = dispatcher.findSchema(name);
    if (!op.has_value() || !op->hasKernelForDispatchKey(key) || is_torchs_own(full)) continue;
    aten->impl(full.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&forward_operator>());
    ++n;
  }
  return n;
}

}  // namespace ergo::rank
