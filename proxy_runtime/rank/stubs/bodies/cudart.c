// The CUDA runtime of a rank: a device that can be looked at, but runs nothing.
//
// What torch.cuda and host code ask of the runtime (devices, streams, events, pinned memory) is answered here;
// everything else, launches above all, is refused by the generated stubs: the error is sticky, so that torch
// raises, and the call is counted. Streams and events are ordered by the channel to the device proxy, not here.
// Compiled against the cuda_runtime_api.h of the wheel, so that every layout is the wheel's own.
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "queue.h"
#include "refuse.h"

// ---- State and the exports for the interposer -----------------------------------------------------------------

enum { kMaxDevices = 64 };
static const size_t kDefaultMemory = 80ull << 30;  // bytes; the interposer tells the device's own

static int g_devices = 1;
static _Thread_local int t_device = 0;
static _Thread_local cudaError_t t_last = cudaSuccess;
static atomic_int g_sticky = cudaSuccess;
static atomic_ulong g_refused = 0;
static _Atomic(const char*) g_last_refused = NULL;
static atomic_int g_abort = 0;
static _Atomic(void (*)(void)) g_sync = NULL;
static _Atomic(void (*)(size_t*, size_t*)) g_memory = NULL;
static _Atomic(const struct ergo_queue*) g_queue = NULL;
static size_t g_pinned_size = 0;
static _Atomic(char*) g_pinned = NULL;

__attribute__((constructor)) static void read_environment(void) {
  const char* text = getenv("ERGO_STUB_DEVICES");
  if (!text) return;
  char* end = NULL;
  long n = strtol(text, &end, 10);
  if (end != text && *end == '\0' && n >= 0 && n <= kMaxDevices) {
    g_devices = (int)n;
  } else {
    fprintf(stderr, "ergosphere: ERGO_STUB_DEVICES is \"%s\", not a number from 0 to %d; using 1.\n", text,
            kMaxDevices);
  }
}

// How many devices this process sees, from 0.
ERGO_EXPORT void ergo_stub_set_devices(int n) { g_devices = n >= 0 && n <= kMaxDevices ? n : 0; }
// Runs at every host synchronisation (stream, event, device): waits for the device proxy.
ERGO_EXPORT void ergo_stub_set_sync(void (*hook)(void)) { atomic_store(&g_sync, hook); }
// Answers cudaMemGetInfo and the device's total memory, in bytes.
ERGO_EXPORT void ergo_stub_set_memory(void (*hook)(size_t* available, size_t* total)) { atomic_store(&g_memory, hook); }
// Memory that is pinned beside what cudaHostAlloc gives out: the channel's. Never unset.
ERGO_EXPORT void ergo_stub_set_pinned(void* begin, size_t size) {
  g_pinned_size = size;
  atomic_store(&g_pinned, begin);
}
// Streams and events become places in the channel's queue. Never unset.
ERGO_EXPORT void ergo_stub_set_queue(const struct ergo_queue* queue) { atomic_store(&g_queue, queue); }
// 1: a refused call ends the process with one sentence instead of returning a sticky error.
ERGO_EXPORT void ergo_stub_set_abort(int on) { atomic_store(&g_abort, on); }
// Refused calls of the CUDA runtime and driver so far, and the last one's name (NULL: none).
ERGO_EXPORT unsigned long ergo_stub_refused_count(void) { return atomic_load(&g_refused); }
ERGO_EXPORT const char* ergo_stub_last_refused(void) { return atomic_load(&g_last_refused); }

static const char* refusal(void) {
  static _Thread_local char text[320];
  snprintf(text, sizeof text,
           "Ergosphere refused %s: kernels and copies run in the device proxy, not in a rank, and this one was not "
           "called through a torch operator that is forwarded. Results of this process are no longer valid",
           atomic_load(&g_last_refused));
  return text;
}

ERGO_EXPORT void ergo_stub_record(const char* name) {
  atomic_store(&g_last_refused, name);
  atomic_fetch_add(&g_refused, 1);
  atomic_store(&g_sticky, cudaErrorNotSupported);
  if (atomic_load(&g_abort)) {
    fprintf(stderr, "ergosphere: %s.\n", refusal());
    abort();
  }
}

static cudaError_t fail(cudaError_t error) { return t_last = error; }

// A poisoned process reports its error from every call that orders or waits for device work.
static cudaError_t ordered(void) {
  const struct ergo_queue* queue = atomic_load(&g_queue);
  if (queue && queue->fault()) return cudaErrorAssert;
  return (cudaError_t)atomic_load(&g_sticky);
}

static cudaError_t synchronize(void) {
  void (*hook)(void) = atomic_load(&g_sync);
  if (hook) hook();
  return ordered();
}

