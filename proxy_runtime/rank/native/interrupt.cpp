#include "interrupt.hpp"

#include <sys/syscall.h>
#include <torch/csrc/Exceptions.h>
#include <unistd.h>

namespace ergo::rank {

// Python's main thread is the process's first one: the interpreter of a rank is the program itself.
bool runs_signal_handlers() { return Py_IsInitialized() && syscall(SYS_gettid) == getpid(); }

void run_signal_handlers() {
  if (!runs_signal_handlers()) return;
  pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return;
  python_error error;
  error.persist();
  throw error;
}

}  // namespace ergo::rank
