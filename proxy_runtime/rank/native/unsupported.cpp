// Compressed sparse layouts (CSR, CSC, BSR, BSC) and quantized tensors. torch's native kernels for them would run CUDA
// code in the rank, on memory that is not there: each raises instead, by its name.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <array>
#include <memory>
#include <string_view>
#include <vector>

#include "registration.hpp"

namespace ergo::rank {
namespace {

constexpr std::array<c10::DispatchKey, 2> kKeys{c10::DispatchKey::SparseCsrCUDA, c10::DispatchKey::QuantizedCUDA};

// Only touch the component tensors, so they work as they are.
constexpr std::array<std::string_view, 24> kMetadataOnly{"aten::_nnz",
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
                                                         "aten::crow_indices",
                                                         "aten::col_indices",
                                                         "aten::ccol_indices",
                                                         "aten::row_indices",
                                                         "aten::empty.memory_format",
                                                         "aten::is_pinned",
                                                         "aten::_pin_memory",
                                                         "aten::q_scale",
                                                         "aten::q_zero_point",
                                                         "aten::qscheme",
                                                         "aten::_sparse_compressed_tensor_unsafe"};

void raise_unsupported(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "ergosphere: ", op.operator_name(),
      " on a compressed sparse or quantized CUDA tensor is not forwarded to the device proxy; use "
      "a dense or a sparse COO tensor, or do this part on the CPU");
}

bool metadata_only(std::string_view name) {
  for (auto candidate : kMetadataOnly)
    if (candidate == name) return true;
  return false;
}

}  // namespace

size_t register_unsupported_layouts() {
  size_t n = 0;
  auto& dispatcher = c10::Dispatcher::singleton();
  static auto* libraries = new std::vector<std::unique_ptr<torch::Library>>;
  const auto names = dispatcher.getAllOpNames();
  for (auto key : kKeys) {
    libraries->push_back(std::make_unique<torch::Library>(torch::Library::IMPL, "_", key, __FILE__, __LINE__));
    libraries->back()->fallback(torch::CppFunction::makeFromBoxedFunction<&raise_unsupported>());
    libraries->push_back(std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__));
    torch::Library& library = *libraries->back();
    for (const auto& name : names) {
      if (name.name.rfind("aten::", 0) != 0) continue;
      const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      const auto op = dispatcher.findSchema(name);
      if (!op.has_value() || !op->hasKernelForDispatchKey(key) || metadata_only(full) || metadata_only(name.name))
        continue;
      library.impl(full.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&raise_unsupported>());
      ++n;
    }
  }
  return n;
}

}  // namespace ergo::rank
