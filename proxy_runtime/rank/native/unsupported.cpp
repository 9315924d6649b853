// Compressed sparse layouts (CSR, CSC, BSR, BSC) and quantized tensors. torch's native kernels for them would run CUDA
// code in the rank, on memory that is not there: each raises instead, by its name.
#include "layouts.hpp"
#include "registration.hpp"

namespace ergo::rank {
namespace {

// Only touch the component tensors too, so they work as they are.
constexpr std::array<std::string_view, 8> kMetadataOnly{
    "aten::crow_indices", "aten::col_indices",  "aten::ccol_indices", "aten::row_indices",
    "aten::q_scale",      "aten::q_zero_point", "aten::qscheme",      "aten::_sparse_compressed_tensor_unsafe"};

void raise_unsupported(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "ergosphere: ", op.operator_name(),
      " on a compressed sparse or quantized CUDA tensor is not forwarded to the device proxy; use "
      "a dense or a sparse COO tensor, or do this part on the CPU");
}

bool metadata_only(std::string_view name) { return any_is(kOfComponents, name) || any_is(kMetadataOnly, name); }

}  // namespace

size_t register_unsupported_layouts() {
  size_t n = 0;
  for (auto key : {c10::DispatchKey::SparseCsrCUDA, c10::DispatchKey::QuantizedCUDA})
    n += take_layout<&raise_unsupported, &raise_unsupported>(
        key, [](std::string_view name, std::string_view full) { return metadata_only(full) || metadata_only(name); });
  return n;
}

}  // namespace ergo::rank
