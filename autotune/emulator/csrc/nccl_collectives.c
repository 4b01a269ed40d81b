/* NCCL: operations of all ranks. Each rank writes a part into its slot, all meet, each reads what
 * it needs, and all meet again before the slots are written anew. */
#include "nccl.h"

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* Whether the operation ends here, with this result: for one rank, or where the payload is too
 * large to be carried, or where the card has no memory for the buffers. `largest` is the payload of
 * all ranks together. */
static int ends_early(Communicator *communicator, const void *from, void *to, size_t bytes,
                      size_t largest, int type, int *result) {
  *result = emu_nccl_connect(communicator);
  if (*result) return 1;
  if (communicator->size == 1) {
    if (from && to) emu_copy(to, from, bytes);
    *result = NCCL_SUCCESS;
    return 1;
  }
  if (emu_nccl_is_carried(largest, type)) return 0;
  *result = emu_nccl_meet(communicator);
  return 1;
}

/* On ranks with a destination. */
static int reduce_to(const char *from, char *to, size_t count, int type, int operation,
                     Communicator *communicator) {
  size_t bytes = count * emu_nccl_size_of(type);
  int result = NCCL_SUCCESS;
  if (ends_early(communicator, from, to, bytes, bytes, type, &result)) return result;
  char *slot = communicator->room->slot[communicator->rank];
  for (size_t done = 0; done < bytes && !result; done += SLOT_SIZE) {
    size_t part = least(bytes - done, SLOT_SIZE);
    memcpy(slot, from + done, part);
    result = emu_nccl_meet(communicator);
    if (!result && to) emu_nccl_reduce(communicator, to + done, 0, part, type, operation);
    if (!result) result = emu_nccl_meet(communicator);
  }
  return result;
}

ENTRY int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation,
                        Communicator *communicator, void *stream) {
  return reduce_to(from, to, count, type, operation, communicator);
}

ENTRY int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root,
                     Communicator *communicator, void *stream) {
  void *destination = communicator->rank == root ? to : NULL;
  return reduce_to(from, destination, count, type, operation, communicator);
}

ENTRY int ncclBroadcast(const char *from, char *to, size_t count, int type, int root,
                        Communicator *communicator, void *stream) {
  size_t bytes = count * emu_nccl_size_of(type);
  int result = NCCL_SUCCESS;
  if (ends_early(communicator, from, to, bytes, bytes, type, &result)) return result;
  char *slot = communicator->room->slot[root];
  for (size_t done = 0; done < bytes && !result; done += SLOT_SIZE) {
    size_t part = least(bytes - done, SLOT_SIZE);
    if (communicator->rank == root) memcpy(slot, from + done, part);
    result = emu_nccl_meet(communicator);
    if (!result && to) memcpy(to + done, slot, part);
    if (!result) result = emu_nccl_meet(communicator);
  }
  return result;
}

ENTRY int ncclBcast(char *buffer, size_t count, int type, int root, Communicator *communicator,
                    void *stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, communicator, stream);
}

ENTRY int ncclAllGather(const char *from, char *to, size_t count, int type,
                        Communicator *communicator, void *stream) {
  size_t bytes = count * emu_nccl_size_of(type);
  int result = NCCL_SUCCESS;
  if (ends_early(communicator, from, to, bytes, bytes * communicator->size, type, &result))
    return result;
  Room *room = communicator->room;
  for (size_t done = 0; done < bytes && !result; done += SLOT_SIZE) {
    size_t part = least(bytes - done, SLOT_SIZE);
    memcpy(room->slot[communicator->rank], from + done, part);
    result = emu_nccl_meet(communicator);
    for (int rank = 0; rank < communicator->size && !result; rank++)
      memcpy(to + rank * bytes + done, room->slot[rank], part);
    if (!result) result = emu_nccl_meet(communicator);
  }
  return result;
}

/* A slot has a share for each rank. */
ENTRY int ncclReduceScatter(const char *from, char *to, size_t count, int type, int operation,
                            Communicator *communicator, void *stream) {
  size_t bytes = count * emu_nccl_size_of(type);
  size_t share = SLOT_SIZE / communicator->size & ~(size_t)63;
  int result = NCCL_SUCCESS;
  if (ends_early(communicator, from, to, bytes, bytes * communicator->size, type, &result))
    return result;
  char *slot = communicator->room->slot[communicator->rank];
  size_t offset = communicator->rank * share;
  for (size_t done = 0; done < bytes && !result; done += share) {
    size_t part = least(bytes - done, share);
    for (int rank = 0; rank < communicator->size; rank++)
      memcpy(slot + rank * share, from + rank * bytes + done, part);
    result = emu_nccl_meet(communicator);
    if (!result) emu_nccl_reduce(communicator, to + done, offset, part, type, operation);
    if (!result) result = emu_nccl_meet(communicator);
  }
  return result;
}
