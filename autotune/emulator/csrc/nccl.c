/* NCCL: ranks really meet. What is worth carrying travels through shared memory, all of it where it is integers (ids, lengths,
 * pickled objects), small payloads where it is floating point; the rest are weights and gradients that were never computed, and
 * there the ranks only wait for each other. */
#include "emu.h"
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>

enum { MAX_RANKS = 64, SLOT = 1 << 20, CELL = 64 << 10, MOST_FLOATS = 64 << 10, MOST_INTEGERS = 64 << 20 };
enum { NCCL_SUCCESS = 0, NCCL_UNHANDLED_CUDA_ERROR = 1, NCCL_SYSTEM_ERROR = 2, NCCL_INVALID_USAGE = 5, NCCL_REMOTE_ERROR = 6 };
enum { SUM = 0, PRODUCT = 1, MAX = 2, MIN = 3, AVERAGE = 4 };

typedef struct { _Atomic uint32_t full; uint32_t size; char data[CELL]; } Cell;
typedef struct {
  _Atomic uint32_t arrived, round, joined;
  _Atomic int32_t pid[MAX_RANKS];
  Cell mail[MAX_RANKS][MAX_RANKS]; /* from, to */
  char slot[MAX_RANKS][SLOT];
} Room;
typedef struct { Room *room; int size, rank, device, splits; int64_t charged; char name[64]; } Communicator;
typedef struct { char text[128]; } UniqueId;

