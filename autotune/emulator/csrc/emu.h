/* What the parts of the emulator share. Calls go down this list only:
 *
 *   runtime_*.c      entry points of the runtime (libcudart): devices, kernels, memory
 *   driver_*.c       those of the driver (libcuda)
 *   nvml.c           those of NVML: all cards, whatever this process sees of them
 *   nccl_*.c         those of NCCL: ranks that meet and exchange what is worth carrying
 *   math.c           those of cuBLAS, cuDNN and others whose answers are acted on
 *   python_hooks.c   those that the Python code in inject/ calls
 *   loader.c         dlopen: a library that is loaded by name is this one
 *   stubs.c          generated: every other entry point, counted and answered with success
 *
 *   stream.c         streams, events, graphs; when work counts as finished
 *   memory.c         allocations of this process, copies between them, backing shared with others
 *   errors.c         numbers, names and texts of errors; the last one of each thread
 *   account.c        which process holds how much of which card, shared between processes
 *   machine.c        the cards, and which of them this process sees
 *   report.c         figures of this process, in a file that survives any end of it
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
#define ALIAS(name, of) \
  extern __typeof__(of) name __attribute__((alias(#of), visibility("default")));

enum { MAX_CARDS = 16, MAX_PROCESSES = 64, MAX_PHASES = 32, PHASE_NAME = 32 };
#define MIB ((int64_t)1 << 20)

/* The runtime and the driver use the same numbers for errors. */
enum {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NOT_INITIALIZED = 3,
  DEVICES_UNAVAILABLE = 46,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  NOT_FOUND = 500,
  NOT_READY = 600,
  PEER_ACCESS_ALREADY_ENABLED = 704,
  NOT_PERMITTED = 800,
  NOT_SUPPORTED = 801,
};

/* And for properties of a device, by the names of CUdevice_attribute. */
enum {
  MAX_THREADS_PER_BLOCK = 1,
  MAX_BLOCK_DIM_X = 2,
  MAX_BLOCK_DIM_Y = 3,
  MAX_BLOCK_DIM_Z = 4,
  MAX_GRID_DIM_X = 5,
  MAX_GRID_DIM_Y = 6,
  MAX_GRID_DIM_Z = 7,
  SHARED_MEMORY_PER_BLOCK = 8,
  TOTAL_CONSTANT_MEMORY = 9,
  WARP_SIZE = 10,
  MAX_PITCH = 11,
  REGISTERS_PER_BLOCK = 12,
  CLOCK_RATE = 13,
  TEXTURE_ALIGNMENT = 14,
  GPU_OVERLAP = 15,
  MULTIPROCESSOR_COUNT = 16,
  CAN_MAP_HOST_MEMORY = 19,
  CONCURRENT_KERNELS = 31,
  ECC_ENABLED = 32,
  PCI_BUS_ID = 33,
  MEMORY_CLOCK_RATE = 36,
  GLOBAL_MEMORY_BUS_WIDTH = 37,
  L2_CACHE_SIZE = 38,
  THREADS_PER_MULTIPROCESSOR = 39,
  ASYNC_ENGINE_COUNT = 40,
  UNIFIED_ADDRESSING = 41,
  CAPABILITY_MAJOR = 75,
  CAPABILITY_MINOR = 76,
  STREAM_PRIORITIES_SUPPORTED = 78,
  GLOBAL_L1_CACHE_SUPPORTED = 79,
  LOCAL_L1_CACHE_SUPPORTED = 80,
  SHARED_MEMORY_PER_MULTIPROCESSOR = 81,
  REGISTERS_PER_MULTIPROCESSOR = 82,
  MANAGED_MEMORY = 83,
  CONCURRENT_MANAGED_ACCESS = 89,
  COMPUTE_PREEMPTION_SUPPORTED = 90,
  CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91,
  COOPERATIVE_LAUNCH = 95,
  COOPERATIVE_MULTI_DEVICE_LAUNCH = 96,
  SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
  CAN_FLUSH_REMOTE_WRITES = 98,
  HOST_REGISTER_SUPPORTED = 99,
  VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
  POSIX_DESCRIPTOR_SUPPORTED = 103,
  BLOCKS_PER_MULTIPROCESSOR = 106,
  GENERIC_COMPRESSION_SUPPORTED = 107,
  MAX_PERSISTING_L2_CACHE_SIZE = 108,
  MAX_ACCESS_POLICY_WINDOW_SIZE = 109,
  RESERVED_SHARED_MEMORY_PER_BLOCK = 111,
  MEMORY_POOLS_SUPPORTED = 115,
  MEMPOOL_SUPPORTED_HANDLE_TYPES = 119,
  CLUSTER_LAUNCH = 120,
};

