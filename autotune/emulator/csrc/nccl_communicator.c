/* NCCL: the ranks of a communicator, their shared memory, and how they wait for each other. */
#include "nccl.h"
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>

typedef struct {
  char text[128];
} UniqueId;

/* 1. Waiting. */

void emu_nccl_rest(unsigned *tries) {
  ++*tries;
  if (*tries < 50) {
    sched_yield();
    return;
  }
  struct timespec pause = {0, *tries < 1000 ? 50000 : 500000}; /* as much as one step of Python's */
  nanosleep(&pause, NULL);
}

/* A peer that ended never comes: checked now and then while waiting. */
int emu_nccl_lost_peer(Communicator *communicator, unsigned tries) {
  if (!tries || tries % 2048) return 0;
  for (int rank = 0; rank < communicator->size; rank++) {
    int pid = communicator->room->pid[rank];
    if (pid && emu_is_gone(pid)) return 1;
  }
  return 0;
}

int emu_nccl_meet(Communicator *communicator) {
  Room *room = communicator->room;
  uint32_t round = room->round;
  unsigned tries = 0;
  int is_last = atomic_fetch_add(&room->arrived, 1) + 1 == (uint32_t)communicator->size;
  if (is_last) {
    room->arrived = 0;
    room->round = round + 1;
    return NCCL_SUCCESS;
  }
  while (room->round == round) {
    emu_nccl_rest(&tries);
    if (emu_nccl_lost_peer(communicator, tries)) return NCCL_REMOTE_ERROR;
  }
  return NCCL_SUCCESS;
}

/* 2. Shared memory, which has no name any more once all ranks have joined. */

