/* What is told afterwards. It is a mapped file, so that it is whole however the process ends: by os._exit, by a signal, by the
 * kernel. Without a folder to write to, it lives in memory alone. */
#include "emu.h"
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>

enum { ROOM_FOR_STUBS = 1 << 14 };
static char before_all[sizeof(Report) + ROOM_FOR_STUBS * sizeof(uint32_t)];
Report *emu_report = (Report *)before_all; /* another library's constructor may call us before ours has run */
static int now;                            /* the phase */

static size_t size_of_report(void) { return sizeof(Report) + (size_t)emu_stub_count * sizeof(uint32_t); }

static Report *map_report(int fd) {
  Report *made = mmap(NULL, size_of_report(), PROT_READ | PROT_WRITE, MAP_SHARED | (fd < 0 ? MAP_ANONYMOUS : 0), fd, 0);
  if (made == MAP_FAILED) abort();
  return made;
}

void emu_begin_report(void) {
  emu_report = map_report(-1);
  emu_report->magic = 0x454d5532;
  emu_report->version = 2;
  emu_report->pid = getpid();
  emu_report->parent = getppid();
  emu_report->stubs = emu_stub_count;
  emu_report->phases = 1;
  snprintf(emu_report->phase[0].name, sizeof emu_report->phase[0].name, "start");
  now = 0;
}

/* Only of a process that uses CUDA: a command starts many that don't. */
void emu_keep_report(void) {
  const char *folder = getenv("AUTOTUNE_EMULATOR_REPORT");
  if (!folder || !*folder) return;
  char path[4096];
  struct timespec time;
  clock_gettime(CLOCK_REALTIME, &time); /* a number of a process may come again */
  snprintf(path, sizeof path, "%s/%d-%lx.report", folder, getpid(), (long)time.tv_nsec);
  int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return;
  if (!ftruncate(fd, size_of_report())) {
    Report *kept = map_report(fd);
    memcpy(kept, emu_report, size_of_report());
    emu_report = kept; /* the other stays mapped: a thread may be counting in it */
  }
  close(fd);
}

/* A child counts for itself. */
__attribute__((constructor(101))) static void begin_and_watch_forks(void) {
  emu_begin_report();
  pthread_atfork(NULL, NULL, emu_begin_report);
}

void emu_note_use(int physical, int64_t used) {
  if (used > emu_report->peak[physical]) emu_report->peak[physical] = used;
  int64_t *peak = &emu_report->phase[now].peak[physical];
  if (used > *peak) *peak = used;
}

/* From here on, memory is a phase's of this name; what is held already counts for it. */
ENTRY void emu_phase(const char *name) {
  int found = 0;
  while (found < emu_report->phases && strncmp(emu_report->phase[found].name, name, 31)) found++;
  if (found == MAX_PHASES) return;
  if (found == emu_report->phases) {
    snprintf(emu_report->phase[found].name, 32, "%s", name);
    emu_report->phases++;
  }
  now = found;
  for (int i = 0; i < machine.visible && emu_is_initialised(); i++) emu_charge(i, 0);
}

/* torch's own peaks on one of this process's devices. */
ENTRY void emu_note_torch(int ordinal, int64_t allocated, int64_t reserved) {
  if (ordinal < 0 || ordinal >= machine.visible) return;
  int64_t *of_allocated = &emu_report->torch_allocated[machine.physical[ordinal]];
  int64_t *of_reserved = &emu_report->torch_reserved[machine.physical[ordinal]];
  if (allocated > *of_allocated) *of_allocated = allocated;
  if (reserved > *of_reserved) *of_reserved = reserved;
}

/* Of this process on a card, for whoever asks from Python. */
ENTRY int64_t emu_peak(int physical) { return emu_report->peak[physical]; }
