/* The runtime: kernels are registered, described and launched, and nothing runs. */
#include "emu.h"

/* 1. Launches. The configuration of a launch with <<<...>>> is pushed before it. */

typedef struct {
  unsigned x, y, z;
} Dim3;
typedef struct {
  Dim3 grid, block;
  size_t shared;
  void *stream;
} Configuration;

enum { MAX_NESTED = 16 };
static __thread Configuration configurations[MAX_NESTED];
static __thread int depth;

ENTRY unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void *stream) {
  if (depth < MAX_NESTED) configurations[depth++] = (Configuration){grid, block, shared, stream};
  return 0;
}

ENTRY int __cudaPopCallConfiguration(Dim3 *grid, Dim3 *block, size_t *shared, void **stream) {
  if (!depth) return INVALID_VALUE;
  Configuration *last = &configurations[--depth];
  *grid = last->grid;
  *block = last->block;
  *shared = last->shared;
  *stream = last->stream;
  return SUCCESS;
}

ENTRY int cudaLaunchKernel(
    const void *function, Dim3 grid, Dim3 block, void **arguments, size_t shared, void *stream) {
  int error = emu_enter(emu_device());
  if (!error) emu_first_launch(emu_device());
  return emu_error(error);
}
ALIAS(__cudaLaunchKernel, cudaLaunchKernel)
ALIAS(__cudaLaunchKernel_ptsz, cudaLaunchKernel)
ALIAS(cudaLaunchCooperativeKernel, cudaLaunchKernel)

ENTRY int cudaLaunchKernelExC(
    const void *configuration, const void *function, void **arguments) {
  emu_first_launch(emu_device());
  return SUCCESS;
}

/* 2. Registration. The host's address of a kernel serves as its handle everywhere. */

ENTRY void **__cudaRegisterFatBinary(void *binary) { return emu_handle(); }
ENTRY void __cudaRegisterFatBinaryEnd(void **handle) {}
ENTRY void __cudaUnregisterFatBinary(void **handle) {}
ENTRY char __cudaInitModule(void **handle) { return 1; }
ENTRY void __cudaRegisterVar(void **handle) {}
ENTRY void __cudaRegisterManagedVar(void **handle) {}
ENTRY void __cudaRegisterFunction(void **handle) {}

ENTRY int __cudaGetKernel(void **kernel, const void *function) {
  *kernel = (void *)function;
  return SUCCESS;
}
ALIAS(cudaGetFuncBySymbol, __cudaGetKernel)

ENTRY int cudaLibraryLoadData(void **library, ...) {
  *library = emu_handle();
  return SUCCESS;
}

ENTRY int cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
  *kernel = emu_handle();
  return SUCCESS;
}

ENTRY int cudaLibraryGetKernelCount(unsigned *count, void *library) {
  *count = 1;
  return SUCCESS;
}

/* 3. Properties of a kernel. */

/* Capabilities that torch's kernels were compiled for: CUB looks for its own tuning by the one that
 * runs. */
enum { MAX_IMAGES = 32 };
static int images[MAX_IMAGES], image_count;

ENTRY void emu_compiled_for(int capability) {
  if (image_count < MAX_IMAGES) images[image_count++] = capability;
}

/* A card runs the newest image of its generation that is not newer than itself: one of 8.9 that for
 * 8.6. */
static int image_for(int capability) {
  int newest = 0;
  for (int i = 0; i < image_count; i++) {
    int is_of_generation = images[i] / 10 == capability / 10;
    if (is_of_generation && images[i] <= capability && images[i] > newest) newest = images[i];
  }
  return newest ? newest : capability;
}

enum { REGISTERS_PER_THREAD = 32 }; /* as if every kernel took them */

struct function_attributes {
  size_t shared, constant, local;
  int max_threads, registers, ptx_version, binary_version, cache_mode_ca, max_dynamic_shared;
  int preferred_carveout, more[24];
};

ENTRY int cudaFuncGetAttributes(struct function_attributes *attributes, const void *function) {
  const Card *card = emu_card(emu_device());
  int image = image_for(card->major * 10 + card->minor);
  memset(attributes, 0, offsetof(struct function_attributes, more));
  attributes->max_threads = 1024;
  attributes->registers = REGISTERS_PER_THREAD;
  attributes->ptx_version = attributes->binary_version = image;
  attributes->max_dynamic_shared = emu_attribute(card, SHARED_MEMORY_PER_BLOCK_OPTIN);
  return SUCCESS;
}

static int least(int a, int b) { return a < b ? a : b; }

