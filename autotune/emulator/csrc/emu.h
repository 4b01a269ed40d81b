/* What the parts of the emulator share: cards with an account of memory, and no arithmetic.
 *
 *   machine.c      what cards there are; which of them this process sees
 *   account.c      who holds how much of which card, shared between processes
 *   report.c       what is told afterwards, in a file that survives any end of the process
 *   memory.c       allocations of this process, copies between them, backing shared with others
 *   stream.c       streams, events, graphs; when work counts as finished
 *   runtime_*.c    the runtime's entry points (libcudart)
 *   driver_*.c     the driver's (libcuda)
 *   nvml.c nccl.c math.c      those of the other libraries whose answers are acted on
 *   loader.c       dlopen: whoever loads one of these libraries by name gets this one
 *   stubs.c        generated: every other entry point, counted and answered with success
 */
#pragma once
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ENTRY __attribute__((visibility("default")))
#define ALIAS(name, of) extern __typeof__(of) name __attribute__((alias(#of), visibility("default")));

enum { MAX_CARDS = 16, MAX_PROCESSES = 64, MAX_PHASES = 32 };
#define MIB ((int64_t)1 << 20)

/* The runtime and the driver use the same numbers for these. */
enum {
  SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, DEVICES_UNAVAILABLE = 46, NO_DEVICE = 100,
  INVALID_DEVICE = 101, NOT_FOUND = 500, NOT_SUPPORTED = 801
};

enum card_state { CARD_OK, CARD_BUSY, CARD_LOST, CARD_FORBIDDEN, CARD_MEMORYLESS };

typedef struct {
  char name[96], uuid[48];
  int major, minor, multiprocessors, shared_kib, l2_mib, clock_khz, bus_bits, nvlink;
  int64_t memory;   /* what CUDA offers */
  int64_t reserved; /* what the driver keeps beside it: NVML's total is the sum */
  int64_t context;  /* charged to a process when it first uses the card */
  int64_t kernels;  /* charged with its first launch */
  int64_t nccl;     /* charged for each communicator of several ranks */
  int64_t foreign;  /* held by processes that are not emulated */
  enum card_state state;
  int gpu;   /* the GPU that it is, or is a slice of */
  int slice; /* its number among the slices of its GPU; -1 for a whole one */
} Card;

typedef struct {
  int cards, driver_version, runtime_version, hides_processes;
  int pid_shift; /* between numbers of processes here and those that NVML tells */
  int lag; /* launches after which work is finished without anybody waiting for it; 0: at once */
  Card card[MAX_CARDS]; /* what CUDA can use: whole GPUs and slices */
  int gpus;
  struct { int first, slices; Card whole; } gpu[MAX_CARDS]; /* as NVML counts; slices: 0 for a GPU without MIG */
  int visible, physical[MAX_CARDS]; /* this process's ordinals */
} Machine;
extern Machine machine;

/* machine.c */
int emu_initialise(void); /* as the first call of CUDA does: SUCCESS, NO_DEVICE, or NOT_INITIALIZED in a forked child */
int emu_is_initialised(void);
int emu_visible(void);
int emu_device(void); /* this thread's ordinal */
void emu_set_device(int ordinal);
const Card *emu_card(int ordinal);
int emu_attribute(const Card *card, int attribute);
void emu_uuid(const Card *card, unsigned char bytes[16]);

/* account.c */
int emu_enter(int ordinal); /* makes the context; an error number where the card cannot be had */
int emu_has_context(int ordinal);
void emu_first_launch(int ordinal);
int emu_charge(int ordinal, int64_t bytes); /* SUCCESS or OUT_OF_MEMORY */
int64_t emu_used(int physical);
int emu_is_gone(int pid);
int emu_processes(int physical, int pids[], int64_t used[], int room);

/* report.c */
typedef struct {
  uint32_t magic, version;
  int32_t pid, parent, stubs, phases;
  int64_t launches, copies, copies_skipped, bytes_skipped, refused;
  int64_t peak[MAX_CARDS], torch_allocated[MAX_CARDS], torch_reserved[MAX_CARDS];
  int64_t card_peak[MAX_CARDS]; /* of all processes together, when this one took memory */
  struct { char name[32]; int64_t peak[MAX_CARDS]; } phase[MAX_PHASES];
  uint32_t calls[];
} Report;
extern Report *emu_report;
extern const int emu_stub_count;  /* of stubs.c */
void emu_note_use(int physical, int64_t used);
void emu_keep_report(void);

/* memory.c */
enum kind {
  HOST = 1, DEVICE = 2, REMOTE = 3, /* another process's, not charged here */
  LENT = 4 /* the program's own memory, which it registered */
};
static inline int emu_on_host(enum kind kind) { return kind == HOST || kind == LENT; }
typedef struct { void *base; size_t size; int device; enum kind kind; int shared; /* a memfd, or -1 */ } Block;
void *emu_allocate(int ordinal, size_t size); /* NULL when the card is full */
void *emu_allocate_host(size_t size);
int emu_release(void *base);                  /* SUCCESS, or INVALID_VALUE where it is not a block's start */
int emu_find(const void *at, Block *found);   /* whether a block holds this address */
void emu_track(void *base, size_t size, int device, enum kind kind);
void emu_untrack(void *base);
int emu_share(void *base, size_t size);       /* its backing as a descriptor that others can map, or -1 */
int emu_move_onto_memfd(void *base, size_t size);
void *emu_map_shared(int pid, int fd, size_t size, int ordinal);
void emu_copy(void *to, const void *from, size_t size);
void emu_fill(void *at, int byte, size_t size);
void *emu_handle(void); /* something with an address of its own */

/* stream.c */
void emu_synchronise(void *stream);
void emu_synchronise_all(void);
double emu_milliseconds(void);

/* driver_launch.c */
void *emu_driver_symbol(const char *name);
