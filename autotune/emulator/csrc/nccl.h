/* NCCL: ranks really meet. What is worth carrying travels through shared memory: all of it where it
 * is integers (ids, lengths, pickled objects), small payloads where it is floating point. The
 * others are weights and gradients that were never computed, and there the ranks only wait for each
 * other. Calls go down this list only:
 *
 *   nccl_collectives.c    operations of all ranks
 *   nccl_transfers.c      sending and receiving between two ranks
 *   nccl_communicator.c   the ranks of a communicator, their shared memory, and how they wait
 *   nccl_numbers.c        types, and reductions of their numbers
 */
#pragma once
#include "emu.h"

enum {
  MAX_RANKS = 64,
  SLOT_SIZE = 1 << 20,  /* bytes of a collective at a time */
  CELL_SIZE = 64 << 10, /* bytes of a transfer at a time */
};
enum {
  NCCL_SUCCESS = 0,
  NCCL_UNHANDLED_CUDA_ERROR = 1,
  NCCL_SYSTEM_ERROR = 2,
  NCCL_INVALID_USAGE = 5,
  NCCL_REMOTE_ERROR = 6,
};

/* One part of a transfer on its way. */
typedef struct {
  _Atomic uint32_t full;
  uint32_t unused;
  char data[CELL_SIZE];
} Cell;

/* Shared memory of a communicator. */
typedef struct {
  _Atomic uint32_t arrived, round, joined;
  _Atomic int32_t pid[MAX_RANKS];
  Cell mail[MAX_RANKS][MAX_RANKS]; /* from, to */
  char slot[MAX_RANKS][SLOT_SIZE];
} Room;

typedef struct {
  Room *room;
  int size, rank, device, splits;
  int64_t charged; /* bytes of its buffers on the card; 0 before they are allocated */
  char name[64];
} Communicator;

/* nccl_communicator.c */
int emu_nccl_meet(Communicator *communicator); /* returns when all ranks have called it */
int emu_nccl_connect(Communicator *communicator); /* allocates the buffers, once */
void emu_nccl_rest(unsigned *tries); /* between two looks at shared memory */
int emu_nccl_lost_peer(Communicator *communicator, unsigned tries);

/* nccl_numbers.c */
enum { SUM = 0, PRODUCT = 1, MAX = 2, MIN = 3, AVERAGE = 4 };
size_t emu_nccl_size_of(int type);
int emu_nccl_is_carried(size_t bytes, int type);
void emu_nccl_reduce(Communicator *communicator, char *to, size_t offset, size_t bytes, int type,
                     int operation); /* over what all ranks have there in their slots */
