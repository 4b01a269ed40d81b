/* cuBLAS, cuDNN and the others: the few calls whose answer the caller acts on. What they would compute is left out, and the
 * workspaces that torch gives them are torch's own allocations, made as on a card. */
#include "emu.h"

/* A call whose first argument is where a new handle goes. */
#define MAKES(name) ENTRY int name(void **handle, ...) { *handle = emu_handle(); return SUCCESS; }
#define ANSWERS(name, type, value) ENTRY int name(void *of, type *answer) { *answer = value; return SUCCESS; }

MAKES(cublasCreate_v2)
MAKES(cublasLtCreate)
MAKES(cublasLtMatmulDescCreate)
MAKES(cublasLtMatrixLayoutCreate)
MAKES(cublasLtMatmulPreferenceCreate)
MAKES(cublasLtMatrixTransformDescCreate)
ANSWERS(cublasGetVersion_v2, int, CUDA_MAJOR * 10000 + 100)
ANSWERS(cublasGetPointerMode_v2, int, 0)
ANSWERS(cublasGetMathMode, int, 0)
ANSWERS(cublasGetStream_v2, void *, NULL)
ENTRY int cublasGetProperty(int part, int *value) { *value = part == 0 ? CUDA_MAJOR : part == 1; return SUCCESS; }
ENTRY size_t cublasLtGetVersion(void) { return CUDA_MAJOR * 10000 + 100; }
ENTRY size_t cublasLtGetCudartVersion(void) { return machine.runtime_version; }

/* The first algorithm will do, and it needs no workspace. */
struct heuristic { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; };

ENTRY int cublasLtMatmulAlgoGetHeuristic(
    void *h, void *operation, void *a, void *b, void *c, void *d, void *preference, int wanted, struct heuristic *found, int *count) {
  *count = wanted > 0;
  if (wanted > 0) *found = (struct heuristic){.waves = 1};
  return SUCCESS;
}

ENTRY int cublasLtMatmulAlgoCheck(
    void *h, void *operation, void *a, void *b, void *c, void *d, void *algorithm, struct heuristic *found) {
  if (found) *found = (struct heuristic){.waves = 1};
  return SUCCESS;
}

MAKES(cudnnCreate)
ANSWERS(cudnnGetStream, void *, NULL)
ENTRY size_t cudnnGetVersion(void) { return 92000; }
ENTRY size_t cudnnGetCudartVersion(void) { return machine.runtime_version; }
ENTRY int cudnnGetProperty(int part, int *value) { *value = part == 0 ? 9 : part == 1 ? 20 : 0; return SUCCESS; }
ENTRY int cudnnDropoutGetStatesSize(void *handle, size_t *size) { *size = 1 << 20; return SUCCESS; }
ENTRY int cudnnBackendCreateDescriptor(int kind, void **descriptor) { *descriptor = emu_handle(); return SUCCESS; }

/* No engine: whoever has another way takes it. */
ENTRY int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t wanted, int64_t *count, void *out) {
  if (count) *count = 0;
  return SUCCESS;
}

ENTRY int cufftCreate(int *plan) {
  static _Atomic int plans;
  *plan = ++plans;
  return SUCCESS;
}

ENTRY int cufftXtMakePlanMany(int plan, int rank, void *n, void *in, long in_stride, long in_distance, int in_type, void *out,
                              long out_stride, long out_distance, int out_type, long batch, size_t *workspace, int type) {
  if (workspace) *workspace = 0;
  return SUCCESS;
}

MAKES(curandCreateGenerator)
MAKES(cuptiSubscribe)
ANSWERS(cusparseGetVersion, int, 12600)
ENTRY int cusolverDnGetVersion(int *version) { *version = 12004; return SUCCESS; }
ENTRY int cuptiGetVersion(unsigned *version) { *version = CUDA_MAJOR * 10000; return SUCCESS; }
ENTRY int cuptiActivityGetNextRecord(void *buffer, size_t size, void **record) { *record = NULL; return 12; /* no more */ }
ENTRY int cuptiActivityGetNumDroppedRecords(void *context, unsigned stream, size_t *count) { *count = 0; return SUCCESS; }
ENTRY int cuptiGetTimestamp(uint64_t *time) { *time = emu_milliseconds() * 1e6; return SUCCESS; }
ENTRY int cuptiGetResultString(int result, const char **text) { *text = "emulated"; return SUCCESS; }
