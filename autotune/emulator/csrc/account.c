/* Which process holds how much of which card. Processes that name the same state file share the
 * cards, and a dead process's memory comes back, as the driver gives it back. */
#include "emu.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>

typedef struct {
  int32_t pid, has_context, has_launched, has_engine;
  int64_t used;
} Holder;
typedef struct {
  int64_t used; /* by all holders and by processes that are not emulated */
  Holder holder[MAX_PROCESSES];
} Account;
typedef struct {
  uint32_t magic, unused;
  pthread_mutex_t lock;
  Account card[MAX_CARDS];
} State;
enum { MAGIC = 0x454d5531 };
static State *state;

/* 1. The shared state. */

/* The lock is robust: a process that is killed inside it does not leave the others waiting. */
static void initialise_state(void) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&state->lock, &attributes);
  for (int i = 0; i < machine.cards; i++) state->card[i].used = machine.card[i].foreign;
  state->magic = MAGIC;
}

/* Without a file, or with one that cannot be used, the state is this process's alone. */
__attribute__((constructor(103))) static void open_state(void) {
  if (!machine.cards) return;
  const char *path = getenv("AUTOTUNE_EMULATED_STATE");
  int fd = -1;
  if (path && *path) fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd >= 0) {
    flock(fd, LOCK_EX);
    if (ftruncate(fd, sizeof(State))) {
      close(fd);
      fd = -1;
    }
  }
  int flags = MAP_SHARED | (fd < 0 ? MAP_ANONYMOUS : 0);
  state = mmap(NULL, sizeof(State), PROT_READ | PROT_WRITE, flags, fd, 0);
  if (state->magic != MAGIC) initialise_state();
  if (fd >= 0) {
    flock(fd, LOCK_UN);
    close(fd);
  }
}

static void lock(void) {
  if (pthread_mutex_lock(&state->lock) == EOWNERDEAD) pthread_mutex_consistent(&state->lock);
}

static void unlock(void) { pthread_mutex_unlock(&state->lock); }

static void clear(Account *card, Holder *holder) {
  card->used -= holder->used;
  memset(holder, 0, sizeof *holder);
}

__attribute__((destructor)) static void give_back(void) {
  if (!state) return;
  lock();
  for (int i = 0; i < machine.cards; i++) {
    Account *card = &state->card[i];
    for (Holder *holder = card->holder; holder < card->holder + MAX_PROCESSES; holder++)
      if (holder->pid == getpid()) clear(card, holder);
  }
  unlock();
}

/* 2. Processes. */

/* The state letter in /proc; 'Z' without one, -1 if there is no file. */
static int process_state(int pid) {
  char path[32], text[512], letter = 'Z';
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  FILE *file = fopen(path, "re");
  if (!file) return -1;
  size_t length = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  text[length] = 0;
  /* The name, in brackets, may hold anything but is short: the letter is behind the last one. */
  char *bracket = strrchr(text, ')');
  if (bracket) sscanf(bracket + 1, " %c", &letter);
  return letter;
}

static int is_unknown(int pid) { return kill(pid, 0) && errno == ESRCH; }

/* Whether a process has ended; one that nobody has waited for yet is still listed. */
int emu_is_gone(int pid) {
  if (is_unknown(pid)) return 1;
  int letter = process_state(pid);
  if (letter < 0) return is_unknown(pid);
  return letter == 'Z' || letter == 'X';
}

static void clear_ended_processes(Account *card) {
  for (Holder *holder = card->holder; holder < card->holder + MAX_PROCESSES; holder++)
    if (holder->pid && holder->pid != getpid() && emu_is_gone(holder->pid)) clear(card, holder);
}

/* This process's entry; NULL if there are too many. */
static Holder *this_process(Account *card) {
  Holder *vacant = NULL;
  for (Holder *holder = card->holder; holder < card->holder + MAX_PROCESSES; holder++) {
    if (holder->pid == getpid()) return holder;
    if (!holder->pid && !vacant) vacant = holder;
  }
  if (vacant) vacant->pid = getpid();
  return vacant;
}

static Holder *this_process_on(int ordinal) {
  return this_process(&state->card[machine.physical[ordinal]]);
}

/* 3. Memory. */

/* A card's peak is always reached by a process that takes memory. */
static void note_card_peak(int physical) {
  Account *card = &state->card[physical];
  int64_t *peak = &emu_report->card_peak[physical];
  if (card->used > *peak) clear_ended_processes(card);
  if (card->used > *peak) *peak = card->used;
}

