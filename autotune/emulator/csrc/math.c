/* cuBLAS, cuDNN and others: the few calls whose answer the caller acts on. What they would compute
 * is left out, and the workspaces that torch gives them are torch's own allocations, made as on a
 * card. */
#include "emu.h"

/* A call whose first argument is where a new handle goes. */
#define MAKES(name)                       \
  ENTRY int name(void **handle, ...) {    \
    *handle = emu_handle();               \
    return SUCCESS;                       \
  }
/* A query about a handle. */
#define ANSWERS(name, type, value)        \
  ENTRY int name(void *handle, type *answer) { \
    *answer = value;                      \
    return SUCCESS;                       \
  }

enum { MAJOR_VERSION = 0, MINOR_VERSION = 1 }; /* parts of a version, for ...GetProperty */

/* 1. cuBLAS. */

enum { CUBLAS_MAJOR = CUDA_MAJOR, CUBLAS_MINOR = 1 };
#define CUBLAS_VERSION (CUBLAS_MAJOR * 10000 + CUBLAS_MINOR * 100)

MAKES(cublasCreate_v2)
MAKES(cublasLtCreate)
MAKES(cublasLtMatmulDescCreate)
MAKES(cublasLtMatrixLayoutCreate)
MAKES(cublasLtMatmulPreferenceCreate)
MAKES(cublasLtMatrixTransformDescCreate)
ANSWERS(cublasGetVersion_v2, int, CUBLAS_VERSION)
ANSWERS(cublasGetPointerMode_v2, int, 0)
ANSWERS(cublasGetMathMode, int, 0)
ANSWERS(cublasGetStream_v2, void *, NULL)
ENTRY size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
ENTRY size_t cublasLtGetCudartVersion(void) { return machine.runtime_version; }

ENTRY int cublasGetProperty(int part, int *value) {
  *value = 0;
  if (part == MAJOR_VERSION) *value = CUBLAS_MAJOR;
  if (part == MINOR_VERSION) *value = CUBLAS_MINOR;
  return SUCCESS;
}

/* The first algorithm will do, and it needs no workspace. */
struct heuristic {
  uint64_t algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

ENTRY int cublasLtMatmulAlgoGetHeuristic(
    void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
    int requested, struct heuristic *results, int *count) {
  *count = requested > 0;
  if (requested > 0) *results = (struct heuristic){.waves = 1};
  return SUCCESS;
}

ENTRY int cublasLtMatmulAlgoCheck(
    void *handle, void *operation, void *a, void *b, void *c, void *d, void *algorithm,
    struct heuristic *result) {
  if (result) *result = (struct heuristic){.waves = 1};
  return SUCCESS;
}

/* 2. cuDNN. */

enum { CUDNN_MAJOR = 9, CUDNN_MINOR = 20 };

MAKES(cudnnCreate)
ANSWERS(cudnnGetStream, void *, NULL)
ENTRY size_t cudnnGetVersion(void) { return CUDNN_MAJOR * 10000 + CUDNN_MINOR * 100; }
ENTRY size_t cudnnGetCudartVersion(void) { return machine.runtime_version; }

ENTRY int cudnnGetProperty(int part, int *value) {
  *value = 0;
  if (part == MAJOR_VERSION) *value = CUDNN_MAJOR;
  if (part == MINOR_VERSION) *value = CUDNN_MINOR;
  return SUCCESS;
}

ENTRY int cudnnDropoutGetStatesSize(void *handle, size_t *size) {
  *size = 1 << 20;
  return SUCCESS;
}

ENTRY int cudnnBackendCreateDescriptor(int kind, void **descriptor) {
  *descriptor = emu_handle();
  return SUCCESS;
}

/* No engine: a caller that has another way takes it. */
ENTRY int cudnnBackendGetAttribute(
    void *descriptor, int name, int type, int64_t requested, int64_t *count, void *out) {
  if (count) *count = 0;
  return SUCCESS;
}

/* 3. cuFFT. */

ENTRY int cufftCreate(int *plan) {
  static _Atomic int plans;
  *plan = ++plans;
  return SUCCESS;
}

ENTRY int cufftXtMakePlanMany(
    int plan, int rank, void *n, void *in, long in_stride, long in_distance, int in_type, void *out,
    long out_stride, long out_distance, int out_type, long batch, size_t *workspace, int type) {
  if (workspace) *workspace = 0;
  return SUCCESS;
}

/* 4. Others. */

MAKES(curandCreateGenerator)
ANSWERS(cusparseGetVersion, int, 12600)

ENTRY int cusolverDnGetVersion(int *version) {
  *version = 12004;
  return SUCCESS;
}

/* 5. CUPTI, which finds no activity. */

enum { CUPTI_NO_MORE_RECORDS = 12 };

MAKES(cuptiSubscribe)

ENTRY int cuptiGetVersion(unsigned *version) {
  *version = CUDA_MAJOR * 10000;
  return SUCCESS;
}

ENTRY int cuptiActivityGetNextRecord(void *buffer, size_t size, void **record) {
  *record = NULL;
  return CUPTI_NO_MORE_RECORDS;
}

ENTRY int cuptiActivityGetNumDroppedRecords(void *context, unsigned stream, size_t *count) {
  *count = 0;
  return SUCCESS;
}

ENTRY int cuptiGetTimestamp(uint64_t *nanoseconds) {
  *nanoseconds = emu_milliseconds() * 1e6;
  return SUCCESS;
}

ENTRY int cuptiGetResultString(int result, const char **text) {
  *text = "emulated";
  return SUCCESS;
}
