/* The runtime: memory. What the driver has beyond it is in driver_memory.c. */
#include "emu.h"

ENTRY int cudaMalloc(void **base, size_t size) {
  *base = NULL;
  if (!size) return SUCCESS;
  int error = emu_enter(emu_device());
  if (error) return emu_error(error);
  *base = emu_allocate(emu_device(), size);
  return *base ? SUCCESS : emu_error(OUT_OF_MEMORY);
}
ALIAS(cuMemAlloc_v2, cudaMalloc)
ALIAS(cuMemAlloc, cudaMalloc)

/* Programs make the context with cudaFree(0). */
ENTRY int cudaFree(void *base) {
  int error = emu_enter(emu_device());
  emu_synchronise_all();
  return emu_error(error ? error : emu_release(base));
}

/* Pools are not modelled: a block goes back at once. */
ENTRY int cudaMallocAsync(void **base, size_t size, void *stream) { return cudaMalloc(base, size); }
ALIAS(cuMemAllocAsync, cudaMallocAsync)

ENTRY int cudaMallocFromPoolAsync(void **base, size_t size, void *pool, void *stream) {
  return cudaMalloc(base, size);
}
ALIAS(cuMemAllocFromPoolAsync, cudaMallocFromPoolAsync)

ENTRY int cudaFreeAsync(void *base, void *stream) { return emu_error(emu_release(base)); }
ALIAS(cuMemFreeAsync, cudaFreeAsync)

/* Managed memory moves to the host when a card is full; it is charged to the card here, as far as
 * there is room. */
ENTRY int cudaMallocManaged(void **base, size_t size, unsigned flags) {
  *base = emu_allocate(emu_device(), size);
  if (!*base) *base = emu_allocate_host(size);
  return *base ? SUCCESS : emu_error(OUT_OF_MEMORY);
}
ALIAS(cuMemAllocManaged, cudaMallocManaged)

ENTRY int cudaMallocPitch(void **base, size_t *pitch, size_t width, size_t height) {
  *pitch = (width + 511) / 512 * 512;
  return cudaMalloc(base, *pitch * height);
}

ENTRY int cudaHostAlloc(void **base, size_t size, unsigned flags) {
  int error = emu_enter(emu_device());
  if (error) return emu_error(error);
  *base = emu_allocate_host(size);
  return *base ? SUCCESS : emu_error(OUT_OF_MEMORY);
}
ALIAS(cuMemHostAlloc, cudaHostAlloc)

ENTRY int cudaMallocHost(void **base, size_t size) { return cudaHostAlloc(base, size, 0); }
ALIAS(cuMemAllocHost_v2, cudaMallocHost)
ALIAS(cuMemAllocHost, cudaMallocHost)

ENTRY int cudaFreeHost(void *base) { return emu_error(emu_release(base)); }
ALIAS(cuMemFreeHost, cudaFreeHost)

ENTRY int cudaHostRegister(void *base, size_t size, unsigned flags) {
  emu_track(base, size, emu_device(), LENT);
  return SUCCESS;
}
ALIAS(cuMemHostRegister_v2, cudaHostRegister)
ALIAS(cuMemHostRegister, cudaHostRegister)

ENTRY int cudaHostUnregister(void *base) {
  emu_untrack(base);
  return SUCCESS;
}
ALIAS(cuMemHostUnregister, cudaHostUnregister)

ENTRY int cudaHostGetDevicePointer(void **device, void *host, unsigned flags) {
  *device = host;
  return SUCCESS;
}
ALIAS(cuMemHostGetDevicePointer_v2, cudaHostGetDevicePointer)
ALIAS(cuMemHostGetDevicePointer, cudaHostGetDevicePointer)

ENTRY int cudaHostGetFlags(unsigned *flags, void *host) {
  *flags = 0;
  return SUCCESS;
}
ALIAS(cuMemHostGetFlags, cudaHostGetFlags)

ENTRY int cudaMemGetInfo(size_t *available, size_t *total) {
  int error = emu_enter(emu_device());
  if (error) return emu_error(error);
  const Card *card = emu_card(emu_device());
  int64_t used = emu_used(machine.physical[emu_device()]);
  *available = used < card->memory ? card->memory - used : 0;
  *total = card->memory;
  return SUCCESS;
}
ALIAS(cuMemGetInfo_v2, cudaMemGetInfo)
ALIAS(cuMemGetInfo, cudaMemGetInfo)

/* Newer releases have reserved words behind these, which no program reads. */
struct attributes {
  int type, device;
  void *device_pointer, *host_pointer;
};
enum { TYPE_UNREGISTERED = 0, TYPE_HOST = 1, TYPE_DEVICE = 2, DEVICE_UNKNOWN = -2 };

