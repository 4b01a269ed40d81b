/* The driver: modules, kernels and its own entry points. */
#include "emu.h"
#include <dlfcn.h>

/* 1. Modules. A module, a kernel and a library are a handle each. */

ENTRY int cuModuleLoadData(void **module, ...) {
  *module = emu_handle();
  return SUCCESS;
}
ALIAS(cuModuleLoadDataEx, cuModuleLoadData)
ALIAS(cuModuleLoad, cuModuleLoadData)
ALIAS(cuModuleLoadFatBinary, cuModuleLoadData)
ALIAS(cuModuleGetFunction, cuModuleLoadData)
ALIAS(cuLibraryLoadData, cuModuleLoadData)
ALIAS(cuLibraryLoadFromFile, cuModuleLoadData)
ALIAS(cuLibraryGetKernel, cuModuleLoadData)
ALIAS(cuLibraryGetModule, cuModuleLoadData)

ENTRY int cuKernelGetFunction(void **function, void *kernel) {
  *function = kernel;
  return SUCCESS;
}

enum { GLOBAL_BYTES = 1 << 16 };

ENTRY int cuModuleGetGlobal_v2(void **address, size_t *size, void *module, const char *name) {
  if (address) *address = emu_allocate_host(GLOBAL_BYTES);
  if (size) *size = GLOBAL_BYTES;
  return SUCCESS;
}
ALIAS(cuModuleGetGlobal, cuModuleGetGlobal_v2)

/* 2. Kernels. */

/* By the names of CUfunction_attribute. */
enum {
  FUNCTION_MAX_THREADS_PER_BLOCK = 0,
  FUNCTION_NUM_REGS = 4,
  FUNCTION_PTX_VERSION = 5,
  FUNCTION_BINARY_VERSION = 6,
  FUNCTION_MAX_DYNAMIC_SHARED_SIZE = 8,
};

static int function_attribute(int attribute) {
  const Card *card = emu_card(emu_device());
  switch (attribute) {
    case FUNCTION_MAX_THREADS_PER_BLOCK: return 1024;
    case FUNCTION_NUM_REGS: return 32;
    case FUNCTION_PTX_VERSION:
    case FUNCTION_BINARY_VERSION: return card->major * 10 + card->minor;
    case FUNCTION_MAX_DYNAMIC_SHARED_SIZE:
      return emu_attribute(card, SHARED_MEMORY_PER_BLOCK_OPTIN);
    default: return 0;
  }
}

ENTRY int cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = function_attribute(attribute);
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

/* 3. Entry points by name. */

/* Of this library, never of a true driver; the newest form of each. */
void *emu_driver_symbol(const char *name) {
  static void *this_library;
  Dl_info info;
  if (!this_library && dladdr((void *)emu_driver_symbol, &info))
    this_library = dlopen(info.dli_fname, RTLD_NOW);
  char newer_name[160];
  snprintf(newer_name, sizeof newer_name, "%s_v2", name);
  void *symbol = dlsym(this_library, newer_name);
  return symbol ? symbol : dlsym(this_library, name);
}

ENTRY int cuGetProcAddress_v2(
    const char *name, void **function, int version, uint64_t flags, int *status) {
  *function = emu_driver_symbol(name);
  if (status) *status = *function ? 0 : 1;
  return *function ? SUCCESS : NOT_FOUND;
}

ENTRY int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

/* Called by a runtime that is linked statically: it would keep its own account of everything. */
ENTRY int cuGetExportTable(const void **table, const void *id) {
  static int warnings;
  if (!warnings++)
    fprintf(stderr,
            "autotune: a statically linked CUDA runtime was met, which cannot be emulated; "
            "install a build that uses the shared libcudart "
            "(the wheels of the package index do)\n");
  *table = NULL;
  return NOT_FOUND;
}
