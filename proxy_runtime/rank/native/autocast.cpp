#include "autocast.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <array>
#include <string_view>
#include <vector>

#include "storage.hpp"

namespace ergo::rank {
namespace {

// Of the operators that autocast touches on the CPU (torch's dispatcher knows which) these run in the lower
// precision, and these in the widest type of their arguments; all others run in float32.
// Source: the lists of aten/src/ATen/autocast_mode.{h,cpp}.
constexpr std::array<std::string_view, 26> kLower{"aten::_convolution.deprecated",
                                                  "aten::conv1d",
                                                  "aten::conv1d.padding",
                                                  "aten::conv2d",
                                                  "aten::conv2d.padding",
                                                  "aten::conv3d",
                                                  "aten::conv3d.padding",
                                                  "aten::conv_tbc",
                                                  "aten::conv_transpose1d",
                                                  "aten::conv_transpose2d.input",
                                                  "aten::conv_transpose3d.input",
                                                  "aten::bmm",
                                                  "aten::mm",
                                                  "aten::linalg_vecdot",
                                                  "aten::baddbmm",
                                                  "aten::addmm",
                                                  "aten::_addmm_activation",
                                                  "aten::addbmm",
                                                  "aten::linear",
                                                  "aten::matmul",
                                                  "aten::scaled_dot_product_attention",
                                                  "aten::_native_multi_head_attention",
                                                  "aten::prelu",
                                                  "aten::mkldnn_rnn_layer",
                                                  "aten::addmv",
                                                  "aten::mv"};
constexpr std::array<std::string_view, 3> kWidest{"aten::stack", "aten::cat", "aten::index_copy"};

using CastTo = at::ScalarType (*)(const torch::jit::Stack&, size_t);

template <size_t N>
bool contains(const std::array<std::string_view, N>& names, std::string_view name) {
  for (auto candidate : names)
    if (candidate == name) return true;
  return false;
}

template <class Visit>
void for_each_tensor(const c10::IValue& v, Visit&& visit) {
  if (v.isTensor()) {
    visit(v.toTensor());
  } else if (v.isTensorList()) {
    for (const auto& item : v.toListRef()) visit(item.toTensor());
  }
}

at::ScalarType lower(const torch::jit::Stack&, size_t) { return at::autocast::get_autocast_dtype(kDeviceType); }
at::ScalarType full(const torch::jit::Stack&, size_t) { return at::kFloat; }
at::ScalarType widest(const torch::jit::Stack& stack, size_t first) {
  at::ScalarType type = at::autocast::get_autocast_dtype(kDeviceType);
  for (size_t i = first; i < stack.size(); ++i)
    for_each_tensor(stack[i], [&](const at::Tensor& t) {
      if (t.defined()) type = at::autocast::prioritize(type, t, kDeviceType);
    });
  return type;
}

void cast(c10::IValue& v, at::ScalarType type) {
  if (v.isTensor()) {
    if (v.toTensor().defined()) v = at::autocast::cached_cast(type, v.toTensor(), kDeviceType);
  } else if (v.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const auto& item : v.toListRef())
      list.push_back(at::autocast::cached_cast(type, item.toTensor(), kDeviceType));
    v = std::move(list);
  }
}

template <CastTo target>
void cast_and_call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  const size_t first = stack->size() - op.schema().arguments().size();
  const at::ScalarType type = target(*stack, first);
  for (size_t i = first; i < stack->size(); ++i) cast((*stack)[i], type);
  op.callBoxed(stack);
}

}  // namespace

void register_cpu_autocast() {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::AutocastCUDA, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op.has_value()) continue;
    const bool on_cpu = op->hasKernelForDispatchKey(c10::DispatchKey::AutocastCPU);
    if (!on_cpu && !op->hasKernelForDispatchKey(c10::DispatchKey::AutocastCUDA)) continue;
    const std::string full_name = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    auto kernel = !on_cpu                        ? torch::CppFunction::makeFallthrough()
                  : contains(kLower, full_name)  ? torch::CppFunction::makeFromBoxedFunction<&cast_and_call<lower>>()
                  : contains(kWidest, full_name) ? torch::CppFunction::makeFromBoxedFunction<&cast_and_call<widest>>()
                                                 : torch::CppFunction::makeFromBoxedFunction<&cast_and_call<full>>();
    library->impl(full_name.substr(6).c_str(), std::move(kernel));
  }
}

}  // namespace ergo::rank
