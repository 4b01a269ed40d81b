/* NCCL: sending and receiving between two ranks, through a cell of shared memory for each pair and
 * direction. Transfers of a group are queued, so that exchanges can't block each other. */
#include "nccl.h"

typedef struct {
  Communicator *communicator;
  char *buffer;
  size_t bytes, done;
  int peer;
  int sends; /* else it receives */
  int is_carried, is_finished;
} Transfer;

enum { MAX_TRANSFERS = 4096 };
static __thread Transfer queue[MAX_TRANSFERS];
static __thread int queued, group_depth;

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

static Cell *cell_of(const Transfer *transfer) {
  Room *room = transfer->communicator->room;
  int rank = transfer->communicator->rank, peer = transfer->peer;
  return transfer->sends ? &room->mail[rank][peer] : &room->mail[peer][rank];
}

/* Moves one part, if the cell is ready for it: empty for a sender, full for a receiver. */
static int advance(Transfer *transfer) {
  Cell *cell = cell_of(transfer);
  if (cell->full == (uint32_t)transfer->sends) return 0;
  size_t part = transfer->bytes - transfer->done;
  if (transfer->is_carried) {
    part = least(part, CELL_SIZE);
    char *buffer = transfer->buffer + transfer->done;
    if (transfer->sends) memcpy(cell->data, buffer, part);
    else memcpy(buffer, cell->data, part);
  }
  transfer->done += part;
  transfer->is_finished = transfer->done >= transfer->bytes;
  cell->full = transfer->sends;
  return 1;
}

static int use_same_cell(const Transfer *a, const Transfer *b) {
  return a->communicator == b->communicator && a->peer == b->peer && a->sends == b->sends;
}

/* Between two ranks, in one direction, order is kept. */
static int must_wait(int index) {
  for (int i = 0; i < index; i++)
    if (!queue[i].is_finished && use_same_cell(&queue[i], &queue[index])) return 1;
  return 0;
}

static int run_queue(void) {
  int result = NCCL_SUCCESS;
  unsigned tries = 0;
  for (int unfinished = queued; unfinished && !result;) {
    int moved = 0;
    for (int i = 0; i < queued; i++) {
      Transfer *transfer = &queue[i];
      if (transfer->is_finished || must_wait(i) || !advance(transfer)) continue;
      moved = 1;
      unfinished -= transfer->is_finished;
    }
    if (moved) continue;
    emu_nccl_rest(&tries);
    if (emu_nccl_lost_peer(queue[0].communicator, tries)) result = NCCL_REMOTE_ERROR;
  }
  queued = 0;
  return result;
}

static int transfer(
    Communicator *communicator, char *buffer, size_t count, int type, int peer, int sends) {
  if (communicator->size == 1 || peer == communicator->rank) return NCCL_SUCCESS;
  if (queued == MAX_TRANSFERS) return NCCL_INVALID_USAGE;
  if (emu_nccl_connect(communicator)) return NCCL_UNHANDLED_CUDA_ERROR;
  size_t bytes = count * emu_nccl_size_of(type);
  queue[queued++] = (Transfer){
    .communicator = communicator,
    .buffer = buffer,
    .bytes = bytes,
    .peer = peer,
    .sends = sends,
    .is_carried = emu_nccl_is_carried(bytes, type),
  };
  return group_depth ? NCCL_SUCCESS : run_queue();
}

ENTRY int ncclSend(char *from, size_t count, int type, int peer, Communicator *communicator,
                   void *stream) {
  return transfer(communicator, from, count, type, peer, 1);
}

ENTRY int ncclRecv(char *to, size_t count, int type, int peer, Communicator *communicator,
                   void *stream) {
  return transfer(communicator, to, count, type, peer, 0);
}

ENTRY int ncclGroupStart(void) {
  group_depth++;
  return NCCL_SUCCESS;
}

ENTRY int ncclGroupEnd(void) { return --group_depth ? NCCL_SUCCESS : run_queue(); }
