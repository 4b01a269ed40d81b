/* Like NVIDIA's driver in one respect: a child of the process that initialised it cannot use it, and cannot initialise it again. */
#include <unistd.h>

static int initialised_by;

int cuInit(unsigned flags) {
  if (initialised_by && initialised_by != getpid()) return 3; /* CUDA_ERROR_NOT_INITIALIZED */
  initialised_by = getpid();
  return 0;
}

int cuDeviceGetCount(int *count) {
  *count = 1;
  return initialised_by == getpid() ? 0 : 3;
}
