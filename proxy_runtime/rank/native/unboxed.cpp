#include "unboxed.hpp"

#include <ATen/Operators.h>

#include <map>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#include "fallback.hpp"
#include "storage.hpp"
#include "tree.hpp"

namespace ergo::rank {
namespace {

using c10::IValue;

// Arguments on a stack that counts no references: their owners are the callers of the kernel. One for each thread.
struct BorrowedCall {
  torch::jit::Stack stack;
  EncodedCall call;
  bool busy = false;

  void add(const at::Tensor& t) {
    using Pointer = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
    stack.emplace_back(at::Tensor(Pointer::reclaim(t.unsafeGetTensorImpl())));
  }
  template <class Value>
  void add(const Value& v) {
    stack.emplace_back(v);
  }
  void give_back() {
    for (IValue& value : stack)
      if (value.isTensor()) (void)std::move(value).toTensor().unsafeReleaseTensorImpl();
    stack.clear();
    busy = false;
  }
};

BorrowedCall* make_borrowed() {
  thread_local std::unique_ptr<BorrowedCall> made = std::make_unique<BorrowedCall>();
  return made.get();
}

BorrowedCall& borrowed() {
  thread_local BorrowedCall* of_thread = nullptr;  // without a constructor, so that using it costs no check
  if (C10_UNLIKELY(of_thread == nullptr)) of_thread = make_borrowed();
  return *of_thread;
}

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
    BorrowedCall& own = borrowed();
    if (C10_LIKELY(bound_device() >= 0 && !own.busy && (is_plain(arguments) && ...))) {
      own.busy = true;
      struct GiveBack {
        BorrowedCall& own;
        ~GiveBack() { own.give_back(); }
      } end{own};
      (own.add(arguments), ...);
      if (auto result = forward_known(op, own.stack, own.call)) return as_result(std::move(*result), arguments...);
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
