// Plain element-wise kernels for tests and for programs without torch.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "collectives.hpp"

namespace ergo {

namespace {

// torch's order: a NaN on either side wins.
template <class T>
T smaller(T a, T b) {
  if constexpr (std::is_floating_point_v<T>)
    if (std::isnan(a) || std::isnan(b)) return std::isnan(a) ? a : b;
  return std::min(a, b);
}
template <class T>
T larger(T a, T b) {
  if constexpr (std::is_floating_point_v<T>)
    if (std::isnan(a) || std::isnan(b)) return std::isnan(a) ? a : b;
  return std::max(a, b);
}

template <class T>
void reduce_as(ReduceOp op, std::byte* out, const std::byte* left, const std::byte* right, size_t n) {
  // Integers wrap around: their sums are made unsigned, where that is defined.
  using Wrap = typename std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>, std::type_identity<T>>::type;
  auto each = [&](auto combine) {
    for (size_t i = 0; i < n; ++i) {
      T a, b;
      std::memcpy(&a, left + i * sizeof(T), sizeof(T));
      std::memcpy(&b, right + i * sizeof(T), sizeof(T));
      T c = static_cast<T>(combine(a, b));
      std::memcpy(out + i * sizeof(T), &c, sizeof(T));
    }
  };
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Avg:
      return each([](T a, T b) { return static_cast<Wrap>(a) + static_cast<Wrap>(b); });
    case ReduceOp::Product:
      return each([](T a, T b) { return static_cast<Wrap>(a) * static_cast<Wrap>(b); });
    case ReduceOp::Min:
      return each(smaller<T>);
    case ReduceOp::Max:
      return each(larger<T>);
    case ReduceOp::BAnd:
    case ReduceOp::BOr:
    case ReduceOp::BXor:
      if constexpr (std::is_integral_v<T>) {
        if (op == ReduceOp::BAnd) return each([](T a, T b) { return a & b; });
        if (op == ReduceOp::BOr) return each([](T a, T b) { return a | b; });
        return each([](T a, T b) { return a ^ b; });
      }
  }
  throw CollectiveError("collective_dtype",
                        "this reduction is not defined for floating point numbers: use an integer tensor");
}

void reduce_bool(ReduceOp op, std::byte* out, const std::byte* left, const std::byte* right, size_t n) {
  bool both = op == ReduceOp::Product || op == ReduceOp::Min || op == ReduceOp::BAnd;
  for (size_t i = 0; i < n; ++i) {
    bool a = left[i] != std::byte{0}, b = right[i] != std::byte{0};
    out[i] = static_cast<std::byte>(op == ReduceOp::BXor ? a != b : both ? a && b : a || b);
  }
}

template <class T>
void scale_as(std::byte* data, size_t n, uint64_t divisor) {
  for (size_t i = 0; i < n; ++i) {
    T a;
    std::memcpy(&a, data + i * sizeof(T), sizeof(T));
    a = static_cast<T>(a / static_cast<T>(divisor));
    std::memcpy(data + i * sizeof(T), &a, sizeof(T));
  }
}

[[noreturn]] void unknown(uint8_t dtype) {
  throw CollectiveError("collective_dtype", "no default kernel reduces dtype " + std::to_string(dtype) +
                                                ": give the engine its own kernels");
}

}  // namespace

void default_reduce(uint8_t dtype, ReduceOp op, std::byte* out, const std::byte* left, const std::byte* right,
                    size_t n) {
  switch (dtype) {
    case 0:
      return reduce_as<uint8_t>(op, out, left, right, n);
    case 3:
      return reduce_as<int32_t>(op, out, left, right, n);
    case 4:
      return reduce_as<int64_t>(op, out, left, right, n);
    case 6:
      return reduce_as<float>(op, out, left, right, n);
    case 7:
      return reduce_as<double>(op, out, left, right, n);
    case 11:
      return reduce_bool(op, out, left, right, n);
    default:
      unknown(dtype);
  }
}

void default_scale(uint8_t dtype, std::byte* data, size_t n, uint64_t divisor) {
  switch (dtype) {
    case 0:
      return n && divisor > 255 ? std::fill_n(data, n, std::byte{0}), void() : scale_as<uint8_t>(data, n, divisor);
    case 3:
      return scale_as<int32_t>(data, n, divisor);
    case 4:
      return scale_as<int64_t>(data, n, divisor);
    case 6:
      return scale_as<float>(data, n, divisor);
    case 7:
      return scale_as<double>(data, n, divisor);
    default:
      unknown(dtype);
  }
}

}  // namespace ergo