static void memory(size_t* available, size_t* total) {
  *available = *total = kDefaultMemory;
  void (*hook)(size_t*, size_t*) = atomic_load(&g_memory);
  if (hook) hook(available, total);
}

// ---- Errors and versions --------------------------------------------------------------------------------------

static const struct {
  cudaError_t code;
  const char *name, *text;
} kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "CUDA graphs cannot be captured on an Ergosphere device; run the same code without torch.cuda.graph"},
    {cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
};

const char* cudaGetErrorName(cudaError_t error) {
  for (size_t i = 0; i < sizeof kErrors / sizeof *kErrors; ++i)
    if (kErrors[i].code == error) return kErrors[i].name;
  return "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t error) {
  const struct ergo_queue* queue = atomic_load(&g_queue);
  if (error == cudaErrorAssert && queue && queue->fault()) return queue->fault();
  if (error == cudaErrorNotSupported && atomic_load(&g_last_refused)) return refusal();
  for (size_t i = 0; i < sizeof kErrors / sizeof *kErrors; ++i)
    if (kErrors[i].code == error) return kErrors[i].text;
  return "unrecognized error code";
}
cudaError_t cudaPeekAtLastError(void) {
  cudaError_t sticky = ordered();
  return sticky != cudaSuccess ? sticky : t_last;
}
cudaError_t cudaGetLastError(void) {
  cudaError_t error = cudaPeekAtLastError();
  t_last = cudaSuccess;
  return error;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  return version ? (*version = CUDART_VERSION, cudaSuccess) : fail(cudaErrorInvalidValue);
}
cudaError_t cudaDriverGetVersion(int* version) { return cudaRuntimeGetVersion(version); }

#include "cudart_devices.h"

// ---- Memory ---------------------------------------------------------------------------------------------------

// Host ranges that cudaHostAlloc gave out or cudaHostRegister named: cudaPointerGetAttributes calls them host
// memory (torch's is_pinned). Few and long-lived: torch caches pinned blocks, so a list is enough.
struct host_range {
  struct host_range* next;
  char* begin;
  size_t size;
  int mapped;  // ours: cudaFreeHost unmaps it
};
static pthread_mutex_t g_host_lock = PTHREAD_MUTEX_INITIALIZER;
static struct host_range* g_host = NULL;

static int host_add(void* begin, size_t size, int mapped) {
  struct host_range* range = malloc(sizeof *range);
  if (!range) return 0;
  *range = (struct host_range){NULL, begin, size, mapped};
  pthread_mutex_lock(&g_host_lock);
  range->next = g_host;
  g_host = range;
  pthread_mutex_unlock(&g_host_lock);
  return 1;
}
static int host_remove(const void* begin, int mapped, size_t* size) {
  pthread_mutex_lock(&g_host_lock);
  struct host_range** at = &g_host;
  while (*at && ((*at)->begin != begin || (*at)->mapped != mapped)) at = &(*at)->next;
  struct host_range* found = *at;
  if (found) *at = found->next;
  pthread_mutex_unlock(&g_host_lock);
  if (!found) return 0;
  *size = found->size;
  free(found);
  return 1;
}
static int host_contains(const void* pointer) {
  const char* pinned = atomic_load(&g_pinned);
  if (pinned && (const char*)pointer >= pinned && (const char*)pointer < pinned + g_pinned_size) return 1;
  pthread_mutex_lock(&g_host_lock);
  const struct host_range* range = g_host;
  while (range && !((const char*)pointer >= range->begin && (const char*)pointer < range->begin + range->size))
    range = range->next;
  pthread_mutex_unlock(&g_host_lock);
  return range != NULL;
}

cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  if (!available || !total) return fail(cudaErrorInvalidValue);
  memory(available, total);
  return cudaSuccess;
}
// Device addresses are numbers that fault when the host dereferences them: no user address on x86-64 has a bit
// above 46 set. The interposer replaces torch's allocator, so only foreign code comes here.
static const uintptr_t kDeviceAddress = 0x5e00000000000000ull;
static int is_device_address(const void* pointer) { return ((uintptr_t)pointer >> 47) != 0; }

