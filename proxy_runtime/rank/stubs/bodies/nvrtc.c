// What NVRTC says of itself. Kernels are compiled where they run: in the device proxy.
#include "defines/cuda.h"

int nvrtcVersion(int* major, int* minor) { return *major = CUDA_VERSION / 1000, *minor = CUDA_VERSION % 1000 / 10, 0; }
