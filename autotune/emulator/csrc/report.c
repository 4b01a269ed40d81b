/* Figures of this process. They are in a mapped file, so that they are complete however the process
 * ends: by os._exit, by a signal, by the kernel. Without a folder to write to, they live in memory
 * alone. autotune/emulator/reports.py reads the file. */
#include "emu.h"
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>

enum { MAGIC = 0x454d5532, VERSION = 2, STUBS_BEFORE_START = 1 << 14 };

/* Another library's constructor may call this one before its own constructors have run. */
static char report_before_start[sizeof(Report) + STUBS_BEFORE_START * sizeof(uint32_t)];
Report *emu_report = (Report *)report_before_start;
static int current_phase;

static size_t size_of_report(void) {
  return sizeof(Report) + (size_t)emu_stub_count * sizeof(uint32_t);
}

/* Of a file, or of memory alone (-1). */
static Report *map_report(int fd) {
  int flags = MAP_SHARED | (fd < 0 ? MAP_ANONYMOUS : 0);
  Report *report = mmap(NULL, size_of_report(), PROT_READ | PROT_WRITE, flags, fd, 0);
  if (report == MAP_FAILED) abort();
  return report;
}

static void begin_report(void) {
  emu_report = map_report(-1);
  emu_report->magic = MAGIC;
  emu_report->version = VERSION;
  emu_report->pid = getpid();
  emu_report->parent = getppid();
  emu_report->stubs = emu_stub_count;
  emu_report->phases = 1;
  snprintf(emu_report->phase[0].name, PHASE_NAME, "start");
  current_phase = 0;
}

/* A child counts for itself. */
__attribute__((constructor(101))) static void begin_and_watch_forks(void) {
  begin_report();
  pthread_atfork(NULL, NULL, begin_report);
}

/* Only of a process that uses CUDA: a command starts many that don't. */
void emu_keep_report(void) {
  const char *folder = getenv("AUTOTUNE_EMULATOR_REPORT");
  if (!folder || !*folder) return;

  /* 1. A file of its own: a number of a process may come again. */
  char path[4096];
  struct timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  snprintf(path, sizeof path, "%s/%d-%lx.report", folder, getpid(), (long)time.tv_nsec);
  int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return;

  /* 2. The figures so far. The earlier mapping stays: a thread may be counting in it. */
  if (!ftruncate(fd, size_of_report())) {
    Report *in_file = map_report(fd);
    memcpy(in_file, emu_report, size_of_report());
    emu_report = in_file;
  }
  close(fd);
}

static void raise_to(int64_t *peak, int64_t value) {
  if (value > *peak) *peak = value;
}

void emu_note_use(int physical, int64_t used) {
  raise_to(&emu_report->peak[physical], used);
  raise_to(&emu_report->phase[current_phase].peak[physical], used);
}

static int place_of_phase(const char *name) {
  int place = 0;
  while (place < emu_report->phases &&
         strncmp(emu_report->phase[place].name, name, PHASE_NAME - 1))
    place++;
  return place;
}

int emu_begin_phase(const char *name) {
  int place = place_of_phase(name);
  if (place == MAX_PHASES) return 0;
  if (place == emu_report->phases) {
    snprintf(emu_report->phase[place].name, PHASE_NAME, "%s", name);
    emu_report->phases++;
  }
  current_phase = place;
  return 1;
}
