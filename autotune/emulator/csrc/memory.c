/* This process's allocations. Device memory is host memory that is reserved and never touched unless something writes to it:
 * a model of 70 GB costs the host nothing. */
#include "emu.h"
#include <fcntl.h>
#include <sys/mman.h>

enum { PAGE = 4096, AT_ONCE = 4096, COPY_PLAINLY = 64 << 10, COPY_MOST = 1 << 20 };
static Block *blocks; /* by address */
static int count, room;
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;

static size_t up_to(size_t size, size_t step) { return (size + step - 1) / step * step; }

static int last_not_after(const void *at) {
  int low = 0, high = count;
  while (low < high) {
    int middle = (low + high) / 2;
    if (blocks[middle].base <= at) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

void emu_track(void *base, size_t size, int device, enum kind kind) {
  pthread_mutex_lock(&guard);
  if (count == room) {
    room = room ? 2 * room : 1024;
    blocks = realloc(blocks, room * sizeof *blocks);
  }
  int at = last_not_after(base) + 1;
  memmove(blocks + at + 1, blocks + at, (count - at) * sizeof *blocks);
  blocks[at] = (Block){base, size, device, kind, -1};
  count++;
  pthread_mutex_unlock(&guard);
}

static int remove_block(void *base, Block *was) {
  pthread_mutex_lock(&guard);
  int at = last_not_after(base), there = at >= 0 && blocks[at].base == base;
  if (there) {
    *was = blocks[at];
    memmove(blocks + at, blocks + at + 1, (count - at - 1) * sizeof *blocks);
    count--;
  }
  pthread_mutex_unlock(&guard);
  return there;
}

void emu_untrack(void *base) {
  Block was;
  remove_block(base, &was);
}

int emu_find(const void *at, Block *found) {
  pthread_mutex_lock(&guard);
  int index = last_not_after(at);
  int there = index >= 0 && (const char *)at < (const char *)blocks[index].base + blocks[index].size;
  if (there) *found = blocks[index];
  pthread_mutex_unlock(&guard);
  return there;
}

/* The driver gives memory in pieces of 2 MiB, and packs what is small. */
static size_t charged(size_t size) { return up_to(size, size >= MIB ? 2 * MIB : 512); }

static void *reserve(size_t size) {
  void *base = mmap(NULL, up_to(size, PAGE), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return NULL;
  madvise(base, up_to(size, PAGE), MADV_NOHUGEPAGE); /* or one written byte would cost 2 MiB */
  return base;
}

void *emu_allocate(int ordinal, size_t size) {
  if (emu_enter(ordinal) || emu_charge(ordinal, charged(size))) return NULL;
  void *base = reserve(size);
  if (!base) {
    emu_charge(ordinal, -(int64_t)charged(size));
    return NULL;
  }
  emu_track(base, size, ordinal, DEVICE);
  return base;
}

void *emu_allocate_host(size_t size) {
  void *base = reserve(size ? size : 1);
  if (base) emu_track(base, size ? size : 1, emu_device(), HOST);
  return base;
}

int emu_release(void *base) {
  Block was;
  if (!base) return SUCCESS;
  if (!remove_block(base, &was)) return INVALID_VALUE;
  if (was.kind == DEVICE) emu_charge(was.device, -(int64_t)charged(was.size));
  if (was.shared >= 0) close(was.shared);
  munmap(base, up_to(was.size, PAGE));
  return SUCCESS;
}

/* Only the pages that were touched are copied: the rest stays a hole on both sides. */
int emu_move_onto_memfd(void *base, size_t size) {
  unsigned char touched[AT_ONCE];
  size_t whole = up_to(size, PAGE);
  int fd = memfd_create("autotune-emulated", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, whole)) return -1;
  for (size_t offset = 0; offset < whole; offset += (size_t)AT_ONCE * PAGE) {
    size_t part = whole - offset < (size_t)AT_ONCE * PAGE ? whole - offset : (size_t)AT_ONCE * PAGE;
    if (mincore((char *)base + offset, part, touched)) continue;
    for (size_t page = 0; page < part / PAGE; page++)
      if (touched[page] & 1 && pwrite(fd, (char *)base + offset + page * PAGE, PAGE, offset + page * PAGE) != PAGE) return -1;
  }
  if (mmap(base, whole, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, 0) == MAP_FAILED) return -1;
  return fd;
}

int emu_share(void *base, size_t size) {
  pthread_mutex_lock(&guard);
  int at = last_not_after(base), fd = -1;
  if (at >= 0 && blocks[at].base == base && blocks[at].kind == DEVICE) {
    if (blocks[at].shared < 0) blocks[at].shared = emu_move_onto_memfd(base, size);
    fd = blocks[at].shared;
  }
  pthread_mutex_unlock(&guard);
  return fd;
}

void *emu_map_shared(int pid, int fd, size_t size, int ordinal) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
  int opened = open(path, O_RDWR | O_CLOEXEC);
  if (opened < 0) return NULL;
  void *base = mmap(NULL, up_to(size, PAGE), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, opened, 0);
  close(opened);
  if (base == MAP_FAILED) return NULL;
  emu_track(base, size, ordinal, REMOTE);
  return base;
}

/* What a card holds is true on the pages that were ever written to: only they are copied, and the others are zero. */
static void copy_written(char *to, const char *from, size_t size) {
  unsigned char written[AT_ONCE];
  Block block;
  int onto_card = emu_find(to, &block) && !emu_on_host(block.kind);
  for (size_t done = 0; done < size;) {
    const char *page = (const char *)((uintptr_t)(from + done) & ~(uintptr_t)(PAGE - 1));
    size_t pages = up_to(from + size - page, PAGE) / PAGE;
    if (pages > AT_ONCE) pages = AT_ONCE;
    if (mincore((void *)page, pages * PAGE, written)) return;
    for (size_t first = 0, end; first < pages; first = end) {
      for (end = first + 1; end < pages && (written[end] & 1) == (written[first] & 1); end++) continue;
      size_t until = page + end * PAGE - from, part = (until < size ? until : size) - done;
      if (written[first] & 1) memmove(to + done, from + done, part);
      else if (onto_card) emu_fill(to + done, 0, part);
      done += part;
    }
  }
}

/* For the host's memory, `to` holding zeros: see inject/emulator_values.py. */
ENTRY void emu_copy_written(void *to, const void *from, size_t size) { copy_written(to, from, size); }

/* A large copy from the host is left out: it is weights, whose values nothing computes with, and a card would hold them in the
 * host's memory once more. Ids, masks and pickled objects are small or kept true elsewhere. */
void emu_copy(void *to, const void *from, size_t size) {
  Block block;
  if (!size || to == from) return;
  emu_report->copies++;
  if (size <= COPY_PLAINLY) {
    memmove(to, from, size);
  } else if (emu_find(from, &block) && !emu_on_host(block.kind)) {
    copy_written(to, from, size);
  } else if (size <= COPY_MOST) {
    memmove(to, from, size);
  } else {
    emu_report->copies_skipped++;
    emu_report->bytes_skipped += size;
  }
}

/* Zeroes memory that no file backs, without writing to its whole pages. */
ENTRY void emu_give_back(void *at, size_t size) {
  uintptr_t first = up_to((uintptr_t)at, PAGE), end = ((uintptr_t)at + size) & ~(uintptr_t)(PAGE - 1);
  memset(at, 0, first - (uintptr_t)at);
  if (madvise((void *)first, end - first, MADV_REMOVE)) /* which is for shared backing alone */
    madvise((void *)first, end - first, MADV_DONTNEED);
  memset((void *)end, 0, (uintptr_t)at + size - end);
}

/* Zeroing gives whole pages back to the host instead of writing to them; pinned memory is a mapping of its own as well. */
void emu_fill(void *at, int byte, size_t size) {
  if (byte & 0xff) {
    if (size <= COPY_MOST) memset(at, byte, size);
    return;
  }
  Block block;
  if (size < 4 * PAGE || !emu_find(at, &block) || block.kind == LENT) {
    if (size <= COPY_MOST) memset(at, 0, size);
    return;
  }
  emu_give_back(at, size);
}

void *emu_handle(void) { return calloc(1, 1024); }
