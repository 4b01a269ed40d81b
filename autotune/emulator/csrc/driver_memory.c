/* The driver about memory: addresses apart from what backs them, as expandable segments and vLLM's sleep mode use it. What both
 * interfaces have in common is in runtime_memory.c. */
#include "emu.h"
#include <sys/mman.h>

enum { GRANULARITY = 2 << 20 };
typedef uint64_t Address;

ENTRY int cuMemFree_v2(void *base) { return emu_release(base); }
ALIAS(cuMemFree, cuMemFree_v2)

ENTRY int cuMemGetAddressRange_v2(void **base, size_t *size, const void *at) {
  Block block;
  if (!emu_find(at, &block)) return INVALID_VALUE;
  if (base) *base = block.base;
  if (size) *size = block.size;
  return SUCCESS;
}
ALIAS(cuMemGetAddressRange, cuMemGetAddressRange_v2)

ENTRY int cuPointerGetAttribute(void *out, int attribute, const void *at) {
  Block block;
  if (!emu_find(at, &block)) return INVALID_VALUE;
  int cuDevicePrimaryCtxRetain(void **, int);
  switch (attribute) {
    case 1: return cuDevicePrimaryCtxRetain(out, block.device);
    case 2: *(int *)out = emu_on_host(block.kind) ? 1 : 2; return SUCCESS;
    case 3: case 4: *(const void **)out = at; return SUCCESS;
    case 7: case 11: *(void **)out = block.base; return SUCCESS; /* an identity; the range's start */
    case 9: *(int *)out = block.device; return SUCCESS;
    case 12: *(size_t *)out = block.size; return SUCCESS;
    default: *(int *)out = 0; return SUCCESS;
  }
}

ENTRY int cuPointerGetAttributes(unsigned count, int *attributes, void **out, const void *at) {
  for (unsigned i = 0; i < count; i++) cuPointerGetAttribute(out[i], attributes[i], at);
  return SUCCESS;
}

