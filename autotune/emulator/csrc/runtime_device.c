/* The runtime: devices. */
#include "emu.h"

static int check(int device) {
  int error = emu_initialise();
  if (error) return error;
  return device >= 0 && device < machine.visible ? SUCCESS : INVALID_DEVICE;
}

ENTRY int cudaGetDeviceCount(int *count) {
  int error = emu_initialise();
  *count = error ? 0 : machine.visible;
  return emu_error(error);
}

ENTRY int cudaGetDevice(int *device) {
  *device = emu_device();
  return SUCCESS;
}

ENTRY int cudaSetDevice(int device) {
  int error = check(device);
  if (error) return emu_error(error);
  emu_set_device(device);
  return emu_error(emu_enter(device));
}

ENTRY int cudaInitDevice(int device, unsigned device_flags, unsigned flags) {
  return cudaSetDevice(device);
}

ENTRY int cudaDriverGetVersion(int *version) {
  *version = machine.driver_version;
  return SUCCESS;
}
ALIAS(cuDriverGetVersion, cudaDriverGetVersion)

ENTRY int cudaRuntimeGetVersion(int *version) {
  *version = machine.runtime_version;
  return SUCCESS;
}

ENTRY int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  int error = check(device);
  if (!error) *value = emu_attribute(emu_card(device), attribute);
  return emu_error(error);
}

ENTRY int cudaDeviceGetPCIBusId(char *text, int size, int device) {
  snprintf(text, size, "0000:%02X:00.0", emu_attribute(emu_card(device), PCI_BUS_ID));
  return emu_error(check(device));
}
ALIAS(cuDeviceGetPCIBusId, cudaDeviceGetPCIBusId)

ENTRY int cudaDeviceGetByPCIBusId(int *device, const char *text) {
  unsigned domain = 0, bus = 0;
  sscanf(text, "%x:%x", &domain, &bus);
  for (int i = 0; i < emu_visible(); i++)
    if (emu_attribute(emu_card(i), PCI_BUS_ID) == (int)bus) {
      *device = i;
      return SUCCESS;
    }
  return emu_error(INVALID_DEVICE);
}

ENTRY int cudaDeviceCanAccessPeer(int *can_access, int device, int peer) {
  *can_access = device != peer;
  return SUCCESS;
}
ALIAS(cuDeviceCanAccessPeer, cudaDeviceCanAccessPeer)

ENTRY int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return SUCCESS;
}
ALIAS(cuCtxGetStreamPriorityRange, cudaDeviceGetStreamPriorityRange)

/* As on a card whose limits were never set. */
enum { LIMIT_STACK = 0, LIMIT_HEAP = 2 };

ENTRY int cudaDeviceGetLimit(size_t *value, int limit) {
  *value = 1 << 20; /* of printf's buffer, for instance */
  if (limit == LIMIT_STACK) *value = 1024;
  if (limit == LIMIT_HEAP) *value = 8 << 20;
  return SUCCESS;
}
ALIAS(cuCtxGetLimit, cudaDeviceGetLimit)
