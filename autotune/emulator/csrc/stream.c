/* Streams and events. Nothing runs, so the question is only when work counts as finished, which
 * decides when torch hands out memory anew that two streams have used. Two answers bracket a real
 * card's:
 *
 *   lag 0    at once: the least memory is kept waiting
 *   lag n    when the program waits for it, or n launches later. A card's queue of launches holds
 *            about a thousand, so the host is never further ahead: with n = 1024 the most memory is
 *            kept waiting
 *
 * Records are numbered over all streams. A stream has finished all records up to a number. */
#include "emu.h"
#include <time.h>

enum { MAX_AWAITED = 8 };
static const double LONGEST_MS = 2000; /* for programs that ask repeatedly, and launch nothing */

typedef struct Stream Stream;
struct Stream {
  int priority, capturing;
  unsigned flags;
  unsigned long long id;
  void *graph;
  int64_t finished; /* the last record of this stream that counts as done */
  struct {
    Stream *stream;
    int64_t record;
  } awaited[MAX_AWAITED]; /* the latest events that it waited for */
  int next_awaited;
};
typedef struct {
  Stream *stream;
  int64_t record, launches;
  double milliseconds;
} Event;

static Stream default_streams[MAX_CARDS];
static _Atomic int64_t records, finished_everywhere;
static _Atomic unsigned long long last_id = 1;

/* 1. When work is finished. */

