// What NVRTC says of itself. Kernels are compiled where they run: in the device proxy.
#include "defines/cuda.h"

int nvrtcVersion(int* major, int* minor) { return *major = CUDA_VERSION / 1000, *minor = CUDA_VERSION % 1000 / 10, 0; }

// Fusers and just-in-time operators of torch ask for a program; their caller raises what they are told.
int nvrtcCreateProgram(void** program, const char* source, const char* name, int n, const char* const* headers,
                       const char* const* names) {
  (void)source, (void)name, (void)n, (void)headers, (void)names;
  return *program = 0, 11;  // NVRTC_ERROR_INTERNAL_ERROR
}
const char* nvrtcGetErrorString(int result) {
  if (result == 0) return "NVRTC_SUCCESS";
  return "ergosphere: CUDA source cannot be compiled in a rank, whose device is in another process; use torch "
         "operators, "
         "which the device proxy executes";
}