#define COPY(name)                                                                                \
  ENTRY int name##_v2(void *to, const void *from, size_t size) { emu_copy(to, from, size); return SUCCESS; } \
  ALIAS(name, name##_v2)
#define COPY_LATER(name)                                                                          \
  ENTRY int name##_v2(void *to, const void *from, size_t size, void *stream) { emu_copy(to, from, size); return SUCCESS; } \
  ALIAS(name, name##_v2)
COPY(cuMemcpyHtoD)
COPY(cuMemcpyDtoH)
COPY(cuMemcpyDtoD)
COPY_LATER(cuMemcpyHtoDAsync)
COPY_LATER(cuMemcpyDtoHAsync)
COPY_LATER(cuMemcpyDtoDAsync)

ENTRY int cuMemcpy(void *to, const void *from, size_t size) { emu_copy(to, from, size); return SUCCESS; }
ENTRY int cuMemcpyAsync(void *to, const void *from, size_t size, void *stream) { emu_copy(to, from, size); return SUCCESS; }

ENTRY int cuMemcpyBatchAsync_v2(void **to, void **from, size_t *sizes, size_t count, void *a, size_t *b, size_t c, void *stream) {
  for (size_t i = 0; i < count; i++) emu_copy(to[i], from[i], sizes[i]);
  return SUCCESS;
}
ALIAS(cuMemcpyBatchAsync, cuMemcpyBatchAsync_v2)

ENTRY int cuMemsetD8_v2(void *at, unsigned char byte, size_t count) { emu_fill(at, byte, count); return SUCCESS; }
ALIAS(cuMemsetD8, cuMemsetD8_v2)
ENTRY int cuMemsetD8Async(void *at, unsigned char byte, size_t count, void *stream) { return cuMemsetD8_v2(at, byte, count); }

ENTRY int cuMemsetD32_v2(unsigned *at, unsigned value, size_t count) {
  if (!value) emu_fill(at, 0, 4 * count);
  else if (4 * count <= MIB)
    for (size_t i = 0; i < count; i++) at[i] = value;
  return SUCCESS;
}
ALIAS(cuMemsetD32, cuMemsetD32_v2)
ENTRY int cuMemsetD32Async(unsigned *at, unsigned value, size_t count, void *stream) { return cuMemsetD32_v2(at, value, count); }

ENTRY int cuStreamWriteValue32_v2(void *stream, unsigned *at, unsigned value, unsigned flags) { *at = value; return SUCCESS; }
ALIAS(cuStreamWriteValue32, cuStreamWriteValue32_v2)

/* What backs an address: charged to a card, or another process's. It goes when nothing maps or holds it. */
typedef struct { size_t size; int device, references, is_ours, shared; } Backing;
typedef struct { char *at; size_t size; Backing *backing; } Mapping;
static Mapping *mappings;
static int count, room;
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;

static void let_go(Backing *backing) {
  if (--backing->references) return;
  if (backing->is_ours) emu_charge(backing->device, -(int64_t)backing->size);
  if (backing->shared >= 0) close(backing->shared);
  free(backing);
}

static Backing *new_backing(size_t size, int device, int is_ours, int shared) {
  Backing *made = calloc(1, sizeof *made);
  *made = (Backing){size, device, 1, is_ours, shared};
  return made;
}

ENTRY int cuMemGetAllocationGranularity(size_t *size, const void *properties, int option) {
  *size = GRANULARITY;
  return SUCCESS;
}

ENTRY int cuMemAddressReserve(Address *base, size_t size, size_t alignment, Address wanted, uint64_t flags) {
  char *got = mmap(NULL, size + GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) return OUT_OF_MEMORY;
  *base = ((Address)got + GRANULARITY - 1) & ~(Address)(GRANULARITY - 1);
  return SUCCESS;
}

ENTRY int cuMemAddressFree(Address base, size_t size) { munmap((void *)base, size); return SUCCESS; }

struct allocation { int type, handle_types; struct { int type, id; } location; };

enum { POSIX_DESCRIPTOR = 1, FABRIC = 8, NOT_PERMITTED = 800 };

ENTRY int cuMemCreate(Backing **handle, size_t size, const struct allocation *properties, uint64_t flags) {
  /* As on a machine without a fabric: whoever asks for it goes on with descriptors. */
  if (properties && properties->handle_types & FABRIC) return NOT_PERMITTED;
  int device = properties ? properties->location.id : emu_device();
  int failed = emu_enter(device);
  if (!failed) failed = emu_charge(device, size);
  if (!failed) *handle = new_backing(size, device, 1, -1);
  return failed;
}

ENTRY int cuMemRelease(Backing *handle) {
  pthread_mutex_lock(&guard);
  let_go(handle);
  pthread_mutex_unlock(&guard);
  return SUCCESS;
}

static int map_at(char *at, size_t size, const Backing *backing) {
  int shared = backing->shared >= 0, flags = MAP_NORESERVE | MAP_FIXED;
  flags |= shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  if (mmap(at, size, PROT_READ | PROT_WRITE, flags, backing->shared, 0) == MAP_FAILED) return OUT_OF_MEMORY;
  madvise(at, size, MADV_NOHUGEPAGE);
  return SUCCESS;
}

ENTRY int cuMemMap(char *at, size_t size, size_t offset, Backing *handle, uint64_t flags) {
  pthread_mutex_lock(&guard);
  int failed = map_at(at, size, handle);
  if (!failed) {
    if (count == room) {
      room = room ? 2 * room : 4096;
      mappings = realloc(mappings, room * sizeof *mappings);
    }
    mappings[count++] = (Mapping){at, size, handle};
    handle->references++;
  }
  pthread_mutex_unlock(&guard);
  if (!failed) emu_track(at, size, handle->device, handle->is_ours ? DEVICE : REMOTE);
  return failed;
}

ENTRY int cuMemUnmap(char *at, size_t size) {
  pthread_mutex_lock(&guard);
  for (int i = 0; i < count;) {
    if (mappings[i].at < at || mappings[i].at >= at + size) { i++; continue; }
    emu_untrack(mappings[i].at);
    mmap(mappings[i].at, mappings[i].size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    let_go(mappings[i].backing);
    mappings[i] = mappings[--count];
  }
  pthread_mutex_unlock(&guard);
  return SUCCESS;
}

ENTRY int cuMemSetAccess(Address at, size_t size, const void *access, size_t count_of_devices) { return SUCCESS; }

static Mapping *mapping_at(const char *at) {
  for (int i = 0; i < count; i++)
    if (at >= mappings[i].at && at < mappings[i].at + mappings[i].size) return &mappings[i];
  return NULL;
}

ENTRY int cuMemRetainAllocationHandle(Backing **handle, const char *at) {
  pthread_mutex_lock(&guard);
  Mapping *found = mapping_at(at);
  if (found) {
    *handle = found->backing;
    found->backing->references++;
  }
  pthread_mutex_unlock(&guard);
  return found ? SUCCESS : INVALID_VALUE;
}

/* As a file descriptor: what is mapped already moves onto a memfd. */
ENTRY int cuMemExportToShareableHandle(int *descriptor, Backing *handle, int type, uint64_t flags) {
  if (type != POSIX_DESCRIPTOR) return NOT_SUPPORTED;
  pthread_mutex_lock(&guard);
  for (int i = 0; i < count && handle->shared < 0; i++)
    if (mappings[i].backing == handle) handle->shared = emu_move_onto_memfd(mappings[i].at, mappings[i].size);
  pthread_mutex_unlock(&guard);
  *descriptor = handle->shared < 0 ? -1 : dup(handle->shared);
  return *descriptor < 0 ? INVALID_VALUE : SUCCESS;
}

ENTRY int cuMemImportFromShareableHandle(Backing **handle, void *descriptor, int type) {
  int fd = type == POSIX_DESCRIPTOR ? dup((int)(intptr_t)descriptor) : -1;
  if (fd < 0) return NOT_SUPPORTED;
  *handle = new_backing(lseek(fd, 0, SEEK_END), emu_device(), 0, fd);
  return SUCCESS;
}

ENTRY int cuMulticastGetGranularity(size_t *size, const void *properties, int option) { *size = GRANULARITY; return SUCCESS; }
