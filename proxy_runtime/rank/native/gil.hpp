// Gives up Python's global lock for a scope, if this thread holds it.
#pragma once

#include <Python.h>

namespace ergo::rank {

// Threads of the autograd engine wait without the lock, Python threads with it: both must be able to wait
// for the device without keeping every other Python thread from running.
class GilRelease {
 public:
  GilRelease() {
    if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
  }
  ~GilRelease() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_ = nullptr;
};

}  // namespace ergo::rank
