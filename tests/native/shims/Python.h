// What gil.hpp needs of Python, for drivers without an interpreter: one lock that stands for the GIL, held by the
// threads that took it with shim_gil_lock().
#pragma once

#include <mutex>

using PyThreadState = std::mutex;

inline std::mutex shim_gil;
inline thread_local bool shim_gil_held = false;

inline void shim_gil_lock() {
  shim_gil.lock();
  shim_gil_held = true;
}
inline void shim_gil_unlock() {
  shim_gil_held = false;
  shim_gil.unlock();
}
inline int Py_IsInitialized() { return 1; }
inline int PyGILState_Check() { return shim_gil_held ? 1 : 0; }
inline PyThreadState* PyEval_SaveThread() {
  shim_gil_unlock();
  return &shim_gil;
}
inline void PyEval_RestoreThread(PyThreadState*) { shim_gil_lock(); }