double emu_milliseconds(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

/* 0, 1 and 2 are names of default streams. */
static Stream *stream_of(void *handle) {
  return (uintptr_t)handle < 16 ? &default_streams[emu_device()] : handle;
}

static void finish(Stream *stream, int64_t record) {
  if (record > stream->finished) stream->finished = record;
}

void emu_synchronise(void *handle) {
  Stream *stream = stream_of(handle);
  finish(stream, records);
  for (int i = 0; i < MAX_AWAITED; i++)
    if (stream->awaited[i].stream) finish(stream->awaited[i].stream, stream->awaited[i].record);
}

void emu_synchronise_all(void) { finished_everywhere = records; }

static int is_finished(const Event *event) {
  if (!machine.lag || !event->stream) return 1;
  if (event->record <= finished_everywhere || event->record <= event->stream->finished) return 1;
  if (emu_report->launches - event->launches >= machine.lag) return 1;
  return emu_milliseconds() - event->milliseconds > LONGEST_MS;
}

/* 2. Streams. */

ENTRY int cudaStreamCreateWithPriority(void **handle, unsigned flags, int priority) {
  int error = emu_enter(emu_device());
  if (error) return error;
  Stream *stream = emu_handle();
  stream->priority = priority;
  stream->flags = flags;
  stream->id = ++last_id;
  *handle = stream;
  return SUCCESS;
}
ALIAS(cuStreamCreateWithPriority, cudaStreamCreateWithPriority)

ENTRY int cudaStreamCreateWithFlags(void **stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
ALIAS(cuStreamCreate, cudaStreamCreateWithFlags)

ENTRY int cudaStreamCreate(void **stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

/* Its memory stays: an event may still refer to it. */
ENTRY int cudaStreamDestroy(void *stream) { return SUCCESS; }
ALIAS(cuStreamDestroy_v2, cudaStreamDestroy)
ALIAS(cuStreamDestroy, cudaStreamDestroy)

ENTRY int cudaStreamGetPriority(void *stream, int *priority) {
  *priority = stream_of(stream)->priority;
  return SUCCESS;
}
ALIAS(cuStreamGetPriority, cudaStreamGetPriority)

ENTRY int cudaStreamGetFlags(void *stream, unsigned *flags) {
  *flags = stream_of(stream)->flags;
  return SUCCESS;
}
ALIAS(cuStreamGetFlags, cudaStreamGetFlags)

ENTRY int cudaStreamGetDevice(void *stream, int *device) {
  *device = emu_device();
  return SUCCESS;
}
ALIAS(cuStreamGetDevice, cudaStreamGetDevice)

ENTRY int cudaStreamGetId(void *stream, unsigned long long *id) {
  *id = stream_of(stream)->id;
  return SUCCESS;
}
ALIAS(cuStreamGetId, cudaStreamGetId)

ENTRY int cudaStreamSynchronize(void *stream) {
  emu_synchronise(stream);
  return SUCCESS;
}
ALIAS(cuStreamSynchronize, cudaStreamSynchronize)

ENTRY int cudaDeviceSynchronize(void) {
  emu_synchronise_all();
  return SUCCESS;
}
ALIAS(cuCtxSynchronize, cudaDeviceSynchronize)

/* A stream is always idle, without the lag: torch's allocator queries only events. */
ENTRY int cudaStreamQuery(void *stream) { return SUCCESS; }
ALIAS(cuStreamQuery, cudaStreamQuery)

ENTRY int cudaStreamWaitEvent(void *handle, void *awaited, unsigned flags) {
  Stream *stream = stream_of(handle);
  Event *event = awaited;
  if (!event || !event->stream) return SUCCESS;
  int slot = stream->next_awaited++ % MAX_AWAITED;
  stream->awaited[slot].stream = event->stream;
  stream->awaited[slot].record = event->record;
  return SUCCESS;
}
ALIAS(cuStreamWaitEvent, cudaStreamWaitEvent)

/* Work handed to the host runs at once, in the order in which it was given. */
ENTRY int cudaLaunchHostFunc(void *stream, void (*work)(void *), void *argument) {
  work(argument);
  return SUCCESS;
}
ALIAS(cuLaunchHostFunc, cudaLaunchHostFunc)

ENTRY int cudaStreamAddCallback(
    void *stream, void (*work)(void *, int, void *), void *argument, unsigned flags) {
  work(stream, SUCCESS, argument);
  return SUCCESS;
}
ALIAS(cuStreamAddCallback, cudaStreamAddCallback)

/* 3. Events. */

ENTRY int cudaEventCreateWithFlags(void **event, unsigned flags) {
  *event = emu_handle();
  return SUCCESS;
}
ALIAS(cuEventCreate, cudaEventCreateWithFlags)

ENTRY int cudaEventCreate(void **event) { return cudaEventCreateWithFlags(event, 0); }

ENTRY int cudaEventDestroy(void *event) {
  free(event);
  return SUCCESS;
}
ALIAS(cuEventDestroy_v2, cudaEventDestroy)
ALIAS(cuEventDestroy, cudaEventDestroy)

ENTRY int cudaEventRecord(void *handle, void *stream) {
  Event *event = handle;
  if (!event) return INVALID_VALUE;
  *event = (Event){stream_of(stream), ++records, emu_report->launches, emu_milliseconds()};
  return SUCCESS;
}
ALIAS(cuEventRecord, cudaEventRecord)

ENTRY int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) {
  return cudaEventRecord(event, stream);
}
ALIAS(cuEventRecordWithFlags, cudaEventRecordWithFlags)

ENTRY int cudaEventQuery(void *event) { return is_finished(event) ? SUCCESS : NOT_READY; }
ALIAS(cuEventQuery, cudaEventQuery)

ENTRY int cudaEventSynchronize(void *handle) {
  Event *event = handle;
  if (event->stream) finish(event->stream, event->record);
  return SUCCESS;
}
ALIAS(cuEventSynchronize, cudaEventSynchronize)

/* The host's time between the two, which is no property of a card. */
ENTRY int cudaEventElapsedTime(float *milliseconds, void *from, void *to) {
  *milliseconds = ((Event *)to)->milliseconds - ((Event *)from)->milliseconds;
  return SUCCESS;
}
ALIAS(cudaEventElapsedTime_v2, cudaEventElapsedTime)
ALIAS(cuEventElapsedTime, cudaEventElapsedTime)
ALIAS(cuEventElapsedTime_v2, cudaEventElapsedTime)

/* Of another process: what it waits for is finished. */
ENTRY int cudaIpcOpenEventHandle(void **event, ...) { return cudaEventCreate(event); }

/* 4. Capture: launches vanish either way, so a graph is only a name. */

enum { CAPTURE_NONE = 0, CAPTURE_ACTIVE = 1 };

ENTRY int cudaStreamIsCapturing(void *stream, int *status) {
  *status = stream_of(stream)->capturing ? CAPTURE_ACTIVE : CAPTURE_NONE;
  return SUCCESS;
}
ALIAS(cuStreamIsCapturing, cudaStreamIsCapturing)

static void capture_info(Stream *stream, int *status, unsigned long long *id, void **graph) {
  if (status) *status = stream->capturing ? CAPTURE_ACTIVE : CAPTURE_NONE;
  if (id) *id = stream->id;
  if (graph) *graph = stream->graph;
}

ENTRY int cudaStreamGetCaptureInfo_v3(void *stream, int *status, unsigned long long *id,
                                      void **graph, void **before, void **edges, size_t *count) {
  capture_info(stream_of(stream), status, id, graph);
  if (before) *before = NULL;
  if (edges) *edges = NULL;
  if (count) *count = 0;
  return SUCCESS;
}
ALIAS(cuStreamGetCaptureInfo_v3, cudaStreamGetCaptureInfo_v3)

ENTRY int cudaStreamGetCaptureInfo_v2(void *stream, int *status, unsigned long long *id,
                                      void **graph, void **before, size_t *count) {
  return cudaStreamGetCaptureInfo_v3(stream, status, id, graph, before, NULL, count);
}
ALIAS(cuStreamGetCaptureInfo_v2, cudaStreamGetCaptureInfo_v2)

#if CUDA_MAJOR >= 13
ALIAS(cudaStreamGetCaptureInfo, cudaStreamGetCaptureInfo_v3)
#else
ENTRY int cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id) {
  capture_info(stream_of(stream), status, id, NULL);
  return SUCCESS;
}
#endif

static int begin_capture(Stream *stream, void *graph) {
  stream->capturing = 1;
  stream->id = ++last_id;
  stream->graph = graph;
  return SUCCESS;
}

ENTRY int cudaStreamBeginCapture(void *stream, int mode) {
  return begin_capture(stream_of(stream), emu_handle());
}
ALIAS(cuStreamBeginCapture_v2, cudaStreamBeginCapture)

ENTRY int cudaStreamBeginCaptureToGraph(void *stream, void *graph, ...) {
  return begin_capture(stream_of(stream), graph);
}
ALIAS(cuStreamBeginCaptureToGraph, cudaStreamBeginCaptureToGraph)

ENTRY int cudaStreamEndCapture(void *stream, void **graph) {
  stream_of(stream)->capturing = 0;
  *graph = stream_of(stream)->graph;
  return SUCCESS;
}
ALIAS(cuStreamEndCapture, cudaStreamEndCapture)

ENTRY int cudaThreadExchangeStreamCaptureMode(int *mode) {
  static __thread int current_mode;
  int previous_mode = current_mode;
  current_mode = *mode;
  *mode = previous_mode;
  return SUCCESS;
}
ALIAS(cuThreadExchangeStreamCaptureMode, cudaThreadExchangeStreamCaptureMode)

ENTRY int cudaGraphCreate(void **graph, unsigned flags) {
  *graph = emu_handle();
  return SUCCESS;
}
ALIAS(cuGraphCreate, cudaGraphCreate)

ENTRY int cudaGraphInstantiate(void **executable, void *graph, unsigned long long flags) {
  *executable = emu_handle();
  return SUCCESS;
}
ALIAS(cudaGraphInstantiateWithFlags, cudaGraphInstantiate)
ALIAS(cuGraphInstantiateWithFlags, cudaGraphInstantiate)

ENTRY int cudaGraphGetNodes(void *graph, void **nodes, size_t *count) {
  *count = 0;
  return SUCCESS;
}
ALIAS(cuGraphGetNodes, cudaGraphGetNodes)

ENTRY int cudaGraphLaunch(void *executable, void *stream) {
  emu_first_launch(emu_device());
  return SUCCESS;
}
ALIAS(cuGraphLaunch, cudaGraphLaunch)
