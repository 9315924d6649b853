// Layouts whose tensors are made of several: what of torch's own works on the components, and who takes the rest.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

namespace ergo::rank {

// torch's kernels for these only touch metadata and the component tensors.
inline constexpr std::array<std::string_view, 16> kOfComponents{"aten::_nnz",
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
                                                                "aten::is_pinned",
                                                                "aten::_pin_memory"};

template <size_t N>
bool any_is(const std::array<std::string_view, N>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Gives `key` a fallback, and a kernel in the place of each of torch's own for an aten operator, unless
// `stays(operator name, name with overload)`.
template <auto* Kernel, auto* Fallback, class Stays>
void take_layout(c10::DispatchKey key, Stays&& stays) {
  // Never removed: registrations live as long as the process.
  auto* fallback = new torch::Library(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
  auto* aten = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  fallback->fallback(torch::CppFunction::makeFromBoxedFunction<Fallback>());
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    const auto op = dispatcher.findSchema(name);
    if (!op.has_value() || !op->hasKernelForDispatchKey(key) || stays(name.name, full)) continue;
    aten->impl(full.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<Kernel>());
  }
}

}  // namespace ergo::rank