/* Blocks of a multiprocessor: bounded by threads and shared memory. */
static int occupancy(int threads, size_t shared) {
  const Card *card = emu_card(emu_device());
  int resident_threads = emu_attribute(card, THREADS_PER_MULTIPROCESSOR);
  int blocks = resident_threads / (threads > 0 ? threads : 1);
  blocks = least(blocks, emu_attribute(card, BLOCKS_PER_MULTIPROCESSOR));
  if (shared) {
    size_t available = emu_attribute(card, SHARED_MEMORY_PER_MULTIPROCESSOR);
    size_t of_block = shared + emu_attribute(card, RESERVED_SHARED_MEMORY_PER_BLOCK);
    blocks = least(blocks, available / of_block);
  }
  return blocks < 1 ? 1 : blocks;
}

ENTRY int cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int *blocks, const void *function, int threads, size_t shared) {
  *blocks = occupancy(threads, shared);
  return SUCCESS;
}
ALIAS(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
      cudaOccupancyMaxActiveBlocksPerMultiprocessor)
ALIAS(cuOccupancyMaxActiveBlocksPerMultiprocessor,
      cudaOccupancyMaxActiveBlocksPerMultiprocessor)
ALIAS(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
      cudaOccupancyMaxActiveBlocksPerMultiprocessor)

ENTRY int cudaOccupancyMaxActiveClusters(
    int *clusters, const void *function, const void *configuration) {
  *clusters = emu_card(emu_device())->multiprocessors;
  return SUCCESS;
}
ALIAS(cuOccupancyMaxActiveClusters, cudaOccupancyMaxActiveClusters)

ENTRY int cudaOccupancyMaxPotentialClusterSize(
    int *size, const void *function, const void *configuration) {
  *size = 8;
  return SUCCESS;
}
ALIAS(cuOccupancyMaxPotentialClusterSize, cudaOccupancyMaxPotentialClusterSize)

ENTRY int cudaOccupancyAvailableDynamicSMemPerBlock(
    size_t *size, const void *function, int blocks, int threads) {
  *size = emu_attribute(emu_card(emu_device()), SHARED_MEMORY_PER_BLOCK_OPTIN);
  return SUCCESS;
}

/* 4. Variables of the device: each has memory of its own, whose size is not known here. */

enum { MAX_SYMBOLS = 1024, SYMBOL_BYTES = 1 << 16 };

ENTRY int cudaGetSymbolAddress(void **address, const void *symbol) {
  static struct {
    const void *symbol;
    void *address;
  } symbols[MAX_SYMBOLS];
  static int count;
  for (int i = 0; i < count; i++)
    if (symbols[i].symbol == symbol) {
      *address = symbols[i].address;
      return SUCCESS;
    }
  if (count == MAX_SYMBOLS) return emu_error(INVALID_VALUE);
  *address = emu_allocate_host(SYMBOL_BYTES);
  symbols[count].symbol = symbol;
  symbols[count].address = *address;
  count++;
  return SUCCESS;
}

ENTRY int cudaGetSymbolSize(size_t *size, const void *symbol) {
  *size = 4096;
  return SUCCESS;
}

/* The place in a variable; NULL outside of it. */
static char *in_symbol(const void *symbol, size_t offset, size_t size) {
  void *address;
  if (cudaGetSymbolAddress(&address, symbol) || size + offset > SYMBOL_BYTES) return NULL;
  return (char *)address + offset;
}

ENTRY int cudaMemcpyToSymbol(
    const void *symbol, const void *from, size_t size, size_t offset, int kind) {
  char *to = in_symbol(symbol, offset, size);
  if (to) memcpy(to, from, size);
  return SUCCESS;
}
ALIAS(cudaMemcpyToSymbolAsync, cudaMemcpyToSymbol)

ENTRY int cudaMemcpyFromSymbol(
    void *to, const void *symbol, size_t size, size_t offset, int kind) {
  char *from = in_symbol(symbol, offset, size);
  if (from) memcpy(to, from, size);
  return SUCCESS;
}
ALIAS(cudaMemcpyFromSymbolAsync, cudaMemcpyFromSymbol)

/* 5. The driver's entry points. */

enum { SYMBOL_FOUND = 0, SYMBOL_NOT_FOUND = 1 };

ENTRY int cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned version, uint64_t flags, int *result) {
  *function = emu_driver_symbol(name);
  if (result) *result = *function ? SYMBOL_FOUND : SYMBOL_NOT_FOUND;
  return SUCCESS;
}

ENTRY int cudaGetDriverEntryPoint(const char *name, void **function, uint64_t flags, int *result) {
  return cudaGetDriverEntryPointByVersion(name, function, 0, flags, result);
}
