// What cuDNN says of itself. Everything else of it runs in the device proxy.
#include <stddef.h>

#include "defines/cuda_runtime_api.h"
#include "defines/cudnn_version.h"
#include "property.h"

size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion(void) { return CUDART_VERSION; }
int cudnnGetProperty(int property, int* value) {
  return ergo_property(property, value, CUDNN_MAJOR, CUDNN_MINOR, CUDNN_PATCHLEVEL);
}