/* int8, uint8, int32, uint32, int64, uint64, half, float, double, bfloat16, and two of eight bits */
static const unsigned char TYPE_SIZE[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
static size_t size_of(int type) { return type >= 0 && type < (int)sizeof TYPE_SIZE ? TYPE_SIZE[type] : 4; }
static int is_integer(int type) { return type < 6; }

static int is_carried(size_t bytes, int type) { return bytes <= (size_t)(is_integer(type) ? MOST_INTEGERS : MOST_FLOATS); }

static void rest(unsigned *tries) {
  if (++*tries < 50) { sched_yield(); return; }
  struct timespec pause = {0, *tries < 1000 ? 50000 : 500000}; /* as much as one step of Python's */
  nanosleep(&pause, NULL);
}

/* A peer that ended never comes: asked now and then while waiting. */
static int is_alone(Communicator *c, unsigned tries) {
  if (tries % 2048 || !tries) return 0;
  for (int i = 0; i < c->size; i++)
    if (c->room->pid[i] && emu_is_gone(c->room->pid[i])) return 1;
  return 0;
}

static int meet(Communicator *c) {
  uint32_t round = c->room->round;
  unsigned tries = 0;
  if (atomic_fetch_add(&c->room->arrived, 1) + 1 == (uint32_t)c->size) {
    c->room->arrived = 0;
    c->room->round = round + 1;
    return NCCL_SUCCESS;
  }
  while (c->room->round == round) {
    rest(&tries);
    if (is_alone(c, tries)) return NCCL_REMOTE_ERROR;
  }
  return NCCL_SUCCESS;
}

static int open_room(Communicator *c) {
  char path[96];
  snprintf(path, sizeof path, "/autotune_%s", c->name);
  int fd = shm_open(path, O_RDWR | O_CREAT, 0600);
  if (fd < 0 || ftruncate(fd, sizeof(Room))) return NCCL_SYSTEM_ERROR;
  c->room = mmap(NULL, sizeof(Room), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (c->room == MAP_FAILED) return NCCL_SYSTEM_ERROR;
  c->room->pid[c->rank] = getpid();
  atomic_fetch_add(&c->room->joined, 1);
  for (unsigned tries = 0; c->room->joined < (uint32_t)c->size;) rest(&tries);
  int failed = meet(c);
  if (c->rank == 0) shm_unlink(path);
  return failed;
}

static int is_off(const char *variable) {
  const char *value = getenv(variable);
  return value && !strcmp(value, "0");
}

/* From 2.22 on, a communicator allocates its buffers in its first operation, where memory can be mapped (runtimeConn in
 * NCCL's init.cc). One that is created and never used has none. */
static int connects_at_use(void) {
  return NCCL_CODE >= 22200 && !is_off("NCCL_RUNTIME_CONNECT") && !is_off("NCCL_CUMEM_ENABLE");
}

static int connect_ranks(Communicator *c) {
  if (c->size < 2 || c->charged) return NCCL_SUCCESS;
  int64_t size = emu_card(c->device)->nccl;
  if (emu_enter(c->device) || emu_charge(c->device, size)) return NCCL_UNHANDLED_CUDA_ERROR;
  c->charged = size;
  return NCCL_SUCCESS;
}

static int join(const char *name, int size, int rank, void **out) {
  if (size > MAX_RANKS) return NCCL_INVALID_USAGE;
  Communicator *c = calloc(1, sizeof *c);
  c->size = size;
  c->rank = rank;
  c->device = emu_device();
  snprintf(c->name, sizeof c->name, "%s", name);
  *out = c;
  if (size < 2) return NCCL_SUCCESS;
  int failed = connects_at_use() ? NCCL_SUCCESS : connect_ranks(c);
  return failed ? failed : open_room(c);
}

static int leave(Communicator *c) {
  if (!c) return NCCL_SUCCESS;
  if (c->charged) emu_charge(c->device, -c->charged);
  if (c->room) munmap(c->room, sizeof(Room));
  free(c);
  return NCCL_SUCCESS;
}

ENTRY int ncclGetVersion(int *version) { *version = NCCL_CODE; return NCCL_SUCCESS; }
ENTRY const char *ncclGetErrorString(int error) {
  return error == NCCL_REMOTE_ERROR ? "a remote process exited" : error ? "emulated NCCL error" : "no error";
}
ENTRY const char *ncclGetLastError(void *c) { return ""; }

ENTRY int ncclGetUniqueId(UniqueId *id) {
  static _Atomic int made;
  struct timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  memset(id, 0, sizeof *id);
  snprintf(id->text, 48, "%d_%lx%lx_%d", getpid(), (long)time.tv_sec, (long)time.tv_nsec, made++);
  return NCCL_SUCCESS;
}

ENTRY int ncclCommInitRank(void **c, int size, UniqueId id, int rank) { return join(id.text, size, rank, c); }
ENTRY int ncclCommInitRankConfig(void **c, int size, UniqueId id, int rank, void *config) { return join(id.text, size, rank, c); }
ENTRY int ncclCommInitRankScalable(void **c, int size, int rank, int ids, UniqueId *id, void *config) {
  return join(id->text, size, rank, c);
}

ENTRY int ncclCommSplit(Communicator *c, int colour, int key, void **out, void *config) {
  struct { int colour, key; } *mine = (void *)c->room->slot[c->rank];
  *mine = (typeof(*mine)){colour, key};
  int failed = meet(c), size = 0, rank = 0;
  for (int i = 0; i < c->size && !failed; i++) {
    typeof(mine) other = (void *)c->room->slot[i];
    if (other->colour != colour) continue;
    size++;
    rank += other->key < key || (other->key == key && i < c->rank);
  }
  if (!failed) failed = meet(c);
  c->splits++;
  *out = NULL;
  if (failed || colour < 0) return failed;
  char name[96];
  snprintf(name, sizeof name, "%.40s_%d_%d", c->name, c->splits, colour);
  return join(name, size, rank, out);
}

ENTRY int ncclCommDestroy(Communicator *c) { return leave(c); }
ENTRY int ncclCommAbort(Communicator *c) { return leave(c); }
ENTRY int ncclCommFinalize(Communicator *c) { return NCCL_SUCCESS; }
ENTRY int ncclCommCount(Communicator *c, int *count) { *count = c->size; return NCCL_SUCCESS; }
ENTRY int ncclCommUserRank(Communicator *c, int *rank) { *rank = c->rank; return NCCL_SUCCESS; }
ENTRY int ncclCommCuDevice(Communicator *c, int *device) { *device = c->device; return NCCL_SUCCESS; }
ENTRY int ncclCommGetAsyncError(Communicator *c, int *error) { *error = NCCL_SUCCESS; return NCCL_SUCCESS; }
ENTRY int ncclCommRegister(Communicator *c, void *at, size_t size, void **handle) { *handle = emu_handle(); return NCCL_SUCCESS; }
ENTRY int ncclRedOpCreatePreMulSum(int *operation, void *scalar, int type, int where, void *c) { *operation = SUM; return 0; }

ENTRY int ncclMemAlloc(void **base, size_t size) {
  *base = emu_allocate(emu_device(), size);
  return *base ? NCCL_SUCCESS : 1;
}
ENTRY int ncclMemFree(void *base) { return emu_release(base); }

/* Numbers of the types that are carried, in the widest one: 64 bits of mantissa hold any integer here. */
static float of_half(uint16_t half) {
  uint32_t sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 31, mantissa = half & 1023, bits;
  if (!exponent) return (sign ? -1 : 1) * (mantissa * 5.9604645e-8f);
  bits = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | mantissa << 13;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static uint16_t to_half(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  int sign = bits >> 16 & 0x8000, exponent = (int)(bits >> 23 & 255) - 112;
  if (exponent <= 0) return sign;
  return exponent >= 31 ? sign | 0x7c00 : sign | exponent << 10 | (bits >> 13 & 1023);
}

static float of_bfloat(uint16_t half) {
  uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static uint16_t to_bfloat(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static long double read_one(const void *from, size_t i, int type) {
  switch (type) {
    case 0: return ((const int8_t *)from)[i];
    case 1: return ((const uint8_t *)from)[i];
    case 2: return ((const int32_t *)from)[i];
    case 3: return ((const uint32_t *)from)[i];
    case 4: return ((const int64_t *)from)[i];
    case 5: return ((const uint64_t *)from)[i];
    case 6: return of_half(((const uint16_t *)from)[i]);
    case 7: return ((const float *)from)[i];
    case 8: return ((const double *)from)[i];
    case 9: return of_bfloat(((const uint16_t *)from)[i]);
    default: return 0;
  }
}

static void write_one(void *to, size_t i, int type, long double value) {
  switch (type) {
    case 0: ((int8_t *)to)[i] = value; break;
    case 1: ((uint8_t *)to)[i] = value; break;
    case 2: ((int32_t *)to)[i] = value; break;
    case 3: ((uint32_t *)to)[i] = value; break;
    case 4: ((int64_t *)to)[i] = value; break;
    case 5: ((uint64_t *)to)[i] = value; break;
    case 6: ((uint16_t *)to)[i] = to_half(value); break;
    case 7: ((float *)to)[i] = value; break;
    case 8: ((double *)to)[i] = value; break;
    case 9: ((uint16_t *)to)[i] = to_bfloat(value); break;
  }
}

static long double joined(long double one, long double other, int operation) {
  switch (operation) {
    case PRODUCT: return one * other;
    case MAX: return one > other ? one : other;
    case MIN: return one < other ? one : other;
    default: return one + other;
  }
}

/* What all ranks have at this place of their slots, as one. */
static void reduce(Communicator *c, char *to, size_t offset, size_t bytes, int type, int operation) {
  for (size_t i = 0; i < bytes / size_of(type); i++) {
    long double value = read_one(c->room->slot[0] + offset, i, type);
    for (int rank = 1; rank < c->size; rank++) value = joined(value, read_one(c->room->slot[rank] + offset, i, type), operation);
    write_one(to, i, type, operation == AVERAGE ? value / c->size : value);
  }
}

static size_t least(size_t one, size_t other) { return one < other ? one : other; }

/* Alone, too much to carry, or no memory for the buffers. */
static int is_trivial(Communicator *c, const void *from, void *to, size_t bytes, size_t heaviest, int type, int *result) {
  *result = connect_ranks(c);
  if (*result) return 1;
  if (c->size == 1) {
    if (from && to) emu_copy(to, from, bytes);
    *result = NCCL_SUCCESS;
    return 1;
  }
  if (is_carried(heaviest, type)) return 0;
  *result = meet(c);
  return 1;
}

static int reduce_to(Communicator *c, const char *from, char *to, size_t count, int type, int operation) {
  size_t bytes = count * size_of(type);
  int result = NCCL_SUCCESS;
  if (is_trivial(c, from, to, bytes, bytes, type, &result)) return result;
  for (size_t done = 0; done < bytes && !result; done += SLOT) {
    size_t part = least(bytes - done, SLOT);
    memcpy(c->room->slot[c->rank], from + done, part);
    result = meet(c);
    if (!result && to) reduce(c, to + done, 0, part, type, operation);
    if (!result) result = meet(c);
  }
  return result;
}

ENTRY int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, Communicator *c, void *stream) {
  return reduce_to(c, from, to, count, type, operation);
}

ENTRY int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root, Communicator *c, void *stream) {
  return reduce_to(c, from, c->rank == root ? to : NULL, count, type, operation);
}

ENTRY int ncclBroadcast(const char *from, char *to, size_t count, int type, int root, Communicator *c, void *stream) {
  size_t bytes = count * size_of(type);
  int result = NCCL_SUCCESS;
  if (is_trivial(c, from, to, bytes, bytes, type, &result)) return result;
  for (size_t done = 0; done < bytes && !result; done += SLOT) {
    size_t part = least(bytes - done, SLOT);
    if (c->rank == root) memcpy(c->room->slot[root], from + done, part);
    result = meet(c);
    if (!result && to) memcpy(to + done, c->room->slot[root], part);
    if (!result) result = meet(c);
  }
  return result;
}

ENTRY int ncclBcast(char *at, size_t count, int type, int root, Communicator *c, void *stream) {
  return ncclBroadcast(at, at, count, type, root, c, stream);
}

ENTRY int ncclAllGather(const char *from, char *to, size_t count, int type, Communicator *c, void *stream) {
  size_t bytes = count * size_of(type);
  int result = NCCL_SUCCESS;
  if (is_trivial(c, from, to, bytes, bytes * c->size, type, &result)) return result;
  for (size_t done = 0; done < bytes && !result; done += SLOT) {
    size_t part = least(bytes - done, SLOT);
    memcpy(c->room->slot[c->rank], from + done, part);
    result = meet(c);
    for (int rank = 0; rank < c->size && !result; rank++) memcpy(to + rank * bytes + done, c->room->slot[rank], part);
    if (!result) result = meet(c);
  }
  return result;
}

ENTRY int ncclReduceScatter(const char *from, char *to, size_t count, int type, int operation, Communicator *c, void *stream) {
  size_t bytes = count * size_of(type), share = SLOT / c->size & ~(size_t)63;
  int result = NCCL_SUCCESS;
  if (is_trivial(c, from, to, bytes, bytes * c->size, type, &result)) return result;
  for (size_t done = 0; done < bytes && !result; done += share) {
    size_t part = least(bytes - done, share);
    for (int rank = 0; rank < c->size; rank++) memcpy(c->room->slot[c->rank] + rank * share, from + rank * bytes + done, part);
    result = meet(c);
    if (!result) reduce(c, to + done, c->rank * share, part, type, operation);
    if (!result) result = meet(c);
  }
  return result;
}

/* Sending and receiving: queued within a group, so that exchanges can't block each other. */
typedef struct { Communicator *c; char *at; size_t bytes, done; int peer, sends, carried, finished; } Transfer;
enum { MOST_TRANSFERS = 4096 };
static __thread Transfer transfers[MOST_TRANSFERS];
static __thread int queued, depth;

static int advance(Transfer *t) {
  Room *room = t->c->room;
  Cell *cell = t->sends ? &room->mail[t->c->rank][t->peer] : &room->mail[t->peer][t->c->rank];
  if (cell->full == (uint32_t)t->sends) return 0;
  size_t part = least(t->bytes - t->done, CELL);
  if (t->carried && t->sends) memcpy(cell->data, t->at + t->done, part);
  if (t->carried && !t->sends) memcpy(t->at + t->done, cell->data, part);
  t->done += t->carried ? part : t->bytes;
  t->finished = t->done >= t->bytes;
  cell->full = t->sends;
  return 1;
}

/* Between two ranks, in one direction, order is kept. */
static int must_wait(int at) {
  for (int i = 0; i < at; i++) {
    Transfer *before = &transfers[i];
    if (!before->finished && before->c == transfers[at].c && before->peer == transfers[at].peer && before->sends == transfers[at].sends)
      return 1;
  }
  return 0;
}

static int carry_out(void) {
  int result = NCCL_SUCCESS;
  unsigned tries = 0;
  for (int left = queued; left && !result;) {
    int moved = 0;
    for (int i = 0; i < queued; i++) {
      if (transfers[i].finished || must_wait(i) || !advance(&transfers[i])) continue;
      moved = 1;
      left -= transfers[i].finished;
    }
    if (moved) continue;
    rest(&tries);
    if (is_alone(transfers[0].c, tries)) result = NCCL_REMOTE_ERROR;
  }
  queued = 0;
  return result;
}

static int transfer(Communicator *c, char *at, size_t count, int type, int peer, int sends) {
  if (c->size == 1 || peer == c->rank) return NCCL_SUCCESS;
  if (queued == MOST_TRANSFERS) return NCCL_INVALID_USAGE;
  if (connect_ranks(c)) return NCCL_UNHANDLED_CUDA_ERROR;
  size_t bytes = count * size_of(type);
  transfers[queued++] = (Transfer){c, at, bytes, 0, peer, sends, is_carried(bytes, type)};
  return depth ? NCCL_SUCCESS : carry_out();
}

ENTRY int ncclSend(char *from, size_t count, int type, int peer, Communicator *c, void *stream) {
  return transfer(c, from, count, type, peer, 1);
}

ENTRY int ncclRecv(char *to, size_t count, int type, int peer, Communicator *c, void *stream) {
  return transfer(c, to, count, type, peer, 0);
}

ENTRY int ncclGroupStart(void) {
  depth++;
  return NCCL_SUCCESS;
}

ENTRY int ncclGroupEnd(void) { return --depth ? NCCL_SUCCESS : carry_out(); }