cudaError_t cudaMalloc(void** pointer, size_t size) {
  static atomic_uintptr_t next = 0;
  if (!pointer) return fail(cudaErrorInvalidValue);
  *pointer = size ? (void*)(kDeviceAddress + atomic_fetch_add(&next, (size + 511) & ~(size_t)511)) : NULL;
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) { return (void)pointer, cudaSuccess; }
cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned int flags) {
  (void)flags;
  if (!pointer) return fail(cudaErrorInvalidValue);
  *pointer = NULL;
  if (!size) return cudaSuccess;
  void* memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  if (!host_add(memory, size, 1)) return munmap(memory, size), fail(cudaErrorMemoryAllocation);
  *pointer = memory;
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** pointer, size_t size) { return cudaHostAlloc(pointer, size, cudaHostAllocDefault); }
cudaError_t cudaFreeHost(void* pointer) {
  size_t size;
  if (!pointer) return cudaSuccess;
  if (!host_remove(pointer, 1, &size)) return fail(cudaErrorInvalidValue);
  munmap(pointer, size);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned int flags) {
  (void)flags;
  if (!pointer || !size) return fail(cudaErrorInvalidValue);
  if (host_contains(pointer)) return fail(cudaErrorHostMemoryAlreadyRegistered);
  return host_add(pointer, size, 0) ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaHostUnregister(void* pointer) {
  size_t size;
  return host_remove(pointer, 0, &size) ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned int flags) {
  (void)flags;
  if (!device || !host_contains(host)) return fail(cudaErrorInvalidValue);
  *device = host;  // unified addressing
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* a, const void* pointer) {
  if (!a) return fail(cudaErrorInvalidValue);
  memset(a, 0, sizeof *a);
  a->device = t_device;
  if (is_device_address(pointer)) {
    a->type = cudaMemoryTypeDevice;
    a->devicePointer = (void*)pointer;
  } else if (host_contains(pointer)) {
    a->type = cudaMemoryTypeHost;
    a->devicePointer = a->hostPointer = (void*)pointer;
  } else {
    a->type = cudaMemoryTypeUnregistered;
    a->device = cudaInvalidDeviceId;
    a->hostPointer = (void*)pointer;
  }
  return cudaSuccess;
}

// ---- Streams and events ---------------------------------------------------------------------------------------

struct CUstream_st {
  unsigned long long id;
  unsigned int flags;
  int priority, device;
};
struct CUevent_st {
  unsigned int flags;
  uint64_t marker;          // of a timing event: the moment that the device keeps
  atomic_llong recorded;    // ns of CLOCK_MONOTONIC on the host; 0: not yet
  _Atomic(uint64_t) place;  // in the queue
};

static struct CUstream_st g_default_stream = {0, cudaStreamDefault, 0, 0};

static const struct CUstream_st* stream_of(cudaStream_t stream) {
  int is_default = stream == NULL || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
  return is_default ? &g_default_stream : stream;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int flags, int priority) {
  static atomic_ullong next_id = 1;
  if (!stream) return fail(cudaErrorInvalidValue);
  struct CUstream_st* s = malloc(sizeof *s);
  if (!s) return fail(cudaErrorMemoryAllocation);
  int clamped = priority < -5 ? -5 : priority > 0 ? 0 : priority;
  *s = (struct CUstream_st){atomic_fetch_add(&next_id, 1), flags, clamped, t_device};
  *stream = s;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (stream_of(stream) == &g_default_stream) return fail(cudaErrorInvalidResourceHandle);
  free(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  return *priority = stream_of(stream)->priority, cudaSuccess;
}
cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned int* flags) {
  return *flags = stream_of(stream)->flags, cudaSuccess;
}
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  return *id = stream_of(stream)->id, cudaSuccess;
}
cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
  const struct CUstream_st* s = stream_of(stream);
  *device = s == &g_default_stream ? t_device : s->device;
  return cudaSuccess;
}
// Refused without a lasting error: nothing was lost, and a caller that goes on without a graph is right to.
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  (void)stream;
  (void)mode;
  return fail(cudaErrorStreamCaptureUnsupported);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus* status) {
  (void)stream;
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, size_t* count) {
  (void)stream;
  if (status) *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (graph) *graph = NULL;
  if (dependencies) *dependencies = NULL;
  if (edges) *edges = NULL;
  if (count) *count = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode) {
  static _Thread_local enum cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  enum cudaStreamCaptureMode before = current;
  current = *mode;
  *mode = before;
  return cudaSuccess;
}
// The channel is one ordered queue: whatever was issued before is done before what is issued after, on any stream.
// Not an error that lasts: whoever asks goes on.
static cudaError_t ready(uint64_t place) {
  const struct ergo_queue* queue = atomic_load(&g_queue);
  cudaError_t error = ordered();
  return error == cudaSuccess && queue && !queue->passed(place) ? cudaErrorNotReady : error;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  (void)stream;
  const struct ergo_queue* queue = atomic_load(&g_queue);
  return ready(queue ? queue->record(0) : 0);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return (void)stream, synchronize(); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
  (void)stream, (void)flags;
  return event ? ordered() : fail(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
  if (!event) return fail(cudaErrorInvalidValue);
  struct CUevent_st* e = malloc(sizeof *e);
  if (!e) return fail(cudaErrorMemoryAllocation);
  static _Atomic(uint64_t) next_marker = 1;
  e->flags = flags;
  e->marker = flags & cudaEventDisableTiming ? 0 : atomic_fetch_add(&next_marker, 1);
  atomic_init(&e->recorded, 0);
  atomic_init(&e->place, 0);
  *event = e;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  if (!event) return fail(cudaErrorInvalidResourceHandle);
  const struct ergo_queue* queue = atomic_load(&g_queue);
  if (queue && event->marker && atomic_load(&event->recorded)) queue->forget(event->marker);
  free(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  (void)stream;
  if (!event) return fail(cudaErrorInvalidResourceHandle);
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const struct ergo_queue* queue = atomic_load(&g_queue);
  if (queue) atomic_store(&event->place, queue->record(event->marker));
  atomic_store(&event->recorded, now.tv_sec * 1000000000ll + now.tv_nsec);
  return ordered();
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int flags) {
  (void)flags;
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return event ? ready(atomic_load(&event->place)) : fail(cudaErrorInvalidResourceHandle);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (!event) return fail(cudaErrorInvalidResourceHandle);
  const struct ergo_queue* queue = atomic_load(&g_queue);
  return queue && queue->passed(atomic_load(&event->place)) ? ordered() : synchronize();
}
// Milliseconds between the moments at which the device came to the events; without a device, at which the host
// recorded them.
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  if (!ms) return fail(cudaErrorInvalidValue);
  if (!start || !end || ((start->flags | end->flags) & cudaEventDisableTiming))
    return fail(cudaErrorInvalidResourceHandle);
  long long from = atomic_load(&start->recorded), to = atomic_load(&end->recorded);
  if (!from || !to) return fail(cudaErrorInvalidResourceHandle);
  const struct ergo_queue* queue = atomic_load(&g_queue);
  if (queue)
    return queue->elapsed(start->marker, end->marker, ms) == 0 ? ordered() : fail(cudaErrorInvalidResourceHandle);
  *ms = to > from ? (float)((double)(to - from) * 1e-6) : 0.0f;
  return cudaSuccess;
}

// Nothing of the driver's log comes up in a rank.
cudaError_t cudaLogsRegisterCallback(cudaLogsCallback_t callback, void* data, cudaLogsCallbackHandle* handle) {
  (void)callback, (void)data;
  if (handle) *handle = NULL;
  return cudaSuccess;
}
cudaError_t cudaLogsUnregisterCallback(cudaLogsCallbackHandle handle) { return (void)handle, cudaSuccess; }
cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

// ---- The driver's entry points --------------------------------------------------------------------------------

typedef int (*get_proc_address)(const char*, void**, int, unsigned long long, int*);

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** pointer, unsigned int version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult* result) {
  if (!symbol || !pointer) return fail(cudaErrorInvalidValue);
  *pointer = NULL;
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  get_proc_address lookup = driver ? (get_proc_address)dlsym(driver, "cuGetProcAddress_v2") : NULL;
  int found = lookup && lookup(symbol, pointer, (int)version, flags, NULL) == 0;
  if (driver) dlclose(driver);
  if (result) *result = found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// ---- What compiled CUDA code calls when it is loaded ----------------------------------------------------------

static void* g_module = NULL;

ERGO_EXPORT void** __cudaRegisterFatBinary(void* binary) { return (void)binary, &g_module; }
ERGO_EXPORT void __cudaRegisterFatBinaryEnd(void** module) { (void)module; }
ERGO_EXPORT void __cudaUnregisterFatBinary(void** module) { (void)module; }
ERGO_EXPORT void __cudaRegisterFunction(void) {}
ERGO_EXPORT void __cudaRegisterVar(void) {}
ERGO_EXPORT void __cudaRegisterHostVar(void) {}
ERGO_EXPORT void __cudaRegisterManagedVar(void) {}
ERGO_EXPORT void __cudaRegisterUnifiedTable(void) {}
ERGO_EXPORT char __cudaInitModule(void** module) { return (void)module, 1; }
// The configuration of a launch that will be refused: anything defined will do.
ERGO_EXPORT unsigned int __cudaPushCallConfiguration(void) { return 0; }
ERGO_EXPORT cudaError_t __cudaPopCallConfiguration(struct dim3* grid, struct dim3* block, size_t* shared,
                                                   void* stream) {
  *grid = *block = (struct dim3){1, 1, 1};
  *shared = 0;
  *(void**)stream = NULL;
  return cudaSuccess;
}
ERGO_EXPORT cudaError_t __cudaGetKernel(void** kernel, const void* function) {
  return *kernel = (void*)function, cudaSuccess;
}
