#include "unboxed.hpp"

#include <ATen/Operators.h>

#include <map>
#include <type_traits>
#include <utility>

#include "call_buffers.hpp"
#include "fallback.hpp"
#include "storage.hpp"
#include "tree.hpp"

namespace ergo::rank {
namespace {

using c10::IValue;

// Arguments on a stack that counts no references: their owners are the callers of the kernel.
class Borrowed {
 public:
  explicit Borrowed(torch::jit::Stack& stack) : stack_(stack) {}
  ~Borrowed() {
    for (IValue& value : stack_)
      if (value.isTensor()) (void)std::move(value).toTensor().unsafeReleaseTensorImpl();
    stack_.clear();
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

  void add(const at::Tensor& t) {
    using Pointer = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
    stack_.emplace_back(at::Tensor(Pointer::reclaim(t.unsafeGetTensorImpl())));
  }
  template <class Value>
  void add(const Value& v) {
    stack_.emplace_back(v);
  }

 private:
  torch::jit::Stack& stack_;
};

// What is encoded as it is. Others are replaced on the stack first, which must own them then.
bool is_plain(const at::Tensor& t) {
  return t.defined() && t.device().type() == kDeviceType && t.layout() == c10::kStrided && !t._is_zerotensor();
}
template <class Value>
bool is_plain(const Value&) {
  return true;
}

template <class Operator, class Signature>
struct Unboxed;

template <class Operator, class Result, class... Arguments>
struct Unboxed<Operator, Result(Arguments...)> {
  static Result call(Arguments... arguments) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Operator::name, Operator::overload_name);
    if (C10_LIKELY(bound_device() >= 0 && (is_plain(arguments) && ...))) {
      BuffersInUse buffers;
      Borrowed borrowed(buffers->stack);
      (borrowed.add(arguments), ...);
      return as_result(forward_plain(op, buffers->stack, buffers->call), arguments...);
    }
    auto stack = forward_by_handle(op, arguments...);
    return as_result(std::move(stack[0]).toTensor(), arguments...);
  }

  template <class First, class... Rest>
  static Result as_result(at::Tensor&& made, First& first, Rest&...) {
    if constexpr (std::is_reference_v<Result>)
      return first;  // in place
    else
      return std::move(made);
  }
};

template <class Operator>
std::pair<std::string, torch::CppFunction (*)()> entry() {
  std::string name = Operator::name;
  if (const std::string overload = Operator::overload_name; !overload.empty()) name += "." + overload;
  return {name, [] { return torch::CppFunction(&Unboxed<Operator, typename Operator::schema>::call); }};
}

template <class... Operators>
std::map<std::string, torch::CppFunction (*)()> entries() {
  return {entry<Operators>()...};
}

}  // namespace

std::optional<torch::CppFunction> unboxed_kernel(const std::string& name) {
  namespace ops = at::_ops;
  // With one result, which is a tensor, and no arguments but tensors, numbers and truth values.
  static const auto kernels =
      entries<ops::add_Tensor, ops::add__Tensor, ops::sub_Tensor, ops::sub__Tensor, ops::mul_Tensor, ops::mul__Tensor,
              ops::div_Tensor, ops::div__Tensor, ops::mm, ops::bmm, ops::addmm, ops::relu, ops::relu_, ops::sigmoid,
              ops::tanh, ops::exp, ops::log, ops::neg, ops::sqrt, ops::rsqrt, ops::abs, ops::silu,
              ops::threshold_backward, ops::sigmoid_backward, ops::tanh_backward, ops::pow_Tensor_Scalar,
              ops::eq_Tensor, ops::eq_Scalar, ops::where_self, ops::addcmul_, ops::addcdiv_, ops::lerp__Scalar,
              ops::masked_fill_Scalar>();
  const auto found = kernels.find(name);
  return found == kernels.end() ? std::nullopt : std::optional<torch::CppFunction>(found->second());
}

}  // namespace ergo::rank
