/* The runtime about kernels: they are registered, asked about and launched, and nothing runs. */
#include "emu.h"

int emu_error(int error);
typedef struct { unsigned x, y, z; } Dim3;
typedef struct { Dim3 grid, block; size_t shared; void *stream; } Configuration;

enum { NESTED = 16 };
static __thread Configuration pushed[NESTED];
static __thread int depth;

ENTRY unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void *stream) {
  if (depth < NESTED) pushed[depth++] = (Configuration){grid, block, shared, stream};
  return 0;
}

ENTRY int __cudaPopCallConfiguration(Dim3 *grid, Dim3 *block, size_t *shared, void **stream) {
  if (!depth) return INVALID_VALUE;
  Configuration *last = &pushed[--depth];
  *grid = last->grid;
  *block = last->block;
  *shared = last->shared;
  *stream = last->stream;
  return SUCCESS;
}

ENTRY void **__cudaRegisterFatBinary(void *binary) { return emu_handle(); }
ENTRY void __cudaRegisterFatBinaryEnd(void **handle) {}
ENTRY void __cudaUnregisterFatBinary(void **handle) {}
ENTRY char __cudaInitModule(void **handle) { return 1; }
ENTRY void __cudaRegisterVar(void **handle) {}
ENTRY void __cudaRegisterManagedVar(void **handle) {}
ENTRY void __cudaRegisterFunction(void **handle) {}

/* The host's address of a kernel serves as its handle everywhere. */
ENTRY int __cudaGetKernel(void **kernel, const void *function) { *kernel = (void *)function; return SUCCESS; }
ALIAS(cudaGetFuncBySymbol, __cudaGetKernel)

ENTRY int cudaLaunchKernel(const void *function, Dim3 grid, Dim3 block, void **arguments, size_t shared, void *stream) {
  int failed = emu_enter(emu_device());
  if (!failed) emu_first_launch(emu_device());
  return emu_error(failed);
}
ALIAS(__cudaLaunchKernel, cudaLaunchKernel)
ALIAS(__cudaLaunchKernel_ptsz, cudaLaunchKernel)
ALIAS(cudaLaunchCooperativeKernel, cudaLaunchKernel)

ENTRY int cudaLaunchKernelExC(const void *configuration, const void *function, void **arguments) {
  emu_first_launch(emu_device());
  return SUCCESS;
}

struct function_attributes {
  size_t shared, constant, local;
  int most_threads, registers, ptx, binary, cache_mode_ca, most_dynamic_shared, preferred_carveout, rest[24];
};

/* Capabilities that torch's kernels were compiled for; CUB looks for its own tuning by the one that runs. */
enum { MOST_IMAGES = 32 };
static int images[MOST_IMAGES], image_count;
ENTRY void emu_compiled_for(int capability) {
  if (image_count < MOST_IMAGES) images[image_count++] = capability;
}

/* A card runs the newest image of its generation that is not newer than itself: one of 8.9 that for 8.6. */
static int image_for(int capability) {
  int best = 0;
  for (int i = 0; i < image_count; i++)
    if (images[i] / 10 == capability / 10 && images[i] <= capability && images[i] > best) best = images[i];
  return best ? best : capability;
}

ENTRY int cudaFuncGetAttributes(struct function_attributes *found, const void *function) {
  const Card *card = emu_card(emu_device());
  memset(found, 0, offsetof(struct function_attributes, rest));
  found->most_threads = 1024;
  found->registers = 32;
  found->ptx = found->binary = image_for(card->major * 10 + card->minor);
  found->most_dynamic_shared = emu_attribute(card, 97);
  return SUCCESS;
}

/* As if a kernel took 32 registers a thread: threads and shared memory bound it. */
int emu_occupancy(int threads, size_t shared) {
  const Card *card = emu_card(emu_device());
  int blocks = emu_attribute(card, 39) / (threads > 0 ? threads : 1);
  if (blocks > 32) blocks = 32;
  if (shared) {
    int by_shared = ((size_t)card->shared_kib << 10) / (shared + 1024);
    if (by_shared < blocks) blocks = by_shared;
  }
  return blocks < 1 ? 1 : blocks;
}

