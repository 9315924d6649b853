#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>

#include "collective_bridge.hpp"

namespace ergo::device {
namespace {

at::Tensor over(uint8_t dtype, const std::byte* data, size_t n) {
  return at::from_blob(const_cast<std::byte*>(data), {static_cast<int64_t>(n)},
                       at::TensorOptions().dtype(static_cast<at::ScalarType>(dtype)));
}

}  // namespace

ReduceFn aten_reduce() {
  return [](uint8_t dtype, ReduceOp op, std::byte* acc, const std::byte* other, size_t n) {
    at::NoGradGuard no_grad;
    at::Tensor a = over(dtype, acc, n), b = over(dtype, other, n);
    switch (op) {
      case ReduceOp::Sum:
      case ReduceOp::Avg:
        a.add_(b);
        return;
      case ReduceOp::Product:
        a.mul_(b);
        return;
      case ReduceOp::Min:
        at::minimum_out(a, a, b);
        return;
      case ReduceOp::Max:
        at::maximum_out(a, a, b);
        return;
      case ReduceOp::BAnd:
        a.bitwise_and_(b);
        return;
      case ReduceOp::BOr:
        a.bitwise_or_(b);
        return;
      case ReduceOp::BXor:
        a.bitwise_xor_(b);
        return;
    }
  };
}

ScaleFn aten_scale() {
  return [](uint8_t dtype, std::byte* data, size_t n, uint64_t divisor) {
    at::NoGradGuard no_grad;
    at::Tensor t = over(dtype, data, n);
    auto by = static_cast<int64_t>(divisor);
    if (c10::isIntegralType(t.scalar_type(), /*includeBool=*/true))
      t.div_(by, "trunc");
    else
      t.div_(by);
  };
}

}  // namespace ergo::device
