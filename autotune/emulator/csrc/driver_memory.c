/* The driver: memory. Addresses are apart from what backs them, as expandable segments and vLLM's
 * sleep mode use it. What both interfaces have in common is in runtime_memory.c. */
#include "emu.h"
#include <sys/mman.h>

typedef uint64_t Address;

/* 1. Properties of an address. */

ENTRY int cuMemFree_v2(void *base) { return emu_release(base); }
ALIAS(cuMemFree, cuMemFree_v2)

ENTRY int cuMemGetAddressRange_v2(void **base, size_t *size, const void *address) {
  Block block;
  if (!emu_find(address, &block)) return INVALID_VALUE;
  if (base) *base = block.base;
  if (size) *size = block.size;
  return SUCCESS;
}
ALIAS(cuMemGetAddressRange, cuMemGetAddressRange_v2)

/* By the names of CUpointer_attribute. */
enum {
  POINTER_CONTEXT = 1,
  POINTER_MEMORY_TYPE = 2,
  POINTER_DEVICE_POINTER = 3,
  POINTER_HOST_POINTER = 4,
  POINTER_BUFFER_ID = 7,
  POINTER_DEVICE_ORDINAL = 9,
  POINTER_RANGE_START = 11,
  POINTER_RANGE_SIZE = 12,
};
enum { TYPE_HOST = 1, TYPE_DEVICE = 2 };

int cuDevicePrimaryCtxRetain(void **context, int device); /* driver_device.c */

ENTRY int cuPointerGetAttribute(void *out, int attribute, const void *address) {
  Block block;
  if (!emu_find(address, &block)) return INVALID_VALUE;
  switch (attribute) {
    case POINTER_CONTEXT: return cuDevicePrimaryCtxRetain(out, block.device);
    case POINTER_MEMORY_TYPE:
      *(int *)out = emu_on_host(block.kind) ? TYPE_HOST : TYPE_DEVICE;
      return SUCCESS;
    case POINTER_DEVICE_POINTER:
    case POINTER_HOST_POINTER: *(const void **)out = address; return SUCCESS;
    case POINTER_BUFFER_ID: /* any identity */
    case POINTER_RANGE_START: *(void **)out = block.base; return SUCCESS;
    case POINTER_DEVICE_ORDINAL: *(int *)out = block.device; return SUCCESS;
    case POINTER_RANGE_SIZE: *(size_t *)out = block.size; return SUCCESS;
    default: *(int *)out = 0; return SUCCESS;
  }
}

ENTRY int cuPointerGetAttributes(
    unsigned count, int *attributes, void **out, const void *address) {
  for (unsigned i = 0; i < count; i++) cuPointerGetAttribute(out[i], attributes[i], address);
  return SUCCESS;
}

/* 2. Copies. */

