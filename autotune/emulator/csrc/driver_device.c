/* The driver: devices and contexts. There is one context per card, the primary one. */
#include "emu.h"

typedef struct {
  int device;
} Context;
static Context contexts[MAX_CARDS];

static Context *context_of(int device) {
  contexts[device].device = device;
  return &contexts[device];
}

static int check(int device) {
  if (!emu_is_initialised()) return NOT_INITIALIZED;
  return device >= 0 && device < machine.visible ? SUCCESS : INVALID_DEVICE;
}

/* 1. Devices. */

ENTRY int cuInit(unsigned flags) { return emu_initialise(); }

ENTRY int cuDeviceGetCount(int *count) {
  if (!emu_is_initialised()) return NOT_INITIALIZED;
  *count = machine.visible;
  return SUCCESS;
}

ENTRY int cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return check(ordinal);
}

ENTRY int cuDeviceGetName(char *name, int size, int device) {
  snprintf(name, size, "%s", emu_card(device)->name);
  return check(device);
}

ENTRY int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = emu_attribute(emu_card(device), attribute);
  return check(device);
}

ENTRY int cuDeviceTotalMem_v2(size_t *size, int device) {
  *size = emu_card(device)->memory;
  return check(device);
}
ALIAS(cuDeviceTotalMem, cuDeviceTotalMem_v2)

ENTRY int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
  emu_uuid(emu_card(device), uuid);
  return check(device);
}
ALIAS(cuDeviceGetUuid, cuDeviceGetUuid_v2)

ENTRY int cuDeviceComputeCapability(int *major, int *minor, int device) {
  *major = emu_card(device)->major;
  *minor = emu_card(device)->minor;
  return check(device);
}

/* 2. Contexts. */

ENTRY int cuDevicePrimaryCtxRetain(void **context, int device) {
  int error = check(device);
  if (!error) error = emu_enter(device);
  if (!error) *context = context_of(device);
  return error;
}

ENTRY int cuCtxCreate_v2(void **context, unsigned flags, int device) {
  int error = cuDevicePrimaryCtxRetain(context, device);
  if (!error) emu_set_device(device);
  return error;
}
ALIAS(cuCtxCreate, cuCtxCreate_v2)

ENTRY int cuCtxCreate_v4(void **context, const void *parameters, unsigned flags, int device) {
  return cuCtxCreate_v2(context, flags, device);
}

ENTRY int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  if (flags) *flags = 0;
  if (active) *active = emu_has_context(device);
  return check(device);
}

ENTRY int cuCtxGetCurrent(void **context) {
  int has_context = emu_is_initialised() && emu_has_context(emu_device());
  *context = has_context ? context_of(emu_device()) : NULL;
  return SUCCESS;
}

ENTRY int cuCtxSetCurrent(void *context) {
  if (context) emu_set_device(((Context *)context)->device);
  return SUCCESS;
}
ALIAS(cuCtxPushCurrent_v2, cuCtxSetCurrent)
ALIAS(cuCtxPushCurrent, cuCtxSetCurrent)

ENTRY int cuCtxPopCurrent_v2(void **context) {
  return context ? cuCtxGetCurrent(context) : SUCCESS;
}
ALIAS(cuCtxPopCurrent, cuCtxPopCurrent_v2)

ENTRY int cuCtxGetDevice(int *device) {
  *device = emu_device();
  return SUCCESS;
}

ENTRY int cuCtxGetApiVersion(void *context, unsigned *version) {
  *version = machine.driver_version;
  return SUCCESS;
}

ENTRY int cuCtxGetFlags(unsigned *flags) {
  *flags = 0;
  return SUCCESS;
}

ENTRY int cuStreamGetCtx(void *stream, void **context) {
  *context = context_of(emu_device());
  return SUCCESS;
}
