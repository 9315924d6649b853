// What cuBLASLt says of itself. Everything else of it runs in the device proxy.
#include <stddef.h>

#include "defines/cublas_api.h"
#include "defines/cuda_runtime_api.h"
#include "property.h"

size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
size_t cublasLtGetCudartVersion(void) { return CUDART_VERSION; }
int cublasLtGetProperty(int property, int* value) {
  return ergo_property(property, value, CUBLAS_VER_MAJOR, CUBLAS_VER_MINOR, CUBLAS_VER_PATCH);
}
