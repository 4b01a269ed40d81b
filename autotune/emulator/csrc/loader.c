/* dlopen: the name of one of NVIDIA's libraries gives this one, also the names that auditwheel
 * makes, such as libcudart-0123abcd.so.12. Without that, a program that loads the runtime by itself
 * would get a true one beside this one. */
#include "emu.h"
#include <dlfcn.h>

static const char *const EMULATED[] = {
  "libcuda",     "libcudart",  "libnvidia-ml", "libnccl",   "libcublas", "libcublasLt", "libcudnn",
  "libcusparse", "libcusolver", "libcurand",   "libcufft",  "libcupti",  NULL,
};

static int is_emulated(const char *path) {
  const char *slash = strrchr(path, '/');
  const char *file = slash ? slash + 1 : path;
  if (!strstr(file, ".so")) return 0;
  for (const char *const *library = EMULATED; *library; library++) {
    size_t length = strlen(*library);
    if (strncmp(file, *library, length)) continue;
    if (file[length] == '.' || file[length] == '-') return 1;
  }
  return 0;
}

ENTRY void *dlopen(const char *path, int flags) {
  static void *(*real)(const char *, int);
  if (!real) real = (void *(*)(const char *, int))dlsym(RTLD_NEXT, "dlopen");
  Dl_info info;
  if (path && machine.cards && is_emulated(path) && dladdr((void *)is_emulated, &info))
    return real(info.dli_fname, RTLD_NOW | RTLD_GLOBAL);
  return real(path, flags); /* as a tail call: the library's search path is the caller's */
}
