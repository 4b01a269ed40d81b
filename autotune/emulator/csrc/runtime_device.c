/* The runtime about devices and errors. */
#include "emu.h"

static __thread int last_error;

int emu_error(int error) {
  if (error) last_error = error;
  return error;
}

static int valid(int device) {
  int failed = emu_initialise();
  if (failed) return failed;
  return device >= 0 && device < machine.visible ? SUCCESS : INVALID_DEVICE;
}

ENTRY int cudaGetDeviceCount(int *count) {
  int failed = emu_initialise();
  *count = failed ? 0 : machine.visible;
  return emu_error(failed);
}

ENTRY int cudaGetDevice(int *device) { *device = emu_device(); return SUCCESS; }

ENTRY int cudaSetDevice(int device) {
  int failed = valid(device);
  if (failed) return emu_error(failed);
  emu_set_device(device);
  return emu_error(emu_enter(device));
}

ENTRY int cudaInitDevice(int device, unsigned flags, unsigned more) { return cudaSetDevice(device); }

ENTRY int cudaDriverGetVersion(int *version) { *version = machine.driver_version; return SUCCESS; }
ALIAS(cuDriverGetVersion, cudaDriverGetVersion)

ENTRY int cudaRuntimeGetVersion(int *version) { *version = machine.runtime_version; return SUCCESS; }

ENTRY int cudaGetLastError(void) {
  int error = last_error;
  last_error = SUCCESS;
  return error;
}

ENTRY int cudaPeekAtLastError(void) { return last_error; }

static const struct { int number; const char *runtime, *driver, *words; } ERRORS[] = {
  {SUCCESS, "cudaSuccess", "CUDA_SUCCESS", "no error"},
  {INVALID_VALUE, "cudaErrorInvalidValue", "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
  {OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
  {NOT_INITIALIZED, "cudaErrorInitializationError", "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
  {DEVICES_UNAVAILABLE, "cudaErrorDevicesUnavailable", "CUDA_ERROR_DEVICE_UNAVAILABLE",
   "CUDA-capable device(s) is/are busy or unavailable"},
  {NO_DEVICE, "cudaErrorNoDevice", "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
  {INVALID_DEVICE, "cudaErrorInvalidDevice", "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
  {NOT_FOUND, "cudaErrorSymbolNotFound", "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
  {600, "cudaErrorNotReady", "CUDA_ERROR_NOT_READY", "device not ready"},
  {704, "cudaErrorPeerAccessAlreadyEnabled", "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
  {800, "cudaErrorNotPermitted", "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
  {NOT_SUPPORTED, "cudaErrorNotSupported", "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
};
enum { KNOWN_ERRORS = sizeof ERRORS / sizeof *ERRORS };

static int place_of(int error) {
  for (int i = 0; i < KNOWN_ERRORS; i++)
    if (ERRORS[i].number == error) return i;
  return -1;
}

ENTRY const char *cudaGetErrorName(int error) {
  int at = place_of(error);
  return at < 0 ? "cudaErrorUnknown" : ERRORS[at].runtime;
}

ENTRY const char *cudaGetErrorString(int error) {
  int at = place_of(error);
  return at < 0 ? "unknown error" : ERRORS[at].words;
}

ENTRY int cuGetErrorName(int error, const char **name) {
  int at = place_of(error);
  *name = at < 0 ? "CUDA_ERROR_UNKNOWN" : ERRORS[at].driver;
  return SUCCESS;
}

ENTRY int cuGetErrorString(int error, const char **words) { *words = cudaGetErrorString(error); return SUCCESS; }

ENTRY int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  int failed = valid(device);
  if (!failed) *value = emu_attribute(emu_card(device), attribute);
  return emu_error(failed);
}

ENTRY int cudaDeviceGetPCIBusId(char *text, int size, int device) {
  snprintf(text, size, "0000:%02X:00.0", emu_attribute(emu_card(device), 33));
  return emu_error(valid(device));
}
ALIAS(cuDeviceGetPCIBusId, cudaDeviceGetPCIBusId)

ENTRY int cudaDeviceGetByPCIBusId(int *device, const char *text) {
  unsigned domain = 0, bus = 0;
  sscanf(text, "%x:%x", &domain, &bus);
  for (int i = 0; i < emu_visible(); i++)
    if (emu_attribute(emu_card(i), 33) == (int)bus) {
      *device = i;
      return SUCCESS;
    }
  return emu_error(INVALID_DEVICE);
}

ENTRY int cudaDeviceCanAccessPeer(int *can, int one, int other) { *can = one != other; return SUCCESS; }
ALIAS(cuDeviceCanAccessPeer, cudaDeviceCanAccessPeer)

ENTRY int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return SUCCESS;
}
ALIAS(cuCtxGetStreamPriorityRange, cudaDeviceGetStreamPriorityRange)

/* Of the stack, of printf's buffer and of the heap of kernels, as on a card that nobody has set otherwise. */
ENTRY int cudaDeviceGetLimit(size_t *value, int limit) {
  *value = limit == 0 ? 1024 : limit == 2 ? 8 << 20 : 1 << 20;
  return SUCCESS;
}
ALIAS(cuCtxGetLimit, cudaDeviceGetLimit)
