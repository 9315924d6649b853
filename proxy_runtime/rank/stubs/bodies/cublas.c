// What cuBLAS says of itself. Everything else of it runs in the device proxy.
#include <stddef.h>

#include "defines/cublas_api.h"
#include "defines/cuda_runtime_api.h"
#include "property.h"

int cublasGetVersion_v2(void* handle, int* version) { return (void)handle, *version = CUBLAS_VERSION, 0; }
int cublasGetVersion(void* handle, int* version) { return cublasGetVersion_v2(handle, version); }
int cublasGetProperty(int property, int* value) {
  return ergo_property(property, value, CUBLAS_VER_MAJOR, CUBLAS_VER_MINOR, CUBLAS_VER_PATCH);
}
size_t cublasGetCudartVersion(void) { return CUDART_VERSION; }
