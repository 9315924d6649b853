#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>

#include "collective_bridge.hpp"

namespace ergo::device {
namespace {

at::Tensor over(uint8_t dtype, const std::byte* data, size_t n) {
  return at::from_blob(const_cast<std::byte*>(data), {static_cast<int64_t>(n)},
                       at::TensorOptions().dtype(static_cast<at::ScalarType>(dtype)));
}

}  // namespace

ReduceFn aten_reduce() {
  return [](uint8_t dtype, ReduceOp op, std::byte* out, const std::byte* left, const std::byte* right, size_t n) {
    at::NoGradGuard no_grad;
    at::Tensor to = over(dtype, out, n), a = over(dtype, left, n), b = over(dtype, right, n);
    switch (op) {
      case ReduceOp::Sum:
      case ReduceOp::Avg:
        at::add_out(to, a, b);
        return;
      case ReduceOp::Product:
        at::mul_out(to, a, b);
        return;
      case ReduceOp::Min:
        at::minimum_out(to, a, b);
        return;
      case ReduceOp::Max:
        at::maximum_out(to, a, b);
        return;
      case ReduceOp::BAnd:
        at::bitwise_and_out(to, a, b);
        return;
      case ReduceOp::BOr:
        at::bitwise_or_out(to, a, b);
        return;
      case ReduceOp::BXor:
        at::bitwise_xor_out(to, a, b);
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
