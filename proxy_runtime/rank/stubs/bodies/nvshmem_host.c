// What NVSHMEM says of itself. Everything else of it needs a device.
#include "defines/nvshmem_version.h"

void nvshmemx_vendor_get_version_info(int* major, int* minor, int* patch) {
  *major = NVSHMEM_VENDOR_MAJOR_VERSION, *minor = NVSHMEM_VENDOR_MINOR_VERSION, *patch = NVSHMEM_VENDOR_PATCH_VERSION;
}
