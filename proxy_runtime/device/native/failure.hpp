// What went wrong with one message, and which exception the rank raises for it.
#pragma once

#include <stdexcept>
#include <string>

#include "ring.hpp"

namespace ergo::device {

// The rank's messages cannot be understood any more: the proxy stops serving that rank, and no other.
class ProtocolError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A request of the control socket cannot be met; `code` is stable (see proxy_runtime/device/client.py).
class ControlError : public std::runtime_error {
 public:
  ControlError(std::string code, const std::string& message) : std::runtime_error(message), code_(std::move(code)) {}
  const std::string& code() const { return code_; }

 private:
  std::string code_;
};

// An operation that failed: not fatal to the rank, reported as torch would.
struct Failure {
  Status status = Status::Runtime;
  std::string message;
};

// Maps the exception being handled. Call inside a catch block only; rethrows ProtocolError.
Failure current_failure();

}  // namespace ergo::device