static int open_room(Communicator *communicator) {
  char path[96];
  snprintf(path, sizeof path, "/autotune_%s", communicator->name);
  int fd = shm_open(path, O_RDWR | O_CREAT, 0600);
  if (fd < 0 || ftruncate(fd, sizeof(Room))) return NCCL_SYSTEM_ERROR;
  Room *room = mmap(NULL, sizeof(Room), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  communicator->room = room;
  close(fd);
  if (room == MAP_FAILED) return NCCL_SYSTEM_ERROR;
  room->pid[communicator->rank] = getpid();
  atomic_fetch_add(&room->joined, 1);
  for (unsigned tries = 0; room->joined < (uint32_t)communicator->size;) emu_nccl_rest(&tries);
  int error = emu_nccl_meet(communicator);
  if (communicator->rank == 0) shm_unlink(path);
  return error;
}

/* 3. Buffers on the card. */

static int is_off(const char *variable) {
  const char *value = getenv(variable);
  return value && !strcmp(value, "0");
}

/* From 2.22 on, a communicator allocates its buffers in its first operation, where memory can be
 * mapped (runtimeConn in NCCL's init.cc). One that is created and never used has none. */
static int connects_at_use(void) {
  return NCCL_CODE >= 22200 && !is_off("NCCL_RUNTIME_CONNECT") && !is_off("NCCL_CUMEM_ENABLE");
}

int emu_nccl_connect(Communicator *communicator) {
  if (communicator->size < 2 || communicator->charged) return NCCL_SUCCESS;
  int device = communicator->device;
  int64_t size = emu_card(device)->nccl;
  if (emu_enter(device) || emu_charge(device, size)) return NCCL_UNHANDLED_CUDA_ERROR;
  communicator->charged = size;
  return NCCL_SUCCESS;
}

/* 4. Entry points. */

static int join(const char *name, int size, int rank, void **out) {
  if (size > MAX_RANKS) return NCCL_INVALID_USAGE;
  Communicator *communicator = calloc(1, sizeof *communicator);
  communicator->size = size;
  communicator->rank = rank;
  communicator->device = emu_device();
  snprintf(communicator->name, sizeof communicator->name, "%s", name);
  *out = communicator;
  if (size < 2) return NCCL_SUCCESS;
  int error = connects_at_use() ? NCCL_SUCCESS : emu_nccl_connect(communicator);
  return error ? error : open_room(communicator);
}

static int leave(Communicator *communicator) {
  if (!communicator) return NCCL_SUCCESS;
  if (communicator->charged) emu_charge(communicator->device, -communicator->charged);
  if (communicator->room) munmap(communicator->room, sizeof(Room));
  free(communicator);
  return NCCL_SUCCESS;
}

ENTRY int ncclGetVersion(int *version) {
  *version = NCCL_CODE;
  return NCCL_SUCCESS;
}

ENTRY const char *ncclGetErrorString(int error) {
  if (error == NCCL_REMOTE_ERROR) return "a remote process exited";
  return error ? "emulated NCCL error" : "no error";
}

ENTRY const char *ncclGetLastError(void *communicator) { return ""; }

ENTRY int ncclGetUniqueId(UniqueId *id) {
  static _Atomic int ids;
  struct timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  memset(id, 0, sizeof *id);
  snprintf(id->text, 48, "%d_%lx%lx_%d", getpid(), (long)time.tv_sec, (long)time.tv_nsec, ids++);
  return NCCL_SUCCESS;
}

ENTRY int ncclCommInitRank(void **out, int size, UniqueId id, int rank) {
  return join(id.text, size, rank, out);
}

ENTRY int ncclCommInitRankConfig(void **out, int size, UniqueId id, int rank, void *config) {
  return join(id.text, size, rank, out);
}

ENTRY int ncclCommInitRankScalable(
    void **out, int size, int rank, int id_count, UniqueId *ids, void *config) {
  return join(ids->text, size, rank, out);
}

/* What each rank passes to a split. */
typedef struct {
  int colour, key;
} Split;

/* Ranks of one colour become a communicator, in the order of their keys. */
ENTRY int ncclCommSplit(Communicator *communicator, int colour, int key, void **out, void *config) {
  /* 1. The new rank, and the number of ranks. */
  Room *room = communicator->room;
  *(Split *)room->slot[communicator->rank] = (Split){colour, key};
  int error = emu_nccl_meet(communicator), size = 0, rank = 0;
  for (int i = 0; i < communicator->size && !error; i++) {
    const Split *other = (const Split *)room->slot[i];
    if (other->colour != colour) continue;
    size++;
    rank += other->key < key || (other->key == key && i < communicator->rank);
  }
  if (!error) error = emu_nccl_meet(communicator);

  /* 2. The communicator; none for a negative colour. */
  communicator->splits++;
  *out = NULL;
  if (error || colour < 0) return error;
  char name[96];
  snprintf(name, sizeof name, "%.40s_%d_%d", communicator->name, communicator->splits, colour);
  return join(name, size, rank, out);
}

ENTRY int ncclCommDestroy(Communicator *communicator) { return leave(communicator); }
ENTRY int ncclCommAbort(Communicator *communicator) { return leave(communicator); }
ENTRY int ncclCommFinalize(Communicator *communicator) { return NCCL_SUCCESS; }

ENTRY int ncclCommCount(Communicator *communicator, int *count) {
  *count = communicator->size;
  return NCCL_SUCCESS;
}

ENTRY int ncclCommUserRank(Communicator *communicator, int *rank) {
  *rank = communicator->rank;
  return NCCL_SUCCESS;
}

ENTRY int ncclCommCuDevice(Communicator *communicator, int *device) {
  *device = communicator->device;
  return NCCL_SUCCESS;
}

ENTRY int ncclCommGetAsyncError(Communicator *communicator, int *error) {
  *error = NCCL_SUCCESS;
  return NCCL_SUCCESS;
}

ENTRY int ncclCommRegister(Communicator *communicator, void *base, size_t size, void **handle) {
  *handle = emu_handle();
  return NCCL_SUCCESS;
}

ENTRY int ncclRedOpCreatePreMulSum(
    int *operation, void *scalar, int type, int residence, void *communicator) {
  *operation = SUM;
  return NCCL_SUCCESS;
}

ENTRY int ncclMemAlloc(void **base, size_t size) {
  *base = emu_allocate(emu_device(), size);
  return *base ? NCCL_SUCCESS : NCCL_UNHANDLED_CUDA_ERROR;
}

ENTRY int ncclMemFree(void *base) { return emu_release(base); }