static int fits(int physical, int64_t bytes) {
  return state->card[physical].used + bytes <= machine.card[physical].memory;
}

/* With the lock held. */
static int take(int physical, int64_t bytes) {
  Account *card = &state->card[physical];
  if (bytes > 0 && !fits(physical, bytes)) clear_ended_processes(card);
  if (bytes > 0 && !fits(physical, bytes)) {
    emu_report->refused++;
    return OUT_OF_MEMORY;
  }
  Holder *holder = this_process(card);
  card->used += bytes;
  if (holder) holder->used += bytes;
  emu_note_use(physical, holder ? holder->used : 0);
  if (bytes > 0) note_card_peak(physical);
  return SUCCESS;
}

int emu_charge(int ordinal, int64_t bytes) {
  lock();
  int error = take(machine.physical[ordinal], bytes);
  unlock();
  return error;
}

void emu_note_held(void) {
  if (!emu_is_initialised()) return;
  for (int ordinal = 0; ordinal < machine.visible; ordinal++) emu_charge(ordinal, 0);
}

int64_t emu_used(int physical) {
  lock();
  clear_ended_processes(&state->card[physical]);
  int64_t used = state->card[physical].used;
  unlock();
  return used;
}

int emu_processes(int physical, int pids[], int64_t used[], int capacity) {
  int count = 0;
  lock();
  Account *card = &state->card[physical];
  clear_ended_processes(card);
  for (Holder *holder = card->holder; holder < card->holder + MAX_PROCESSES; holder++) {
    if (!holder->pid || !holder->used) continue;
    if (count < capacity) {
      pids[count] = holder->pid;
      used[count] = holder->used;
    }
    count++;
  }
  unlock();
  return count;
}

/* For tests: processes outside the emulation come to hold so much of a card. Refused where it is
 * not free. */
ENTRY int emu_set_foreign(int physical, int64_t bytes) {
  static int64_t foreign[MAX_CARDS];
  if (physical < 0 || physical >= machine.cards) return INVALID_DEVICE;
  lock();
  int64_t added = bytes - foreign[physical];
  int can_hold = fits(physical, added);
  if (can_hold) {
    state->card[physical].used += added;
    foreign[physical] = bytes;
  }
  unlock();
  return can_hold ? SUCCESS : OUT_OF_MEMORY;
}

/* 4. Contexts. */

int emu_enter(int ordinal) {
  static __thread int entered_by[MAX_CARDS]; /* number of the process */
  int error = emu_initialise();
  if (error) return error;
  if (ordinal < 0 || ordinal >= machine.visible) return INVALID_DEVICE;
  if (entered_by[ordinal] == getpid()) return SUCCESS;
  const Card *card = emu_card(ordinal);
  if (card->state == CARD_BUSY || card->state == CARD_LOST) return DEVICES_UNAVAILABLE;
  lock();
  Holder *holder = this_process_on(ordinal);
  if (holder && !holder->has_context) {
    error = take(machine.physical[ordinal], card->context);
    holder->has_context = !error;
  }
  unlock();
  if (!error) entered_by[ordinal] = getpid();
  return error;
}

int emu_has_context(int ordinal) {
  if (!emu_is_initialised()) return 0;
  lock();
  Holder *holder = this_process_on(ordinal);
  int has_context = holder && holder->has_context;
  unlock();
  return has_context;
}

/* Kernels are loaded into the context as they are first used; here all at once, since their uses
 * are not recorded. */
void emu_first_launch(int ordinal) {
  static __thread int launched_by[MAX_CARDS]; /* number of the process */
  emu_report->launches++;
  if (launched_by[ordinal] == getpid() || emu_enter(ordinal)) return;
  launched_by[ordinal] = getpid();
  lock();
  Holder *holder = this_process_on(ordinal);
  if (holder && !holder->has_launched)
    holder->has_launched = !take(machine.physical[ordinal], emu_card(ordinal)->kernels);
  unlock();
}

/* An engine has kernels of its own, which are loaded while it profiles. */
ENTRY void emu_engine_kernels(void) {
  int ordinal = emu_device();
  if (emu_enter(ordinal)) return;
  lock();
  Holder *holder = this_process_on(ordinal);
  if (holder && !holder->has_engine)
    holder->has_engine = !take(machine.physical[ordinal], emu_card(ordinal)->engine_kernels);
  unlock();
}
