/* The driver about modules, kernels and its own entry points. */
#include "emu.h"
#include <dlfcn.h>

int emu_occupancy(int threads, size_t shared);

ENTRY int cuModuleLoadData(void **module, ...) { *module = emu_handle(); return SUCCESS; }
ALIAS(cuModuleLoadDataEx, cuModuleLoadData)
ALIAS(cuModuleLoad, cuModuleLoadData)
ALIAS(cuModuleLoadFatBinary, cuModuleLoadData)
ALIAS(cuModuleGetFunction, cuModuleLoadData)
ALIAS(cuLibraryLoadData, cuModuleLoadData)
ALIAS(cuLibraryLoadFromFile, cuModuleLoadData)
ALIAS(cuLibraryGetKernel, cuModuleLoadData)
ALIAS(cuLibraryGetModule, cuModuleLoadData)

ENTRY int cuKernelGetFunction(void **function, void *kernel) { *function = kernel; return SUCCESS; }

enum { GLOBAL_BYTES = 1 << 16 };

ENTRY int cuModuleGetGlobal_v2(void **at, size_t *size, void *module, const char *name) {
  if (at) *at = emu_allocate_host(GLOBAL_BYTES);
  if (size) *size = GLOBAL_BYTES;
  return SUCCESS;
}
ALIAS(cuModuleGetGlobal, cuModuleGetGlobal_v2)

ENTRY int cuFuncGetAttribute(int *value, int attribute, void *function) {
  const Card *card = emu_card(emu_device());
  switch (attribute) {
    case 0: *value = 1024; break;
    case 4: *value = 32; break;
    case 5: case 6: *value = card->major * 10 + card->minor; break;
    case 8: *value = emu_attribute(card, 97); break;
    default: *value = 0;
  }
  return SUCCESS;
}

ENTRY int cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
  return cuFuncGetAttribute(value, attribute, kernel);
}

ENTRY int cuLaunchKernel(void *function, ...) {
  emu_first_launch(emu_device());
  return SUCCESS;
}
ALIAS(cuLaunchKernelEx, cuLaunchKernel)
ALIAS(cuLaunchCooperativeKernel, cuLaunchKernel)

/* Of this library, so that nobody gets a function of a true driver; the newest form of each. */
void *emu_driver_symbol(const char *name) {
  static void *own;
  Dl_info where;
  if (!own && dladdr((void *)emu_driver_symbol, &where)) own = dlopen(where.dli_fname, RTLD_NOW);
  char newer[160];
  snprintf(newer, sizeof newer, "%s_v2", name);
  void *found = dlsym(own, newer);
  return found ? found : dlsym(own, name);
}

ENTRY int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
  *function = emu_driver_symbol(name);
  if (status) *status = *function ? 0 : 1;
  return *function ? SUCCESS : NOT_FOUND;
}

ENTRY int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

/* Asked by a runtime that is linked statically: it would keep its own account of everything. */
ENTRY int cuGetExportTable(const void **table, const void *id) {
  static int told;
  if (!told++)
    fprintf(stderr, "autotune: a statically linked CUDA runtime was met, which cannot be emulated; "
                    "install a build that uses the shared libcudart (the wheels of the package index do)\n");
  *table = NULL;
  return NOT_FOUND;
}
