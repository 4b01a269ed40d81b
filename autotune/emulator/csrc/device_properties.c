/* cudaDeviceProp, whose layout differs between releases: the one file that needs NVIDIA's headers. */
#include <cuda_runtime_api.h>
#include "emu.h"

int emu_error(int error);

static void fill(struct cudaDeviceProp *p, const Card *card) {
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", card->name);
  emu_uuid(card, (unsigned char *)p->uuid.bytes);
  p->totalGlobalMem = card->memory;
  p->sharedMemPerBlock = emu_attribute(card, 8);
  p->regsPerBlock = p->regsPerMultiprocessor = emu_attribute(card, 12);
  p->warpSize = 32;
  p->memPitch = 2147483647;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = card->major;
  p->minor = card->minor;
  p->textureAlignment = 512;
  p->multiProcessorCount = card->multiprocessors;
  p->canMapHostMemory = p->concurrentKernels = p->ECCEnabled = p->unifiedAddressing = 1;
  p->pciBusID = emu_attribute(card, 33);
  p->asyncEngineCount = 3;
  p->memoryBusWidth = card->bus_bits;
  p->l2CacheSize = card->l2_mib << 20;
  p->persistingL2CacheMaxSize = emu_attribute(card, 108);
  p->maxThreadsPerMultiProcessor = emu_attribute(card, 39);
  p->streamPrioritiesSupported = p->globalL1CacheSupported = p->localL1CacheSupported = 1;
  p->sharedMemPerMultiprocessor = (size_t)card->shared_kib << 10;
  p->sharedMemPerBlockOptin = emu_attribute(card, 97);
  p->reservedSharedMemPerBlock = 1024;
  p->managedMemory = p->concurrentManagedAccess = p->computePreemptionSupported = 1;
  p->canUseHostPointerForRegisteredMem = p->cooperativeLaunch = p->hostRegisterSupported = 1;
  p->maxBlocksPerMultiProcessor = 32;
  p->memoryPoolsSupported = p->ipcEventSupported = p->unifiedFunctionPointers = 1;
  p->clusterLaunch = card->major >= 9;
#if CUDART_VERSION < 13000
  p->clockRate = card->clock_khz;
  p->memoryClockRate = 1215000;
#endif
}

#undef cudaGetDeviceProperties
ENTRY cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  int failed = emu_initialise();
  if (!failed && (device < 0 || device >= machine.visible)) failed = INVALID_DEVICE;
  if (!failed) fill(properties, emu_card(device));
  return emu_error(failed);
}

ENTRY cudaError_t cudaGetDeviceProperties_v2(struct cudaDeviceProp *properties, int device) {
  return cudaGetDeviceProperties(properties, device);
}
