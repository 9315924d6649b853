// Sparse COO tensors. In the rank they are what they are everywhere in torch: two dense tensors, indices
// and values, with sizes and a flag. Operators that need the contents are forwarded, the arguments as their
// components (encoder.cpp); the rest is torch's own code on the components.
#include "fallback.hpp"
#include "layouts.hpp"
#include "registration.hpp"

namespace ergo::rank {
namespace {

// torch's kernels for these are made of operators on the components.
constexpr std::array<std::string_view, 10> kTorchsOwn{"aten::empty_like",
                                                      "aten::clone",
                                                      "aten::copy_",
                                                      "aten::copy_sparse_to_sparse_",
                                                      "aten::resize_as_sparse_",
                                                      "aten::sparse_resize_",
                                                      "aten::sparse_resize_and_clear_",
                                                      "aten::zero_",
                                                      "aten::zeros.out",
                                                      "aten::sspaddmm.out"};  // which says that CUDA has none

void raise_no_kernel(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "ergosphere: torch has no kernel of ", op.operator_name(),
                              " for sparse CUDA tensors; use tensor.to_dense()");
}

}  // namespace

size_t register_sparse_layout() {
  return take_layout<&forward_operator, &raise_no_kernel>(
      c10::DispatchKey::SparseCUDA,
      [](std::string_view, std::string_view full) { return any_is(kOfComponents, full) || any_is(kTorchsOwn, full); });
}

}  // namespace ergo::rank