/* report.c */
typedef struct {
  char name[PHASE_NAME];
  int64_t peak[MAX_CARDS];
} PhaseReport;
typedef struct {
  uint32_t magic, version;
  int32_t pid, parent, stubs, phases;
  int64_t launches, copies, copies_skipped, bytes_skipped, refused;
  int64_t peak[MAX_CARDS], torch_allocated[MAX_CARDS], torch_reserved[MAX_CARDS];
  int64_t card_peak[MAX_CARDS]; /* of all processes together, when this one took memory */
  PhaseReport phase[MAX_PHASES];
  uint32_t calls[]; /* of each generated entry point */
} Report;
extern Report *emu_report;
extern const int emu_stub_count; /* of stubs.c */
void emu_note_use(int physical, int64_t used);
int emu_begin_phase(const char *name); /* 0 if there are too many */
void emu_keep_report(void);            /* from now on in a file */

/* machine.c */
enum card_state { CARD_OK, CARD_BUSY, CARD_LOST, CARD_FORBIDDEN, CARD_MEMORYLESS };
typedef struct {
  char name[96], uuid[48];
  int major, minor, multiprocessors, shared_kib, l2_mib, clock_khz, bus_bits, nvlink;
  int64_t memory;   /* what CUDA offers */
  int64_t reserved; /* what the driver keeps beside it: NVML's total is the sum */
  int64_t context;  /* charged to a process when it first uses the card */
  int64_t kernels;  /* charged with its first launch */
  int64_t engine_kernels; /* charged when an engine starts in a trainer's process */
  int64_t nccl;     /* charged for each communicator of several ranks */
  int64_t foreign;  /* held by processes that are not emulated */
  enum card_state state;
  int gpu;   /* the GPU that it is, or is a slice of */
  int slice; /* its number among the slices of its GPU; -1 for a whole one */
} Card;
typedef struct {
  int first, slices; /* among the cards; slices: 0 for a GPU without MIG */
  Card whole;        /* of a GPU with slices */
} Gpu;
typedef struct {
  int driver_version, runtime_version;
  int hides_processes;
  int pid_shift; /* between numbers of processes here and those that NVML reports */
  int lag;       /* launches after which unawaited work is finished; 0: at once */
  int cards;
  Card card[MAX_CARDS]; /* what CUDA can use: whole GPUs and slices */
  int gpus;
  Gpu gpu[MAX_CARDS];           /* what NVML counts */
  int visible;
  int physical[MAX_CARDS]; /* card of each of this process's ordinals */
} Machine;
extern Machine machine;
int emu_initialise(void); /* as the first call of CUDA does; NOT_INITIALIZED in a forked child */
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
void emu_note_held(void);                   /* what this process holds, for its report */
int64_t emu_used(int physical);
int emu_is_gone(int pid);
int emu_processes(int physical, int pids[], int64_t used[], int capacity);

/* errors.c */
int emu_error(int error); /* the same error, which is now the thread's last one */

/* memory.c */
enum kind {
  HOST = 1,
  DEVICE = 2,
  REMOTE = 3, /* another process's, not charged here */
  LENT = 4    /* the program's own memory, which it registered */
};
static inline int emu_on_host(enum kind kind) { return kind == HOST || kind == LENT; }
typedef struct {
  void *base;
  size_t size;
  int device;
  enum kind kind;
  int shared; /* a memfd, or -1 */
} Block;
void *emu_allocate(int ordinal, size_t size); /* NULL when the card is full */
void *emu_allocate_host(size_t size);
int emu_release(void *base); /* SUCCESS, or INVALID_VALUE where it is not a block's start */
int emu_find(const void *address, Block *block); /* whether a block holds this address */
void emu_track(void *base, size_t size, int device, enum kind kind);
void emu_untrack(void *base);
int emu_share(void *base, size_t size); /* backing as a descriptor that others can map, or -1 */
int emu_move_onto_memfd(void *base, size_t size);
void *emu_map_shared(int pid, int fd, size_t size, int ordinal);
void emu_copy(void *to, const void *from, size_t size);
void emu_fill(void *base, int byte, size_t size);
void *emu_handle(void); /* something with an address of its own */

/* stream.c */
void emu_synchronise(void *stream);
void emu_synchronise_all(void);
double emu_milliseconds(void);

/* driver_launch.c */
void *emu_driver_symbol(const char *name);
