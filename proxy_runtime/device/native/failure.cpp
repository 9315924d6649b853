#include "failure.hpp"

#include <c10/util/Exception.h>

#include <new>

namespace ergo::device {

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
    return {Status::OutOfMemory, e.what_without_backtrace()};
  } catch (const c10::LinAlgError& e) {
    return {Status::LinAlg, e.what_without_backtrace()};
  } catch (const c10::Error& e) {
    return {Status::Runtime, e.what_without_backtrace()};
  } catch (const std::bad_alloc&) {
    return {Status::OutOfMemory, "the device is out of memory"};
  } catch (const std::exception& e) {
    return {Status::Runtime, e.what()};
  } catch (...) {
    return {Status::Runtime, "an operation failed on the device with an exception of unknown type"};
  }
}

}  // namespace ergo::device
