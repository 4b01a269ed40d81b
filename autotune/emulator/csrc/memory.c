/* This process's allocations. Device memory is host memory that is reserved and never touched
 * unless something writes to it: a model of 70 GB costs the host nothing. */
#include "emu.h"
#include <fcntl.h>
#include <sys/mman.h>

enum {
  PAGE = 4096,
  PAGES_AT_ONCE = 4096,
  ALWAYS_COPIED = 64 << 10, /* bytes up to which every copy is made */
  MOST_COPIED = 1 << 20     /* the same from the host's memory, and for values other than 0 */
};

static size_t round_up(size_t size, size_t step) { return (size + step - 1) / step * step; }
static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* 1. The blocks, ordered by address. */

static Block *blocks;
static int count, capacity;
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;

/* The index of the last block that begins at or before an address; -1 without one. */
static int last_not_after(const void *address) {
  int low = 0, high = count;
  while (low < high) {
    int middle = (low + high) / 2;
    if (blocks[middle].base <= address) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

void emu_track(void *base, size_t size, int device, enum kind kind) {
  pthread_mutex_lock(&guard);
  if (count == capacity) {
    capacity = capacity ? 2 * capacity : 1024;
    blocks = realloc(blocks, capacity * sizeof *blocks);
  }
  int index = last_not_after(base) + 1;
  memmove(blocks + index + 1, blocks + index, (count - index) * sizeof *blocks);
  blocks[index] = (Block){base, size, device, kind, -1};
  count++;
  pthread_mutex_unlock(&guard);
}

/* Whether there was a block at this address. */
static int remove_block(void *base, Block *removed) {
  pthread_mutex_lock(&guard);
  int index = last_not_after(base);
  int exists = index >= 0 && blocks[index].base == base;
  if (exists) {
    *removed = blocks[index];
    memmove(blocks + index, blocks + index + 1, (count - index - 1) * sizeof *blocks);
    count--;
  }
  pthread_mutex_unlock(&guard);
  return exists;
}

void emu_untrack(void *base) {
  Block removed;
  remove_block(base, &removed);
}

int emu_find(const void *address, Block *block) {
  pthread_mutex_lock(&guard);
  int index = last_not_after(address);
  int exists = 0;
  if (index >= 0) {
    const char *end = (const char *)blocks[index].base + blocks[index].size;
    exists = (const char *)address < end;
  }
  if (exists) *block = blocks[index];
  pthread_mutex_unlock(&guard);
  return exists;
}

static int is_on_card(const void *address) {
  Block block;
  return emu_find(address, &block) && !emu_on_host(block.kind);
}

/* 2. Allocations. */

/* The driver gives memory in pieces of 2 MiB, and packs what is small. */
static size_t charged_size(size_t size) { return round_up(size, size >= MIB ? 2 * MIB : 512); }

static void *reserve(size_t size) {
  size_t length = round_up(size, PAGE);
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void *base = mmap(NULL, length, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (base == MAP_FAILED) return NULL;
  madvise(base, length, MADV_NOHUGEPAGE); /* or one written byte would cost 2 MiB */
  return base;
}

void *emu_allocate(int ordinal, size_t size) {
  int64_t charge = charged_size(size);
  if (emu_enter(ordinal) || emu_charge(ordinal, charge)) return NULL;
  void *base = reserve(size);
  if (!base) {
    emu_charge(ordinal, -charge);
    return NULL;
  }
  emu_track(base, size, ordinal, DEVICE);
  return base;
}

void *emu_allocate_host(size_t size) {
  if (!size) size = 1;
  void *base = reserve(size);
  if (base) emu_track(base, size, emu_device(), HOST);
  return base;
}

int emu_release(void *base) {
  Block block;
  if (!base) return SUCCESS;
  if (!remove_block(base, &block)) return INVALID_VALUE;
  if (block.kind == DEVICE) emu_charge(block.device, -(int64_t)charged_size(block.size));
  if (block.shared >= 0) close(block.shared);
  munmap(base, round_up(block.size, PAGE));
  return SUCCESS;
}

void *emu_handle(void) { return calloc(1, 1024); }

/* 3. Backing that other processes can map. */

/* Only the pages that were touched are copied: the others stay a hole on both sides. */
static int copy_touched_pages(int fd, const char *base, size_t length) {
  unsigned char touched[PAGES_AT_ONCE];
  size_t step = (size_t)PAGES_AT_ONCE * PAGE;
  for (size_t offset = 0; offset < length; offset += step) {
    size_t part = least(length - offset, step);
    if (mincore((void *)(base + offset), part, touched)) continue;
    for (size_t page = 0; page < part / PAGE; page++) {
      size_t at = offset + page * PAGE;
      if (touched[page] & 1 && pwrite(fd, base + at, PAGE, at) != PAGE) return 0;
    }
  }
  return 1;
}

int emu_move_onto_memfd(void *base, size_t size) {
  size_t length = round_up(size, PAGE);
  int fd = memfd_create("autotune-emulated", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, length)) return -1;
  if (!copy_touched_pages(fd, base, length)) return -1;
  int flags = MAP_SHARED | MAP_NORESERVE | MAP_FIXED;
  if (mmap(base, length, PROT_READ | PROT_WRITE, flags, fd, 0) == MAP_FAILED) return -1;
  return fd;
}

int emu_share(void *base, size_t size) {
  pthread_mutex_lock(&guard);
  int index = last_not_after(base), fd = -1;
  if (index >= 0 && blocks[index].base == base && blocks[index].kind == DEVICE) {
    if (blocks[index].shared < 0) blocks[index].shared = emu_move_onto_memfd(base, size);
    fd = blocks[index].shared;
  }
  pthread_mutex_unlock(&guard);
  return fd;
}

void *emu_map_shared(int pid, int fd, size_t size, int ordinal) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
  int own_fd = open(path, O_RDWR | O_CLOEXEC);
  if (own_fd < 0) return NULL;
  int flags = MAP_SHARED | MAP_NORESERVE;
  void *base = mmap(NULL, round_up(size, PAGE), PROT_READ | PROT_WRITE, flags, own_fd, 0);
  close(own_fd);
  if (base == MAP_FAILED) return NULL;
  emu_track(base, size, ordinal, REMOTE);
  return base;
}

/* 4. Copies. */

/* The pages from `first` on that are written, or not, like that one: the place behind the last. */
static size_t end_of_run(const unsigned char written[], size_t first, size_t pages) {
  size_t end = first + 1;
  while (end < pages && (written[end] & 1) == (written[first] & 1)) end++;
  return end;
}

/* What a card holds is true on the pages that were ever written to: only they are copied, and the
 * others are zero. */
static void copy_written(char *to, const char *from, size_t size) {
  unsigned char written[PAGES_AT_ONCE];
  int onto_card = is_on_card(to);
  for (size_t done = 0; done < size;) {
    /* 1. The next pages, from the one with the next byte on. */
    const char *page = (const char *)((uintptr_t)(from + done) & ~(uintptr_t)(PAGE - 1));
    size_t pages = least(round_up(from + size - page, PAGE) / PAGE, PAGES_AT_ONCE);
    if (mincore((void *)page, pages * PAGE, written)) return;

    /* 2. Runs of written pages and of others. */
    for (size_t first = 0, end; first < pages; first = end) {
      end = end_of_run(written, first, pages);
      size_t part = least(page + end * PAGE - from, size) - done;
      if (written[first] & 1) memmove(to + done, from + done, part);
      else if (onto_card) emu_fill(to + done, 0, part);
      done += part;
    }
  }
}

/* For the host's memory, `to` holding zeros: see inject/emulator_memory.py. */
ENTRY void emu_copy_written(void *to, const void *from, size_t size) {
  copy_written(to, from, size);
}

/* A large copy from the host is left out: it is weights, whose values nothing computes with, and a
 * card would hold them in the host's memory once more. Ids, masks and pickled objects are small or
 * kept true elsewhere. */
void emu_copy(void *to, const void *from, size_t size) {
  if (!size || to == from) return;
  emu_report->copies++;
  if (size <= ALWAYS_COPIED) {
    memmove(to, from, size);
  } else if (is_on_card(from)) {
    copy_written(to, from, size);
  } else if (size <= MOST_COPIED) {
    memmove(to, from, size);
  } else {
    emu_report->copies_skipped++;
    emu_report->bytes_skipped += size;
  }
}

/* Zeroes memory that no file backs, without writing to its complete pages. */
ENTRY void emu_give_back(void *base, size_t size) {
  uintptr_t begin = (uintptr_t)base, end = begin + size;
  uintptr_t first_page = round_up(begin, PAGE), end_of_pages = end & ~(uintptr_t)(PAGE - 1);
  size_t length = end_of_pages - first_page;
  memset(base, 0, first_page - begin);
  if (madvise((void *)first_page, length, MADV_REMOVE)) /* which is for shared backing alone */
    madvise((void *)first_page, length, MADV_DONTNEED);
  memset((void *)end_of_pages, 0, end - end_of_pages);
}

/* Zeroing gives complete pages back to the host instead of writing to them; pinned memory is a
 * mapping of its own as well. */
void emu_fill(void *base, int byte, size_t size) {
  Block block;
  int is_zero = !(byte & 0xff);
  if (is_zero && size >= 4 * PAGE && emu_find(base, &block) && block.kind != LENT)
    emu_give_back(base, size);
  else if (size <= MOST_COPIED)
    memset(base, byte, size);
}
