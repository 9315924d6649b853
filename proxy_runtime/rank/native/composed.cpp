// Sparse and nested tensors. In the rank they are what they are everywhere in torch: dense tensors with sizes and
// flags. Operators that need the contents are forwarded, the arguments as their components (composed.hpp); the rest is
// torch's own code on the components.
#include "fallback.hpp"
#include "layouts.hpp"
#include "registration.hpp"

namespace ergo::rank {
namespace {

// torch's kernels for these are made of operators on the components.
constexpr std::array<std::string_view, 14> kTorchsOwnSparse{"aten::empty_like",     "aten::clone",
                                                            "aten::copy_",          "aten::copy_sparse_to_sparse_",
                                                            "aten::resize_",        "aten::resize_as_sparse_",
                                                            "aten::sparse_resize_", "aten::sparse_resize_and_clear_",
                                                            "aten::zero_",          "aten::zeros.out",
                                                            "aten::crow_indices",   "aten::col_indices",
                                                            "aten::ccol_indices",   "aten::row_indices"};
// Which says that CUDA has none.
constexpr std::string_view kNoneOnCuda = "aten::sspaddmm.out";

constexpr std::array<std::string_view, 22> kTorchsOwnNested{"aten::_nested_tensor_size",
                                                            "aten::_nested_tensor_strides",
                                                            "aten::_nested_tensor_storage_offsets",
                                                            "aten::is_same_size",
                                                            "aten::alias",
                                                            "aten::detach",
                                                            "aten::view",
                                                            "aten::transpose.int",
                                                            "aten::squeeze",
                                                            "aten::squeeze.dim",
                                                            "aten::squeeze.dims",
                                                            "aten::unsqueeze",
                                                            "aten::select.int",
                                                            "aten::narrow",
                                                            "aten::chunk",
                                                            "aten::split_with_sizes",
                                                            "aten::unbind.int",
                                                            "aten::empty_like",
                                                            "aten::clone",
                                                            "aten::copy_",
                                                            "aten::_to_copy",
                                                            "aten::scaled_dot_product_attention"};

void raise_no_sparse_kernel(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "ergosphere: torch has no kernel of ", op.operator_name(),
                              " for sparse CUDA tensors of this layout; use tensor.to_dense()");
}

void raise_no_nested_kernel(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "ergosphere: torch has no kernel of ", op.operator_name(),
                              " for strided nested CUDA tensors; use layout=torch.jagged");
}

}  // namespace

void register_composed_layouts() {
  for (auto key : {c10::DispatchKey::SparseCUDA, c10::DispatchKey::SparseCsrCUDA})
    take_layout<&forward_operator, &raise_no_sparse_kernel>(key, [](std::string_view, std::string_view full) {
      return any_is(kOfComponents, full) || any_is(kTorchsOwnSparse, full) || full == kNoneOnCuda;
    });
  take_layout<&forward_operator, &raise_no_nested_kernel>(
      c10::DispatchKey::NestedTensorCUDA, [](std::string_view, std::string_view full) {
        return any_is(kOfComponents, full) || any_is(kTorchsOwnNested, full);
      });
}

}  // namespace ergo::rank
