/* dlopen by the name of one of NVIDIA's libraries gives this one, also by the names that auditwheel makes, such as
 * libcudart-0123abcd.so.12. Without that, who loads the runtime by itself would get a true one beside ours. */
#include "emu.h"
#include <dlfcn.h>

static const char *const OURS[] = {"libcuda", "libcudart", "libnvidia-ml", "libnccl", "libcublas", "libcublasLt", "libcudnn",
                                   "libcusparse", "libcusolver", "libcurand", "libcufft", "libcupti", NULL};

static int is_ours(const char *path) {
  const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
  if (!strstr(name, ".so")) return 0;
  for (const char *const *each = OURS; *each; each++) {
    size_t length = strlen(*each);
    if (!strncmp(name, *each, length) && (name[length] == '.' || name[length] == '-')) return 1;
  }
  return 0;
}

ENTRY void *dlopen(const char *path, int flags) {
  static void *(*real)(const char *, int);
  if (!real) real = (void *(*)(const char *, int))dlsym(RTLD_NEXT, "dlopen");
  Dl_info where;
  if (path && machine.cards && is_ours(path) && dladdr((void *)is_ours, &where)) return real(where.dli_fname, RTLD_NOW | RTLD_GLOBAL);
  return real(path, flags); /* as a tail call: the library's search path is the caller's */
}
