/* Errors of the runtime and of the driver: names and texts, and the last one of each thread. */
#include "emu.h"

static __thread int last_error;

static const struct {
  int number;
  const char *runtime_name, *driver_name, *text;
} ERRORS[] = {
  {SUCCESS, "cudaSuccess", "CUDA_SUCCESS", "no error"},
  {INVALID_VALUE, "cudaErrorInvalidValue", "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
  {OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
  {NOT_INITIALIZED, "cudaErrorInitializationError", "CUDA_ERROR_NOT_INITIALIZED",
   "initialization error"},
  {DEVICES_UNAVAILABLE, "cudaErrorDevicesUnavailable", "CUDA_ERROR_DEVICE_UNAVAILABLE",
   "CUDA-capable device(s) is/are busy or unavailable"},
  {NO_DEVICE, "cudaErrorNoDevice", "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
  {INVALID_DEVICE, "cudaErrorInvalidDevice", "CUDA_ERROR_INVALID_DEVICE",
   "invalid device ordinal"},
  {NOT_FOUND, "cudaErrorSymbolNotFound", "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
  {NOT_READY, "cudaErrorNotReady", "CUDA_ERROR_NOT_READY", "device not ready"},
  {PEER_ACCESS_ALREADY_ENABLED, "cudaErrorPeerAccessAlreadyEnabled",
   "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
  {NOT_PERMITTED, "cudaErrorNotPermitted", "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
  {NOT_SUPPORTED, "cudaErrorNotSupported", "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
};
enum { ERROR_COUNT = sizeof ERRORS / sizeof *ERRORS };

static int place_of(int error) {
  for (int i = 0; i < ERROR_COUNT; i++)
    if (ERRORS[i].number == error) return i;
  return -1;
}

int emu_error(int error) {
  if (error) last_error = error;
  return error;
}

ENTRY int cudaGetLastError(void) {
  int error = last_error;
  last_error = SUCCESS;
  return error;
}

ENTRY int cudaPeekAtLastError(void) { return last_error; }

ENTRY const char *cudaGetErrorName(int error) {
  int place = place_of(error);
  return place < 0 ? "cudaErrorUnknown" : ERRORS[place].runtime_name;
}

ENTRY const char *cudaGetErrorString(int error) {
  int place = place_of(error);
  return place < 0 ? "unknown error" : ERRORS[place].text;
}

ENTRY int cuGetErrorName(int error, const char **name) {
  int place = place_of(error);
  *name = place < 0 ? "CUDA_ERROR_UNKNOWN" : ERRORS[place].driver_name;
  return SUCCESS;
}

ENTRY int cuGetErrorString(int error, const char **text) {
  *text = cudaGetErrorString(error);
  return SUCCESS;
}