ENTRY int cudaPointerGetAttributes(struct attributes *attributes, const void *address) {
  void *pointer = (void *)address;
  Block block;
  if (!emu_find(address, &block))
    *attributes = (struct attributes){TYPE_UNREGISTERED, DEVICE_UNKNOWN, NULL, pointer};
  else if (emu_on_host(block.kind))
    *attributes = (struct attributes){TYPE_HOST, block.device, pointer, pointer};
  else
    *attributes = (struct attributes){TYPE_DEVICE, block.device, pointer, NULL};
  return SUCCESS;
}

/* A copy that is not asynchronous waits for the work before it. */
ENTRY int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
  int error = emu_enter(emu_device());
  if (error) return emu_error(error);
  emu_copy(to, from, size);
  emu_synchronise(NULL);
  return SUCCESS;
}

ENTRY int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
  int error = emu_enter(emu_device());
  if (!error) emu_copy(to, from, size);
  return emu_error(error);
}

ENTRY int cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device, size_t size) {
  emu_copy(to, from, size);
  return SUCCESS;
}

ENTRY int cudaMemcpyPeerAsync(
    void *to, int to_device, const void *from, int from_device, size_t size, void *stream) {
  emu_copy(to, from, size);
  return SUCCESS;
}

/* The values of a large copy are left out. */
ENTRY int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                            size_t width, size_t height, int kind, void *stream) {
  if (width * height > MIB) return SUCCESS;
  for (size_t row = 0; row < height; row++)
    emu_copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
  return SUCCESS;
}

ENTRY int cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                       size_t width, size_t height, int kind) {
  emu_synchronise(NULL);
  return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, NULL);
}

ENTRY int cudaMemset(void *base, int byte, size_t size) {
  emu_fill(base, byte, size);
  return SUCCESS;
}

ENTRY int cudaMemsetAsync(void *base, int byte, size_t size, void *stream) {
  return cudaMemset(base, byte, size);
}

ENTRY int cudaDeviceGetDefaultMemPool(void **pool, int device) {
  static void *pools[MAX_CARDS];
  if (!pools[device]) pools[device] = emu_handle();
  *pool = pools[device];
  return SUCCESS;
}
ALIAS(cudaDeviceGetMemPool, cudaDeviceGetDefaultMemPool)
ALIAS(cuDeviceGetDefaultMemPool, cudaDeviceGetDefaultMemPool)
ALIAS(cuDeviceGetMemPool, cudaDeviceGetDefaultMemPool)

ENTRY int cudaMemPoolGetAttribute(void *pool, int attribute, void *value) {
  *(uint64_t *)value = 0;
  return SUCCESS;
}
ALIAS(cuMemPoolGetAttribute, cudaMemPoolGetAttribute)

ENTRY int cudaMemPoolCreate(void **pool, const void *properties) {
  *pool = emu_handle();
  return SUCCESS;
}
ALIAS(cuMemPoolCreate, cudaMemPoolCreate)

/* Between processes: the block moves onto a memfd, which the other process maps. Only the owner is
 * charged. */
typedef struct {
  uint64_t base, size;
  int pid, fd;
  char reserved[40];
} IpcHandle;

ENTRY int cudaIpcGetMemHandle(IpcHandle *handle, void *address) {
  Block block;
  memset(handle, 0, sizeof *handle);
  if (!emu_find(address, &block)) return emu_error(INVALID_VALUE);
  handle->base = (uint64_t)block.base;
  handle->size = block.size;
  handle->pid = getpid();
  handle->fd = emu_share(block.base, block.size);
  return emu_error(handle->fd < 0 ? INVALID_VALUE : SUCCESS);
}
ALIAS(cuIpcGetMemHandle, cudaIpcGetMemHandle)

ENTRY int cudaIpcOpenMemHandle(void **base, IpcHandle handle, unsigned flags) {
  int error = emu_enter(emu_device());
  if (error) return emu_error(error);
  *base = emu_map_shared(handle.pid, handle.fd, handle.size, emu_device());
  return emu_error(*base ? SUCCESS : INVALID_VALUE);
}
ALIAS(cuIpcOpenMemHandle_v2, cudaIpcOpenMemHandle)
ALIAS(cuIpcOpenMemHandle, cudaIpcOpenMemHandle)

ENTRY int cudaIpcCloseMemHandle(void *base) { return emu_error(emu_release(base)); }
ALIAS(cuIpcCloseMemHandle, cudaIpcCloseMemHandle)
