// What nvJitLink says of itself. Kernels are linked where they run: in the device proxy.
#include "defines/cuda.h"

int nvJitLinkVersion(unsigned* major, unsigned* minor) {
  return *major = CUDA_VERSION / 1000, *minor = CUDA_VERSION % 1000 / 10, 0;
}