ENTRY int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared) {
  *blocks = emu_occupancy(threads, shared);
  return SUCCESS;
}
ALIAS(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, cudaOccupancyMaxActiveBlocksPerMultiprocessor)
ALIAS(cuOccupancyMaxActiveBlocksPerMultiprocessor, cudaOccupancyMaxActiveBlocksPerMultiprocessor)
ALIAS(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, cudaOccupancyMaxActiveBlocksPerMultiprocessor)

ENTRY int cudaOccupancyMaxActiveClusters(int *clusters, const void *function, const void *configuration) {
  *clusters = emu_card(emu_device())->multiprocessors;
  return SUCCESS;
}
ALIAS(cuOccupancyMaxActiveClusters, cudaOccupancyMaxActiveClusters)

ENTRY int cudaOccupancyMaxPotentialClusterSize(int *size, const void *function, const void *configuration) {
  *size = 8;
  return SUCCESS;
}
ALIAS(cuOccupancyMaxPotentialClusterSize, cudaOccupancyMaxPotentialClusterSize)

ENTRY int cudaOccupancyAvailableDynamicSMemPerBlock(size_t *size, const void *function, int blocks, int threads) {
  *size = emu_attribute(emu_card(emu_device()), 97);
  return SUCCESS;
}

/* A variable of the device's: memory of its own, whose size is not known here. */
enum { SYMBOLS = 1024, SYMBOL_BYTES = 1 << 16 };

ENTRY int cudaGetSymbolAddress(void **address, const void *symbol) {
  static struct { const void *symbol; void *address; } known[SYMBOLS];
  static int count;
  for (int i = 0; i < count; i++)
    if (known[i].symbol == symbol) {
      *address = known[i].address;
      return SUCCESS;
    }
  if (count == SYMBOLS) return emu_error(INVALID_VALUE);
  known[count].symbol = symbol;
  *address = known[count++].address = emu_allocate_host(SYMBOL_BYTES);
  return SUCCESS;
}

ENTRY int cudaGetSymbolSize(size_t *size, const void *symbol) { *size = 4096; return SUCCESS; }

ENTRY int cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset, int kind) {
  void *at;
  if (!cudaGetSymbolAddress(&at, symbol) && size + offset <= SYMBOL_BYTES) memcpy((char *)at + offset, from, size);
  return SUCCESS;
}
ALIAS(cudaMemcpyToSymbolAsync, cudaMemcpyToSymbol)

ENTRY int cudaMemcpyFromSymbol(void *to, const void *symbol, size_t size, size_t offset, int kind) {
  void *at;
  if (!cudaGetSymbolAddress(&at, symbol) && size + offset <= SYMBOL_BYTES) memcpy(to, (char *)at + offset, size);
  return SUCCESS;
}
ALIAS(cudaMemcpyFromSymbolAsync, cudaMemcpyFromSymbol)

ENTRY int cudaLibraryLoadData(void **library, ...) { *library = emu_handle(); return SUCCESS; }
ENTRY int cudaLibraryGetKernel(void **kernel, void *library, const char *name) { *kernel = emu_handle(); return SUCCESS; }
ENTRY int cudaLibraryGetKernelCount(unsigned *count, void *library) { *count = 1; return SUCCESS; }

enum { FOUND = 0, SYMBOL_NOT_FOUND = 1 };

ENTRY int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, uint64_t flags, int *result) {
  *function = emu_driver_symbol(name);
  if (result) *result = *function ? FOUND : SYMBOL_NOT_FOUND;
  return SUCCESS;
}

ENTRY int cudaGetDriverEntryPoint(const char *name, void **function, uint64_t flags, int *result) {
  return cudaGetDriverEntryPointByVersion(name, function, 0, flags, result);
}
