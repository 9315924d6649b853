// The CUDA driver of a rank (libcuda.so.1): devices and contexts can be asked for, nothing runs.
//
// Its state is the runtime stub's, found by name among the loaded libraries: one count of refused calls, one
// current device. What has no body here is refused by the generated stubs.
// Compiled against the cuda.h of the wheel.
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "refuse.h"

enum { kMaxDevices = 64 };

// A function of the runtime stub. The soname is enough: the stub is loaded before anything needs the real one.
static void* runtime(const char* name) {
  static void* library = NULL;
  if (!library) library = dlopen(ERGO_CUDART_SONAME, RTLD_LAZY | RTLD_NOLOAD);
  return library ? dlsym(library, name) : NULL;
}
// cudaError_t and CUresult share their numbers for all errors that the runtime stub returns.
static CUresult call_int(const char* name, int* value) {
  int (*function)(int*) = (int (*)(int*))runtime(name);
  return function ? (CUresult)function(value) : CUDA_ERROR_NOT_INITIALIZED;
}

void ergo_stub_record(const char* name) {
  void (*record)(const char*) = (void (*)(const char*))runtime("ergo_stub_record");
  if (record) record(name);
}

static int device_count(void) {
  int count = 0;
  return call_int("cudaGetDeviceCount", &count) == CUDA_SUCCESS ? count : 0;
}
static int is_device(CUdevice device) { return device >= 0 && device < device_count(); }

