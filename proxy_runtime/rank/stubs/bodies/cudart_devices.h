// Part of cudart.c: what it says about its devices. Included there once, after the state that it uses.
#pragma once

// ---- Devices --------------------------------------------------------------------------------------------------

static int is_device(int device) { return device >= 0 && device < g_devices; }

cudaError_t cudaGetDeviceCount(int* count) {
  if (!count) return fail(cudaErrorInvalidValue);
  *count = g_devices;
  return g_devices ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* device) {
  return device ? (*device = t_device, cudaSuccess) : fail(cudaErrorInvalidValue);
}
cudaError_t cudaSetDevice(int device) {
  return is_device(device) ? (t_device = device, cudaSuccess) : fail(cudaErrorInvalidDevice);
}
cudaError_t cudaInitDevice(int device, unsigned int device_flags, unsigned int flags) {
  (void)device_flags, (void)flags;
  return is_device(device) ? cudaSuccess : fail(cudaErrorInvalidDevice);
}
cudaError_t cudaSetDeviceFlags(unsigned int flags) { return (void)flags, cudaSuccess; }
cudaError_t cudaGetDeviceFlags(unsigned int* flags) {
  return flags ? (*flags = 0, cudaSuccess) : fail(cudaErrorInvalidValue);
}
cudaError_t cudaSetValidDevices(int* devices, int count) { return (void)devices, (void)count, cudaSuccess; }
cudaError_t cudaChooseDevice(int* device, const struct cudaDeviceProp* wanted) {
  (void)wanted;
  return device && g_devices ? (*device = 0, cudaSuccess) : fail(cudaErrorInvalidValue);
}
cudaError_t cudaDeviceReset(void) { return synchronize(); }
cudaError_t cudaDeviceSynchronize(void) { return synchronize(); }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  if (!can) return fail(cudaErrorInvalidValue);
  if (!is_device(device) || !is_device(peer)) return fail(cudaErrorInvalidDevice);
  *can = device != peer;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int flags) {
  return (void)flags, is_device(peer) ? cudaSuccess : fail(cudaErrorInvalidDevice);
}
cudaError_t cudaDeviceDisablePeerAccess(int peer) {
  return is_device(peer) ? cudaSuccess : fail(cudaErrorInvalidDevice);
}
cudaError_t cudaDeviceGetP2PAttribute(int* value, enum cudaDeviceP2PAttr attribute, int source, int target) {
  (void)attribute, (void)source, (void)target;
  return value ? (*value = 0, cudaSuccess) : fail(cudaErrorInvalidValue);
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
  if (!id || length < 13) return fail(cudaErrorInvalidValue);
  if (!is_device(device)) return fail(cudaErrorInvalidDevice);
  snprintf(id, (size_t)length, "0000:%02x:00.0", (unsigned)device + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* id) {
  unsigned domain, bus;
  if (!device || !id) return fail(cudaErrorInvalidValue);
  if (sscanf(id, "%x:%x:", &domain, &bus) != 2 || !is_device((int)bus - 1)) return fail(cudaErrorInvalidDevice);
  *device = (int)bus - 1;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* p, int device) {
  if (!p) return fail(cudaErrorInvalidValue);
  if (!is_device(device)) return fail(cudaErrorInvalidDevice);
  size_t available, total;
  memory(&available, &total);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "Ergosphere device");
  snprintf((char*)&p->uuid, sizeof p->uuid, "ergosphere-%03d", device);
  p->totalGlobalMem = total;
  p->sharedMemPerBlock = 48 << 10;
  p->sharedMemPerBlockOptin = 227 << 10;
  p->sharedMemPerMultiprocessor = 228 << 10;
  p->reservedSharedMemPerBlock = 1 << 10;
  p->regsPerBlock = p->regsPerMultiprocessor = 64 << 10;
  p->warpSize = 32;
  p->memPitch = 0x7fffffff;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 0x7fffffff, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->totalConstMem = 64 << 10;
  p->major = 9, p->minor = 0;
  p->multiProcessorCount = 132;
  p->textureAlignment = 512, p->texturePitchAlignment = 32, p->surfaceAlignment = 512;
  p->l2CacheSize = 50 << 20;
  p->memoryBusWidth = 5120;
  p->asyncEngineCount = 3;
  p->pciBusID = device + 1;
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->streamPrioritiesSupported = 1;
  p->globalL1CacheSupported = p->localL1CacheSupported = p->computePreemptionSupported = 1;
  p->cooperativeLaunch = p->hostRegisterSupported = p->canUseHostPointerForRegisteredMem = 1;
  return cudaSuccess;
}

// What is not listed is 0: a feature that is off, so that no library builds on it.
cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int device) {
  struct cudaDeviceProp p;
  if (!value) return fail(cudaErrorInvalidValue);
  cudaError_t error = cudaGetDeviceProperties(&p, device);
  if (error != cudaSuccess) return error;
  switch ((int)attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = p.maxThreadsPerBlock;
      break;
    case cudaDevAttrMaxBlockDimX:
      *value = p.maxThreadsDim[0];
      break;
    case cudaDevAttrMaxBlockDimY:
      *value = p.maxThreadsDim[1];
      break;
    case cudaDevAttrMaxBlockDimZ:
      *value = p.maxThreadsDim[2];
      break;
    case cudaDevAttrMaxGridDimX:
      *value = p.maxGridSize[0];
      break;
    case cudaDevAttrMaxGridDimY:
      *value = p.maxGridSize[1];
      break;
    case cudaDevAttrMaxGridDimZ:
      *value = p.maxGridSize[2];
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = (int)p.sharedMemPerBlock;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = (int)p.sharedMemPerBlockOptin;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = (int)p.sharedMemPerMultiprocessor;
      break;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      *value = (int)p.reservedSharedMemPerBlock;
      break;
    case cudaDevAttrTotalConstantMemory:
      *value = (int)p.totalConstMem;
      break;
    case cudaDevAttrWarpSize:
      *value = p.warpSize;
      break;
    case cudaDevAttrMaxPitch:
      *value = (int)p.memPitch;
      break;
    case cudaDevAttrMaxRegistersPerBlock:
      *value = p.regsPerBlock;
      break;
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      *value = p.regsPerMultiprocessor;
      break;
    case cudaDevAttrClockRate:
      *value = 1980000;
      break;  // kHz
    case cudaDevAttrMemoryClockRate:
      *value = 2619000;
      break;  // kHz
    case cudaDevAttrGlobalMemoryBusWidth:
      *value = p.memoryBusWidth;
      break;
    case cudaDevAttrL2CacheSize:
      *value = p.l2CacheSize;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = p.maxThreadsPerMultiProcessor;
      break;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      *value = p.maxBlocksPerMultiProcessor;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = p.multiProcessorCount;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = p.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = p.minor;
      break;
    case cudaDevAttrTextureAlignment:
      *value = (int)p.textureAlignment;
      break;
    case cudaDevAttrTexturePitchAlignment:
      *value = (int)p.texturePitchAlignment;
      break;
    case cudaDevAttrSurfaceAlignment:
      *value = (int)p.surfaceAlignment;
      break;
    case cudaDevAttrPciBusId:
      *value = p.pciBusID;
      break;
    case cudaDevAttrAsyncEngineCount:
      *value = p.asyncEngineCount;
      break;
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrGlobalL1CacheSupported:
    case cudaDevAttrLocalL1CacheSupported:
    case cudaDevAttrComputePreemptionSupported:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
      *value = 1;
      break;
    default:
      *value = 0;
      break;
  }
  return cudaSuccess;
}
