#include "failure.hpp"

#include <c10/util/Exception.h>

#include <new>
#include <string>

namespace ergo::device {
namespace {

// ATen's CPU allocator has no type of exception of its own for this.
bool is_exhausted(const std::string& message) { return message.find("DefaultCPUAllocator") != std::string::npos; }

// Words that scripts look for, as torch says them of a GPU.
std::string out_of_memory(const std::string& detail) { return "CUDA out of memory: " + detail; }

}  // namespace

Failure current_failure() {
  try {
    throw;
  } catch (const ProtocolError&) {
    throw;
  } catch (const c10::NotImplementedError& e) {
    return {Status::NotImplemented, e.what_without_backtrace()};
  } catch (const c10::IndexError& e) {
    return {Status::Index, e.what_without_backtrace()};
  } catch (const c10::ValueError& e) {
    return {Status::Value, e.what_without_backtrace()};
  } catch (const c10::TypeError& e) {
    return {Status::Type, e.what_without_backtrace()};
  } catch (const c10::OutOfMemoryError& e) {
    return {Status::OutOfMemory, out_of_memory(e.what_without_backtrace())};
  } catch (const c10::LinAlgError& e) {
    return {Status::LinAlg, e.what_without_backtrace()};
  } catch (const c10::Error& e) {
    const std::string message = e.what_without_backtrace();
    if (is_exhausted(message)) return {Status::OutOfMemory, out_of_memory(message)};
    return {Status::Runtime, message};
  } catch (const std::bad_alloc&) {
    return {Status::OutOfMemory, out_of_memory("an operation needed more than there is")};
  } catch (const std::exception& e) {
    return {Status::Runtime, e.what()};
  } catch (...) {
    return {Status::Runtime, "an operation failed on the device with an exception of unknown type"};
  }
}

}  // namespace ergo::device