CUresult cuInit(unsigned int flags) { return (void)flags, device_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
CUresult cuDriverGetVersion(int* version) {
  return version ? (*version = CUDA_VERSION, CUDA_SUCCESS) : CUDA_ERROR_INVALID_VALUE;
}

static const struct {
  CUresult code;
  const char *name, *text;
} kErrors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED",
     "operation not supported: kernels run in the device proxy, not in a rank (Ergosphere)"},
};
CUresult cuGetErrorName(CUresult error, const char** text) {
  for (size_t i = 0; i < sizeof kErrors / sizeof *kErrors; ++i)
    if (kErrors[i].code == error) return *text = kErrors[i].name, CUDA_SUCCESS;
  return *text = NULL, CUDA_ERROR_INVALID_VALUE;
}
CUresult cuGetErrorString(CUresult error, const char** text) {
  for (size_t i = 0; i < sizeof kErrors / sizeof *kErrors; ++i)
    if (kErrors[i].code == error) return *text = kErrors[i].text, CUDA_SUCCESS;
  return *text = NULL, CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceGetCount(int* count) {
  return count ? (*count = device_count(), CUDA_SUCCESS) : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (!device) return CUDA_ERROR_INVALID_VALUE;
  return is_device(ordinal) ? (*device = ordinal, CUDA_SUCCESS) : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  if (!name || length <= 0) return CUDA_ERROR_INVALID_VALUE;
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  snprintf(name, (size_t)length, "Ergosphere device");
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  if (!uuid) return CUDA_ERROR_INVALID_VALUE;
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  snprintf((char*)uuid, sizeof *uuid, "ergosphere-%03d", device);  // as cudaGetDeviceProperties
  return CUDA_SUCCESS;
}
CUresult cuMemGetInfo_v2(size_t* available, size_t* total) {
  int (*function)(size_t*, size_t*) = (int (*)(size_t*, size_t*))runtime("cudaMemGetInfo");
  return function ? (CUresult)function(available, total) : CUDA_ERROR_NOT_INITIALIZED;
}
CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  size_t available;
  return is_device(device) ? cuMemGetInfo_v2(&available, bytes) : CUDA_ERROR_INVALID_DEVICE;
}
// The numbers of CU_DEVICE_ATTRIBUTE_* and cudaDevAttr* are the same.
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  int (*function)(int*, int, int) = (int (*)(int*, int, int))runtime("cudaDeviceGetAttribute");
  return function ? (CUresult)function(value, (int)attribute, device) : CUDA_ERROR_NOT_INITIALIZED;
}
CUresult cuDeviceComputeCapability(int* major, int* minor, CUdevice device) {
  CUresult error = cuDeviceGetAttribute(major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
  return error ? error : cuDeviceGetAttribute(minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
}
CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  if (!can) return CUDA_ERROR_INVALID_VALUE;
  return is_device(device) && is_device(peer) ? (*can = device != peer, CUDA_SUCCESS) : CUDA_ERROR_INVALID_DEVICE;
}

// ---- Contexts: every device has its primary one, which is the address of its entry here -------------------------

static char g_contexts[kMaxDevices];

CUresult cuCtxGetDevice(CUdevice* device) {
  return device ? call_int("cudaGetDevice", device) : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  int device;
  CUresult error = cuCtxGetDevice(&device);
  if (error == CUDA_SUCCESS) *context = (CUcontext)&g_contexts[device];
  return error;
}
CUresult cuCtxSetCurrent(CUcontext context) {
  uintptr_t index = (uintptr_t)context - (uintptr_t)g_contexts;
  if (!context) return CUDA_SUCCESS;  // unbinding: the primary context stays
  if (index >= kMaxDevices) return CUDA_ERROR_INVALID_CONTEXT;
  int (*function)(int) = (int (*)(int))runtime("cudaSetDevice");
  return function ? (CUresult)function((int)index) : CUDA_ERROR_NOT_INITIALIZED;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int* flags, int* active) {
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  if (flags) *flags = 0;
  if (active) *active = 1;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  if (!context) return CUDA_ERROR_INVALID_VALUE;
  return is_device(device) ? (*context = (CUcontext)&g_contexts[device], CUDA_SUCCESS) : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  return is_device(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned int flags) {
  (void)flags;
  return is_device(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuCtxGetApiVersion(CUcontext context, unsigned int* version) {
  (void)context;
  return version ? (*version = CUDA_VERSION, CUDA_SUCCESS) : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return CUDA_SUCCESS;
}
CUresult cuCtxSynchronize(void) {
  int (*function)(void) = (int (*)(void))runtime("cudaDeviceSynchronize");
  return function ? (CUresult)function() : CUDA_ERROR_NOT_INITIALIZED;
}
CUresult cuStreamSynchronize(CUstream stream) { return (void)stream, cuCtxSynchronize(); }
CUresult cuStreamQuery(CUstream stream) { return (void)stream, CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  (void)stream;
  return *status = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS;
}

// Nothing of the driver's log comes up in a rank.
CUresult cuLogsRegisterCallback(CUlogsCallback callback, void* data, CUlogsCallbackHandle* handle) {
  (void)callback, (void)data;
  if (handle) *handle = NULL;
  return CUDA_SUCCESS;
}
CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle handle) { return (void)handle, CUDA_SUCCESS; }

// ---- Entry points by name -----------------------------------------------------------------------------------------

// The newest variant of a function that this stub has; what it does is the same for all of them.
CUresult cuGetProcAddress_v2(const char* symbol, void** function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult* status) {
  (void)version, (void)flags;
  static const char* const kSuffixes[] = {"_v4", "_v3", "_v2", ""};
  if (!symbol || !function) return CUDA_ERROR_INVALID_VALUE;
  *function = NULL;
  void* self = dlopen(ERGO_SONAME, RTLD_LAZY | RTLD_NOLOAD);
  for (size_t i = 0; self && !*function && i < sizeof kSuffixes / sizeof *kSuffixes; ++i) {
    char name[128];
    if (snprintf(name, sizeof name, "%s%s", symbol, kSuffixes[i]) < (int)sizeof name) *function = dlsym(self, name);
  }
  if (self) dlclose(self);
  if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
#undef cuGetProcAddress
CUresult cuGetProcAddress(const char* symbol, void** function, int version, cuuint64_t flags) {
  return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
// Private tables of the driver, which a statically linked runtime asks for: there are none, and that is no launch.
CUresult cuGetExportTable(const void** table, const CUuuid* id) {
  (void)id;
  if (table) *table = NULL;
  return CUDA_ERROR_NOT_FOUND;
}
