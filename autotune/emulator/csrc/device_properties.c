/* cudaDeviceProp, whose layout differs between releases: the one file that needs NVIDIA's
 * headers. */
#include <cuda_runtime_api.h>
#include "emu.h"

static void fill(struct cudaDeviceProp *properties, const Card *card) {
  struct cudaDeviceProp *p = properties;
  memset(p, 0, sizeof *p);

  /* 1. What cards differ in. */
  snprintf(p->name, sizeof p->name, "%s", card->name);
  emu_uuid(card, (unsigned char *)p->uuid.bytes);
  p->major = card->major;
  p->minor = card->minor;
  p->totalGlobalMem = card->memory;
  p->multiProcessorCount = card->multiprocessors;
  p->maxThreadsPerMultiProcessor = emu_attribute(card, THREADS_PER_MULTIPROCESSOR);
  p->sharedMemPerMultiprocessor = (size_t)card->shared_kib << 10;
  p->sharedMemPerBlockOptin = emu_attribute(card, SHARED_MEMORY_PER_BLOCK_OPTIN);
  p->memoryBusWidth = card->bus_bits;
  p->l2CacheSize = card->l2_mib << 20;
  p->persistingL2CacheMaxSize = emu_attribute(card, MAX_PERSISTING_L2_CACHE_SIZE);
  p->pciBusID = emu_attribute(card, PCI_BUS_ID);
  p->clusterLaunch = card->major >= 9;

  /* 2. What they have in common. */
  p->sharedMemPerBlock = emu_attribute(card, SHARED_MEMORY_PER_BLOCK);
  p->regsPerBlock = p->regsPerMultiprocessor = emu_attribute(card, REGISTERS_PER_BLOCK);
  p->warpSize = 32;
  p->memPitch = 2147483647;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->textureAlignment = 512;
  p->asyncEngineCount = 3;
  p->reservedSharedMemPerBlock = 1024;
  p->maxBlocksPerMultiProcessor = 32;

  /* 3. What all of them can. */
  p->canMapHostMemory = p->concurrentKernels = p->ECCEnabled = p->unifiedAddressing = 1;
  p->streamPrioritiesSupported = p->globalL1CacheSupported = p->localL1CacheSupported = 1;
  p->managedMemory = p->concurrentManagedAccess = p->computePreemptionSupported = 1;
  p->canUseHostPointerForRegisteredMem = p->cooperativeLaunch = p->hostRegisterSupported = 1;
  p->memoryPoolsSupported = p->ipcEventSupported = p->unifiedFunctionPointers = 1;
#if CUDART_VERSION < 13000
  p->clockRate = card->clock_khz;
  p->memoryClockRate = 1215000;
#endif
}

#undef cudaGetDeviceProperties
ENTRY cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  int error = emu_initialise();
  if (!error && (device < 0 || device >= machine.visible)) error = INVALID_DEVICE;
  if (!error) fill(properties, emu_card(device));
  return emu_error(error);
}

ENTRY cudaError_t cudaGetDeviceProperties_v2(struct cudaDeviceProp *properties, int device) {
  return cudaGetDeviceProperties(properties, device);
}
