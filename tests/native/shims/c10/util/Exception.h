// What the torch-free drivers need of torch's header of this name, so that channel.cpp compiles without torch.
#pragma once

#include <c10/macros/Macros.h>

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace c10 {
struct SourceLocation {
  const char* function;
  const char* file;
  uint32_t line;
};
struct AcceleratorError : std::runtime_error {
  AcceleratorError(SourceLocation, int32_t, const std::string& message) : std::runtime_error(message) {}
};
}  // namespace c10

namespace shim {
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}
}  // namespace shim

#define TORCH_CHECK(condition, ...)              \
  do {                                           \
    if (!(condition)) ::shim::fail(__VA_ARGS__); \
  } while (false)
#define C10_THROW_ERROR(type, message) ::shim::fail(#type, ": ", message)