#define COPY(name)                                                     \
  ENTRY int name##_v2(void *to, const void *from, size_t size) {       \
    emu_copy(to, from, size);                                          \
    return SUCCESS;                                                    \
  }                                                                    \
  ALIAS(name, name##_v2)
#define COPY_LATER(name)                                               \
  ENTRY int name##_v2(void *to, const void *from, size_t size, void *stream) { \
    emu_copy(to, from, size);                                          \
    return SUCCESS;                                                    \
  }                                                                    \
  ALIAS(name, name##_v2)
COPY(cuMemcpyHtoD)
COPY(cuMemcpyDtoH)
COPY(cuMemcpyDtoD)
COPY_LATER(cuMemcpyHtoDAsync)
COPY_LATER(cuMemcpyDtoHAsync)
COPY_LATER(cuMemcpyDtoDAsync)

ENTRY int cuMemcpy(void *to, const void *from, size_t size) {
  emu_copy(to, from, size);
  return SUCCESS;
}

ENTRY int cuMemcpyAsync(void *to, const void *from, size_t size, void *stream) {
  return cuMemcpy(to, from, size);
}

ENTRY int cuMemcpyBatchAsync_v2(void **to, void **from, size_t *sizes, size_t count,
                                void *attributes, size_t *indices, size_t attribute_count,
                                void *stream) {
  for (size_t i = 0; i < count; i++) emu_copy(to[i], from[i], sizes[i]);
  return SUCCESS;
}
ALIAS(cuMemcpyBatchAsync, cuMemcpyBatchAsync_v2)

ENTRY int cuMemsetD8_v2(void *base, unsigned char byte, size_t count) {
  emu_fill(base, byte, count);
  return SUCCESS;
}
ALIAS(cuMemsetD8, cuMemsetD8_v2)

ENTRY int cuMemsetD8Async(void *base, unsigned char byte, size_t count, void *stream) {
  return cuMemsetD8_v2(base, byte, count);
}

ENTRY int cuMemsetD32_v2(unsigned *base, unsigned value, size_t count) {
  size_t size = count * sizeof value;
  if (!value) emu_fill(base, 0, size);
  else if (size <= MIB)
    for (size_t i = 0; i < count; i++) base[i] = value;
  return SUCCESS;
}
ALIAS(cuMemsetD32, cuMemsetD32_v2)

ENTRY int cuMemsetD32Async(unsigned *base, unsigned value, size_t count, void *stream) {
  return cuMemsetD32_v2(base, value, count);
}

ENTRY int cuStreamWriteValue32_v2(
    void *stream, unsigned *address, unsigned value, unsigned flags) {
  *address = value;
  return SUCCESS;
}
ALIAS(cuStreamWriteValue32, cuStreamWriteValue32_v2)

/* 3. Backing of addresses: charged to a card, or another process's. It goes when nothing maps or
 * holds it. */

typedef struct {
  size_t size;
  int device, references;
  int is_charged; /* to this process */
  int shared;     /* a memfd, or -1 */
} Backing;
typedef struct {
  char *base;
  size_t size;
  Backing *backing;
} Mapping;
static Mapping *mappings;
static int count, capacity;
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;

enum { GRANULARITY = 2 << 20 };

/* As in CUmemAllocationProp. */
struct allocation {
  int type, handle_types;
  struct {
    int type, id;
  } location;
};
enum { HANDLE_POSIX_DESCRIPTOR = 1, HANDLE_FABRIC = 8 };

static Backing *new_backing(size_t size, int device, int is_charged, int shared) {
  Backing *backing = calloc(1, sizeof *backing);
  *backing = (Backing){size, device, 1, is_charged, shared};
  return backing;
}

static void drop_reference(Backing *backing) {
  if (--backing->references) return;
  if (backing->is_charged) emu_charge(backing->device, -(int64_t)backing->size);
  if (backing->shared >= 0) close(backing->shared);
  free(backing);
}

ENTRY int cuMemGetAllocationGranularity(size_t *size, const void *properties, int option) {
  *size = GRANULARITY;
  return SUCCESS;
}

ENTRY int cuMulticastGetGranularity(size_t *size, const void *properties, int option) {
  *size = GRANULARITY;
  return SUCCESS;
}

ENTRY int cuMemCreate(
    Backing **handle, size_t size, const struct allocation *properties, uint64_t flags) {
  /* As on a machine without a fabric: a program that asks for it goes on with descriptors. */
  if (properties && properties->handle_types & HANDLE_FABRIC) return NOT_PERMITTED;
  int device = properties ? properties->location.id : emu_device();
  int error = emu_enter(device);
  if (!error) error = emu_charge(device, size);
  if (!error) *handle = new_backing(size, device, 1, -1);
  return error;
}

ENTRY int cuMemRelease(Backing *handle) {
  pthread_mutex_lock(&guard);
  drop_reference(handle);
  pthread_mutex_unlock(&guard);
  return SUCCESS;
}

/* 4. Addresses. */

ENTRY int cuMemAddressReserve(
    Address *base, size_t size, size_t alignment, Address wanted, uint64_t flags) {
  int map_flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  char *reserved = mmap(NULL, size + GRANULARITY, PROT_NONE, map_flags, -1, 0);
  if (reserved == MAP_FAILED) return OUT_OF_MEMORY;
  *base = ((Address)reserved + GRANULARITY - 1) & ~(Address)(GRANULARITY - 1);
  return SUCCESS;
}

ENTRY int cuMemAddressFree(Address base, size_t size) {
  munmap((void *)base, size);
  return SUCCESS;
}

static int map_at(char *base, size_t size, const Backing *backing) {
  int is_shared = backing->shared >= 0;
  int flags = MAP_NORESERVE | MAP_FIXED | (is_shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS);
  void *mapped = mmap(base, size, PROT_READ | PROT_WRITE, flags, backing->shared, 0);
  if (mapped == MAP_FAILED) return OUT_OF_MEMORY;
  madvise(base, size, MADV_NOHUGEPAGE);
  return SUCCESS;
}

/* With the guard held. */
static void add_mapping(char *base, size_t size, Backing *backing) {
  if (count == capacity) {
    capacity = capacity ? 2 * capacity : 4096;
    mappings = realloc(mappings, capacity * sizeof *mappings);
  }
  mappings[count++] = (Mapping){base, size, backing};
  backing->references++;
}

/* With the guard held. The address stays reserved. */
static void remove_mapping(int index) {
  Mapping *mapping = &mappings[index];
  emu_untrack(mapping->base);
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  mmap(mapping->base, mapping->size, PROT_NONE, flags, -1, 0);
  drop_reference(mapping->backing);
  *mapping = mappings[--count];
}

ENTRY int cuMemMap(char *base, size_t size, size_t offset, Backing *handle, uint64_t flags) {
  pthread_mutex_lock(&guard);
  int error = map_at(base, size, handle);
  if (!error) add_mapping(base, size, handle);
  pthread_mutex_unlock(&guard);
  if (!error) emu_track(base, size, handle->device, handle->is_charged ? DEVICE : REMOTE);
  return error;
}

ENTRY int cuMemUnmap(char *base, size_t size) {
  pthread_mutex_lock(&guard);
  for (int i = 0; i < count;) {
    int is_inside = mappings[i].base >= base && mappings[i].base < base + size;
    if (is_inside) remove_mapping(i); /* another mapping has its place now */
    else i++;
  }
  pthread_mutex_unlock(&guard);
  return SUCCESS;
}

ENTRY int cuMemSetAccess(Address base, size_t size, const void *access, size_t device_count) {
  return SUCCESS;
}

static Mapping *mapping_at(const char *address) {
  for (int i = 0; i < count; i++)
    if (address >= mappings[i].base && address < mappings[i].base + mappings[i].size)
      return &mappings[i];
  return NULL;
}

ENTRY int cuMemRetainAllocationHandle(Backing **handle, const char *address) {
  pthread_mutex_lock(&guard);
  Mapping *mapping = mapping_at(address);
  if (mapping) {
    *handle = mapping->backing;
    mapping->backing->references++;
  }
  pthread_mutex_unlock(&guard);
  return mapping ? SUCCESS : INVALID_VALUE;
}

/* 5. Backing of other processes. */

/* As a file descriptor: what is mapped already moves onto a memfd. */
ENTRY int cuMemExportToShareableHandle(
    int *descriptor, Backing *handle, int type, uint64_t flags) {
  if (type != HANDLE_POSIX_DESCRIPTOR) return NOT_SUPPORTED;
  pthread_mutex_lock(&guard);
  for (int i = 0; i < count && handle->shared < 0; i++)
    if (mappings[i].backing == handle)
      handle->shared = emu_move_onto_memfd(mappings[i].base, mappings[i].size);
  pthread_mutex_unlock(&guard);
  *descriptor = handle->shared < 0 ? -1 : dup(handle->shared);
  return *descriptor < 0 ? INVALID_VALUE : SUCCESS;
}

ENTRY int cuMemImportFromShareableHandle(Backing **handle, void *descriptor, int type) {
  int fd = type == HANDLE_POSIX_DESCRIPTOR ? dup((int)(intptr_t)descriptor) : -1;
  if (fd < 0) return NOT_SUPPORTED;
  *handle = new_backing(lseek(fd, 0, SEEK_END), emu_device(), 0, fd);
  return SUCCESS;
}
